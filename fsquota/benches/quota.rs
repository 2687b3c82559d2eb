//! What limits cost with 0 to 100,000 projects there, on XFS and ext4: setting and reading one directory's, and finding
//! a free number. Ours, the bare calls and `xfs_quota` take turns.
//!
//! `cargo xtask bench quota` runs it in a guest. Elsewhere it takes a directory of a mounted file system, and the most
//! projects to measure with: `cargo bench -p nodekeel-fsquota --bench quota -- /mnt 10000`. Under emulation a system call
//! costs many times what it does otherwise: ratios hold, times don't. Each size is written as soon as it is measured; where
//! a machine is too slow to get to the next one in time, that is said, and the bench ends.

use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nodekeel_fsquota::testing::Bare;
use nodekeel_fsquota::{Bytes, Change, Inodes, Kind, Limit, ProjectId, ProjectQuota, QuotaSetter as _};
use testbed::bench::{BenchRow, Rows};
use testbed::guest::inside::{Disk, FileSystem};

const PROJECTS: [u32; 4] = [0, 1_000, 10_000, 100_000];
const ROUNDS: usize = 101;
/// The peer is a process each time.
const PEER_ROUNDS: usize = 3;
/// With so many projects the peer's list takes seconds, and is asked for once.
const MANY: u32 = 10_000;
/// How long a file system may take until its last size is there: both are done within ten minutes.
const FILLED_WITHIN: Duration = Duration::from_secs(180);
/// How many projects are made between two looks at the clock.
const STRIDE: usize = 500;

fn main() -> Result<()> {
    // Cargo calls with `--bench`.
    let given: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let mut rows = Rows::new("quota");
    match given.as_slice() {
        [] => on_disks(&mut rows)?,
        [directory] => measure(Path::new(directory), u32::MAX, &mut rows)?,
        [directory, most, ..] => measure(Path::new(directory), most.parse()?, &mut rows)?,
    }
    rows.finish().map(drop)
}

/// On the guest's disk, XFS and then ext4.
fn on_disks(rows: &mut Rows) -> Result<()> {
    for kind in [FileSystem::Xfs, FileSystem::Ext4] {
        let mounted = Disk::take()?.mount(kind, "prjquota")?;
        measure(mounted.path(), u32::MAX, rows)?;
    }
    Ok(())
}

fn measure(directory: &Path, most: u32, rows: &mut Rows) -> Result<()> {
    let (mut there, end) = (0, Instant::now() + FILLED_WITHIN);
    let version = testbed::output(Command::new("xfs_quota").arg("-V"))?;
    let version = version.trim().rsplit(' ').next().unwrap_or("unknown");
    for projects in PROJECTS.into_iter().filter(|projects| *projects <= most) {
        let quota = ProjectQuota::open(directory)?;
        let start = Instant::now();
        let filled = fill(&quota, there..projects, end)?;
        println!("{}: projects {there} to {filled} in {:?}", quota.file_system().kind, start.elapsed());
        there = filled;
        let bench =
            Bench { quota, directory: directory.into(), projects: there, version: version.to_owned() };
        rows.add(bench.rows()?)?;
        if there < projects {
            println!("no time for {projects} projects: {there} are the most that were measured");
            break;
        }
    }
    Ok(())
}

/// Makes projects as long as there is time; how many there are then. Limits alone take a number, too, and are made much
/// faster than directories.
fn fill(quota: &ProjectQuota, offsets: Range<u32>, end: Instant) -> Result<u32> {
    for first in offsets.clone().step_by(STRIDE) {
        if Instant::now() > end {
            return Ok(first);
        }
        for offset in (first..offsets.end).take(STRIDE) {
            Bare(quota).limit(number(quota, offset)?, 1024, 100)?;
        }
    }
    Ok(offsets.end)
}

fn number(quota: &ProjectQuota, offset: u32) -> Result<ProjectId> {
    ProjectId::new(Bare(quota).range().first().get() + offset).context("beyond the last number")
}

struct Bench {
    quota: ProjectQuota,
    directory: PathBuf,
    projects: u32,
    /// Of the peer.
    version: String,
}

impl Bench {
    fn rows(&self) -> Result<[BenchRow; 3]> {
        let peer = self.peer_finds()?;
        Ok([self.set_and_read()?, self.next_number(peer)?, self.first_number(peer)?])
    }

    fn row(&self, what: &str, work: &str, ours: f64, peer: f64, limit: f64) -> BenchRow {
        let kind = self.quota.file_system().kind;
        let work = format!("{work}; {kind} with {} projects", self.projects);
        BenchRow::new(format!("{what}_{kind}_{}", self.projects), work, "us", ours)
            .peer("xfs_quota", &self.version, peer)
            .limit(limit)
    }

    /// A number that nobody has asked for, for the bare calls of one measurement: of one that was asked for, the kernel has
    /// kept the answer.
    fn untouched(&self, measurement: u32, round: usize) -> Result<ProjectId> {
        number(&self.quota, self.projects + 500 + measurement * 150 + u32::try_from(round)?)
    }

    /// How often the peer is run.
    fn peer_rounds(&self) -> usize {
        if self.projects < MANY { PEER_ROUNDS } else { 1 }
    }

    /// A directory, which is gone when the work is done.
    fn with_directory(&self, work: impl FnOnce(&File, &Path) -> Result<f64>) -> Result<f64> {
        let path = self.directory.join("measured");
        fs::create_dir(&path)?;
        let dir = File::open(&path)?;
        let took = work(&dir, &path)?;
        self.quota.clear(dir.as_fd())?;
        fs::remove_dir(&path)?;
        Ok(took)
    }

    fn set_and_read(&self) -> Result<BenchRow> {
        let change = Change { bytes: Limit::At(Bytes(1 << 20)), inodes: Limit::At(Inodes(100)) };
        let bare = Bare(&self.quota);
        let (mut ours, mut limits, mut peers) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let free = self.untouched(0, round)?;
            ours.push(self.with_directory(|dir, _| {
                timed(|| Ok((self.quota.set(dir.as_fd(), change)?, self.quota.status(dir.as_fd())?)))
            })?);
            limits.push(self.with_directory(|dir, _| {
                timed(|| {
                    bare.limit(free, 1024, 100)?;
                    bare.tag(dir.as_fd(), free)?;
                    Ok(bare.is_taken(free)?)
                })
            })?);
            if round < self.peer_rounds() {
                peers.push(self.with_directory(|_, path| self.peer_sets_and_reads(path, free))?);
            }
        }
        let work = "give a new directory both limits and read them back";
        Ok(self.row("set_get", work, median(ours), median(peers), median(limits)))
    }

    fn peer_sets_and_reads(&self, path: &Path, free: ProjectId) -> Result<f64> {
        let commands = [
            format!("project -s -p {} {free}", path.display()),
            format!("limit -p bhard=1m ihard=100 {free}"),
            format!("quota -p -N -b -i {free}"),
        ];
        timed(|| self.xfs_quota(&commands))
    }

    fn xfs_quota(&self, commands: &[String]) -> Result<String> {
        let mut command = Command::new("xfs_quota");
        command.arg("-x");
        if self.quota.file_system().kind == Kind::Ext4 {
            command.arg("-f");
        }
        command.args(commands.iter().flat_map(|one| ["-c", one]));
        testbed::output(command.arg(&self.directory))
    }

    /// As in a process that has given numbers before.
    fn next_number(&self, peer: f64) -> Result<BenchRow> {
        let bare = Bare(&self.quota);
        bare.find_free()?;
        let (mut ours, mut limits) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let free = self.untouched(1, round)?;
            ours.push(timed(|| Ok(bare.find_free()?))?);
            limits.push(timed(|| Ok(bare.is_taken(free)?))?);
        }
        let limit = median(limits);
        let row = self.row("next_id", "find a free number", median(ours), peer, limit);
        Ok(row.at_most(limit * 4.0))
    }

    /// As in a process that has just started.
    fn first_number(&self, peer: f64) -> Result<BenchRow> {
        let (mut ours, mut limits) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let free = self.untouched(2, round)?;
            let quota = ProjectQuota::open(&self.directory)?;
            ours.push(timed(|| Ok(Bare(&quota).find_free()?))?);
            limits.push(timed(|| Ok(Bare(&quota).is_taken(free)?))?);
        }
        let work = "find a free number, the first of a process";
        Ok(self.row("first_id", work, median(ours), peer, median(limits)))
    }

    /// The way of those who run a program: list all, take the largest number and one more.
    fn peer_finds(&self) -> Result<f64> {
        let report = || self.xfs_quota(&["report -p -n -N".to_owned()]);
        let took = (0..self.peer_rounds()).map(|_| timed(report)).collect::<Result<Vec<f64>>>()?;
        Ok(median(took))
    }
}

/// Microseconds.
fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<f64> {
    let start = Instant::now();
    let done = work();
    let took = start.elapsed();
    done.map(|_| took.as_secs_f64() * 1e6)
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

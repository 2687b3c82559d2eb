//! The cost of limits with 0 to 100,000 existing projects, on XFS and ext4: setting and reading the limits of
//! one directory, compared with the same system calls and with the indispensable ones, and finding a free number. Our
//! library, the bare system calls and `xfs_quota` take turns.
//!
//! `cargo xtask bench quota` runs it in a guest. Elsewhere pass a directory of a mounted file system, and the
//! maximum number of projects: `cargo bench -p nodekeel-fsquota --bench quota -- /mnt 10000`. Under emulation
//! a system call costs many times as much: ratios hold, times don't. Each size is reported as soon as it is
//! measured; if the host is too slow to reach the next size in time, the bench reports that and ends.

use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nodekeel_fsquota::testing::RawQuotaCalls;
use nodekeel_fsquota::{
    Bytes, FileSystemKind, Inodes, LimitChange, ProjectId, ProjectQuota, QuotaChange, QuotaSetter as _,
};
use testbed::bench::{BenchRow, RowWriter};
use testbed::guest::disk::{FileSystem, GuestDisk};

const PROJECTS: [u32; 4] = [0, 1_000, 10_000, 100_000];
const ROUNDS: usize = 101;
/// The peer starts a process each time.
const PEER_ROUNDS: usize = 3;
/// From this number of projects on, the peer's list takes seconds and is measured once.
const MANY: u32 = 10_000;
/// Time limit for one file system to reach its last size, so that both are done within ten minutes.
const FILLED_WITHIN: Duration = Duration::from_secs(180);
/// Number of projects that are created between two checks of the time limit.
const STRIDE: usize = 500;

fn main() -> Result<()> {
    // Cargo passes `--bench`.
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let mut rows = RowWriter::new("quota");
    match arguments.as_slice() {
        [] => measure_disks(&mut rows)?,
        [directory] => measure(Path::new(directory), u32::MAX, &mut rows)?,
        [directory, most, ..] => measure(Path::new(directory), most.parse()?, &mut rows)?,
    }
    rows.finish().map(drop)
}

/// Measures on the guest's disk, XFS and then ext4.
fn measure_disks(rows: &mut RowWriter) -> Result<()> {
    for kind in [FileSystem::Xfs, FileSystem::Ext4] {
        let mounted = GuestDisk::acquire()?.format_and_mount(kind, "prjquota")?;
        measure(mounted.mount_point(), u32::MAX, rows)?;
    }
    Ok(())
}

fn measure(directory: &Path, most: u32, rows: &mut RowWriter) -> Result<()> {
    let (mut existing, end) = (0, Instant::now() + FILLED_WITHIN);
    let version = testbed::command_output(Command::new("xfs_quota").arg("-V"))?;
    let version = version.trim().rsplit(' ').next().unwrap_or("unknown");
    for projects in PROJECTS.into_iter().filter(|projects| *projects <= most) {
        let quota = ProjectQuota::open(directory)?;
        let start = Instant::now();
        let filled = create_projects(&quota, existing..projects, end)?;
        println!("{}: projects {existing} to {filled} in {:?}", quota.file_system().kind, start.elapsed());
        existing = filled;
        let bench = QuotaBench {
            quota,
            directory: directory.into(),
            projects: existing,
            version: version.to_owned(),
        };
        rows.add_rows(bench.bench_rows()?)?;
        if existing < projects {
            println!("time limit reached: measured up to {existing} projects instead of {projects}");
            break;
        }
    }
    Ok(())
}

/// Creates projects until the time limit and returns their number. They have limits but no directories, which
/// is much faster and also allocates the numbers.
fn create_projects(quota: &ProjectQuota, offsets: Range<u32>, end: Instant) -> Result<u32> {
    for first in offsets.clone().step_by(STRIDE) {
        if Instant::now() > end {
            return Ok(first);
        }
        for offset in (first..offsets.end).take(STRIDE) {
            RawQuotaCalls(quota).write_limits(project_number(quota, offset)?, 1024, 100)?;
        }
    }
    Ok(offsets.end)
}

fn project_number(quota: &ProjectQuota, offset: u32) -> Result<ProjectId> {
    ProjectId::new(RawQuotaCalls(quota).project_range().first_id().get() + offset)
        .context("project number out of range")
}

struct QuotaBench {
    quota: ProjectQuota,
    directory: PathBuf,
    projects: u32,
    /// Version of the peer.
    version: String,
}

impl QuotaBench {
    fn bench_rows(&self) -> Result<[BenchRow; 4]> {
        let peer = self.time_peer_allocation()?;
        let set_and_read = self.set_and_read()?;
        Ok([set_and_read, self.same_system_calls()?, self.next_number(peer)?, self.first_number(peer)?])
    }

    fn bench_row(&self, what: &str, work: &str, ours: f64, peer: f64, limit: f64) -> BenchRow {
        let kind = self.quota.file_system().kind;
        let work = format!("{work}; {kind} with {} projects", self.projects);
        BenchRow::new(format!("{what}_{kind}_{}", self.projects), work, "us", ours)
            .peer("xfs_quota", &self.version, peer)
            .limit(limit)
    }

    /// A number that was not looked up before, for the bare calls of one measurement: the kernel caches the
    /// result of a lookup.
    fn fresh_project(&self, measurement: u32, round: usize) -> Result<ProjectId> {
        project_number(&self.quota, self.projects + 500 + measurement * 150 + u32::try_from(round)?)
    }

    /// Number of runs of the peer.
    fn peer_rounds(&self) -> usize {
        if self.projects < MANY { PEER_ROUNDS } else { 1 }
    }

    /// Runs the work with a new directory, and removes the directory afterwards.
    fn with_new_directory(&self, work: impl FnOnce(&File, &Path) -> Result<f64>) -> Result<f64> {
        let path = self.directory.join("measured");
        fs::create_dir(&path)?;
        let dir = File::open(&path)?;
        let took = work(&dir, &path)?;
        self.quota.clear_limits(dir.as_fd())?;
        fs::remove_dir(&path)?;
        Ok(took)
    }

    fn set_and_read(&self) -> Result<BenchRow> {
        let change =
            QuotaChange { bytes: LimitChange::Set(Bytes(1 << 20)), inodes: LimitChange::Set(Inodes(100)) };
        let bare = RawQuotaCalls(&self.quota);
        let (mut ours, mut limits, mut peers) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let free = self.fresh_project(0, round)?;
            ours.push(self.with_new_directory(|dir, _| {
                time_micros(|| {
                    Ok((self.quota.set_limits(dir.as_fd(), change)?, self.quota.read_status(dir.as_fd())?))
                })
            })?);
            limits.push(self.with_new_directory(|dir, _| {
                time_micros(|| {
                    bare.write_limits(free, 1024, 100)?;
                    bare.tag_directory(dir.as_fd(), free)?;
                    Ok(bare.is_allocated(free)?)
                })
            })?);
            if round < self.peer_rounds() {
                peers.push(self.with_new_directory(|_, path| self.time_peer_set_and_read(path, free))?);
            }
        }
        let work = "give a new directory both limits and read them back";
        Ok(self.bench_row("set_get", work, median(ours), median(peers), median(limits)))
    }

    /// Beside the system calls of the same work, one after the other: what the library itself costs.
    fn same_system_calls(&self) -> Result<BenchRow> {
        let change =
            QuotaChange { bytes: LimitChange::Set(Bytes(1 << 20)), inodes: LimitChange::Set(Inodes(100)) };
        let bare = RawQuotaCalls(&self.quota);
        let (mut ours, mut same) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let free = self.fresh_project(3, round)?;
            ours.push(self.with_new_directory(|dir, _| {
                time_micros(|| {
                    Ok((self.quota.set_limits(dir.as_fd(), change)?, self.quota.read_status(dir.as_fd())?))
                })
            })?);
            same.push(self.with_new_directory(|dir, _| {
                time_micros(|| Ok(bare.repeat_system_calls(dir.as_fd(), free, 1024, 100)?))
            })?);
        }
        let (kind, same) = (self.quota.file_system().kind, median(same));
        let work = format!(
            "give a new directory both limits and read them back, beside the same system calls; {kind} with {} projects",
            self.projects
        );
        let row = BenchRow::new(format!("set_get_calls_{kind}_{}", self.projects), work, "us", median(ours));
        Ok(row.peer("RawQuotaCalls::repeat_system_calls", "listed there", same).goal_at_most(same * 1.2))
    }

    fn time_peer_set_and_read(&self, path: &Path, free: ProjectId) -> Result<f64> {
        let commands = [
            format!("project -s -p {} {free}", path.display()),
            format!("limit -p bhard=1m ihard=100 {free}"),
            format!("quota -p -N -b -i {free}"),
        ];
        time_micros(|| self.xfs_quota(&commands))
    }

    fn xfs_quota(&self, commands: &[String]) -> Result<String> {
        let mut command = Command::new("xfs_quota");
        command.arg("-x");
        if self.quota.file_system().kind == FileSystemKind::Ext4 {
            command.arg("-f");
        }
        command.args(commands.iter().flat_map(|one| ["-c", one]));
        testbed::command_output(command.arg(&self.directory))
    }

    /// Measured in a process that has allocated numbers before.
    fn next_number(&self, peer: f64) -> Result<BenchRow> {
        let bare = RawQuotaCalls(&self.quota);
        let (mut ours, mut limits) = (Vec::new(), Vec::new());
        bare.search_free_projects(|search| {
            search()?;
            for round in 0..ROUNDS {
                let free = self.fresh_project(1, round)?;
                ours.push(time_micros(|| Ok(search()?))?);
                limits.push(time_micros(|| Ok(bare.is_allocated(free)?))?);
            }
            anyhow::Ok(())
        })??;
        let limit = median(limits);
        let work = "find a free number, beside one probe";
        let row = self.bench_row("next_id", work, median(ours), peer, limit);
        Ok(row.goal_at_most(limit * 2.0))
    }

    /// Measured in a process that has just started.
    fn first_number(&self, peer: f64) -> Result<BenchRow> {
        let (mut ours, mut limits) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let free = self.fresh_project(2, round)?;
            let quota = ProjectQuota::open(&self.directory)?;
            let search = || RawQuotaCalls(&quota).search_free_projects(|search| search());
            ours.push(time_micros(|| Ok(search()??))?);
            limits.push(time_micros(|| Ok(RawQuotaCalls(&quota).is_allocated(free)?))?);
        }
        let work = "find a free number, the first of a process";
        Ok(self.bench_row("first_id", work, median(ours), peer, median(limits)))
    }

    /// Finds a number as scripts around `xfs_quota` do: lists all projects and adds one to the largest.
    fn time_peer_allocation(&self) -> Result<f64> {
        let report = || self.xfs_quota(&["report -p -n -N".to_owned()]);
        let took = (0..self.peer_rounds()).map(|_| time_micros(report)).collect::<Result<Vec<f64>>>()?;
        Ok(median(took))
    }
}

/// Microseconds.
fn time_micros<T>(work: impl FnOnce() -> Result<T>) -> Result<f64> {
    let start = Instant::now();
    let done = work();
    let took = start.elapsed();
    done.map(|_| took.as_secs_f64() * 1e6)
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

//! Power cuts of a guest's disk: the writes of some work are recorded once, and replayed up to any moment, as often
//! as wanted. The code under test runs again on what is left.
//!
//! ```text
//!   while recording                        after each cut
//!   part 0    part 1     (dm-linear)       part 0    part 1
//!   logged disk          (dm-log-writes)        │    │
//!   disk      log                          the same disk, cleared and written again
//! ```
//!
//! ```no_run
//! # fn run_work(_: &std::path::Path) {}
//! # fn check_work(_: &std::path::Path, _: bool) -> anyhow::Result<()> { Ok(()) }
//! use testbed::power_cut::{CutMoments, CutPlan, RecordedDisk};
//!
//! let disk = RecordedDisk::acquire(&[32 << 20])?;
//! disk.mark("prepared")?;
//! run_work(disk.part(0));
//! disk.mark("done")?;
//! let plan = CutPlan {
//!     operation: "work",
//!     from: "prepared",
//!     moments: CutMoments::Any,
//!     sample_count: 10,
//!     whole_count: 200,
//!     torn_bytes: 512,
//! };
//! let recording = disk.finish()?;
//! recording.check_cuts(&plan, |cut| check_work(recording.part(0), cut.has_mark("done")))?;
//! # Ok::<(), anyhow::Error>(())
//! ```
//!
//! # What a cut leaves
//!
//! All that came before the last completed flush, and each write that was durable by itself (FUA). Of the other writes,
//! one after another is kept, lost, or torn into units. The order in which they were submitted does not count: a disk
//! with a cache writes it back as it likes.
//!
//! The parts are on one disk, as an ESP and a data partition are, so a flush of one of them is a flush of both.
//!
//! # How many, and again
//!
//! `NODEKEEL_POWER_CUTS` is the number of cuts for each operation, or `all` for the whole count; `NODEKEEL_SEED`
//! selects other ones. The work is recorded anew in each run, so a seed repeats the choice, and the entries of the log
//! only as far as the work itself repeats.

use std::collections::BTreeSet;
use std::env;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::fs::OFlags;

use crate::guest::disk::GuestDisk;
use crate::{command_output, wait_until};

mod choice;
mod log;
mod replay;

use choice::{CutPoint, choose_cuts};
use log::{LogEntry, read_log};
use replay::Replay;

const SECTOR_BYTES: u64 = 512;
/// How long a part may be in use after its check: children that other tests are starting hold the files that are open
/// here until they execute their programs.
const FREE_WITHIN: Duration = Duration::from_secs(30);
/// How many of the cuts that failed an error describes.
const DESCRIBED_FAILURES: usize = 8;
const DEFAULT_SEED: u64 = 1;

/// A disk of the guest whose writes are recorded, on a second one.
#[derive(Debug)]
pub struct RecordedDisk {
    // In the order in which they are removed.
    parts: Vec<Part>,
    logged: MappedDevice,
    disks: Vec<GuestDisk>,
}

/// What was written to a disk, and that disk for what cuts leave of it.
#[derive(Debug)]
pub struct DiskRecording {
    parts: Vec<Part>,
    entries: Vec<LogEntry>,
    log: File,
    disks: Vec<GuestDisk>,
}

/// One cut, for the code that checks what it left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PowerCut {
    point: CutPoint,
    marks: BTreeSet<String>,
}

/// Which cuts are checked.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "the caller fills all fields: a new one is a decision")]
pub struct CutPlan<'a> {
    /// What is cut, for reports.
    pub operation: &'a str,
    /// The mark from which cuts begin.
    pub from: &'a str,
    /// At which moments.
    pub moments: CutMoments,
    /// How many different ones a test checks by default.
    pub sample_count: usize,
    /// How many `NODEKEEL_POWER_CUTS=all` checks.
    pub whole_count: usize,
    /// The unit in which a write is torn, in bytes: 512, the sector of most disks; 4096 for a file system that, as XFS
    /// does, relies on whole blocks.
    pub torn_bytes: u64,
}

/// At which moments the power is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CutMoments {
    /// Between any two writes.
    Any,
    /// Right behind the marks: for guarantees that begin when an operation has returned.
    AtMarks,
}

#[derive(Debug)]
struct Part {
    device: MappedDevice,
    /// Where it starts on the disk, and its size, in bytes.
    start: u64,
    size: u64,
}

/// A device of the kernel's device-mapper, removed when this is dropped.
#[derive(Debug)]
struct MappedDevice {
    name: String,
    path: PathBuf,
}

impl RecordedDisk {
    /// Clears a disk of the guest, records its writes on another one, and divides it into parts of these sizes in bytes.
    /// All parts together, and all that is written to them, have to fit on a disk each.
    ///
    /// # Errors
    /// The process runs outside a guest, or in one with fewer than two disks; the guest's kernel has no dm-log-writes.
    pub fn acquire(part_sizes: &[u64]) -> Result<Self> {
        let disks = GuestDisk::acquire_many(2)?;
        command_output(Command::new("modprobe").arg("dm-log-writes"))?;
        let total: u64 = part_sizes.iter().sum();
        // An empty log replays as a cleared disk.
        let cleared = open_disk(&disks[0])?;
        Replay::new(&cleared, &[], (total, SECTOR_BYTES)).write_disk(&cleared, CutPoint::START)?;
        drop(cleared);
        let [disk, log] = [0, 1].map(|index: usize| disks[index].device_path().display().to_string());
        let base = disk.rsplit('/').next().unwrap_or_default().to_owned();
        let table = format!("0 {} log-writes {disk} {log}", total / SECTOR_BYTES);
        let logged = MappedDevice::create(format!("logged-{base}"), &table)?;
        let mut recorded = Self { parts: Vec::new(), logged, disks };
        let mut start = 0;
        for (number, size) in part_sizes.iter().enumerate() {
            let table = linear_table(*size, &recorded.logged.path, start);
            let device = MappedDevice::create(format!("part-{base}-{number}"), &table)?;
            recorded.parts.push(Part { device, start, size: *size });
            start += size;
        }
        Ok(recorded)
    }

    /// The block device of a part; it stays the same after [`finish`](Self::finish).
    pub fn part(&self, number: usize) -> &Path {
        &self.parts[number].device.path
    }

    /// Writes a mark into the log, behind all that is durable. It has no spaces.
    ///
    /// # Errors
    /// dmsetup fails.
    pub fn mark(&self, text: &str) -> Result<()> {
        run_dmsetup(&["message", &self.logged.name, "0", "mark", text]).map(drop)
    }

    /// Ends the recording. No part may be in use.
    ///
    /// # Errors
    /// A part is in use, or the second disk is too small for the log.
    pub fn finish(self) -> Result<DiskRecording> {
        let Self { parts, logged, disks } = self;
        for part in &parts {
            part.wait_until_free(FREE_WITHIN)?;
            part.device.replace_table(&linear_table(part.size, disks[0].device_path(), part.start))?;
        }
        // Which ends the log.
        logged.remove()?;
        let log = File::open(disks[1].device_path()).context("open the log")?;
        let entries = read_log(&log)?;
        Ok(DiskRecording { parts, entries, log, disks })
    }
}

impl DiskRecording {
    /// The block device of a part.
    pub fn part(&self, number: usize) -> &Path {
        &self.parts[number].device.path
    }

    /// Cuts the power many times. `check` finds the parts as a cut has left them, runs the code under test on them, and
    /// leaves them unused.
    ///
    /// # Errors
    /// At least one cut failed its check: all of them are checked, and the first few described. Or the disk could not be
    /// written, or a check has left a part in use.
    pub fn check_cuts(
        &self,
        plan: &CutPlan<'_>,
        mut check: impl FnMut(&PowerCut) -> Result<()>,
    ) -> Result<()> {
        let (started, seed) = (Instant::now(), selected_seed()?);
        let from = self.position_of(plan.from)?;
        let cuts = choose_cuts(&self.entries, (from, plan.moments), plan.selected_count()?, seed);
        ensure!(!cuts.is_empty(), "nothing to cut behind the mark {}", plan.from);
        let size = self.parts.iter().map(|part| part.size).sum();
        let mut replay = Replay::new(&self.log, &self.entries, (size, plan.torn_bytes));
        let mut failures = Vec::new();
        for point in &cuts {
            replay.write_disk(&open_disk(&self.disks[0])?, *point)?;
            let cut = PowerCut { point: *point, marks: self.marks_before(point.position) };
            failures.extend(check(&cut).err().map(|error| format!("{cut}: {error:#}")));
            for part in &self.parts {
                part.wait_until_free(FREE_WITHIN)
                    .with_context(|| format!("{cut}; failed before: {failures:?}"))?;
            }
        }
        let (count, wrong, behind) = (cuts.len(), failures.len(), self.entries.len() - from);
        println!(
            "power cuts of {}: {count}, {wrong} wrong; {behind} entries, NODEKEEL_SEED={seed}, {:.0?}",
            plan.operation,
            started.elapsed()
        );
        failures.truncate(DESCRIBED_FAILURES);
        ensure!(
            wrong == 0,
            "{wrong} of {count} power cuts of {} failed:\n{}",
            plan.operation,
            failures.join("\n")
        );
        Ok(())
    }

    /// How many entries there are up to a mark.
    fn position_of(&self, text: &str) -> Result<usize> {
        let is_it = |entry: &LogEntry| matches!(entry, LogEntry::Mark(mark) if mark == text);
        let position = self.entries.iter().position(is_it).map(|index| index + 1);
        position.with_context(|| format!("the log has no mark {text}"))
    }

    fn marks_before(&self, position: usize) -> BTreeSet<String> {
        let marks = self.entries[..position].iter().filter_map(|entry| match entry {
            LogEntry::Mark(text) => Some(text.clone()),
            LogEntry::Write(_) => None,
        });
        marks.collect()
    }
}

impl PowerCut {
    /// Whether this mark was written before the cut.
    pub fn has_mark(&self, text: &str) -> bool {
        self.marks.contains(text)
    }

    /// The greatest of the numbers N for which the mark `PREFIX-N` was written before the cut; 0 without one.
    pub fn last_number(&self, prefix: &str) -> usize {
        let number = |mark: &String| mark.strip_prefix(prefix)?.strip_prefix('-')?.parse().ok();
        self.marks.iter().filter_map(number).max().unwrap_or(0)
    }
}

impl fmt::Display for PowerCut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CutPoint { position, way, seed } = self.point;
        let marks: Vec<_> = self.marks.iter().map(String::as_str).collect();
        write!(f, "cut behind entry {position}, way {way}, seed {seed}, marks {}", marks.join(" "))
    }
}

impl CutPlan<'_> {
    fn selected_count(&self) -> Result<usize> {
        match env::var("NODEKEEL_POWER_CUTS").as_deref() {
            Err(_) => Ok(self.sample_count),
            Ok("all") => Ok(self.whole_count),
            Ok(number) => number.parse().context("read NODEKEEL_POWER_CUTS: a number, or all"),
        }
    }
}

fn selected_seed() -> Result<u64> {
    match env::var("NODEKEEL_SEED") {
        Err(_) => Ok(DEFAULT_SEED),
        Ok(seed) => seed.parse().context("read NODEKEEL_SEED: a number"),
    }
}

impl Part {
    /// Waits until no file system, mapping or program uses it.
    fn wait_until_free(&self, within: Duration) -> Result<()> {
        let exclusive = i32::try_from(OFlags::EXCL.bits()).unwrap_or_default();
        wait_until(within, "an unused part", || {
            let opened = OpenOptions::new().read(true).custom_flags(exclusive).open(&self.device.path);
            opened.map(drop).with_context(|| format!("get {} alone: unmount it", self.device.path.display()))
        })
    }
}

impl MappedDevice {
    fn create(name: String, table: &str) -> Result<Self> {
        run_dmsetup(&["create", &name, "--noudevsync", "--table", table])?;
        // Removed, if its number can't be read.
        let mut device = Self { name, path: PathBuf::new() };
        let minor = ["info", "--columns", "--noheadings", "--options", "minor", &device.name];
        device.path = format!("/dev/dm-{}", run_dmsetup(&minor)?.trim()).into();
        Ok(device)
    }

    fn replace_table(&self, table: &str) -> Result<()> {
        run_dmsetup(&["reload", &self.name, "--table", table])?;
        run_dmsetup(&["resume", &self.name, "--noudevsync"]).map(drop)
    }

    fn remove(mut self) -> Result<()> {
        let name = std::mem::take(&mut self.name);
        run_dmsetup(&["remove", "--noudevsync", "--retry", &name]).map(drop)
    }
}

impl Drop for MappedDevice {
    fn drop(&mut self) {
        if !self.name.is_empty() {
            let _ = run_dmsetup(&["remove", "--noudevsync", "--retry", &self.name]);
        }
    }
}

fn linear_table(size: u64, device: &Path, start: u64) -> String {
    format!("0 {} linear {} {}", size / SECTOR_BYTES, device.display(), start / SECTOR_BYTES)
}

fn open_disk(disk: &GuestDisk) -> Result<File> {
    let path = disk.device_path();
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.with_context(|| format!("open {}", path.display()))
}

fn run_dmsetup(arguments: &[&str]) -> Result<String> {
    // Otherwise it waits for a udev that a guest doesn't have.
    command_output(Command::new("dmsetup").args(arguments).env("DM_DISABLE_UDEV", "1"))
}

#[cfg(test)]
#[path = "power_cut_test.rs"]
mod tests;

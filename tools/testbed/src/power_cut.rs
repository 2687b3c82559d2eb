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
//! use testbed::power_cut::{CutPlan, RecordedDisk};
//!
//! let disk = RecordedDisk::acquire(&[32 << 20])?;
//! disk.mark("prepared")?;
//! run_work(disk.part(0));
//! disk.mark("done")?;
//! let recording = disk.finish()?;
//! recording.check_cuts(&CutPlan::new("work", [10, 200]), |cut| check_work(recording.part(0), cut.has_mark("done")))?;
//! # Ok::<(), anyhow::Error>(())
//! ```
//!
//! # What a cut leaves
//!
//! All that came before the last completed flush, and each write that was durable by itself (FUA). Of the other writes,
//! one after another is kept, lost, or torn into units. The order in which they were submitted does not count: a disk
//! with a cache writes it back as it likes.
//!
//! Parts of one disk, as an ESP and a data partition are, share its cache: a flush of one of them is a flush of both. Parts
//! on disks of their own ([`acquire_separate`](RecordedDisk::acquire_separate)) are cut at one moment, and each loses what
//! its own disk had not flushed. The logs of two disks share no clock but the marks, so the work marks its
//! [steps](RecordedDisk::mark_step): between two of them only one disk is written, or both in any order.
//!
//! # How many, and again
//!
//! `NODEKEEL_POWER_CUTS` is the number of cuts for each operation, or `all` for the whole count; `NODEKEEL_SEED`
//! selects other ones. The work is recorded anew in each run, so a seed repeats the choice, and the entries of the log
//! only as far as the work itself repeats.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use rustix::fs::{Advice, fadvise};

use crate::command_output;
use crate::guest::disk::{FREE_WITHIN, GuestDisk};

mod choice;
mod device;
mod log;
mod mounted;
mod plan;
mod replay;

pub use mounted::MountedDisk;
pub use plan::{CutMoments, CutPlan, PowerCut, selected_seed};

use choice::{CutPoint, choose_joint_cuts};
use device::{MappedDevice, Part, linear_table, logged_table, open_disk};
use log::{LogEntry, read_log};
use plan::step_mark;
use replay::Replay;

const SECTOR_BYTES: u64 = 512;
/// How many of the cuts that failed an error describes.
const DESCRIBED_FAILURES: usize = 8;

/// Disks of the guest whose writes are recorded, each on another one.
#[derive(Debug)]
pub struct RecordedDisk {
    // In the order in which they are removed.
    parts: Vec<Part>,
    disks: Vec<LoggedDisk>,
    steps: AtomicUsize,
}

/// What was written to disks, and those disks for what cuts leave of them.
#[derive(Debug)]
pub struct DiskRecording {
    parts: Vec<Part>,
    logs: Vec<DiskLog>,
}

#[derive(Debug)]
struct LoggedDisk {
    mapped: MappedDevice,
    disk: GuestDisk,
    log: GuestDisk,
}

#[derive(Debug)]
struct DiskLog {
    entries: Vec<LogEntry>,
    log: File,
    disk: GuestDisk,
    /// The size of its parts together, in bytes.
    bytes: u64,
    _log_disk: GuestDisk,
}

impl RecordedDisk {
    /// Clears a disk of the guest, records its writes on another one, and divides it into parts of these sizes in bytes.
    /// All parts together, and all that is written to them, have to fit on a disk each.
    ///
    /// # Errors
    /// The process runs outside a guest, or in one with fewer than two disks; the guest's kernel has no dm-log-writes.
    pub fn acquire(part_sizes: &[u64]) -> Result<Self> {
        Self::acquire_disks(&[part_sizes])
    }

    /// The same with each part on a separate disk: a flush of one leaves the others in their caches.
    ///
    /// # Errors
    /// Those of [`acquire`](Self::acquire), with two disks for each part.
    pub fn acquire_separate(part_sizes: &[u64]) -> Result<Self> {
        Self::acquire_disks(&part_sizes.chunks(1).collect::<Vec<_>>())
    }

    fn acquire_disks(sizes: &[&[u64]]) -> Result<Self> {
        let mut disks = GuestDisk::acquire_many(2 * sizes.len())?.into_iter();
        command_output(Command::new("modprobe").arg("dm-log-writes"))?;
        let mut recorded = Self { parts: Vec::new(), disks: Vec::new(), steps: AtomicUsize::new(0) };
        for sizes in sizes {
            let (Some(disk), Some(log)) = (disks.next(), disks.next()) else { break };
            recorded.add_disk((disk, log), sizes)?;
        }
        Ok(recorded)
    }

    fn add_disk(&mut self, (disk, log): (GuestDisk, GuestDisk), part_sizes: &[u64]) -> Result<()> {
        let total: u64 = part_sizes.iter().sum();
        // An empty log replays as a cleared disk.
        let cleared = open_disk(&disk)?;
        Replay::new(&cleared, &[], (total, SECTOR_BYTES))?.write_disk(&cleared, CutPoint::START)?;
        drop(cleared);
        let base = disk.device_path().file_name().unwrap_or_default().display().to_string();
        let mapped = MappedDevice::create(format!("logged-{base}"), &logged_table(total, &disk, &log))?;
        let logged = mapped.path.clone();
        self.disks.push(LoggedDisk { mapped, disk, log });
        let mut start = 0;
        for (number, size) in part_sizes.iter().enumerate() {
            let device =
                MappedDevice::create(format!("part-{base}-{number}"), &linear_table(*size, &logged, start))?;
            self.parts.push(Part { device, disk: self.disks.len() - 1, start, size: *size });
            start += size;
        }
        Ok(())
    }

    /// The block device of a part; it stays the same after [`finish`](Self::finish).
    pub fn part(&self, number: usize) -> &Path {
        &self.parts[number].device.path
    }

    /// Writes a mark into the logs, behind all that is durable. It has no spaces.
    ///
    /// # Errors
    /// dmsetup fails.
    pub fn mark(&self, text: &str) -> Result<()> {
        self.disks.iter().try_for_each(|disk| disk.mapped.send_mark(text))
    }

    /// Marks the start of a step of work on several disks: what came before is over, whatever its disk has not flushed.
    ///
    /// # Errors
    /// dmsetup fails.
    pub fn mark_step(&self) -> Result<()> {
        self.mark(&step_mark(self.steps.fetch_add(1, Ordering::Relaxed)))
    }

    /// Ends the recording. No part may be in use.
    ///
    /// # Errors
    /// A part is in use, or the second disk is too small for the log.
    pub fn finish(self) -> Result<DiskRecording> {
        let Self { parts, disks, .. } = self;
        for part in &parts {
            part.wait_until_free(FREE_WITHIN)?;
            let disk = disks[part.disk].disk.device_path();
            part.device.replace_table(&linear_table(part.size, disk, part.start))?;
        }
        let bytes_of = |disk| parts.iter().filter(|part| part.disk == disk).map(|part| part.size).sum();
        let logs = disks.into_iter().enumerate().map(|(number, disk)| disk.finish(bytes_of(number)));
        let logs = logs.collect::<Result<_>>()?;
        Ok(DiskRecording { parts, logs })
    }
}

impl LoggedDisk {
    fn finish(self, bytes: u64) -> Result<DiskLog> {
        let Self { mapped, disk, log: log_disk } = self;
        // Which ends the log.
        mapped.remove()?;
        let log = File::open(log_disk.device_path()).context("open the log")?;
        // The kernel wrote it below the page cache, which has an earlier test's where that one has left the disk open.
        fadvise(&log, 0, None, Advice::DontNeed).context("forget an earlier log")?;
        let entries = read_log(&log)?;
        Ok(DiskLog { entries, log, disk, bytes, _log_disk: log_disk })
    }
}

impl DiskLog {
    fn replay(&self, torn_bytes: u64) -> Result<Replay<'_>> {
        Replay::new(&self.log, &self.entries, (self.bytes, torn_bytes))
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
        let logs: Vec<_> = self.logs.iter().map(|log| &*log.entries).collect();
        let from = logs.iter().map(|entries| position_of(plan.from, entries)).collect::<Result<Vec<_>>>()?;
        let cuts = choose_joint_cuts(&logs, (&from, plan.moments), plan.selected_count()?, seed);
        ensure!(!cuts.is_empty(), "nothing to cut behind the mark {}", plan.from);
        let replays = self.logs.iter().map(|log| log.replay(plan.torn_bytes));
        let mut replays = replays.collect::<Result<Vec<_>>>()?;
        let mut failures = Vec::new();
        for points in &cuts {
            for ((replay, log), point) in replays.iter_mut().zip(&self.logs).zip(points) {
                replay.write_disk(&open_disk(&log.disk)?, *point)?;
            }
            let cut = PowerCut { points: points.clone(), marks: marks_before(points[0].position, logs[0]) };
            failures.extend(check(&cut).err().map(|error| format!("{cut}: {error:#}")));
            for part in &self.parts {
                part.wait_until_free(FREE_WITHIN)
                    .with_context(|| format!("{cut}; failed before: {failures:?}"))?;
            }
        }
        let (count, wrong) = (cuts.len(), failures.len());
        let behind: usize = logs.iter().zip(&from).map(|(entries, from)| entries.len() - from).sum();
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
}

/// How many entries there are up to a mark.
fn position_of(text: &str, entries: &[LogEntry]) -> Result<usize> {
    let is_it = |entry: &LogEntry| matches!(entry, LogEntry::Mark(mark) if mark == text);
    let position = entries.iter().position(is_it).map(|index| index + 1);
    position.with_context(|| format!("the log has no mark {text}"))
}

fn marks_before(position: usize, entries: &[LogEntry]) -> BTreeSet<String> {
    let marks = entries[..position].iter().filter_map(|entry| match entry {
        LogEntry::Mark(text) => Some(text.clone()),
        LogEntry::Write(_) => None,
    });
    marks.collect()
}

#[cfg(test)]
#[path = "power_cut_test.rs"]
mod tests;

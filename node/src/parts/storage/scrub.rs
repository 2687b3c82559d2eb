//! The scrub of the open volume: all of its device is read below the file system, so that a fault is found before somebody
//! needs the file.
//!
//! ```text
//!  a read of 1 MiB ──▶ pause by the rate ──▶ …      its own thread, idle I/O class, past the page cache
//!     │ fails
//!     └──▶ 16 reads of 64 KiB ──▶ 16 reads of 4 KiB: the unreadable blocks are counted, and the rest goes on
//! ```

use std::fs::{self, File};
use std::io;
use std::ops::{ControlFlow, Range};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime};

use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{fstat, fstatat, major, minor};
use nodekeel_fsquota::Bytes;
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::faults::VolumeFaults;
use super::opener::VolumeOpener;
use super::scrub_report::{ScrubEnd, ScrubReport};
use crate::device_faults::{DeviceFault, FaultKind};
use crate::dn::STORAGE;
use crate::error_chain::error_chain;
use crate::health::HealthChanges;
use crate::sys;
use crate::volume::VolumeHandle;

/// One read: large enough for the speed of a disk, small enough to end at once.
const READ_BYTES: u64 = 1 << 20;
/// The steps by which a range that can't be read is narrowed: each is read in parts of the next.
const NARROW_BYTES: [u64; 2] = [64 << 10, 4 << 10];
/// The alignment of direct reads, a multiple of every sector size.
const ALIGNMENT: usize = 4096;
const SECTOR_BYTES: u64 = 512;
/// The pause after a read without a given rate, in multiples of its time: a quarter of the disk's time at most. A disk that is
/// busy answers later, and is left alone for longer.
const PAUSE_RATIO: u32 = 3;
/// The time between two reports of the progress.
const REPORT_PERIOD: Duration = Duration::from_millis(500);
/// The time that a canceled scrub may take to end. A read of a failing disk takes longer, and is left behind.
const END_TIMEOUT: Duration = Duration::from_millis(500);

/// The scrub can't start.
#[derive(Debug, Error)]
pub(super) enum ScrubError {
    #[error("can't scrub the data volume: it is not open; see `nodectl storage status`")]
    NotOpen,
    #[error(
        "can't scrub the data volume: a scrub is running; see `nodectl storage status`, or `nodectl storage scrub --cancel`"
    )]
    Running,
    #[error(
        "can't scrub the data volume: its file system is on no block device of its own; scrub it by its own means"
    )]
    NoDevice,
    #[error(
        "can't scrub the data volume: {} is a directory of a file system that it shares with others; mount a file system of \
         its own there, or scrub that one by its own means",
        path.display()
    )]
    Shared { path: PathBuf },
    #[error(
        "can't scrub the data volume: it was created with storage.wipe = false, or the configuration has that, and a block \
         that was never written can't be told from one that was changed; move its data to a volume that is wiped"
    )]
    Unwiped,
    #[error("can't scrub the data volume: its header can't be read: {0}")]
    Header(String),
    #[error("can't scrub the data volume: open {}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("can't scrub the data volume: start a thread")]
    Thread(#[source] io::Error),
}

/// What a caller may know of scrubs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ScrubStatus {
    pub(super) running: Option<ScrubReport>,
    pub(super) last: Option<ScrubReport>,
}

/// The scrubs of the data volume, one at a time. Cheap to clone; all clones share them.
#[derive(Debug, Clone)]
pub(super) struct VolumeScrub {
    status: watch::Sender<ScrubStatus>,
    opener: VolumeOpener,
    faults: VolumeFaults,
    health: HealthChanges,
    /// Canceled once for each scrub.
    cancel: watch::Sender<CancellationToken>,
}

/// The speed of a scrub.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScrubRate {
    /// A quarter of the disk's time at most.
    Share,
    /// At most so many bytes in a second.
    PerSecond(Bytes),
}

impl ScrubRate {
    /// The pause after a read of so many bytes that took so long.
    fn pause_after(self, bytes: u64, took: Duration) -> Duration {
        match self {
            Self::Share => took.saturating_mul(PAUSE_RATIO),
            Self::PerSecond(Bytes(rate)) => {
                let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
                // Each read for itself: one that was slow is not made up for by a burst.
                Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).saturating_sub(took)
            }
        }
    }
}

/// The device below a file system.
#[derive(Debug)]
struct VolumeDevice {
    file: File,
    /// The kernel's name: `dm-1`.
    name: String,
    bytes: u64,
}

impl VolumeScrub {
    pub(super) fn new(opener: VolumeOpener, faults: VolumeFaults, health: HealthChanges) -> Self {
        let last = opener.esp().ok().and_then(ScrubReport::read_from);
        let (status, cancel) =
            (watch::Sender::new(ScrubStatus { running: None, last }), watch::Sender::default());
        Self { status, opener, faults, health, cancel }
    }

    pub(super) fn status(&self) -> ScrubStatus {
        self.status.borrow().clone()
    }

    pub(super) fn watch(&self) -> watch::Receiver<ScrubStatus> {
        self.status.subscribe()
    }

    /// Ends the running scrub soon. Returns whether there is one.
    pub(super) fn cancel(&self) -> bool {
        self.cancel.borrow().cancel();
        self.status.borrow().running.is_some()
    }

    /// Starts a scrub, which goes on when its caller has gone, and ends when the volume closes.
    pub(super) fn start(&self, volume: VolumeHandle, rate: ScrubRate) -> Result<(), ScrubError> {
        let device = VolumeDevice::below(&volume)?;
        let report = ScrubReport::begin(device.name.clone(), device.bytes, SystemTime::now());
        let first = report.clone();
        let is_first = self.status.send_if_modified(|status| {
            let is_free = status.running.is_none();
            if is_free {
                status.running = Some(first);
            }
            is_free
        });
        if !is_first {
            return Err(ScrubError::Running);
        }
        let cancel = CancellationToken::new();
        self.cancel.send_replace(cancel.clone());
        let (stop, stopped) = mpsc::channel::<()>();
        let (scrub, (ended, end)) = (self.clone(), tokio::sync::oneshot::channel());
        let reading = move || {
            // Without it, only the pauses leave the disk to others.
            if let Err(error) = sys::set_idle_io_class() {
                tracing::info!(dn = STORAGE, "the scrub has no idle I/O class: {error}");
            }
            // Nobody waits for a thread that was left behind.
            let _ = ended.send(scrub.read_all(device, report, rate, &stopped));
        };
        if let Err(error) = std::thread::Builder::new().name("scrub".to_owned()).spawn(reading) {
            self.status.send_modify(|status| status.running = None);
            return Err(ScrubError::Thread(error));
        }
        tokio::spawn(self.clone().supervise(volume, stop, end, cancel));
        Ok(())
    }

    /// Waits for the end of the thread, which the volume's end and a cancellation bring about, and keeps the result.
    async fn supervise(
        self,
        volume: VolumeHandle,
        stop: mpsc::Sender<()>,
        mut end: tokio::sync::oneshot::Receiver<Option<ScrubReport>>,
        cancel: CancellationToken,
    ) {
        let early = tokio::select! {
            ended = &mut end => Err(ended),
            () = volume.closing() => Ok(ScrubEnd::Closed),
            () = cancel.cancelled() => Ok(ScrubEnd::Canceled),
        };
        drop(stop);
        let report = match early {
            Err(ended) => ended.ok().flatten(),
            // The thread returns none: it was stopped, and its last report is the progress.
            Ok(reason) => match timeout(END_TIMEOUT, end).await {
                Ok(Ok(Some(report))) => Some(report),
                _ => self.status.borrow().running.clone().map(|report| report.end(reason, SystemTime::now())),
            },
        };
        // The thread has panicked, or nobody stopped it.
        let report = report.or_else(|| {
            self.status.borrow().running.clone().map(|report| report.end(ScrubEnd::Failed, SystemTime::now()))
        });
        let Some(report) = report else { return };
        tracing::info!(dn = STORAGE, "the scrub of the data volume has ended: {report}");
        let (opener, kept) = (self.opener.clone(), report.clone());
        let written = tokio::task::spawn_blocking(move || kept.write_to(opener.esp()?)).await;
        if let Ok(Err(error)) = written {
            tracing::warn!(
                dn = STORAGE,
                "can't record the scrub of the data volume: {}",
                error_chain(&error)
            );
        }
        self.status.send_replace(ScrubStatus { running: None, last: Some(report) });
    }

    /// Reads the device to its end. None if it was stopped. It blocks.
    fn read_all(
        &self,
        device: VolumeDevice,
        mut report: ScrubReport,
        rate: ScrubRate,
        stopped: &mpsc::Receiver<()>,
    ) -> Option<ScrubReport> {
        let mut buffer = vec![0; READ_BYTES as usize + ALIGNMENT];
        let aligned = buffer.as_ptr().align_offset(ALIGNMENT);
        let buffer = &mut buffer[aligned..aligned + READ_BYTES as usize];
        let is_stopped = |pause| stopped.recv_timeout(pause) == Err(mpsc::RecvTimeoutError::Disconnected);
        let (mut reported, mut gone) = (Instant::now(), None);
        while report.done_bytes < device.bytes {
            let start = report.done_bytes;
            let end = (start + READ_BYTES).min(device.bytes);
            let began = Instant::now();
            let read = |range: &Range<u64>| {
                if is_stopped(Duration::ZERO) {
                    return Err(ReadError::Stopped);
                }
                let length = (range.end - range.start) as usize;
                device.file.read_exact_at(&mut buffer[..length], range.start).map_err(ReadError::Failed)
            };
            let flow = read_narrowing(start..end, &NARROW_BYTES, read, &mut |range, error| {
                // A device that has gone has no unreadable blocks.
                if is_gone(&error) {
                    gone = Some(error);
                    return ControlFlow::Break(());
                }
                report.add_unreadable(range.clone());
                self.report_unreadable(&device.name, &report, &range, &error);
                ControlFlow::Continue(())
            });
            if let Some(error) = gone {
                tracing::error!(
                    dn = STORAGE,
                    "the scrub of the data volume failed: read {}: {error}",
                    device.name
                );
                return Some(report.end(ScrubEnd::Failed, SystemTime::now()));
            }
            if flow.is_break() {
                return None;
            }
            report.done_bytes = end;
            if reported.elapsed() >= REPORT_PERIOD {
                reported = Instant::now();
                let progress = report.clone();
                self.status.send_modify(|status| status.running = Some(progress));
            }
            if is_stopped(rate.pause_after(end - start, began.elapsed())) {
                return None;
            }
        }
        Some(report.end(ScrubEnd::Complete, SystemTime::now()))
    }

    /// The kernel's log has most of them, too, but neither the last ones of many, nor where nobody reads it.
    fn report_unreadable(&self, device: &str, report: &ScrubReport, range: &Range<u64>, error: &io::Error) {
        let is_unauthentic = error.raw_os_error() == Some(nix::libc::EILSEQ);
        let kind = if is_unauthentic { FaultKind::Unauthentic } else { FaultKind::Failed };
        let blocks = report.unreadable_bytes.div_ceil(NARROW_BYTES[1]);
        let sector = Some(range.start / SECTOR_BYTES);
        let fault = DeviceFault { device: device.to_owned(), kind, sector };
        if self.faults.add_at_least(fault, blocks) {
            self.faults.announce(&self.opener, &self.health);
        }
    }
}

/// A read that gives nothing.
#[derive(Debug)]
enum ReadError {
    Failed(io::Error),
    /// Nobody waits for the scrub any more.
    Stopped,
}

/// Reads a range; one that fails is read again in parts of the first of these steps, and each of them in those of the next.
/// What can't be read of the last step is unreadable. Breaks if it was stopped.
fn read_narrowing(
    range: Range<u64>,
    steps: &[u64],
    mut read: impl FnMut(&Range<u64>) -> Result<(), ReadError>,
    unreadable: &mut impl FnMut(Range<u64>, io::Error) -> ControlFlow<()>,
) -> ControlFlow<()> {
    // The parts that are left, the first one last, each with the steps below it.
    let mut parts = vec![(range, steps)];
    while let Some((part, steps)) = parts.pop() {
        match (read(&part), steps) {
            (Ok(()), _) => {}
            (Err(ReadError::Stopped), _) => return ControlFlow::Break(()),
            (Err(ReadError::Failed(error)), [step, below @ ..]) if !is_gone(&error) => {
                let starts = (part.start..part.end).step_by(*step as usize);
                let narrower = starts.map(|start| (start..(start + step).min(part.end), below));
                let first = parts.len();
                parts.extend(narrower);
                parts[first..].reverse();
            }
            (Err(ReadError::Failed(error)), _) => unreadable(part, error)?,
        }
    }
    ControlFlow::Continue(())
}

/// Returns whether an error is of a whole device, and not of some of its blocks.
fn is_gone(error: &io::Error) -> bool {
    // A device that shrank ends early.
    matches!(error.raw_os_error(), Some(nix::libc::ENODEV | nix::libc::ENXIO | nix::libc::EBADF))
        || error.kind() == io::ErrorKind::UnexpectedEof
}

impl VolumeDevice {
    /// Opens the device below the file system of the volume, to read past its page cache.
    fn below(volume: &VolumeHandle) -> Result<Self, ScrubError> {
        let file_system = fstat(volume.dir()).map_err(|_| ScrubError::NotOpen)?.st_dev;
        let above = fstatat(volume.dir(), "..", AtFlags::empty()).map_err(|_| ScrubError::NotOpen)?.st_dev;
        // The disk of the system has more than the volume.
        if file_system == above {
            return Err(ScrubError::Shared { path: volume.path().to_owned() });
        }
        let numbers = format!("{}:{}", major(file_system), minor(file_system));
        let directory = Path::new("/sys/dev/block").join(numbers);
        let name = fs::canonicalize(directory).ok();
        let name = name.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        let name = name.ok_or(ScrubError::NoDevice)?;
        let path = Path::new("/dev").join(name.replace('!', "/"));
        let open = || {
            let file = File::options().read(true).custom_flags(OFlag::O_DIRECT.bits()).open(&path)?;
            // The name may lead elsewhere in a container.
            if fstat(&file)?.st_rdev != file_system {
                return Err(io::Error::other("it is another device"));
            }
            let bytes = io::Seek::seek(&mut &file, io::SeekFrom::End(0))?;
            Ok((file, bytes))
        };
        match open() {
            Ok((file, bytes)) => Ok(Self { file, name, bytes }),
            Err(source) => Err(ScrubError::Open { path, source }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn a_rate_bounds_each_read_and_without_one_the_disk_is_left_alone_for_longer_than_it_is_read() {
        let ms = Duration::from_millis;
        let per_second = |bytes| ScrubRate::PerSecond(Bytes(bytes));
        for (rate, took, pause) in [
            (ScrubRate::Share, ms(8), ms(24)),
            (ScrubRate::Share, Duration::MAX, Duration::MAX),
            (per_second(1 << 20), ms(8), ms(992)),
            (per_second(1 << 20), ms(1000), ms(0)),
            (per_second(1 << 20), ms(9000), ms(0)),
            (per_second(1 << 30), ms(0), Duration::from_nanos(976_562)),
            (per_second(u64::MAX), ms(0), ms(0)),
            (per_second(0), ms(0), Duration::from_secs(1 << 20)),
        ] {
            assert_eq!(rate.pause_after(1 << 20, took), pause, "{rate:?} {took:?}");
        }
    }

    /// The unreadable ranges of a device of this size, whose bad blocks fail, and the number of reads.
    fn find_unreadable(size: u64, bad: &[u64]) -> (Vec<Range<u64>>, usize) {
        let (mut found, reads) = (Vec::new(), RefCell::new(0));
        let read = |range: &Range<u64>| {
            *reads.borrow_mut() += 1;
            match bad.iter().any(|block| range.start < block * 4096 + 4096 && block * 4096 < range.end) {
                true => Err(ReadError::Failed(io::Error::from_raw_os_error(5))),
                false => Ok(()),
            }
        };
        let flow = read_narrowing(0..size, &NARROW_BYTES, read, &mut |range, _| {
            found.push(range);
            ControlFlow::Continue(())
        });
        assert!(flow.is_continue());
        let reads = *reads.borrow();
        (found, reads)
    }

    #[test]
    fn what_can_not_be_read_is_narrowed_to_its_blocks_in_order_and_the_rest_is_read() {
        assert_eq!(find_unreadable(READ_BYTES, &[]), (vec![], 1));
        assert_eq!(
            find_unreadable(READ_BYTES, &[200, 3, 4]).0,
            [12288..16384, 16384..20480, 819_200..823_296]
        );
        assert_eq!(find_unreadable(READ_BYTES, &[17]).1, 1 + 16 + 16);
        assert_eq!(find_unreadable(5000, &[1]).0.pop(), Some(4096..5000), "a device ends within a block");
    }

    #[test]
    fn a_scrub_that_is_stopped_or_whose_device_has_gone_reads_no_further() {
        for (error, calls) in
            [(ReadError::Stopped, 0), (ReadError::Failed(io::Error::from_raw_os_error(6)), 1)]
        {
            let (mut error, mut unreadable, mut reads) = (Some(error), 0, 0);
            let read = |_: &Range<u64>| {
                reads += 1;
                error.take().map_or(Ok(()), Err)
            };
            let flow = read_narrowing(0..READ_BYTES, &NARROW_BYTES, read, &mut |_, _| {
                unreadable += 1;
                ControlFlow::Break(())
            });
            assert_eq!((flow.is_break(), reads, unreadable), (true, 1, calls));
        }
    }
}

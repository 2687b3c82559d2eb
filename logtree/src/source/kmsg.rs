//! The kernel log.

use std::convert::Infallible;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::libc::{O_NOCTTY, O_NONBLOCK};
use nix::sys::stat::makedev;
use nix::time::{ClockId, clock_gettime};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::coop::consume_budget;

use crate::parse::{KmsgRecord, kmsg_record};
use crate::sys::watch_readable;
use crate::{Dn, Level, LogMessage, LogStore};

/// Longest record that the kernel returns (CONSOLE_EXT_LOG_MAX in kernel/printk/internal.h).
const MAX_RECORD_BYTES: usize = 8 << 10;

const DEVICE: &str = "/dev/kmsg";

/// The major and minor number.
///
/// *Source:* Linux's Documentation/admin-guide/devices.txt.
const DEVICE_NUMBER: (u64, u64) = (1, 11);

/// The position up to which the kernel log is stored, shared by all clones. One that outlives its [`KmsgSource`]
/// lets the next one resume: no record is stored twice, and those that were overwritten in between are counted.
#[derive(Clone, Debug, Default)]
pub struct KmsgPosition(Arc<PositionState>);

#[derive(Debug, Default)]
struct PositionState {
    next_seq: AtomicU64,
    /// Nanoseconds by which the clock of the records is behind the monotonic one.
    lag: AtomicI64,
}

impl KmsgPosition {
    /// The sequence number of the next record; 0 before the first.
    fn next_seq(&self) -> u64 {
        self.0.next_seq.load(Ordering::Relaxed)
    }

    fn set_next_seq(&self, seq: u64) {
        self.0.next_seq.store(seq, Ordering::Relaxed);
    }

    /// Notes the lag of the records' clock, by one that has just been written. The kernel stamps them by a clock that nothing
    /// disciplines: it is seconds behind after a day, and more after a month.
    fn measure_lag(&self, since_boot: Duration, record: &str) {
        if let Some(KmsgRecord { since_boot: at, .. }) = kmsg_record(record) {
            let nanos = |time: Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
            self.0.lag.store(nanos(since_boot).saturating_sub(nanos(at)), Ordering::Relaxed);
        }
    }

    /// The time since boot of a time by the records' clock.
    fn time_since_boot(&self, at: Duration) -> Duration {
        let lag = self.0.lag.load(Ordering::Relaxed);
        let by = Duration::from_nanos(lag.unsigned_abs());
        if lag < 0 { at.saturating_sub(by) } else { at.saturating_add(by) }
    }
}

/// The kernel log, from its oldest record on, or from a position.
#[derive(Debug)]
pub struct KmsgSource {
    device: AsyncFd<File>,
    position: KmsgPosition,
}

impl KmsgSource {
    /// Opens `/dev/kmsg`, which requires root, or CAP_SYSLOG if `kernel.dmesg_restrict` is set. Starts at the position,
    /// and moves it with each record that it stores.
    ///
    /// # Errors
    /// When the device cannot be opened, or is another one: containers have links there, as to their console.
    ///
    /// # Panics
    /// Outside of a tokio runtime with IO enabled.
    pub fn open(position: &KmsgPosition) -> io::Result<KmsgSource> {
        Ok(KmsgSource { device: watch_readable(open_device()?)?, position: position.clone() })
    }

    /// Checks whether this process could open `/dev/kmsg`.
    ///
    /// # Errors
    /// When it can't.
    pub fn check() -> io::Result<()> {
        open_device().map(drop)
    }

    /// Stores records under a name until the future is dropped. For records that the kernel overwrote before
    /// they were read, it stores a report in their place, with their number.
    ///
    /// # Errors
    /// When reading fails.
    ///
    /// # Cancel safety
    /// Dropping the future loses no record that was read, and another call resumes.
    pub async fn copy_records(&mut self, store: &LogStore, dn: &Dn) -> io::Result<Infallible> {
        let mut buffer = vec![0; MAX_RECORD_BYTES];
        let mut has_waited = false;
        loop {
            // A flood must not starve the other tasks of this thread.
            consume_budget().await;
            let read = self.device.async_io(Interest::READABLE, |mut device| {
                let read = device.read(&mut buffer);
                has_waited |= read.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
                read
            });
            let read = read.await;
            match read {
                Ok(length) => {
                    let text = String::from_utf8_lossy(&buffer[..length]);
                    if std::mem::take(&mut has_waited) {
                        self.position.measure_lag(time_since_boot(), &text);
                    }
                    for message in convert_record(&text, &self.position, SystemTime::now(), time_since_boot())
                    {
                        store.append_message(dn, message);
                    }
                }
                // Overwritten before it was read, or too long: the sequence number of the next record shows
                // how many were lost.
                Err(error)
                    if [Errno::EPIPE, Errno::EINVAL]
                        .map(|e| Some(e as i32))
                        .contains(&error.raw_os_error()) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn time_since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default()
}

fn open_device() -> io::Result<File> {
    // It may be a terminal, which must not become that of this process.
    let device = OpenOptions::new().read(true).custom_flags(O_NONBLOCK | O_NOCTTY).open(DEVICE)?;
    check_device(&device)?;
    Ok(device)
}

fn check_device(file: &File) -> io::Result<()> {
    let (metadata, (major, minor)) = (file.metadata()?, DEVICE_NUMBER);
    if metadata.file_type().is_char_device() && metadata.rdev() == makedev(major, minor) {
        return Ok(());
    }
    Err(io::Error::other("it is not the kernel's log, but another device or file"))
}

/// The messages for one record: a report of a gap before it, then the record; none if it is before the position.
fn convert_record(
    record: &str,
    position: &KmsgPosition,
    now: SystemTime,
    since_boot: Duration,
) -> Vec<LogMessage> {
    let Some(KmsgRecord { seq, since_boot: at, mut message, .. }) = kmsg_record(record) else {
        let text = format!("invalid kernel log record: {}", record.trim_end());
        return vec![LogMessage::without_position(Level::Warn, text)];
    };
    let expected = position.next_seq();
    // The device begins with its oldest record at each open: this one was stored before.
    if seq < expected {
        return Vec::new();
    }
    position.set_next_seq(seq.saturating_add(1));
    // The record has the time since boot, which `now` and `since_boot` relate to the wall clock.
    message.claimed_time = (now + position.time_since_boot(at)).checked_sub(since_boot);
    let lost = if expected > 0 { seq - expected } else { 0 };
    let report = (lost > 0).then(|| {
        let text = format!("{lost} kernel log records were overwritten before they were read");
        let report = LogMessage::without_position(Level::Warn, text).with_field("lost", lost);
        LogMessage { claimed_time: message.claimed_time, ..report }
    });
    report.into_iter().chain([message]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SINCE_BOOT: Duration = Duration::from_secs(7);

    fn texts(record: &str, position: &KmsgPosition) -> Vec<(Level, String)> {
        let messages = convert_record(record, position, SystemTime::UNIX_EPOCH, SINCE_BOOT);
        messages.into_iter().map(|message| (message.level, message.text)).collect()
    }

    /// Reference case 15, its time: now minus the time since the record.
    #[test]
    fn a_record_is_dated_by_its_time_since_boot() {
        let now = SystemTime::UNIX_EPOCH;
        let entries = convert_record("6,1,5000000,-;x", &KmsgPosition::default(), now, SINCE_BOOT);
        assert_eq!(entries[0].claimed_time, Some(now - Duration::from_secs(2)));
    }

    /// Seen: 22 s behind after 23 hours.
    #[test]
    fn the_lag_of_the_kernels_clock_is_measured_by_a_record_that_was_waited_for() {
        let now = SystemTime::UNIX_EPOCH;
        for record in ["6,2,1000000,-;x", "6,2,9000000,-;x"] {
            let position = KmsgPosition::default();
            position.measure_lag(SINCE_BOOT, record);
            let entries = convert_record(record, &position, now, SINCE_BOOT);
            assert_eq!(entries[0].claimed_time, Some(now), "{record}");
        }
        let position = KmsgPosition::default();
        position.measure_lag(SINCE_BOOT, "6,2,1000000,-;x");
        let before = convert_record("6,1,0,-;x", &position, now, SINCE_BOOT);
        assert_eq!(before[0].claimed_time, Some(now - Duration::from_secs(1)));
    }

    #[test]
    fn a_sequence_gap_is_reported_before_the_next_record() {
        let position = KmsgPosition::default();
        assert_eq!(texts("6,10,1,-;a", &position).len(), 1);
        assert_eq!(texts("6,11,1,-;b", &position).len(), 1);
        let gap = texts("6,15,1,-;c", &position);
        let report = "3 kernel log records were overwritten before they were read".to_owned();
        assert_eq!(gap, [(Level::Warn, report), (Level::Info, "c".to_owned())]);
    }

    #[test]
    fn a_source_that_resumes_stores_no_record_twice_and_counts_what_was_overwritten_meanwhile() {
        let position = KmsgPosition::default();
        for (seq, stored) in [(3, 1), (4, 1), (3, 0), (4, 0), (5, 1), (3, 0), (8, 2)] {
            assert_eq!(texts(&format!("6,{seq},1,-;x"), &position.clone()).len(), stored, "{seq}");
        }
    }

    #[test]
    fn another_device_or_file_is_not_the_kernels_log() {
        let scratch = tempfile::tempfile().unwrap();
        for file in [File::open("/dev/null").unwrap(), scratch] {
            let error = check_device(&file).unwrap_err();
            assert!(error.to_string().starts_with("it is not the kernel's log"), "{error}");
        }
    }

    #[test]
    fn a_malformed_record_is_kept_as_a_warning() {
        let kept = texts("rubbish\n", &KmsgPosition::default());
        assert_eq!(kept, [(Level::Warn, "invalid kernel log record: rubbish".to_owned())]);
    }
}

//! The kernel log.

use std::convert::Infallible;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::libc::O_NONBLOCK;
use nix::time::{ClockId, clock_gettime};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::coop::consume_budget;

use crate::parse::{KmsgRecord, kmsg_record};
use crate::sys::watch_readable;
use crate::{Dn, Level, LogMessage, LogStore};

/// Longest record that the kernel returns (CONSOLE_EXT_LOG_MAX in kernel/printk/internal.h).
const MAX_RECORD_BYTES: usize = 8 << 10;

/// The kernel log, from its oldest record on.
#[derive(Debug)]
pub struct KmsgSource {
    device: AsyncFd<File>,
    converter: RecordConverter,
}

impl KmsgSource {
    /// Opens `/dev/kmsg`, which requires root, or CAP_SYSLOG if `kernel.dmesg_restrict` is set.
    ///
    /// # Errors
    /// When the device cannot be opened.
    ///
    /// # Panics
    /// Outside of a tokio runtime with IO enabled.
    pub fn open() -> io::Result<KmsgSource> {
        let device = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open("/dev/kmsg")?;
        Ok(KmsgSource { device: watch_readable(device)?, converter: RecordConverter::default() })
    }

    /// Stores records under a name until the future is dropped. For records that the kernel overwrote before
    /// they were read, it stores a report in their place.
    ///
    /// # Errors
    /// When reading fails.
    ///
    /// # Cancel safety
    /// Dropping the future loses no record that was read, and another call resumes.
    pub async fn copy_records(&mut self, store: &LogStore, dn: &Dn) -> io::Result<Infallible> {
        let mut buffer = vec![0; MAX_RECORD_BYTES];
        loop {
            // A flood must not starve the other tasks of this thread.
            consume_budget().await;
            let read = self.device.async_io(Interest::READABLE, |mut device| device.read(&mut buffer)).await;
            match read {
                Ok(length) => {
                    let text = String::from_utf8_lossy(&buffer[..length]);
                    for message in self.converter.convert(&text, SystemTime::now(), time_since_boot()) {
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

/// The clock of the kernel's timestamps.
fn time_since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default()
}

/// Converts records into messages.
#[derive(Debug, Default)]
pub(crate) struct RecordConverter {
    /// The expected sequence number of the next record.
    next_seq: Option<u64>,
}

impl RecordConverter {
    /// The messages for one record: a report of a gap before it, then the record.
    pub(crate) fn convert(&mut self, record: &str, now: SystemTime, since_boot: Duration) -> Vec<LogMessage> {
        let Some(KmsgRecord { seq, since_boot: at, mut message, .. }) = kmsg_record(record) else {
            let text = format!("invalid kernel log record: {}", record.trim_end());
            return vec![LogMessage { time: Some(now), ..LogMessage::without_position(Level::Warn, text) }];
        };
        let time = (now + at).checked_sub(since_boot);
        message.time = time;
        let lost = self.next_seq.map_or(0, |next| seq.saturating_sub(next));
        self.next_seq = Some(seq.saturating_add(1));
        let mut entries = Vec::new();
        if lost > 0 {
            let text = format!("{lost} kernel log records were overwritten before they were read");
            entries.push(LogMessage {
                time,
                ..LogMessage::without_position(Level::Warn, text).with_field("lost", lost)
            });
        }
        entries.push(message);
        entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: SystemTime = SystemTime::UNIX_EPOCH;

    /// Reference case 15, its time: now minus the time since the record.
    #[test]
    fn a_record_is_dated_by_its_time_since_boot() {
        let entries = RecordConverter::default().convert("6,1,5000000,-;x", NOW, Duration::from_secs(7));
        assert_eq!(entries[0].time, Some(NOW - Duration::from_secs(2)));
    }

    #[test]
    fn a_sequence_gap_is_reported_before_the_next_record() {
        let mut entries = RecordConverter::default();
        assert_eq!(entries.convert("6,10,1,-;a", NOW, Duration::ZERO).len(), 1);
        assert_eq!(entries.convert("6,11,1,-;b", NOW, Duration::ZERO).len(), 1);
        let gap = entries.convert("6,15,1,-;c", NOW, Duration::ZERO);
        assert_eq!(gap[0].text, "3 kernel log records were overwritten before they were read");
        assert_eq!((gap[0].level, gap[1].text.as_str()), (Level::Warn, "c"));
    }

    #[test]
    fn a_malformed_record_is_kept_as_a_warning() {
        let entries = RecordConverter::default().convert("rubbish\n", NOW, Duration::ZERO);
        assert_eq!(entries[0].text, "invalid kernel log record: rubbish");
    }
}

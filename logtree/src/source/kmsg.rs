//! The kernel's log.

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

use crate::parse::{KmsgRecord, kmsg};
use crate::sys::watch;
use crate::{Dn, Journal, Level, Message};

/// Longest record the kernel gives out (CONSOLE_EXT_LOG_MAX in kernel/printk/internal.h).
const RECORD: usize = 8 << 10;

/// The kernel's log, from its oldest record on.
#[derive(Debug)]
pub struct Kmsg {
    device: AsyncFd<File>,
    entries: Entries,
}

impl Kmsg {
    /// Opens `/dev/kmsg`, which takes root, or CAP_SYSLOG where `kernel.dmesg_restrict` is set.
    ///
    /// # Errors
    /// When the device cannot be opened.
    ///
    /// # Panics
    /// Outside of a tokio runtime with IO enabled.
    pub fn open() -> io::Result<Kmsg> {
        let device = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open("/dev/kmsg")?;
        Ok(Kmsg { device: watch(device)?, entries: Entries::default() })
    }

    /// Stores records under a name until the future is dropped. Records the kernel overwrote before they were read are
    /// reported by an entry in their place.
    ///
    /// # Errors
    /// When reading fails.
    ///
    /// # Cancel safety
    /// Nothing read is lost if the future is dropped, and another may go on.
    pub async fn pump(&mut self, journal: &Journal, dn: &Dn) -> io::Result<Infallible> {
        let mut buffer = vec![0; RECORD];
        loop {
            // A flood must not keep the other tasks of this thread from running.
            consume_budget().await;
            let read = self.device.async_io(Interest::READABLE, |mut device| device.read(&mut buffer)).await;
            match read {
                Ok(length) => {
                    let text = String::from_utf8_lossy(&buffer[..length]);
                    for message in self.entries.take(&text, SystemTime::now(), since_boot()) {
                        journal.append(dn, message);
                    }
                }
                // Overwritten unread, or too long to read: the next record shows by its number how many were lost.
                Err(error)
                    if [Errno::EPIPE, Errno::EINVAL]
                        .map(|e| Some(e as i32))
                        .contains(&error.raw_os_error()) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// The clock the kernel stamps its records by.
fn since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default()
}

/// What becomes of records.
#[derive(Debug, Default)]
pub(crate) struct Entries {
    /// The number the next record should have.
    next: Option<u64>,
}

impl Entries {
    /// The entries one record makes: a report of a gap before it, then itself.
    pub(crate) fn take(&mut self, record: &str, now: SystemTime, since_boot: Duration) -> Vec<Message> {
        let Some(KmsgRecord { seq, since_boot: at, mut message, .. }) = kmsg(record) else {
            let text = format!("not a kernel log record: {}", record.trim_end());
            return vec![Message { time: Some(now), ..Message::without_position(Level::Warn, text) }];
        };
        let time = (now + at).checked_sub(since_boot);
        message.time = time;
        let lost = self.next.map_or(0, |next| seq.saturating_sub(next));
        self.next = Some(seq.saturating_add(1));
        let mut entries = Vec::new();
        if lost > 0 {
            let text = format!("{lost} kernel log records were overwritten before they were read");
            entries
                .push(Message { time, ..Message::without_position(Level::Warn, text).field("lost", lost) });
        }
        entries.push(message);
        entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: SystemTime = SystemTime::UNIX_EPOCH;

    /// Reference case 15, its time: now minus what has passed since.
    #[test]
    fn a_records_time_is_now_less_what_has_passed_since() {
        let entries = Entries::default().take("6,1,5000000,-;x", NOW, Duration::from_secs(7));
        assert_eq!(entries[0].time, Some(NOW - Duration::from_secs(2)));
    }

    #[test]
    fn a_gap_in_the_numbers_is_reported_before_the_record_that_shows_it() {
        let mut entries = Entries::default();
        assert_eq!(entries.take("6,10,1,-;a", NOW, Duration::ZERO).len(), 1);
        assert_eq!(entries.take("6,11,1,-;b", NOW, Duration::ZERO).len(), 1);
        let gap = entries.take("6,15,1,-;c", NOW, Duration::ZERO);
        assert_eq!(gap[0].text, "3 kernel log records were overwritten before they were read");
        assert_eq!((gap[0].level, gap[1].text.as_str()), (Level::Warn, "c"));
    }

    #[test]
    fn what_is_no_record_is_kept_as_a_warning() {
        let entries = Entries::default().take("rubbish\n", NOW, Duration::ZERO);
        assert_eq!(entries[0].text, "not a kernel log record: rubbish");
    }
}

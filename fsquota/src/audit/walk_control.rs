//! The walk of an audit: how fast it is, when it ends, and which entries it could not read, since others work in the
//! tree.

use std::io;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::report::MAX_NAMED;
use crate::error::Error;

/// Pauses that are shorter than this are taken together.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);

/// Limits the entries per second. A walk that was slow does not catch up.
pub(super) struct WalkPace {
    /// The time between two entries.
    step: Option<Duration>,
    due: Instant,
}

impl WalkPace {
    pub(super) fn new(entries_per_second: Option<NonZeroU32>) -> Self {
        let step = entries_per_second.map(|rate| Duration::from_secs(1) / rate.get());
        Self { step, due: Instant::now() }
    }

    /// Waits until the next entry is due.
    #[expect(clippy::disallowed_methods, reason = "the walk blocks its thread")]
    pub(super) fn wait(&mut self) {
        if let Some(step) = self.step {
            let pause = self.advance(step, Instant::now());
            if pause >= SHORTEST_PAUSE {
                std::thread::sleep(pause);
            }
        }
    }

    /// The pause before an entry that is visited now.
    fn advance(&mut self, step: Duration, now: Instant) -> Duration {
        let pause = self.due.saturating_duration_since(now);
        self.due = self.due.max(now) + step;
        pause
    }
}

/// The entries that were not inspected, or not repaired.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct UnreadEntries {
    pub(super) count: u64,
    /// The first of them.
    pub(super) paths: Vec<PathBuf>,
}

impl UnreadEntries {
    /// Adds an entry whose visit failed.
    ///
    /// # Errors
    /// The error, if it is not one of the entry alone: the next visit would fail, too.
    pub(super) fn add(&mut self, path: PathBuf, error: io::Error) -> io::Result<()> {
        if !is_of_entry(&error) {
            return Err(error);
        }
        self.count += 1;
        if self.paths.len() < MAX_NAMED {
            self.paths.push(path);
        }
        Ok(())
    }
}

/// Returns whether an error is that of one entry: it was moved or removed, is leased, immutable, damaged, or its new
/// project is full.
fn is_of_entry(error: &io::Error) -> bool {
    // All others, such as a lack of memory or descriptors, would meet the next entry, too.
    matches!(
        error.raw_os_error(),
        Some(
            libc::EAGAIN
                | libc::ENOENT
                | libc::ESTALE
                | libc::EBUSY
                | libc::ETXTBSY
                | libc::EACCES
                | libc::EPERM
                | libc::EIO
                | libc::EUCLEAN
                | libc::ENOSPC
                | libc::EDQUOT
        )
    )
}

/// Ends an audit early.
#[derive(Clone, Copy)]
pub(super) struct AuditStop<'a>(pub(super) &'a dyn Fn() -> bool);

/// The audit is to end. Its source is not an error of the kernel.
#[derive(Debug, thiserror::Error)]
#[error("the audit was canceled")]
struct AuditCanceled;

impl AuditStop<'_> {
    /// Never.
    pub(super) const NEVER: AuditStop<'static> = AuditStop(&|| false);

    /// Fails once the audit is to end.
    pub(super) fn check(self) -> io::Result<()> {
        if (self.0)() { Err(io::Error::other(AuditCanceled)) } else { Ok(()) }
    }
}

/// Tells a canceled audit from a walk that failed.
pub(super) fn walk_error(path: PathBuf, source: io::Error) -> Error {
    if source.get_ref().is_some_and(|inner| inner.is::<AuditCanceled>()) {
        return Error::Canceled;
    }
    Error::AuditTree { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In virtual time, with pauses that are taken together as `wait` does.
    #[test]
    fn a_walk_never_inspects_more_entries_than_its_rate() {
        for rate in [1, 30, 1000, 1_000_000] {
            let mut pace = WalkPace::new(NonZeroU32::new(rate));
            let (start, step) = (pace.due, pace.step.unwrap());
            let mut now = start;
            for entry in 0..5_000_u32 {
                let pause = pace.advance(step, now);
                now += if pause >= SHORTEST_PAUSE { pause } else { Duration::ZERO };
                assert!(now + SHORTEST_PAUSE >= start + step * entry, "{entry} at {rate}/s");
            }
            // After a slow entry it does not catch up.
            now += Duration::from_secs(3600);
            pace.advance(step, now);
            assert_eq!(pace.advance(step, now), step);
        }
    }

    #[test]
    fn an_error_of_one_entry_is_counted_and_another_ends_the_audit() {
        let mut unread = UnreadEntries::default();
        for (number, code) in [libc::EAGAIN, libc::EPERM, libc::EIO].into_iter().enumerate() {
            let added = unread.add(number.to_string().into(), io::Error::from_raw_os_error(code));
            assert!(added.is_ok(), "{added:?}");
        }
        assert_eq!((unread.count, unread.paths.len()), (3, 3));
        for error in [
            io::Error::from_raw_os_error(libc::EMFILE),
            io::Error::from_raw_os_error(libc::ENOMEM),
            io::Error::from_raw_os_error(libc::EROFS),
            io::Error::other(AuditCanceled),
        ] {
            assert!(unread.add("x".into(), error).is_err());
        }
        for number in 0..2 * MAX_NAMED {
            let _ = unread.add(number.to_string().into(), io::Error::from_raw_os_error(libc::EAGAIN));
        }
        assert_eq!((unread.count as usize, unread.paths.len()), (3 + 2 * MAX_NAMED, MAX_NAMED));
    }

    #[test]
    fn a_canceled_walk_has_its_own_error() {
        let canceled = AuditStop(&|| true).check().expect_err("canceled");
        assert!(matches!(walk_error("a".into(), canceled), Error::Canceled));
        assert!(AuditStop::NEVER.check().is_ok());
        let failed = walk_error("a".into(), io::Error::other("broken"));
        assert!(matches!(failed, Error::AuditTree { .. }), "{failed}");
    }
}

//! What an audit could not read: others work in the tree meanwhile.

use std::io;
use std::path::PathBuf;

use super::MAX_NAMED;
use crate::error::Error;

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

/// Whether an error is that of one entry: it was moved or removed, is leased, immutable, damaged, or its new project is
/// full.
fn is_of_entry(error: &io::Error) -> bool {
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

/// The error of a walk.
pub(super) fn walk_error((path, source): (PathBuf, io::Error)) -> Error {
    match source.get_ref().is_some_and(|inner| inner.is::<AuditCanceled>()) {
        true => Error::Canceled,
        false => Error::AuditTree { path, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(matches!(walk_error(("a".into(), canceled)), Error::Canceled));
        assert!(AuditStop::NEVER.check().is_ok());
        let failed = walk_error(("a".into(), io::Error::other("broken")));
        assert!(matches!(failed, Error::AuditTree { .. }), "{failed}");
    }
}

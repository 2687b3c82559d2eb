//! Shows that a limit binds: a file in its directory is written until the kernel refuses.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use crate::error::KernelOperation;
use crate::{Bytes, Error};

/// What the file may have more than the limit before the limit counts as one that doesn't bind: file systems round
/// limits up to their blocks, which have at most 64 KiB.
const MARGIN: u64 = 256 << 10;

/// The size of one write.
const CHUNK: usize = 64 << 10;

/// Writes past the limit of a directory, into a file that has no name: a kill leaves nothing.
///
/// ext4 lets a process with CAP_SYS_RESOURCE pass limits, so the file is written by a thread without it, which ends
/// with the write. XFS stops root, too.
pub(crate) fn verify_limit(dir: BorrowedFd<'_>, limit: Bytes) -> Result<(), Error> {
    let failed = |error: io::Error| KernelOperation::WritePastLimit.into_error()(error);
    let most = limit.0.saturating_add(MARGIN);
    let written = std::thread::scope(|scope| {
        let write = move || -> rustix::io::Result<Option<u64>> {
            let mut sets = capabilities(None)?;
            sets.effective.remove(CapabilitySet::SYS_RESOURCE);
            set_capabilities(None, sets)?;
            write_until_refused(dir, most)
        };
        let thread =
            std::thread::Builder::new().name("quota-verify".to_owned()).spawn_scoped(scope, write)?;
        let ended = thread.join().map_err(|_| io::Error::other("the thread that writes has panicked"))?;
        ended.map_err(io::Error::from)
    });
    match written.map_err(failed)? {
        Some(written) => Err(Error::LimitNotBinding { limit, written: Bytes(written) }),
        None => Ok(()),
    }
}

/// `None` if the kernel has refused a write for lack of space before `most` bytes were written. What was written is
/// synced: a disk that fails, and a limit that is applied only when blocks are allocated, show up then.
fn write_until_refused(dir: BorrowedFd<'_>, most: u64) -> rustix::io::Result<Option<u64>> {
    let is_refusal = |errno| matches!(errno, Errno::NOSPC | Errno::DQUOT);
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = match rustix::fs::openat(dir, c".", flags, Mode::RUSR | Mode::WUSR) {
        Err(errno) if is_refusal(errno) => return Ok(None),
        file => file?,
    };
    // Not zeros, which a file system could store as a hole.
    let chunk = [0xA5; CHUNK];
    let mut written = 0;
    while written <= most {
        match rustix::io::write(file.as_fd(), &chunk) {
            Ok(count) => written += count as u64,
            Err(Errno::INTR) => {}
            Err(errno) if is_refusal(errno) => {
                written = 0;
                break;
            }
            Err(errno) => return Err(errno),
        }
    }
    match rustix::fs::fdatasync(&file) {
        Err(errno) if !is_refusal(errno) => Err(errno),
        Ok(()) if written > most => Ok(Some(written)),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_limit_that_nothing_enforces_does_not_bind_and_its_check_leaves_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let opened = File::open(dir.path()).expect("it exists");
        let before = capabilities(None).expect("readable");
        let found = verify_limit(opened.as_fd(), Bytes(64 << 10));
        assert!(
            matches!(found, Err(Error::LimitNotBinding { written, .. }) if written.0 > 64 << 10),
            "{found:?}"
        );
        assert!(std::fs::read_dir(dir.path()).expect("readable").next().is_none());
        assert_eq!(capabilities(None).expect("readable"), before, "those of the caller stay");
    }
}

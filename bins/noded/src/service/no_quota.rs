//! Volumes without limits, where the operator says that there may be such.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use nix::sys::statvfs::fstatvfs;
use nodekeel_fsquota::{Bytes, Change, Error, Inodes, Limit, Limits, ProjectId, QuotaSetter, Status, Usage};
use nodekeel_logtree::{Dn, Journal, Level, Message};

/// A number that no project has: one below that which the kernel takes for "no project", far from every range.
const NOBODY: ProjectId = ProjectId::new(u32::MAX - 1).expect("it is neither 0 nor the kernel's own");

/// Sets no limits, and says so in the log for each that it was asked for. What a volume takes is told as what its file
/// system takes, because that is what it shares.
pub(crate) struct NoQuota {
    journal: Journal,
    dn: Dn,
}

impl NoQuota {
    pub(crate) fn new(journal: Journal, dn: Dn) -> Self {
        Self { journal, dn }
    }
}

impl QuotaSetter for NoQuota {
    fn set(&self, dir: BorrowedFd<'_>, change: Change) -> Result<Status, Error> {
        let asked = match change.bytes {
            Limit::At(bytes) => format!("the limit of {bytes}"),
            _ => "a limit".to_owned(),
        };
        let place = std::fs::read_link(format!("/proc/self/fd/{}", dir.as_raw_fd())).unwrap_or_default();
        let text = format!(
            "{} is NOT held to {asked} that was asked for: provisioner.quota is \"none\"",
            place.display()
        );
        self.journal.append(&self.dn, Message::new(Level::Warn, text));
        Ok(self.of_file_system(dir))
    }

    fn status(&self, dir: BorrowedFd<'_>) -> Result<Option<Status>, Error> {
        Ok(Some(self.of_file_system(dir)))
    }

    fn clear(&self, _: BorrowedFd<'_>) -> Result<(), Error> {
        Ok(())
    }
}

impl NoQuota {
    fn of_file_system(&self, dir: BorrowedFd<'_>) -> Status {
        // What can't be told is told as nothing, as of a directory that has gone.
        let usage = usage(dir).unwrap_or_default();
        Status { project: NOBODY, limits: Limits::default(), usage }
    }
}

fn usage(dir: BorrowedFd<'_>) -> io::Result<Usage> {
    let stat = fstatvfs(dir)?;
    let blocks = stat.blocks().saturating_sub(stat.blocks_free());
    Ok(Usage {
        bytes: Bytes(blocks.saturating_mul(stat.fragment_size())),
        inodes: Inodes(stat.files().saturating_sub(stat.files_free())),
    })
}

impl fmt::Debug for NoQuota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NoQuota")
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd as _;

    use nodekeel_logtree::Query;

    use super::*;

    #[test]
    fn nothing_is_unlimited_silently() {
        let journal = Journal::new(nodekeel_logtree::Limits::default());
        let dn: Dn = "root.provisioner".parse().expect("a name");
        let quota = NoQuota::new(journal.clone(), dn.clone());
        let scratch = tempfile::tempdir().expect("a directory");
        let dir = File::open(scratch.path()).expect("there");
        let asked = Limits { bytes: Some(Bytes(64 << 20)), inodes: Some(Inodes(1024)) };
        let status = quota.set(dir.as_fd(), asked.into()).expect("it never fails");
        assert_eq!(status.limits, Limits::default(), "it does not claim what does not bind");
        assert!(status.usage.bytes > Bytes(0));
        let log = journal.read(Query::new(dn)).expect("a query").backlog();
        let text = format!("{log:?}");
        assert!(
            text.contains("NOT held to the limit of 64Mi") && text.contains("provisioner.quota"),
            "{text}"
        );
        assert!(text.contains(scratch.path().to_str().expect("UTF-8")), "{text}");
    }
}

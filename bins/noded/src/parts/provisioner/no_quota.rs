//! Volumes without limits, if the operator allows them.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use nix::sys::statvfs::fstatvfs;
use nodekeel_fsquota::{
    Bytes, Error, Inodes, LimitChange, ProjectId, QuotaChange, QuotaLimits, QuotaSetter, QuotaStatus,
    QuotaUsage,
};
use nodekeel_logtree::{Dn, Level, LogMessage, LogStore};

/// A project id that is never assigned: one below the kernel's "no project", outside of every range.
const NO_PROJECT: ProjectId =
    ProjectId::new(u32::MAX - 1).expect("neither 0 nor the kernel's \"no project\"");

/// Sets no limits, and logs a warning for each requested limit. Reports the usage of the file system as the
/// usage of a volume, since volumes share it.
pub(crate) struct NoQuota {
    log_store: LogStore,
    dn: Dn,
}

impl NoQuota {
    pub(crate) fn new(log_store: LogStore, dn: Dn) -> Self {
        Self { log_store, dn }
    }
}

impl QuotaSetter for NoQuota {
    fn set_limits(&self, dir: BorrowedFd<'_>, change: QuotaChange) -> Result<QuotaStatus, Error> {
        let request = match change.bytes {
            LimitChange::Set(bytes) => format!("a limit of {bytes}"),
            _ => "a limit".to_owned(),
        };
        let place = std::fs::read_link(format!("/proc/self/fd/{}", dir.as_raw_fd())).unwrap_or_default();
        let text = format!(
            "{} is NOT limited: {request} was requested, but provisioner.quota is \"none\"",
            place.display()
        );
        self.log_store.append_message(&self.dn, LogMessage::new(Level::Warn, text));
        Ok(self.file_system_status(dir))
    }

    fn read_status(&self, dir: BorrowedFd<'_>) -> Result<Option<QuotaStatus>, Error> {
        Ok(Some(self.file_system_status(dir)))
    }

    fn clear_limits(&self, _: BorrowedFd<'_>) -> Result<(), Error> {
        Ok(())
    }
}

impl NoQuota {
    fn file_system_status(&self, dir: BorrowedFd<'_>) -> QuotaStatus {
        // Unknown usage is reported as zero, for example of a deleted directory.
        let usage = file_system_usage(dir).unwrap_or_default();
        QuotaStatus { project: NO_PROJECT, limits: QuotaLimits::default(), usage }
    }
}

fn file_system_usage(dir: BorrowedFd<'_>) -> io::Result<QuotaUsage> {
    let stat = fstatvfs(dir)?;
    let blocks = stat.blocks().saturating_sub(stat.blocks_free());
    Ok(QuotaUsage {
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

    use nodekeel_logtree::LogQuery;

    use super::*;

    #[test]
    fn a_volume_without_limits_is_logged() {
        let log_store = LogStore::new(nodekeel_logtree::LogLimits::default());
        let dn: Dn = "root.provisioner".parse().expect("a name");
        let quota = NoQuota::new(log_store.clone(), dn.clone());
        let scratch = tempfile::tempdir().expect("a directory");
        let dir = File::open(scratch.path()).expect("there");
        let limits = QuotaLimits { bytes: Some(Bytes(64 << 20)), inodes: Some(Inodes(1024)) };
        let status = quota.set_limits(dir.as_fd(), limits.into()).expect("never fails");
        assert_eq!(status.limits, QuotaLimits::default(), "limits that are not enforced are not reported");
        assert!(status.usage.bytes > Bytes(0));
        let log = log_store.open_reader(LogQuery::of_dn(dn)).expect("a query").read_backlog();
        let text = format!("{log:?}");
        assert!(
            text.contains("NOT limited: a limit of 64Mi") && text.contains("provisioner.quota"),
            "{text}"
        );
        assert!(text.contains(scratch.path().to_str().expect("UTF-8")), "{text}");
    }
}

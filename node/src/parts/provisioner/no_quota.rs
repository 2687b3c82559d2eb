//! Volumes without limits, if the operator allows them.

use std::fmt;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use nodekeel_fsquota::{
    Bytes, Error, Inodes, LimitChange, ProjectId, QuotaChange, QuotaLimits, QuotaSetter, QuotaStatus,
    QuotaUsage,
};
use nodekeel_logtree::{Dn, Level, LogMessage, LogStore};

/// A project id that is never assigned: one below the kernel's "no project", outside of every range.
const NO_PROJECT: ProjectId =
    ProjectId::new(u32::MAX - 1).expect("neither 0 nor the kernel's \"no project\"");

/// The status of each directory. Its use is unknown, and so zero, as for other data: the whole use of the file system,
/// which volumes share, would count once for each of them.
const NO_LIMITS: QuotaStatus = QuotaStatus {
    project: NO_PROJECT,
    limits: QuotaLimits { bytes: None, inodes: None },
    usage: QuotaUsage { bytes: Bytes(0), inodes: Inodes(0) },
};

/// Sets no limits, and logs a warning for each requested limit.
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
        // The path of the descriptor is only for the message: the setter does not know it otherwise.
        let place = std::fs::read_link(format!("/proc/self/fd/{}", dir.as_raw_fd())).unwrap_or_default();
        let text = format!(
            "{} is NOT limited: {request} was requested, but provisioner.quota is \"none\"",
            place.display()
        );
        self.log_store.append_message(&self.dn, LogMessage::new(Level::Warn, text));
        Ok(NO_LIMITS)
    }

    fn read_status(&self, _: BorrowedFd<'_>) -> Result<Option<QuotaStatus>, Error> {
        Ok(Some(NO_LIMITS))
    }

    fn keeps_limits(&self) -> bool {
        false
    }

    fn clear_limits(&self, _: BorrowedFd<'_>) -> Result<(), Error> {
        Ok(())
    }
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
    use std::path::Path;
    use std::sync::Arc;

    use nodekeel_localstorage::Dir;
    use nodekeel_logtree::LogQuery;
    use nodekeel_provisioner::{
        DirStore, StoreCapacity, VolumeId, VolumeKind, VolumeOpener as _, VolumeStore as _,
    };

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
        let log = log_store.open_reader(LogQuery::of_dn(dn)).expect("a query").read_backlog();
        let text = format!("{log:?}");
        assert!(
            text.contains("NOT limited: a limit of 64Mi") && text.contains("provisioner.quota"),
            "{text}"
        );
        assert!(text.contains(scratch.path().to_str().expect("UTF-8")), "{text}");
    }

    fn open_store(base: &Path) -> DirStore {
        let log_store = LogStore::new(nodekeel_logtree::LogLimits::default());
        let quota = NoQuota::new(log_store, "root.provisioner".parse().expect("a name"));
        DirStore::new(Dir::open(base).expect("the base"), Arc::new(quota)).expect("a store")
    }

    async fn capacity(store: &DirStore) -> StoreCapacity {
        store.capacity().await.expect("a capacity").expect("it is limited")
    }

    fn sample_id(last: char) -> VolumeId {
        VolumeId::from_uid(&format!("9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5{last}")).expect("a UUID")
    }

    const LIMITS: QuotaLimits = QuotaLimits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };

    /// A directory has no inode limit here, as a block volume has none elsewhere.
    #[tokio::test]
    async fn a_directory_with_a_file_of_the_name_of_images_stays_a_directory() {
        let base = tempfile::tempdir().expect("a directory");
        let (store, one) = (open_store(base.path()), sample_id('1'));
        store.create_identity().await.expect("an identity");
        store.create(&one, LIMITS).await.expect("created");
        let file = base.path().join("volumes").join(one.as_str()).join(nodekeel_provisioner::IMAGE_FILE);
        std::fs::write(file, "data").expect("a pod writes");
        assert_eq!(store.inspect(&one).expect("served").kind(), VolumeKind::Directory);
    }

    #[tokio::test]
    async fn volumes_without_limits_are_promised_nothing_and_count_as_other_data() {
        let base = tempfile::tempdir().expect("a directory");
        let store = open_store(base.path());
        store.create_identity().await.expect("an identity");
        let [one, two] = ['1', '2'].map(sample_id);
        store.create(&one, LIMITS).await.expect("created");
        store.create(&two, LIMITS).await.expect("created");
        assert_eq!(capacity(&store).await.promised, Bytes(0), "no limit is in force");
        store.remove(&one).await.expect("removed");
        assert_eq!(capacity(&store).await.promised, Bytes(0), "also while it is erased");
        drop(store);
        let capacity = capacity(&open_store(base.path())).await;
        assert!(capacity.reserved.0 >= (capacity.total.0 - capacity.free.0) / 2, "{capacity:?}");
        assert_eq!(capacity.promised, Bytes(0), "as before the restart");
    }
}

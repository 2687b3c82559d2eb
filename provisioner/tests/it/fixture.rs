//! Directory stores: in memory's quota on any file system, and on a guest's disk.

use std::fs;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_fsquota::testing::MemQuota;
use nodekeel_fsquota::{
    Bytes, Error, Inodes, LimitChange, ProjectId, ProjectQuota, QuotaChange, QuotaLimits, QuotaSetter,
    QuotaStatus, QuotaUsage,
};
use nodekeel_localstorage::Dir;
use nodekeel_localstorage::testing::DataCloner;
use nodekeel_provisioner::testing::objects::sample_uid;
use nodekeel_provisioner::{DirStore, DirStoreOptions, SnapshotId, VolumeId, VolumeStore as _};
use tempfile::TempDir;
use testbed::guest::disk::{FileSystem, GuestDisk, MountedDisk};

pub(crate) const MIB: u64 = 1 << 20;

/// Where volumes, snapshots and what belongs to them are.
pub(crate) const PLACES: [&str; 6] = ["volumes", "snapshots", "kinds", ".new", ".trash", ".unpublished"];

pub(crate) fn id(number: u32) -> VolumeId {
    VolumeId::from_uid(&sample_uid(number)).expect("a UUID")
}

pub(crate) fn snapshot_id(number: u32) -> SnapshotId {
    SnapshotId::from_uid(&sample_uid(number)).expect("a UUID")
}

/// A store on any file system: it copies data.
pub(crate) async fn open(base: &Path, quota: &Arc<MemQuota>) -> DirStore {
    open_with(base, quota, DirStoreOptions::default()).await
}

/// A store in a new directory, with the quota that has its limits.
pub(crate) async fn new_store() -> (TempDir, Arc<MemQuota>, DirStore) {
    let (base, quota) = (tempfile::tempdir().expect("a directory"), Arc::default());
    let store = open(base.path(), &quota).await;
    (base, quota, store)
}

/// The same, with options.
pub(crate) async fn open_with(base: &Path, quota: &Arc<MemQuota>, mut options: DirStoreOptions) -> DirStore {
    options.cloner = Arc::new(DataCloner);
    let dir = Dir::open(base).expect("the base");
    let store = DirStore::with_options(dir, Arc::clone(quota) as _, options).expect("a store");
    store.create_identity().await.expect("an identity");
    store
}

/// A store on a new file system of a guest's disk, with project quotas.
pub(crate) async fn open_on_disk(kind: FileSystem) -> (MountedDisk, DirStore) {
    let disk = GuestDisk::acquire().and_then(|disk| disk.format_and_mount(kind, "prjquota"));
    let disk = disk.expect("a disk");
    let quota = Arc::new(ProjectQuota::open(disk.mount_point()).expect("project quotas"));
    let store = DirStore::new(Dir::open(disk.mount_point()).expect("open"), quota).expect("a store");
    store.create_identity().await.expect("an identity");
    (disk, store)
}

/// The names in a directory, sorted; none of a missing one.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Checks that a store keeps nothing in these places.
pub(crate) fn assert_empty(base: &Path, places: &[&str], context: &str) {
    for place in places {
        assert_eq!(names(&base.join(place)), Vec::<String>::new(), "{context}: {place}");
    }
}

/// A quota whose records are files, so that they outlive a process: `<project>` contains the limits, and a
/// directory's project is its inode number. It enforces nothing, but its records can leak like the kernel's.
#[derive(Debug)]
pub(crate) struct FileQuota(pub(crate) PathBuf);

impl FileQuota {
    fn record_path(&self, project: u32) -> PathBuf {
        self.0.join(project.to_string())
    }

    fn read_limits(&self, project: u32) -> Option<QuotaLimits> {
        let text = fs::read_to_string(self.record_path(project)).ok()?;
        let (bytes, inodes) = text.split_once(' ')?;
        // Block and strict volumes have no inode limit.
        let inodes = inodes.parse().ok().map(Inodes);
        Some(QuotaLimits { bytes: Some(Bytes(bytes.parse().ok()?)), inodes })
    }
}

fn inode_project(dir: BorrowedFd<'_>) -> u32 {
    u32::try_from(rustix::fs::fstat(dir).expect("stat").st_ino & 0x7fff_ffff).expect("masked")
}

impl QuotaSetter for FileQuota {
    fn set_limits(&self, dir: BorrowedFd<'_>, change: QuotaChange) -> Result<QuotaStatus, Error> {
        let LimitChange::Set(bytes) = change.bytes else { panic!("{change:?}") };
        let inodes = match change.inodes {
            LimitChange::Set(inodes) => inodes.0.to_string(),
            _ => "unlimited".to_owned(),
        };
        fs::write(self.record_path(inode_project(dir)), format!("{} {inodes}", bytes.0)).expect("write");
        Ok(self.read_status(dir)?.expect("just written"))
    }

    fn read_status(&self, dir: BorrowedFd<'_>) -> Result<Option<QuotaStatus>, Error> {
        let number = inode_project(dir);
        let status = |limits| QuotaStatus {
            project: ProjectId::new(number).expect("not 0"),
            limits,
            usage: QuotaUsage { bytes: Bytes(0), inodes: Inodes(1) },
        };
        Ok(self.read_limits(number).map(status))
    }

    fn clear_limits(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        self.release_project(ProjectId::new(inode_project(dir)).expect("not 0"))
    }

    fn release_project(&self, project: ProjectId) -> Result<(), Error> {
        let _ = fs::remove_file(self.record_path(project.get()));
        Ok(())
    }
}

/// A directory for a store with [`FileQuota`].
pub(crate) fn recorded_base() -> TempDir {
    let base = tempfile::tempdir().expect("a directory");
    fs::create_dir(base.path().join("records")).expect("a directory");
    base
}

/// A store whose limits outlive its process.
pub(crate) async fn open_recorded(base: &Path, mut options: DirStoreOptions) -> DirStore {
    options.cloner = Arc::new(DataCloner);
    let quota = Arc::new(FileQuota(base.join("records")));
    let store = DirStore::with_options(Dir::open(base).expect("the base"), quota, options).expect("a store");
    store.create_identity().await.expect("an identity");
    store
}

//! Directory stores: in memory's quota on any file system, and on a guest's disk.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use nodekeel_fsquota::ProjectQuota;
use nodekeel_fsquota::testing::MemQuota;
use nodekeel_localstorage::Dir;
use nodekeel_localstorage::testing::DataCloner;
use nodekeel_provisioner::testing::objects::sample_uid;
use nodekeel_provisioner::{DirStore, DirStoreOptions, SnapshotId, VolumeId, VolumeStore as _};
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
pub(crate) fn assert_empty(base: &Path, places: &[&str]) {
    for place in places {
        assert_eq!(names(&base.join(place)), Vec::<String>::new(), "{place}");
    }
}

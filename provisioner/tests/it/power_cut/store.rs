//! A store on a recorded disk.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use nodekeel_fsquota::{Bytes, ProjectQuota};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::{CapacityPolicy, DirStore, DirStoreOptions};
use testbed::guest::disk::FileSystem;
use testbed::power_cut::MountedDisk;
use tokio::runtime::Runtime;

pub(super) const MIB: u64 = 1 << 20;

/// How often each byte of the small disk is promised: the files of images are sparse.
const PROMISES: f64 = 16.0;

/// Children that other tests are starting hold the files that are open here until they execute their programs.
pub(super) const FREE_WITHIN: Duration = Duration::from_secs(30);

/// A mounted file system with a store, which is closed before the disk is unmounted.
pub(super) struct MountedStore {
    store: DirStore,
    quota: Arc<ProjectQuota>,
    disk: MountedDisk,
    runtime: Runtime,
}

impl MountedStore {
    pub(super) fn mount(kind: FileSystem, device: &Path) -> Result<Self> {
        let disk = MountedDisk::mount(kind.type_name(), "prjquota", device)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let quota = Arc::new(ProjectQuota::open(disk.path())?);
        let mut options = DirStoreOptions::default();
        options.capacity = CapacityPolicy::try_new(PROMISES, Bytes(0))?;
        let store = DirStore::with_options(Dir::open(disk.path())?, Arc::clone(&quota) as _, options)?;
        Ok(Self { store, quota, disk, runtime })
    }

    pub(super) fn path(&self) -> &Path {
        self.disk.path()
    }

    pub(super) fn store(&self) -> &DirStore {
        &self.store
    }

    pub(super) fn quota(&self) -> &ProjectQuota {
        &self.quota
    }

    /// Runs a call of the store to its end.
    pub(super) fn wait_for<T>(&self, call: impl Future<Output = T>) -> T {
        self.runtime.block_on(call)
    }
}

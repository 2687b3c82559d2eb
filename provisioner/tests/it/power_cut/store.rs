//! A store on a recorded disk.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nodekeel_fsquota::{Bytes, ProjectQuota};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::{CapacityPolicy, DirStore, DirStoreOptions};
use rustix::mount::{UnmountFlags, unmount};
use testbed::guest::disk::FileSystem;
use testbed::{ScratchDir, command_output, wait_until};
use tokio::runtime::Runtime;

pub(super) const MIB: u64 = 1 << 20;

/// How often each byte of the small disk is promised: the files of images are sparse.
const PROMISES: f64 = 16.0;

/// Children that other tests are starting hold the files that are open here until they execute their programs.
pub(super) const FREE_WITHIN: Duration = Duration::from_secs(30);

/// A mounted file system with a store.
pub(super) struct MountedStore {
    scratch: ScratchDir,
    opened: Option<(DirStore, Arc<ProjectQuota>)>,
    runtime: Runtime,
}

impl MountedStore {
    pub(super) fn mount(kind: FileSystem, device: &Path) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let mut command = Command::new("mount");
        command.args(["-t", kind.type_name(), "-o", "prjquota"]).arg(device).arg(scratch.path());
        command_output(&mut command)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut mounted = Self { scratch, opened: None, runtime };
        let quota = Arc::new(ProjectQuota::open(mounted.path())?);
        let mut options = DirStoreOptions::default();
        options.capacity = CapacityPolicy::try_new(PROMISES, Bytes(0))?;
        let store = DirStore::with_options(Dir::open(mounted.path())?, Arc::clone(&quota) as _, options)?;
        mounted.opened = Some((store, quota));
        Ok(mounted)
    }

    pub(super) fn path(&self) -> &Path {
        self.scratch.path()
    }

    pub(super) fn store(&self) -> Result<&DirStore> {
        Ok(&self.opened.as_ref().context("it is mounted")?.0)
    }

    pub(super) fn quota(&self) -> Result<&ProjectQuota> {
        Ok(&self.opened.as_ref().context("it is mounted")?.1)
    }

    /// Runs a call of the store to its end.
    pub(super) fn wait_for<T>(&self, call: impl Future<Output = T>) -> T {
        self.runtime.block_on(call)
    }
}

impl Drop for MountedStore {
    fn drop(&mut self) {
        self.opened = None;
        let _ = wait_until(FREE_WITHIN, "an unmount", || {
            Ok(unmount(self.scratch.path(), UnmountFlags::empty())?)
        });
    }
}

//! Nodes whose store is a directory that can be moved away, as an unmounted disk is.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_fsquota::testing::MemQuota;
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::{FakeApi, MemStore};
use nodekeel_provisioner::{Deps, DirStore, DirStoreOptions, RunError};
use serde_json::json;
use tempfile::TempDir;

use super::harness::{ApiFixture as _, RunningProvisioner, id, test_deps, wait_bound};

/// A provisioner with a store in a directory.
pub(super) struct DirNode {
    base: PathBuf,
    pub(super) store: Arc<DirStore>,
    running: RunningProvisioner,
}

impl DirNode {
    pub(super) fn start(api: &FakeApi, base: &Path) -> Self {
        Self::start_store(api, base, DirStoreOptions::default())
    }

    /// A provisioner whose store opens its directory again after it was lost.
    pub(super) fn start_reopening(api: &FakeApi, base: &Path) -> Self {
        let path = base.to_owned();
        let mut options = DirStoreOptions::default();
        options.opener = Some(Arc::new(move || Ok((Dir::open(&path)?, Arc::new(MemQuota::new()) as _))));
        Self::start_store(api, base, options)
    }

    fn start_store(api: &FakeApi, base: &Path, options: DirStoreOptions) -> Self {
        let dir = Dir::open(base).expect("the base");
        let store = DirStore::with_options(dir, Arc::new(MemQuota::new()), options).expect("a store");
        let store = Arc::new(store);
        let running = RunningProvisioner::start(deps_of(api, &store));
        Self { base: base.to_owned(), store, running }
    }

    pub(super) async fn stop(self) {
        let Self { base, store, running } = self;
        assert!(matches!(running.stop().await, RunError::Canceled));
        drop(store);
        // A check of the store may still be in progress on another thread.
        while DirStore::is_in_use(&Dir::open(&base).expect("the base")).expect("inspect") {
            std::thread::yield_now();
        }
    }

    /// Waits until the run ends by itself.
    pub(super) async fn wait_failed(self) -> RunError {
        self.running.wait_failed().await
    }
}

/// The dependencies of a provisioner with a store in a directory.
pub(crate) fn deps_of(api: &FakeApi, store: &Arc<DirStore>) -> Deps {
    Deps { store: store.clone(), snapshots: Some(store.clone()), ..test_deps(api, &MemStore::default()) }
}

/// A directory with a provisioned volume that holds a file.
pub(super) async fn used_store(api: &FakeApi) -> TempDir {
    let base = tempfile::tempdir().expect("a directory");
    let node = DirNode::start(api, base.path());
    api.create_claim(1, json!({}));
    wait_bound(api, "claim-1").await;
    fs::write(base.path().join("volumes").join(id(1).as_str()).join("file"), "data").expect("a file");
    node.stop().await;
    base
}

pub(super) fn store_id(base: &Path) -> String {
    fs::read_to_string(base.join("store-id")).expect("an identity").trim_end().to_owned()
}

/// Moves a directory away, and puts an empty one in its place, as an unmounted disk leaves it.
pub(super) fn unmount(base: &Path) {
    fs::rename(base, base.with_extension("moved")).expect("moved away");
    fs::create_dir(base).expect("an empty directory");
}

/// Puts the directory back.
pub(super) fn mount(base: &Path) {
    // A check of the store may still be in progress on another thread, and create directories in it.
    while let Err(error) = fs::remove_dir_all(base) {
        assert_eq!(error.kind(), ErrorKind::DirectoryNotEmpty, "{error}");
    }
    fs::rename(base.with_extension("moved"), base).expect("moved back");
}

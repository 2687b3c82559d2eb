//! A copy in progress when its store is closed.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::{fs, path::Path};

use nodekeel_fsquota::QuotaLimits;
use nodekeel_fsquota::testing::MemQuota;
use nodekeel_localstorage::testing::DataCloner;
use nodekeel_localstorage::{Dir, FileCloner};
use nodekeel_provisioner::{DirStore, DirStoreOptions, SnapshotStore as _, VolumeStore as _};

use crate::fixture::{id, snapshot_id};

const LIMITS: QuotaLimits = QuotaLimits { bytes: None, inodes: None };

/// The files of the volume.
const FILES: usize = 64;

/// Waits at its first file until it may go on.
#[derive(Debug)]
struct GatedCloner {
    copied: AtomicUsize,
    started: Sender<()>,
    gate: Mutex<Receiver<()>>,
}

impl FileCloner for GatedCloner {
    fn clone_file(&self, from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
        // The check that files can be cloned has two empty ones.
        if rustix::fs::fstat(from)?.st_size > 0 && self.copied.fetch_add(1, Ordering::Relaxed) == 0 {
            self.started.send(()).map_err(io::Error::other)?;
            self.gate.lock().expect("not poisoned").recv().map_err(io::Error::other)?;
        }
        DataCloner.clone_file(from, to)
    }
}

async fn open(base: &Path, cloner: &Arc<GatedCloner>) -> DirStore {
    let mut options = DirStoreOptions::default();
    options.cloner = Arc::clone(cloner) as _;
    let dir = Dir::open(base).expect("the base");
    let store = DirStore::with_options(dir, Arc::new(MemQuota::new()), options).expect("a store");
    store.create_identity().await.expect("an identity");
    store
}

#[tokio::test]
async fn a_copy_ends_at_its_next_file_when_its_store_is_closed() {
    let base = tempfile::tempdir().expect("a directory");
    let ((started, has_started), (go_on, gate)) = (channel(), channel());
    let cloner = Arc::new(GatedCloner { copied: AtomicUsize::new(0), started, gate: Mutex::new(gate) });
    let store = Arc::new(open(base.path(), &cloner).await);
    let (id, snapshot) = (id(1), snapshot_id(2));
    store.create(&id, LIMITS).await.expect("create");
    for number in 0..FILES {
        let file = base.path().join("volumes").join(id.as_str()).join(number.to_string());
        fs::write(file, "data").expect("a file");
    }
    let copying = tokio::spawn({
        let (store, id) = (Arc::clone(&store), id.clone());
        async move { store.create_snapshot(&snapshot, &id).await }
    });
    tokio::task::spawn_blocking(move || has_started.recv()).await.expect("no panic").expect("it copies");
    let closing = tokio::spawn({
        let store = Arc::clone(&store);
        async move { store.close().await }
    });
    // Once it is being closed, each call fails.
    while store.list().await.is_ok() {}
    go_on.send(()).expect("the copy waits");
    copying.await.expect("no panic").expect_err("it was canceled");
    closing.await.expect("no panic");
    assert_eq!(cloner.copied.load(Ordering::Relaxed), 1, "of {FILES} files");

    let store = open(base.path(), &cloner).await;
    assert_eq!(store.list_snapshots().await.expect("a list"), []);
    assert_eq!(store.list().await.expect("a list"), [id]);
}

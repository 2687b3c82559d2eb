//! The open directory of a store. It is closed while its disk is absent, and then opened again.

use std::convert::Infallible;
use std::hash::RandomState;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use nodekeel_fsquota::QuotaSetter;
use nodekeel_localstorage::{Dir, FileMode};
use tokio::sync::mpsc::{self, Receiver};
use tokio::sync::{Mutex as AsyncMutex, Notify};

use crate::dir_store::capacity::CapacityLedger;
use crate::dir_store::copies::CopyState;
use crate::dir_store::eraser::{EraseQueue, VolumeEraser};
use crate::dir_store::{
    DirStoreError, DirStoreOptions, LOCK_COUNT, STAGING_DIR, StoreInner, TRASH_DIR, VOLUMES_DIR, location,
    try_lock,
};
use crate::step::StepRunner;

/// The directory of a store while it is open, and how to open it again.
pub(super) struct StoreSlot {
    path: PathBuf,
    options: DirStoreOptions,
    /// `None` while the store is lost.
    open: Mutex<Option<OpenStore>>,
    /// Disconnected when nothing of the last open directory is in use any more.
    closed: AsyncMutex<Receiver<Infallible>>,
}

/// An open directory, and the thread that erases in it.
struct OpenStore {
    inner: Arc<StoreInner>,
    _eraser: VolumeEraser,
}

impl StoreSlot {
    /// Opens the directory.
    pub(super) fn open(
        base: Dir,
        quota: Arc<dyn QuotaSetter>,
        options: DirStoreOptions,
    ) -> Result<Self, DirStoreError> {
        let path = base.path().to_owned();
        let (open, closed) = OpenStore::open(base, quota, &options)?;
        Ok(Self { path, options, open: Mutex::new(Some(open)), closed: AsyncMutex::new(closed) })
    }

    /// A directory that is not open.
    pub(super) fn closed(path: &Path, options: DirStoreOptions) -> Self {
        let closed = AsyncMutex::new(mpsc::channel(1).1);
        Self { path: path.to_owned(), options, open: Mutex::new(None), closed }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn has_opener(&self) -> bool {
        self.options.opener.is_some()
    }

    /// The open directory. A caller must not keep it while it waits: the directory is opened again only when
    /// no call uses it any more.
    pub(super) fn inner(&self) -> Result<Arc<StoreInner>, DirStoreError> {
        let inner = self.lock_open().as_ref().map(|open| Arc::clone(&open.inner));
        inner.ok_or_else(|| DirStoreError::Lost { path: self.path.clone() })
    }

    /// Closes the directory, waits for the calls in progress, and opens it again. Without an opener, nothing
    /// happens.
    pub(super) async fn reopen(&self) -> Result<(), DirStoreError> {
        let Some(opener) = self.options.opener.clone() else { return Ok(()) };
        let mut closed = self.closed.lock().await;
        let old = self.lock_open().take();
        // Waits until its eraser stops between two files.
        let _ = tokio::task::spawn_blocking(move || drop(old)).await;
        // Nothing is ever sent.
        let _ = closed.recv().await;
        let options = self.options.clone();
        let open = move || {
            let (base, quota) = opener().map_err(DirStoreError::Reopen)?;
            OpenStore::open(base, quota, &options)
        };
        let opened = tokio::task::spawn_blocking(open).await.unwrap_or(Err(DirStoreError::RuntimeStopped));
        let (open, receiver) = opened?;
        *closed = receiver;
        *self.lock_open() = Some(open);
        Ok(())
    }

    fn lock_open(&self) -> MutexGuard<'_, Option<OpenStore>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenStore {
    /// Locks the directory, and resumes what a killed process has left in progress. The receiver is
    /// disconnected when the directory is closed.
    fn open(
        base: Dir,
        quota: Arc<dyn QuotaSetter>,
        options: &DirStoreOptions,
    ) -> Result<(Self, Receiver<Infallible>), DirStoreError> {
        let ensure = |name| base.ensure_dir(name, FileMode::PRIVATE_DIR).map_err(DirStoreError::Directory);
        let identity = location::read_identity(&base)?;
        let (volumes, staging, trash) = (ensure(VOLUMES_DIR)?, ensure(STAGING_DIR)?, ensure(TRASH_DIR)?);
        let in_use = || DirStoreError::InUse { path: volumes.path().to_owned() };
        let lock = try_lock(&volumes)?.ok_or_else(in_use)?;
        let copies = CopyState::open(&base, &volumes, Arc::clone(&options.cloner))?;
        let (is_open, closed) = mpsc::channel(1);
        let inner = Arc::new(StoreInner {
            base,
            identity: identity.map(OnceLock::from).unwrap_or_default(),
            volumes,
            staging,
            trash,
            quota,
            mode: options.mode,
            ledger: CapacityLedger::new(options.capacity),
            steps: StepRunner::new(options.hook.clone()),
            locks: [const { Mutex::new(()) }; LOCK_COUNT],
            hasher: RandomState::new(),
            erasures: EraseQueue::default(),
            copies,
            missed: Notify::new(),
            _lock: lock,
            _is_open: is_open,
        });
        inner.base.remove_stale_files().map_err(DirStoreError::Directory)?;
        inner.sweep_staging()?;
        let trash_entries = inner.list_trash()?;
        inner.release_leaked_projects(&trash_entries);
        inner.count_promises(&trash_entries)?;
        for entry in trash_entries {
            let bytes = inner.trash.open_dir(entry.content_path()).map_or(0, |dir| inner.used_bytes(&dir));
            inner.erasures.enqueue_entry(entry, bytes);
        }
        let eraser = VolumeEraser::start(&inner).map_err(DirStoreError::StartEraser)?;
        Ok((Self { inner, _eraser: eraser }, closed))
    }
}

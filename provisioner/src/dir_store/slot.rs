//! The open directory of a store. It is closed while its disk is absent, or another one, and then opened again.

use std::convert::Infallible;
use std::hash::RandomState;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use nodekeel_fsquota::QuotaSetter;
use nodekeel_localstorage::{Dir, DirLock, FileMode};
use tokio::sync::mpsc::{self, Receiver};
use tokio::sync::{Mutex as AsyncMutex, Notify};

use crate::dir_store::capacity::CapacityLedger;
use crate::dir_store::copies::CopyState;
use crate::dir_store::eraser::{EraseQueue, VolumeEraser};
use crate::dir_store::kinds::KindMarks;
use crate::dir_store::{
    DirStoreError, DirStoreOptions, LOCK_COUNT, STAGING_DIR, StoreInner, TRASH_DIR, VOLUMES_DIR, location,
    try_lock,
};
use crate::image::Formatter;
use crate::step::StepRunner;

/// The directory of a store while it is open, and how to open it again.
pub(super) struct StoreSlot {
    path: PathBuf,
    options: DirStoreOptions,
    /// `None` while the store is lost.
    open: Arc<Mutex<Option<OpenStore>>>,
    /// Disconnected when nothing of the last open directory is in use any more.
    closed: AsyncMutex<Receiver<Infallible>>,
}

/// An open directory, and the thread that erases in it once the store is served.
struct OpenStore {
    inner: Arc<StoreInner>,
    eraser: Option<VolumeEraser>,
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
        let open = Arc::new(Mutex::new(Some(open)));
        Ok(Self { path, options, open, closed: AsyncMutex::new(closed) })
    }

    /// A directory that is not open.
    pub(super) fn closed(path: &Path, options: DirStoreOptions) -> Self {
        let closed = AsyncMutex::new(mpsc::channel(1).1);
        Self { path: path.to_owned(), options, open: Arc::default(), closed }
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
        let inner = lock(&self.open).as_ref().map(|open| Arc::clone(&open.inner));
        inner.ok_or_else(|| DirStoreError::Lost { path: self.path.clone() })
    }

    /// Resumes what a killed process has left in progress, and erases removed volumes from now on.
    pub(super) async fn start_serving(&self) -> Result<(), DirStoreError> {
        // Not while the directory is opened again.
        let _closed = self.closed.lock().await;
        if lock(&self.open).as_ref().is_some_and(|open| open.eraser.is_some()) {
            return Ok(());
        }
        let (inner, slot) = (self.inner()?, Arc::clone(&self.open));
        let start = move || {
            inner.check_location()?;
            inner.resume_interrupted()?;
            if let Some(open) = lock(&slot).as_mut().filter(|open| open.eraser.is_none()) {
                open.eraser = Some(VolumeEraser::start(&open.inner).map_err(DirStoreError::StartEraser)?);
            }
            Ok::<_, DirStoreError>(())
        };
        tokio::task::spawn_blocking(start).await.unwrap_or(Err(DirStoreError::RuntimeStopped))
    }

    /// Closes the directory, and waits until nothing of it is open any more.
    pub(super) async fn close(&self) {
        let mut closed = self.closed.lock().await;
        self.wait_closed(&mut closed).await;
    }

    /// Closes the directory, waits for the calls in progress, and opens it again. Without an opener, nothing
    /// happens.
    pub(super) async fn reopen(&self) -> Result<(), DirStoreError> {
        let Some(opener) = self.options.opener.clone() else { return Ok(()) };
        let mut closed = self.closed.lock().await;
        self.wait_closed(&mut closed).await;
        let options = self.options.clone();
        let open = move || {
            let (base, quota) = opener().map_err(DirStoreError::Reopen)?;
            OpenStore::open(base, quota, &options)
        };
        let opened = tokio::task::spawn_blocking(open).await.unwrap_or(Err(DirStoreError::RuntimeStopped));
        let (open, receiver) = opened?;
        *closed = receiver;
        *lock(&self.open) = Some(open);
        Ok(())
    }

    async fn wait_closed(&self, closed: &mut Receiver<Infallible>) {
        let old = lock(&self.open).take();
        if let Some(old) = &old {
            old.inner.copies.cancel_copies();
        }
        let close = move || {
            if let Some(old) = &old {
                old.inner.remove_unused_dirs();
            }
            // Waits until its eraser stops between two files.
            drop(old);
        };
        let _ = tokio::task::spawn_blocking(close).await;
        // Nothing is ever sent.
        let _ = closed.recv().await;
    }
}

fn lock(open: &Mutex<Option<OpenStore>>) -> MutexGuard<'_, Option<OpenStore>> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

impl OpenStore {
    /// Locks the directory, and counts what is in it: it may be that of another node, so that nothing in it is changed.
    /// The receiver is disconnected when the directory is closed.
    fn open(
        base: Dir,
        quota: Arc<dyn QuotaSetter>,
        options: &DirStoreOptions,
    ) -> Result<(Self, Receiver<Infallible>), DirStoreError> {
        let lock = |volumes: &Dir| {
            let in_use = || DirStoreError::InUse { path: volumes.path().to_owned() };
            try_lock(volumes)?.ok_or_else(in_use).map(Some)
        };
        let (inner, closed) = StoreInner::open(base, quota, options, lock)?;
        Ok((Self { inner: Arc::new(inner), eraser: None }, closed))
    }
}

impl StoreInner {
    /// Opens the directory beside the store that uses it, to count what is in it. Creates the directories of a store
    /// where they are missing, and changes nothing else.
    pub(super) fn open_beside(
        base: Dir,
        quota: Arc<dyn QuotaSetter>,
        options: &DirStoreOptions,
    ) -> Result<Self, DirStoreError> {
        Self::open(base, quota, options, |_| Ok(None)).map(|(inner, _)| inner)
    }

    fn open(
        base: Dir,
        quota: Arc<dyn QuotaSetter>,
        options: &DirStoreOptions,
        lock: impl FnOnce(&Dir) -> Result<Option<DirLock>, DirStoreError>,
    ) -> Result<(Self, Receiver<Infallible>), DirStoreError> {
        let ensure = |name| base.ensure_dir(name, FileMode::PRIVATE_DIR).map_err(DirStoreError::Directory);
        let identity = location::read_identity(&base)?;
        let (volumes, staging, trash) = (ensure(VOLUMES_DIR)?, ensure(STAGING_DIR)?, ensure(TRASH_DIR)?);
        let lock = lock(&volumes)?;
        let copies = CopyState::open(&base, &volumes, Arc::clone(&options.cloner))?;
        let kinds = KindMarks::open(&base)?;
        let (is_open, closed) = mpsc::channel(1);
        let inner = Self {
            base,
            identity: identity.map(OnceLock::from).unwrap_or_default(),
            volumes,
            staging,
            trash,
            quota,
            mode: options.mode,
            formatter: Formatter::new(options.program_directories.clone()),
            ledger: CapacityLedger::new(options.capacity),
            steps: StepRunner::new(options.hook.clone()),
            locks: [const { Mutex::new(()) }; LOCK_COUNT],
            hasher: RandomState::new(),
            erasures: EraseQueue::default(),
            copies,
            kinds,
            missed: Notify::new(),
            _lock: lock,
            _is_open: is_open,
        };
        inner.count_promises(&inner.list_trash()?)?;
        Ok((inner, closed))
    }

    /// Completes what a killed process has left in progress. It can be called again.
    fn resume_interrupted(&self) -> Result<(), DirStoreError> {
        self.base.remove_stale_files().map_err(DirStoreError::Directory)?;
        self.remove_stale_marks()?;
        let has_moved = self.sweep_staging()?;
        self.remove_stale_kinds()?;
        let trash_entries = self.list_trash()?;
        self.release_leaked_projects(&trash_entries);
        if has_moved {
            self.count_promises(&trash_entries)?;
        }
        for entry in trash_entries {
            let bytes = self.trash.open_dir(entry.content_path()).map_or(0, |dir| self.used_bytes(&dir));
            self.erasures.enqueue_entry(entry, bytes);
        }
        Ok(())
    }

    /// Removes what opening a directory has created in it that is not a store, such as a mount point without its disk.
    fn remove_unused_dirs(&self) {
        if self.identity.get().is_some() {
            return;
        }
        for name in [TRASH_DIR, STAGING_DIR, VOLUMES_DIR] {
            // One that is not empty stays, and an empty one does no harm.
            let _ = self.base.remove_empty_dir(name);
        }
    }
}

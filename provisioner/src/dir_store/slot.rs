//! The open directory of a store. It is closed while its disk is absent, or another one, and then opened again.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nodekeel_fsquota::QuotaSetter;
use nodekeel_localstorage::Dir;
use tokio::sync::Mutex as AsyncMutex;
use tokio::sync::mpsc::{self, Receiver};

use crate::dir_store::eraser::EraserThread;
use crate::dir_store::error::DirStoreError;
use crate::dir_store::open_store::OpenStore;
use crate::dir_store::options::DirStoreOptions;

/// The directory of a store while it is open, and how to open it again.
pub(super) struct StoreSlot {
    path: PathBuf,
    options: DirStoreOptions,
    /// `None` while the store is lost.
    open: Arc<Mutex<Option<OpenSlot>>>,
    /// Disconnected when nothing of the last open directory is in use any more.
    closed: AsyncMutex<Receiver<Infallible>>,
}

/// An open directory, and the thread that erases in it once the store is served.
///
/// The thread is dropped, and so has ended, before the store: nothing of the directory is in use when that is unlocked.
struct OpenSlot {
    eraser: Option<EraserThread>,
    store: Arc<OpenStore>,
}

impl OpenSlot {
    fn open(
        base: Dir,
        quota: Arc<dyn QuotaSetter>,
        options: &DirStoreOptions,
    ) -> Result<(Self, Receiver<Infallible>), DirStoreError> {
        let (store, closed) = OpenStore::open(base, quota, options)?;
        Ok((Self { eraser: None, store: Arc::new(store) }, closed))
    }
}

impl StoreSlot {
    pub(super) fn open(
        base: Dir,
        quota: Arc<dyn QuotaSetter>,
        options: DirStoreOptions,
    ) -> Result<Self, DirStoreError> {
        let path = base.path().to_owned();
        let (open, closed) = OpenSlot::open(base, quota, &options)?;
        let open = Arc::new(Mutex::new(Some(open)));
        Ok(Self { path, options, open, closed: AsyncMutex::new(closed) })
    }

    /// A directory that can't be opened now, until it is [opened again](Self::reopen).
    pub(super) fn closed(path: &Path, options: DirStoreOptions) -> Self {
        let closed = AsyncMutex::new(mpsc::channel(1).1);
        Self { path: path.to_owned(), options, open: Arc::default(), closed }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn program_directories(&self) -> &[PathBuf] {
        &self.options.program_directories
    }

    pub(super) fn has_opener(&self) -> bool {
        self.options.opener.is_some()
    }

    /// The open directory. A caller must not keep it while it waits: the directory is opened again only when
    /// no call uses it any more.
    pub(super) fn store(&self) -> Result<Arc<OpenStore>, DirStoreError> {
        let store = lock(&self.open).as_ref().map(|open| Arc::clone(&open.store));
        store.ok_or_else(|| DirStoreError::Lost { path: self.path.clone() })
    }

    /// Resumes the actions of a killed process, and erases removed volumes from now on.
    pub(super) async fn start_serving(&self) -> Result<(), DirStoreError> {
        // Not while the directory is opened again.
        let _closed = self.closed.lock().await;
        if lock(&self.open).as_ref().is_some_and(|open| open.eraser.is_some()) {
            return Ok(());
        }
        let (store, slot) = (self.store()?, Arc::clone(&self.open));
        let start = move || {
            // Only now is it known to be the store of this node: before, nothing in it may be changed.
            store.location.check()?;
            store.resume_interrupted()?;
            if let Some(open) = lock(&slot).as_mut().filter(|open| open.eraser.is_none()) {
                open.eraser =
                    Some(EraserThread::start(&open.store.eraser).map_err(DirStoreError::StartEraser)?);
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
        // Nothing of the lost directory may stay open: its disk could not be unmounted, nor checked.
        self.wait_closed(&mut closed).await;
        let options = self.options.clone();
        let open = move || {
            let (base, quota) = opener().map_err(DirStoreError::Reopen)?;
            OpenSlot::open(base, quota, &options)
        };
        let opened = tokio::task::spawn_blocking(open).await.unwrap_or(Err(DirStoreError::RuntimeStopped));
        let (open, receiver) = opened?;
        *closed = receiver;
        *lock(&self.open) = Some(open);
        Ok(())
    }

    async fn wait_closed(&self, closed: &mut Receiver<Infallible>) {
        // From now on, calls fail; those in progress keep the store until they return.
        let old = lock(&self.open).take();
        if let Some(old) = &old {
            old.store.is_closing.store(true, Ordering::Relaxed);
        }
        let close = move || {
            if let Some(old) = &old {
                old.store.remove_unused_dirs();
            }
            // Waits until its eraser stops between two files.
            drop(old);
        };
        let _ = tokio::task::spawn_blocking(close).await;
        // Nothing is ever sent.
        let _ = closed.recv().await;
    }
}

fn lock(open: &Mutex<Option<OpenSlot>>) -> MutexGuard<'_, Option<OpenSlot>> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

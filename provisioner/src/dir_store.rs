//! Volumes as directories with quotas.
//!
//! [`OpenStore`] is the list of the parts of a store, and has the order of their steps: how a volume is created,
//! removed and listed. [`StoreSlot`] opens, closes and serves it, and [`DirStore`] runs its work on blocking threads.

use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use nodekeel_fsquota::{AuditOptions, AuditReport, Bytes, QuotaLimits, QuotaSetter};
use nodekeel_localstorage::Dir;
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::JoinHandle;

use crate::capacity::policy::StoreCapacity;
use crate::id::VolumeId;
use crate::image::{ImageFormat, ImageSpec};
use crate::snapshot::{SnapshotId, SnapshotInfo, SnapshotStore, SnapshotStoreError, StoredId};
use crate::store::{
    FoundLimits, LimitAudit, OpenVolume, PublishAttempts, VolumeOpener, VolumeStore, VolumeStoreError,
    VolumeUsage,
};
use crate::store_id::{StoreId, StoreIdentity};

mod capacity;
mod copies;
mod erase_schedule;
mod eraser;
mod error;
mod image_file;
mod images;
mod import;
mod inventory;
mod kinds;
mod limits;
mod location;
mod locks;
mod loss_watch;
mod mount_table;
mod open_store;
mod options;
mod parts;
mod probe;
mod publish_log;
mod slot;
mod staging;
mod stored_dirs;
mod trash;
mod unpublished;

pub use eraser::EraseBacklog;
pub use error::DirStoreError;
pub use image_file::IMAGE_FILE;
#[cfg(any(test, feature = "testing"))]
pub use import::fuzz_move_header;
pub use import::{ImportMode, ImportOutcome, MoveHeader, SourceError, VolumeImporter};
pub use inventory::{StoredEntry, StoredPlace};
pub use options::{DirStoreOptions, DirectoryOpener};

#[cfg(any(test, feature = "testing"))]
pub(crate) use kinds::read_kind_mark;
#[cfg(any(test, feature = "testing"))]
pub(crate) use trash::read_trash_name;

use error::{lost_error, store_error};
use mount_table::MountTable;
use open_store::{OpenReason, OpenStore};
use publish_log::PublishLog;
use slot::StoreSlot;
use stored_dirs::{VOLUMES_DIR, find_dir};

/// A store that keeps each volume as a directory with a dedicated project quota.
///
/// ```text
/// <base>/store-id                   its identity: a UUID and a newline
///        volumes/pvc-<uid>          a volume with its limits
///        snapshots/snap-<uid>       a snapshot, with the limits of its volume
///        kinds/pvc-<uid>            a mark: the volume, or the snapshot, is a block or strict one
///        .unpublished/pvc-<uid>     a mark: the volume was not empty when it was created, and may have no
///                                   PersistentVolume yet
///        .new/pvc-<uid>             staging: a directory that is not a volume yet and not listed
///        .new/.probe                a probe in progress, for as long as it takes
///        .import/                   directories that a `VolumeImporter` turns into volumes, and its records
///        .trash/pvc-<uid>.7.0/      a trash entry: a removed volume whose quota has project 7
///               └─ volume           its remaining data
/// ```
///
/// These directories have mode `0700`, so that other users reach a volume only through its mount; a
/// volume itself has the [mode](DirStoreOptions::mode) that pods need.
///
/// # Block and strict volumes
/// They are directories, too, which no pod sees, with one sparse file, `image`: the content of the block device, or
/// the file system. Its size limits what pods write. The project quota of the directory is larger, for the list of
/// the file's extents and for blocks that are being copied. The mark in `kinds` has the word `block`, `ext4` or
/// `xfs` and a newline. It is written before the volume is renamed into its place; a volume without a mark is a
/// directory.
///
/// # Crash recovery
/// A volume's directory is the only record of whether it exists; the marks only add to it. So no other record can
/// contradict it: a directory in `.new` was never renamed into its place, a directory in `volumes` is complete and has its limits, and a
/// trash entry is to be erased. Both renames are atomic and synced, so a crash at any point leaves each
/// volume in exactly one of the three, and its location determines what to do next. Erasing the directory
/// loses one fact, its project number; it is part of the name of the trash entry, which is removed last.
///
/// A new store in the same directory sweeps `.new` and resumes erasing, once it is known to be the one of its node:
/// when [`start_serving`](VolumeStore::start_serving) or [`create_identity`](VolumeStore::create_identity) is called,
/// as the [`Provisioner`](crate::Provisioner) does. Before, it only creates missing directories, and reads. Each directory has at most one store: it
/// locks `volumes` (`flock`) until it is dropped or closed and its actions in progress are complete. The kernel
/// releases the lock of a killed process.
///
/// # Identity
/// Where a directory is the mount point of a disk, it looks like an empty store while the disk isn't mounted.
/// The file `store-id` distinguishes the two. Without it the store lists volumes and changes none; the
/// [`Provisioner`](crate::Provisioner) creates it where no PersistentVolume of the node names a store yet.
/// Each call checks that the path still leads to the directory that was opened, through the same mount, and
/// that it has the same identity; so does [`wait_until_lost`](VolumeStore::wait_until_lost) when the kernel
/// reports a changed mount, or a call has failed so. With an [opener](DirStoreOptions::opener), a lost store is
/// [opened again](VolumeStore::reopen), and nothing of it stays open before, so that its disk can be unmounted.
///
/// # Erasing
/// A dedicated thread erases trash entries in slices: in turn the entry that has had the fewest, and the oldest
/// one. So a large volume delays neither other calls nor the release of a small one's space. Dropping the store
/// stops the thread between two files; the next store resumes.
pub struct DirStore {
    slot: StoreSlot,
    audits: AuditThreads,
    publishes: PublishLog,
    /// The probe in progress: on a disk that hangs, no second one is started.
    probe: AsyncMutex<Option<RunningProbe>>,
}

/// A probe in progress, or one that has ended since its caller was dropped.
#[derive(Debug)]
struct RunningProbe {
    /// The store that it probes: its result says nothing of the one that was opened after it.
    of: Weak<OpenStore>,
    task: JoinHandle<Result<(), DirStoreError>>,
}

/// The threads in progress that audit limits. Dropping this waits for them, because each holds the directories and the
/// lock of the store; they end soon, since the futures of their audits were dropped before.
#[derive(Debug)]
struct AuditThreads {
    /// Cloned by each thread.
    threads: Option<mpsc::Sender<()>>,
    /// Disconnected when no thread is left.
    ended: Mutex<mpsc::Receiver<()>>,
}

impl Default for AuditThreads {
    fn default() -> Self {
        let (threads, ended) = mpsc::channel();
        Self { threads: Some(threads), ended: Mutex::new(ended) }
    }
}

impl Drop for AuditThreads {
    fn drop(&mut self) {
        // Its own sender is dropped first: while it is left, the channel never disconnects, and `recv` waits
        // forever.
        self.threads = None;
        // Nothing is ever sent.
        let _ = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner).recv();
    }
}

struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl DirStore {
    /// Opens a store in this directory with the default options. Blocks while it counts the volumes. Remains of a
    /// crash stay until [`start_serving`](VolumeStore::start_serving).
    ///
    /// # Errors
    /// [`DirStoreError`]: the directory cannot be used; the message names the change that it needs.
    pub fn new(base: Dir, quota: Arc<dyn QuotaSetter>) -> Result<Self, DirStoreError> {
        Self::with_options(base, quota, DirStoreOptions::default())
    }

    /// Like [`new`](Self::new), with options.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_options(
        base: Dir,
        quota: Arc<dyn QuotaSetter>,
        options: DirStoreOptions,
    ) -> Result<Self, DirStoreError> {
        Ok(Self {
            slot: StoreSlot::open(base, quota, options)?,
            audits: AuditThreads::default(),
            publishes: PublishLog::default(),
            probe: AsyncMutex::default(),
        })
    }

    /// A store whose directory, at this path, can't be opened now: each call fails until
    /// [`reopen`](VolumeStore::reopen) has opened it by the [opener](DirStoreOptions::opener).
    pub fn closed(path: &Path, options: DirStoreOptions) -> Self {
        Self {
            slot: StoreSlot::closed(path, options),
            audits: AuditThreads::default(),
            publishes: PublishLog::default(),
            probe: AsyncMutex::default(),
        }
    }

    /// Returns whether a store currently uses this directory. Changes nothing, but a store that is opened at the same
    /// moment may fail with [`DirStoreError::InUse`].
    ///
    /// # Errors
    /// [`DirStoreError::Directory`], [`DirStoreError::Lock`].
    pub fn is_in_use(base: &Dir) -> Result<bool, DirStoreError> {
        // Without the directory, no store has been opened yet.
        let Some(volumes) = find_dir(base, VOLUMES_DIR)? else { return Ok(false) };
        Ok(location::try_lock(&volumes)?.is_none())
    }

    /// The identity of the store in a directory; `None` if it has none. Changes nothing.
    ///
    /// # Errors
    /// [`DirStoreError::Directory`], [`DirStoreError::InvalidIdentity`].
    pub fn read_identity(base: &Dir) -> Result<Option<StoreId>, DirStoreError> {
        location::read_identity(base)
    }

    /// Does once what a new volume needs, in a directory that may not be a store yet: creates a directory with a small
    /// limit, sees that the limit binds, and removes it. Blocks for as long as the disk takes. A full file system is a
    /// success.
    ///
    /// # Errors
    /// [`DirStoreError::Directory`], [`DirStoreError::Quota`]: volumes can't be created there.
    pub fn probe_directory(base: &Dir, quota: &dyn QuotaSetter) -> Result<(), DirStoreError> {
        match probe::probe_directory(base, quota).map(drop) {
            Err(error) if error.is_full() => Ok(()),
            probed => probed,
        }
    }

    /// Waits until all removed volumes are erased.
    ///
    /// # Cancel safety
    /// Has no side effects.
    pub async fn wait_until_erased(&self) {
        let queue = self.slot.store().map(|store| store.eraser.queue.clone());
        if let Ok(queue) = queue {
            queue.wait_until_empty().await;
        }
    }

    /// The removed volumes that are not erased yet; none while the store is lost.
    pub fn erase_backlog(&self) -> EraseBacklog {
        self.slot.store().map(|store| store.eraser.queue.backlog()).unwrap_or_default()
    }

    /// Runs work on a blocking thread, if this is still the store that was opened.
    async fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&OpenStore) -> Result<T, DirStoreError> + Send + 'static,
    ) -> Result<T, DirStoreError> {
        // The work keeps the store open until it returns, also if this future is dropped; `reopen` waits for
        // that.
        let store = self.slot.store()?;
        let work = move || {
            // On the blocking thread, too: the check reads the disk, and hangs if the disk does.
            store.location.check()?;
            work(&store)
        };
        tokio::task::spawn_blocking(work).await.unwrap_or(Err(DirStoreError::RuntimeStopped))
    }

    /// Runs work on a blocking thread, with the lock of a volume.
    async fn run_locked<T: Send + 'static>(
        &self,
        id: &VolumeId,
        work: impl FnOnce(&OpenStore, &VolumeId) -> Result<T, DirStoreError> + Send + 'static,
    ) -> Result<T, DirStoreError> {
        let (store, id) = (self.slot.store()?, id.clone());
        let work = move || {
            // The lock comes before the check: the store may have been lost while the call waited.
            let _held = store.parts.locks.lock(id.as_str());
            store.location.check()?;
            work(&store, &id)
        };
        tokio::task::spawn_blocking(work).await.unwrap_or(Err(DirStoreError::RuntimeStopped))
    }

    /// Copies, or makes an image, on a blocking thread; a copy whose future is dropped, or whose store is closed, ends
    /// soon.
    async fn run_copy<T: Send + 'static>(
        &self,
        copy: impl FnOnce(&OpenStore, &dyn Fn() -> bool) -> Result<T, DirStoreError> + Send + 'static,
    ) -> Result<T, DirStoreError> {
        let is_canceled = Arc::new(AtomicBool::new(false));
        // Dropping this future does not stop the blocking thread. It sets a flag, which the copy reads
        // between files.
        let _cancel = CancelOnDrop(Arc::clone(&is_canceled));
        let work = move |store: &OpenStore| {
            // Here once for all copies and images; the other changes check it themselves.
            store.location.require_identity()?;
            let is_set = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
            copy(store, &|| is_set(&is_canceled) || is_set(&store.is_closing))
        };
        self.run_blocking(work).await
    }

    fn open_for(&self, id: &VolumeId, reason: OpenReason) -> Result<OpenVolume, VolumeStoreError> {
        let opened = self.slot.store().and_then(|store| store.open_volume(id, reason));
        let failed = |error| VolumeStoreError::Open { id: id.clone(), source: Box::new(error) };
        let (volume, restored) =
            opened.map_err(failed)?.ok_or_else(|| VolumeStoreError::NotFound { id: id.clone() })?;
        if reason == OpenReason::Publish {
            self.publishes.record(id, restored, false);
        }
        Ok(volume)
    }
}

/// The volumes of an audit of the directory of the store.
fn volumes_of_audit(report: AuditReport) -> LimitAudit {
    let id = |path: &Path| path.strip_prefix(VOLUMES_DIR).ok()?.to_str()?.parse::<VolumeId>().ok();
    let uncounted = report.uncounted.iter().filter_map(|(path, count)| Some((id(path)?, *count))).collect();
    LimitAudit { summary: report.summary, uncounted }
}

fn create_error(id: &VolumeId, error: DirStoreError) -> VolumeStoreError {
    store_error(id, error, |id, source| VolumeStoreError::Create { id, source })
}

#[async_trait]
impl VolumeStore for DirStore {
    async fn create(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError> {
        let created = self.run_locked(id, move |store, id| store.create(id, limits)).await;
        created.map_err(|error| create_error(id, error))
    }

    async fn create_image(
        &self,
        id: &VolumeId,
        format: ImageFormat,
        size: Bytes,
    ) -> Result<(), VolumeStoreError> {
        let owned = id.clone();
        let create = move |store: &OpenStore, is_canceled: &dyn Fn() -> bool| {
            store.images.create(&owned, ImageSpec { format, size }, is_canceled)
        };
        self.run_copy(create).await.map_err(|error| create_error(id, error))
    }

    async fn resize(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError> {
        let resized = self.run_locked(id, move |store, id| store.resize(id, limits)).await;
        let resized = resized
            .map_err(|error| store_error(id, error, |id, source| VolumeStoreError::Resize { id, source }))?;
        resized.ok_or_else(|| VolumeStoreError::NotFound { id: id.clone() })
    }

    async fn usage(&self, id: &VolumeId) -> Result<VolumeUsage, VolumeStoreError> {
        let usage = self.run_locked(id, |store, id| store.usage(id)).await;
        let usage =
            usage.map_err(|source| VolumeStoreError::Usage { id: id.clone(), source: Box::new(source) })?;
        usage.ok_or_else(|| VolumeStoreError::NotFound { id: id.clone() })
    }

    async fn find_limits(
        &self,
        id: &VolumeId,
        is_image: bool,
    ) -> Result<Option<FoundLimits>, VolumeStoreError> {
        let keeps_limits = self.slot.store().is_ok_and(|store| store.parts.limits.quota.keeps_limits());
        if !keeps_limits {
            return Ok(None);
        }
        let found = self.run_locked(id, move |store, id| store.find_limits(id, is_image)).await;
        let found =
            found.map_err(|source| VolumeStoreError::Usage { id: id.clone(), source: Box::new(source) })?;
        found.map(Some).ok_or_else(|| VolumeStoreError::NotFound { id: id.clone() })
    }

    async fn restore_limits(&self, id: &VolumeId, limits: QuotaLimits) -> Result<u64, VolumeStoreError> {
        let restored = self.run_locked(id, move |store, id| store.restore_limits(id, limits)).await;
        let failed = |source| VolumeStoreError::Resize { id: id.clone(), source: Box::new(source) };
        restored.map_err(failed)?.ok_or_else(|| VolumeStoreError::NotFound { id: id.clone() })
    }

    async fn wait_for_publish(&self) -> PublishAttempts {
        self.publishes.wait().await
    }

    fn count_promised(&self, volumes: &[(VolumeId, Bytes)]) {
        if let Ok(store) = self.slot.store() {
            store.ledger.count_promised(volumes);
        }
    }

    async fn remove(&self, id: &VolumeId) -> Result<(), VolumeStoreError> {
        let removed = self.run_locked(id, |store, id| store.remove(&id.clone().into())).await;
        removed.map_err(|source| VolumeStoreError::Remove { id: id.clone(), source: Box::new(source) })
    }

    async fn remove_empty(&self, id: &VolumeId) -> Result<bool, VolumeStoreError> {
        let removed = self.run_locked(id, |store, id| store.remove_empty(id)).await;
        removed.map_err(|source| VolumeStoreError::Remove { id: id.clone(), source: Box::new(source) })
    }

    async fn list(&self) -> Result<Vec<VolumeId>, VolumeStoreError> {
        let listed = self.run_blocking(|store| store.ledger.list_and_count()).await;
        listed.map_err(|source| VolumeStoreError::List { source: Box::new(source) })
    }

    async fn capacity(&self) -> Result<Option<StoreCapacity>, VolumeStoreError> {
        let measured = self.run_blocking(|store| store.ledger.capacity()).await;
        measured.map(Some).map_err(|source| VolumeStoreError::Capacity { source: Box::new(source) })
    }

    async fn wait_for_capacity_change(&self, seen: &StoreCapacity) {
        // The store itself is not kept open while this waits; a store that is closed has changed.
        let totals = self.slot.store().map(|store| store.ledger.watch_totals());
        if let Ok(mut totals) = totals {
            let _ = totals.wait_for(|totals| !totals.are_in(seen)).await;
        }
    }

    async fn probe(&self) -> Result<(), VolumeStoreError> {
        let probe_error = |source| VolumeStoreError::Probe { source: Box::new(source) };
        let mut running = self.probe.lock().await;
        let store = self.slot.store().map_err(probe_error)?;
        running.take_if(|probing| !std::ptr::eq(probing.of.as_ptr(), Arc::as_ptr(&store)));
        let probing = match &mut *running {
            Some(probing) => {
                // Not kept while this waits: it could not be closed.
                drop(store);
                probing
            }
            none => {
                let of = Arc::downgrade(&store);
                let task = tokio::task::spawn_blocking(move || {
                    store.location.check()?;
                    store.probe()
                });
                none.insert(RunningProbe { of, task })
            }
        };
        // Dropped here, the probe stays for the next call.
        let probed = (&mut probing.task).await.unwrap_or(Err(DirStoreError::RuntimeStopped));
        *running = None;
        match probed {
            // A matter of capacity, which other disks have.
            Err(error) if error.is_full() => Ok(()),
            probed => probed.map_err(probe_error),
        }
    }

    async fn check_format(&self, format: ImageFormat) -> Result<(), VolumeStoreError> {
        let directories = self.slot.program_directories().to_owned();
        let checked = tokio::task::spawn_blocking(move || format.check_program(&directories)).await;
        // The runtime shuts down: nothing is known.
        checked.unwrap_or(Ok(())).map_err(|source| VolumeStoreError::Probe { source: Box::new(source) })
    }

    async fn audit_limits(&self, options: AuditOptions) -> Result<Option<LimitAudit>, VolumeStoreError> {
        let is_canceled = Arc::new(AtomicBool::new(false));
        let _cancel = CancelOnDrop(Arc::clone(&is_canceled));
        let store =
            self.slot.store().map_err(|source| VolumeStoreError::Audit { source: Box::new(source) })?;
        let thread = self.audits.threads.clone();
        let audit = move || {
            let audited =
                store.location.check().and_then(|()| store.parts.limits.audit(options, &is_canceled));
            // The thread is the last: a store that is dropped waits for it, and then nothing is open.
            drop(store);
            drop(thread);
            audited
        };
        let audited = tokio::task::spawn_blocking(audit).await.unwrap_or(Err(DirStoreError::RuntimeStopped));
        let audited = audited.map_err(|source| VolumeStoreError::Audit { source: Box::new(source) })?;
        Ok(audited.map(volumes_of_audit))
    }

    async fn identity(&self) -> Result<StoreIdentity, VolumeStoreError> {
        let found = self.run_blocking(|store| Ok(store.location.identity().cloned())).await;
        let found = found.map_err(lost_error)?;
        Ok(found.map_or(StoreIdentity::Absent, StoreIdentity::Present))
    }

    async fn wait_until_lost(&self) -> VolumeStoreError {
        let look = || async {
            // Before the check, so that no change is missed.
            let mounts = MountTable::open().map_err(DirStoreError::WatchMounts)?;
            // Each call checks the location.
            self.run_blocking(|_| Ok(())).await?;
            let store = self.slot.store()?;
            tokio::select! {
                changed = mounts.wait_for_change() => changed.map_err(DirStoreError::WatchMounts),
                () = store.location.missed.notified() => Ok(()),
            }
        };
        lost_error(loss_watch::repeat_looks(look).await)
    }

    fn watch_changes(&self) -> Option<BoxFuture<'static, Result<(), VolumeStoreError>>> {
        self.slot.has_opener().then(|| {
            let mounts = MountTable::open();
            let wait = async move { mounts?.wait_for_change().await };
            Box::pin(async { wait.await.map_err(|error| lost_error(DirStoreError::WatchMounts(error))) }) as _
        })
    }

    async fn start_serving(&self) -> Result<(), VolumeStoreError> {
        self.slot.start_serving().await.map_err(lost_error)
    }

    async fn close(&self) {
        self.slot.close().await;
    }

    async fn reopen(&self) -> Result<(), VolumeStoreError> {
        self.slot.reopen().await.map_err(lost_error)
    }

    async fn create_identity(&self) -> Result<StoreIdentity, VolumeStoreError> {
        let created = self.run_blocking(|store| store.location.create_identity()).await;
        let created = created.map_err(lost_error)?;
        // The new identity makes it the store of this node, so that it may change what an earlier process has
        // left.
        self.start_serving().await?;
        Ok(StoreIdentity::Present(created))
    }
}

#[async_trait]
impl SnapshotStore for DirStore {
    async fn create_snapshot(
        &self,
        id: &SnapshotId,
        volume: &VolumeId,
    ) -> Result<SnapshotInfo, SnapshotStoreError> {
        let (owned, of) = (id.clone(), volume.clone());
        let create = move |store: &OpenStore, is_canceled: &dyn Fn() -> bool| {
            store.copies.create_snapshot(&owned, &of, is_canceled)
        };
        match self.run_copy(create).await {
            Ok(Some(info)) => Ok(info),
            Ok(None) => Err(SnapshotStoreError::NoVolume { id: id.clone(), volume: volume.clone() }),
            // The file system has no reflinks, as ext4: a retry can't help.
            Err(DirStoreError::Directory(error)) if error.is_clone_unsupported() => {
                Err(SnapshotStoreError::Unsupported { source: Box::new(error) })
            }
            Err(error) => Err(SnapshotStoreError::Create { id: id.clone(), source: Box::new(error) }),
        }
    }

    async fn find_snapshot(&self, id: &SnapshotId) -> Result<Option<SnapshotInfo>, SnapshotStoreError> {
        let owned = id.clone();
        let found = self.run_blocking(move |store| store.copies.find_snapshot(&owned)).await;
        found.map_err(|error| SnapshotStoreError::Read { id: id.clone(), source: Box::new(error) })
    }

    async fn remove_snapshot(&self, id: &SnapshotId) -> Result<(), SnapshotStoreError> {
        let owned = id.clone();
        let removed = self.run_blocking(move |store| store.remove_snapshot(&owned)).await;
        removed.map_err(|error| SnapshotStoreError::Remove { id: id.clone(), source: Box::new(error) })
    }

    async fn list_snapshots(&self) -> Result<Vec<SnapshotId>, SnapshotStoreError> {
        let listed = self.run_blocking(|store| store.parts.dirs.list_snapshots()).await;
        listed.map_err(|error| SnapshotStoreError::List { source: Box::new(error) })
    }

    async fn create_volume_from(
        &self,
        id: &VolumeId,
        source: &StoredId,
        limits: QuotaLimits,
    ) -> Result<(), VolumeStoreError> {
        let (owned, from) = (id.clone(), source.clone());
        let copy = move |store: &OpenStore, is_canceled: &dyn Fn() -> bool| {
            store.copies.create_volume(&owned, &from, limits, is_canceled)
        };
        self.run_copy(copy).await.map_err(|error| create_error(id, error))
    }

    async fn create_image_from(
        &self,
        id: &VolumeId,
        source: &StoredId,
        format: ImageFormat,
        size: Bytes,
    ) -> Result<(), VolumeStoreError> {
        let (owned, from) = (id.clone(), source.clone());
        let copy = move |store: &OpenStore, is_canceled: &dyn Fn() -> bool| {
            store.copies.create_image(&owned, &from, ImageSpec { format, size }, is_canceled)
        };
        self.run_copy(copy).await.map_err(|error| create_error(id, error))
    }

    async fn mark_published(&self, id: &VolumeId) -> Result<(), VolumeStoreError> {
        // For all volumes but few, this is all.
        if self.slot.store().is_ok_and(|store| !store.unpublished.contains(id)) {
            return Ok(());
        }
        let owned = id.clone();
        let marked = self.run_blocking(move |store| store.unpublished.remove(&owned)).await;
        marked.map_err(|error| VolumeStoreError::Open { id: id.clone(), source: Box::new(error) })
    }
}

impl VolumeOpener for DirStore {
    fn open(&self, id: &VolumeId) -> Result<OpenVolume, VolumeStoreError> {
        self.open_for(id, OpenReason::Publish)
    }

    fn inspect(&self, id: &VolumeId) -> Result<OpenVolume, VolumeStoreError> {
        self.open_for(id, OpenReason::Inspect)
    }

    fn report_failure(&self, id: &VolumeId) {
        self.publishes.record(id, None, true);
    }
}

impl fmt::Debug for DirStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirStore").field("path", &self.slot.path()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_fsquota::testing::MemQuota;
    use nodekeel_fsquota::{Bytes, Inodes, KernelOperation};
    use nodekeel_localstorage::testing::{SyscallAction, with_failpoint_hook};
    use rustix::io::Errno;

    use super::*;

    /// A process killed between a rename and its sync leaves a change that a power loss can undo.
    #[test]
    fn changes_of_a_killed_instance_are_synced_before_success_is_reported() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = Dir::open(base.path()).expect("the base");
        let store = DirStore::new(dir, Arc::new(MemQuota::new())).expect("a store");
        let store = store.slot.store().expect("it is open");
        store.location.create_identity().expect("an identity");
        let id = VolumeId::from_uid("9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f").expect("a UUID");
        let limits = QuotaLimits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };
        let no_sync = |call: &'static str| match call {
            "fsync" => SyscallAction::Fail(Errno::IO.raw_os_error()),
            _ => SyscallAction::Proceed,
        };
        store.create(&id, limits).expect("create");
        with_failpoint_hook(no_sync, || store.create(&id, limits))
            .expect_err("its rename may not be durable");
        store.create(&id, limits).expect("create again");
        store.remove(&id.clone().into()).expect("remove");
        with_failpoint_hook(no_sync, || store.remove(&id.clone().into()))
            .expect_err("its rename may not be durable");
        with_failpoint_hook(no_sync, || store.remove_empty(&id)).expect_err("its removal may not be durable");
        store.remove(&id.clone().into()).expect("remove again");
    }

    #[tokio::test]
    async fn the_result_of_a_probe_says_nothing_of_a_store_that_was_opened_since() {
        let base = tempfile::tempdir().expect("a directory");
        let open = || Dir::open(base.path()).expect("the base");
        let (path, failing) = (base.path().to_owned(), Arc::new(MemQuota::new()));
        let opener = move || Ok((Dir::open(&path)?, Arc::new(MemQuota::new()) as _));
        let options = DirStoreOptions { opener: Some(Arc::new(opener)), ..DirStoreOptions::default() };
        let store = DirStore::with_options(open(), Arc::clone(&failing) as _, options).expect("a store");
        store.create_identity().await.expect("an identity");
        failing.fail_next_kernel_call(KernelOperation::WriteLimits, std::io::ErrorKind::Other);
        // Started, and dropped, mostly before its end.
        let mut probe = store.probe();
        let _ = futures_util::poll!(&mut probe);
        drop(probe);
        // Waits for what is in progress.
        store.reopen().await.expect("the disk was replaced");
        store.probe().await.expect("the new one is able");
    }
}

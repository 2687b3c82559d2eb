//! Volumes as directories with quotas.

use std::convert::Infallible;
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use nodekeel_fsquota::{AuditOptions, AuditSummary, Bytes, ProjectId, QuotaLimits, QuotaSetter, QuotaStatus};
use nodekeel_localstorage::{
    Dir, DirLock, Error as DirError, FileCloner, FileKind, FileMode, Reflink, RenameMode,
};
use tokio::sync::{Notify, mpsc};

use crate::error_chain::format_chain;
use crate::id::VolumeId;
use crate::image::{Formatter, ImageFormat, VolumeKind};
use crate::plan::{CapacityPolicy, StoreCapacity};
use crate::snapshot::StoredId;
use crate::step::{StepHook, StepRunner, VolumeStep};
use crate::store::{ErrorSource, VolumeStore, VolumeStoreError, VolumeUsage, larger_limit};
use crate::store_id::{StoreId, StoreIdentity};

mod audit_threads;
mod capacity;
mod copies;
mod copy_limits;
mod erase_schedule;
mod eraser;
mod error;
mod images;
mod import;
mod inventory;
mod kinds;
mod limits;
mod location;
mod loss_watch;
mod mount_table;
mod opening;
mod slot;
mod snapshots;
mod staging;
mod trash;

pub use eraser::EraseBacklog;
pub use error::DirStoreError;
pub use images::IMAGE_FILE;
pub use import::{ImportMode, ImportOutcome, SourceError, VolumeImporter};
pub use inventory::StoredVolume;

#[cfg(any(test, feature = "testing"))]
pub(crate) use kinds::read_kind_mark;
#[cfg(any(test, feature = "testing"))]
pub(crate) use trash::read_trash_name;

use audit_threads::AuditThreads;
use capacity::CapacityLedger;
use copies::CopyState;
use eraser::EraseQueue;
use error::{lost_error, store_error};
use kinds::KindMarks;
use mount_table::MountTable;
use slot::StoreSlot;
use trash::TrashEntry;

/// Directory of volumes, by id.
const VOLUMES_DIR: &str = "volumes";

/// Directory in which volumes are created.
const STAGING_DIR: &str = ".new";

/// Directory of removed volumes that are being erased.
const TRASH_DIR: &str = ".trash";

/// Number of locks; volumes that share one wait for each other.
const LOCK_COUNT: usize = 64;

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
/// The directories are the only record of a volume's state, so no other record can contradict them: a
/// directory in `.new` was never published, a directory in `volumes` is complete and has its limits, and a
/// trash entry is to be erased. Both renames are atomic and synced, so a crash at any point leaves each
/// volume in exactly one of the three, and its location determines what to do next. Erasing the directory
/// loses one fact, its project number; it is part of the name of the trash entry, which is removed last.
///
/// A new store in the same directory sweeps `.new` and resumes erasing, once it is known to be the one of its node:
/// when [`start_serving`](VolumeStore::start_serving) or [`create_identity`](VolumeStore::create_identity) is called,
/// as the [`Provisioner`](crate::Provisioner) does. Before, it only reads. Each directory has at most one store: it
/// locks `volumes` (`flock`) until it is dropped or closed and its actions in progress are complete. The kernel releases
/// the lock of a killed process.
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
}

/// Opens the directory of a store, and the quota of its file system.
pub type DirectoryOpener = Arc<dyn Fn() -> Result<(Dir, Arc<dyn QuotaSetter>), ErrorSource> + Send + Sync>;

/// Options of a [`DirStore`]; the defaults are what pods need.
#[derive(Clone)]
#[non_exhaustive]
pub struct DirStoreOptions {
    /// The mode of a volume's directory. Default `0777`: containers run as any user, and without fsGroup
    /// support they could not write otherwise. Its parent has mode `0700`, so other users cannot enter it.
    pub mode: FileMode,
    /// How much of the file system may be promised to volumes. Default: each byte once, apart from what other
    /// data occupy.
    pub capacity: CapacityPolicy,
    /// Where `mkfs.ext4` and `mkfs.xfs` of strict volumes are searched before `PATH` and the usual directories. Default:
    /// nowhere.
    pub program_directories: Vec<PathBuf>,
    /// Copies the files of snapshots and of volumes created from a source. Default: [`Reflink`].
    pub cloner: Arc<dyn FileCloner>,
    /// Is called at each step; for tests.
    pub hook: Option<Arc<dyn StepHook>>,
    /// Opens the directory again after it was lost. Default `None`: the caller creates another store.
    pub opener: Option<DirectoryOpener>,
}

impl Default for DirStoreOptions {
    fn default() -> Self {
        Self {
            mode: FileMode::new(0o777),
            capacity: CapacityPolicy::default(),
            program_directories: Vec::new(),
            cloner: Arc::new(Reflink),
            hook: None,
            opener: None,
        }
    }
}

struct StoreInner {
    base: Dir,
    identity: OnceLock<StoreId>,
    volumes: Dir,
    staging: Dir,
    trash: Dir,
    quota: Arc<dyn QuotaSetter>,
    mode: FileMode,
    formatter: Formatter,
    ledger: CapacityLedger,
    steps: StepRunner,
    locks: [Mutex<()>; LOCK_COUNT],
    hasher: RandomState,
    erasures: EraseQueue,
    copies: CopyState,
    kinds: KindMarks,
    /// A call found that the directory is not the store.
    missed: Notify,
    /// Keeps other stores out, until the last action in progress is complete. `None` if this only reads, beside one.
    _lock: Option<DirLock>,
    /// Disconnected when nothing of the directory is open, and it is unlocked.
    _is_open: mpsc::Sender<Infallible>,
}

/// Sets the flag when it is dropped.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl DirStore {
    /// Opens a store in this directory with the default options. Blocks while it counts the volumes. What a crash left
    /// behind stays until [`start_serving`](VolumeStore::start_serving).
    ///
    /// # Errors
    /// [`DirStoreError`]: the directory cannot be used; the message says what to change.
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
        Ok(Self { slot: StoreSlot::open(base, quota, options)?, audits: AuditThreads::default() })
    }

    /// A store whose directory, at this path, can't be opened now: each call fails until
    /// [`reopen`](VolumeStore::reopen) has opened it by the [opener](DirStoreOptions::opener).
    pub fn closed(path: &Path, options: DirStoreOptions) -> Self {
        Self { slot: StoreSlot::closed(path, options), audits: AuditThreads::default() }
    }

    /// Whether a store currently uses this directory. Changes nothing, but a store that is opened at the same
    /// moment may fail with [`DirStoreError::InUse`].
    ///
    /// # Errors
    /// [`DirStoreError::Directory`], [`DirStoreError::Lock`].
    pub fn is_in_use(base: &Dir) -> Result<bool, DirStoreError> {
        match base.open_dir(VOLUMES_DIR) {
            Ok(volumes) => Ok(try_lock(&volumes)?.is_none()),
            // Without the directory, no store has been opened yet.
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(DirStoreError::Directory(error)),
        }
    }

    /// The identity of the store in a directory; `None` if it has none. Changes nothing.
    ///
    /// # Errors
    /// [`DirStoreError::Directory`], [`DirStoreError::InvalidIdentity`].
    pub fn read_identity(base: &Dir) -> Result<Option<StoreId>, DirStoreError> {
        location::read_identity(base)
    }

    /// Waits until all removed volumes are erased.
    ///
    /// # Cancel safety
    /// Has no side effects.
    pub async fn wait_until_erased(&self) {
        let erasures = self.slot.inner().map(|inner| inner.erasures.clone());
        if let Ok(erasures) = erasures {
            erasures.wait_until_idle().await;
        }
    }

    /// The removed volumes that are not erased yet; none while the store is lost.
    pub fn erase_backlog(&self) -> EraseBacklog {
        self.slot.inner().map(|inner| inner.erasures.backlog()).unwrap_or_default()
    }

    /// Runs blocking work on a blocking thread, with the lock of a volume, if any.
    async fn run_blocking<T: Send + 'static>(
        &self,
        id: Option<&VolumeId>,
        work: impl FnOnce(&StoreInner) -> Result<T, DirStoreError> + Send + 'static,
    ) -> Result<T, DirStoreError> {
        let (inner, id) = (self.slot.inner()?, id.cloned());
        let work = move || {
            let _held = id.map(|id| inner.lock_volume(&id));
            inner.check_location()?;
            work(&inner)
        };
        tokio::task::spawn_blocking(work).await.unwrap_or(Err(DirStoreError::RuntimeStopped))
    }
}

impl StoreInner {
    /// Locks a volume.
    fn lock_volume(&self, id: &VolumeId) -> MutexGuard<'_, ()> {
        self.lock_id(id.as_str())
    }

    /// Locks a volume or a snapshot.
    fn lock_id(&self, id: &str) -> MutexGuard<'_, ()> {
        let lock = usize::try_from(self.hasher.hash_one(id) % LOCK_COUNT as u64).unwrap_or_default();
        self.locks[lock].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A volume's directory, if it exists.
    fn find_volume(&self, id: &VolumeId) -> Result<Option<Dir>, DirStoreError> {
        match self.volumes.open_dir(id.as_str()) {
            Ok(dir) => Ok(Some(dir)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(DirStoreError::Directory(error)),
        }
    }

    fn create_volume(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), DirStoreError> {
        self.require_identity()?;
        if let Some(dir) = self.find_volume(id)? {
            self.check_kind((&id.clone().into(), &dir), VolumeKind::Directory)?;
            self.check_not_imported(id, &dir)?;
            self.raise_limits(id, &dir, limits)?;
            return self.sync_volumes();
        }
        let created = self.with_promise(id.as_str(), limits.bytes, || self.create_directory(id, limits));
        if created.is_err() {
            // The claim may be rescheduled to another node and never retried here. What stays is removed at
            // the next start.
            self.discard_failed(&id.clone().into());
        }
        created
    }

    /// Confirms that a missing volume or snapshot was removed: that it is missing from the store, and not from another
    /// directory, or from a disk that can no longer be read.
    fn confirm_removed(&self, id: &StoredId) -> Result<(), DirStoreError> {
        self.check_location()?;
        self.sync_dir_of(id)
    }

    /// Makes renames and removals of a killed instance durable.
    fn sync_volumes(&self) -> Result<(), DirStoreError> {
        self.volumes.sync().map_err(DirStoreError::Directory)
    }

    fn create_directory(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), DirStoreError> {
        let make = || self.staging.ensure_dir(id.as_str(), self.mode);
        let dir = self.steps.run_step(VolumeStep::CreateDirectory, make).map_err(DirStoreError::Directory)?;
        self.steps.run_step(VolumeStep::SetLimits, || self.set_limits(&dir, limits))?;
        // In the file system's journal the rename follows the limits, so the sync that makes it durable makes
        // them durable, too.
        dir.sync().map_err(DirStoreError::Directory)?;
        // A mark that an earlier volume of this name has left.
        self.remove_kind(&id.clone().into())?;
        let publish = || self.staging.rename(id.as_str(), &self.volumes, id.as_str(), RenameMode::NoReplace);
        self.steps.run_step(VolumeStep::RenameIntoPlace, publish).map_err(DirStoreError::Directory)
    }

    /// Raises those limits of an existing volume that are lower.
    fn raise_limits(&self, id: &VolumeId, dir: &Dir, limits: QuotaLimits) -> Result<(), DirStoreError> {
        let old = self.read_status(dir)?.limits;
        let raised = QuotaLimits {
            bytes: larger_limit(old.bytes, limits.bytes),
            inodes: larger_limit(old.inodes, limits.inodes),
        };
        self.ledger.set_limit(id.as_str(), old.bytes);
        match raised == old {
            true => Ok(()),
            false => self.with_promise(id.as_str(), raised.bytes, || self.resize_limits(dir, raised)),
        }
    }

    fn set_limits(&self, dir: &Dir, limits: QuotaLimits) -> Result<(), DirStoreError> {
        let set = self.quota.set_limits(dir.as_fd(), limits.into());
        set.map(drop).map_err(|source| DirStoreError::Quota { path: dir.path().to_owned(), source })
    }

    /// Audits all that lies in the directory, until it is canceled.
    fn audit_limits(
        &self,
        options: AuditOptions,
        is_canceled: &AtomicBool,
    ) -> Result<Option<AuditSummary>, DirStoreError> {
        let is_canceled = || is_canceled.load(Ordering::Relaxed);
        let audited = self.quota.audit_usage(self.base.as_fd(), options, &is_canceled);
        audited.map_err(|source| DirStoreError::Quota { path: self.base.path().to_owned(), source })
    }

    fn read_status(&self, dir: &Dir) -> Result<QuotaStatus, DirStoreError> {
        let status = self.quota.read_status(dir.as_fd());
        let status = status.map_err(|source| DirStoreError::Quota { path: dir.path().to_owned(), source })?;
        status.ok_or_else(|| DirStoreError::NoLimits { path: dir.path().to_owned() })
    }

    /// The project of a volume, also while the limits are not enforced.
    fn find_project(&self, dir: &Dir) -> Result<Option<ProjectId>, DirStoreError> {
        let project = self.quota.find_project(dir.as_fd());
        project.map_err(|source| DirStoreError::Quota { path: dir.path().to_owned(), source })
    }

    /// Renames a volume or a snapshot, if it exists, into a trash entry, and queues that for erasing.
    fn move_to_trash(&self, id: &StoredId) -> Result<(), DirStoreError> {
        self.require_identity()?;
        let (Some(from), Some(dir)) = (self.dir_of(id), self.find_stored(id)?) else {
            return self.confirm_removed(id);
        };
        let (project, bytes) = (self.find_project(&dir)?, self.used_bytes(&dir));
        let create = || TrashEntry::create_entry(&self.trash, id, project);
        let entry =
            self.steps.run_step(VolumeStep::CreateTrashEntry, create).map_err(DirStoreError::Directory)?;
        let move_in = || entry.move_in(from, &self.trash);
        let moved = self.steps.run_step(VolumeStep::MoveToTrash, move_in).map_err(DirStoreError::Directory);
        // If the rename succeeded but its sync failed, no later call would erase the entry.
        if moved.is_ok() || matches!(self.find_stored(id), Ok(None)) {
            self.ledger.move_to_trash(id.as_str(), &entry, Bytes(bytes));
            self.erasures.enqueue_entry(entry, bytes);
        }
        moved?;
        self.remove_kind(id)?;
        match id {
            StoredId::Volume(id) => self.mark_published(id),
            StoredId::Snapshot(_) => Ok(()),
        }
    }

    /// Removes an empty volume, whatever the quota counts: the kernel removes only empty directories.
    fn remove_empty(&self, id: &VolumeId) -> Result<bool, DirStoreError> {
        self.require_identity()?;
        let stored = StoredId::from(id.clone());
        let Some(dir) = self.find_volume(id)? else { return self.confirm_removed(&stored).map(|()| true) };
        if self.copies.is_unpublished(id) {
            return self.move_to_trash(&stored).map(|()| true);
        }
        let failed = |error: DirError| DirStoreError::RemoveEmpty {
            path: dir.path().to_owned(),
            source: error.into_cause(),
        };
        if !dir.is_empty().map_err(failed)? {
            return Ok(false);
        }
        let project = self.find_project(&dir)?;
        let create = || TrashEntry::create_entry(&self.trash, &stored, project);
        let entry =
            self.steps.run_step(VolumeStep::CreateTrashEntry, create).map_err(DirStoreError::Directory)?;
        // The entry stays empty; its name holds the project number, which is released after the volume is
        // removed.
        let remove = || self.volumes.remove_empty_dir(id.as_str());
        let removed = self.steps.run_step(VolumeStep::MoveToTrash, remove);
        self.erasures.enqueue_entry(entry, 0);
        match removed {
            Ok(_) => {
                self.ledger.set_limit(id.as_str(), None);
                self.remove_kind(&stored).map(|()| true)
            }
            Err(error) if error.is_not_empty() => Ok(false),
            Err(error) => Err(failed(error)),
        }
    }

    fn list_volumes(&self) -> Result<Vec<VolumeId>, DirStoreError> {
        list_volume_ids(&self.volumes)
    }

    /// Releases project numbers that a killed instance leaked, which no directory has any more; those of
    /// trash entries are released with the entries.
    fn release_leaked_projects(&self, trash_entries: &[TrashEntry]) {
        let kept: Vec<_> = trash_entries.iter().filter_map(TrashEntry::project).collect();
        match self.quota.release_unused_projects(&kept) {
            Ok(released) if released.is_empty() => {}
            Ok(released) => tracing::info!("released {} leaked projects", released.len()),
            // Leaked projects occupy only their numbers.
            Err(error) => tracing::warn!(
                "release leaked projects: {}; retrying at the next start",
                format_chain(&error)
            ),
        }
    }

    /// The bytes that count against a directory; zero if they are unknown.
    fn used_bytes(&self, dir: &Dir) -> u64 {
        self.read_status(dir).map_or(0, |status| status.usage.bytes.0)
    }

    fn list_trash(&self) -> Result<Vec<TrashEntry>, DirStoreError> {
        let entries = self.trash.list().map_err(DirStoreError::Directory)?;
        Ok(entries.iter().filter_map(|entry| entry.name.as_os_str().to_str()?.parse().ok()).collect())
    }
}

/// The volumes in a directory; other files are none.
fn list_volume_ids(volumes: &Dir) -> Result<Vec<VolumeId>, DirStoreError> {
    let entries = volumes.list().map_err(DirStoreError::Directory)?;
    let dirs = entries.iter().filter(|entry| entry.kind == FileKind::Dir);
    Ok(dirs.filter_map(|entry| entry.name.as_os_str().to_str()?.parse().ok()).collect())
}

/// Locks `volumes` against other stores; `None` if another one has the lock. Its parent stays unlocked: it may be the
/// root of its file system, which processes of earlier releases lock that set limits there; they would wait for this
/// store forever.
fn try_lock(volumes: &Dir) -> Result<Option<DirLock>, DirStoreError> {
    volumes
        .try_lock()
        .map_err(|error| DirStoreError::Lock { path: volumes.path().to_owned(), source: error.into_cause() })
}

#[async_trait]
impl VolumeStore for DirStore {
    async fn create(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError> {
        let owned = id.clone();
        let created = self.run_blocking(Some(id), move |inner| inner.create_volume(&owned, limits)).await;
        created.map_err(|error| store_error(id, error, |id, source| VolumeStoreError::Create { id, source }))
    }

    async fn create_image(
        &self,
        id: &VolumeId,
        format: ImageFormat,
        size: Bytes,
    ) -> Result<(), VolumeStoreError> {
        let owned = id.clone();
        let create = move |inner: &StoreInner, is_canceled: &dyn Fn() -> bool| {
            inner.create_image(&owned, (format, size), is_canceled)
        };
        let created = self.run_copy(create).await;
        created.map_err(|error| store_error(id, error, |id, source| VolumeStoreError::Create { id, source }))
    }

    async fn resize(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError> {
        let owned = id.clone();
        let resize = move |inner: &StoreInner| {
            inner.require_identity()?;
            let Some(dir) = inner.find_volume(&owned)? else { return Ok(None) };
            let set = || inner.resize_limits(&dir, limits);
            match inner.read_kind(&owned.clone().into(), &dir)? {
                VolumeKind::Directory => inner.with_promise(owned.as_str(), limits.bytes, set),
                VolumeKind::Image(_) => inner.resize_image(&owned, &dir, limits),
            }
            .map(Some)
        };
        let resized = self.run_blocking(Some(id), resize).await;
        let resized = resized
            .map_err(|error| store_error(id, error, |id, source| VolumeStoreError::Resize { id, source }))?;
        resized.ok_or_else(|| VolumeStoreError::NotFound { id: id.clone() })
    }

    async fn usage(&self, id: &VolumeId) -> Result<VolumeUsage, VolumeStoreError> {
        let owned = id.clone();
        let read = move |inner: &StoreInner| match inner.find_volume(&owned)? {
            Some(dir) => inner.read_usage(&owned, &dir).map(Some),
            None => Ok(None),
        };
        let usage = self.run_blocking(Some(id), read).await;
        let usage =
            usage.map_err(|source| VolumeStoreError::Usage { id: id.clone(), source: Box::new(source) })?;
        usage.ok_or_else(|| VolumeStoreError::NotFound { id: id.clone() })
    }

    async fn remove(&self, id: &VolumeId) -> Result<(), VolumeStoreError> {
        let owned = StoredId::from(id.clone());
        let moved = self.run_blocking(Some(id), move |inner| inner.move_to_trash(&owned)).await;
        moved.map_err(|source| VolumeStoreError::Remove { id: id.clone(), source: Box::new(source) })
    }

    async fn remove_empty(&self, id: &VolumeId) -> Result<bool, VolumeStoreError> {
        let owned = id.clone();
        let removed = self.run_blocking(Some(id), move |inner| inner.remove_empty(&owned)).await;
        removed.map_err(|source| VolumeStoreError::Remove { id: id.clone(), source: Box::new(source) })
    }

    async fn list(&self) -> Result<Vec<VolumeId>, VolumeStoreError> {
        let listed = self.run_blocking(None, StoreInner::list_and_count).await;
        listed.map_err(|source| VolumeStoreError::List { source: Box::new(source) })
    }

    async fn capacity(&self) -> Result<Option<StoreCapacity>, VolumeStoreError> {
        let measured = self.run_blocking(None, StoreInner::capacity).await;
        measured.map(Some).map_err(|source| VolumeStoreError::Capacity { source: Box::new(source) })
    }

    async fn wait_for_capacity_change(&self, seen: &StoreCapacity) {
        // The store itself is not kept open meanwhile; a store that is closed has changed.
        let totals = self.slot.inner().map(|inner| inner.ledger.watch_totals());
        if let Ok(mut totals) = totals {
            let _ = totals.wait_for(|totals| !totals.are_in(seen)).await;
        }
    }

    async fn audit_limits(&self, options: AuditOptions) -> Result<Option<AuditSummary>, VolumeStoreError> {
        let is_canceled = Arc::new(AtomicBool::new(false));
        let _cancel = CancelOnDrop(Arc::clone(&is_canceled));
        let inner =
            self.slot.inner().map_err(|source| VolumeStoreError::Audit { source: Box::new(source) })?;
        let thread = self.audits.add_thread();
        let audit = move || {
            let audited = inner.check_location().and_then(|()| inner.audit_limits(options, &is_canceled));
            // The thread is the last: a store that is dropped waits for it, and then nothing is open.
            drop(inner);
            drop(thread);
            audited
        };
        let audited = tokio::task::spawn_blocking(audit).await.unwrap_or(Err(DirStoreError::RuntimeStopped));
        audited.map_err(|source| VolumeStoreError::Audit { source: Box::new(source) })
    }

    async fn identity(&self) -> Result<StoreIdentity, VolumeStoreError> {
        let found = self.run_blocking(None, |inner| Ok(inner.identity.get().cloned())).await;
        let found = found.map_err(lost_error)?;
        Ok(found.map_or(StoreIdentity::Absent, StoreIdentity::Present))
    }

    async fn wait_until_lost(&self) -> VolumeStoreError {
        lost_error(self.wait_for_loss().await)
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
        let created = self.run_blocking(None, StoreInner::create_identity).await.map_err(lost_error)?;
        self.start_serving().await?;
        Ok(StoreIdentity::Present(created))
    }
}

impl fmt::Debug for DirStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirStore").field("path", &self.slot.path()).finish_non_exhaustive()
    }
}

impl fmt::Debug for DirStoreOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DirStoreOptions").field("mode", &self.mode).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_fsquota::testing::MemQuota;
    use nodekeel_fsquota::{Bytes, Inodes};
    use nodekeel_localstorage::testing::{SyscallAction, with_failpoint_hook};
    use rustix::io::Errno;

    use super::*;

    /// A process killed between a rename and its sync leaves a change that a power loss can undo.
    #[test]
    fn changes_of_a_killed_instance_are_synced_before_success_is_reported() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = Dir::open(base.path()).expect("the base");
        let store = DirStore::new(dir, Arc::new(MemQuota::new())).expect("a store");
        let inner = store.slot.inner().expect("it is open");
        inner.create_identity().expect("an identity");
        let id = VolumeId::from_uid("9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f").expect("a UUID");
        let limits = QuotaLimits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };
        let no_sync = |call: &'static str| match call {
            "fsync" => SyscallAction::Fail(Errno::IO.raw_os_error()),
            _ => SyscallAction::Proceed,
        };
        inner.create_volume(&id, limits).expect("create");
        with_failpoint_hook(no_sync, || inner.create_volume(&id, limits))
            .expect_err("its rename may not be durable");
        inner.create_volume(&id, limits).expect("create again");
        inner.move_to_trash(&id.clone().into()).expect("remove");
        with_failpoint_hook(no_sync, || inner.move_to_trash(&id.clone().into()))
            .expect_err("its rename may not be durable");
        with_failpoint_hook(no_sync, || inner.remove_empty(&id)).expect_err("its removal may not be durable");
        inner.move_to_trash(&id.clone().into()).expect("remove again");
    }
}

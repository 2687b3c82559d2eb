//! A store whose directory is open: the list of its parts, and how volumes are created, removed and listed.

use std::convert::Infallible;
use std::os::fd::AsFd as _;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use nodekeel_fsquota::{Bytes, ProjectId, QuotaLimits, QuotaSetter};
use nodekeel_localstorage::{Dir, DirLock, Error as DirError, FileMode, FileOperation};
use tokio::sync::mpsc::{self, Receiver};

use crate::claim::size;
use crate::dir_store::capacity::CapacityLedger;
use crate::dir_store::copies::CopyStore;
use crate::dir_store::eraser::{EraseQueue, Eraser};
use crate::dir_store::error::DirStoreError;
use crate::dir_store::image_file::{image_size, open_image, read_image, visible_limits};
use crate::dir_store::images::ImageVolumes;
use crate::dir_store::import::journal::{check_import_complete, has_record};
use crate::dir_store::kinds::KindMarks;
use crate::dir_store::limits::VolumeLimits;
use crate::dir_store::location::{self, StoreLocation, try_lock};
use crate::dir_store::locks::EntryLocks;
use crate::dir_store::options::DirStoreOptions;
use crate::dir_store::parts::StoreParts;
use crate::dir_store::probe::probe_directory;
use crate::dir_store::staging::StagingArea;
use crate::dir_store::stored_dirs::{StoredDirs, VOLUMES_DIR};
use crate::dir_store::trash::{Trash, TrashEntry};
use crate::dir_store::unpublished::UnpublishedMarks;
use crate::error_chain::format_chain;
use crate::id::VolumeId;
use crate::image::{Formatter, VolumeKind, directory_limits, has_directory_limits, promised_bytes};
use crate::snapshot::{SnapshotId, StoredId};
use crate::step::{StepRunner, VolumeStep};
use crate::store::{FoundLimits, OpenVolume, VolumeUsage};

/// Directory in which volumes are created.
pub(super) const STAGING_DIR: &str = ".new";

/// Directory of removed volumes that are being erased.
pub(super) const TRASH_DIR: &str = ".trash";

/// The purpose of opening a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OpenReason {
    /// A pod, which may write.
    Publish,
    /// A look at its mounts.
    Inspect,
}

/// The parts of a store. Each uses only parts that are listed before it.
pub(super) struct OpenStore {
    pub(super) parts: StoreParts,
    pub(super) location: StoreLocation,
    pub(super) unpublished: Arc<UnpublishedMarks>,
    trash: Arc<Trash>,
    pub(super) ledger: Arc<CapacityLedger>,
    pub(super) eraser: Arc<Eraser>,
    staging: Arc<StagingArea>,
    pub(super) images: Arc<ImageVolumes>,
    pub(super) copies: CopyStore,
    /// The mode of a new volume's directory.
    mode: FileMode,
    /// The directory is being closed: copies in progress, and those that wait for them, end before their next file.
    pub(super) is_closing: AtomicBool,
    /// Projects of probes that the kernel has not released yet.
    probe_leftovers: Mutex<Vec<ProjectId>>,
    /// Keeps other stores out, until the last action in progress is complete. `None` for a look at a store that another
    /// process serves.
    _lock: Option<DirLock>,
    /// Disconnected when nothing of the directory is open, and it is unlocked.
    _is_open: mpsc::Sender<Infallible>,
}

impl OpenStore {
    /// Locks the directory, creates missing ones in it, and counts its volumes. It may be that of another node, so no
    /// volume is changed.
    /// The receiver is disconnected when the directory is closed.
    pub(super) fn open(
        base: Dir,
        quota: Arc<dyn QuotaSetter>,
        options: &DirStoreOptions,
    ) -> Result<(Self, Receiver<Infallible>), DirStoreError> {
        Self::open_with(base, quota, options, |volumes| {
            let in_use = || DirStoreError::InUse { path: volumes.path().to_owned() };
            try_lock(volumes)?.ok_or_else(in_use).map(Some)
        })
    }

    /// Opens the directory of a store that another process may serve, to count what is in it. Creates the directories
    /// of a store where they are missing, and changes nothing else.
    pub(super) fn open_unlocked(
        base: Dir,
        quota: Arc<dyn QuotaSetter>,
        options: &DirStoreOptions,
    ) -> Result<Self, DirStoreError> {
        Self::open_with(base, quota, options, |_| Ok(None)).map(|(store, _)| store)
    }

    fn open_with(
        base: Dir,
        quota: Arc<dyn QuotaSetter>,
        options: &DirStoreOptions,
        lock: impl FnOnce(&Dir) -> Result<Option<DirLock>, DirStoreError>,
    ) -> Result<(Self, Receiver<Infallible>), DirStoreError> {
        let ensure = |name| base.ensure_dir(name, FileMode::PRIVATE_DIR).map_err(DirStoreError::Directory);
        let identity = location::read_identity(&base)?;
        let (volumes, staging, trash) = (ensure(VOLUMES_DIR)?, ensure(STAGING_DIR)?, ensure(TRASH_DIR)?);
        // Before anything is counted: another store could change it.
        let lock = lock(&volumes)?;
        let steps = StepRunner::new(options.hook.clone());
        let dirs = Arc::new(StoredDirs::open(base, volumes)?);
        let location = StoreLocation::new(Arc::clone(&dirs), identity);
        let limits = Arc::new(VolumeLimits { quota, dirs: Arc::clone(&dirs), steps: steps.clone() });
        let kinds = Arc::new(KindMarks::open(Arc::clone(&limits), steps.clone())?);
        let unpublished = Arc::new(UnpublishedMarks::open(Arc::clone(&dirs), steps.clone())?);
        let trash = Arc::new(Trash { dir: trash, steps: steps.clone() });
        let parts = StoreParts { dirs, locks: Arc::new(EntryLocks::new()), limits, kinds, steps };
        let ledger = Arc::new(CapacityLedger::new(options.capacity, parts.clone(), Arc::clone(&trash)));
        ledger.count(&trash.list()?)?;
        let eraser = Arc::new(Eraser {
            parts: parts.clone(),
            queue: EraseQueue::default(),
            trash: Arc::clone(&trash),
            ledger: Arc::clone(&ledger),
        });
        let staging = Arc::new(StagingArea {
            parts: parts.clone(),
            dir: staging,
            unpublished: Arc::clone(&unpublished),
            trash: Arc::clone(&trash),
            queue: eraser.queue.clone(),
        });
        let images = Arc::new(ImageVolumes {
            parts: parts.clone(),
            formatter: Formatter::new(options.program_directories.clone()),
            ledger: Arc::clone(&ledger),
            staging: Arc::clone(&staging),
        });
        let copies = CopyStore {
            parts: parts.clone(),
            ledger: Arc::clone(&ledger),
            staging: Arc::clone(&staging),
            images: Arc::clone(&images),
            cloner: Arc::clone(&options.cloner),
        };
        let (is_open, closed) = mpsc::channel(1);
        let store = Self {
            parts,
            location,
            unpublished,
            trash,
            ledger,
            eraser,
            staging,
            images,
            copies,
            mode: options.mode,
            is_closing: AtomicBool::new(false),
            probe_leftovers: Mutex::default(),
            _lock: lock,
            _is_open: is_open,
        };
        Ok((store, closed))
    }

    /// Completes the actions that a killed process has left. It can be called again.
    pub(super) fn resume_interrupted(&self) -> Result<(), DirStoreError> {
        self.parts.dirs.base.remove_stale_files().map_err(DirStoreError::Directory)?;
        self.unpublished.remove_stale()?;
        // Staging before the marks of kinds: a discarded volume needs none. Both before the trash is listed,
        // which large incomplete volumes are moved into.
        let has_moved = self.staging.sweep()?;
        self.parts.kinds.remove_stale()?;
        let entries = self.trash.list()?;
        let kept: Vec<_> = entries.iter().filter_map(TrashEntry::project).collect();
        self.parts.limits.release_leaked_projects(&kept);
        if has_moved {
            self.ledger.count(&entries)?;
        }
        for entry in entries {
            let bytes = self.eraser.content_bytes(&entry);
            self.eraser.queue.enqueue_entry(entry, bytes);
        }
        Ok(())
    }

    /// Does once what a new volume needs.
    pub(super) fn probe(&self) -> Result<(), DirStoreError> {
        self.location.require_identity()?;
        let quota = &*self.parts.limits.quota;
        let mut leftovers = self.probe_leftovers.lock().unwrap_or_else(PoisonError::into_inner);
        // What still fails is tried at the next probe; a project occupies only its number.
        leftovers.retain(|project| quota.release_project(*project).is_err());
        leftovers.extend(probe_directory(&self.staging.dir, quota)?);
        Ok(())
    }

    /// Removes the directories that opening has created where there is no store, as in a mount point without its disk.
    pub(super) fn remove_unused_dirs(&self) {
        if self.location.identity().is_some() {
            return;
        }
        for name in [TRASH_DIR, STAGING_DIR, VOLUMES_DIR] {
            // One that is not empty stays, and an empty one does no harm.
            let _ = self.parts.dirs.base.remove_empty_dir(name);
        }
    }

    /// Creates a volume that is a directory, or raises the limits of an existing one. The caller holds its lock.
    pub(super) fn create(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), DirStoreError> {
        self.location.require_identity()?;
        let stored = StoredId::from(id.clone());
        if let Some(dir) = self.parts.dirs.find(&stored)? {
            self.parts.kinds.check(&stored, &dir, VolumeKind::Directory)?;
            check_import_complete(&self.parts.dirs.base, id, &dir)?;
            self.ledger.raise_limits(id, &dir, limits)?;
            return self.parts.dirs.sync(&stored);
        }
        let created = self.ledger.with_promise(id.as_str(), limits.bytes, || {
            // Phase 1: an empty directory that gets its limits where nothing lists it. A start after a crash discards
            // it.
            let dir = self.staging.create(&stored, self.mode, limits)?;
            // Phase 2: the directory and its mode are durable. In the file system's journal the rename follows the
            // limits, so the sync that makes it durable makes them durable, too.
            dir.sync().map_err(DirStoreError::Directory)?;
            // Phase 3: the mark that an earlier volume of this name has left would make this one an image. It goes
            // before the rename, since pods may have the volume from then on.
            self.parts.kinds.remove(&stored)?;
            // Phase 4: the volume exists, at once with all that it needs.
            self.staging.rename_into(&stored, &self.parts.dirs.volumes)
        });
        created.inspect_err(|_| self.staging.discard_failed(&stored))
    }

    /// Sets the limits of a volume; `None` if it does not exist. The caller holds its lock.
    pub(super) fn resize(&self, id: &VolumeId, limits: QuotaLimits) -> Result<Option<()>, DirStoreError> {
        self.location.require_identity()?;
        let Some(dir) = self.parts.dirs.find_volume(id)? else { return Ok(None) };
        match self.parts.kinds.read(&id.clone().into(), &dir)? {
            VolumeKind::Directory => self.ledger.resize(id, &dir, limits)?,
            VolumeKind::Image(_) => self.images.resize(id, &dir, limits)?,
        }
        Ok(Some(()))
    }

    /// The limits and the usage of a volume, as its users see them; `None` if it does not exist.
    pub(super) fn usage(&self, id: &VolumeId) -> Result<Option<VolumeUsage>, DirStoreError> {
        let Some(dir) = self.parts.dirs.find_volume(id)? else { return Ok(None) };
        let (status, kind) =
            (self.parts.limits.read_status(&dir)?, self.parts.kinds.read(&id.clone().into(), &dir)?);
        Ok(Some(VolumeUsage { limits: visible_limits(kind, &dir, status.limits)?, usage: status.usage }))
    }

    /// The limits of a volume as the kernel has them; `None` if it does not exist. The caller holds its lock, and knows
    /// whether it is an image.
    pub(super) fn find_limits(
        &self,
        id: &VolumeId,
        is_image: bool,
    ) -> Result<Option<FoundLimits>, DirStoreError> {
        let Some(dir) = self.parts.dirs.find_volume(id)? else { return Ok(None) };
        let kind = self.known_kind(id, &dir, is_image)?;
        let Some(status) = self.parts.limits.find_status(&dir)? else {
            let (limits, usage) = Default::default();
            return Ok(Some(FoundLimits { limits, usage, is_own: false }));
        };
        let limits = match kind {
            VolumeKind::Directory => status.limits,
            // The directory of an image needs its limits, too, which the size does not tell.
            VolumeKind::Image(_) if !has_directory_limits(image_size(&dir)?, status.limits) => {
                QuotaLimits::default()
            }
            VolumeKind::Image(_) => visible_limits(kind, &dir, status.limits)?,
        };
        Ok(Some(FoundLimits { limits, usage: status.usage, is_own: self.parts.limits.is_own(&dir)? }))
    }

    /// The kind of a volume whose PersistentVolume says whether it is an image. One that is none needs no limits for
    /// it to be seen: its pod may have a file of the name of an image.
    fn known_kind(&self, id: &VolumeId, dir: &Dir, is_image: bool) -> Result<VolumeKind, DirStoreError> {
        let stored = StoredId::from(id.clone());
        if is_image {
            return self.parts.kinds.read(&stored, dir);
        }
        match self.parts.kinds.read_marked(&stored)? {
            VolumeKind::Directory => Ok(VolumeKind::Directory),
            found => Err(DirStoreError::OtherKind { id: stored, found, wanted: VolumeKind::Directory }),
        }
    }

    /// Sets the limits of a volume that has lost them; `None` if it does not exist. Without an inode limit, it is an
    /// image. Returns the number of files and directories that don't count all the same. The caller holds its lock.
    pub(super) fn restore_limits(
        &self,
        id: &VolumeId,
        limits: QuotaLimits,
    ) -> Result<Option<u64>, DirStoreError> {
        self.location.require_identity()?;
        let Some(dir) = self.parts.dirs.find_volume(id)? else { return Ok(None) };
        let (of_directory, promised) = match self.known_kind(id, &dir, limits.inodes.is_none())? {
            VolumeKind::Directory => (limits, limits.bytes),
            VolumeKind::Image(_) => {
                let size = image_size(&dir)?;
                (directory_limits(size), Some(promised_bytes(size)))
            }
        };
        // Before they are set: what can't be limited is promised all the same.
        self.ledger.set_limit(id.as_str(), promised);
        let restore = || self.parts.limits.restore(&dir, of_directory);
        self.parts.steps.run_step(VolumeStep::ResizeLimits, restore).map(Some)
    }

    /// Removes a volume or a snapshot, if it exists; its data are erased later. The caller holds its lock.
    pub(super) fn remove(&self, id: &StoredId) -> Result<(), DirStoreError> {
        self.location.require_identity()?;
        let (Some(parent), Some(dir)) = (self.parts.dirs.parent(id), self.parts.dirs.find(id)?) else {
            return self.confirm_removed(id);
        };
        // Phase 1: an entry whose name has the project. Erasing the directory loses its number; after a crash in between,
        // only the entry tells which one to release.
        let (project, bytes) = (self.parts.limits.find_project(&dir)?, self.parts.limits.used_bytes(&dir));
        let entry = self.trash.create_entry(id, project)?;
        // Phase 2: one rename, after which nothing finds the volume. It has been renamed also if only its sync failed;
        // then no later call would erase the entry.
        let moved = self.trash.move_in(&entry, parent);
        if moved.is_ok() || matches!(self.parts.dirs.find(id), Ok(None)) {
            self.ledger.move_to_trash(id.as_str(), &entry, Bytes(bytes));
            self.eraser.queue.enqueue_entry(entry, bytes);
        }
        moved?;
        // Phase 3: the marks, which protected the volume until now. A start removes those that a crash leaves.
        self.parts.kinds.remove(id)?;
        match id {
            StoredId::Volume(id) => self.unpublished.remove(id),
            StoredId::Snapshot(_) => Ok(()),
        }
    }

    /// Removes an empty volume, by the kernel, which removes only empty directories, and not by the usage that the
    /// quota counts. The caller holds its lock.
    pub(super) fn remove_empty(&self, id: &VolumeId) -> Result<bool, DirStoreError> {
        self.location.require_identity()?;
        let stored = StoredId::from(id.clone());
        let Some(dir) = self.parts.dirs.find(&stored)? else {
            return self.confirm_removed(&stored).map(|()| true);
        };
        // A copy or an image without a PersistentVolume has data that its source has, too, or none.
        if self.unpublished.contains(id) {
            return self.remove(&stored).map(|()| true);
        }
        let failed = |error: DirError| DirStoreError::RemoveEmpty {
            path: dir.path().to_owned(),
            source: error.into_cause(),
        };
        // A look before the entry is created: most calls concern volumes with data. The kernel decides below.
        if !dir.is_empty().map_err(failed)? {
            return Ok(false);
        }
        // One that has been imported, or has come from another node, is about to get its PersistentVolume.
        if has_record(&self.parts.dirs.base, id)? {
            return Ok(false);
        }
        // The entry stays empty: its name keeps the project, which is released after the volume is removed.
        let entry = self.trash.create_entry(&stored, self.parts.limits.find_project(&dir)?)?;
        let remove = || self.parts.dirs.volumes.remove_empty_dir(id.as_str());
        let removed = self.parts.steps.run_step(VolumeStep::MoveToTrash, remove);
        self.eraser.queue.enqueue_entry(entry, 0);
        match removed {
            Ok(_) => {
                self.ledger.set_limit(id.as_str(), None);
                self.parts.kinds.remove(&stored).map(|()| true)
            }
            Err(error) if error.is_not_empty() => Ok(false),
            Err(error) => Err(failed(error)),
        }
    }

    /// Removes a snapshot, once a copy of it in progress to the same name has ended.
    pub(super) fn remove_snapshot(&self, id: &SnapshotId) -> Result<(), DirStoreError> {
        let id = StoredId::from(id.clone());
        let _lock = self.parts.locks.lock_copy(&id);
        let _held = self.parts.locks.lock(id.as_str());
        self.remove(&id)
    }

    /// Removes a snapshot, and erases what is left of it in this thread, also of an earlier call that was killed.
    pub(super) fn remove_and_erase(&self, id: &SnapshotId) -> Result<(), DirStoreError> {
        self.remove_snapshot(id)?;
        let is_left = |entry: &TrashEntry| *entry.id() == StoredId::from(id.clone());
        self.trash
            .list()?
            .iter()
            .filter(|entry| is_left(entry))
            .try_for_each(|entry| self.eraser.erase_now(entry))
    }

    /// Confirms that a missing volume or snapshot was removed: that it is missing from the store, and not from another
    /// directory, or from a disk that can no longer be read. Its removal may not be durable yet.
    fn confirm_removed(&self, id: &StoredId) -> Result<(), DirStoreError> {
        self.location.check()?;
        self.parts.dirs.sync(id)
    }

    /// Sets the limit of a volume again that has none, or that of another one, before a pod writes into it: what was
    /// promised to it is known since the start. A failure is logged, and fails no pod: the data must stay readable, and who
    /// compares the limits of published volumes reports it. Returns the number of files and directories that don't
    /// count all the same, if the limit was lost.
    fn restore_lost_limit(&self, id: &VolumeId, dir: &Dir) -> Option<u64> {
        let _held = self.parts.locks.lock(id.as_str());
        let restore = || {
            let status = self.parts.limits.find_status(dir)?;
            if status.is_some_and(|status| status.limits.bytes.is_some()) && self.parts.limits.is_own(dir)? {
                return Ok(None);
            }
            let Some(bytes) = self.ledger.promise_of(id.as_str()) else { return Ok(None) };
            tracing::warn!(volume = %id, bytes = bytes.0, "the volume has lost its limit: setting it again");
            // Not those that were found: they may be of another volume's project. Without any, a file of the name of an
            // image would make it one.
            let inodes = Some(size::default_inodes(bytes));
            self.parts.limits.restore(dir, QuotaLimits { bytes: Some(bytes), inodes }).map(Some)
        };
        restore().unwrap_or_else(|error: DirStoreError| {
            tracing::warn!(volume = %id, "set the limit of the volume again: {}", format_chain(&error));
            None
        })
    }

    /// Opens a volume, if it exists. For a pod, it counts as published before it is open. Also returns how much in it does
    /// not count, if it had lost its limit, and has it again.
    pub(super) fn open_volume(
        &self,
        id: &VolumeId,
        reason: OpenReason,
    ) -> Result<Option<(OpenVolume, Option<u64>)>, DirStoreError> {
        self.location.require_identity()?;
        self.location.check()?;
        if reason == OpenReason::Publish {
            // From now on it may have data that no other volume has.
            self.unpublished.remove(id)?;
        }
        let Some(dir) = self.parts.dirs.find_volume(id)? else { return Ok(None) };
        let format = match self.parts.kinds.read(&id.clone().into(), &dir)? {
            VolumeKind::Directory => {
                let restored = match reason {
                    OpenReason::Publish => self.restore_lost_limit(id, &dir),
                    OpenReason::Inspect => None,
                };
                let failed =
                    |source| DirStoreError::Directory(DirError::new(FileOperation::Open, dir.path(), source));
                let duplicated = dir.as_fd().try_clone_to_owned().map_err(failed)?;
                return Ok(Some((OpenVolume::Directory(duplicated), restored)));
            }
            VolumeKind::Image(format) => format,
        };
        let file = match reason {
            OpenReason::Publish => open_image(&dir)?,
            OpenReason::Inspect => read_image(&dir)?,
        };
        Ok(Some((OpenVolume::Image { file: file.into(), format }, None)))
    }
}

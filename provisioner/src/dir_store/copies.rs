//! Snapshots, and volumes that are copies: trees whose files share their blocks with those of their source.

use std::collections::HashSet;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nodekeel_fsquota::{Bytes, QuotaLimits};
use nodekeel_localstorage::{Dir, Error as DirError, FileCloner, FileKind, FileMode, RenameMode};
use rustix::fs::{AtFlags, StatxFlags};

use crate::dir_store::copy_limits::{check_fit, snapshot_limits, with_margin};
use crate::dir_store::images::{copied_size, image_size, open_image, visible_limits};
use crate::dir_store::location::MountedDir;
use crate::dir_store::{DirStoreError, StoreInner};
use crate::id::VolumeId;
use crate::image::{ImageFormat, VolumeKind, directory_limits, promised_bytes};
use crate::snapshot::{SnapshotId, SnapshotInfo, StoredId};
use crate::step::VolumeStep;

/// Directory of snapshots, by id. It is created with the first one.
pub(super) const SNAPSHOTS_DIR: &str = "snapshots";

/// Directory of marks: an empty file for each volume that was created as a copy or as an image, so that it is never
/// empty, and is not known to be published. It is created with the first one.
const MARKS_DIR: &str = ".unpublished";

/// What a store knows of copies.
pub(super) struct CopyState {
    cloner: Arc<dyn FileCloner>,
    snapshots: OnceLock<Dir>,
    marks: OnceLock<Dir>,
    /// The volumes with a mark.
    unpublished: Mutex<HashSet<VolumeId>>,
    /// What is being created or removed.
    in_progress: Mutex<HashSet<StoredId>>,
    finished: Condvar,
    /// The directory is being closed.
    pub(super) are_canceled: AtomicBool,
}

/// Keeps other calls from the same snapshot or copy, for as long as a copy takes.
pub(super) struct CopyLock<'a> {
    copies: &'a CopyState,
    id: StoredId,
}

impl Drop for CopyLock<'_> {
    fn drop(&mut self) {
        lock(&self.copies.in_progress).remove(&self.id);
        self.copies.finished.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens a directory of the base, if it exists.
pub(super) fn find_dir(base: &Dir, name: &str) -> Result<OnceLock<Dir>, DirStoreError> {
    match base.open_dir(name) {
        Ok(dir) => Ok(dir.into()),
        Err(error) if error.is_not_found() => Ok(OnceLock::new()),
        Err(error) => Err(DirStoreError::Directory(error)),
    }
}

/// The open directory, created before if it is missing.
pub(super) fn ensure_dir<'a>(
    slot: &'a OnceLock<Dir>,
    base: &Dir,
    name: &str,
) -> Result<&'a Dir, DirStoreError> {
    if let Some(dir) = slot.get() {
        return Ok(dir);
    }
    let dir = base.ensure_dir(name, FileMode::PRIVATE_DIR).map_err(DirStoreError::Directory)?;
    Ok(slot.get_or_init(|| dir))
}

impl CopyState {
    /// Opens the directories, and reads the marks.
    pub(super) fn open(
        base: &Dir,
        volumes: &Dir,
        cloner: Arc<dyn FileCloner>,
    ) -> Result<Self, DirStoreError> {
        let (snapshots, marks) = (find_dir(base, SNAPSHOTS_DIR)?, find_dir(base, MARKS_DIR)?);
        let unpublished = marks.get().map(|marks| list_marks(marks, volumes)).transpose();
        let unpublished = Mutex::new(unpublished.map_err(DirStoreError::Directory)?.unwrap_or_default());
        let (in_progress, finished) = (Mutex::default(), Condvar::new());
        let are_canceled = AtomicBool::new(false);
        Ok(Self { cloner, snapshots, marks, unpublished, in_progress, finished, are_canceled })
    }

    /// Ends the copies in progress, and those that wait for them, before their next file.
    pub(super) fn cancel_copies(&self) {
        self.are_canceled.store(true, Ordering::Relaxed);
    }

    pub(super) fn lock_copy(&self, id: StoredId) -> CopyLock<'_> {
        let mut held = lock(&self.in_progress);
        while !held.insert(id.clone()) {
            held = self.finished.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        CopyLock { copies: self, id }
    }

    /// Whether a volume was created as a copy or as an image, and is not known to be published.
    pub(super) fn is_unpublished(&self, id: &VolumeId) -> bool {
        lock(&self.unpublished).contains(id)
    }
}

/// The volumes with a mark that exist.
fn list_marks(marks: &Dir, volumes: &Dir) -> Result<HashSet<VolumeId>, DirError> {
    let mut unpublished = HashSet::new();
    for id in marked_ids(marks)? {
        if volumes.exists(id.as_str())? {
            unpublished.insert(id);
        }
    }
    Ok(unpublished)
}

fn marked_ids(marks: &Dir) -> Result<Vec<VolumeId>, DirError> {
    let entries = marks.list()?;
    Ok(entries.iter().filter_map(|entry| entry.name.as_os_str().to_str()?.parse().ok()).collect())
}

/// The snapshots in their directory; other files are none.
pub(super) fn list_snapshot_ids(snapshots: &Dir) -> Result<Vec<SnapshotId>, DirStoreError> {
    let entries = snapshots.list().map_err(DirStoreError::Directory)?;
    let dirs = entries.iter().filter(|entry| entry.kind == FileKind::Dir);
    Ok(dirs.filter_map(|entry| entry.name.as_os_str().to_str()?.parse().ok()).collect())
}

/// A copy to make.
struct CopyPlan<'a> {
    from: &'a StoredId,
    source: &'a Dir,
    to: &'a StoredId,
    limits: QuotaLimits,
    kind: VolumeKind,
    /// The size of the file of an image.
    size: Option<Bytes>,
    is_canceled: &'a dyn Fn() -> bool,
}

impl StoreInner {
    /// Removes the marks of volumes that don't exist, and those that were never completely written.
    pub(super) fn remove_stale_marks(&self) -> Result<(), DirStoreError> {
        let Some(marks) = self.copies.marks.get() else { return Ok(()) };
        marks.remove_stale_files().map_err(DirStoreError::Directory)?;
        for id in marked_ids(marks).map_err(DirStoreError::Directory)? {
            if !self.copies.is_unpublished(&id) {
                marks.remove_file(id.as_str()).map_err(DirStoreError::Directory)?;
            }
        }
        Ok(())
    }

    /// The directory that a volume or a snapshot lies in; `None` if no snapshot was ever created.
    pub(super) fn dir_of(&self, id: &StoredId) -> Option<&Dir> {
        match id {
            StoredId::Volume(_) => Some(&self.volumes),
            StoredId::Snapshot(_) => self.copies.snapshots.get(),
        }
    }

    /// The directory of a volume or a snapshot, if it exists.
    pub(super) fn find_stored(&self, id: &StoredId) -> Result<Option<Dir>, DirStoreError> {
        match self.dir_of(id).map(|dir| dir.open_dir(id.as_str())) {
            Some(Ok(dir)) => Ok(Some(dir)),
            None => Ok(None),
            Some(Err(error)) if error.is_not_found() => Ok(None),
            Some(Err(error)) => Err(DirStoreError::Directory(error)),
        }
    }

    pub(super) fn list_snapshots(&self) -> Result<Vec<SnapshotId>, DirStoreError> {
        self.copies.snapshots.get().map_or_else(|| Ok(Vec::new()), list_snapshot_ids)
    }

    pub(super) fn find_snapshot(&self, id: &SnapshotId) -> Result<Option<SnapshotInfo>, DirStoreError> {
        let dir = self.find_stored(&id.clone().into())?;
        dir.map(|dir| self.read_snapshot(id, &dir)).transpose()
    }

    fn read_snapshot(&self, id: &SnapshotId, dir: &Dir) -> Result<SnapshotInfo, DirStoreError> {
        let (status, kind) = (self.read_status(dir)?, self.read_kind(&id.clone().into(), dir)?);
        let limits = visible_limits(kind, dir, status.limits)?;
        let failed = |error: rustix::io::Errno| DirStoreError::ReadSnapshot {
            path: dir.path().to_owned(),
            source: error.into(),
        };
        let wanted = StatxFlags::BTIME | StatxFlags::CTIME;
        let stat = rustix::fs::statx(dir.as_fd(), c"", AtFlags::EMPTY_PATH, wanted).map_err(failed)?;
        let has_birth = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
        let created = if has_birth { stat.stx_btime } else { stat.stx_ctime };
        let seconds = u64::try_from(created.tv_sec).unwrap_or_default();
        let created: SystemTime = UNIX_EPOCH + Duration::new(seconds, created.tv_nsec);
        Ok(SnapshotInfo { created, restore_size: limits.bytes.unwrap_or(status.usage.bytes), kind })
    }

    /// Creates a snapshot, unless it exists; `None` if the volume does not exist.
    pub(super) fn create_snapshot(
        &self,
        id: &SnapshotId,
        volume: &VolumeId,
        is_canceled: &dyn Fn() -> bool,
    ) -> Result<Option<SnapshotInfo>, DirStoreError> {
        self.require_identity()?;
        let (from, to) = (StoredId::from(volume.clone()), StoredId::from(id.clone()));
        let _lock = self.copies.lock_copy(to.clone());
        if let Some(dir) = self.find_stored(&to)? {
            self.sync_dir_of(&to)?;
            return self.read_snapshot(id, &dir).map(Some);
        }
        let Some(source) = self.find_stored(&from)? else { return Ok(None) };
        self.check_cloner()?;
        let status = self.read_status(&source)?;
        let (limits, kind) = (snapshot_limits(&status), self.read_kind(&from, &source)?);
        // The volume itself may change all its blocks: then the snapshot alone holds the old ones.
        let promise = Some(status.usage.bytes);
        let plan = CopyPlan { from: &from, source: &source, to: &to, limits, kind, size: None, is_canceled };
        self.with_promise(to.as_str(), promise, || self.copy_stored(&plan))?;
        let Some(dir) = self.find_stored(&to)? else { return Ok(None) };
        // The volume may have grown while it was copied.
        self.ledger.set_limit(to.as_str(), Some(self.read_status(&dir)?.usage.bytes));
        self.read_snapshot(id, &dir).map(Some)
    }

    /// Creates a volume with the files of its source, unless it exists.
    pub(super) fn create_volume_from(
        &self,
        id: &VolumeId,
        from: &StoredId,
        limits: QuotaLimits,
        is_canceled: &dyn Fn() -> bool,
    ) -> Result<(), DirStoreError> {
        self.require_identity()?;
        let to = StoredId::from(id.clone());
        let _lock = self.copies.lock_copy(to.clone());
        if let Some(dir) = self.find_stored(&to)? {
            let _held = self.lock_volume(id);
            self.check_kind((&to, &dir), VolumeKind::Directory)?;
            self.raise_limits(id, &dir, limits)?;
            return self.sync_dir_of(&to);
        }
        let kind = VolumeKind::Directory;
        let source = self.find_source(from, kind)?;
        let status = self.read_status(&source)?;
        check_fit(from, &status, limits)?;
        let plan = CopyPlan { from, source: &source, to: &to, limits, kind, size: None, is_canceled };
        self.with_promise(to.as_str(), limits.bytes, || self.copy_stored(&plan))
    }

    /// Creates an image volume with the content of its source, unless it exists.
    pub(super) fn create_image_from(
        &self,
        id: &VolumeId,
        from: &StoredId,
        (format, size): (ImageFormat, Bytes),
        is_canceled: &dyn Fn() -> bool,
    ) -> Result<(), DirStoreError> {
        self.require_identity()?;
        let to = StoredId::from(id.clone());
        let _lock = self.copies.lock_copy(to.clone());
        if self.raise_image(id, (format, size))? {
            return Ok(());
        }
        let kind = VolumeKind::from(format);
        let source = self.find_source(from, kind)?;
        let size = copied_size(from, image_size(&source)?, size)?;
        let (limits, promise, size) = (directory_limits(size), promised_bytes(size), Some(size));
        let plan = CopyPlan { from, source: &source, to: &to, limits, kind, size, is_canceled };
        self.with_promise(to.as_str(), Some(promise), || self.copy_stored(&plan))
    }

    /// Removes a snapshot, once a copy of it in progress to the same name has ended.
    pub(super) fn remove_snapshot(&self, id: &SnapshotId) -> Result<(), DirStoreError> {
        let id = StoredId::from(id.clone());
        let _lock = self.copies.lock_copy(id.clone());
        let _held = self.lock_id(id.as_str());
        self.move_to_trash(&id)
    }

    /// The source of a copy of this kind.
    fn find_source(&self, from: &StoredId, kind: VolumeKind) -> Result<Dir, DirStoreError> {
        let source = self.find_stored(from)?;
        let source = source.ok_or_else(|| DirStoreError::NoSource { source_id: from.clone() })?;
        self.check_kind((from, &source), kind)?;
        self.check_cloner().map(|()| source)
    }

    /// Checks that files can be cloned: not in the source, whose limits may leave no space for the two files.
    fn check_cloner(&self) -> Result<(), DirStoreError> {
        self.staging.check_cloner(&*self.copies.cloner).map_err(DirStoreError::Directory)
    }

    fn copy_stored(&self, plan: &CopyPlan<'_>) -> Result<(), DirStoreError> {
        let made = self.stage_copy(plan).and_then(|()| self.publish_copy(plan));
        if made.is_err() {
            self.discard_failed(plan.to);
        }
        made
    }

    /// Makes a complete copy in staging, with its limits and a margin before its first file.
    fn stage_copy(&self, plan: &CopyPlan<'_>) -> Result<(), DirStoreError> {
        if let Some(entry) = self.discard_staged(plan.to)? {
            self.erasures.enqueue_entry(entry, 0);
        }
        let make = || self.staging.ensure_dir(plan.to.as_str(), FileMode::PRIVATE_DIR);
        let dir = self.steps.run_step(VolumeStep::CreateDirectory, make).map_err(DirStoreError::Directory)?;
        let wide = with_margin(plan.limits);
        self.steps.run_step(VolumeStep::SetLimits, || self.set_limits(&dir, wide))?;
        if plan.kind != VolumeKind::Directory {
            self.sync_image(plan.source)?;
        }
        let is_canceled = || (plan.is_canceled)() || self.copies.are_canceled.load(Ordering::Relaxed);
        let clone = || plan.source.clone_tree(&dir, &*self.copies.cloner, &is_canceled);
        let cloned = self.steps.run_step(VolumeStep::CloneTree, clone).map_err(DirStoreError::Directory)?;
        if cloned.devices > 0 || cloned.separate_files > 0 {
            tracing::warn!(
                handle = plan.to.as_str(),
                devices = cloned.devices,
                separate_files = cloned.separate_files,
                "left out device nodes of {}, or made files of its hard links",
                plan.from
            );
        }
        if let Some(size) = plan.size {
            self.extend_image(&dir, &open_image(&dir)?, size)?;
        }
        self.steps.run_step(VolumeStep::SetLimits, || self.set_limits(&dir, plan.limits))
    }

    /// Renames a complete copy into place, if its source was not removed meanwhile: its files would then be missing.
    fn publish_copy(&self, plan: &CopyPlan<'_>) -> Result<(), DirStoreError> {
        let identity = |dir: &Dir| MountedDir::from_fd(dir.as_fd()).ok();
        let found = self.find_stored(plan.from)?;
        if found.is_none_or(|dir| identity(&dir) != identity(plan.source)) {
            return Err(DirStoreError::NoSource { source_id: plan.from.clone() });
        }
        self.publish_staged(plan.to, plan.kind)
    }

    /// Renames a complete directory from staging into place, under its marks.
    pub(super) fn publish_staged(&self, to: &StoredId, kind: VolumeKind) -> Result<(), DirStoreError> {
        let into = match to {
            StoredId::Snapshot(_) => ensure_dir(&self.copies.snapshots, &self.base, SNAPSHOTS_DIR)?,
            StoredId::Volume(id) => {
                self.mark_unpublished(id)?;
                &self.volumes
            }
        };
        let (_held, name) = (self.lock_id(to.as_str()), to.as_str());
        // Otherwise the rename fails, and the mark is that of another.
        if !into.exists(name).map_err(DirStoreError::Directory)? {
            self.mark_kind(to, kind)?;
        }
        let publish = || self.staging.rename(name, into, name, RenameMode::NoReplace);
        self.steps.run_step(VolumeStep::RenameIntoPlace, publish).map_err(DirStoreError::Directory)
    }

    fn mark_unpublished(&self, id: &VolumeId) -> Result<(), DirStoreError> {
        let marks = ensure_dir(&self.copies.marks, &self.base, MARKS_DIR)?;
        let write = || marks.write(id.as_str(), b"", FileMode::PRIVATE_FILE);
        self.steps.run_step(VolumeStep::MarkUnpublished, write).map_err(DirStoreError::Directory)?;
        lock(&self.copies.unpublished).insert(id.clone());
        Ok(())
    }

    /// Removes the mark of a volume, if it has one.
    pub(super) fn mark_published(&self, id: &VolumeId) -> Result<(), DirStoreError> {
        let Some(marks) = self.copies.marks.get().filter(|_| self.copies.is_unpublished(id)) else {
            return Ok(());
        };
        let remove = || marks.remove_file(id.as_str());
        self.steps.run_step(VolumeStep::MarkPublished, remove).map_err(DirStoreError::Directory)?;
        lock(&self.copies.unpublished).remove(id);
        Ok(())
    }

    /// Makes a rename of a killed instance durable.
    pub(super) fn sync_dir_of(&self, id: &StoredId) -> Result<(), DirStoreError> {
        self.dir_of(id).map_or(Ok(()), |dir| dir.sync().map_err(DirStoreError::Directory))
    }
}

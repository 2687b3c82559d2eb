//! The directory in which volumes and snapshots are made: nothing in it is listed, and a start discards what a crash
//! has left.

use std::sync::Arc;

use nodekeel_fsquota::QuotaLimits;
use nodekeel_localstorage::{Dir, FileMode, RenameMode};

use crate::dir_store::eraser::EraseQueue;
use crate::dir_store::error::DirStoreError;
use crate::dir_store::parts::StoreParts;
use crate::dir_store::probe::{PROBE_DIR, remove_leftover};
use crate::dir_store::stored_dirs::parse_name;
use crate::dir_store::trash::Trash;
use crate::dir_store::unpublished::UnpublishedMarks;
use crate::error_chain::format_chain;
use crate::image::VolumeKind;
use crate::snapshot::StoredId;
use crate::step::VolumeStep;

/// Makes volumes and snapshots, and renames complete ones into their place.
pub(super) struct StagingArea {
    pub(super) parts: StoreParts,
    pub(super) dir: Dir,
    pub(super) unpublished: Arc<UnpublishedMarks>,
    pub(super) trash: Arc<Trash>,
    pub(super) queue: EraseQueue,
}

impl StagingArea {
    /// Creates a directory with its limits, which it has before its first file.
    pub(super) fn create(
        &self,
        id: &StoredId,
        mode: FileMode,
        limits: QuotaLimits,
    ) -> Result<Dir, DirStoreError> {
        // A directory that a failed call could not discard is used again.
        let make = || self.dir.ensure_dir(id.as_str(), mode);
        let dir =
            self.parts.steps.run_step(VolumeStep::CreateDirectory, make).map_err(DirStoreError::Directory)?;
        self.parts.steps.run_step(VolumeStep::SetLimits, || self.parts.limits.set(&dir, limits))?;
        Ok(dir)
    }

    /// Renames a complete image or copy into place, under its marks.
    pub(super) fn commit(&self, id: &StoredId, kind: VolumeKind) -> Result<(), DirStoreError> {
        let (into, name) = (self.parts.dirs.ensure_parent(id)?, id.as_str());
        // The marks come before the rename: a volume in place without them would be one that a pod has written, or a
        // directory.
        if let StoredId::Volume(id) = id {
            self.unpublished.mark(id)?;
        }
        let _held = self.parts.locks.lock(name);
        // Otherwise the rename fails, and the mark is that of another.
        if !into.exists(name).map_err(DirStoreError::Directory)? {
            self.parts.kinds.mark(id, kind)?;
        }
        self.rename_into(id, into)
    }

    /// Renames a complete directory into the directory of volumes or snapshots, durably.
    pub(super) fn rename_into(&self, id: &StoredId, into: &Dir) -> Result<(), DirStoreError> {
        let name = id.as_str();
        let rename = || self.dir.rename(name, into, name, RenameMode::NoReplace);
        self.parts.steps.run_step(VolumeStep::RenameIntoPlace, rename).map_err(DirStoreError::Directory)
    }

    /// Discards all that a crash has left. Returns whether some of it is in the trash now.
    pub(super) fn sweep(&self) -> Result<bool, DirStoreError> {
        let mut has_moved = false;
        for entry in self.dir.list().map_err(DirStoreError::Directory)? {
            if let Some(id) = parse_name(&entry) {
                has_moved |= self.discard(&id)?;
            } else if entry.name.as_os_str() == PROBE_DIR {
                remove_leftover(&self.dir, &*self.parts.limits.quota)?;
            } else {
                let path = self.dir.path().join(entry.name.as_os_str());
                tracing::warn!("{} is not a volume: skipped", path.display());
            }
        }
        Ok(has_moved)
    }

    /// Discards what a failed creation has left: the claim may be rescheduled to another node and never retried here.
    /// If that fails, the next start does it.
    pub(super) fn discard_failed(&self, id: &StoredId) {
        self.parts.kinds.discard(id);
        if let Err(error) = self.discard(id) {
            let staging = self.dir.path().display();
            tracing::warn!(handle = id.as_str(), "remove {id} from {staging}: {}", format_chain(&error));
        }
    }

    /// Removes an incomplete volume or snapshot: it was never renamed into its place. One with data may be large, and is moved to
    /// the trash; then returns true.
    pub(super) fn discard(&self, id: &StoredId) -> Result<bool, DirStoreError> {
        let name = id.as_str();
        if self.dir.exists(name).map_err(DirStoreError::Directory)? {
            match id {
                StoredId::Volume(id) => {
                    tracing::info!(handle = %id, claim_uid = id.claim_uid(), "removing an incomplete volume");
                }
                StoredId::Snapshot(id) => tracing::info!(handle = %id, "removing an incomplete snapshot"),
            }
        }
        match self.dir.open_dir(name) {
            // Erasing it here would delay the start, or the retry, for as long as its size takes.
            Ok(dir) if !dir.is_empty().map_err(DirStoreError::Directory)? => {
                let entry = self.trash.create_entry(id, self.parts.limits.find_project(&dir)?)?;
                self.trash.move_in(&entry, &self.dir)?;
                self.queue.enqueue_entry(entry, 0);
                return Ok(true);
            }
            // The limits first: once the directory is removed, nothing names its project any more.
            Ok(dir) => self.parts.limits.clear(&dir)?,
            Err(error) if error.is_not_found() => return Ok(false),
            Err(error) if error.is_not_a_directory() => {}
            Err(error) => return Err(DirStoreError::Directory(error)),
        }
        self.dir.remove_tree(name).map(|_| false).map_err(DirStoreError::Directory)
    }
}

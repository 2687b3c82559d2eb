//! Marks of volumes that were not empty when they were created, and may have no PersistentVolume yet.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nodekeel_localstorage::{Dir, Error as DirError, FileMode};

use crate::dir_store::error::DirStoreError;
use crate::dir_store::stored_dirs::{OptionalDir, StoredDirs, parse_name};
use crate::id::VolumeId;
use crate::step::{StepRunner, VolumeStep};

/// Directory of marks: an empty file for each volume that was created as a copy or as an image. A volume with a mark
/// counts as empty.
const MARKS_DIR: &str = ".unpublished";

/// The volumes that were created as a copy or as an image, and are not known to be published.
pub(super) struct UnpublishedMarks {
    dirs: Arc<StoredDirs>,
    steps: StepRunner,
    marks: OptionalDir,
    /// The volumes with a mark that exist: each publication of a volume asks for it.
    known: Mutex<HashSet<VolumeId>>,
}

impl UnpublishedMarks {
    /// Opens the directory, and reads the marks.
    pub(super) fn open(dirs: Arc<StoredDirs>, steps: StepRunner) -> Result<Self, DirStoreError> {
        let marks = OptionalDir::find(&dirs.base, MARKS_DIR)?;
        let mut known = HashSet::new();
        for id in marks.get().map_or_else(|| Ok(Vec::new()), marked_ids).map_err(DirStoreError::Directory)? {
            // The mark comes before its volume: a mark alone is left by a creation that was killed.
            if dirs.volumes.exists(id.as_str()).map_err(DirStoreError::Directory)? {
                known.insert(id);
            }
        }
        Ok(Self { dirs, steps, marks, known: Mutex::new(known) })
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<VolumeId>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn contains(&self, id: &VolumeId) -> bool {
        self.lock().contains(id)
    }

    /// Marks a volume, before it is renamed into place.
    pub(super) fn mark(&self, id: &VolumeId) -> Result<(), DirStoreError> {
        let marks = self.marks.ensure(&self.dirs.base)?;
        let write = || marks.write(id.as_str(), b"", FileMode::PRIVATE_FILE);
        self.steps.run_step(VolumeStep::MarkUnpublished, write).map_err(DirStoreError::Directory)?;
        // In memory only once it is durable: `remove_empty` deletes data because of it.
        self.lock().insert(id.clone());
        Ok(())
    }

    /// Removes the mark of a volume, if it has one.
    pub(super) fn remove(&self, id: &VolumeId) -> Result<(), DirStoreError> {
        let Some(marks) = self.marks.get().filter(|_| self.contains(id)) else { return Ok(()) };
        // The file first: if that fails, the mark is still known, and a retry tries again.
        let remove = || marks.remove_file(id.as_str());
        self.steps.run_step(VolumeStep::MarkPublished, remove).map_err(DirStoreError::Directory)?;
        self.lock().remove(id);
        Ok(())
    }

    /// Removes the marks of volumes that don't exist, and those that were never completely written.
    pub(super) fn remove_stale(&self) -> Result<(), DirStoreError> {
        let Some(marks) = self.marks.get() else { return Ok(()) };
        marks.remove_stale_files().map_err(DirStoreError::Directory)?;
        for id in marked_ids(marks).map_err(DirStoreError::Directory)? {
            if !self.contains(&id) {
                marks.remove_file(id.as_str()).map_err(DirStoreError::Directory)?;
            }
        }
        Ok(())
    }
}

fn marked_ids(marks: &Dir) -> Result<Vec<VolumeId>, DirError> {
    Ok(marks.list()?.iter().filter_map(parse_name).collect())
}

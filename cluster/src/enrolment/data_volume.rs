//! The data volume: created once, opened at every later start, and bound to the enrolment that created it.

use std::sync::{Mutex, PoisonError};

use nodekeel_localstorage::volume::{DataVolume, ErasePolicy, VolumeError};
use nodekeel_localstorage::{Dir, FileMode};

use super::failure::StepError;
use super::progress::EnrolmentId;
use super::step::StepMode;

/// File at the root of the volume: the enrolment's id and a newline. It is written before anything else.
const MARK_FILE: &str = ".enrolment";

/// A volume, and its root directory once it is open. It stays open between runs, unless its owner releases it.
#[derive(Debug, Default)]
pub(super) struct MountedVolume(Mutex<Option<Dir>>);

impl MountedVolume {
    /// The root directory, if it is open.
    pub(super) fn root_dir(&self) -> Result<Option<Dir>, StepError> {
        let root = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(root) = root.as_ref() else { return Ok(None) };
        root.try_clone().map(Some).map_err(StepError::volume_root(root.path()))
    }

    /// Closes the root directory, and unmounts the volume.
    pub(super) fn release(&self, volume: &dyn DataVolume) -> Result<(), VolumeError> {
        // First: an open directory keeps its file system busy. *Source:* umount(2), `EBUSY`.
        drop(self.0.lock().unwrap_or_else(PoisonError::into_inner).take());
        volume.unmount()
    }

    /// Opens the volume, or creates it, for this enrolment. It blocks.
    pub(super) fn open_or_create(
        &self,
        volume: &dyn DataVolume,
        mode: StepMode,
        enrolment: EnrolmentId,
        erase: &ErasePolicy,
    ) -> Result<(), StepError> {
        // Held until the root is stored, so that two callers never mount the volume twice.
        let mut open_root = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Open since an earlier run of this process. The journal may have been reset since then, so the mark is
        // compared again.
        if let Some(root) = open_root.as_ref() {
            return if read_mark(root)?.as_deref() == Some(&*mark_content(enrolment)) {
                Ok(())
            } else {
                Err(foreign_volume(root))
            };
        }
        let root = match mode {
            StepMode::FirstRun => create_volume(volume, enrolment, erase)?,
            StepMode::Rerun => open_existing(volume, enrolment)?,
        };
        *open_root = Some(root);
        Ok(())
    }
}

/// Opens the volume that this enrolment has created and marked.
fn open_existing(volume: &dyn DataVolume, enrolment: EnrolmentId) -> Result<Dir, StepError> {
    let root = volume.mount_existing().map_err(StepError::Volume)?;
    if read_mark(&root)?.as_deref() == Some(&*mark_content(enrolment)) {
        return Ok(root);
    }
    let foreign = foreign_volume(&root);
    // An open directory keeps its file system busy.
    drop(root);
    volume.unmount().map_err(StepError::Volume)?;
    Err(foreign)
}

/// Creates a volume for this enrolment. A volume that a killed run of it has created is adopted; anything
/// else is destroyed only as far as `erase` allows.
fn create_volume(
    volume: &dyn DataVolume,
    enrolment: EnrolmentId,
    erase: &ErasePolicy,
) -> Result<Dir, StepError> {
    // A killed run of this enrolment may have created it already.
    match volume.mount_existing() {
        Ok(root) => {
            // Data of another enrolment is unmounted again; only `erase` permits `mount_new` to replace it.
            if let Some(root) = adopt_unfinished(root, enrolment)? {
                return Ok(root);
            }
            volume.unmount().map_err(StepError::Volume)?;
        }
        Err(
            // Nothing that can be opened: `mount_new` decides what may be created here.
            VolumeError::Absent { .. } | VolumeError::Unfinished { .. } | VolumeError::ForeignData { .. },
        ) => {}
        Err(error) => return Err(StepError::Volume(error)),
    }
    // A run that is killed before the mark leaves an unused volume, which the next run adopts.
    let root = volume.mount_new(erase.clone()).map_err(StepError::Volume)?;
    write_mark(&root, enrolment)?;
    Ok(root)
}

/// The volume, if it is this enrolment's, or was created and never used.
fn adopt_unfinished(root: Dir, enrolment: EnrolmentId) -> Result<Option<Dir>, StepError> {
    match read_mark(&root)? {
        Some(mark) if mark == *mark_content(enrolment) => Ok(Some(root)),
        // Created by a run that was killed before it wrote the mark.
        None if is_unused(&root)? => {
            write_mark(&root, enrolment)?;
            Ok(Some(root))
        }
        _ => Ok(None),
    }
}

/// Returns whether the volume holds only what its creation leaves: marks, whose names begin with a dot, and the
/// files of `mkfs`.
fn is_unused(root: &Dir) -> Result<bool, StepError> {
    let entries = root.list().map_err(StepError::volume_root(root.path()))?;
    let is_mark = |name: &[u8]| name.starts_with(b".") || name == b"lost+found";
    Ok(entries.iter().all(|entry| is_mark(entry.name.as_os_str().as_encoded_bytes())))
}

fn mark_content(enrolment: EnrolmentId) -> Vec<u8> {
    format!("{}\n", enrolment.to_hex()).into_bytes()
}

fn read_mark(root: &Dir) -> Result<Option<Vec<u8>>, StepError> {
    match root.read_at_most(MARK_FILE, 4096) {
        Ok(mark) => Ok(Some(mark)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(source) => Err(mark_error(root, source)),
    }
}

fn write_mark(root: &Dir, enrolment: EnrolmentId) -> Result<(), StepError> {
    root.write(MARK_FILE, &mark_content(enrolment), FileMode::new(0o400))
        .map_err(|source| mark_error(root, source))
}

fn mark_error(root: &Dir, source: nodekeel_localstorage::Error) -> StepError {
    StepError::Mark { path: root.path().join(MARK_FILE), source }
}

fn foreign_volume(root: &Dir) -> StepError {
    StepError::ForeignVolume { path: root.path().to_owned() }
}

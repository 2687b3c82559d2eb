//! The data volume: made once, opened ever after, and known by the enrolment that it was made for.

use std::sync::{Mutex, PoisonError};

use nodekeel_localstorage::volume::{DataVolume, Erase, VolumeError};
use nodekeel_localstorage::{Dir, Mode as FileMode};

use super::reason::StepError;
use super::step::{EnrolmentId, Mode};

/// At the top of the volume: the enrolment's id, and the end of the line. It is written before anything else.
const MARK: &str = ".enrolment";

/// A volume, and its top directory once it is open. It stays open from run to run.
#[derive(Debug, Default)]
pub(super) struct Held(Mutex<Option<Dir>>);

impl Held {
    /// The top directory, if it is open.
    pub(super) fn top(&self) -> Result<Option<Dir>, StepError> {
        let held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        held.as_ref().map(Dir::try_clone).transpose().map_err(StepError::Mark)
    }

    /// Opens it, or makes it, as this enrolment's. It blocks.
    pub(super) fn open(
        &self,
        volume: &dyn DataVolume,
        mode: Mode,
        enrolment: EnrolmentId,
        erase: &Erase,
    ) -> Result<(), StepError> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(top) = held.as_ref() {
            return match read(top)?.as_deref() == Some(&*text(enrolment)) {
                true => Ok(()),
                false => Err(foreign(top)),
            };
        }
        let top = match mode {
            Mode::Make => make(volume, enrolment, erase)?,
            Mode::Again => again(volume, enrolment)?,
        };
        *held = Some(top);
        Ok(())
    }
}

/// The volume that this enrolment has made and marked.
fn again(volume: &dyn DataVolume, enrolment: EnrolmentId) -> Result<Dir, StepError> {
    let top = volume.mount_existing().map_err(StepError::Volume)?;
    if read(&top)?.as_deref() == Some(&*text(enrolment)) {
        return Ok(top);
    }
    let foreign = foreign(&top);
    drop(top);
    volume.unmount().map_err(StepError::Volume)?;
    Err(foreign)
}

/// A volume for this enrolment. One that a killed run of it has made is taken; whatever else there is, only `erase` gives
/// up.
fn make(volume: &dyn DataVolume, enrolment: EnrolmentId, erase: &Erase) -> Result<Dir, StepError> {
    match volume.mount_existing() {
        Ok(top) => {
            if let Some(top) = taken(top, enrolment)? {
                return Ok(top);
            }
            volume.unmount().map_err(StepError::Volume)?;
        }
        Err(VolumeError::Absent { .. } | VolumeError::Unfinished { .. } | VolumeError::NotOurs { .. }) => {}
        Err(error) => return Err(StepError::Volume(error)),
    }
    let top = volume.mount_new(erase.clone()).map_err(StepError::Volume)?;
    write(&top, enrolment)?;
    Ok(top)
}

/// The same volume, if it is this enrolment's, or was made and not used.
fn taken(top: Dir, enrolment: EnrolmentId) -> Result<Option<Dir>, StepError> {
    match read(&top)? {
        Some(mark) if mark == *text(enrolment) => Ok(Some(top)),
        None if is_unused(&top)? => {
            write(&top, enrolment)?;
            Ok(Some(top))
        }
        _ => Ok(None),
    }
}

/// Whether there is nothing but what making it has left: marks, whose names begin with a dot, and what `mkfs` makes.
fn is_unused(top: &Dir) -> Result<bool, StepError> {
    let entries = top.list().map_err(StepError::Mark)?;
    let is_mark = |name: &[u8]| name.starts_with(b".") || name == b"lost+found";
    Ok(entries.iter().all(|entry| is_mark(entry.name.as_os_str().as_encoded_bytes())))
}

fn text(enrolment: EnrolmentId) -> Vec<u8> {
    format!("{}\n", enrolment.to_hex()).into_bytes()
}

fn read(top: &Dir) -> Result<Option<Vec<u8>>, StepError> {
    match top.read_at_most(MARK, 4096) {
        Ok(mark) => Ok(Some(mark)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(StepError::Mark(error)),
    }
}

fn write(top: &Dir, enrolment: EnrolmentId) -> Result<(), StepError> {
    top.write(MARK, &text(enrolment), FileMode::new(0o400)).map_err(StepError::Mark)
}

fn foreign(top: &Dir) -> StepError {
    StepError::ForeignVolume { path: top.path().to_owned() }
}

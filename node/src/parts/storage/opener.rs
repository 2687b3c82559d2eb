//! Opens the data volume, again and again: a directory, a device, or what the program provides.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::tree::LayoutFile;
use nodekeel_localstorage::volume::{
    DataVolume, DirectoryVolume, HeaderBackup, MountState, RecoveryPassphrase, UnlockSecret,
    UnreadableBlocks, VOLUME_MARK_FILE, VolumeError,
};

use super::decision::Attempt;
use super::device::{DeviceOpener, OpenedVolume};
use super::error::{EspError, StorageError};
use super::gap::moved_files;
use super::identity::{self, RecordedVolume, is_absent, open_or_create, settle_identity};
use super::record::VolumeRecord;
use super::scrub_report::ScrubReport;
use crate::error_chain::error_chain;
use crate::layout::{VOLUME_DIR, VOLUME_MODE};
use crate::program_name::program_name;

/// The content of the file that records that a file system was mounted on the directory of the volume.
const MOUNTED_RECORD: &[u8] = b"nodekeel mounted data volume, format 1\n";

#[derive(Debug, Clone)]
pub(super) enum VolumeOpener {
    /// This directory, or what is mounted on it. The file exists once a file system was mounted there.
    Directory { path: PathBuf, mounted: LayoutFile, esp: Arc<Dir> },
    /// A disk or partition; an error if its ESP is not there.
    Device(Result<Arc<DeviceOpener>, Arc<EspError>>),
    /// The volume of the program, and where it was mounted last.
    Provided { volume: Arc<dyn DataVolume>, mounted_at: Arc<Mutex<Option<PathBuf>>>, esp: Arc<Dir> },
}

impl VolumeOpener {
    /// The secrets that the node has itself, the best first: one that is not encrypted ignores it.
    pub(super) fn own_secrets(&self, remembered: Option<UnlockSecret>) -> Vec<UnlockSecret> {
        match self {
            // The remembered secret has opened the volume in this process before.
            Self::Device(_) => remembered.into_iter().chain([UnlockSecret::Node]).collect(),
            _ => vec![UnlockSecret::Node],
        }
    }

    /// The directory of the node's records, outside of the volume; an error if it is not there.
    pub(super) fn esp(&self) -> Result<&Dir, StorageError> {
        match self {
            Self::Directory { esp, .. } | Self::Provided { esp, .. } => Ok(esp),
            Self::Device(Ok(opener)) => Ok(&opener.esp),
            Self::Device(Err(error)) => Err(StorageError::Esp(Arc::clone(error))),
        }
    }

    /// Opens the node's volume. It blocks.
    pub(super) fn open(
        &self,
        secret: &UnlockSecret,
        attempt: Attempt<'_>,
    ) -> Result<OpenedVolume, StorageError> {
        let esp = self.esp()?;
        let opened = match self {
            Self::Directory { path, mounted, esp } => open_directory(path, mounted, esp, attempt)?,
            Self::Device(Ok(opener)) => opener.open(secret, attempt)?,
            Self::Device(Err(error)) => return Err(StorageError::Esp(Arc::clone(error))),
            Self::Provided { volume, mounted_at, esp } => {
                let mut mounted_at = mounted_at.lock().unwrap_or_else(PoisonError::into_inner);
                let dir = open_provided(&**volume, mounted_at.as_deref(), esp, attempt)?;
                *mounted_at = Some(dir.path().to_owned());
                OpenedVolume {
                    volume: Arc::clone(volume),
                    dir,
                    slot: None,
                    left_out: UnreadableBlocks::default(),
                }
            }
        };
        let OpenedVolume { volume, dir, slot, left_out } = opened;
        if let Err(error) = settle_identity(esp, &dir, attempt) {
            drop(dir);
            // One that can't be unmounted is found mounted by the next attempt, and refused again.
            let _ = volume.unmount();
            return Err(error);
        }
        // The mount is recorded when it is known to be the node's volume.
        if let Self::Directory { path, mounted, .. } = self
            && attempt != Attempt::Open
        {
            record_mount(path, mounted)?;
        }
        Ok(OpenedVolume { volume, dir, slot, left_out })
    }

    /// Returns whether there is a volume to open: nothing is created for that.
    pub(super) fn may_have_volume(&self) -> bool {
        // The attempt to open the volume reports an error of the records.
        let Ok(esp) = self.esp() else { return true };
        let is_marked = match self {
            Self::Directory { path, mounted, .. } => {
                mounted.exists().unwrap_or(true) || path.join(VOLUME_MARK_FILE).exists()
            }
            _ => false,
        };
        let on_device = VolumeRecord::read_from(esp).map_or(true, |record| record.is_some());
        is_marked || on_device || RecordedVolume::read_from(esp).map_or(true, |record| record.exists())
    }

    /// Removes the files by which the node knows its volume, in `esp/` and next to it.
    pub(super) fn forget_volume(&self) -> Result<(), StorageError> {
        let esp = self.esp()?;
        if let Self::Directory { mounted, .. } = self {
            mounted.remove().map_err(StorageError::Directory)?;
        }
        VolumeRecord::remove_from(esp)?;
        ScrubReport::remove_from(esp)?;
        identity::forget_volume(esp)
    }

    /// Records that the operator gave up the volume: what its disk has can be erased then.
    pub(super) fn give_up_volume(&self) -> Result<(), StorageError> {
        match self {
            Self::Device(Ok(opener)) => opener.give_up_volume(),
            // What a directory has is moved away by the operator.
            other => other.forget_volume(),
        }
    }

    /// The volume that the next start finds once the node has given its volume up, and what it does with it, for people: a
    /// place, and a sentence about it. Changes nothing. It blocks.
    pub(super) fn describe_next_start(&self, is_lost: bool) -> String {
        match self {
            Self::Directory { path, .. } => describe_directory(path),
            Self::Device(Ok(opener)) => opener.describe_next_start(is_lost),
            Self::Device(Err(error)) => format!("none: {}", error_chain(&**error)),
            Self::Provided { .. } => {
                format!(
                    "that of this program, which {} opens as it is, or creates if there is none",
                    program_name()
                )
            }
        }
    }

    /// Writes a header of the node's volume to its disk. It blocks.
    pub(super) fn restore_header(
        &self,
        backup: &HeaderBackup,
        passphrase: Option<RecoveryPassphrase>,
        allow_older: bool,
    ) -> Result<(), StorageError> {
        match self {
            Self::Device(Ok(opener)) => opener.restore_header(backup, passphrase, allow_older),
            Self::Device(Err(error)) => Err(StorageError::Esp(Arc::clone(error))),
            Self::Directory { .. } | Self::Provided { .. } => Err(StorageError::NotEncrypted),
        }
    }

    /// The directories of files that were written while the volume was not mounted.
    pub(super) fn moved_files(&self) -> Vec<PathBuf> {
        self.device().map_or_else(Vec::new, |opener| moved_files(&opener.data))
    }

    /// The disk or partition, if the volume is on one.
    pub(super) fn device(&self) -> Option<&Arc<DeviceOpener>> {
        match self {
            Self::Device(opener) => opener.as_ref().ok(),
            _ => None,
        }
    }
}

/// At each start: a file system may have been mounted there since.
fn open_directory(
    path: &Path,
    mounted: &LayoutFile,
    esp: &Dir,
    attempt: Attempt<'_>,
) -> Result<OpenedVolume, StorageError> {
    let data = Dir::open(path.parent().unwrap_or(path)).map_err(StorageError::Directory)?;
    // A directory in place of the disk would hide that the disk is missing.
    if VolumeRecord::read_from(esp)?.is_some() {
        return Err(StorageError::OnDevice);
    }
    let is_mounted = data.is_mount_point(VOLUME_DIR).map_err(StorageError::Directory)?;
    if !is_mounted && mounted.exists().map_err(StorageError::Directory)? {
        return Err(StorageError::NotMounted { path: path.to_owned() });
    }
    let dir = data.ensure_dir(VOLUME_DIR, VOLUME_MODE).map_err(StorageError::Directory)?;
    let volume = DirectoryVolume::new(dir);
    let dir = open_or_create(esp, &volume, path, attempt).map_err(|error| match error {
        StorageError::Open(VolumeError::ForeignData { path, .. }) => StorageError::Unmarked { path },
        error => error,
    })?;
    let left_out = UnreadableBlocks::default();
    Ok(OpenedVolume { volume: Arc::new(volume), dir, slot: None, left_out })
}

/// Describes what noded would do with the directory of a node that has had no volume, for people.
fn describe_directory(path: &Path) -> String {
    let dir = match Dir::open(path) {
        Ok(dir) => DirectoryVolume::new(dir).mount_existing(),
        Err(error) if error.is_not_found() => Err(VolumeError::Absent { path: path.to_owned() }),
        Err(error) => Err(VolumeError::Finish(error)),
    };
    let place = path.display();
    match dir {
        absent if is_absent(&absent) => format!("{place}, in which {} creates one", program_name()),
        Ok(_) => format!("{place}, which has a data volume, and {} opens it", program_name()),
        Err(error) => format!("{place}, which does not open: {}", error_chain(&error)),
    }
}

/// Records that a file system was mounted on the directory of the volume, if it is.
fn record_mount(path: &Path, mounted: &LayoutFile) -> Result<(), StorageError> {
    let data = Dir::open(path.parent().unwrap_or(path)).map_err(StorageError::Directory)?;
    let is_mounted = data.is_mount_point(VOLUME_DIR).map_err(StorageError::Directory)?;
    if is_mounted && !mounted.exists().map_err(StorageError::Directory)? {
        mounted.write(MOUNTED_RECORD).map_err(StorageError::Directory)?;
    }
    Ok(())
}

/// Opens a volume that the last incarnation may have left mounted, because it did not end in time, or because something
/// uses the volume that noded does not stop.
fn open_provided(
    volume: &dyn DataVolume,
    mounted_at: Option<&Path>,
    esp: &Dir,
    attempt: Attempt<'_>,
) -> Result<Dir, StorageError> {
    match (volume.unmount(), mounted_at) {
        (Ok(()), _) => open_or_create(esp, volume, Path::new("the volume of this program"), attempt),
        (Err(_), Some(path)) if volume.state() == MountState::Mounted => {
            Dir::open(path).map_err(StorageError::Directory)
        }
        (Err(error), _) => Err(StorageError::Open(error)),
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_localstorage::volume::VOLUME_MARK;

    use super::*;

    #[test]
    fn a_directory_is_described_as_the_next_start_uses_it() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("data");
        let says = |end: &str| {
            let text = describe_directory(&path);
            assert!(text.starts_with(&format!("{}{end}", path.display())), "{text}");
        };
        says(", in which noded creates one");
        std::fs::create_dir(&path).expect("made");
        says(", in which noded creates one");
        std::fs::write(path.join("letter"), "").expect("written");
        says(", which does not open: ");
        std::fs::write(path.join(VOLUME_MARK_FILE), VOLUME_MARK).expect("written");
        says(", which has a data volume, and noded opens it");
    }
}

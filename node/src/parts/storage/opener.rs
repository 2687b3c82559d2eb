//! Opens the data volume, again and again: a directory, a device, or what the program provides.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::tree::LayoutFile;
use nodekeel_localstorage::volume::{
    DataVolume, DirectoryVolume, ErasePolicy, MountState, UnlockSecret, VolumeError,
};

use super::device::{DeviceOpener, OpenedVolume};
use super::error::{EspError, StorageError};
use super::record::{RECORD_FILE, VolumeRecord};
use crate::layout::{ESP_DIR, VOLUME_DIR, VOLUME_MODE};

/// The content of the file that records that a file system was mounted on the directory of the volume.
const MOUNTED_RECORD: &[u8] = b"nodekeel mounted data volume, format 1\n";

#[derive(Debug, Clone)]
pub(super) enum VolumeOpener {
    /// This directory, or what is mounted on it. The file exists once a file system was mounted there.
    Directory { path: PathBuf, mounted: LayoutFile },
    /// A disk or partition; an error if its ESP is not there.
    Device(Result<Arc<DeviceOpener>, Arc<EspError>>),
    /// The volume of the program, and where it was mounted last.
    Provided { volume: Arc<dyn DataVolume>, mounted_at: Arc<Mutex<Option<PathBuf>>> },
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

    /// Opens the volume, and creates it if it is blank. It blocks.
    pub(super) fn open(
        &self,
        secret: &UnlockSecret,
        erase_permit: Option<&str>,
    ) -> Result<OpenedVolume, StorageError> {
        match self {
            Self::Directory { path, mounted } => open_directory(path, mounted),
            Self::Device(Ok(opener)) => opener.open(secret, erase_permit),
            Self::Device(Err(error)) => Err(StorageError::Esp(Arc::clone(error))),
            Self::Provided { volume, mounted_at } => {
                let mut mounted_at = mounted_at.lock().unwrap_or_else(PoisonError::into_inner);
                let dir = open_provided(&**volume, mounted_at.as_deref()).map_err(StorageError::Open)?;
                *mounted_at = Some(dir.path().to_owned());
                Ok(OpenedVolume { volume: Arc::clone(volume), dir, slot: None })
            }
        }
    }

    /// The problem of the open volume's size.
    pub(super) fn size_problem(&self) -> Option<String> {
        match self {
            Self::Device(opener) => opener.as_ref().ok()?.size_problem(),
            _ => None,
        }
    }
}

/// At each start: a file system may have been mounted there since.
fn open_directory(path: &Path, mounted: &LayoutFile) -> Result<OpenedVolume, StorageError> {
    let data = Dir::open(path.parent().unwrap_or(path)).map_err(StorageError::Directory)?;
    // A directory in place of the disk would hide that the disk is missing.
    if VolumeRecord::read_from(&data.open_dir(ESP_DIR).map_err(StorageError::Directory)?)?.is_some() {
        return Err(StorageError::OnDevice { record: data.path().join(ESP_DIR).join(RECORD_FILE) });
    }
    let is_mounted = data.is_mount_point(VOLUME_DIR).map_err(StorageError::Directory)?;
    let was_mounted = mounted.exists().map_err(StorageError::Directory)?;
    if was_mounted && !is_mounted {
        return Err(StorageError::NotMounted { path: path.to_owned(), record: mounted.path().to_owned() });
    }
    let dir = data.ensure_dir(VOLUME_DIR, VOLUME_MODE).map_err(StorageError::Directory)?;
    let volume = DirectoryVolume::new(dir);
    let dir = open_or_create(&volume).map_err(|error| match error {
        VolumeError::ForeignData { path, .. } => StorageError::Unmarked { path },
        error => StorageError::Open(error),
    })?;
    // The record is written when the mounted file system is known to be a data volume.
    if is_mounted && !was_mounted {
        mounted.write(MOUNTED_RECORD).map_err(StorageError::Directory)?;
    }
    Ok(OpenedVolume { volume: Arc::new(volume), dir, slot: None })
}

/// Opens a volume that the last incarnation may have left mounted, because it did not end in time, or because something
/// uses the volume that noded does not stop.
fn open_provided(volume: &dyn DataVolume, mounted_at: Option<&Path>) -> Result<Dir, VolumeError> {
    match (volume.unmount(), mounted_at) {
        (Ok(()), _) => open_or_create(volume),
        (Err(_), Some(path)) if volume.state() == MountState::Mounted => {
            Dir::open(path).map_err(VolumeError::Finish)
        }
        (Err(error), _) => Err(error),
    }
}

/// Opens a volume, and creates it if it is blank.
fn open_or_create(volume: &dyn DataVolume) -> Result<Dir, VolumeError> {
    match volume.mount_existing() {
        // An unfinished volume was cut off before the last step of its creation, and has no data.
        Err(VolumeError::Absent { .. } | VolumeError::Unfinished { .. }) => {
            volume.mount_new(ErasePolicy::Nothing)
        }
        opened => opened,
    }
}

//! The file of a block or strict volume in the volume's directory.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;

use nodekeel_fsquota::{Bytes, QuotaLimits};
use nodekeel_localstorage::{Dir, FileKind, FileMode};

use crate::dir_store::error::DirStoreError;
use crate::image::{VolumeKind, loops};

/// The name of the file of a block or strict volume in its directory, [`StoredEntry::path`](crate::StoredEntry).
pub const IMAGE_FILE: &str = "image";

/// Does something with an image; the error names the step.
pub(super) fn try_image<T>(
    step: &'static str,
    dir: &Dir,
    act: impl FnOnce() -> io::Result<T>,
) -> Result<T, DirStoreError> {
    act().map_err(|source| DirStoreError::Image { step, path: dir.path().join(IMAGE_FILE), source })
}

/// Opens the file for reading.
pub(super) fn read_image(dir: &Dir) -> Result<File, DirStoreError> {
    dir.open_file(IMAGE_FILE).map_err(DirStoreError::Directory)
}

/// Opens the file for reading and writing.
pub(super) fn open_image(dir: &Dir) -> Result<File, DirStoreError> {
    dir.open_file_to_write(IMAGE_FILE).map_err(DirStoreError::Directory)
}

/// Creates the file, sparse.
pub(super) fn create_image(dir: &Dir, size: Bytes) -> Result<File, DirStoreError> {
    let file = dir.open_or_create_file(IMAGE_FILE, FileMode::PRIVATE_FILE);
    let file = file.map_err(DirStoreError::Directory)?;
    try_image("set the size of", dir, || file.set_len(size.0))?;
    Ok(file)
}

/// Returns whether the directory has the file. A pod can put one of that name into a volume that is a directory.
pub(super) fn has_image(dir: &Dir) -> Result<bool, DirStoreError> {
    match dir.metadata(IMAGE_FILE) {
        Ok(found) => Ok(found.kind == FileKind::File),
        Err(error) if error.is_not_found() => Ok(false),
        Err(error) => Err(DirStoreError::Directory(error)),
    }
}

/// The size of the file, which is the size of the volume.
pub(super) fn image_size(dir: &Dir) -> Result<Bytes, DirStoreError> {
    dir.metadata(IMAGE_FILE).map(|found| Bytes(found.size)).map_err(DirStoreError::Directory)
}

/// The limits of a volume of this kind, as its users see them.
pub(super) fn visible_limits(
    kind: VolumeKind,
    dir: &Dir,
    limits: QuotaLimits,
) -> Result<QuotaLimits, DirStoreError> {
    match kind {
        VolumeKind::Directory => Ok(limits),
        VolumeKind::Image(_) => Ok(QuotaLimits { bytes: Some(image_size(dir)?), inodes: None }),
    }
}

/// Writes the caches of the file systems and devices that use the file into it.
pub(super) fn sync_image(dir: &Dir) -> Result<(), DirStoreError> {
    let file = read_image(dir)?;
    try_image("sync", dir, || loops::sync_mounted(file.as_fd()))
}

/// Detaches the devices that still use the file of a removed volume. A file of that name that a pod has put into a
/// directory has none, and is erased all the same.
pub(super) fn detach_image(dir: &Dir) -> Result<(), DirStoreError> {
    if !has_image(dir).unwrap_or(false) {
        return Ok(());
    }
    let file = read_image(dir)?;
    try_image("detach", dir, || loops::detach_all(file.as_fd()))
}

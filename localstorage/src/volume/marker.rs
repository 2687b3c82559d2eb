//! The marker file of a volume that this crate has completed.

use std::path::Path;

use super::{VolumeContents, VolumeError};
use crate::dir::Dir;
use crate::error::Error;
use crate::metadata::{DirEntry, FileKind, FileMode};

/// The name in the root directory of the volume.
pub(super) const MARKER_NAME: &str = ".data-volume";

/// The content in a complete volume: the version of its format.
pub(super) const COMPLETE_MARK: &str = "nodekeel data volume, format 1\n";

const COMPLETE: &[u8] = COMPLETE_MARK.as_bytes();
const ERASING: &[u8] = b"nodekeel data volume, format 1: being erased\n";

/// The state of a volume, as recorded in its root directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VolumeMarker {
    /// The volume is complete.
    Complete,
    /// The contents are being erased; some may remain.
    Erasing,
    /// Empty: new, or not completed yet.
    Unfinished,
    /// Files but no marker.
    Foreign {
        /// The number of entries with data.
        entries: usize,
    },
}

impl VolumeMarker {
    pub(super) fn read_from(top: &Dir) -> Result<VolumeMarker, Error> {
        match top.read_at_most(MARKER_NAME, 4096) {
            Ok(content) if content == COMPLETE => return Ok(VolumeMarker::Complete),
            Ok(content) if content == ERASING => return Ok(VolumeMarker::Erasing),
            Err(error) if !error.is_not_found() => return Err(error),
            _ => {}
        }
        // Without a marker the entries decide. A marker with another content is one of them.
        let mut entries = 0;
        for entry in top.list()? {
            entries += usize::from(!is_without_data(top, &entry)?);
        }
        match entries {
            0 => Ok(VolumeMarker::Unfinished),
            entries => Ok(VolumeMarker::Foreign { entries }),
        }
    }

    /// Checks that the volume in this device is complete.
    pub(super) fn check_complete(top: &Dir, device: &Path) -> Result<(), VolumeError> {
        let path = device.to_owned();
        match VolumeMarker::read_from(top).map_err(VolumeError::Finish)? {
            VolumeMarker::Complete => Ok(()),
            VolumeMarker::Unfinished | VolumeMarker::Erasing => Err(VolumeError::Unfinished { path }),
            VolumeMarker::Foreign { entries } => {
                Err(VolumeError::ForeignData { path, found: VolumeContents::Files { entries } })
            }
        }
    }

    /// Marks the volume as complete.
    pub(super) fn write_complete(top: &Dir) -> Result<(), Error> {
        top.write(MARKER_NAME, COMPLETE, FileMode::new(0o444))
    }

    /// Marks all other contents as being erased.
    pub(super) fn write_erasing(top: &Dir) -> Result<(), Error> {
        top.write(MARKER_NAME, ERASING, FileMode::new(0o444))
    }
}

/// Returns whether an entry of an unmarked directory holds no data of it: a mount point, which an operator creates
/// before the volume, or the empty `lost+found` of a new ext4.
fn is_without_data(top: &Dir, entry: &DirEntry) -> Result<bool, Error> {
    if entry.kind != FileKind::Dir {
        return Ok(false);
    }
    // mkfs.ext4 creates this directory in every file system; fsck and xfs_repair put files into it.
    let is_empty_lost_found = entry.name == "lost+found" && top.open_dir(&entry.name)?.list()?.is_empty();
    Ok(is_empty_lost_found || top.is_mount_point(&entry.name)?)
}

//! The marker file of a volume that this crate has completed.

use crate::dir::Dir;
use crate::error::Error;
use crate::metadata::{FileKind, FileMode};

/// Its name in the root directory of the volume.
pub(super) const MARKER_NAME: &str = ".data-volume";

const COMPLETE: &[u8] = b"nodekeel data volume, format 1\n";
const ERASING: &[u8] = b"nodekeel data volume, format 1: being erased\n";

/// The state of a volume, as recorded in its root directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VolumeMarker {
    /// The volume is complete.
    Complete,
    /// Its contents are being erased; some may remain.
    Erasing,
    /// It is empty: new, or not completed yet.
    Unfinished,
    /// It contains files but no marker.
    Foreign {
        /// The number of entries.
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
        let entries = top.list()?;
        match entries.as_slice() {
            [] => Ok(VolumeMarker::Unfinished),
            // mkfs.ext4 creates this directory in every file system; fsck and xfs_repair put files into it.
            [only]
                if only.name == "lost+found"
                    && only.kind == FileKind::Dir
                    && top.open_dir("lost+found")?.list()?.is_empty() =>
            {
                Ok(VolumeMarker::Unfinished)
            }
            entries => Ok(VolumeMarker::Foreign { entries: entries.len() }),
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

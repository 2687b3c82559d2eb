//! The file that says that a volume is complete, and of this crate's making.

use crate::dir::Dir;
use crate::error::Error;
use crate::metadata::Mode;

/// Its name, at the top of the volume.
pub(super) const MARKER: &str = ".data-volume";

const COMPLETE: &[u8] = b"nodekeel data volume, format 1\n";
const ERASING: &[u8] = b"nodekeel data volume, format 1: being erased\n";

/// What the top directory of a volume says about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// It was completed.
    Complete,
    /// What was in it was given up, and some of it may still be there.
    Erasing,
    /// It is empty, or was about to be completed.
    Unfinished,
    /// There are files, and nothing says that they are ours.
    Foreign {
        /// How many.
        entries: usize,
    },
}

impl Mark {
    pub(super) fn read(top: &Dir) -> Result<Mark, Error> {
        match top.read_at_most(MARKER, 4096) {
            Ok(content) if content == COMPLETE => return Ok(Mark::Complete),
            Ok(content) if content == ERASING => return Ok(Mark::Erasing),
            Err(error) if !error.is_not_found() => return Err(error),
            _ => {}
        }
        let entries = top.list()?;
        // What mkfs.ext4 makes on its own is nobody's.
        match entries.iter().filter(|entry| entry.name != "lost+found").count() {
            0 => Ok(Mark::Unfinished),
            entries => Ok(Mark::Foreign { entries }),
        }
    }

    /// Says that it is complete.
    pub(super) fn write(top: &Dir) -> Result<(), Error> {
        top.write(MARKER, COMPLETE, Mode::new(0o444))
    }

    /// Says that whatever else is in it was given up.
    pub(super) fn write_erasing(top: &Dir) -> Result<(), Error> {
        top.write(MARKER, ERASING, Mode::new(0o444))
    }
}

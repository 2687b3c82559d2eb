//! The file that says that a volume is complete, and of this crate's making.

use crate::dir::Dir;
use crate::error::Error;
use crate::metadata::Mode;

/// Its name, at the top of the volume.
pub(super) const MARKER: &str = ".data-volume";

const CONTENT: &[u8] = b"nodekeel data volume, format 1\n";

/// What the top directory of a volume says about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// It was completed.
    Complete,
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
            Ok(content) if content == CONTENT => return Ok(Mark::Complete),
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

    pub(super) fn write(top: &Dir) -> Result<(), Error> {
        top.write(MARKER, CONTENT, Mode::new(0o444))
    }
}

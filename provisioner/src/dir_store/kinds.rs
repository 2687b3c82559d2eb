//! Marks of the volumes and snapshots that are images: a file that no pod can reach.

use std::sync::Arc;

use nodekeel_localstorage::{Dir, FileMode};

use crate::dir_store::error::DirStoreError;
use crate::dir_store::image_file::has_image;
use crate::dir_store::limits::VolumeLimits;
use crate::dir_store::stored_dirs::{OptionalDir, StoredDirs, parse_name};
use crate::error_chain::format_chain;
use crate::image::{ImageFormat, VolumeKind};
use crate::snapshot::StoredId;
use crate::step::{StepRunner, VolumeStep};

/// Directory of marks, by id: the word of the format, and a newline. A volume without a mark is a directory. `kinds` is
/// created with the first mark.
pub(super) const KINDS_DIR: &str = "kinds";

/// Maximum length of a mark: more than a word and a newline.
const MAX_MARK_BYTES: u64 = 64;

/// The kinds of a store's volumes and snapshots.
pub(super) struct KindMarks {
    dirs: Arc<StoredDirs>,
    limits: Arc<VolumeLimits>,
    steps: StepRunner,
    marks: OptionalDir,
}

impl KindMarks {
    pub(super) fn open(limits: Arc<VolumeLimits>, steps: StepRunner) -> Result<Self, DirStoreError> {
        let dirs = Arc::clone(&limits.dirs);
        let marks = OptionalDir::find(&dirs.base, KINDS_DIR)?;
        Ok(Self { dirs, limits, steps, marks })
    }

    /// The kind of the volume or the snapshot in this directory.
    pub(super) fn read(&self, id: &StoredId, dir: &Dir) -> Result<VolumeKind, DirStoreError> {
        let kind = self.read_marked(id)?;
        // An image that is taken for a directory would show its pod the file, and not the device or file
        // system in it.
        if kind == VolumeKind::Directory && self.has_lost_mark(dir)? {
            let path = self.dirs.base.path().join(KINDS_DIR).join(id.as_str());
            return Err(DirStoreError::InvalidKind { path });
        }
        Ok(kind)
    }

    /// The kind by the mark alone: for who knows from elsewhere that a volume without one is a directory.
    pub(super) fn read_marked(&self, id: &StoredId) -> Result<VolumeKind, DirStoreError> {
        read_mark(self.marks.get(), id.as_str())
    }

    /// Returns whether a directory without a mark has lost it: volumes that are directories have an inode limit, which
    /// no pod can change, and images have none. Of a quota that limits nothing, that can't be seen.
    fn has_lost_mark(&self, dir: &Dir) -> Result<bool, DirStoreError> {
        if !has_image(dir)? {
            return Ok(false);
        }
        let status = self.limits.find_status(dir)?;
        Ok(status.is_some_and(|status| status.limits.bytes.is_some() && status.limits.inodes.is_none()))
    }

    /// Checks that the volume or the snapshot in this directory is of this kind.
    pub(super) fn check(&self, id: &StoredId, dir: &Dir, wanted: VolumeKind) -> Result<(), DirStoreError> {
        let found = self.read(id, dir)?;
        if found == wanted { Ok(()) } else { Err(DirStoreError::OtherKind { id: id.clone(), found, wanted }) }
    }

    /// Records the kind of a volume or a snapshot, before it is renamed into place.
    pub(super) fn mark(&self, id: &StoredId, kind: VolumeKind) -> Result<(), DirStoreError> {
        // A directory has no mark. One that an earlier volume of this name has left would make it an image.
        let Some(format) = kind.image_format() else { return self.remove(id) };
        let marks = self.marks.ensure(&self.dirs.base)?;
        let write = || marks.write(id.as_str(), format_mark(format).as_bytes(), FileMode::PRIVATE_FILE);
        self.steps.run_step(VolumeStep::MarkKind, write).map_err(DirStoreError::Directory)
    }

    /// Removes the mark of a volume or a snapshot that does not exist any more, or not yet.
    pub(super) fn remove(&self, id: &StoredId) -> Result<(), DirStoreError> {
        let Some(marks) = self.marks.get() else { return Ok(()) };
        let name = id.as_str();
        if !marks.exists(name).map_err(DirStoreError::Directory)? {
            return Ok(());
        }
        let remove = || marks.remove_file(name).map(drop);
        self.steps.run_step(VolumeStep::UnmarkKind, remove).map_err(DirStoreError::Directory)
    }

    /// Removes the mark of a volume or a snapshot whose creation has failed, unless it is in its place all the same.
    pub(super) fn discard(&self, id: &StoredId) {
        let removed = match self.dirs.find(id) {
            Ok(None) => self.remove(id),
            Ok(Some(_)) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = removed {
            // The next start removes it.
            tracing::warn!(handle = id.as_str(), "remove the mark of {id}: {}", format_chain(&error));
        }
    }

    /// Removes the marks of volumes and snapshots that don't exist. Staging must have been swept.
    pub(super) fn remove_stale(&self) -> Result<(), DirStoreError> {
        let Some(marks) = self.marks.get() else { return Ok(()) };
        marks.remove_stale_files().map_err(DirStoreError::Directory)?;
        for id in marks.list().map_err(DirStoreError::Directory)?.iter().filter_map(parse_name) {
            // A volume that can't be looked up keeps its mark: without it, it would pass for a directory.
            if matches!(self.dirs.find(&id), Ok(None)) {
                self.remove(&id)?;
            }
        }
        Ok(())
    }
}

/// The kind in the mark of a volume or a snapshot, in the directory of marks if there is one.
pub(super) fn read_mark(marks: Option<&Dir>, name: &str) -> Result<VolumeKind, DirStoreError> {
    let Some(marks) = marks else { return Ok(VolumeKind::Directory) };
    let invalid = || DirStoreError::InvalidKind { path: marks.path().join(name) };
    match marks.read_at_most(name, MAX_MARK_BYTES) {
        Ok(content) => parse_mark(&content).map(VolumeKind::Image).ok_or_else(invalid),
        Err(error) if error.is_not_found() => Ok(VolumeKind::Directory),
        // Damaged. It is an error, and never read as "a directory": the volume would be served as another
        // kind.
        Err(error) if error.is_too_large() || error.is_not_a_file() => Err(invalid()),
        Err(error) => Err(DirStoreError::Directory(error)),
    }
}

fn parse_mark(content: &[u8]) -> Option<ImageFormat> {
    std::str::from_utf8(content).ok()?.strip_suffix('\n')?.parse().ok()
}

fn format_mark(format: ImageFormat) -> String {
    format!("{format}\n")
}

/// Parses and formats the content of a mark; `None` if it is not one.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn read_kind_mark(content: &[u8]) -> Option<String> {
    parse_mark(content).map(format_mark)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_word_and_a_newline_are_a_mark() {
        for format in ImageFormat::ALL {
            assert_eq!(parse_mark(format_mark(format).as_bytes()), Some(format));
        }
        for bad in ["", "\n", "block", "block\n\n", " ext4\n", "EXT4\n", "directory\n", "\u{fc}\n"] {
            assert_eq!(parse_mark(bad.as_bytes()), None, "{bad:?}");
        }
        assert_eq!(parse_mark(b"xfs\xff\n"), None);
    }
}

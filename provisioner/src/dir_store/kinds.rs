//! Marks of the volumes and snapshots that are images: a file that no pod can reach.

use std::os::fd::AsFd as _;
use std::sync::OnceLock;

use nodekeel_localstorage::{Dir, FileKind, FileMode};

use crate::dir_store::copies::{ensure_dir, find_dir};
use crate::dir_store::images::IMAGE_FILE;
use crate::dir_store::{DirStoreError, StoreInner};
use crate::error_chain::format_chain;
use crate::image::{ImageFormat, VolumeKind};
use crate::snapshot::StoredId;
use crate::step::VolumeStep;

/// Directory of marks, by id: the word of the format, and a newline. What has no mark is a directory. It is created
/// with the first mark.
const KINDS_DIR: &str = "kinds";

/// Maximum length of a mark: more than a word and a newline.
const MAX_MARK_BYTES: u64 = 64;

/// The marks of a store.
pub(super) struct KindMarks(OnceLock<Dir>);

impl KindMarks {
    pub(super) fn open(base: &Dir) -> Result<Self, DirStoreError> {
        find_dir(base, KINDS_DIR).map(Self)
    }

    /// What the mark of a volume or a snapshot says.
    pub(super) fn read_mark(&self, name: &str) -> Result<VolumeKind, DirStoreError> {
        let Some(kinds) = self.0.get() else { return Ok(VolumeKind::Directory) };
        let invalid = || DirStoreError::InvalidKind { path: kinds.path().join(name) };
        match kinds.read_at_most(name, MAX_MARK_BYTES) {
            Ok(content) => parse_mark(&content).map(VolumeKind::Image).ok_or_else(invalid),
            Err(error) if error.is_not_found() => Ok(VolumeKind::Directory),
            Err(error) if error.is_too_large() || error.is_not_a_file() => Err(invalid()),
            Err(error) => Err(DirStoreError::Directory(error)),
        }
    }
}

/// The format in a mark.
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

impl StoreInner {
    /// What the volume or the snapshot in this directory is.
    pub(super) fn read_kind(&self, id: &StoredId, dir: &Dir) -> Result<VolumeKind, DirStoreError> {
        let kind = self.kinds.read_mark(id.as_str())?;
        match kind == VolumeKind::Directory && self.looks_like_image(dir)? {
            true => {
                Err(DirStoreError::InvalidKind { path: self.base.path().join(KINDS_DIR).join(id.as_str()) })
            }
            false => Ok(kind),
        }
    }

    /// Whether a directory without a mark has lost it: volumes that are directories have an inode limit, which no pod can
    /// change, and images have none. Of a quota that limits nothing, that can't be seen.
    fn looks_like_image(&self, dir: &Dir) -> Result<bool, DirStoreError> {
        match dir.metadata(IMAGE_FILE) {
            Ok(found) if found.kind == FileKind::File => {}
            Err(error) if !error.is_not_found() => return Err(DirStoreError::Directory(error)),
            _ => return Ok(false),
        }
        let status = self.quota.read_status(dir.as_fd());
        let status = status.map_err(|source| DirStoreError::Quota { path: dir.path().to_owned(), source })?;
        Ok(status.is_some_and(|status| status.limits.bytes.is_some() && status.limits.inodes.is_none()))
    }

    /// Checks that the volume or the snapshot in this directory is of this kind.
    pub(super) fn check_kind(
        &self,
        (id, dir): (&StoredId, &Dir),
        wanted: VolumeKind,
    ) -> Result<(), DirStoreError> {
        let found = self.read_kind(id, dir)?;
        match found == wanted {
            true => Ok(()),
            false => Err(DirStoreError::OtherKind { id: id.clone(), found, wanted }),
        }
    }

    /// Records what a volume or a snapshot is, before it is renamed into place.
    pub(super) fn mark_kind(&self, id: &StoredId, kind: VolumeKind) -> Result<(), DirStoreError> {
        let Some(format) = kind.image_format() else { return self.remove_kind(id) };
        let kinds = ensure_dir(&self.kinds.0, &self.base, KINDS_DIR)?;
        let write = || kinds.write(id.as_str(), format_mark(format).as_bytes(), FileMode::PRIVATE_FILE);
        self.steps.run_step(VolumeStep::MarkKind, write).map_err(DirStoreError::Directory)
    }

    /// Removes the mark of what does not exist any more, or not yet.
    pub(super) fn remove_kind(&self, id: &StoredId) -> Result<(), DirStoreError> {
        let Some(kinds) = self.kinds.0.get() else { return Ok(()) };
        let name = id.as_str();
        if !kinds.exists(name).map_err(DirStoreError::Directory)? {
            return Ok(());
        }
        let remove = || kinds.remove_file(name).map(drop);
        self.steps.run_step(VolumeStep::UnmarkKind, remove).map_err(DirStoreError::Directory)
    }

    /// Removes the mark of a volume or a snapshot whose creation has failed, unless it is in its place all the same.
    pub(super) fn discard_kind(&self, id: &StoredId) {
        let removed = match self.find_stored(id) {
            Ok(None) => self.remove_kind(id),
            Ok(Some(_)) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = removed {
            // The next start removes it.
            tracing::warn!(handle = id.as_str(), "remove the mark of {id}: {}", format_chain(&error));
        }
    }

    /// Removes the marks of volumes and snapshots that don't exist. Staging must have been swept.
    pub(super) fn remove_stale_kinds(&self) -> Result<(), DirStoreError> {
        let Some(kinds) = self.kinds.0.get() else { return Ok(()) };
        kinds.remove_stale_files().map_err(DirStoreError::Directory)?;
        for entry in kinds.list().map_err(DirStoreError::Directory)? {
            let id = entry.name.as_os_str().to_str().and_then(|name| name.parse::<StoredId>().ok());
            if let Some(id) = id.filter(|id| matches!(self.find_stored(id), Ok(None))) {
                self.remove_kind(&id)?;
            }
        }
        Ok(())
    }
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

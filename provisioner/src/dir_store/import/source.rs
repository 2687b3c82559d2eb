//! The directory to import: it is read by its path, because it may be anywhere.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits, QuotaUsage};
use nodekeel_localstorage::{OpenOutcome, TreeWalk, WalkEvent};
use rustix::fs::{AtFlags, FileType, Stat, StatxFlags};

use super::journal::IMPORT_DIR;
use super::{ImportMode, SourceError};
use crate::dir_store::stored_dirs::{SNAPSHOTS_DIR, VOLUMES_DIR};

/// Unit of `st_blocks`. *Source:* stat(3type).
const BLOCK_BYTES: u64 = 512;

/// A directory to import.
#[derive(Debug, Clone, Copy)]
pub(super) struct SourceDir<'a>(pub(super) &'a Path);

impl SourceDir<'_> {
    pub(super) fn exists(self) -> Result<bool, SourceError> {
        match fs::symlink_metadata(self.0) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(source) => Err(SourceError::Read { path: self.0.to_owned(), source }),
        }
    }

    pub(super) fn is_missing_or_empty(self) -> Result<bool, SourceError> {
        match fs::read_dir(self.0) {
            Ok(mut entries) => Ok(entries.next().is_none()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
            Err(source) => Err(SourceError::Read { path: self.0.to_owned(), source }),
        }
    }

    /// Checks that it can become a volume with these limits of the store in `base`. Returns what it uses.
    pub(super) fn check(
        self,
        base: &Path,
        limits: QuotaLimits,
        mode: ImportMode,
    ) -> Result<QuotaUsage, SourceError> {
        let path = || self.0.to_owned();
        let failed = |source| SourceError::Read { path: path(), source };
        if !fs::symlink_metadata(self.0).map_err(failed)?.is_dir() {
            return Err(SourceError::NotADirectory { path: path() });
        }
        // By resolved paths: a symbolic link could hide that the directory is in the store.
        let real_base = fs::canonicalize(base).map_err(failed)?;
        if is_part_of_store(&fs::canonicalize(self.0).map_err(failed)?, &real_base) {
            return Err(SourceError::PartOfStore { path: path(), base: base.to_owned() });
        }
        if mode == ImportMode::Move && mount_id(self.0)? != mount_id(base)? {
            return Err(SourceError::OtherMount { path: path(), base: base.to_owned() });
        }
        let used = self.measure()?;
        let fits = |used: u64, limit: Option<u64>| limit.is_none_or(|limit| used <= limit);
        let is_small = fits(used.bytes.0, limits.bytes.map(|limit| limit.0))
            && fits(used.inodes.0, limits.inodes.map(|limit| limit.0));
        if is_small { Ok(used) } else { Err(SourceError::TooLarge { path: path(), used, limits }) }
    }

    /// Measures its usage; an inode with several names counts once.
    fn measure(self) -> Result<QuotaUsage, SourceError> {
        let (mut used, mut linked) = (QuotaUsage { bytes: Bytes(0), inodes: Inodes(0) }, HashSet::new());
        let mut count = |stat: &Stat| {
            let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
            // A directory has one name, although its link count also counts its subdirectories.
            if is_dir || stat.st_nlink == 1 || linked.insert(stat.st_ino) {
                used.bytes.0 += u64::try_from(stat.st_blocks).unwrap_or_default() * BLOCK_BYTES;
                used.inodes.0 += 1;
            }
        };
        let failed = |path: PathBuf| move |source| SourceError::Read { path: self.0.join(path), source };
        let mut walk = fs::File::open(self.0).and_then(TreeWalk::open).map_err(failed(PathBuf::new()))?;
        let top = rustix::fs::fstat(walk.dir()).map_err(io::Error::from);
        count(&top.map_err(failed(PathBuf::new()))?);
        while let Some(event) = walk.next_event().map_err(failed(walk.path(None)))? {
            let (name, is_dir) = match event {
                WalkEvent::Directory { name } => (name, true),
                // One that was moved away is reported as missing.
                WalkEvent::Entry { name, .. } | WalkEvent::Moved { name, .. } => (name, false),
                WalkEvent::Leave { .. } => continue,
            };
            let path = walk.path(Some(&name));
            let stat =
                rustix::fs::statat(walk.dir(), &name, AtFlags::SYMLINK_NOFOLLOW).map_err(io::Error::from);
            count(&stat.map_err(failed(path.clone()))?);
            let opened = is_dir.then(|| walk.open_dir(&name).map_err(failed(path.clone()))).transpose()?;
            match opened {
                Some(OpenOutcome::Opened(dir)) => walk.enter(&name, dir).map_err(failed(path))?,
                Some(OpenOutcome::MountPoint) => {
                    return Err(SourceError::Mounted { path: self.0.join(path) });
                }
                Some(OpenOutcome::Vanished) | None => {}
            }
        }
        Ok(used)
    }
}

/// Returns whether a directory contains the store, or is the directory of its volumes or of its snapshots, or a hidden
/// one, or in one of these. One whose import was interrupted is not: it can be imported for another claim.
fn is_part_of_store(real: &Path, base: &Path) -> bool {
    let Ok(below) = real.strip_prefix(base) else { return base.starts_with(real) };
    let mut names = below.iter().map(|name| name.to_string_lossy());
    let first = names.next().unwrap_or_default();
    let is_waiting = first == IMPORT_DIR && names.count() == 1;
    let is_stored = first == VOLUMES_DIR || first == SNAPSHOTS_DIR || first.starts_with('.');
    first.is_empty() || is_stored && !is_waiting
}

/// The mount that shows a directory. *Source:* statx(2): unlike the device, it differs for bind mounts.
fn mount_id(path: &Path) -> Result<u64, SourceError> {
    let stat = fs::File::open(path)
        .and_then(|dir| Ok(rustix::fs::statx(dir.as_fd(), "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?));
    stat.map(|stat| stat.stx_mnt_id).map_err(|source| SourceError::Read { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stores_directories_are_not_imported() {
        let base = Path::new("/srv/store");
        for (path, is_part) in [
            ("/srv/store", true),
            ("/srv", true),
            ("/", true),
            ("/srv/store/volumes/pvc-1", true),
            ("/srv/store/snapshots", true),
            ("/srv/store/snapshots/snap-1/data", true),
            ("/srv/store/.trash/pvc-1", true),
            ("/srv/store/.import", true),
            ("/srv/store/.import/pvc-1", false),
            ("/srv/store/.import/pvc-1/data", true),
            ("/srv/store/incoming", false),
            ("/srv/store-2", false),
            ("/opt/data", false),
        ] {
            assert_eq!(is_part_of_store(Path::new(path), base), is_part, "{path}");
        }
    }
}

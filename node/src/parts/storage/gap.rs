//! Files that something has written to the mount point while the volume was not mounted: moved aside, and never deleted.

use std::path::PathBuf;

use nodekeel_localstorage::volume::VOLUME_MARK_FILE;
use nodekeel_localstorage::{Dir, RenameMode};

use super::error::StorageError;
use crate::layout::{VOLUME_DIR, VOLUME_MODE};

/// The names of the directories of such files, next to the mount point, end in a number.
const FOUND: &str = "data.not-on-volume-";

/// Moves files in the mount point aside, if it is not mounted: a file system would hide them. A volume in a directory is
/// left there: the configuration is wrong.
pub(super) fn clear_mount_point(data: &Dir, may_move: bool) -> Result<(), StorageError> {
    if data.is_mount_point(VOLUME_DIR).map_err(StorageError::Directory)? {
        return Ok(());
    }
    // Missing if noded was killed after it was moved.
    let dir = data.ensure_dir(VOLUME_DIR, VOLUME_MODE).map_err(StorageError::Directory)?;
    let entries = dir.list().map_err(StorageError::Directory)?;
    if entries.is_empty() {
        return Ok(());
    }
    if !may_move || entries.iter().any(|entry| entry.name == VOLUME_MARK_FILE) {
        return Err(StorageError::Hidden { path: data.path().join(VOLUME_DIR) });
    }
    let taken = numbers(data)?;
    let name = format!("{FOUND}{}", taken.last().map_or(1, |last| last.saturating_add(1)));
    data.rename(VOLUME_DIR, data, &name, RenameMode::NoReplace).map_err(StorageError::Directory)?;
    data.ensure_dir(VOLUME_DIR, VOLUME_MODE).map_err(StorageError::Directory)?;
    let path = data.path().join(name);
    tracing::warn!(
        "moved files that were written while the data volume was not mounted to {}",
        path.display()
    );
    Ok(())
}

/// The directories of files that were moved aside and are still there; none if they can't be listed.
pub(super) fn moved_files(data: &Dir) -> Vec<PathBuf> {
    let numbers = numbers(data).unwrap_or_default();
    numbers.into_iter().map(|number| data.path().join(format!("{FOUND}{number}"))).collect()
}

fn numbers(data: &Dir) -> Result<Vec<u64>, StorageError> {
    let entries = data.list().map_err(StorageError::Directory)?;
    let number = |name: &str| name.strip_prefix(FOUND)?.parse().ok();
    let mut numbers: Vec<u64> =
        entries.iter().filter_map(|entry| number(entry.name.as_os_str().to_str()?)).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn files_below_the_mount_point_are_moved_aside_and_a_volume_in_a_directory_is_not() {
        let scratch = tempfile::tempdir().expect("a directory");
        let data = Dir::open(scratch.path()).expect("there");
        let path = |name: &str| data.path().join(name);
        clear_mount_point(&data, true).expect("created");
        assert!(moved_files(&data).is_empty());
        for number in 1..3 {
            fs::write(path("data/letter"), "dear").expect("written");
            let refused = clear_mount_point(&data, false).expect_err("changes nothing");
            assert!(matches!(refused, StorageError::Hidden { .. }), "{refused}");
            clear_mount_point(&data, true).expect("moved");
            let moved = moved_files(&data);
            assert_eq!(moved.len(), number);
            assert_eq!(fs::read_to_string(moved[number - 1].join("letter")).expect("kept"), "dear");
            assert_eq!(fs::read_dir(path("data")).expect("there").count(), 0);
        }
        // A kill after the move.
        fs::remove_dir(path("data")).expect("removed");
        clear_mount_point(&data, true).expect("created again");
        fs::write(path("data").join(VOLUME_MARK_FILE), "").expect("written");
        assert!(matches!(clear_mount_point(&data, true), Err(StorageError::Hidden { .. })));
    }
}

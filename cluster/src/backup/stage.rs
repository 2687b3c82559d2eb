//! A decrypted snapshot on the disk of a node that restores a cluster from it.

use std::io::Write as _;
use std::path::Path;

use nodekeel_localstorage::{Dir, FileMode};

use super::SnapshotError;
use super::snapshot::SnapshotCheck;

/// Verifies a decrypted snapshot, and stores it in a file that its owner alone reads. The file is whole, or it is not changed. It
/// blocks.
///
/// # Errors
/// [`SnapshotError::Encrypted`], [`SnapshotError::Damaged`], [`SnapshotError::Store`], [`SnapshotError::Write`].
pub fn stage_snapshot(
    dir: &Dir,
    name: &Path,
    pieces: impl IntoIterator<Item = Vec<u8>>,
) -> Result<(), SnapshotError> {
    let mut file = dir.replace_file(name, FileMode::PRIVATE_FILE).map_err(SnapshotError::Store)?;
    let mut check = SnapshotCheck::default();
    for piece in pieces {
        check.push(&piece);
        file.write_all(&piece).map_err(SnapshotError::Write)?;
    }
    check.finish()?;
    file.commit().map_err(SnapshotError::Store)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::snapshot::tests::snapshot_file;
    use super::*;

    #[test]
    fn a_snapshot_is_stored_only_if_it_is_whole_and_decrypted() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = Dir::open(scratch.path()).unwrap();
        let stage = |bytes: &[u8]| {
            let pieces: Vec<_> = bytes.chunks(1000).map(<[u8]>::to_vec).collect();
            stage_snapshot(&dir, Path::new("snapshot"), pieces)
        };
        let file = snapshot_file(9);
        for part in [0, 20, 1500, file.len() - 1] {
            assert!(matches!(stage(&file[..part]), Err(SnapshotError::Damaged { .. })), "{part}");
        }
        let encrypted = [b"age-encryption.org/v1\n-> X25519 ", &file[..]].concat();
        assert!(matches!(stage(&encrypted), Err(SnapshotError::Encrypted)));
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
        stage(&file).unwrap();
        assert_eq!(fs::read(scratch.path().join("snapshot")).unwrap(), file);
    }
}

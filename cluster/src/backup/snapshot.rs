//! The file of a snapshot, and whether it is whole.

use std::io;

use sha2::{Digest as _, Sha256};
use thiserror::Error;

use crate::age::INTRO;
use crate::consensus::MembershipError;

/// The checksum at the end of the file.
const SUM_BYTES: usize = 32;
/// The database before it is a multiple of this.
const SECTOR_BYTES: u64 = 512;
/// The number in the first page of a database, and its place.
///
/// *Source:* bbolt's `db.go`; in the byte order of the machine.
const MAGIC: [u8; 4] = 0xED0C_DAED_u32.to_ne_bytes();
const MAGIC_AT: usize = 16;

/// The cause for which there is no snapshot.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The store did not return it. A retry may help.
    #[error("can't read a snapshot of the cluster's store")]
    Read(#[source] MembershipError),
    /// It is not what the store has sent: it was not kept.
    #[error("the snapshot is damaged or incomplete: {problem}; nothing of it was kept")]
    Damaged {
        /// What is wrong with it.
        problem: &'static str,
    },
    /// It is a backup that was not decrypted: it was not kept.
    #[error("the snapshot is encrypted: decrypt it by `age -d -i KEY FILE`")]
    Encrypted,
    /// It could not be stored.
    #[error("can't store the snapshot")]
    Store(#[source] nodekeel_localstorage::Error),
    /// It could not be written.
    #[error("can't write the snapshot")]
    Write(#[source] io::Error),
    /// It could not be encrypted: the recipient's key is no usable one, or the machine has no random numbers.
    #[error("can't encrypt the snapshot for {recipient}; use another recipient: `age-keygen -o KEY`")]
    Encrypt {
        /// The recipient.
        recipient: String,
    },
}

/// Checks a snapshot while it goes by: a database, and the SHA-256 of it.
///
/// *Source:* `Snapshot` in etcd's `api/v3rpc/maintenance.go`, and `hasChecksum` in its `snapshot/v3_snapshot.go`.
#[derive(Default)]
pub(super) struct SnapshotCheck {
    digest: Sha256,
    start: Vec<u8>,
    /// The last bytes, which may be the checksum.
    end: Vec<u8>,
    length: u64,
}

impl SnapshotCheck {
    pub(super) fn push(&mut self, piece: &[u8]) {
        self.length += piece.len() as u64;
        let missing = (MAGIC_AT + MAGIC.len()).saturating_sub(self.start.len());
        self.start.extend(&piece[..missing.min(piece.len())]);
        // All but the last bytes are of the database.
        let surplus = (self.end.len() + piece.len()).saturating_sub(SUM_BYTES);
        let (before, now) = (surplus.min(self.end.len()), surplus.saturating_sub(self.end.len()));
        self.digest.update(&self.end[..before]);
        self.digest.update(&piece[..now]);
        self.end.drain(..before);
        self.end.extend(&piece[now..]);
    }

    pub(super) fn finish(self) -> Result<(), SnapshotError> {
        let damaged = |problem| Err(SnapshotError::Damaged { problem });
        if INTRO.as_bytes().starts_with(&self.start) && !self.start.is_empty() {
            return Err(SnapshotError::Encrypted);
        }
        if self.start.get(MAGIC_AT..) != Some(&MAGIC[..]) {
            return damaged("it is no database of etcd");
        }
        if self.length % SECTOR_BYTES != SUM_BYTES as u64 {
            return damaged("its size is not that of a database and a checksum");
        }
        if self.digest.finalize()[..] != self.end[..] {
            return damaged("its SHA-256 is not the one at its end");
        }
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// The file of a snapshot with a database of this many sectors.
    pub(in crate::backup) fn snapshot_file(sectors: usize) -> Vec<u8> {
        let mut file: Vec<u8> = (0..512 * sectors).map(|index| (index % 253) as u8).collect();
        file[MAGIC_AT..MAGIC_AT + MAGIC.len()].copy_from_slice(&MAGIC);
        file.extend_from_slice(&Sha256::digest(&file));
        file
    }

    #[test]
    fn a_snapshot_is_whole_in_pieces_of_any_size_and_not_once_it_has_changed() {
        let check = |file: &[u8], size: usize| {
            let mut check = SnapshotCheck::default();
            file.chunks(size).for_each(|piece| check.push(piece));
            check.finish()
        };
        let file = snapshot_file(5);
        for size in [1, 7, 31, 32, 33, 512, 10_000] {
            check(&file, size).unwrap();
            for at in [0, MAGIC_AT, 700, file.len() - 33, file.len() - 32, file.len() - 1] {
                let mut changed = file.clone();
                changed[at] ^= 1;
                check(&changed, size).unwrap_err();
            }
            for length in [0, 10, 31, 32, 600, file.len() - 512, file.len() - 32, file.len() - 1] {
                check(&file[..length], size).unwrap_err();
            }
            check(&[&file[..], b"more"].concat(), size).unwrap_err();
        }
    }
}

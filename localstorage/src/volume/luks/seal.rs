//! The places where a node keeps its unlock key.

use std::fmt;

use zeroize::Zeroizing;

use super::super::uuid::Uuid;
use super::key::{KEY_BYTES, UnlockKey};
use super::tpm::{self, TpmError};
use crate::dir::Dir;
use crate::error::Error;
use crate::metadata::FileMode;

/// The name of a node unlock key: its volume and its generation. Each rotation makes a new generation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SealId {
    pub(super) volume: Uuid,
    pub(super) generation: u32,
}

impl SealId {
    /// An identifier, for tests of a [`KeySeal`].
    pub fn new(volume: [u8; 16], generation: u32) -> SealId {
        SealId { volume: Uuid(volume), generation }
    }

    /// The generation, from 1.
    pub fn generation(self) -> u32 {
        self.generation
    }
}

/// `UUID.GENERATION`: a file name on any file system.
impl fmt::Display for SealId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.volume, self.generation)
    }
}

impl fmt::Debug for SealId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SealId({self})")
    }
}

/// Keeps node unlock keys, so that only this node reads them.
///
/// # Contract
/// - [`seal_key`](Self::seal_key) returns after the key is durable; it replaces the key of the same identifier. A call that
///   fails or is killed leaves the old key, the new one, or an error of [`unseal_key`](Self::unseal_key).
/// - [`unseal_key`](Self::unseal_key) returns the key that was sealed under the identifier, and `None` only if there is
///   none: what can't be read, or is another key, is an error.
/// - [`remove_key`](Self::remove_key) is idempotent.
/// - Keys of other identifiers are not touched.
///
/// `testing::key_seal_conformance` (feature `testing`) checks it.
pub trait KeySeal: Send + Sync + fmt::Debug {
    /// Keeps a key.
    ///
    /// # Errors
    /// [`SealError::Store`], [`SealError::Tpm`].
    fn seal_key(&self, id: SealId, key: &UnlockKey) -> Result<(), SealError>;

    /// Reads a key.
    ///
    /// # Errors
    /// [`SealError::Damaged`], [`SealError::Store`], [`SealError::Tpm`].
    fn unseal_key(&self, id: SealId) -> Result<Option<UnlockKey>, SealError>;

    /// Removes a key.
    ///
    /// # Errors
    /// [`SealError::Store`].
    fn remove_key(&self, id: SealId) -> Result<(), SealError>;
}

/// A failure to keep, read or remove a node unlock key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// The stored key is not the one that was sealed under this identifier: restore it, or use a recovery passphrase.
    #[error("node unlock key {id} is damaged: restore it, or open the volume with the recovery passphrase")]
    Damaged {
        /// The identifier.
        id: SealId,
    },
    /// The TPM does not seal or unseal it.
    #[error("can't seal or unseal node unlock key {id} by the TPM")]
    Tpm {
        /// The identifier.
        id: SealId,
        /// The cause, and what to do.
        #[source]
        source: TpmError,
    },
    /// The key could not be written, read or removed.
    #[error("can't access node unlock key {id}")]
    Store {
        /// The identifier.
        id: SealId,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// A node unlock key in a file, usually on the EFI system partition, mounted for root alone: a thief of that disk has
/// the key.
///
/// The file `ID.key`, mode 0600, has three lines: what it is, the key in hexadecimal digits, and a checksum of its
/// identifier and key. Each key has a separate file that is written once, since vfat can't replace a file
/// atomically.
#[derive(Debug)]
pub struct FileSeal {
    dir: Dir,
}

const FILE_HEADER: &str = "nodekeel node unlock key, format 1";

impl FileSeal {
    /// Keeps keys in this directory.
    pub fn new(dir: Dir) -> FileSeal {
        FileSeal { dir }
    }
}

impl KeySeal for FileSeal {
    fn seal_key(&self, id: SealId, key: &UnlockKey) -> Result<(), SealError> {
        let content = Zeroizing::new(encode_key(id, key));
        self.dir.write(file_name(id), content.as_bytes(), FileMode::PRIVATE_FILE).map_err(store_error(id))
    }

    fn unseal_key(&self, id: SealId) -> Result<Option<UnlockKey>, SealError> {
        let content = match self.dir.read_at_most(file_name(id), 4096) {
            Ok(content) => Zeroizing::new(content),
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) => return Err(store_error(id)(error)),
        };
        decode_key(id, &content).map(Some).ok_or(SealError::Damaged { id })
    }

    fn remove_key(&self, id: SealId) -> Result<(), SealError> {
        remove_key_files(&self.dir, id)
    }
}

/// Removes the files of a key, also that of the other seal: the directory may have one from before the seal was
/// changed.
pub(super) fn remove_key_files(dir: &Dir, id: SealId) -> Result<(), SealError> {
    for name in [file_name(id), tpm::file_name(id)] {
        dir.remove_file(name).map_err(store_error(id))?;
    }
    Ok(())
}

pub(super) fn store_error(id: SealId) -> impl FnOnce(Error) -> SealError {
    move |error| SealError::Store { id, source: Box::new(error) }
}

fn file_name(id: SealId) -> String {
    format!("{id}.key")
}

fn encode_key(id: SealId, key: &UnlockKey) -> String {
    // Full capacity from the start: a string that grows would leave copies of the key behind.
    let mut text = String::with_capacity(256);
    text.extend([FILE_HEADER, "\n"]);
    for byte in key.expose_bytes() {
        for digit in [byte >> 4, byte & 15] {
            text.push(char::from_digit(digit.into(), 16).unwrap_or_default());
        }
    }
    text.extend(["\n", &checksum(id, key), "\n"]);
    text
}

fn decode_key(id: SealId, content: &[u8]) -> Option<UnlockKey> {
    let text = std::str::from_utf8(content).ok()?;
    let digits = text.lines().nth(1)?;
    let mut bytes = Zeroizing::new([0; KEY_BYTES]);
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    let key = UnlockKey::from_bytes(&bytes[..]).ok()?;
    // Any other difference from the written text is damage, too.
    (*Zeroizing::new(encode_key(id, &key)) == text).then_some(key)
}

fn checksum(id: SealId, key: &UnlockKey) -> String {
    // With the identifier: the file of another key under this name is damage, too.
    let sum = crc32c::crc32c_append(crc32c::crc32c(id.to_string().as_bytes()), key.expose_bytes());
    format!("{sum:08x}")
}

/// Checks the [contract](KeySeal#contract) on a seal that keeps none of the keys of the volume `[1; 16]`.
///
/// # Panics
/// If the contract is broken.
#[cfg(any(test, feature = "testing"))]
pub fn key_seal_conformance(seal: &dyn KeySeal) {
    let [first, second] = [1, 2].map(|generation| SealId::new([1; 16], generation));
    let key = |byte| UnlockKey::from_bytes(&[byte; KEY_BYTES]).expect("32 bytes are a key");
    let read = |id| {
        let key = seal.unseal_key(id).expect("a key that was sealed completely can be read, or is absent");
        key.map(|key| *key.expose_bytes())
    };
    assert_eq!(read(first), None, "a key that was never sealed is absent");
    seal.remove_key(first).expect("removing an absent key succeeds");
    seal.seal_key(first, &key(1)).expect("a key is sealed");
    seal.seal_key(second, &key(2)).expect("a second key is sealed");
    assert_eq!(
        (read(first), read(second)),
        (Some([1; KEY_BYTES]), Some([2; KEY_BYTES])),
        "keys are read back"
    );
    seal.seal_key(first, &key(3)).expect("a key is replaced");
    assert_eq!(
        (read(first), read(second)),
        (Some([3; KEY_BYTES]), Some([2; KEY_BYTES])),
        "one key is replaced"
    );
    for _ in 0..2 {
        seal.remove_key(first).expect("a removal can be repeated");
    }
    assert_eq!((read(first), read(second)), (None, Some([2; KEY_BYTES])), "one key is removed");
    seal.remove_key(second).expect("the other key is removed");
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn keys_in_files_keep_the_contract() {
        let directory = tempfile::tempdir().unwrap();
        key_seal_conformance(&FileSeal::new(Dir::open(directory.path()).unwrap()));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    // Rotations remove the keys that no slot needs any more, also after the configured seal has changed.
    #[test]
    fn a_removed_key_leaves_no_file_of_another_seal_and_no_other_key() {
        let directory = tempfile::tempdir().unwrap();
        let open = || Dir::open(directory.path()).unwrap();
        let [old, new] = [1, 2].map(|generation| SealId::new([1; 16], generation));
        let seals: [Box<dyn KeySeal>; 2] =
            [Box::new(FileSeal::new(open())), Box::new(tpm::TpmSeal::new(open(), Default::default()))];
        for seal in seals {
            for name in [old, new].iter().flat_map(|id| [file_name(*id), tpm::file_name(*id)]) {
                fs::write(directory.path().join(name), "sealed").unwrap();
            }
            seal.remove_key(old).unwrap();
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2, "{seal:?}");
            assert!(directory.path().join(file_name(new)).exists());
            assert!(directory.path().join(tpm::file_name(new)).exists());
        }
    }

    #[test]
    fn a_key_file_that_is_changed_anywhere_is_damaged() {
        let directory = tempfile::tempdir().unwrap();
        let seal = FileSeal::new(Dir::open(directory.path()).unwrap());
        let (id, other) = (SealId::new([1; 16], 1), SealId::new([1; 16], 2));
        seal.seal_key(id, &UnlockKey::generate().unwrap()).unwrap();
        let path = directory.path().join("01010101-0101-0101-0101-010101010101.1.key");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        let written = fs::read(&path).unwrap();
        let is_damaged = |id, bytes: &[u8]| {
            fs::write(directory.path().join(file_name(id)), bytes).unwrap();
            matches!(seal.unseal_key(id), Err(SealError::Damaged { .. }))
        };
        for at in 0..written.len() {
            assert!(is_damaged(id, &written[..at]), "cut at {at}");
            let mut changed = written.clone();
            changed[at] ^= 1;
            assert!(is_damaged(id, &changed), "changed at {at}");
        }
        assert!(is_damaged(other, &written), "the key of another generation");
        assert!(!is_damaged(id, &written));
    }
}

//! The keys that open an encrypted volume, and the passphrases of key slots derived from them.

use std::fmt;

use hkdf::Hkdf;
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;
use zeroize::Zeroizing;

use super::super::uuid::Uuid;
use super::slot_kind::SlotKind;

/// The length of unlock keys, in bytes.
pub(super) const KEY_BYTES: usize = 32;

const HEX_DIGITS: &[u8; 16] = b"0123456789abcdef";

/// The node unlock key, or the cluster unlock key: 32 random bytes. They are erased from memory when the key is
/// dropped, and are never printed.
#[derive(Clone)]
pub struct UnlockKey(Zeroizing<[u8; KEY_BYTES]>);

/// Bytes that are not an unlock key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid unlock key of {length} bytes: an unlock key has {KEY_BYTES}")]
pub struct InvalidUnlockKey {
    /// The number of bytes.
    pub length: usize,
}

impl UnlockKey {
    /// A new key, from the kernel's random numbers.
    ///
    /// # Errors
    /// Those of getrandom(2).
    pub fn generate() -> std::io::Result<UnlockKey> {
        let mut bytes = Zeroizing::new([0; KEY_BYTES]);
        getrandom(&mut bytes[..], GetRandomFlags::empty())?;
        Ok(UnlockKey(bytes))
    }

    /// The key with these bytes.
    ///
    /// # Errors
    /// [`InvalidUnlockKey`] unless there are 32.
    pub fn from_bytes(bytes: &[u8]) -> Result<UnlockKey, InvalidUnlockKey> {
        let array: [u8; KEY_BYTES] =
            bytes.try_into().map_err(|_| InvalidUnlockKey { length: bytes.len() })?;
        Ok(UnlockKey(Zeroizing::new(array)))
    }

    /// The bytes, to store them. Don't keep copies.
    pub fn expose_bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }

    /// A number that distinguishes this node unlock key from others, for errors that name the wrong half. It is 32
    /// bits of a one-way function of 256 random bits: it tells nothing else about the key.
    pub(super) fn check_value(&self, volume: Uuid) -> String {
        // A context of its own keeps this value independent of the passphrases, which come from the same key.
        let hkdf = Hkdf::<Sha256>::new(Some(&volume.0), &self.0[..]);
        let mut check = [0; 4];
        expand(&hkdf, b"nodekeel localstorage: check value of a node unlock key", &mut check);
        check.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for UnlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UnlockKey")
    }
}

/// The passphrase of a key slot: HKDF-SHA256 of the node unlock key, followed by the cluster unlock key if both are
/// needed; the salt is the volume's UUID, and the context names the kind of slot.
///
/// The seed combined both halves by XOR. Neither half alone opens the volume either way, but the XOR of a known half
/// and a known passphrase is the other half, and a slot of the node unlock key alone would contain that key. With a
/// one-way function no slot reveals a key, and no two slots or volumes have related passphrases.
///
/// The passphrase has 64 hexadecimal digits: cryptsetup reads a new passphrase up to the first newline.
///
/// *Source:* RFC 5869.
pub(super) fn derive_passphrase(
    volume: Uuid,
    kind: SlotKind,
    node_key: &UnlockKey,
    cluster_key: Option<&UnlockKey>,
) -> Zeroizing<Vec<u8>> {
    // An array and no vector: one that grows would leave copies of the keys in memory.
    let mut halves = Zeroizing::new([0; 2 * KEY_BYTES]);
    halves[..KEY_BYTES].copy_from_slice(&node_key.0[..]);
    let length = match cluster_key {
        None => KEY_BYTES,
        Some(key) => {
            halves[KEY_BYTES..].copy_from_slice(&key.0[..]);
            2 * KEY_BYTES
        }
    };
    let hkdf = Hkdf::<Sha256>::new(Some(&volume.0), &halves[..length]);
    let mut derived = Zeroizing::new([0; KEY_BYTES]);
    let context = format!("nodekeel localstorage: passphrase of a key slot: {kind}");
    expand(&hkdf, context.as_bytes(), &mut derived[..]);
    let mut passphrase = Zeroizing::new(Vec::with_capacity(2 * KEY_BYTES));
    passphrase.extend(
        derived.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(|digit| HEX_DIGITS[usize::from(digit)]),
    );
    passphrase
}

fn expand(hkdf: &Hkdf<Sha256>, context: &[u8], output: &mut [u8]) {
    hkdf.expand(context, output).expect("HKDF-SHA256 yields up to 8,160 bytes");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> UnlockKey {
        UnlockKey::from_bytes(&[byte; KEY_BYTES]).unwrap()
    }

    /// The passphrases of volumes that exist depend on these bytes.
    #[test]
    fn passphrases_and_check_values_never_change() {
        let volume = Uuid([7; 16]);
        let split = derive_passphrase(volume, SlotKind::Split, &key(1), Some(&key(2)));
        let local = derive_passphrase(volume, SlotKind::Local, &key(1), None);
        // *Source:* python3, hmac and hashlib, by the formulas of RFC 5869.
        assert_eq!(*split, include_bytes!("../../../testdata/luks/split-passphrase.txt").trim_ascii());
        assert_eq!(*local, include_bytes!("../../../testdata/luks/local-passphrase.txt").trim_ascii());
        assert_eq!(
            key(1).check_value(volume),
            include_str!("../../../testdata/luks/node-check-value.txt").trim()
        );
    }

    #[test]
    fn each_input_changes_the_passphrase() {
        let base = |volume, kind, node, cluster: Option<u8>| {
            derive_passphrase(Uuid([volume; 16]), kind, &key(node), cluster.map(key).as_ref()).to_vec()
        };
        let all = [
            base(1, SlotKind::Split, 1, Some(1)),
            base(2, SlotKind::Split, 1, Some(1)),
            base(1, SlotKind::Split, 2, Some(1)),
            base(1, SlotKind::Split, 1, Some(2)),
            base(1, SlotKind::Split, 2, Some(2)),
            base(1, SlotKind::Local, 1, None),
            base(1, SlotKind::Split, 1, None),
        ];
        for (index, passphrase) in all.iter().enumerate() {
            assert_eq!(all.iter().position(|other| other == passphrase), Some(index));
        }
    }

    #[test]
    fn a_key_has_32_bytes_and_is_never_printed() {
        for length in [0, 31, 33, 64] {
            assert_eq!(UnlockKey::from_bytes(&vec![1; length]).unwrap_err(), InvalidUnlockKey { length });
        }
        assert_eq!(format!("{:?}", key(0xab)), "UnlockKey");
        assert_ne!(
            UnlockKey::generate().unwrap().expose_bytes(),
            UnlockKey::generate().unwrap().expose_bytes()
        );
    }
}

//! The recovery passphrase: what a person types where the keys are lost.

use std::fmt;

use rustix::rand::{GetRandomFlags, getrandom};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

/// Crockford's base 32: digits and capitals without I, L, O and U.
const ALPHABET: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
/// 160 random bits.
const RANDOM_BYTES: usize = 20;
const RANDOM_SYMBOLS: usize = 32;
/// 15 bits: a mistyped passphrase passes once in 32,768.
const CHECK_SYMBOLS: usize = 3;
const SYMBOLS: usize = RANDOM_SYMBOLS + CHECK_SYMBOLS;
const GROUP_SYMBOLS: usize = 5;

/// A passphrase that opens the volume without node and cluster: seven groups of five symbols, the last three of
/// which are a checksum.
///
/// The text is the passphrase of the key slot, as [`reveal`](Self::reveal) returns it: `cryptsetup open` accepts it
/// too, on any machine. It is erased from memory when it is dropped, and only `reveal` yields it.
#[derive(Clone)]
pub struct RecoveryPassphrase(Zeroizing<String>);

/// A defect of a typed recovery passphrase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidRecoveryPassphrase {
    /// Another number of symbols.
    #[error("recovery passphrase has {0} symbols instead of {SYMBOLS}: type all seven groups")]
    Length(usize),
    /// A symbol is not a letter or digit in use.
    #[error(
        "recovery passphrase has an invalid symbol at position {0}: it consists of digits and letters without U"
    )]
    Symbol(usize),
    /// The checksum does not match.
    #[error("recovery passphrase has a wrong checksum: compare it with what was shown, group by group")]
    Checksum,
}

impl RecoveryPassphrase {
    /// A new passphrase, from the kernel's random numbers.
    ///
    /// # Errors
    /// Those of getrandom(2).
    pub fn generate() -> std::io::Result<RecoveryPassphrase> {
        let mut random = Zeroizing::new([0; RANDOM_BYTES]);
        getrandom(&mut random[..], GetRandomFlags::empty())?;
        Ok(RecoveryPassphrase::from_random(&random))
    }

    /// Reads a typed passphrase. Case, spaces and dashes make no difference; O counts as 0, I and L as 1.
    ///
    /// # Errors
    /// [`InvalidRecoveryPassphrase`].
    pub fn parse(text: &str) -> Result<RecoveryPassphrase, InvalidRecoveryPassphrase> {
        let mut symbols = Zeroizing::new(Vec::with_capacity(SYMBOLS));
        for (position, typed) in text.chars().filter(|c| !c.is_whitespace() && *c != '-').enumerate() {
            let symbol = match typed.to_ascii_uppercase() {
                'O' => '0',
                'I' | 'L' => '1',
                other => other,
            };
            let is_known = u8::try_from(symbol).is_ok_and(|byte| ALPHABET.contains(&byte));
            if !is_known {
                return Err(InvalidRecoveryPassphrase::Symbol(position + 1));
            }
            // Never beyond the capacity: a vector that grows would leave copies of the passphrase behind.
            if position < SYMBOLS {
                symbols.push(symbol as u8);
            } else {
                return Err(InvalidRecoveryPassphrase::Length(position + 1));
            }
        }
        if symbols.len() != SYMBOLS {
            return Err(InvalidRecoveryPassphrase::Length(symbols.len()));
        }
        let (random, check) = symbols.split_at(RANDOM_SYMBOLS);
        if check != check_symbols(random) {
            return Err(InvalidRecoveryPassphrase::Checksum);
        }
        Ok(RecoveryPassphrase::from_symbols(&symbols))
    }

    /// The passphrase, to show it once: capitals and digits in groups, separated by dashes.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    fn from_random(random: &[u8; RANDOM_BYTES]) -> RecoveryPassphrase {
        let mut symbols = Zeroizing::new(Vec::with_capacity(SYMBOLS));
        // Five bytes are eight symbols of five bits.
        for five in random.chunks(5) {
            let bits = five.iter().fold(0_u64, |bits, byte| bits << 8 | u64::from(*byte));
            symbols.extend((0..8).rev().map(|at| ALPHABET[(bits >> (5 * at)) as usize & 31]));
        }
        let check = check_symbols(&symbols);
        symbols.extend(check);
        RecoveryPassphrase::from_symbols(&symbols)
    }

    fn from_symbols(symbols: &[u8]) -> RecoveryPassphrase {
        let mut text = Zeroizing::new(String::with_capacity(SYMBOLS + SYMBOLS / GROUP_SYMBOLS));
        for (index, symbol) in symbols.iter().enumerate() {
            if index > 0 && index % GROUP_SYMBOLS == 0 {
                text.push('-');
            }
            text.push(char::from(*symbol));
        }
        RecoveryPassphrase(text)
    }
}

impl fmt::Debug for RecoveryPassphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RecoveryPassphrase")
    }
}

/// The first 15 bits of the SHA-256 of the other symbols.
fn check_symbols(random: &[u8]) -> [u8; CHECK_SYMBOLS] {
    let sum = Sha256::digest(random);
    let bits = u32::from(sum[0]) << 16 | u32::from(sum[1]) << 8 | u32::from(sum[2]);
    [19, 14, 9].map(|shift| ALPHABET[(bits >> shift) as usize & 31])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_passphrase_is_read_back_as_it_may_be_typed(random in any::<[u8; RANDOM_BYTES]>()) {
            let shown = RecoveryPassphrase::from_random(&random);
            let typed = shown.reveal().to_lowercase().replace('0', "o").replace('1', "l").replace('-', " ");
            for text in [shown.reveal(), &typed, &typed.replace(' ', "")] {
                let read = RecoveryPassphrase::parse(text).unwrap();
                prop_assert_eq!(read.reveal(), shown.reveal());
            }
        }

        #[test]
        fn a_mistyped_symbol_is_found(random in any::<[u8; RANDOM_BYTES]>(), at in 0..SYMBOLS, other in 0..32_usize) {
            let shown = RecoveryPassphrase::from_random(&random);
            let mut symbols: Vec<u8> = shown.reveal().bytes().filter(|byte| *byte != b'-').collect();
            prop_assume!(symbols[at] != ALPHABET[other]);
            symbols[at] = ALPHABET[other];
            let parsed = RecoveryPassphrase::parse(std::str::from_utf8(&symbols).unwrap());
            // One in 32,768 passes.
            prop_assume!(check_symbols(&symbols[..RANDOM_SYMBOLS]) != symbols[RANDOM_SYMBOLS..]);
            prop_assert_eq!(parsed.unwrap_err(), InvalidRecoveryPassphrase::Checksum);
        }
    }

    #[test]
    fn the_format_never_changes() {
        let shown = RecoveryPassphrase::from_random(&[0; RANDOM_BYTES]);
        assert_eq!(shown.reveal(), "00000-00000-00000-00000-00000-00000-00GKG");
        assert_eq!(format!("{shown:?}"), "RecoveryPassphrase");
        let other = RecoveryPassphrase::generate().unwrap();
        assert_ne!(other.reveal(), RecoveryPassphrase::generate().unwrap().reveal());
    }

    #[test]
    fn what_is_wrong_with_a_text_is_named() {
        let error = |text: &str| RecoveryPassphrase::parse(text).unwrap_err();
        assert_eq!(error(""), InvalidRecoveryPassphrase::Length(0));
        assert_eq!(error("00000-0000U"), InvalidRecoveryPassphrase::Symbol(10));
        assert_eq!(error(&"0".repeat(36)), InvalidRecoveryPassphrase::Length(36));
        assert_eq!(error(&"0".repeat(35)), InvalidRecoveryPassphrase::Checksum);
    }
}

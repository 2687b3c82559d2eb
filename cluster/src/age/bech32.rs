//! The texts of keys.
//!
//! *Source:* BIP 173.

use zeroize::Zeroizing;

const DIGITS: &[u8; 32] = b"qpzry9x8gf2tvdw0s3jn54khce6mua7l";
const CHECKSUM: usize = 6;

/// The 32 bytes of a text in lower case with this prefix and the right checksum.
pub(super) fn decode(prefix: &str, text: &str) -> Option<[u8; 32]> {
    let digits = text.strip_prefix(prefix)?.strip_prefix('1')?;
    let digit = |character: u8| DIGITS.iter().position(|digit| *digit == character);
    let digits = digits.bytes().map(|byte| u32::try_from(digit(byte)?).ok()).collect::<Option<Vec<_>>>();
    let digits = Zeroizing::new(digits?);
    if checksum(expand(prefix).chain(digits.iter().copied())) != 1 {
        return None;
    }
    let data = &digits[..digits.len().checked_sub(CHECKSUM)?];
    let (mut bits, mut count, mut bytes) = (0_u32, 0, Zeroizing::new(Vec::with_capacity(data.len())));
    for digit in data {
        (bits, count) = (bits << 5 | digit, count + 5);
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    // What fills the last digit is zero, and less than a digit.
    if bits != 0 || count >= 5 { None } else { bytes.as_slice().try_into().ok() }
}

/// The text of these bytes, in lower case.
pub(super) fn encode(prefix: &str, key: &[u8; 32]) -> Zeroizing<String> {
    let mut digits = Zeroizing::new(Vec::with_capacity(64));
    let (mut bits, mut count) = (0_u32, 0);
    for byte in key {
        (bits, count) = (bits << 8 | u32::from(*byte), count + 8);
        while count >= 5 {
            count -= 5;
            digits.push(bits >> count & 31);
        }
        bits &= (1 << count) - 1;
    }
    if count > 0 {
        digits.push(bits << (5 - count) & 31);
    }
    let sum = checksum(expand(prefix).chain(digits.iter().copied()).chain([0; CHECKSUM])) ^ 1;
    // Full capacity from the start: a growing text would leave copies of a key behind.
    let mut text = Zeroizing::new(String::with_capacity(prefix.len() + 1 + digits.len() + CHECKSUM));
    text.push_str(prefix);
    text.push('1');
    let sum = (0..CHECKSUM).map(|at| sum >> (5 * (CHECKSUM - 1 - at)) & 31);
    text.extend(digits.iter().copied().chain(sum).map(|digit| char::from(DIGITS[digit as usize])));
    text
}

/// The prefix, as its checksum covers it.
fn expand(prefix: &str) -> impl Iterator<Item = u32> {
    let high = prefix.bytes().map(|byte| u32::from(byte >> 5));
    high.chain([0]).chain(prefix.bytes().map(|byte| u32::from(byte & 31)))
}

fn checksum(digits: impl Iterator<Item = u32>) -> u32 {
    const GENERATOR: [u32; 5] = [0x3b6a_57b2, 0x2650_8e6d, 0x1ea1_19fa, 0x3d42_33dd, 0x2a14_62b3];
    digits.fold(1, |checksum, digit| {
        let top = checksum >> 25;
        let generators = GENERATOR.iter().enumerate().filter(|(bit, _)| top >> bit & 1 == 1);
        generators
            .fold((checksum & 0x01ff_ffff) << 5 ^ digit, |checksum, (_, generator)| checksum ^ generator)
    })
}

//! Amounts of bytes and of inodes, and their text form.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A number of bytes.
///
/// As text: digits, an optional fraction, and a suffix: `10Gi` (1024³, also `GiB`), `1.5G` (1000³, also
/// `GB`), `4096`. `Display` writes the largest suffix that loses nothing, so parsing gives the same number
/// again. With the feature `serde`, a configuration may give the text or a whole number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// A number of inodes: files, directories, symbolic links and everything else that has an inode.
///
/// As text like [`Bytes`], without the `B`: `100k` is 100,000 and `1Mi` is 1,048,576. With the feature
/// `serde`, a configuration may give the text or a whole number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Inodes(pub u64);

/// A text that is not a quantity.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum QuantityError {
    /// The text does not start with digits, or has two points, a sign, or a space inside.
    #[error("invalid quantity {0:?}: use a number such as 4096, 10Gi or 1.5G")]
    InvalidNumber(String),
    /// The text after the digits is not a known suffix.
    #[error("unknown suffix {0:?}: use Ki, Mi, Gi, Ti, Pi, Ei or k, M, G, T, P, E")]
    UnknownSuffix(String),
    /// The number is 2^64 or more.
    #[error("quantity {0:?} is too large: use less than 16Ei")]
    TooLarge(String),
}

const BINARY: [(&str, u64); 6] =
    [("Ei", 1 << 60), ("Pi", 1 << 50), ("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)];
const DECIMAL: [(&str, u64); 7] = [
    ("E", 1_000_000_000_000_000_000),
    ("P", 1_000_000_000_000_000),
    ("T", 1_000_000_000_000),
    ("G", 1_000_000_000),
    ("M", 1_000_000),
    ("k", 1000),
    ("K", 1000),
];

impl FromStr for Bytes {
    type Err = QuantityError;

    /// Parses a number with a suffix; a fraction of a byte is rounded up.
    fn from_str(text: &str) -> Result<Self, QuantityError> {
        parse_quantity(text, text.strip_suffix('B').unwrap_or(text)).map(Self)
    }
}

impl FromStr for Inodes {
    type Err = QuantityError;

    /// Parses a number with a suffix; a fraction of an inode is rounded up.
    fn from_str(text: &str) -> Result<Self, QuantityError> {
        parse_quantity(text, text).map(Self)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        format_quantity(self.0, BINARY.iter().chain(&DECIMAL[..6]), f)
    }
}

impl fmt::Display for Inodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        format_quantity(self.0, DECIMAL[..6].iter(), f)
    }
}

fn format_quantity<'a>(
    number: u64,
    mut suffixes: impl Iterator<Item = &'a (&'static str, u64)>,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    let text = match suffixes.find(|(_, factor)| number != 0 && number.is_multiple_of(*factor)) {
        Some((suffix, factor)) => format!("{}{suffix}", number / factor),
        None => number.to_string(),
    };
    f.pad(&text)
}

/// Parses `rest`, which is `whole` without the optional unit letter. Errors quote `whole`.
fn parse_quantity(whole: &str, rest: &str) -> Result<u64, QuantityError> {
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    let (number, suffix) = rest.split_at(end);
    let factor = suffix_factor(suffix).ok_or_else(|| QuantityError::UnknownSuffix(suffix.to_owned()))?;
    let (integer, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(integer) || !is_number(fraction) {
        return Err(QuantityError::InvalidNumber(whole.to_owned()));
    }
    let too_large = || QuantityError::TooLarge(whole.to_owned());
    let integer: u64 = integer.parse().map_err(|_| too_large())?;
    let whole_units = integer.checked_mul(factor).ok_or_else(too_large)?;
    whole_units.checked_add(scale_fraction(factor, fraction)).ok_or_else(too_large)
}

fn suffix_factor(suffix: &str) -> Option<u64> {
    if suffix.is_empty() {
        return Some(1);
    }
    BINARY.iter().chain(&DECIMAL).find(|(known, _)| *known == suffix).map(|(_, factor)| *factor)
}

/// `0.fraction` of `factor`, rounded up.
fn scale_fraction(factor: u64, fraction: &str) -> u64 {
    // Digits after the 18th are worth less than one unit of the largest factor: only whether any is set
    // matters.
    let (digits, beyond) = fraction.split_at(fraction.len().min(18));
    let value: u128 = digits.parse().unwrap_or(0);
    let scale = 10u128.pow(digits.len() as u32);
    let beyond = u128::from(beyond.bytes().any(|byte| byte != b'0'));
    let part = (value * u128::from(factor)).div_ceil(scale);
    let rounded = if (value * u128::from(factor)).is_multiple_of(scale) { part + beyond } else { part };
    u64::try_from(rounded).unwrap_or(u64::MAX)
}

#[cfg(feature = "serde")]
mod de {
    use std::fmt::{Formatter, Result as FmtResult};
    use std::str::FromStr;

    use serde::de::{Deserialize, Deserializer, Error, Unexpected, Visitor};

    use super::{Bytes, Inodes, QuantityError};

    /// Reads a whole number, or the text of a quantity.
    struct QuantityVisitor<T> {
        expected: &'static str,
        from_number: fn(u64) -> T,
    }

    impl<T: FromStr<Err = QuantityError>> Visitor<'_> for QuantityVisitor<T> {
        type Value = T;

        fn expecting(&self, f: &mut Formatter<'_>) -> FmtResult {
            f.write_str(self.expected)
        }

        fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
            Ok((self.from_number)(number))
        }

        // A TOML file has only signed numbers.
        fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
            match u64::try_from(number) {
                Ok(number) => self.visit_u64(number),
                Err(_) => Err(E::invalid_value(Unexpected::Signed(number), &self)),
            }
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
            text.parse().map_err(E::custom)
        }
    }

    impl<'de> Deserialize<'de> for Bytes {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let expected = "bytes, like \"10Gi\" or 10737418240";
            deserializer.deserialize_any(QuantityVisitor { expected, from_number: Self })
        }
    }

    impl<'de> Deserialize<'de> for Inodes {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let expected = "a number of inodes, like \"100k\" or 100000";
            deserializer.deserialize_any(QuantityVisitor { expected, from_number: Self })
        }
    }
}

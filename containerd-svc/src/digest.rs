//! Content digests.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, de};
use sha2::{Digest as _, Sha256};

/// The SHA-256 of some content; as text, `sha256:` and 64 lower-case hexadecimal digits.
///
/// *Source:* OCI image specification, descriptor.md. Its other algorithms are not supported: no tool uses
/// them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

/// An invalid digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid digest {text:?}: expected sha256: and 64 lower-case hexadecimal digits")]
pub struct InvalidDigest {
    /// The text, or its start.
    pub text: String,
}

impl Digest {
    /// Computes the digest of these bytes.
    pub fn of_content(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// Parses the hexadecimal digits alone, as they are in file names.
    pub fn from_hex(hex: &str) -> Option<Self> {
        let digits = hex.as_bytes();
        let mut bytes = [0; 32];
        if digits.len() != 2 * bytes.len() {
            return None;
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = hex_digit(pair[0])? << 4 | hex_digit(pair[1])?;
        }
        Some(Self(bytes))
    }

    /// The hexadecimal digits alone.
    pub fn to_hex(&self) -> String {
        self.0.iter().fold(String::with_capacity(64), |mut text, byte| {
            text.push(char::from(HEX_DIGITS[usize::from(byte >> 4)]));
            text.push(char::from(HEX_DIGITS[usize::from(byte & 15)]));
            text
        })
    }
}

const HEX_DIGITS: &[u8; 16] = b"0123456789abcdef";

fn hex_digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    }
}

impl FromStr for Digest {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Self, InvalidDigest> {
        let invalid = || InvalidDigest { text: text.chars().take(100).collect() };
        text.strip_prefix("sha256:").and_then(Self::from_hex).ok_or_else(invalid)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.to_hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Computes a digest in parts.
#[derive(Debug, Clone, Default)]
pub(crate) struct DigestHasher(Sha256);

impl DigestHasher {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_survives_formatting_and_parsing() {
        let digest = Digest::of_content(b"");
        let text = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(digest.to_string(), text);
        assert_eq!(text.parse(), Ok(digest));
    }

    #[test]
    fn malformed_digests_are_rejected() {
        for text in
            ["", "sha256:", "sha512:00", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"]
        {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
        let upper = Digest::of_content(b"").to_string().to_uppercase().replace("SHA256", "sha256");
        assert!(upper.parse::<Digest>().is_err());
        assert!(Digest::from_hex(&"é".repeat(32)).is_none());
    }
}

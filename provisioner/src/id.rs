//! The id of a volume: the name of its directory and its PersistentVolume, and its CSI handle.

use std::fmt;
use std::str::FromStr;

/// Prefix of each [`VolumeId`].
const PREFIX: &str = "pvc-";

/// Positions of the hyphens in a canonical UUID.
const HYPHENS: [usize; 4] = [8, 13, 18, 23];

/// Length of a canonical UUID in bytes.
const UUID_BYTES: usize = 36;

/// Maximum bytes of a rejected text in an error: a handle has any length that its sender chose.
const SHOWN_BYTES: usize = 64;

/// Identifies a volume: `pvc-` and the UID of its claim, in lower case, as in
/// `pvc-9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f`.
///
/// Exactly 40 bytes of `a-z`, `0-9` and `-`: it is valid as the name of a directory and of an object and as
/// the value of a metric's label, and cannot be `.`, `..`, empty, absolute, or a path. Volumes have no other
/// name, so a handle from outside either is a `VolumeId` or is invalid.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(String);

/// A text is not a volume id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid volume id {shown:?}: expected pvc- and a lower-case UUID")]
pub struct VolumeIdError {
    shown: String,
}

impl VolumeId {
    /// The volume of the claim with this UID.
    ///
    /// # Errors
    /// The UID is not a canonical, lower-case UUID, the only form that the API server generates.
    pub fn from_uid(uid: &str) -> Result<Self, VolumeIdError> {
        if is_uuid(uid) { Ok(Self(format!("{PREFIX}{uid}"))) } else { Err(VolumeIdError::new(uid)) }
    }

    /// The id as text: the name of the directory and of the PersistentVolume, and the CSI handle.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The UID of the claim that the volume was created for.
    pub fn claim_uid(&self) -> &str {
        &self.0[PREFIX.len()..]
    }
}

impl VolumeIdError {
    fn new(text: &str) -> Self {
        let end = (0..=SHOWN_BYTES.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
        Self { shown: text[..end.unwrap_or(0)].to_owned() }
    }
}

/// Returns whether a text is a UUID in canonical form: 8-4-4-4-12 lower-case hexadecimal digits.
pub(crate) fn is_uuid(text: &str) -> bool {
    let fits = |(at, byte): (usize, u8)| {
        if HYPHENS.contains(&at) { byte == b'-' } else { matches!(byte, b'0'..=b'9' | b'a'..=b'f') }
    };
    text.len() == UUID_BYTES && text.bytes().enumerate().all(fits)
}

impl FromStr for VolumeId {
    type Err = VolumeIdError;

    fn from_str(text: &str) -> Result<Self, VolumeIdError> {
        if text.strip_prefix(PREFIX).is_some_and(is_uuid) {
            Ok(Self(text.to_owned()))
        } else {
            Err(VolumeIdError::new(text))
        }
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UID: &str = "9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f";

    #[test]
    fn a_volume_id_contains_the_claim_uid() {
        let id = VolumeId::from_uid(UID).expect("a UID");
        assert_eq!(id.as_str(), format!("pvc-{UID}"));
        assert_eq!(id.claim_uid(), UID);
        assert_eq!(id.as_str().parse(), Ok(id));
    }

    #[test]
    fn no_path_is_a_volume_id() {
        let long = "x".repeat(4096);
        let nul = format!("pvc-{}\0", &UID[..35]);
        let dots = format!("pvc-{}/..", &UID[..33]);
        let upper = format!("pvc-{}", UID.to_uppercase());
        let bad = [
            "", ".", "..", "../x", "/", "/etc", "a/b", "pvc-", "\0", "pvc-1a2b", UID, &long, &nul, &dots,
            &upper,
        ];
        for bad in bad {
            assert!(bad.parse::<VolumeId>().is_err(), "{bad:?}");
            assert!(bad == UID || VolumeId::from_uid(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_error_repeats_only_the_beginning_of_a_long_handle() {
        let error = "é".repeat(2048).parse::<VolumeId>().expect_err("not an id");
        assert!(error.to_string().len() < 200, "{error}");
    }

    proptest! {
        #[test]
        fn a_parsed_volume_id_prints_as_its_text(text in "(pvc-)?[0-9a-f-]{30,40}|.*") {
            if let Ok(id) = text.parse::<VolumeId>() {
                prop_assert_eq!(id.as_str(), text.as_str());
                prop_assert!(text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'));
            }
        }

        #[test]
        fn every_uuid_gives_an_id(uid in "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}") {
            let id = VolumeId::from_uid(&uid).expect("a UUID");
            prop_assert_eq!(id.to_string().parse::<VolumeId>(), Ok(id.clone()));
            prop_assert_eq!(id.claim_uid(), uid);
        }
    }
}

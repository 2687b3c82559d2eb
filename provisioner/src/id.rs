//! The identity of a volume: what its directory, its PersistentVolume and its handle are called.

use std::fmt;
use std::str::FromStr;

/// What a [`VolumeId`] begins with.
const PREFIX: &str = "pvc-";

/// Where a UUID in its canonical form has hyphens.
const HYPHENS: [usize; 4] = [8, 13, 18, 23];

/// Bytes of a UUID in its canonical form.
const UUID_BYTES: usize = 36;

/// Most bytes of a refused text that an error repeats: a handle may be as long as its sender likes.
const SHOWN_BYTES: usize = 64;

/// Identifies a volume: `pvc-` and the UID of its claim, in lower case, as in `pvc-9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f`.
///
/// Exactly 40 bytes of `a-z`, `0-9` and `-`: it can be the name of a directory, of an object and of a metric's label, and
/// can't be `.`, `..`, empty, absolute, or a path. There is no other way to name a volume, so a handle from outside
/// either is one of these or names nothing.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(String);

/// A text is not the id of a volume.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid volume id {shown:?}: expected pvc- and a lower-case UUID")]
pub struct VolumeIdError {
    shown: String,
}

impl VolumeId {
    /// The volume of the claim with this UID.
    ///
    /// # Errors
    /// The UID is no UUID in its canonical, lower-case form; the API server makes no others.
    pub fn from_uid(uid: &str) -> Result<Self, VolumeIdError> {
        match is_uuid(uid) {
            true => Ok(Self(format!("{PREFIX}{uid}"))),
            false => Err(VolumeIdError::new(uid)),
        }
    }

    /// The id as text: the name of the directory, of the PersistentVolume, and the CSI handle.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The UID of the claim that the volume was made for.
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

/// Whether a text is a UUID in canonical form: 8-4-4-4-12 lower-case hexadecimal digits.
fn is_uuid(text: &str) -> bool {
    let fits = |(at, byte): (usize, u8)| match HYPHENS.contains(&at) {
        true => byte == b'-',
        false => byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte),
    };
    text.len() == UUID_BYTES && text.bytes().enumerate().all(fits)
}

impl FromStr for VolumeId {
    type Err = VolumeIdError;

    fn from_str(text: &str) -> Result<Self, VolumeIdError> {
        match text.strip_prefix(PREFIX).is_some_and(is_uuid) {
            true => Ok(Self(text.to_owned())),
            false => Err(VolumeIdError::new(text)),
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
    fn an_id_is_the_claims_uid() {
        let id = VolumeId::from_uid(UID).expect("a UID");
        assert_eq!(id.as_str(), format!("pvc-{UID}"));
        assert_eq!(id.claim_uid(), UID);
        assert_eq!(id.as_str().parse(), Ok(id));
    }

    #[test]
    fn nothing_that_could_be_a_path_is_an_id() {
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
        let error = "é".repeat(2048).parse::<VolumeId>().expect_err("no id");
        assert!(error.to_string().len() < 200, "{error}");
    }

    proptest! {
        #[test]
        fn any_text_is_an_id_that_prints_as_it_or_is_none(text in "(pvc-)?[0-9a-f-]{30,40}|.*") {
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

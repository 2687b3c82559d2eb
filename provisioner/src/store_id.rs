//! The identity of a store: tells its absence from its emptiness.

use std::fmt;
use std::fs;
use std::io;
use std::str::FromStr;

use crate::id::is_uuid;

/// Each read generates a random UUID. *Source:* random(4).
const RANDOM_UUID: &str = "/proc/sys/kernel/random/uuid";

/// Identifies a store of volumes: a random UUID in lower case, written where the volumes are, and into each
/// PersistentVolume.
///
/// A volume missing from a directory is removed only if the directory is the store that the volume was
/// created in. Otherwise its disk isn't mounted, and its data are where they were.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreId(String);

/// A text is not a store id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("invalid store id: expected a lower-case UUID")]
pub struct StoreIdError;

impl StoreId {
    /// A new id.
    pub(crate) fn generate() -> io::Result<Self> {
        let text = fs::read_to_string(RANDOM_UUID)?;
        text.trim_end().parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for StoreId {
    type Err = StoreIdError;

    fn from_str(text: &str) -> Result<Self, StoreIdError> {
        if is_uuid(text) { Ok(Self(text.to_owned())) } else { Err(StoreIdError) }
    }
}

impl fmt::Display for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// The identity of a store, if it has one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum StoreIdentity {
    /// The store needs none: it cannot be mistaken for another.
    Unsupported,
    /// The store has none yet, or this is not the store.
    Absent,
    /// The store has this one.
    Present(StoreId),
}

impl StoreIdentity {
    /// The id, if there is one.
    pub fn id(&self) -> Option<&StoreId> {
        match self {
            Self::Present(id) => Some(id),
            Self::Unsupported | Self::Absent => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_id_is_a_new_uuid_that_prints_as_its_text() {
        let [one, two] = [(); 2].map(|()| StoreId::generate().expect("a UUID"));
        assert_ne!(one, two);
        assert_eq!(one.to_string().parse(), Ok(one));
        for bad in
            ["", "store", "9F0E5D3C-1B2A-4C5D-8E6F-0A1B2C3D4E5F", "9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f\n"]
        {
            assert_eq!(bad.parse::<StoreId>(), Err(StoreIdError), "{bad:?}");
        }
    }
}

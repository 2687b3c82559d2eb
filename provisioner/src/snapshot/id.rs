//! The id of a snapshot: the name of its directory, and its CSI handle.

use std::fmt;
use std::str::FromStr;

use crate::id::{VolumeId, VolumeIdError, is_uuid};

const PREFIX: &str = "snap-";

/// Identifies a snapshot: `snap-` and the UID of its VolumeSnapshot, in lower case, as in
/// `snap-9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f`.
///
/// Exactly 41 bytes of `a-z`, `0-9` and `-`, so it cannot be a path, and is never a [`VolumeId`].
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SnapshotId(String);

/// A text is not the id of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid snapshot id {shown:?}: expected snap- and a lower-case UUID")]
pub struct SnapshotIdError {
    shown: String,
}

impl SnapshotId {
    /// The snapshot of the VolumeSnapshot with this UID.
    ///
    /// # Errors
    /// The UID is not a canonical, lower-case UUID, the only form that the API server generates.
    pub fn from_uid(uid: &str) -> Result<Self, SnapshotIdError> {
        if is_uuid(uid) { Ok(Self(format!("{PREFIX}{uid}"))) } else { Err(SnapshotIdError::new(uid)) }
    }

    /// The id as text: the name of the directory, and the CSI handle.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl SnapshotIdError {
    /// Maximum characters of a rejected text in an error: a handle has any length that its sender chose.
    const SHOWN_CHARS: usize = 64;

    fn new(text: &str) -> Self {
        Self { shown: text.chars().take(Self::SHOWN_CHARS).collect() }
    }
}

impl FromStr for SnapshotId {
    type Err = SnapshotIdError;

    fn from_str(text: &str) -> Result<Self, SnapshotIdError> {
        if text.strip_prefix(PREFIX).is_some_and(is_uuid) {
            Ok(Self(text.to_owned()))
        } else {
            Err(SnapshotIdError::new(text))
        }
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Id of a volume or a snapshot: a store keeps both, and a new volume can be a copy of either.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(clippy::exhaustive_enums, reason = "complete by nature: a store keeps nothing else")]
pub enum StoredId {
    /// A volume.
    Volume(VolumeId),
    /// A snapshot.
    Snapshot(SnapshotId),
}

impl StoredId {
    /// The id as text: the name of the directory.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Volume(id) => id.as_str(),
            Self::Snapshot(id) => id.as_str(),
        }
    }
}

impl From<VolumeId> for StoredId {
    fn from(id: VolumeId) -> Self {
        Self::Volume(id)
    }
}

impl From<SnapshotId> for StoredId {
    fn from(id: SnapshotId) -> Self {
        Self::Snapshot(id)
    }
}

impl FromStr for StoredId {
    type Err = VolumeIdError;

    fn from_str(text: &str) -> Result<Self, VolumeIdError> {
        // The prefixes differ, so a text is at most one of both.
        text.parse().map(Self::Snapshot).or_else(|_| text.parse().map(Self::Volume))
    }
}

impl fmt::Display for StoredId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Volume(id) => write!(f, "volume {id}"),
            Self::Snapshot(id) => write!(f, "snapshot {id}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f";

    #[test]
    fn a_snapshot_id_is_neither_a_path_nor_a_volume() {
        let id = SnapshotId::from_uid(UID).expect("a UID");
        assert_eq!(id.as_str(), format!("snap-{UID}"));
        assert_eq!(id.as_str().parse(), Ok(id.clone()));
        assert!(id.as_str().parse::<VolumeId>().is_err());
        let long = "é".repeat(4096);
        for bad in
            ["", ".", "..", "../snap-", "snap-", UID, &format!("pvc-{UID}"), &format!("snap-{UID}/x"), &long]
        {
            let error = bad.parse::<SnapshotId>().expect_err(bad);
            assert!(error.to_string().len() < 300, "{error}");
        }
    }

    #[test]
    fn a_stored_id_is_either_kind() {
        let snapshot = StoredId::from(SnapshotId::from_uid(UID).expect("a UID"));
        let volume = StoredId::from(VolumeId::from_uid(UID).expect("a UID"));
        for id in [snapshot, volume] {
            assert_eq!(id.as_str().parse(), Ok(id));
        }
        assert!(UID.parse::<StoredId>().is_err());
    }
}

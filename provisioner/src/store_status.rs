//! Whether the volumes of a store are served.

use crate::store_id::StoreIdentity;

/// Whether a provisioner serves the volumes of its store.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreStatus {
    /// Not known yet: the first lists of the API server are incomplete.
    Unknown,
    /// It does.
    Served(StoreIdentity),
    /// It changes nothing, because the store is not there.
    Unserved {
        /// What has become of the store.
        fault: StoreFault,
        /// Why, and what to do.
        why: String,
    },
}

/// What has become of a store that is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreFault {
    /// It is absent: its disk is not mounted, or fails, or is a new one.
    Absent,
    /// Another store is in its place.
    Replaced,
    /// It is the store of another node's volumes.
    Moved,
}

//! The state of a store as its provisioner sees it.

use crate::store_id::StoreIdentity;

/// The state of a store as its provisioner sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreStatus {
    /// Not known yet: the first lists of the API server are incomplete.
    Unknown,
    /// The provisioner serves its volumes.
    Served(StoreIdentity),
    /// The provisioner changes nothing, because the store is not there.
    Unserved {
        /// The fault.
        fault: StoreFault,
        /// The reason, and the remedy.
        why: String,
    },
}

/// The fault of a store that is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreFault {
    /// The store is absent: its disk is not mounted, or fails, or is a new one.
    Absent,
    /// Another store is in its place.
    Replaced,
    /// The store is that of another node's volumes.
    Moved,
}

//! Protection of volumes in use from deletion.

use std::fmt;

use crate::id::VolumeId;
use crate::store::ErrorSource;

/// Prevents the deletion of a volume in use, and the use of a volume being deleted.
///
/// The absence of a claim and its pod from the API does not prove that the volume is unused: a pod that was
/// deleted by force, or while the node was unreachable, may still run here.
///
/// # Contract
/// - [`reserve`](Self::reserve) fails for as long as the volume is in use.
/// - While the returned reservation exists, no new use of the volume starts.
/// - A volume that does not exist is not in use.
/// - Calls block for as long as the kernel takes, and may be concurrent.
pub trait VolumeGuard: Send + Sync + fmt::Debug {
    /// Reserves a volume for deletion.
    ///
    /// # Errors
    /// [`GuardError::InUse`] or [`GuardError::Inspect`]; a retry can help with both.
    fn reserve(&self, id: &VolumeId) -> Result<VolumeReservation, GuardError>;
}

/// Reserves a volume for deletion until it is dropped.
pub struct VolumeReservation {
    _held: Box<dyn Send>,
}

impl VolumeReservation {
    /// A reservation that drops the given value when it ends.
    pub fn new(held: impl Send + 'static) -> Self {
        Self { _held: Box::new(held) }
    }
}

impl fmt::Debug for VolumeReservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VolumeReservation")
    }
}

/// The reason why a volume cannot be deleted now.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuardError {
    /// The volume is in use. A retry helps once it is not.
    #[error("volume {id} is in use on this node ({by}), and was not deleted: stop what uses it")]
    InUse {
        /// The volume.
        id: VolumeId,
        /// The user, or the mount point.
        by: String,
    },
    /// Checking whether the volume is in use failed.
    #[error("can't check whether volume {id} is in use on this node, so it is not deleted")]
    Inspect {
        /// The volume.
        id: VolumeId,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
}

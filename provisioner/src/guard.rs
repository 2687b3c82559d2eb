//! Volumes in use, which must not be destroyed.

use std::fmt;

use crate::id::VolumeId;
use crate::store::Cause;

/// Keeps a volume from being destroyed while somebody uses it, and from being used while it is destroyed.
///
/// That a claim and its pod are gone from the API says nothing of this node: a pod that was deleted by force, or while the
/// node was away, may still run.
///
/// # Contract
/// - [`reserve`](Self::reserve) fails for as long as the volume is in use.
/// - While what it has returned lives, nobody begins to use the volume.
/// - A volume that doesn't exist isn't in use.
/// - Calls block for as long as the kernel takes, and may be made at the same time.
pub trait VolumeGuard: Send + Sync + fmt::Debug {
    /// Takes a volume that is about to be destroyed.
    ///
    /// # Errors
    /// [`GuardError::InUse`], or [`GuardError::Look`]; a retry can help with both.
    fn reserve(&self, id: &VolumeId) -> Result<Reservation, GuardError>;
}

/// A volume is about to be destroyed, until this is dropped.
pub struct Reservation {
    _held: Box<dyn Send>,
}

impl Reservation {
    /// One that ends with what it holds.
    pub fn new(held: impl Send + 'static) -> Self {
        Self { _held: Box::new(held) }
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reservation")
    }
}

/// Why a volume can't be destroyed now.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuardError {
    /// Somebody uses it. A retry helps once they have ended.
    #[error("volume {id} is in use on this node ({by}); nothing was deleted")]
    InUse {
        /// The volume.
        id: VolumeId,
        /// Who, or where.
        by: String,
    },
    /// It could not be told.
    #[error("look whether volume {id} is in use")]
    Look {
        /// The volume.
        id: VolumeId,
        /// Why not.
        #[source]
        source: Cause,
    },
}

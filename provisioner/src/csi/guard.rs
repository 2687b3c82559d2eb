//! Which volumes are in use: those that are mounted, or are about to be.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use super::locks::Locks;
use super::mounts::Mounts;
use crate::guard::{GuardError, Reservation, VolumeGuard};
use crate::id::VolumeId;
use crate::store::{OpenVolume, StoreError};

/// Looks at the mounts, and keeps the node service from making another one.
#[derive(Debug)]
pub(super) struct MountGuard {
    pub(super) volumes: Arc<dyn OpenVolume>,
    pub(super) mounts: Arc<dyn Mounts>,
    pub(super) locks: Locks,
}

impl VolumeGuard for MountGuard {
    fn reserve(&self, id: &VolumeId) -> Result<Reservation, GuardError> {
        let in_use = |by: String| GuardError::InUse { id: id.clone(), by };
        let under_way =
            self.locks.take(id).ok_or_else(|| in_use("a call of the kubelet is under way".to_owned()))?;
        let look = |source| GuardError::Look { id: id.clone(), source };
        let volume = match self.volumes.open(id) {
            Ok(volume) => volume,
            Err(StoreError::NotFound { .. }) => return Ok(Reservation::new(under_way)),
            Err(error) => return Err(look(error.into())),
        };
        let targets = self.mounts.targets(volume.as_fd()).map_err(|error| look(error.into()))?;
        match targets.first() {
            Some(target) => Err(in_use(format!("mounted at {target} below the kubelet's directory"))),
            None => Ok(Reservation::new(under_way)),
        }
    }
}

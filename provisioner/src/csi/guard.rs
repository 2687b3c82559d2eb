//! Finds volumes in use: those that are mounted, or are about to be.

use std::sync::Arc;

use super::in_flight::InFlightCalls;
use super::mounter::VolumeMounter;
use crate::guard::{GuardError, VolumeGuard, VolumeReservation};
use crate::id::VolumeId;
use crate::store::{VolumeOpener, VolumeStoreError};

/// Checks the mounts of a volume, and prevents the node service from mounting it meanwhile.
#[derive(Debug)]
pub(super) struct MountGuard {
    pub(super) volumes: Arc<dyn VolumeOpener>,
    pub(super) mounter: Arc<dyn VolumeMounter>,
    pub(super) in_flight: InFlightCalls,
}

impl VolumeGuard for MountGuard {
    fn reserve(&self, id: &VolumeId) -> Result<VolumeReservation, GuardError> {
        let in_use = |by: String| GuardError::InUse { id: id.clone(), by };
        let in_flight = self
            .in_flight
            .try_acquire(id)
            .ok_or_else(|| in_use("a call of the kubelet is in flight".to_owned()))?;
        let inspect_error = |source| GuardError::Inspect { id: id.clone(), source };
        let volume = match self.volumes.inspect(id) {
            Ok(volume) => volume,
            Err(VolumeStoreError::NotFound { .. }) => return Ok(VolumeReservation::new(in_flight)),
            Err(error) => return Err(inspect_error(error.into())),
        };
        let targets = self.mounter.list_targets(&volume).map_err(|error| inspect_error(error.into()))?;
        if let Some(target) = targets.first() {
            return Err(in_use(format!("mounted at {target} below the kubelet's directory")));
        }
        // A subPath mount may outlive that of its volume.
        let nested = self.mounter.list_nested(&volume).map_err(|error| inspect_error(error.into()))?;
        match nested.first() {
            Some(target) => Err(in_use(format!("a directory of it is mounted at {}", target.display()))),
            None => Ok(VolumeReservation::new(in_flight)),
        }
    }
}

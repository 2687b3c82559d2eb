//! Finds volumes in use: those that are mounted, or are about to be.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::mounter::VolumeMounter;
use crate::deletion::reservation::{GuardError, VolumeGuard, VolumeReservation};
use crate::id::VolumeId;
use crate::store::{VolumeOpener, VolumeStoreError};

/// The volumes for which a call is in flight. Clones share one set.
#[derive(Debug, Clone, Default)]
pub(super) struct InFlightCalls(Arc<Mutex<HashSet<VolumeId>>>);

/// Marks a call for a volume as in flight until it is dropped.
#[derive(Debug)]
pub(super) struct InFlightGuard {
    calls: InFlightCalls,
    id: VolumeId,
}

impl InFlightCalls {
    /// `None` if another call for the volume is in flight.
    pub(super) fn try_acquire(&self, id: &VolumeId) -> Option<InFlightGuard> {
        let is_free = self.lock_ids().insert(id.clone());
        is_free.then(|| InFlightGuard { calls: self.clone(), id: id.clone() })
    }

    fn lock_ids(&self) -> MutexGuard<'_, HashSet<VolumeId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.calls.lock_ids().remove(&self.id);
    }
}

/// Checks the mounts of a volume, and prevents the node service from mounting it until the reservation is dropped.
#[derive(Debug)]
pub(super) struct MountGuard {
    pub(super) volumes: Arc<dyn VolumeOpener>,
    pub(super) mounter: Arc<dyn VolumeMounter>,
    pub(super) in_flight: InFlightCalls,
}

impl VolumeGuard for MountGuard {
    fn reserve(&self, id: &VolumeId) -> Result<VolumeReservation, GuardError> {
        let in_use = |by: String| GuardError::InUse { id: id.clone(), by };
        // Before the look at the mounts: from now on, a publish of the volume is aborted, and the kubelet
        // repeats it.
        let in_flight = self
            .in_flight
            .try_acquire(id)
            .ok_or_else(|| in_use("a call of the kubelet is in flight".to_owned()))?;
        let inspect_error = |source| GuardError::Inspect { id: id.clone(), source };
        let volume = match self.volumes.inspect(id) {
            Ok(volume) => volume,
            // Nothing is left to protect.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_has_one_call_in_flight() {
        let [one, two] = [1, 2].map(|number| {
            VolumeId::from_uid(&format!("00000000-0000-4000-8000-00000000000{number}")).expect("a UUID")
        });
        let calls = InFlightCalls::default();
        let first = calls.try_acquire(&one).expect("free");
        assert!(calls.try_acquire(&one).is_none());
        assert!(calls.try_acquire(&two).is_some());
        drop(first);
        assert!(calls.try_acquire(&one).is_some());
    }
}

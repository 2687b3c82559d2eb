//! At most one call in flight per volume.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::id::VolumeId;

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

//! One call at a time for each volume.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::id::VolumeId;

/// The volumes for which a call is under way. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct Locks(Arc<Mutex<HashSet<VolumeId>>>);

/// A call for a volume is under way, until this is dropped.
#[derive(Debug)]
pub(super) struct UnderWay {
    locks: Locks,
    id: VolumeId,
}

impl Locks {
    /// `None` where another call for the volume is under way.
    pub(super) fn take(&self, id: &VolumeId) -> Option<UnderWay> {
        let is_free = self.held().insert(id.clone());
        is_free.then(|| UnderWay { locks: self.clone(), id: id.clone() })
    }

    fn held(&self) -> MutexGuard<'_, HashSet<VolumeId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.locks.held().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_taken_once_until_it_is_given_back() {
        let [one, two] = [1, 2].map(|number| {
            VolumeId::from_uid(&format!("00000000-0000-4000-8000-00000000000{number}")).expect("a UUID")
        });
        let locks = Locks::default();
        let first = locks.take(&one).expect("free");
        assert!(locks.take(&one).is_none());
        assert!(locks.take(&two).is_some());
        drop(first);
        assert!(locks.take(&one).is_some());
    }
}

//! One lock per volume.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use crate::id::VolumeId;

/// Number of locks above which unused ones are dropped.
const MAX_IDLE_LOCKS: usize = 256;

/// Serializes the tasks that work on the same volume.
#[derive(Debug, Default)]
pub(crate) struct VolumeLocks(Mutex<HashMap<VolumeId, Weak<AsyncMutex<()>>>>);

impl VolumeLocks {
    pub(crate) async fn lock(&self, id: &VolumeId) -> OwnedMutexGuard<()> {
        self.find_or_insert(id).lock_owned().await
    }

    fn find_or_insert(&self, id: &VolumeId) -> Arc<AsyncMutex<()>> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = locks.get(id).and_then(Weak::upgrade) {
            return lock;
        }
        // The holders own the locks, and the map only refers to them: those of removed volumes would stay in
        // it forever.
        if locks.len() >= MAX_IDLE_LOCKS {
            locks.retain(|_, lock| lock.strong_count() > 0);
        }
        let lock = Arc::default();
        locks.insert(id.clone(), Arc::downgrade(&lock));
        lock
    }
}

//! One lock per volume.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

use crate::id::VolumeId;

/// How many locks are kept before those that nobody holds are dropped.
const MAX_IDLE: usize = 256;

/// Keeps two tasks from working on the same volume.
#[derive(Debug, Default)]
pub(crate) struct Locks(Mutex<HashMap<VolumeId, Weak<AsyncMutex<()>>>>);

impl Locks {
    /// Waits until nobody else works on the volume, and keeps others from it.
    pub(crate) async fn lock(&self, id: &VolumeId) -> OwnedMutexGuard<()> {
        self.find(id).lock_owned().await
    }

    fn find(&self, id: &VolumeId) -> Arc<AsyncMutex<()>> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = locks.get(id).and_then(Weak::upgrade) {
            return lock;
        }
        if locks.len() >= MAX_IDLE {
            locks.retain(|_, lock| lock.strong_count() > 0);
        }
        let lock = Arc::default();
        locks.insert(id.clone(), Arc::downgrade(&lock));
        lock
    }
}

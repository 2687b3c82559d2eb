//! The attempts to open volumes for pods, for who looks at their limits then.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::id::VolumeId;
use crate::store::PublishAttempts;

/// Attempts that nobody has asked for yet: each volume is in it once, so that it is bounded.
#[derive(Debug, Default)]
pub(super) struct PublishLog {
    attempts: Mutex<PublishAttempts>,
    recorded: Notify,
}

impl PublishLog {
    pub(super) fn record(&self, id: &VolumeId, restored: Option<u64>, has_failed: bool) {
        let mut attempts = self.lock();
        attempts.volumes.insert(id.clone());
        attempts.restored.extend(restored.map(|uncounted| (id.clone(), uncounted)));
        attempts.has_failed |= has_failed;
        self.recorded.notify_one();
    }

    /// Waits until there are attempts, and takes them.
    pub(super) async fn wait(&self) -> PublishAttempts {
        loop {
            let attempts = std::mem::take(&mut *self.lock());
            if attempts != PublishAttempts::default() {
                return attempts;
            }
            // A record since the look above has left its permit.
            self.recorded.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, PublishAttempts> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! The supervisor of a node, for those that act on its tree.

use std::sync::{Arc, PoisonError, RwLock};

use nodekeel_supervisor::Supervisor;

/// The supervisor of a node: none before the start is complete, and none once the node's handle is gone. All clones share
/// it.
#[derive(Debug, Clone, Default)]
pub(crate) struct SupervisorSlot(Arc<RwLock<Option<Arc<Supervisor>>>>);

impl SupervisorSlot {
    /// Calls the supervisor; `None` while the node is starting or stopping.
    pub(crate) fn with<T>(&self, call: impl FnOnce(&Supervisor) -> T) -> Option<T> {
        // The lock is held during the call, so that the call must be short.
        self.0.read().unwrap_or_else(PoisonError::into_inner).as_deref().map(call)
    }

    /// The supervisor, for what takes its time.
    pub(crate) fn get(&self) -> Option<Arc<Supervisor>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the supervisor, and returns the one before.
    pub(crate) fn replace(&self, supervisor: Option<Arc<Supervisor>>) -> Option<Arc<Supervisor>> {
        std::mem::replace(&mut *self.0.write().unwrap_or_else(PoisonError::into_inner), supervisor)
    }
}

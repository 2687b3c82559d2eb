//! The operator's requests: stop, start, restart.

use std::sync::Arc;

use thiserror::Error;

use super::entry::{NameOwner, RunnableSettings};
use super::{ROOT_SLOT, RunKey, TreeFsm, TreeTime};
use crate::event::CancelCause;
use crate::name::{DependencyError, NameError, ROOT};
use crate::state::RunnableState;

/// The reason why an operator's request was rejected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ControlError {
    /// No runnable has this DN.
    #[error("unknown runnable {dn:?}")]
    UnknownDn {
        /// The DN as it was given.
        dn: String,
    },
    /// The root can't be stopped separately: shut the supervisor down instead.
    #[error("can't stop root: shut the supervisor down instead")]
    RootNotControllable,
    /// The parent has ended or is restarting. It may add the child again.
    #[error("can't start {dn}: its parent is not running; start the parent first")]
    ParentNotRunning {
        /// The DN of the runnable.
        dn: String,
    },
    /// The name of a new child is invalid or in use.
    #[error(transparent)]
    Name(NameError),
    /// A new child can't depend on a runnable that it names.
    #[error(transparent)]
    Dependency(#[from] DependencyError),
    /// The supervisor is shutting down.
    #[error("the supervisor is shutting down, and starts, stops and restarts nothing on request")]
    ShuttingDown,
}

impl TreeFsm {
    /// Stops a subtree, and keeps it stopped across restarts of its parent, until
    /// [`start_runnable`](Self::start_runnable). Does nothing to a stopped one.
    pub(crate) fn stop_runnable(&mut self, now: TreeTime, dn: &str) -> Result<(), ControlError> {
        let slot = self.controllable_slot(dn)?;
        if slot == ROOT_SLOT {
            return Err(ControlError::RootNotControllable);
        }
        let entry = self.entry_mut(slot);
        entry.held_by_operator = true;
        // The stop replaces a restart that was requested before and is still stopping the old run.
        entry.restart_requested = false;
        match entry.state {
            RunnableState::Stopped => {}
            // No task exists whose exit could stop it later.
            RunnableState::Waiting => self.mark_stopped(slot, now),
            _ => {
                self.cancel_subtree(slot, &CancelCause::Operator, now);
                self.restart_if_settled(slot, now);
            }
        }
        Ok(())
    }

    /// Starts a runnable that is stopped, in backoff, or has ended. Does nothing to a running one.
    pub(crate) fn start_runnable(&mut self, now: TreeTime, dn: &str) -> Result<(), ControlError> {
        let slot = self.startable_slot(dn)?;
        let entry = self.entry_mut(slot);
        let was_held = std::mem::take(&mut entry.held_by_operator);
        match entry.state {
            // It is still stopping, as an operator requested before: it starts again after its exit.
            RunnableState::New | RunnableState::Ready if was_held => entry.restart_requested = true,
            RunnableState::New | RunnableState::Ready => {}
            // Its work is done and its children are running: nothing to start.
            RunnableState::Done if entry.live_tasks > 0 && !entry.canceled => {}
            _ => self.start_or_restart(slot, now),
        }
        Ok(())
    }

    /// Stops a subtree and restarts it at once, regardless of its policy and its backoff.
    pub(crate) fn restart_runnable(&mut self, now: TreeTime, dn: &str) -> Result<(), ControlError> {
        let slot = self.startable_slot(dn)?;
        self.entry_mut(slot).held_by_operator = false;
        self.start_or_restart(slot, now);
        Ok(())
    }

    /// Stops a run whose dependency is no longer ready, with its subtree, and restarts it without a backoff. Does nothing to
    /// one that is ending.
    pub(crate) fn restart_with_dependency(&mut self, now: TreeTime, key: RunKey, dependency: Arc<str>) {
        if let Some(slot) = self.running_slot(key)
            && !self.entry(slot).canceled
        {
            self.entry_mut(slot).restart_requested = true;
            self.cancel_subtree(slot, &CancelCause::Dependency(dependency), now);
        }
    }

    /// Replaces the settings of a child, from now on; its state stays. Returns its slot.
    pub(crate) fn replace_settings(
        &mut self,
        dn: &str,
        settings: Arc<RunnableSettings>,
    ) -> Result<u32, ControlError> {
        let slot = self.controllable_slot(dn)?;
        if slot == ROOT_SLOT {
            return Err(ControlError::RootNotControllable);
        }
        self.entry_mut(slot).settings = settings;
        Ok(slot)
    }

    fn start_or_restart(&mut self, slot: u32, now: TreeTime) {
        if matches!(self.entry(slot).state, RunnableState::Waiting | RunnableState::Stopped) {
            self.start_after_group(slot, now);
        } else {
            self.entry_mut(slot).restart_requested = true;
            self.cancel_subtree(slot, &CancelCause::Operator, now);
            self.restart_if_settled(slot, now);
        }
    }

    pub(super) fn find_slot(&self, dn: &str) -> Option<u32> {
        let mut names = dn.split('.');
        let root = names.next().filter(|name| *name == ROOT).map(|_| ROOT_SLOT)?;
        names.try_fold(root, |slot, name| match self.entry(slot).names.get(name) {
            Some(NameOwner::Child(child)) => Some(*child),
            _ => None,
        })
    }

    fn startable_slot(&self, dn: &str) -> Result<u32, ControlError> {
        let slot = self.controllable_slot(dn)?;
        // Its parent is about to restart, and will add it again, or not.
        if self.parent_is_canceled(slot) {
            return Err(ControlError::ParentNotRunning { dn: dn.to_owned() });
        }
        Ok(slot)
    }

    pub(super) fn controllable_slot(&self, dn: &str) -> Result<u32, ControlError> {
        if self.is_shutting_down() {
            return Err(ControlError::ShuttingDown);
        }
        self.find_slot(dn).ok_or_else(|| ControlError::UnknownDn { dn: dn.to_owned() })
    }
}

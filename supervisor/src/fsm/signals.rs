//! The signals of a runnable: ready, not ready, done, and the runnable that it waits for.

use std::sync::Arc;

use thiserror::Error;

use super::entry::TreeEntry;
use super::{ControlError, RunKey, TreeFsm, TreeTime};
use crate::event::RunnableChange;
use crate::state::{ExitReason, RunnableState};

/// The reason why a ready or done signal is invalid. The runnable that sent it is canceled and ends as failed, except
/// for [`StaleContext`](Self::StaleContext) and [`ForeignContext`](Self::ForeignContext).
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LifecycleSignalError {
    /// The context is stale: its run has ended. The signal has no effect.
    #[error("this context belongs to a run of its runnable that has ended: use the current run's context")]
    StaleContext,
    /// A runnable sent the signal through another runnable's context. The signal has no effect.
    #[error("another runnable sent a ready or done signal for {dn}: only {dn} itself may send it")]
    ForeignContext {
        /// The DN of the context.
        dn: String,
    },
    /// The runnable signaled ready a second time.
    #[error("{dn} signaled ready twice: a runnable may signal it once in a run")]
    ReadyTwice {
        /// The DN of the context.
        dn: String,
    },
    /// The runnable signaled done before ready.
    #[error("{dn} signaled done before ready: signal ready first")]
    DoneBeforeReady {
        /// The DN of the context.
        dn: String,
    },
    /// The runnable signaled done a second time.
    #[error("{dn} signaled done twice: a runnable may signal it once in a run")]
    DoneTwice {
        /// The DN of the context.
        dn: String,
    },
}

impl TreeFsm {
    pub(crate) fn signal_ready(&mut self, now: TreeTime, key: RunKey) -> Result<(), LifecycleSignalError> {
        let slot = self.running_slot(key).ok_or(LifecycleSignalError::StaleContext)?;
        let entry = self.entry(slot);
        if entry.signaled_ready {
            let error = LifecycleSignalError::ReadyTwice { dn: entry.dn.to_string() };
            return Err(self.fail_invalid_signal(slot, error, now));
        }
        let entry = self.entry_mut(slot);
        entry.signaled_ready = true;
        entry.not_ready_reason = None;
        self.update_readiness(slot, now);
        Ok(())
    }

    /// The runnable signals that it can't do its work at present. It has no effect after a done signal.
    pub(crate) fn signal_not_ready(
        &mut self,
        now: TreeTime,
        key: RunKey,
        reason: Arc<str>,
    ) -> Result<(), LifecycleSignalError> {
        let slot = self.running_slot(key).ok_or(LifecycleSignalError::StaleContext)?;
        let entry = self.entry_mut(slot);
        if entry.signaled_done {
            return Ok(());
        }
        // Before the first ready signal, only the status shows the reason: the state does not change.
        entry.signaled_ready = false;
        entry.not_ready_reason = Some(reason);
        self.update_readiness(slot, now);
        Ok(())
    }

    /// Withholds the readiness of a run for this reason, or gives it back. Without effect on what is not running, or
    /// has signaled done; the next run starts without it.
    pub(crate) fn withhold_ready(
        &mut self,
        now: TreeTime,
        dn: &str,
        reason: Option<Arc<str>>,
    ) -> Result<(), ControlError> {
        let slot = self.controllable_slot(dn)?;
        let entry = self.entry_mut(slot);
        if entry.state.is_running() && !entry.signaled_done {
            entry.withheld = reason;
            self.update_readiness(slot, now);
        }
        Ok(())
    }

    /// Enters the state of a running entry that follows from its own signals and from what others withhold.
    fn update_readiness(&mut self, slot: u32, now: TreeTime) {
        let entry = self.entry_mut(slot);
        let is_ready = entry.signaled_ready && entry.withheld.is_none();
        if is_ready && entry.state == RunnableState::New {
            entry.enter_state(RunnableState::Ready, now);
            self.report_change(slot, RunnableChange::Ready);
            let TreeEntry { parent, group, rank, .. } = *self.entry(slot);
            if let Some(parent) = parent {
                self.start_members_after(parent, group, rank, now);
            }
        } else if !is_ready && entry.state == RunnableState::Ready {
            // The time until now counts as ready, although the run may fail before it is ready again.
            entry.clear_failures_if_stable(entry.ending_since.unwrap_or(now));
            entry.enter_state(RunnableState::New, now);
            let reason = entry.not_ready_reason.clone().or_else(|| entry.withheld.clone());
            let reason = reason.expect("one of both has just been set");
            self.report_change(slot, RunnableChange::NotReady { reason });
        }
    }

    /// The runnable signals that its work is done and that it will return.
    pub(crate) fn signal_done(&mut self, now: TreeTime, key: RunKey) -> Result<(), LifecycleSignalError> {
        let slot = self.running_slot(key).ok_or(LifecycleSignalError::StaleContext)?;
        let entry = self.entry_mut(slot);
        let dn = entry.dn.to_string();
        let error = match (entry.signaled_ready, entry.signaled_done) {
            (true, false) => {
                entry.signaled_done = true;
                return Ok(());
            }
            (true, true) => LifecycleSignalError::DoneTwice { dn },
            _ => LifecycleSignalError::DoneBeforeReady { dn },
        };
        Err(self.fail_invalid_signal(slot, error, now))
    }

    /// Makes the run end as failed, regardless of the result of its runnable.
    fn fail_invalid_signal(
        &mut self,
        slot: u32,
        error: LifecycleSignalError,
        now: TreeTime,
    ) -> LifecycleSignalError {
        let key = RunKey { slot, incarnation: self.entry(slot).incarnation };
        self.fail_run(now, key, ExitReason::InvalidSignal { error: error.to_string() });
        error
    }

    /// Records for the status that the runnable waits for another one.
    pub(crate) fn set_dependency(&mut self, key: RunKey, dependency: Option<Arc<str>>) {
        if let Some(slot) = self.resolve_key(key) {
            self.entry_mut(slot).dependency = dependency;
        }
    }
}

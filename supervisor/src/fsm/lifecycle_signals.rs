//! The calls of a runnable: new children, sub-spans, ready, done.

use std::collections::HashSet;
use std::sync::Arc;

use thiserror::Error;

use super::entry::{LocalName, NameOwner, RunnableSettings, TreeEntry};
use super::group::ChildGroup;
use super::{RunKey, TreeAction, TreeFsm, TreeTime};
use crate::event::{CancelCause, RunnableChange};
use crate::name::{NameError, child_dn};
use crate::policy::GroupPolicy;
use crate::runnable::CanceledError;
use crate::state::{ExitReason, RunnableState};

/// Why adding children failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AddChildError {
    /// A name is invalid or in use. None of the group was added.
    #[error(transparent)]
    Name(NameError),
    /// The runnable has already signaled ready. Add children before
    /// [`signal_ready`](crate::Context::signal_ready).
    #[error("can't add children to {dn}: it has signaled ready; add them before")]
    AlreadyReady {
        /// The parent's DN.
        dn: String,
    },
    /// The context is canceled, so the children would never run.
    #[error("can't add child runnables: their parent is stopping")]
    Canceled(#[source] CanceledError),
}

/// Why a ready or done signal is invalid. The runnable that sent it is canceled and ends as failed, except
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
    /// Adds a group of children below a runnable that is not ready yet, and starts them. Returns their slots
    /// in order.
    ///
    /// # Errors
    /// See [`AddChildError`]; none of the group was added.
    pub(crate) fn add_group(
        &mut self,
        now: TreeTime,
        parent: RunKey,
        policy: GroupPolicy,
        children: &[(&str, Arc<RunnableSettings>)],
    ) -> Result<Vec<u32>, AddChildError> {
        let slot = self.slot_accepting_children(parent)?;
        let dns = self.child_dns(slot, children).map_err(AddChildError::Name)?;
        let groups = &mut self.entry_mut(slot).groups;
        groups.push(ChildGroup { policy, members: Vec::new(), ending: None });
        let group = groups.len() - 1;
        Ok(self.insert_members(now, (slot, group), children, dns))
    }

    /// Fills an empty group, and starts its members. Returns their slots in order.
    pub(super) fn insert_members(
        &mut self,
        now: TreeTime,
        (parent, index): (u32, usize),
        children: &[(&str, Arc<RunnableSettings>)],
        dns: Vec<Arc<str>>,
    ) -> Vec<u32> {
        let group = u32::try_from(index).expect("fewer groups than entries");
        let mut members = Vec::with_capacity(children.len());
        for (rank, ((name, settings), dn)) in (0..).zip(children.iter().zip(dns)) {
            let history = self.entry_mut(parent).former_children.remove(*name).unwrap_or_default();
            let local_name = LocalName::of_dn(Arc::clone(&dn));
            let mut child =
                TreeEntry::new(dn, Some(parent), (group, rank), Arc::clone(settings), now, history);
            child.incarnation = self.allocate_incarnation();
            let child = self.insert_entry(child);
            self.entry_mut(parent).names.insert(local_name, NameOwner::Child(child));
            members.push(child);
        }
        self.entry_mut(parent).groups[index].members.clone_from(&members);
        for member in &members {
            match self.entry(*member).held_by_operator {
                true => self.mark_stopped(*member, now),
                false => self.start_run(*member, now),
            }
        }
        members
    }

    fn slot_accepting_children(&self, key: RunKey) -> Result<u32, AddChildError> {
        let slot = self.resolve_key(key).ok_or(AddChildError::Name(NameError::StaleContext))?;
        let entry = self.entry(slot);
        match entry.state {
            RunnableState::New if entry.canceled || self.is_shutting_down() => {
                Err(AddChildError::Canceled(CanceledError))
            }
            RunnableState::New if !entry.was_ready => Ok(slot),
            RunnableState::New | RunnableState::Ready => {
                Err(AddChildError::AlreadyReady { dn: entry.dn.to_string() })
            }
            _ => Err(AddChildError::Name(NameError::StaleContext)),
        }
    }

    /// The DNs of the children, if all their names are valid and free.
    pub(super) fn child_dns(
        &self,
        parent: u32,
        children: &[(&str, Arc<RunnableSettings>)],
    ) -> Result<Vec<Arc<str>>, NameError> {
        let entry = self.entry(parent);
        let mut seen = HashSet::new();
        let dns = children.iter().map(|(name, _)| {
            let dn = child_dn(&entry.dn, name)?;
            if entry.names.contains_key(*name) || children.len() > 1 && !seen.insert(*name) {
                return Err(NameError::AlreadyInUse {
                    name: (*name).to_owned(),
                    parent: entry.dn.to_string(),
                });
            }
            Ok(Arc::from(dn))
        });
        dns.collect()
    }

    /// Reserves a name for a sub-span of a running runnable, until the runnable's next start. Repeating it is
    /// allowed.
    ///
    /// # Errors
    /// See [`NameError`].
    pub(crate) fn reserve_sub_span(&mut self, key: RunKey, name: &str) -> Result<String, NameError> {
        let slot = self.running_slot(key).ok_or(NameError::StaleContext)?;
        let entry = self.entry_mut(slot);
        let dn = child_dn(&entry.dn, name)?;
        match entry.names.get(name) {
            Some(NameOwner::Child(_)) => {
                Err(NameError::AlreadyInUse { name: name.to_owned(), parent: entry.dn.to_string() })
            }
            Some(NameOwner::SubSpan) => Ok(dn),
            None => {
                entry.names.insert(LocalName::of_dn(dn.as_str().into()), NameOwner::SubSpan);
                Ok(dn)
            }
        }
    }

    /// The runnable signals ready.
    ///
    /// # Errors
    /// See [`LifecycleSignalError`].
    pub(crate) fn signal_ready(&mut self, now: TreeTime, key: RunKey) -> Result<(), LifecycleSignalError> {
        let slot = self.running_slot(key).ok_or(LifecycleSignalError::StaleContext)?;
        let entry = self.entry(slot);
        if entry.state == RunnableState::Ready {
            let error = LifecycleSignalError::ReadyTwice { dn: entry.dn.to_string() };
            return Err(self.fail_invalid_signal(slot, error, now));
        }
        let entry = self.entry_mut(slot);
        (entry.was_ready, entry.not_ready_reason) = (true, None);
        entry.enter_state(RunnableState::Ready, now);
        self.report_change(slot, RunnableChange::Ready);
        Ok(())
    }

    /// The runnable signals that it can't do its work at present. It has no effect after a done signal.
    ///
    /// # Errors
    /// [`LifecycleSignalError::StaleContext`].
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
        entry.not_ready_reason = Some(Arc::clone(&reason));
        if entry.state == RunnableState::Ready {
            entry.clear_failures_if_stable(entry.ending_since.unwrap_or(now));
            entry.enter_state(RunnableState::New, now);
            self.report_change(slot, RunnableChange::NotReady { reason });
        }
        Ok(())
    }

    /// The runnable signals that its work is done and that it will return.
    ///
    /// # Errors
    /// See [`LifecycleSignalError`].
    pub(crate) fn signal_done(&mut self, now: TreeTime, key: RunKey) -> Result<(), LifecycleSignalError> {
        let slot = self.running_slot(key).ok_or(LifecycleSignalError::StaleContext)?;
        let entry = self.entry_mut(slot);
        let dn = entry.dn.to_string();
        let error = match (entry.state, entry.signaled_done) {
            (RunnableState::Ready, false) => {
                entry.signaled_done = true;
                return Ok(());
            }
            (RunnableState::Ready, true) => LifecycleSignalError::DoneTwice { dn },
            _ => LifecycleSignalError::DoneBeforeReady { dn },
        };
        Err(self.fail_invalid_signal(slot, error, now))
    }

    /// Records for the status that the runnable waits for another one.
    pub(crate) fn set_dependency(&mut self, key: RunKey, dependency: Option<Arc<str>>) {
        if let Some(slot) = self.resolve_key(key) {
            self.entry_mut(slot).dependency = dependency;
        }
    }

    /// Makes a running run end as `exit`, whatever its runnable returns, and cancels it.
    pub(crate) fn fail_run(&mut self, now: TreeTime, key: RunKey, exit: ExitReason) {
        if let Some(slot) = self.running_slot(key) {
            self.entry_mut(slot).forced_exit.get_or_insert_with(|| Box::new(exit));
            self.cancel_subtree(slot, &CancelCause::OwnFailure, now);
        }
    }

    /// The slot of a key, if its run is still running.
    pub(super) fn running_slot(&self, key: RunKey) -> Option<u32> {
        self.resolve_key(key).filter(|slot| self.entry(*slot).state.is_running())
    }

    fn fail_invalid_signal(
        &mut self,
        slot: u32,
        error: LifecycleSignalError,
        now: TreeTime,
    ) -> LifecycleSignalError {
        let forced_exit = || Box::new(ExitReason::InvalidSignal { error: error.to_string() });
        self.entry_mut(slot).forced_exit.get_or_insert_with(forced_exit);
        self.cancel_subtree(slot, &CancelCause::OwnFailure, now);
        error
    }

    /// Starts an entry's runnable. Its parent must be live, and nothing may exist below it.
    pub(super) fn start_run(&mut self, slot: u32, now: TreeTime) {
        self.disarm_timer(slot);
        let entry = self.entry_mut(slot);
        debug_assert!(!entry.canceled && entry.live_tasks == 0 && entry.groups.is_empty());
        entry.generation += 1;
        entry.restart_requested = false;
        (entry.was_ready, entry.not_ready_reason) = (false, None);
        entry.enter_state(RunnableState::New, now);
        let start = TreeAction::StartRun {
            key: RunKey { slot, incarnation: entry.incarnation },
            dn: entry.dn.clone(),
            generation: entry.generation,
        };
        self.adjust_live_counts(slot, 1);
        self.actions.push(start);
        self.report_change(slot, RunnableChange::Started);
    }
}

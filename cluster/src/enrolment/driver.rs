//! Drives the state machine: performs its actions, one at a time, and returns the result of each as an input.

use std::convert::Infallible;
use std::net::IpAddr;
use std::panic;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nodekeel_localstorage::pki::Certificate;
use nodekeel_supervisor::{Backoff, CanceledError, Context, Failure, LifecycleSignalError};
use thiserror::Error;
use tokio::time::{Instant, sleep_until};
use tokio_util::task::TaskTracker;
use zeroize::Zeroizing;

use super::cluster_node::{PublishedState, SharedState};
use super::deps::EnrolCallError;
use super::failure::{FailureReason, StepError};
use super::fsm::{EnrolmentAction, EnrolmentFsm, EnrolmentInput};
use super::journal::EnrolmentJournal;
use super::plan::{BootstrapPermission, InspectionResult};
use super::progress::EnrolmentProgress;
use super::state::{EnrolmentPhase, EnrolmentState, WaitCause};
use super::steps::StepRunner;
use crate::consensus::{
    DEFAULT_PEER_PORT, MemberRecovery, MemberStatus, PeerUrl, RecoveryState, StatusWatch,
};
use crate::node::{EnrolmentTicket, PendingJoin};

/// The pause between two looks for a ticket, while the node waits for one.
const TICKET_PAUSE: Duration = Duration::from_secs(2);

/// The pauses between two calls of the voters that a join ticket names.
const REDEMPTION_BACKOFF: Backoff =
    Backoff { initial: Duration::from_millis(500), factor: 1.5, max: Duration::from_secs(10), jitter: 0.0 };

/// One run, with everything that it has created so far.
pub(super) struct EnrolmentDriver {
    pub(super) shared: Arc<SharedState>,
    pub(super) ctx: Context,
    fsm: Mutex<EnrolmentFsm>,
    run_state: Mutex<RunState>,
    /// Blocking work of this run, which has to end before the next run starts.
    threads: TaskTracker,
}

/// The results of this run's steps for later steps.
#[derive(Debug, Default)]
pub(super) struct RunState {
    pub(super) journal: Option<EnrolmentJournal>,
    pub(super) certificate: Option<Certificate>,
    pub(super) member: Option<StatusWatch>,
    /// The recovery of the cluster from that member.
    pub(super) recovery: Option<Arc<dyn MemberRecovery>>,
    /// The address at which the member is reached.
    pub(super) member_address: Option<IpAddr>,
    /// The condition that the current step waits for.
    condition: Option<Arc<str>>,
    /// When the member has last received more of the cluster's data.
    last_received: Option<Instant>,
}

/// Runs the enrolment once.
pub(super) async fn run_enrolment(shared: Arc<SharedState>, ctx: Context) -> Result<(), Failure> {
    let driver = EnrolmentDriver {
        shared,
        ctx,
        fsm: Mutex::new(EnrolmentFsm::new()),
        run_state: Mutex::new(RunState::default()),
        threads: TaskTracker::new(),
    };
    // From here on, handles show this run's state, not the end of the run before.
    driver.publish();
    let end = FailOnDrop(&driver);
    driver.run_to_completion().await;
    // A rejected input ends the loop in a state that is not final: the guard then fails the run, so that
    // waiters return.
    drop(end);
    match driver.current_state() {
        EnrolmentState::Running(_) => {
            let _ended = ReportEndOnDrop(&driver);
            tokio::select! {
                // A run that is being stopped ends as canceled, even if its address has changed too.
                biased;
                canceled = driver.ctx.canceled() => Err(canceled.into()),
                changed = driver.wait_address_change() => Err(changed.into()),
                () = driver.wait_recovery_request() => Err(RecoveryRequested.into()),
                signaled = driver.follow_member() => {
                    Err(signaled.map(|never| match never {}).unwrap_or_else(Failure::from))
                }
            }
        }
        EnrolmentState::Failed(FailureReason::Stopped { .. }) => Err(CanceledError.into()),
        EnrolmentState::Failed(reason) => Err(reason.into()),
        other => Err(Failure::new(format!("the enrolment stopped in state {}", other.phase()))),
    }
}

/// A running node has a new address: the next run starts its member there.
#[derive(Debug, Error)]
#[error("the node's address changed from {from} to {to}: restarting its member there")]
struct AddressChange {
    from: IpAddr,
    to: IpAddr,
}

/// The cluster of a running node is recovered from it: the next run starts its member alone, and removes what the cluster has of
/// the others.
#[derive(Debug, Error)]
#[error("the cluster is being recovered from this node: restarting its member")]
struct RecoveryRequested;

/// Fails a run that is dropped before its end, or panics, so that waiters are notified.
struct FailOnDrop<'a>(&'a EnrolmentDriver);

impl Drop for FailOnDrop<'_> {
    fn drop(&mut self) {
        if !self.0.current_state().phase().is_final() {
            self.0.apply_input(EnrolmentInput::Stop);
        }
    }
}

/// Publishes the end of a run that was in its cluster, whether it ended, was dropped or panicked. For the
/// state machine, the run was over once it was in the cluster.
struct ReportEndOnDrop<'a>(&'a EnrolmentDriver);

impl Drop for ReportEndOnDrop<'_> {
    fn drop(&mut self) {
        let mut history = self.0.fsm().phase_history().to_vec();
        // The state machine ends in Running: only the published history shows that the run is over.
        history.push(EnrolmentPhase::Failed);
        self.0.shared.publish(PublishedState {
            state: EnrolmentState::Failed(FailureReason::RunEnded),
            phase_history: history,
            member: None,
            recovery: None,
            condition: None,
            last_failure: None,
        });
    }
}

impl EnrolmentDriver {
    pub(super) fn current_state(&self) -> EnrolmentState {
        self.fsm().current_state().clone()
    }

    /// A panic in another thread leaves the state machine consistent: each input is one step.
    fn fsm(&self) -> MutexGuard<'_, EnrolmentFsm> {
        self.fsm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn run_state(&self) -> MutexGuard<'_, RunState> {
        self.run_state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what currently holds up the run; `None` when nothing is known.
    pub(super) fn set_condition(&self, condition: Option<String>) {
        let mut run_state = self.run_state();
        // A condition is logged and published once, however often a step reports it.
        if run_state.condition.as_deref() == condition.as_deref() {
            return;
        }
        if let Some(condition) = &condition {
            tracing::warn!("the node can't take part in its cluster: {condition}");
        }
        run_state.condition = condition.map(Into::into);
        // `publish` takes this lock itself.
        drop(run_state);
        self.publish();
    }

    /// Runs blocking work on a separate thread, within the run's tracing span. A panic there becomes a panic
    /// of the run.
    pub(super) async fn run_blocking<T: Send + 'static>(
        &self,
        run: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let span = tracing::Span::current();
        match self.threads.spawn_blocking(move || span.in_scope(run)).await {
            Ok(done) => done,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => panic::resume_unwind(panic),
                // The runtime is shutting down, and this future with it.
                Err(_) => std::future::pending().await,
            },
        }
    }

    fn publish(&self) {
        // Neither lock is held while the other is taken, so that their order needs no rule.
        let fsm = self.fsm();
        let (state, history) = (fsm.current_state().clone(), fsm.phase_history().to_vec());
        drop(fsm);
        let (member, recovery, condition) = {
            let run_state = self.run_state();
            (run_state.member.clone(), run_state.recovery.clone(), run_state.condition.clone())
        };
        let condition = match &state {
            // With a ticket it may wait for its address.
            EnrolmentState::Waiting(cause) => condition.or_else(|| Some(cause.to_string().into())),
            // The failure is published with the state; a condition of a run that has ended is out of date.
            EnrolmentState::Failed(_) => None,
            // No reader may see the node in its cluster without what is wrong there.
            EnrolmentState::Running(_) => match &member {
                Some(member) => running_condition(&member.current_status(), condition),
                None => condition,
            },
            _ => condition,
        };
        self.shared.publish(PublishedState {
            state,
            phase_history: history,
            member,
            recovery,
            condition: condition.clone(),
            // `SharedState::publish` derives it from the state.
            last_failure: None,
        });
        if let Some(condition) = condition {
            // A stale context means that the run has ended.
            let _ = self.ctx.signal_not_ready(condition);
        }
    }

    /// Keeps the node's condition and readiness equal to the status of its member, until it is dropped.
    async fn follow_member(&self) -> Result<Infallible, LifecycleSignalError> {
        let Some(mut watch) = self.run_state().member.clone() else { return std::future::pending().await };
        // `set_condition` signals that the node is not ready; the way back is signaled here, once for each
        // change.
        let (mut status, mut is_ready) = (watch.current_status(), false);
        loop {
            let present = self.run_state().condition.clone();
            let condition = running_condition(&status, present);
            let can_take_part = condition.is_none();
            self.set_condition(condition.map(|reason| reason.to_string()));
            // Also if it is as before: the status may have been another when the state was published.
            self.publish();
            if can_take_part && !is_ready {
                self.ctx.signal_ready()?;
            }
            is_ready = can_take_part;
            match watch.next_status().await {
                Some(next) => status = next,
                None => return std::future::pending().await,
            }
        }
    }

    fn apply_input(&self, input: EnrolmentInput) -> Option<EnrolmentAction> {
        let mut fsm = self.fsm();
        let before = fsm.current_state().phase();
        let action = fsm.apply_input(input);
        let after = fsm.current_state().clone();
        // `publish` takes this lock again below.
        drop(fsm);
        match &after {
            // A step within a phase is not logged as a change.
            now if now.phase() == before => {}
            EnrolmentState::Failed(reason) => {
                tracing::error!(from = %before, "enrolment failed: {}", Failure::new(reason.clone()));
            }
            EnrolmentState::Running(membership) => {
                let (node, cluster) = (&membership.node_id, membership.cluster_id);
                tracing::info!(%node, %cluster, "the node is in its cluster");
            }
            now => {
                tracing::info!(from = %before, to = %now.phase(), "enrolment entered a new state")
            }
        }
        self.publish();
        action.unwrap_or_else(|rejected| {
            // Inputs are created one at a time, as results of actions, so this would be a bug. The state is
            // unchanged.
            tracing::error!("{rejected}");
            None
        })
    }

    /// Performs actions until the state machine returns none.
    async fn run_to_completion(&self) {
        // One deadline spans all steps, not each of them.
        let mut deadline = Instant::now().checked_add(self.shared.settings.deadline);
        let mut next = self.apply_input(EnrolmentInput::Start);
        while let Some(action) = next {
            // The wait for a ticket has no deadline: an operator may bring it at any time.
            let is_waiting = matches!(action, EnrolmentAction::AwaitInstruction(_));
            if is_waiting {
                deadline = None;
            }
            let input = tokio::select! {
                // A completed action is applied even if the run is being stopped: its effect is on the disk
                // already.
                biased;
                input = self.perform_action(action) => input,
                CanceledError = self.ctx.canceled() => EnrolmentInput::Stop,
                () = self.wait_stalled(deadline) => {
                    EnrolmentInput::DeadlineExceeded(self.run_state().condition.clone())
                }
            };
            // The time without an instruction does not count.
            if is_waiting {
                deadline = Instant::now().checked_add(self.shared.settings.deadline);
            }
            // All waiters are notified at once.
            next = self.apply_input(input);
        }
        // Work on a thread can't be canceled. It is safe to repeat, but it must end before the next run,
        // which would otherwise find the journal in use.
        self.threads.close();
        self.threads.wait().await;
    }

    /// Returns at the deadline, or when the member has received no data of its cluster for as long: a transfer over a slow
    /// network would start over.
    async fn wait_stalled(&self, mut deadline: Option<Instant>) {
        loop {
            sleep_until_deadline(deadline).await;
            let received = self.run_state().last_received;
            let extended = received.and_then(|at| at.checked_add(self.shared.settings.deadline));
            if extended <= deadline {
                return;
            }
            deadline = extended;
        }
    }

    /// Records that the member has received more of the cluster's data.
    pub(super) fn record_received(&self) {
        self.run_state().last_received = Some(Instant::now());
    }

    async fn perform_action(&self, action: EnrolmentAction) -> EnrolmentInput {
        match action {
            EnrolmentAction::Inspect(action_id) => match self.inspect_disk().await {
                Ok(found) => EnrolmentInput::Inspected(action_id, found),
                Err(error) => EnrolmentInput::ActionFailed(action_id, Arc::new(error)),
            },
            EnrolmentAction::AwaitInstruction(action_id) => match self.await_instruction().await {
                Ok(found) => EnrolmentInput::Inspected(action_id, found),
                Err(error) => EnrolmentInput::ActionFailed(action_id, Arc::new(error)),
            },
            EnrolmentAction::Record(action_id, progress) => match self.record_progress(progress).await {
                Ok(()) => EnrolmentInput::Recorded(action_id),
                Err(error) => EnrolmentInput::ActionFailed(action_id, Arc::new(error)),
            },
            EnrolmentAction::RunStep(action_id, step, mode) => {
                // The hook is the place at which the tests kill a node, before and after each effect.
                (self.shared.test_hook)(&format!("start {step}"));
                let outcome = StepRunner(self).run(step, mode).await;
                // The condition of one step does not hold for the next one.
                self.set_condition(None);
                (self.shared.test_hook)(&format!("end {step}"));
                match outcome {
                    Ok(outcome) => EnrolmentInput::StepDone(action_id, outcome),
                    Err(error) => EnrolmentInput::ActionFailed(action_id, Arc::new(error)),
                }
            }
        }
    }

    async fn inspect_disk(&self) -> Result<InspectionResult, StepError> {
        let (mut journal, mut found) = self.open_journal().await?;
        if let InspectionResult::Fresh { ticket: Some(_), .. } = found {
            // An open journal is locked against a reset, and the wait for an address may be long.
            drop(journal);
            let address = self.wait_address().await?;
            self.set_condition(None);
            // It ends a request to bootstrap, even if it is replaced or removed by now.
            if self.shared.cluster_request.send_replace(None).is_some() {
                tracing::warn!("the request to bootstrap or restore a cluster ends: a ticket was found");
            }
            // The ticket may have been replaced or removed during the wait: the present one decides.
            (journal, found) = self.open_journal().await?;
            self.check_ticket_host(&found, address)?;
        }
        self.run_state().journal = Some(journal);
        Ok(found)
    }

    async fn open_journal(&self) -> Result<(EnrolmentJournal, InspectionResult), StepError> {
        let shared = Arc::clone(&self.shared);
        let opened = self.run_blocking(move || {
            let SharedState { deps, test_hook: hook, .. } = &*shared;
            let bootstrap = || shared.bootstrap_permission();
            EnrolmentJournal::open(&deps.journal_dir, &deps.enrolment, bootstrap, hook)
        });
        opened.await
    }

    /// Rejects a ticket for another host before the journal binds this node to it.
    fn check_ticket_host(&self, found: &InspectionResult, address: IpAddr) -> Result<(), StepError> {
        let InspectionResult::Fresh { ticket: Some(EnrolmentTicket::Golden(ticket)), .. } = found else {
            return Ok(());
        };
        ticket.check_address(address, self.shared.deps.consensus.peer_port).map_err(StepError::Ticket)
    }

    /// Waits for a ticket, or for the permission to bootstrap, and inspects the disk again. Nothing notifies of
    /// a ticket in the firmware, so the sources are looked at again and again. A join ticket is redeemed until a voter does.
    async fn await_instruction(&self) -> Result<InspectionResult, StepError> {
        let is_redeeming = matches!(self.current_state(), EnrolmentState::Waiting(WaitCause::Redemption));
        let mut request = self.shared.cluster_request.subscribe();
        let (mut pause, mut failures) = (if is_redeeming { Duration::ZERO } else { TICKET_PAUSE }, 0);
        loop {
            // A request only ends the pause early: either way, the disk is looked at.
            let _ = tokio::time::timeout(pause, request.changed()).await;
            let shared = Arc::clone(&self.shared);
            let found = self.run_blocking(move || {
                let ticket = shared.deps.enrolment.load_ticket();
                let permission = shared.bootstrap_permission()?;
                let is_permitted =
                    matches!(permission, BootstrapPermission::Granted | BootstrapPermission::Restore);
                Ok((ticket, is_permitted))
            });
            match found.await? {
                (Ok(Some(EnrolmentTicket::Join(pending))), _) if is_redeeming => {
                    if let Some(reason) = self.redeem_ticket(pending).await? {
                        self.set_condition(Some(format!(
                            "{}: {reason}; check that the voters run, and that this host reaches their API",
                            WaitCause::Redemption
                        )));
                        failures += 1;
                    }
                    pause = REDEMPTION_BACKOFF.base_delay(failures);
                }
                (Ok(None), false) if !is_redeeming => {}
                // An unreadable ticket ends the wait too: the inspection then fails with the reason.
                _ => {
                    // `inspect_disk` opens the journal again, which is locked while this run has it open.
                    self.run_state().journal = None;
                    return self.inspect_disk().await;
                }
            }
        }
    }

    /// Asks the voters that a join ticket names to admit this node, and replaces it by the golden ticket that their answer and
    /// the node's keys make. Returns the reason for which none answers.
    async fn redeem_ticket(&self, pending: Arc<PendingJoin>) -> Result<Option<String>, StepError> {
        let enroller = self.shared.deps.enroller.as_ref().ok_or(StepError::NoEnroller)?;
        // On the disk before a voter sees them: a call after a kill is made with the same ones.
        if !pending.has_keys() {
            let prefix = &self.shared.settings.node_prefix;
            let with_keys = pending.with_new_keys(prefix).map_err(StepError::Credentials)?;
            self.replace_ticket(pending, with_keys.to_config()).await?;
            return Ok(None);
        }
        let port = self.shared.deps.consensus.peer_port.unwrap_or(DEFAULT_PEER_PORT);
        let url = PeerUrl::new(self.wait_address().await?, port);
        let caller = enroller.caller().ok_or(StepError::NoEnroller)?;
        let request = pending.request(url, &caller).map_err(StepError::Credentials)?;
        let Some(request) = request else { return Ok(None) };
        (self.shared.test_hook)("redeem");
        let (mut refusal, mut reasons) = (None, Vec::new());
        for voter in pending.ticket().voters() {
            match enroller.enrol(voter, &request).await {
                Ok(answer) => {
                    let ticket = pending.accept(&answer).map_err(StepError::Ticket)?;
                    (self.shared.test_hook)("redeemed");
                    self.replace_ticket(pending, ticket.to_config()).await?;
                    return Ok(None);
                }
                Err(error @ EnrolCallError::Refused(_)) => refusal = Some(error),
                Err(error) => reasons.push(Failure::new(error).to_string()),
            }
        }
        // The clock of one voter may be wrong: each was asked.
        match refusal {
            Some(refusal) => Err(StepError::NotAdmitted(refusal)),
            None => Ok(Some(reasons.join(", "))),
        }
    }

    /// Replaces a join ticket, unless an operator has replaced it by now.
    async fn replace_ticket(
        &self,
        pending: Arc<PendingJoin>,
        config: Zeroizing<Vec<u8>>,
    ) -> Result<(), StepError> {
        let shared = Arc::clone(&self.shared);
        let replaced = self.run_blocking(move || {
            let enrolment = &shared.deps.enrolment;
            match enrolment.load_ticket()? {
                Some(EnrolmentTicket::Join(present)) if present.to_config() == pending.to_config() => {
                    enrolment.write_config(&config)
                }
                _ => Ok(()),
            }
        });
        replaced.await.map_err(StepError::EnrolmentConfig)
    }

    async fn record_progress(&self, progress: EnrolmentProgress) -> Result<(), StepError> {
        // Taken out: a failed write fails the run, and the next one reads the result from the disk.
        let Some(journal) = self.run_state().journal.take() else { return Ok(()) };
        let shared = Arc::clone(&self.shared);
        let journal =
            self.run_blocking(move || journal.record_progress(&progress, &shared.test_hook)).await?;
        self.run_state().journal = Some(journal);
        Ok(())
    }

    /// Waits for an address, and publishes the reason while there is none.
    pub(super) async fn wait_address(&self) -> Result<IpAddr, StepError> {
        let network = &self.shared.deps.network;
        let mut watch = network.watch_address();
        loop {
            // Marked as seen before the reason is read, so that a later change ends the wait below.
            if let Some(address) = *watch.borrow_and_update() {
                return Ok(address.ip_addr());
            }
            let reason = network.no_address_reason().unwrap_or_else(|| "no address yet".to_owned());
            self.set_condition(Some(reason));
            watch.changed().await.map_err(|_| StepError::AddressWatchClosed)?;
        }
    }

    /// Waits until a recovery of the cluster from this node is requested, or finds one that is not complete.
    async fn wait_recovery_request(&self) {
        let Some(recovery) = self.run_state().recovery.clone() else { return std::future::pending().await };
        let mut requests = self.shared.recovery_requests.subscribe();
        loop {
            match recovery.state().await {
                Ok(RecoveryState::None) => {}
                Ok(_) => return,
                Err(error) => tracing::warn!("{}", Failure::new(error)),
            }
            if requests.changed().await.is_err() {
                // The sender exists as long as this handle.
                return std::future::pending().await;
            }
        }
    }

    /// Waits until the node has another address than its member was started at: other nodes no longer reach
    /// the member there, so it has to be restarted. A lost address may come back.
    async fn wait_address_change(&self) -> AddressChange {
        let mut watch = self.shared.deps.network.watch_address();
        let from = self.run_state().member_address;
        loop {
            let now = *watch.borrow_and_update();
            match (now, from) {
                (None, _) => tracing::warn!("the node has lost its address"),
                (Some(now), Some(from)) if now.ip_addr() != from => {
                    return AddressChange { from, to: now.ip_addr() };
                }
                (Some(address), _) => tracing::debug!(%address, "the node has its address"),
            }
            // A closed watch is no reason to stop a member that other nodes reach.
            if watch.changed().await.is_err() {
                tracing::warn!("the address watch closed");
                return std::future::pending().await;
            }
        }
    }
}

/// The condition of a node in its cluster, from the status of its member and its present condition. A member that
/// starts again keeps the reason for that until it serves.
fn running_condition(status: &MemberStatus, present: Option<Arc<str>>) -> Option<Arc<str>> {
    match status {
        MemberStatus::Running(_) => None,
        other => other.obstacle().or(present).or_else(|| Some("its member restarts".into())),
    }
}

/// Never returns if the deadline is beyond the range of the clock.
async fn sleep_until_deadline(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_that_fails_again_and_again_keeps_its_reason_while_it_starts() {
        let failed = MemberStatus::Exited { failure: Some("the cluster has removed it".into()) };
        let reason = running_condition(&failed, None);
        assert_eq!(reason.as_deref(), Some("the member failed: the cluster has removed it"));
        assert_eq!(running_condition(&MemberStatus::Starting, reason.clone()), reason);
        let starts = running_condition(&MemberStatus::Starting, None);
        assert_eq!(starts.as_deref(), Some("its member restarts"));
    }
}

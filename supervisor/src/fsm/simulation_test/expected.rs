//! The state of the entries, as a driver derives it from the actions alone.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::super::{RunKey, RunnableSettings, TreeTime};
use crate::event::{CancelCause, RunnableChange};
use crate::policy::{GroupPolicy, RestartLimitAction, RestartPolicy};
use crate::state::{ExitReason, RunnableState};

/// The group of an entry, and its place in it.
#[derive(Debug, Clone)]
pub(super) struct ExpectedGroup {
    pub(super) number: u64,
    pub(super) policy: GroupPolicy,
    pub(super) rank: usize,
}

impl ExpectedGroup {
    /// The first rank that shares the fate of this member.
    pub(super) fn first_rank(&self) -> usize {
        match self.policy {
            GroupPolicy::OneForOne => usize::MAX,
            GroupPolicy::OneForAll => 0,
            GroupPolicy::RestForOne => self.rank,
        }
    }
}

/// The runs that have to end before any member from a rank on starts.
#[derive(Debug, Clone)]
pub(super) struct Barrier {
    pub(super) group: u64,
    pub(super) first_rank: usize,
    pub(super) keys: HashSet<RunKey>,
}

#[derive(Debug, Clone)]
pub(super) struct ExpectedEntry {
    pub(super) state: RunnableState,
    pub(super) key: Option<RunKey>,
    pub(super) canceled: bool,
    /// It has signaled ready, and not taken it back.
    pub(super) signaled_ready: bool,
    /// Others withhold its readiness.
    pub(super) is_withheld: bool,
    pub(super) signaled_done: bool,
    pub(super) ended_ok: bool,
    pub(super) ready_since: TreeTime,
    /// The time since which it has been ending.
    pub(super) ending_since: Option<TreeTime>,
    pub(super) last_exit: Option<RunnableState>,
    /// The processes did not stop in time.
    pub(super) killed: bool,
    /// An operator has requested a start that skips the backoff.
    pub(super) restart_requested: bool,
    pub(super) settings: Arc<RunnableSettings>,
    pub(super) group: ExpectedGroup,
    pub(super) canceled_alone: bool,
    /// The runnable has exceeded its restart limit, and does not restart.
    pub(super) stays_dead: bool,
    /// The restarts after failures, without and with those that an operator may have requested.
    restarts: Vec<TreeTime>,
    possible_restarts: Vec<TreeTime>,
}

impl ExpectedEntry {
    pub(super) fn new(state: RunnableState, settings: Arc<RunnableSettings>, group: ExpectedGroup) -> Self {
        Self {
            state,
            key: None,
            canceled: false,
            signaled_ready: false,
            is_withheld: false,
            signaled_done: false,
            ended_ok: false,
            ready_since: TreeTime::ZERO,
            ending_since: None,
            last_exit: None,
            killed: false,
            restart_requested: false,
            settings,
            group,
            canceled_alone: false,
            stays_dead: false,
            restarts: Vec::new(),
            possible_restarts: Vec::new(),
        }
    }

    pub(super) fn check_scheduled(
        &mut self,
        dn: &str,
        delay: TreeTime,
        failures: Option<u32>,
        now: TreeTime,
    ) {
        let before = self.state;
        if before == RunnableState::Stopped {
            assert!(delay.is_zero(), "{dn} is started and backs off");
            return;
        }
        let has_ended = matches!(before, RunnableState::Dead | RunnableState::Canceled | RunnableState::Done);
        assert!(has_ended, "{dn}: {before} → scheduled");
        let failed = before == RunnableState::Dead && !self.restart_requested;
        let failures = failures.expect("what is scheduled is in the tree");
        let interval = self.settings.policy.backoff.base_delay(failures);
        if failed {
            assert!(failures >= 1, "{dn} failed and backs off without a failure count");
            assert!(delay >= interval.mul_f64(0.499), "{dn}: {delay:?} after {failures} failures");
        }
        if before == RunnableState::Dead {
            self.count_restart(dn, failed, now);
        }
        assert!(self.restart_requested || failed || delay.is_zero(), "{dn} did not fail and backs off");
        assert!(delay <= interval.mul_f64(1.501), "{dn}: {delay:?} after {failures} failures");
        assert!(interval <= Duration::from_secs(60), "{dn}: {delay:?} after {failures} failures");
        (self.canceled, self.restart_requested) = (false, false);
    }

    /// Counts a restart after a failure, and checks the restart limit.
    fn count_restart(&mut self, dn: &str, is_certain: bool, now: TreeTime) {
        let Some(limit) = self.settings.policy.restart_limit else { return };
        self.possible_restarts.push(now);
        if is_certain {
            self.restarts.push(now);
        }
        let counted = self.restarts.iter().filter(|at| now - **at < limit.period).count();
        assert!(counted <= limit.restarts as usize, "{dn} restarted {counted} times, beyond {limit:?}");
    }

    /// Checks a change that only this entry decides, and notes it.
    pub(super) fn check_change(&mut self, dn: &str, change: &RunnableChange, now: TreeTime) {
        let before = self.state;
        match change {
            RunnableChange::Started => {
                assert!(
                    matches!(before, RunnableState::Waiting | RunnableState::Stopped),
                    "{dn}: {before} → {change}"
                );
                (self.signaled_ready, self.signaled_done, self.ended_ok) = (false, false, false);
                (self.restart_requested, self.ending_since, self.killed) = (false, None, false);
                self.is_withheld = false;
                self.stays_dead = false;
            }
            RunnableChange::Ready => {
                assert_eq!(before, RunnableState::New, "{dn}: {before} → {change}");
                assert!(self.signaled_ready && !self.is_withheld, "{dn} is ready without its signal");
                self.ready_since = now;
            }
            RunnableChange::NotReady { .. } => {
                assert_eq!(before, RunnableState::Ready, "{dn}: {before} → {change}");
                assert!(!self.signaled_ready || self.is_withheld, "{dn} is not ready for no reason");
                assert!(!self.signaled_done, "{dn} is not ready after it signaled done");
            }
            RunnableChange::LimitExceeded { .. } => self.stay_dead(dn, now),
            RunnableChange::Stopped => assert_ne!(before, RunnableState::Stopped, "{dn} was stopped twice"),
            RunnableChange::Killed { .. }
            | RunnableChange::Canceling { .. }
            | RunnableChange::Straggling { .. }
            | RunnableChange::Adopted { .. } => {
                assert!(before.is_running(), "{dn}: {before} and {change}");
                self.killed |= matches!(change, RunnableChange::Killed { .. });
                if let RunnableChange::Canceling { cause } = change {
                    self.ending_since.get_or_insert(now);
                    self.canceled_alone = matches!(cause, CancelCause::Operator | CancelCause::Dependency(_));
                }
            }
            other => unreachable!("{dn}: {other} concerns the tree"),
        }
    }

    /// Returns whether it has been ready for long enough to clear its failures.
    pub(super) fn has_been_stable(&self, now: TreeTime) -> bool {
        let worked = self.ending_since.unwrap_or(now).saturating_sub(self.ready_since);
        worked >= self.settings.policy.stable_after
    }

    /// The runnable exceeds its restart limit, and counts its restarts anew from its next start on.
    fn stay_dead(&mut self, dn: &str, now: TreeTime) {
        assert_eq!(self.state, RunnableState::Dead, "{dn} runs and stays dead");
        self.check_exceeds_limit(dn, RestartLimitAction::StayDead, now);
        self.stays_dead = true;
        self.restarts.clear();
        self.possible_restarts.clear();
    }

    /// Checks that it may have exceeded its restart limit.
    pub(super) fn check_exceeds_limit(&self, dn: &str, action: RestartLimitAction, now: TreeTime) {
        let limit = self.settings.policy.restart_limit.expect("it has a limit");
        assert_eq!(limit.action, action, "{dn}");
        let counted = self.possible_restarts.iter().filter(|at| now - **at < limit.period).count();
        assert!(counted >= limit.restarts as usize, "{dn} exceeded its limit after {counted} restarts");
    }

    /// Checks an exit. `failures` is the expected number of consecutive failures after it.
    pub(super) fn check_exited(
        &mut self,
        dn: &str,
        state: RunnableState,
        exit: &ExitReason,
        now: TreeTime,
        failures: &mut u32,
    ) {
        let before = self.state;
        let never_started = before == RunnableState::Waiting && state == RunnableState::Canceled;
        let child_failed_it =
            before == RunnableState::Done && matches!(exit, ExitReason::RestartLimit { .. });
        assert!(before.is_running() || never_started || child_failed_it, "{dn}: {before} → {state}");
        if state == RunnableState::Done {
            let one_shot = self.settings.policy.restart != RestartPolicy::Always && !self.canceled;
            let as_agreed = self.signaled_ready && self.signaled_done;
            assert!(self.ended_ok && (as_agreed || one_shot), "{dn} is done without the signals");
        }
        let was_killed = matches!(exit, ExitReason::Killed { .. });
        let as_requested = was_killed || matches!(exit, ExitReason::Canceled { .. });
        assert_eq!(state == RunnableState::Canceled, as_requested, "{dn}: {exit}");
        let has_process = self.key.is_some_and(|key| key.incarnation.is_multiple_of(2));
        let needed_kill = state == RunnableState::Canceled && has_process && self.killed;
        assert_eq!(was_killed, before.is_running() && needed_kill, "{dn}: {exit}");
        let stable = before == RunnableState::Ready && self.has_been_stable(now);
        if stable || state == RunnableState::Done {
            *failures = 0;
        }
        if state == RunnableState::Dead {
            *failures += 1;
            self.canceled = true;
        }
        self.last_exit = Some(state);
    }
}

//! The state machine: inputs in, actions out. It has no tasks, no clock and no IO.

use std::sync::Arc;

use thiserror::Error;

use super::failure::{EnrolmentActivity, FailureReason, StepError};
use super::plan::{EnrolmentPlan, InspectionResult, decide_plan};
use super::progress::EnrolmentProgress;
use super::state::{
    CurrentActivity, EnrolmentPhase, EnrolmentRun, EnrolmentState, NodeMembership, WaitCause,
};
use super::step::{EnrolmentStep, StepMode};
use crate::node::{ClusterId, NodeId};

/// Identifies an action, so that an input can name the one whose result it is. One action is pending at a
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ActionId(pub(super) u64);

/// An input of the state machine.
#[derive(Clone, Debug)]
pub(super) enum EnrolmentInput {
    Start,
    /// The inspection found this.
    Inspected(ActionId, InspectionResult),
    StepDone(ActionId, StepOutput),
    /// The journal has recorded it.
    Recorded(ActionId),
    ActionFailed(ActionId, Arc<StepError>),
    /// The deadline has passed; the run was waiting for this.
    DeadlineExceeded(Option<Arc<str>>),
    /// The run is being stopped.
    Stop,
}

/// The result of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StepOutput {
    /// The step is done, and has determined nothing.
    Done,
    /// The node's name, from [`EnrolmentStep::Identity`].
    Node(NodeId),
    /// The cluster in which the member serves, from [`EnrolmentStep::Consensus`].
    Cluster(ClusterId),
}

impl StepOutput {
    fn fits(&self, step: EnrolmentStep) -> bool {
        match step {
            EnrolmentStep::Identity => matches!(self, Self::Node(_)),
            EnrolmentStep::Consensus => matches!(self, Self::Cluster(_)),
            _ => *self == Self::Done,
        }
    }
}

/// The next action. One is pending at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EnrolmentAction {
    /// Inspect the disk: [`EnrolmentInput::Inspected`].
    Inspect(ActionId),
    /// Wait for a ticket, or for the permission to bootstrap, and inspect the disk again:
    /// [`EnrolmentInput::Inspected`]. This wait has no deadline.
    AwaitInstruction(ActionId),
    /// Record this durably: [`EnrolmentInput::Recorded`].
    Record(ActionId, EnrolmentProgress),
    /// Run this step: [`EnrolmentInput::StepDone`].
    RunStep(ActionId, EnrolmentStep, StepMode),
}

/// An input that does not fit the present state. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(super) enum RejectedInput {
    /// The input is the result of another action than the pending one.
    #[error("input {given:?} is not the result of the pending action in enrolment state {state}")]
    Stale { given: ActionId, state: EnrolmentPhase },
    /// The input can't be the result of the pending action, or the run has already started.
    #[error("unexpected input in enrolment state {state}")]
    Unexpected { state: EnrolmentPhase },
    #[error("enrolment state {state} is final, and accepts no input")]
    Final { state: EnrolmentPhase },
    #[error("internal error: enrolment can't go from {from} to {to}; its state is unchanged")]
    Transition { from: EnrolmentPhase, to: EnrolmentPhase },
}

/// The next action, if any; or a rejection, with nothing changed.
type NextAction = Result<Option<EnrolmentAction>, RejectedInput>;

/// The state machine of one run, from [`EnrolmentState::New`] to [`EnrolmentState::Running`] or
/// [`EnrolmentState::Failed`].
#[derive(Debug)]
pub(super) struct EnrolmentFsm {
    current_state: EnrolmentState,
    pending_action: Option<ActionId>,
    last_action_id: u64,
    phase_history: Vec<EnrolmentPhase>,
}

impl EnrolmentFsm {
    pub(super) fn new() -> Self {
        Self {
            current_state: EnrolmentState::New,
            pending_action: None,
            last_action_id: 0,
            phase_history: vec![EnrolmentPhase::New],
        }
    }

    pub(super) fn current_state(&self) -> &EnrolmentState {
        &self.current_state
    }

    /// The states that it went through, the current one last.
    pub(super) fn phase_history(&self) -> &[EnrolmentPhase] {
        &self.phase_history
    }

    /// The present activity, or the next one.
    fn current_activity(&self) -> EnrolmentActivity {
        self.current_state.active_run().map_or(EnrolmentActivity::Inspecting, EnrolmentRun::activity)
    }

    pub(super) fn apply_input(&mut self, input: EnrolmentInput) -> NextAction {
        let state = self.current_state.phase();
        if state.is_final() {
            return Err(RejectedInput::Final { state });
        }
        // Without a plan only an inspection can be pending; with one, only a step or a record.
        let has_plan = self.current_state.active_run().is_some();
        match input {
            EnrolmentInput::Start if state == EnrolmentPhase::New && self.pending_action.is_none() => {
                Ok(Some(EnrolmentAction::Inspect(self.next_action_id())))
            }
            EnrolmentInput::Inspected(action_id, found) if !has_plan => {
                self.check_pending(action_id)?;
                self.apply_inspection(found)
            }
            EnrolmentInput::StepDone(action_id, output) if has_plan => {
                self.check_pending(action_id)?;
                self.apply_step_output(output)
            }
            EnrolmentInput::Recorded(action_id) if has_plan => {
                self.check_pending(action_id)?;
                self.apply_recorded()
            }
            EnrolmentInput::Start
            | EnrolmentInput::Inspected(..)
            | EnrolmentInput::StepDone(..)
            | EnrolmentInput::Recorded(_) => Err(RejectedInput::Unexpected { state }),
            EnrolmentInput::ActionFailed(action_id, source) => {
                self.check_pending(action_id)?;
                self.fail(FailureReason::ActionFailed { during: self.current_activity(), source })
            }
            // These two are not results of an action: they end the run, and the result of the pending action no longer
            // counts.
            EnrolmentInput::DeadlineExceeded(condition) => {
                self.fail(FailureReason::DeadlineExceeded { during: self.current_activity(), condition })
            }
            EnrolmentInput::Stop => self.fail(FailureReason::Stopped { during: self.current_activity() }),
        }
    }

    fn apply_inspection(&mut self, found: InspectionResult) -> NextAction {
        let plan = match decide_plan(found) {
            Ok(plan) => plan,
            Err(reason) => return self.fail(reason),
        };
        // The decision is recorded before anything is done, unless an earlier run has.
        let run = |progress: &EnrolmentProgress, is_recorded| {
            let activity = if is_recorded {
                CurrentActivity::RunningStep(EnrolmentStep::ALL[0])
            } else {
                CurrentActivity::RecordingDecision
            };
            EnrolmentRun::new(progress.clone(), activity)
        };
        let (state, progress, is_recorded) = match plan {
            EnrolmentPlan::Wait(cause) => return self.await_instruction(cause),
            EnrolmentPlan::Bootstrap { progress, is_recorded } => {
                (EnrolmentState::CreatingCluster(run(&progress, is_recorded)), progress, is_recorded)
            }
            EnrolmentPlan::Join { ticket, progress, is_recorded } => {
                (EnrolmentState::Joining { ticket, run: run(&progress, is_recorded) }, progress, is_recorded)
            }
            EnrolmentPlan::Restart { progress } => {
                (EnrolmentState::Restarting(run(&progress, true)), progress, true)
            }
        };
        self.enter_state(state)?;
        Ok(Some(if is_recorded {
            self.run_step(EnrolmentStep::ALL[0], &progress)
        } else {
            EnrolmentAction::Record(self.next_action_id(), progress)
        }))
    }

    /// Waits; a waiting node may find another cause.
    fn await_instruction(&mut self, cause: WaitCause) -> NextAction {
        match &mut self.current_state {
            EnrolmentState::Waiting(present) => *present = cause,
            _ => self.enter_state(EnrolmentState::Waiting(cause))?,
        }
        Ok(Some(EnrolmentAction::AwaitInstruction(self.next_action_id())))
    }

    fn apply_step_output(&mut self, output: StepOutput) -> NextAction {
        let state = self.current_state.phase();
        let Some(run) = self.current_state.active_run_mut() else {
            return Err(RejectedInput::Unexpected { state });
        };
        // An output of another kind than the step's would be a bug in the step: it changes nothing.
        let step = match run.activity {
            CurrentActivity::RunningStep(step) if output.fits(step) => step,
            _ => return Err(RejectedInput::Unexpected { state }),
        };
        // A node or cluster other than the recorded one fails the run before anything is recorded.
        if let Err(reason) = run.apply_output(output) {
            return self.fail(reason);
        }
        // The step leaves nothing durable, or the journal has it already.
        if !step.is_recorded() || run.progress.step_mode(step) == StepMode::Rerun {
            return self.continue_after(Some(step));
        }
        // The names are recorded together with the step that determines them, so that the journal never has one
        // without the other.
        let (node_id, cluster_id) = (run.node_id.clone(), run.cluster_id);
        let progress = EnrolmentProgress { node_id, cluster_id, ..run.progress.with_step_done(step) };
        run.activity = CurrentActivity::Recording(step, progress.clone());
        Ok(Some(EnrolmentAction::Record(self.next_action_id(), progress)))
    }

    fn apply_recorded(&mut self) -> NextAction {
        let state = self.current_state.phase();
        let Some(run) = self.current_state.active_run_mut() else {
            return Err(RejectedInput::Unexpected { state });
        };
        match run.activity.clone() {
            CurrentActivity::RecordingDecision => self.continue_after(None),
            CurrentActivity::Recording(step, progress) => {
                // A step counts as done only now that this is durable.
                run.progress = progress;
                self.continue_after(Some(step))
            }
            CurrentActivity::RunningStep(_) => Err(RejectedInput::Unexpected { state }),
        }
    }

    /// Starts the step after this one; after the last one, the node is running.
    fn continue_after(&mut self, after: Option<EnrolmentStep>) -> NextAction {
        let state = self.current_state.phase();
        let Some(run) = self.current_state.active_run_mut() else {
            return Err(RejectedInput::Unexpected { state });
        };
        if let Some(step) = after.map_or(Some(EnrolmentStep::ALL[0]), EnrolmentStep::next_step) {
            run.activity = CurrentActivity::RunningStep(step);
            let progress = run.progress.clone();
            return Ok(Some(self.run_step(step, &progress)));
        }
        // All steps are done: the membership consists of what this run itself has found.
        let EnrolmentProgress { enrolment_kind, enrolment_id, .. } = run.progress;
        match (run.node_id.clone(), run.cluster_id) {
            (Some(node_id), Some(cluster_id)) => {
                self.enter_state(EnrolmentState::Running(NodeMembership {
                    node_id,
                    cluster_id,
                    enrolment_kind,
                    enrolment_id,
                }))?;
                self.pending_action = None;
                Ok(None)
            }
            // Each step was done in this run, in order, and these two steps have reported their results.
            _ => Err(RejectedInput::Unexpected { state }),
        }
    }

    fn run_step(&mut self, step: EnrolmentStep, progress: &EnrolmentProgress) -> EnrolmentAction {
        EnrolmentAction::RunStep(self.next_action_id(), step, progress.step_mode(step))
    }

    fn fail(&mut self, reason: FailureReason) -> NextAction {
        self.enter_state(EnrolmentState::Failed(reason))?;
        self.pending_action = None;
        Ok(None)
    }

    fn check_pending(&self, given: ActionId) -> Result<(), RejectedInput> {
        match self.pending_action {
            Some(pending) if pending == given => Ok(()),
            _ => Err(RejectedInput::Stale { given, state: self.current_state.phase() }),
        }
    }

    fn next_action_id(&mut self) -> ActionId {
        self.last_action_id += 1;
        let action_id = ActionId(self.last_action_id);
        self.pending_action = Some(action_id);
        action_id
    }

    /// The only place where the state changes.
    pub(super) fn enter_state(&mut self, state: EnrolmentState) -> Result<(), RejectedInput> {
        let (from, to) = (self.current_state.phase(), state.phase());
        if !from.can_lead_to(to) {
            return Err(RejectedInput::Transition { from, to });
        }
        self.phase_history.push(to);
        self.current_state = state;
        Ok(())
    }
}

//! The state machine: inputs in, actions out. It has no tasks, no clock and no IO.

use std::sync::Arc;

use thiserror::Error;

use super::failure::{EnrolmentActivity, FailureReason, StepError};
use super::plan::{EnrolmentPlan, InspectionResult, decide_plan};
use super::progress::{EnrolmentProgress, EnrolmentStep, StepMode};
use super::state::{
    CurrentActivity, EnrolmentPhase, EnrolmentRun, EnrolmentState, NodeMembership, WaitCause,
};
use crate::node::{ClusterId, NodeId};

/// Identifies an action, so that an input can name the one whose result it is. One action is pending at a
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ActionId(pub(super) u64);

/// An input of the state machine.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum EnrolmentInput {
    /// The run starts.
    Start,
    /// The inspection found this.
    Inspected(ActionId, InspectionResult),
    /// The step is done.
    StepDone(ActionId, EnrolmentStepOutput),
    /// The journal has recorded it.
    Recorded(ActionId),
    /// The action has failed.
    ActionFailed(ActionId, Arc<StepError>),
    /// The deadline has passed; the run was waiting for this.
    DeadlineExceeded(Option<Arc<str>>),
    /// The run is being stopped.
    Stop,
}

/// The result of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EnrolmentStepOutput {
    /// An address is known.
    Network,
    /// The data volume is open, and belongs to this enrolment.
    Storage,
    /// The node's name.
    Identity(NodeId),
    /// The member serves, in this cluster.
    Consensus(ClusterId),
    /// The cluster has the node's record.
    Record,
    /// The local names are set.
    Local,
}

impl EnrolmentStepOutput {
    fn step(&self) -> EnrolmentStep {
        match self {
            Self::Network => EnrolmentStep::Network,
            Self::Storage => EnrolmentStep::Storage,
            Self::Identity(_) => EnrolmentStep::Identity,
            Self::Consensus(_) => EnrolmentStep::Consensus,
            Self::Record => EnrolmentStep::Record,
            Self::Local => EnrolmentStep::Local,
        }
    }
}

/// What to do next. One action is pending at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EnrolmentAction {
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
#[non_exhaustive]
pub enum RejectedInput {
    /// It is the result of another action than the pending one.
    #[error("input {given:?} is not the result of the pending action in enrolment state {state}")]
    Stale {
        /// The action of the input.
        given: ActionId,
        /// The present state.
        state: EnrolmentPhase,
    },
    /// It can't be the result of the pending action, or the run has already started.
    #[error("unexpected input in enrolment state {state}")]
    Unexpected {
        /// The present state.
        state: EnrolmentPhase,
    },
    /// The state is final.
    #[error("enrolment state {state} is final, and accepts no input")]
    Final {
        /// The present state.
        state: EnrolmentPhase,
    },
    /// The transition is not allowed.
    #[error("internal error: enrolment can't go from {from} to {to}; its state is unchanged")]
    Transition {
        /// The present state.
        from: EnrolmentPhase,
        /// The state that was to follow.
        to: EnrolmentPhase,
    },
}

/// The state machine of one run, from [`EnrolmentState::New`] to [`EnrolmentState::Running`] or
/// [`EnrolmentState::Failed`].
#[derive(Debug)]
pub struct EnrolmentFsm {
    current_state: EnrolmentState,
    /// The pending action.
    pending_action: Option<ActionId>,
    last_action_id: u64,
    phase_history: Vec<EnrolmentPhase>,
}

impl Default for EnrolmentFsm {
    fn default() -> Self {
        Self::new()
    }
}

impl EnrolmentFsm {
    /// In the initial state.
    pub fn new() -> Self {
        Self {
            current_state: EnrolmentState::New,
            pending_action: None,
            last_action_id: 0,
            phase_history: vec![EnrolmentPhase::New],
        }
    }

    /// Its state.
    pub fn current_state(&self) -> &EnrolmentState {
        &self.current_state
    }

    /// The states that it went through, the current one last.
    pub fn phase_history(&self) -> &[EnrolmentPhase] {
        &self.phase_history
    }

    /// What is being done at the moment, or would be next.
    fn current_activity(&self) -> EnrolmentActivity {
        self.current_state.active_run().map_or(EnrolmentActivity::Inspecting, EnrolmentRun::activity)
    }

    /// Applies an input, and returns the next action, if any.
    ///
    /// # Errors
    /// [`RejectedInput`], with nothing changed.
    pub fn apply_input(&mut self, input: EnrolmentInput) -> Result<Option<EnrolmentAction>, RejectedInput> {
        use {EnrolmentInput as Input, EnrolmentPhase as Phase};

        let state = self.current_state.phase();
        match (state, input) {
            (Phase::Running | Phase::Failed, Input::Start | Input::DeadlineExceeded(_) | Input::Stop)
            | (
                Phase::Running | Phase::Failed,
                Input::Inspected(..) | Input::StepDone(..) | Input::Recorded(_) | Input::ActionFailed(..),
            ) => Err(RejectedInput::Final { state }),

            (Phase::New, Input::Start) => self.start(),
            (Phase::New | Phase::Waiting, Input::Inspected(action_id, found)) => {
                self.check_pending(action_id)?;
                self.apply_inspection(found)
            }
            (Phase::New | Phase::Waiting, Input::StepDone(..) | Input::Recorded(_))
            | (Phase::Waiting, Input::Start) => Err(RejectedInput::Unexpected { state }),

            (
                Phase::CreatingCluster | Phase::Joining | Phase::Restarting,
                Input::Start | Input::Inspected(..),
            ) => Err(RejectedInput::Unexpected { state }),
            (
                Phase::CreatingCluster | Phase::Joining | Phase::Restarting,
                Input::StepDone(action_id, outcome),
            ) => {
                self.check_pending(action_id)?;
                self.apply_step_outcome(outcome)
            }
            (Phase::CreatingCluster | Phase::Joining | Phase::Restarting, Input::Recorded(action_id)) => {
                self.check_pending(action_id)?;
                self.apply_recorded()
            }

            (
                Phase::New | Phase::Waiting | Phase::CreatingCluster | Phase::Joining | Phase::Restarting,
                Input::ActionFailed(action_id, source),
            ) => {
                self.check_pending(action_id)?;
                self.fail(FailureReason::ActionFailed { during: self.current_activity(), source })
            }
            (
                Phase::New | Phase::Waiting | Phase::CreatingCluster | Phase::Joining | Phase::Restarting,
                Input::DeadlineExceeded(condition),
            ) => self.fail(FailureReason::DeadlineExceeded { during: self.current_activity(), condition }),
            (
                Phase::New | Phase::Waiting | Phase::CreatingCluster | Phase::Joining | Phase::Restarting,
                Input::Stop,
            ) => self.fail(FailureReason::Stopped { during: self.current_activity() }),
        }
    }

    fn start(&mut self) -> Result<Option<EnrolmentAction>, RejectedInput> {
        if self.pending_action.is_some() {
            return Err(RejectedInput::Unexpected { state: self.current_state.phase() });
        }
        let action_id = self.next_action_id();
        Ok(Some(EnrolmentAction::Inspect(action_id)))
    }

    fn apply_inspection(
        &mut self,
        found: InspectionResult,
    ) -> Result<Option<EnrolmentAction>, RejectedInput> {
        let plan = match decide_plan(found) {
            Ok(plan) => plan,
            Err(reason) => return self.fail(reason),
        };
        let run = |progress: &EnrolmentProgress, is_recorded| {
            let activity = match is_recorded {
                true => CurrentActivity::RunningStep(EnrolmentStep::ALL[0]),
                false => CurrentActivity::RecordingDecision,
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
        Ok(Some(match is_recorded {
            true => self.run_step(EnrolmentStep::ALL[0], &progress),
            false => EnrolmentAction::Record(self.next_action_id(), progress),
        }))
    }

    /// Waits; a waiting node may find another cause.
    fn await_instruction(&mut self, cause: WaitCause) -> Result<Option<EnrolmentAction>, RejectedInput> {
        match &mut self.current_state {
            EnrolmentState::Waiting(present) => *present = cause,
            _ => self.enter_state(EnrolmentState::Waiting(cause))?,
        }
        Ok(Some(EnrolmentAction::AwaitInstruction(self.next_action_id())))
    }

    fn apply_step_outcome(
        &mut self,
        outcome: EnrolmentStepOutput,
    ) -> Result<Option<EnrolmentAction>, RejectedInput> {
        let state = self.current_state.phase();
        let Some(run) = self.current_state.active_run_mut() else {
            return Err(RejectedInput::Unexpected { state });
        };
        let step = match run.activity {
            CurrentActivity::RunningStep(step) if outcome.step() == step => step,
            _ => return Err(RejectedInput::Unexpected { state }),
        };
        if let Err(reason) = run.apply_outcome(outcome) {
            return self.fail(reason);
        }
        match step.is_recorded() && run.progress.step_mode(step) == StepMode::FirstRun {
            true => {
                let (node_id, cluster_id) = (run.node_id.clone(), run.cluster_id);
                let progress = EnrolmentProgress { node_id, cluster_id, ..run.progress.with_step_done(step) };
                run.activity = CurrentActivity::Recording(step, progress.clone());
                Ok(Some(EnrolmentAction::Record(self.next_action_id(), progress)))
            }
            false => self.continue_after(Some(step)),
        }
    }

    fn apply_recorded(&mut self) -> Result<Option<EnrolmentAction>, RejectedInput> {
        let state = self.current_state.phase();
        let Some(run) = self.current_state.active_run_mut() else {
            return Err(RejectedInput::Unexpected { state });
        };
        match run.activity.clone() {
            CurrentActivity::RecordingDecision => self.continue_after(None),
            CurrentActivity::Recording(step, progress) => {
                run.progress = progress;
                self.continue_after(Some(step))
            }
            CurrentActivity::RunningStep(_) => Err(RejectedInput::Unexpected { state }),
        }
    }

    /// Starts the step after this one; after the last one, the node is running.
    fn continue_after(
        &mut self,
        after: Option<EnrolmentStep>,
    ) -> Result<Option<EnrolmentAction>, RejectedInput> {
        let state = self.current_state.phase();
        let Some(run) = self.current_state.active_run_mut() else {
            return Err(RejectedInput::Unexpected { state });
        };
        if let Some(step) = after.map_or(Some(EnrolmentStep::ALL[0]), EnrolmentStep::next_step) {
            run.activity = CurrentActivity::RunningStep(step);
            let progress = run.progress.clone();
            return Ok(Some(self.run_step(step, &progress)));
        }
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

    fn fail(&mut self, reason: FailureReason) -> Result<Option<EnrolmentAction>, RejectedInput> {
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

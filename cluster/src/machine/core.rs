//! The machine itself: inputs in, actions out. It has no tasks, no clock and no IO.

use std::sync::Arc;

use thiserror::Error;

use super::decide::{Found, Plan, decide};
use super::reason::{Activity, Reason, StepError};
use super::state::{Doing, Kind, Membership, State, Work};
use super::step::{Mode, Progress, Step};
use crate::node::{ClusterId, NodeId};

/// Which action an input answers. Each action has its own, and one is answered at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sequence(pub(super) u64);

/// What happens to the machine.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum Input {
    /// The run begins.
    Begin,
    /// This was found.
    Examined(Sequence, Found),
    /// The step is done.
    Done(Sequence, Outcome),
    /// The journal has it.
    Recorded(Sequence),
    /// The action has failed.
    Failed(Sequence, Arc<StepError>),
    /// The time is up, and this kept it waiting.
    Deadline(Option<Arc<str>>),
    /// The run is being stopped.
    Stop,
}

/// What a step has brought about.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum Outcome {
    /// There is an address.
    Network,
    /// The data volume is open, and this enrolment's.
    Storage,
    /// The node is known by this.
    Identity(NodeId),
    /// The member serves, in this cluster.
    Consensus(ClusterId),
    /// The cluster has the node's record.
    Record,
    /// The system knows its name.
    Local,
}

impl Outcome {
    fn step(&self) -> Step {
        match self {
            Self::Network => Step::Network,
            Self::Storage => Step::Storage,
            Self::Identity(_) => Step::Identity,
            Self::Consensus(_) => Step::Consensus,
            Self::Record => Step::Record,
            Self::Local => Step::Local,
        }
    }
}

/// What is to be done now. There is one at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum Action {
    /// See what is there: [`Input::Examined`].
    Examine(Sequence),
    /// Record this, durably: [`Input::Recorded`].
    Record(Sequence, Progress),
    /// Do this: [`Input::Done`].
    Perform(Sequence, Step, Mode),
}

/// An input that means nothing now. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Rejected {
    /// It answers another action than the one that is under way.
    #[error("input {given:?} answers no action that is under way in state {state}")]
    Stale {
        /// Which it answers.
        given: Sequence,
        /// In which state.
        state: Kind,
    },
    /// It is no answer to what is under way, or the run has begun already.
    #[error("state {state} expects something else")]
    Unexpected {
        /// In which state.
        state: Kind,
    },
    /// The state is final.
    #[error("state {state} is final")]
    Final {
        /// Which it is.
        state: Kind,
    },
    /// No such state follows.
    #[error("state {from} does not lead to {to}")]
    Transition {
        /// The state.
        from: Kind,
        /// What was to follow.
        to: Kind,
    },
}

/// One run's way from [`State::New`] to [`State::Running`] or [`State::Failed`].
#[derive(Debug)]
pub struct Machine {
    state: State,
    /// The action that is under way.
    awaited: Option<Sequence>,
    last: u64,
    history: Vec<Kind>,
}

impl Default for Machine {
    fn default() -> Self {
        Self::new()
    }
}

impl Machine {
    /// At its beginning.
    pub fn new() -> Self {
        Self { state: State::New, awaited: None, last: 0, history: vec![Kind::New] }
    }

    /// Its state.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The states that it went through, the present one last.
    pub fn history(&self) -> &[Kind] {
        &self.history
    }

    /// What is being done at the moment, or would be next.
    fn activity(&self) -> Activity {
        self.state.work().map_or(Activity::Examining, Work::activity)
    }

    /// Takes an input, and says what is to be done now, if anything is.
    ///
    /// # Errors
    /// [`Rejected`]: then it changed nothing.
    pub fn apply(&mut self, input: Input) -> Result<Option<Action>, Rejected> {
        let state = self.state.kind();
        match (state, input) {
            (Kind::Running | Kind::Failed, Input::Begin | Input::Deadline(_) | Input::Stop)
            | (
                Kind::Running | Kind::Failed,
                Input::Examined(..) | Input::Done(..) | Input::Recorded(_) | Input::Failed(..),
            ) => Err(Rejected::Final { state }),

            (Kind::New, Input::Begin) => self.begin(),
            (Kind::New, Input::Examined(sequence, found)) => {
                self.expect(sequence)?;
                self.examined(found)
            }
            (Kind::New, Input::Done(..) | Input::Recorded(_)) => Err(Rejected::Unexpected { state }),

            (
                Kind::CreatingCluster | Kind::Joining | Kind::Restarting,
                Input::Begin | Input::Examined(..),
            ) => Err(Rejected::Unexpected { state }),
            (Kind::CreatingCluster | Kind::Joining | Kind::Restarting, Input::Done(sequence, outcome)) => {
                self.expect(sequence)?;
                self.done(outcome)
            }
            (Kind::CreatingCluster | Kind::Joining | Kind::Restarting, Input::Recorded(sequence)) => {
                self.expect(sequence)?;
                self.recorded()
            }

            (
                Kind::New | Kind::CreatingCluster | Kind::Joining | Kind::Restarting,
                Input::Failed(sequence, source),
            ) => {
                self.expect(sequence)?;
                self.fail(Reason::Step { during: self.activity(), source })
            }
            (
                Kind::New | Kind::CreatingCluster | Kind::Joining | Kind::Restarting,
                Input::Deadline(trouble),
            ) => self.fail(Reason::Deadline { during: self.activity(), trouble }),
            (Kind::New | Kind::CreatingCluster | Kind::Joining | Kind::Restarting, Input::Stop) => {
                self.fail(Reason::Stopped { during: self.activity() })
            }
        }
    }

    fn begin(&mut self) -> Result<Option<Action>, Rejected> {
        if self.awaited.is_some() {
            return Err(Rejected::Unexpected { state: self.state.kind() });
        }
        let sequence = self.await_next();
        Ok(Some(Action::Examine(sequence)))
    }

    fn examined(&mut self, found: Found) -> Result<Option<Action>, Rejected> {
        let plan = match decide(found) {
            Ok(plan) => plan,
            Err(reason) => return self.fail(reason),
        };
        let (progress, is_recorded) = (plan.progress().clone(), plan.is_recorded());
        let doing = if is_recorded { Doing::Performing(Step::ALL[0]) } else { Doing::Deciding };
        let work = Work::new(progress.clone(), doing);
        self.enter(match plan {
            Plan::Create { .. } => State::CreatingCluster(work),
            Plan::Join { ticket, .. } => State::Joining { ticket, work },
            Plan::Restart { .. } => State::Restarting(work),
        })?;
        Ok(Some(match is_recorded {
            true => self.perform(Step::ALL[0], &progress),
            false => Action::Record(self.await_next(), progress),
        }))
    }

    fn done(&mut self, outcome: Outcome) -> Result<Option<Action>, Rejected> {
        let state = self.state.kind();
        let Some(work) = self.state.work_mut() else { return Err(Rejected::Unexpected { state }) };
        let step = match work.doing {
            Doing::Performing(step) if outcome.step() == step => step,
            _ => return Err(Rejected::Unexpected { state }),
        };
        if let Err(reason) = work.see(outcome) {
            return self.fail(reason);
        }
        match step.is_recorded() && work.progress.mode(step) == Mode::Make {
            true => {
                let (node, cluster) = (work.node.clone(), work.cluster);
                let progress = Progress { node, cluster, ..work.progress.after(step) };
                work.doing = Doing::Recording(step, progress.clone());
                Ok(Some(Action::Record(self.await_next(), progress)))
            }
            false => self.go_on(Some(step)),
        }
    }

    fn recorded(&mut self) -> Result<Option<Action>, Rejected> {
        let state = self.state.kind();
        let Some(work) = self.state.work_mut() else { return Err(Rejected::Unexpected { state }) };
        match work.doing.clone() {
            Doing::Deciding => self.go_on(None),
            Doing::Recording(step, progress) => {
                work.progress = progress;
                self.go_on(Some(step))
            }
            Doing::Performing(_) => Err(Rejected::Unexpected { state }),
        }
    }

    /// Begins what follows this step; after the last one, it runs.
    fn go_on(&mut self, after: Option<Step>) -> Result<Option<Action>, Rejected> {
        let state = self.state.kind();
        let Some(work) = self.state.work_mut() else { return Err(Rejected::Unexpected { state }) };
        if let Some(step) = after.map_or(Some(Step::ALL[0]), Step::following) {
            work.doing = Doing::Performing(step);
            let progress = work.progress.clone();
            return Ok(Some(self.perform(step, &progress)));
        }
        let Progress { flow, enrolment, .. } = work.progress;
        match (work.node.clone(), work.cluster) {
            (Some(node), Some(cluster)) => {
                self.enter(State::Running(Membership { node, cluster, flow, enrolment }))?;
                self.awaited = None;
                Ok(None)
            }
            // Each step was done in this run, in order, and these two have told.
            _ => Err(Rejected::Unexpected { state }),
        }
    }

    fn perform(&mut self, step: Step, progress: &Progress) -> Action {
        Action::Perform(self.await_next(), step, progress.mode(step))
    }

    fn fail(&mut self, reason: Reason) -> Result<Option<Action>, Rejected> {
        self.enter(State::Failed(reason))?;
        self.awaited = None;
        Ok(None)
    }

    fn expect(&self, given: Sequence) -> Result<(), Rejected> {
        match self.awaited {
            Some(awaited) if awaited == given => Ok(()),
            _ => Err(Rejected::Stale { given, state: self.state.kind() }),
        }
    }

    fn await_next(&mut self) -> Sequence {
        self.last += 1;
        let sequence = Sequence(self.last);
        self.awaited = Some(sequence);
        sequence
    }

    /// The one place where the state becomes another.
    pub(super) fn enter(&mut self, state: State) -> Result<(), Rejected> {
        let (from, to) = (self.state.kind(), state.kind());
        if !from.leads_to(to) {
            return Err(Rejected::Transition { from, to });
        }
        self.history.push(to);
        self.state = state;
        Ok(())
    }
}

//! Drives the machine: does what it asks for, one thing at a time, and tells it what came of it.

use std::net::IpAddr;
use std::panic;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nodekeel_localstorage::pki::Certificate;
use nodekeel_supervisor::{Cancelled, Context, Failure};
use thiserror::Error;
use tokio::time::{Instant, sleep_until};
use tokio_util::task::TaskTracker;

use super::book::Book;
use super::cluster::{Published, Shared};
use super::core::{Action, Input, Machine};
use super::reason::Reason;
use super::state::{Kind, State};
use crate::consensus::StatusWatch;

/// One run, with all that it has made so far.
pub(super) struct Drive {
    pub(super) shared: Arc<Shared>,
    pub(super) ctx: Context,
    machine: Mutex<Machine>,
    made: Mutex<Made>,
    /// What is at work on threads of its own.
    threads: TaskTracker,
}

/// What the steps of this run have made for those after them.
#[derive(Debug, Default)]
pub(super) struct Made {
    pub(super) book: Option<Book>,
    pub(super) certificate: Option<Certificate>,
    pub(super) member: Option<StatusWatch>,
    /// Where that is reached.
    pub(super) address: Option<IpAddr>,
    /// What a step waits for.
    trouble: Option<Arc<str>>,
}

/// One run.
pub(super) async fn run(shared: Arc<Shared>, ctx: Context) -> Result<(), Failure> {
    let drive = Drive {
        shared,
        ctx,
        machine: Mutex::new(Machine::new()),
        made: Mutex::new(Made::default()),
        threads: TaskTracker::new(),
    };
    drive.publish();
    let end = End(&drive);
    drive.to_the_end().await;
    drop(end);
    match drive.state() {
        State::Running(_) => {
            let _ended = Ended(&drive);
            drive.ctx.ready()?;
            tokio::select! {
                biased;
                cancelled = drive.ctx.cancelled() => Err(cancelled.into()),
                moved = drive.moved() => Err(moved.into()),
            }
        }
        State::Failed(Reason::Stopped { .. }) => Err(Cancelled.into()),
        State::Failed(reason) => Err(reason.into()),
        other => Err(Failure::new(format!("the machine has stopped in state {}", other.kind()))),
    }
}

/// A node that runs has another address: its member goes there with the next run.
#[derive(Debug, Error)]
#[error("the node's address was {from} and is {to} now: its member is started again there")]
pub(super) struct Moved {
    pub(super) from: IpAddr,
    pub(super) to: IpAddr,
}

/// A run that is dropped on its way, or panics, has failed, and whoever waits for it hears of that.
struct End<'a>(&'a Drive);

impl Drop for End<'_> {
    fn drop(&mut self) {
        if !self.0.state().kind().is_final() {
            self.0.apply(Input::Stop);
        }
    }
}

/// A run that was in its cluster and ends, is dropped or panics is there no more, and whoever looks hears of that. The
/// machine has nothing to do with it: for that, the run was over when it was there.
struct Ended<'a>(&'a Drive);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let mut history = self.0.machine().history().to_vec();
        history.push(Kind::Failed);
        self.0.shared.publish(Published { state: State::Failed(Reason::Ended), history, member: None });
    }
}

impl Drive {
    pub(super) fn state(&self) -> State {
        self.machine().state().clone()
    }

    /// A panic in another thread leaves it whole: each input is one step.
    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn made(&self) -> MutexGuard<'_, Made> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says what it is that takes long; none where nothing is known.
    pub(super) fn trouble(&self, trouble: Option<String>) {
        let mut made = self.made();
        if made.trouble.as_deref() == trouble.as_deref() {
            return;
        }
        if let Some(trouble) = &trouble {
            tracing::warn!("the node's way into its cluster is held up: {trouble}");
        }
        made.trouble = trouble.map(Into::into);
    }

    /// Runs what blocks on a thread of its own, where it logs as the run does. Its panic is the run's.
    pub(super) async fn blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let span = tracing::Span::current();
        match self.threads.spawn_blocking(move || span.in_scope(work)).await {
            Ok(done) => done,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => panic::resume_unwind(panic),
                // The runtime is going down, and this future with it.
                Err(_) => std::future::pending().await,
            },
        }
    }

    fn publish(&self) {
        let machine = self.machine();
        let (state, history) = (machine.state().clone(), machine.history().to_vec());
        drop(machine);
        let member = self.made().member.clone();
        self.shared.publish(Published { state, history, member });
    }

    fn apply(&self, input: Input) -> Option<Action> {
        let mut machine = self.machine();
        let before = machine.state().kind();
        let action = machine.apply(input);
        let after = machine.state().clone();
        drop(machine);
        match &after {
            now if now.kind() == before => {}
            State::Failed(reason) => {
                tracing::error!(from = %before, "the node is in no cluster: {}", Failure::new(reason.clone()));
            }
            State::Running(membership) => {
                tracing::info!(node = %membership.node, cluster = %membership.cluster, "the node is in its cluster");
            }
            now => {
                tracing::info!(from = %before, to = %now.kind(), "the node is on its way into its cluster")
            }
        }
        self.publish();
        action.unwrap_or_else(|rejected| {
            // Inputs are made one at a time, as answers: this would be a bug, and the state is as it was.
            tracing::error!("{rejected}");
            None
        })
    }

    /// Does what there is to do, until there is nothing more.
    async fn to_the_end(&self) {
        let deadline = Instant::now().checked_add(self.shared.settings.deadline);
        let mut next = self.apply(Input::Begin);
        while let Some(action) = next {
            let input = tokio::select! {
                biased;
                input = self.perform(action) => input,
                Cancelled = self.ctx.cancelled() => Input::Stop,
                () = until(deadline) => Input::Deadline(self.made().trouble.clone()),
            };
            // Everybody hears of it at once.
            next = self.apply(input);
        }
        // What is at work on a thread can't be called back. It is such that it may be done again; the next run, which
        // would find the journal in use, must not meet it.
        self.threads.close();
        self.threads.wait().await;
    }

    async fn perform(&self, action: Action) -> Input {
        match action {
            Action::Examine(sequence) => match self.examine().await {
                Ok(found) => Input::Examined(sequence, found),
                Err(error) => Input::Failed(sequence, Arc::new(error)),
            },
            Action::Record(sequence, progress) => match self.record(progress).await {
                Ok(()) => Input::Recorded(sequence),
                Err(error) => Input::Failed(sequence, Arc::new(error)),
            },
            Action::Perform(sequence, step, mode) => {
                (self.shared.hook)(&format!("begin {step}"));
                let outcome = self.step(step, mode).await;
                self.trouble(None);
                (self.shared.hook)(&format!("end {step}"));
                match outcome {
                    Ok(outcome) => Input::Done(sequence, outcome),
                    Err(error) => Input::Failed(sequence, Arc::new(error)),
                }
            }
        }
    }
}

/// For ever, where that is beyond what a clock can tell.
async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

//! The journal of the enrolment: what it knows, and what it is told.

use std::io;
use std::sync::Arc;

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::journal::{Journal, Point, Run, Steps, StepsError};
use rustix::rand::{GetRandomFlags, getrandom};

use super::decide::Found;
use super::reason::StepError;
use super::step::{EnrolmentId, Flow, Progress, Step};
use crate::node::Enrolment;

/// The journal's name, in the directory that it is given.
const NAME: &str = "enrolment";

/// Hears of each moment at which a test may kill the run.
pub(super) type Hook = Arc<dyn Fn(&str) + Send + Sync>;

/// The journal while a run has it open: nobody else has.
#[derive(Debug)]
pub(super) enum Book {
    /// Nothing was recorded.
    Fresh(Journal),
    /// An attempt.
    Begun(Box<Run>),
}

impl Book {
    /// Opens it, and says what it knows; reads the enrolment configuration, which has a say unless all is done. It blocks.
    pub(super) fn open(dir: &Dir, enrolment: &Enrolment, hook: &Hook) -> Result<(Self, Found), StepError> {
        let journal = Journal::open(dir, NAME).map_err(StepError::Journal)?;
        if journal.state().is_none() {
            let ticket = enrolment.load().map_err(StepError::Enrolment)?;
            return Ok((Self::Fresh(journal), Found::Fresh { ticket, enrolment: random()? }));
        }
        let path = journal.path();
        let run = steps()?.start_with(journal, b"", listener(hook)).map_err(StepError::Steps)?;
        let next = run.step().and_then(Step::recorded);
        let progress =
            Progress::parse(run.state(), next).map_err(|source| StepError::Progress { path, source })?;
        let found = match next {
            None => {
                tell_of_another_ticket(progress.flow(), enrolment);
                Found::Complete { progress }
            }
            Some(_) => Found::Begun { progress, ticket: enrolment.load().map_err(StepError::Enrolment)? },
        };
        Ok((Self::Begun(Box::new(run)), found))
    }

    /// Records that one more step is done, or the decision. It blocks.
    pub(super) fn record(self, progress: &Progress, hook: &Hook) -> Result<Self, StepError> {
        let state = progress.encode();
        match self {
            Self::Fresh(journal) => {
                let run = steps()?.start_with(journal, &state, listener(hook)).map_err(StepError::Steps)?;
                Ok(Self::Begun(Box::new(run)))
            }
            Self::Begun(mut run) => {
                run.done(state).map_err(StepError::Steps)?;
                Ok(Self::Begun(run))
            }
        }
    }
}

/// Whoever gives a ticket to a node that is in its cluster expects it to join by it, and has to be told that it won't. One
/// that can't be read is none of that.
fn tell_of_another_ticket(flow: Flow, enrolment: &Enrolment) {
    if let Ok(Some(ticket)) = enrolment.load()
        && flow != Flow::Join(ticket.digest())
    {
        tracing::warn!(
            "the ticket for {} has no say: this node is in a cluster already, and did not join by it; remove it",
            ticket.node()
        );
    }
}

fn steps() -> Result<Steps, StepError> {
    // The names are fixed, so the error is impossible; it needs no panic to say so.
    let invalid = |error| StepError::Random(io::Error::other(error));
    Steps::try_new(Step::RECORDED.map(Step::name)).map_err(invalid)
}

fn listener(hook: &Hook) -> impl FnMut(Point<'_>) + Send + use<> {
    let hook = Arc::clone(hook);
    move |point| match point {
        Point::Before(step) => hook(&format!("before {step}")),
        Point::After(step) => hook(&format!("after {step}")),
        Point::Committing(next) => hook(&format!("committing, next {}", next.unwrap_or("nothing"))),
        Point::Committed(next) => hook(&format!("committed, next {}", next.unwrap_or("nothing"))),
        _ => {}
    }
}

/// Forgets what a node has begun, or that it is in a cluster, and tells whether there was anything. The next run decides
/// anew; it still destroys nothing, and refuses a data volume that holds anything unless
/// [`Settings::erase`](super::Settings::erase) gives that up.
///
/// This is for an operator who knows what he does: the node's place in the cluster stays in the cluster, as a member
/// that does not answer, until it is removed there. It blocks.
///
/// # Errors
/// [`StepsError::Journal`]: it is open elsewhere, damaged, or can't be removed.
pub fn forget(dir: &Dir) -> Result<bool, StepsError> {
    let journal = Journal::open(dir, NAME).map_err(StepsError::Journal)?;
    let was = journal.state().is_some();
    journal.remove().map_err(StepsError::Journal)?;
    Ok(was)
}

fn random() -> Result<EnrolmentId, StepError> {
    let mut bytes = [0; 16];
    // Up to 256 bytes come at once or not at all. *Source:* getrandom(2).
    getrandom(&mut bytes, GetRandomFlags::empty()).map_err(|error| StepError::Random(error.into()))?;
    Ok(EnrolmentId(bytes))
}

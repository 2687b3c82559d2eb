//! The journal of the enrolment, and what it records.

use std::io;
use std::sync::Arc;

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::step_journal::{StepEvent, StepJournal, StepList, StepListError, StepRun};
use rustix::rand::{GetRandomFlags, getrandom};

use super::failure::StepError;
use super::plan::InspectionResult;
use super::progress::{EnrolmentId, EnrolmentKind, EnrolmentProgress, EnrolmentStep};
use crate::node::EnrolmentSources;

/// The journal's name in its directory.
const JOURNAL_NAME: &str = "enrolment";

/// Called at each point at which a test may kill the run.
pub(super) type TestHook = Arc<dyn Fn(&str) + Send + Sync>;

/// The journal, opened exclusively by a run.
#[derive(Debug)]
pub(super) enum EnrolmentJournal {
    /// Nothing was recorded.
    Empty(StepJournal),
    /// An attempt in progress.
    InProgress(Box<StepRun>),
}

impl EnrolmentJournal {
    /// Opens the journal, and reads it and, unless all steps are done, the enrolment configuration. It
    /// blocks.
    pub(super) fn open(
        dir: &Dir,
        enrolment: &EnrolmentSources,
        hook: &TestHook,
    ) -> Result<(Self, InspectionResult), StepError> {
        let journal = StepJournal::open(dir, JOURNAL_NAME).map_err(StepError::Journal)?;
        if journal.committed_state().is_none() {
            let ticket = enrolment.load_ticket().map_err(StepError::EnrolmentConfig)?;
            return Ok((
                Self::Empty(journal),
                InspectionResult::Fresh { ticket, enrolment_id: random_enrolment_id()? },
            ));
        }
        let path = journal.path();
        let run = recorded_steps()?
            .start_run_with_hook(journal, b"", step_listener(hook))
            .map_err(StepError::Steps)?;
        let next = run.current_step().and_then(EnrolmentStep::from_recorded_name);
        let progress = EnrolmentProgress::from_journal(run.recorded_state(), next)
            .map_err(|source| StepError::Progress { path, source })?;
        let found = match next {
            None => {
                warn_of_unused_ticket(progress.enrolment_kind(), enrolment);
                InspectionResult::Complete { progress }
            }
            Some(_) => InspectionResult::InProgress {
                progress,
                ticket: enrolment.load_ticket().map_err(StepError::EnrolmentConfig)?,
            },
        };
        Ok((Self::InProgress(Box::new(run)), found))
    }

    /// Records the decision, or one more completed step. It blocks.
    pub(super) fn record_progress(
        self,
        progress: &EnrolmentProgress,
        hook: &TestHook,
    ) -> Result<Self, StepError> {
        let state = progress.to_bytes();
        match self {
            Self::Empty(journal) => {
                let run = recorded_steps()?
                    .start_run_with_hook(journal, &state, step_listener(hook))
                    .map_err(StepError::Steps)?;
                Ok(Self::InProgress(Box::new(run)))
            }
            Self::InProgress(mut run) => {
                run.complete_step(state).map_err(StepError::Steps)?;
                Ok(Self::InProgress(run))
            }
        }
    }
}

/// Warns of a ticket on a node that is in its cluster: an operator who put it there expects the node to join
/// by it. A ticket that can't be read causes no warning.
fn warn_of_unused_ticket(enrolment_kind: EnrolmentKind, enrolment: &EnrolmentSources) {
    if let Ok(Some(ticket)) = enrolment.load_ticket()
        && enrolment_kind != EnrolmentKind::Join(ticket.digest())
    {
        tracing::warn!(
            "ignoring the ticket for {}: this node is already in a cluster, and did not join by this ticket; \
             remove it",
            ticket.node_id()
        );
    }
}

fn recorded_steps() -> Result<StepList, StepError> {
    // The names are fixed, so the error is impossible; no panic is needed for it.
    let invalid = |error| StepError::Random(io::Error::other(error));
    StepList::try_new(EnrolmentStep::RECORDED.map(EnrolmentStep::name)).map_err(invalid)
}

fn step_listener(hook: &TestHook) -> impl FnMut(StepEvent<'_>) + Send + use<> {
    let hook = Arc::clone(hook);
    move |point| match point {
        StepEvent::Before(step) => hook(&format!("before {step}")),
        StepEvent::After(step) => hook(&format!("after {step}")),
        StepEvent::Committing(next) => hook(&format!("committing, next {}", next.unwrap_or("nothing"))),
        StepEvent::Committed(next) => hook(&format!("committed, next {}", next.unwrap_or("nothing"))),
        _ => {}
    }
}

/// Resets the enrolment of a node: forgets an attempt in progress, or the membership in a cluster. Returns
/// whether anything was recorded. The next run decides anew; it still destroys nothing, and rejects a data
/// volume that holds anything unless [`EnrolmentSettings::erase`](super::EnrolmentSettings::erase) permits
/// its erasure.
///
/// Only an operator should call this: the node's member remains in the cluster, and does not answer, until it
/// is removed there. It blocks.
///
/// # Errors
/// [`StepListError::Journal`]: the journal is open elsewhere, damaged, or can't be removed.
pub fn reset_enrolment(dir: &Dir) -> Result<bool, StepListError> {
    let journal = StepJournal::open(dir, JOURNAL_NAME).map_err(StepListError::Journal)?;
    let was = journal.committed_state().is_some();
    journal.remove_files().map_err(StepListError::Journal)?;
    Ok(was)
}

fn random_enrolment_id() -> Result<EnrolmentId, StepError> {
    let mut bytes = [0; 16];
    // Up to 256 bytes are returned at once or not at all. *Source:* getrandom(2).
    getrandom(&mut bytes, GetRandomFlags::empty()).map_err(|error| StepError::Random(error.into()))?;
    Ok(EnrolmentId(bytes))
}

//! The journal of the enrolment, and what it records.

use std::io;
use std::sync::Arc;

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::step_journal::{
    JournalError, StepEvent, StepJournal, StepList, StepListError, StepRun,
};
use rustix::rand::{GetRandomFlags, getrandom};

use super::bootstrap_record::{self, BootstrapRecord};
use super::failure::StepError;
use super::plan::{BootstrapPermission, InspectionResult};
use super::progress::{EnrolmentId, EnrolmentProgress};
use super::step::EnrolmentStep;
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
    /// Opens the journal, and reads it and, unless all steps are done, the enrolment configuration; and the
    /// permission to bootstrap only for a node with neither. It blocks.
    pub(super) fn open(
        dir: &Dir,
        enrolment: &EnrolmentSources,
        bootstrap: impl FnOnce() -> Result<BootstrapPermission, StepError>,
        hook: &TestHook,
    ) -> Result<(Self, InspectionResult), StepError> {
        let journal = StepJournal::open(dir, JOURNAL_NAME).map_err(StepError::Journal)?;
        // Nothing is decided yet.
        if journal.committed_state().is_none() {
            let ticket = enrolment.load_ticket().map_err(StepError::EnrolmentConfig)?;
            let bootstrap = match &ticket {
                // A ticket takes precedence, so the record of a bootstrap, whose disk may not be mounted, is
                // not needed.
                Some(_) => BootstrapPermission::NotGranted,
                None => bootstrap()?,
            };
            return Ok((
                Self::Empty(journal),
                InspectionResult::Fresh { ticket, enrolment_id: random_enrolment_id()?, bootstrap },
            ));
        }
        let path = journal.path();
        // The run keeps the state that is recorded: the empty one given here is only for a new journal.
        let run = recorded_steps()?
            .start_run_with_hook(journal, b"", step_listener(hook))
            .map_err(StepError::Steps)?;
        let completed = run.completed_steps().iter();
        // `StepList` has rejected names that this release does not know, so that none is dropped here.
        let completed = completed.filter_map(|name| EnrolmentStep::from_recorded_name(name)).collect();
        let progress = EnrolmentProgress::from_journal(run.recorded_state(), completed)
            .map_err(|source| StepError::Progress { path, source })?;
        // A node that was in its cluster needs no ticket, and an unreadable one must not stop it.
        let found = if progress.is_enrolled() {
            InspectionResult::Complete { progress }
        } else {
            InspectionResult::InProgress {
                progress,
                ticket: enrolment.load_ticket().map_err(StepError::EnrolmentConfig)?,
            }
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
            // The decision starts the journal; each later record completes a step.
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

/// Resets the enrolment of a node: forgets an attempt in progress, or the membership in a cluster, and removes a
/// [`BootstrapRecord`] in this directory; one elsewhere stays. Returns whether anything was recorded.
///
/// The next run decides anew. It still destroys nothing, and rejects a data volume that holds anything unless
/// [`EnrolmentSettings::erase`](super::EnrolmentSettings::erase) permits its erasure.
///
/// Only an operator should call this: the node's member remains in the cluster, and does not answer, until it
/// is removed there. It blocks.
///
/// # Errors
/// [`StepListError::Journal`]: the journal is open elsewhere, damaged, or can't be removed.
pub fn reset_enrolment(dir: &Dir) -> Result<bool, StepListError> {
    let journal = StepJournal::open(dir, JOURNAL_NAME).map_err(StepListError::Journal)?;
    let was = journal.committed_state().is_some();
    // The journal first: a reset that is killed in between leaves the record, which permits no bootstrap, and
    // the next reset removes it.
    journal.remove_files().map_err(StepListError::Journal)?;
    let path = dir.path().join(bootstrap_record::DEFAULT_NAME);
    BootstrapRecord::new(&path)
        .remove()
        .map_err(|error| JournalError::Remove { path, source: io::Error::other(error) })
        .map_err(StepListError::Journal)?;
    Ok(was)
}

fn random_enrolment_id() -> Result<EnrolmentId, StepError> {
    let mut bytes = [0; 16];
    // Up to 256 bytes are returned at once or not at all. *Source:* getrandom(2).
    getrandom(&mut bytes, GetRandomFlags::empty()).map_err(|error| StepError::Random(error.into()))?;
    Ok(EnrolmentId(bytes))
}

//! Step lists that resume after a kill.

use std::fmt;
use std::path::PathBuf;

use super::{JournalError, StepJournal};

/// A list of named steps.
///
/// Each step must be repeatable after it was completed or started: it is repeated if the process is killed
/// before the journal records it.
///
/// The journal records the steps by their names, so that a later release may add steps anywhere, also to a
/// run that an earlier release has completed: a run resumes with the steps that the journal does not record
/// as completed, in the order of the list. A name is never reused for another step. A journal with a step
/// that is missing from the list is rejected: a newer release has written it, and only that release knows
/// what the step did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepList {
    step_names: Vec<String>,
}

/// A defect of a step list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidStepList {
    /// The list is empty or has more than 1,000 steps.
    #[error("step list has {0} steps: must be 1 to 1,000")]
    Count(usize),
    /// A name is empty or longer than 255 bytes.
    #[error("step name {0:?} must have 1 to 255 bytes")]
    Name(String),
    /// Two steps have the same name.
    #[error("duplicate step name {0:?}")]
    Duplicate(String),
}

/// A failure to run a step list.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepListError {
    /// The journal cannot be read or written.
    #[error("can't read or write the step journal")]
    Journal(#[source] JournalError),
    /// The journal records a step that is missing from the list: a newer release has written it. Nothing was
    /// changed: run that release.
    #[error(
        "step journal {} was written by a newer release (step {step:?} is unknown): run that release",
        .path.display()
    )]
    UnknownStep {
        /// The file of the journal.
        path: PathBuf,
        /// The first unknown step.
        step: String,
    },
    /// The journal is complete, but its content is not step progress. Nothing was changed.
    #[error(
        "step journal {} holds other data than the progress of steps; nothing was changed: restore its files",
        .path.display()
    )]
    NotAStepRecord {
        /// The journal's file.
        path: PathBuf,
    },
    /// All steps are complete.
    #[error("all steps are already complete, so no step can start")]
    NoStepLeft,
}

/// An event of a run, at which a test can kill the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StepEvent<'a> {
    /// The step is about to run.
    Before(&'a str),
    /// The step is complete, but not recorded yet.
    After(&'a str),
    /// The journal is about to record the next step; none after the last.
    Committing(Option<&'a str>),
    /// The journal has recorded the next step.
    Committed(Option<&'a str>),
}

type StepHook = Box<dyn FnMut(StepEvent<'_>) + Send>;

impl StepList {
    /// A list of steps with these names.
    ///
    /// # Errors
    /// [`InvalidStepList`].
    pub fn try_new<T: Into<String>>(names: impl IntoIterator<Item = T>) -> Result<Self, InvalidStepList> {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        // A record holds the count in two bytes and each length in one: these limits fit into both.
        if !(1..=1000).contains(&names.len()) {
            return Err(InvalidStepList::Count(names.len()));
        }
        for (index, name) in names.iter().enumerate() {
            if !(1..=255).contains(&name.len()) {
                return Err(InvalidStepList::Name(name.clone()));
            }
            if names[..index].contains(name) {
                return Err(InvalidStepList::Duplicate(name.clone()));
            }
        }
        Ok(Self { step_names: names })
    }

    /// The names of the steps.
    pub fn step_names(&self) -> &[String] {
        &self.step_names
    }

    /// Starts at the first step with this state. If the journal has recorded progress, resumes with the
    /// recorded state at the first step that it does not record as completed.
    ///
    /// # Errors
    /// [`StepListError::UnknownStep`] and [`StepListError::NotAStepRecord`], with nothing changed;
    /// [`StepListError::Journal`].
    pub fn start_run(&self, journal: StepJournal, state: &[u8]) -> Result<StepRun, StepListError> {
        self.start_run_with_hook(journal, state, |_| {})
    }

    /// Like [`start_run`](Self::start_run), with a hook that receives each [`StepEvent`].
    ///
    /// # Errors
    /// Those of [`start_run`](Self::start_run).
    pub fn start_run_with_hook(
        &self,
        journal: StepJournal,
        state: &[u8],
        hook: impl FnMut(StepEvent<'_>) + Send + 'static,
    ) -> Result<StepRun, StepListError> {
        let path = journal.path();
        let recorded = match journal.committed_state() {
            None => None,
            Some(content) => Some(
                StepProgress::from_bytes(content)
                    .ok_or(StepListError::NotAStepRecord { path: path.clone() })?,
            ),
        };
        let is_resumed = recorded.is_some();
        let progress = match recorded {
            Some(recorded) => {
                recorded.continue_with(self).map_err(|step| StepListError::UnknownStep { path, step })?
            }
            None => StepProgress { names: self.step_names.clone(), next: 0, state: state.to_vec() },
        };
        let mut run = StepRun { journal, progress, is_resumed, hook: Box::new(hook) };
        if is_resumed {
            run.report_next_step();
        } else {
            // Recorded before the first step: a run that is killed in it resumes with this state.
            run.commit_progress(0, state.to_vec())?;
        }
        Ok(run)
    }
}

/// A run of a step list.
///
/// # Cancel safety
/// A run may be dropped at any point, and so may a future that holds it: a later run repeats the unrecorded
/// step.
pub struct StepRun {
    journal: StepJournal,
    progress: StepProgress,
    is_resumed: bool,
    hook: StepHook,
}

impl StepRun {
    /// The current step; none after the last.
    pub fn current_step(&self) -> Option<&str> {
        self.progress.names.get(self.progress.next).map(String::as_str)
    }

    /// The steps that the journal records as completed, in the order of their completion.
    pub fn completed_steps(&self) -> &[String] {
        &self.progress.names[..self.progress.next]
    }

    /// The state recorded by the last step, or by the start.
    pub fn recorded_state(&self) -> &[u8] {
        &self.progress.state
    }

    /// Returns whether the journal had recorded progress at the start.
    pub fn is_resumed(&self) -> bool {
        self.is_resumed
    }

    /// Records the current step as complete: the next one starts with this state.
    ///
    /// # Errors
    /// [`StepListError::Journal`], after which the current step is unchanged: call this again, or repeat the
    /// step. [`StepListError::NoStepLeft`] after the last.
    pub fn complete_step(&mut self, state: impl Into<Vec<u8>>) -> Result<(), StepListError> {
        let name = self.progress.names.get(self.progress.next).ok_or(StepListError::NoStepLeft)?;
        (self.hook)(StepEvent::After(name));
        self.commit_progress(self.progress.next + 1, state.into())
    }

    /// Records a state within the current step: a run that is killed resumes the step with it.
    ///
    /// # Errors
    /// [`StepListError::Journal`], with the recorded state as it was.
    pub fn record_state(&mut self, state: impl Into<Vec<u8>>) -> Result<(), StepListError> {
        self.commit_progress(self.progress.next, state.into())
    }

    /// Runs the remaining steps: `work` receives each step with the state, and returns the next state.
    ///
    /// # Errors
    /// An error of `work` or of the journal.
    pub fn run_remaining<E: From<StepListError>>(
        &mut self,
        mut work: impl FnMut(&str, &[u8]) -> Result<Vec<u8>, E>,
    ) -> Result<(), E> {
        while let Some(step) = self.current_step() {
            let state = work(step, self.recorded_state())?;
            self.complete_step(state)?;
        }
        Ok(())
    }

    /// Removes the journal: the next run starts over. Without this, the next run finds all steps complete.
    ///
    /// # Errors
    /// [`StepListError::Journal`].
    pub fn remove_journal(self) -> Result<(), StepListError> {
        self.journal.remove_files().map_err(StepListError::Journal)
    }

    fn commit_progress(&mut self, next: usize, state: Vec<u8>) -> Result<(), StepListError> {
        let (progress, hook) = (&mut self.progress, &mut self.hook);
        let content = StepProgress::encode(&progress.names, next, &state);
        hook(StepEvent::Committing(progress.names.get(next).map(String::as_str)));
        self.journal.commit(&content).map_err(StepListError::Journal)?;
        // Only after the commit: after an error the step counts as incomplete, and is repeated.
        (progress.next, progress.state) = (next, state);
        hook(StepEvent::Committed(progress.names.get(next).map(String::as_str)));
        self.report_next_step();
        Ok(())
    }

    fn report_next_step(&mut self) {
        if let Some(name) = self.progress.names.get(self.progress.next) {
            (self.hook)(StepEvent::Before(name));
        }
    }
}

impl fmt::Debug for StepRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The state may be a secret.
        f.debug_struct("Run")
            .field("next", &self.progress.names.get(self.progress.next))
            .finish_non_exhaustive()
    }
}

/// The recorded progress of a run: the number of names, the index of the next, each name after its length,
/// the state. The names before the next one are those of the completed steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StepProgress {
    names: Vec<String>,
    next: usize,
    state: Vec<u8>,
}

impl StepProgress {
    fn encode(names: &[String], next: usize, state: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        // `try_new` bounds counts and lengths, so that no conversion here saturates.
        for number in [names.len(), next] {
            bytes.extend_from_slice(&u16::try_from(number).unwrap_or(u16::MAX).to_le_bytes());
        }
        for name in names {
            bytes.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
            bytes.extend_from_slice(name.as_bytes());
        }
        bytes.extend_from_slice(state);
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (counts, mut rest) = bytes.split_at_checked(4)?;
        let number = |at: usize| usize::from(u16::from_le_bytes([counts[at], counts[at + 1]]));
        let (count, next) = (number(0), number(2));
        let mut names = Vec::new();
        for _ in 0..count {
            let (&length, after) = rest.split_first()?;
            let (name, after) = after.split_at_checked(length.into())?;
            names.push(String::from_utf8(name.to_vec()).ok()?);
            rest = after;
        }
        // Names that no list accepts were not written by this crate.
        let steps = StepList::try_new(names).ok()?;
        (next <= steps.step_names.len()).then(|| Self { names: steps.step_names, next, state: rest.to_vec() })
    }

    /// The same progress in a list that may have more steps, or another order. The error is the first recorded
    /// step that is missing from the list.
    fn continue_with(self, list: &StepList) -> Result<Self, String> {
        let Self { mut names, next, state } = self;
        if let Some(unknown) = names.iter().find(|name| !list.step_names.contains(name)) {
            return Err(unknown.clone());
        }
        // Completed steps keep their recorded order; the others follow in the order of the list.
        names.truncate(next);
        let remaining: Vec<_> =
            list.step_names.iter().filter(|name| !names.contains(name)).cloned().collect();
        names.extend(remaining);
        Ok(Self { names, next, state })
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        Self::encode(&self.names, self.next, &self.state)
    }
}

/// Parses recorded progress, for the checks over arbitrary input.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn parse_step_progress(bytes: &[u8]) -> Option<StepProgress> {
    StepProgress::from_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn recorded_progress_is_read_back(
            names in prop::collection::hash_set("[a-z]{1,255}", 1..20),
            state in prop::collection::vec(any::<u8>(), 0..50),
        ) {
            let names: Vec<String> = names.into_iter().collect();
            let progress = StepProgress { next: names.len() / 2, names, state };
            let read = StepProgress::from_bytes(&progress.to_bytes()).unwrap();
            prop_assert!(read == progress);
        }
    }

    #[test]
    fn recorded_steps_are_known_by_their_names() {
        let continued = |recorded: &[&str], next, list: &[&str]| {
            let names = recorded.iter().map(|name| (*name).to_owned()).collect();
            let list = StepList::try_new(list.iter().copied()).unwrap();
            StepProgress { names, next, state: b"s".to_vec() }
                .continue_with(&list)
                .map(|progress| (progress.names[..next].join(" "), progress.names[next..].join(" ")))
        };
        let split = |done: &str, remaining: &str| Ok((done.to_owned(), remaining.to_owned()));
        assert_eq!(continued(&["a", "b"], 1, &["a", "b"]), split("a", "b"));
        assert_eq!(continued(&["a", "b"], 2, &["a", "b", "c"]), split("a b", "c"), "added at the end");
        assert_eq!(continued(&["a", "b"], 2, &["x", "a", "y", "b"]), split("a b", "x y"), "added elsewhere");
        assert_eq!(continued(&["a", "b", "c"], 1, &["c", "x", "b", "a"]), split("a", "c x b"), "reordered");
        assert_eq!(continued(&["a", "b", "c"], 1, &["a", "b"]), Err("c".to_owned()), "a step is unknown");
        assert_eq!(continued(&["a", "z", "b"], 3, &["a", "b"]), Err("z".to_owned()), "a step is unknown");
    }

    #[test]
    fn a_step_list_has_unique_names() {
        let list_error = |names: &[&str]| StepList::try_new(names.iter().copied()).unwrap_err();
        assert_eq!(list_error(&[]), InvalidStepList::Count(0));
        assert_eq!(list_error(&["a", ""]), InvalidStepList::Name(String::new()));
        assert_eq!(list_error(&["a", "b", "a"]), InvalidStepList::Duplicate("a".into()));
        assert_eq!(StepList::try_new((0..1001).map(|n| n.to_string())), Err(InvalidStepList::Count(1001)));
    }
}

//! Lists of steps that go on where they were killed.

use std::fmt;
use std::path::PathBuf;

use super::{Error, Journal};

/// A list of named steps.
///
/// Each step must be such that it may be done again after it was done, or begun: it is, when the process is killed
/// before the journal knows. The list belongs to the journal's content: with other names, or in another order, it is
/// another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steps {
    names: Vec<String>,
}

/// What no list of steps can be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidSteps {
    /// There is nothing to do, or more than 1,000 steps.
    #[error("a list has 1 to 1,000 steps, not {0}")]
    Count(usize),
    /// A name is empty or longer than 255 bytes.
    #[error("a step's name has 1 to 255 bytes: {0:?}")]
    Name(String),
    /// Two steps have the same name.
    #[error("two steps are called {0:?}")]
    Twice(String),
}

/// What keeps a list of steps from going on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepsError {
    /// The journal can't be read or written.
    #[error("record the next step")]
    Journal(#[source] Error),
    /// The journal is about other steps: another program, or another version of this one, has begun them. Nothing was
    /// changed: let that one finish, or remove the journal to begin anew, if the steps may be begun anew.
    #[error("journal {} is about other steps: {recorded:?}, not {asked:?}", .path.display())]
    Other {
        /// The journal's file.
        path: PathBuf,
        /// The names of its steps.
        recorded: Vec<String>,
        /// The names of these.
        asked: Vec<String>,
    },
    /// The journal is whole, and not about steps. Nothing was changed.
    #[error("journal {} is not about steps", .path.display())]
    NotSteps {
        /// The journal's file.
        path: PathBuf,
    },
    /// All steps were done before.
    #[error("no step is left to be done")]
    NoneLeft,
}

/// A moment of a run, at which a test can kill it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Point<'a> {
    /// The step is about to be done.
    Before(&'a str),
    /// The step was done, and the journal doesn't know.
    After(&'a str),
    /// The journal is about to learn what comes next: a step, or nothing more.
    Committing(Option<&'a str>),
    /// The journal knows what comes next.
    Committed(Option<&'a str>),
}

/// Hears of each [`Point`].
type Hook = Box<dyn FnMut(Point<'_>) + Send>;

impl Steps {
    /// A list of steps of these names.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn try_new<T: Into<String>>(names: impl IntoIterator<Item = T>) -> Result<Self, InvalidSteps> {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        if !(1..=1000).contains(&names.len()) {
            return Err(InvalidSteps::Count(names.len()));
        }
        for (index, name) in names.iter().enumerate() {
            if !(1..=255).contains(&name.len()) {
                return Err(InvalidSteps::Name(name.clone()));
            }
            if names[..index].contains(name) {
                return Err(InvalidSteps::Twice(name.clone()));
            }
        }
        Ok(Self { names })
    }

    /// The steps' names.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Begins with the first step and this state; or goes on, with the state that was recorded, where the journal knows
    /// of steps done or begun.
    ///
    /// # Errors
    /// [`StepsError::Other`] and [`StepsError::NotSteps`], with nothing changed; [`StepsError::Journal`].
    pub fn start(&self, journal: Journal, state: &[u8]) -> Result<Run, StepsError> {
        self.start_with(journal, state, |_| {})
    }

    /// As [`start`](Self::start), with a hook that hears of each [`Point`].
    ///
    /// # Errors
    /// As there.
    pub fn start_with(
        &self,
        journal: Journal,
        state: &[u8],
        hook: impl FnMut(Point<'_>) + Send + 'static,
    ) -> Result<Run, StepsError> {
        let path = journal.path();
        let recorded = match journal.state() {
            None => None,
            Some(content) => {
                Some(Progress::parse(content).ok_or(StepsError::NotSteps { path: path.clone() })?)
            }
        };
        let is_resumed = recorded.is_some();
        let progress = recorded.unwrap_or_else(|| Progress {
            names: self.names.clone(),
            next: 0,
            state: state.to_vec(),
        });
        if progress.names != self.names {
            return Err(StepsError::Other { path, recorded: progress.names, asked: self.names.clone() });
        }
        let mut run = Run { journal, progress, is_resumed, hook: Box::new(hook) };
        if is_resumed {
            run.tell_next();
        } else {
            run.commit(0, state.to_vec())?;
        }
        Ok(run)
    }
}

/// Steps that are being done.
///
/// # Cancel safety
/// It may be dropped at any point, and so may a future that holds it: what was not recorded as done is done again.
pub struct Run {
    journal: Journal,
    progress: Progress,
    is_resumed: bool,
    hook: Hook,
}

impl Run {
    /// The step to do now; none after the last.
    pub fn step(&self) -> Option<&str> {
        self.progress.names.get(self.progress.next).map(String::as_str)
    }

    /// What the last step, or the beginning, has recorded.
    pub fn state(&self) -> &[u8] {
        &self.progress.state
    }

    /// Whether the journal knew of these steps.
    pub fn is_resumed(&self) -> bool {
        self.is_resumed
    }

    /// The step is done: the next one begins with this state.
    ///
    /// # Errors
    /// [`StepsError::Journal`], after which the step is the same as before: call this again, or do it again.
    /// [`StepsError::NoneLeft`] after the last.
    pub fn done(&mut self, state: impl Into<Vec<u8>>) -> Result<(), StepsError> {
        let name = self.progress.names.get(self.progress.next).ok_or(StepsError::NoneLeft)?;
        (self.hook)(Point::After(name));
        self.commit(self.progress.next + 1, state.into())
    }

    /// Does what is left: each step is given the state, and gives the next one.
    ///
    /// # Errors
    /// The step's, or the journal's.
    pub fn each<E: From<StepsError>>(
        &mut self,
        mut work: impl FnMut(&str, &[u8]) -> Result<Vec<u8>, E>,
    ) -> Result<(), E> {
        while let Some(step) = self.step() {
            let state = work(step, self.state())?;
            self.done(state)?;
        }
        Ok(())
    }

    /// Removes the journal: the next start begins anew. Without this, a start finds that all is done.
    ///
    /// # Errors
    /// [`StepsError::Journal`].
    pub fn finish(self) -> Result<(), StepsError> {
        self.journal.remove().map_err(StepsError::Journal)
    }

    fn commit(&mut self, next: usize, state: Vec<u8>) -> Result<(), StepsError> {
        let (progress, hook) = (&mut self.progress, &mut self.hook);
        let content = Progress::encode(&progress.names, next, &state);
        hook(Point::Committing(progress.names.get(next).map(String::as_str)));
        self.journal.commit(&content).map_err(StepsError::Journal)?;
        (progress.next, progress.state) = (next, state);
        hook(Point::Committed(progress.names.get(next).map(String::as_str)));
        self.tell_next();
        Ok(())
    }

    fn tell_next(&mut self) {
        if let Some(name) = self.progress.names.get(self.progress.next) {
            (self.hook)(Point::Before(name));
        }
    }
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The state may be a secret.
        f.debug_struct("Run")
            .field("next", &self.progress.names.get(self.progress.next))
            .finish_non_exhaustive()
    }
}

/// What is recorded of a run: the number of names, the number of the next, each name behind its length, the state.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Progress {
    names: Vec<String>,
    next: usize,
    state: Vec<u8>,
}

impl Progress {
    fn encode(names: &[String], next: usize, state: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
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

    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
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
        let steps = Steps::try_new(names).ok()?;
        (next <= steps.names.len()).then(|| Self { names: steps.names, next, state: rest.to_vec() })
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        Self::encode(&self.names, self.next, &self.state)
    }
}

/// For the checks over arbitrary input.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn parse_steps(bytes: &[u8]) -> Option<Progress> {
    Progress::parse(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_recorded_is_read(
            names in prop::collection::hash_set("[a-z]{1,255}", 1..20),
            state in prop::collection::vec(any::<u8>(), 0..50),
        ) {
            let names: Vec<String> = names.into_iter().collect();
            let progress = Progress { next: names.len() / 2, names, state };
            let read = Progress::parse(&progress.to_bytes()).unwrap();
            prop_assert!(read == progress);
        }
    }

    #[test]
    fn a_list_has_steps_of_different_names() {
        let wrong = |names: &[&str]| Steps::try_new(names.iter().copied()).unwrap_err();
        assert_eq!(wrong(&[]), InvalidSteps::Count(0));
        assert_eq!(wrong(&["a", ""]), InvalidSteps::Name(String::new()));
        assert_eq!(wrong(&["a", "b", "a"]), InvalidSteps::Twice("a".into()));
        assert_eq!(Steps::try_new((0..1001).map(|n| n.to_string())), Err(InvalidSteps::Count(1001)));
    }
}

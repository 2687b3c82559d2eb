//! Why a process' run failed.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::status::ProcessExit;
use crate::machine::SignalError;
use crate::runnable::Cancelled;

/// How the run of a [`Process`](super::Process) ended, where that was not by exit code 0.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProcessError {
    /// Nothing can be started at all; the source says what is missing, such as a mounted `/proc`.
    #[error("prepare to run child processes")]
    Prepare(#[source] io::Error),
    /// The program could not be started. A retry helps only when somebody does what the advice says.
    #[error("start {}: {advice}", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// What is wrong, and what to do.
        advice: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The kernel did not let the process be watched; it was killed.
    #[error("watch the process")]
    Watch(#[source] io::Error),
    /// It was not ready in time, and was stopped.
    #[error("not ready within {within:?}: {missing}")]
    NotReady {
        /// How long it had, with what it asked for.
        within: Duration,
        /// What it waited for, and what was said last about it.
        missing: String,
        /// How the stop ended it.
        exit: ProcessExit,
    },
    /// It ended by itself with another code than 0, or by a signal.
    #[error("{0}")]
    Exited(ProcessExit),
    /// The tree did not take the ready or done signal; the process was stopped.
    #[error("signal ready")]
    Signal(#[source] SignalError),
    /// It was told to stop, and did, however it took it.
    #[error("stopped")]
    Cancelled(#[source] Cancelled),
}

impl ProcessError {
    /// How the process ended, where it had been started and its end was a failure.
    pub fn exit(&self) -> Option<&ProcessExit> {
        match self {
            Self::Exited(exit) | Self::NotReady { exit, .. } => Some(exit),
            _ => None,
        }
    }
}

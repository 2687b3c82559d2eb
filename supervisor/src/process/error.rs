//! Why a run of a process failed.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::status::ProcessExit;
use crate::fsm::LifecycleSignalError;
use crate::runnable::CanceledError;

/// How a run of a [`Process`](super::Process) ended, unless by exit code 0.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProcessError {
    /// No process can be started; the source names what is missing, such as a mounted `/proc`.
    #[error("can't prepare to run child processes")]
    Prepare(#[source] io::Error),
    /// The program could not be started. A retry helps only after the hint has been followed.
    #[error("can't start {}: {hint}", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// What is wrong, and what to do.
        hint: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The kernel's interface to watch the process failed; the process was killed.
    #[error("can't wait for the exit of the process")]
    Watch(#[source] io::Error),
    /// It was not ready before its timeout, and was stopped.
    #[error("not ready within {timeout:?}: {missing}")]
    NotReady {
        /// Its timeout, including the extensions that it requested.
        timeout: Duration,
        /// What it waited for, with the last status or error.
        missing: String,
        /// How it exited after the stop.
        exit: ProcessExit,
    },
    /// It exited by itself with a code other than 0, or by a signal.
    #[error("{0}")]
    Exited(ProcessExit),
    /// The tree rejected the ready or done signal; the process was stopped.
    #[error("can't signal ready")]
    Signal(#[source] LifecycleSignalError),
    /// It was canceled, and stopped, whatever its exit code.
    #[error("stopped")]
    Canceled(#[source] CanceledError),
}

impl ProcessError {
    /// How the process exited, if it was started and its exit was a failure.
    pub fn process_exit(&self) -> Option<&ProcessExit> {
        match self {
            Self::Exited(exit) | Self::NotReady { exit, .. } => Some(exit),
            _ => None,
        }
    }
}

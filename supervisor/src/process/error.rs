//! The reason why a run of a process failed.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::cgroup_limits::CgroupLimitError;
use crate::failure::CanceledError;
use crate::fsm::LifecycleSignalError;
use crate::process_exit::ProcessExit;

/// The reason why a run of a [`Process`](super::Process) ended, unless its process exited with code 0.
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
        /// The cause, and what to do.
        hint: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// It has no socket for its reports by sd_notify(3), so it was not started; the source names the reason, and what
    /// to do.
    #[error("can't make the notification socket of the process")]
    Notify(#[source] io::Error),
    /// A limit of its cgroup can't be enforced, so it was not started; the source names the remedy.
    #[error("can't limit the process")]
    Limit(#[source] CgroupLimitError),
    /// The process is to be [kept](super::Process::keep), but can't be recorded, so it was not started; the source
    /// names the reason.
    #[error("can't record the process to keep it")]
    Keep(#[source] io::Error),
    /// The process that an earlier program has [kept](super::Process::keep) can't be taken over at present. It runs on,
    /// and the next run tries again.
    #[error("can't take over the process that is still running; it runs on, and no other one is started")]
    Adopt(#[source] io::Error),
    /// The kernel's interface to watch the process failed; the process was killed.
    #[error("can't watch the child process for its exit, and killed it")]
    Watch(#[source] io::Error),
    /// The process was not ready before its timeout, and was stopped.
    #[error("the process was not ready within {timeout:?}, and was stopped: {missing}")]
    NotReady {
        /// The timeout, including the extensions that it requested.
        timeout: Duration,
        /// The condition that it waited for, with the last status or error.
        missing: String,
        /// The exit after the stop.
        exit: ProcessExit,
    },
    /// The process did not report to its [watchdog](super::Process::watchdog) in time, or asked for this by
    /// `WATCHDOG=trigger`. It was stopped by SIGABRT.
    #[error("the process {}, and was aborted", watchdog_clause(*triggered, *interval))]
    Watchdog {
        /// The interval of the watchdog.
        interval: Duration,
        /// True if it asked for it.
        triggered: bool,
        /// The exit after the stop.
        exit: ProcessExit,
    },
    /// The [liveness](super::Liveness) probe failed too often in a row, and it was stopped.
    #[error(
        "the process failed {failures} liveness probes in a row, and was stopped: {exit}; last probe: {last}"
    )]
    NotAlive {
        /// The number of probes in a row that failed.
        failures: u32,
        /// The last failure.
        last: String,
        /// The exit after the stop.
        exit: ProcessExit,
    },
    /// The process exited by itself with a code other than 0, or by a signal.
    #[error("{0}")]
    Exited(ProcessExit),
    /// The tree rejected the ready or done signal; the process was stopped.
    #[error("can't signal to the supervisor that the child process is ready")]
    Signal(#[source] LifecycleSignalError),
    /// The process was canceled, and stopped, with any exit code.
    #[error("the child process was stopped on request")]
    Canceled(#[source] CanceledError),
}

fn watchdog_clause(triggered: bool, interval: Duration) -> String {
    if triggered {
        return "asked for its watchdog by WATCHDOG=trigger".to_owned();
    }
    format!("did not report to its watchdog (WATCHDOG=1) within {interval:?}")
}

impl ProcessError {
    /// The exit of the process, if it was started and its exit was a failure.
    pub fn process_exit(&self) -> Option<&ProcessExit> {
        match self {
            Self::Exited(exit)
            | Self::NotReady { exit, .. }
            | Self::Watchdog { exit, .. }
            | Self::NotAlive { exit, .. } => Some(exit),
            _ => None,
        }
    }
}

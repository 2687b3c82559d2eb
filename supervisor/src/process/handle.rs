//! Signals to a running process, from outside of its run.

use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use thiserror::Error;

use super::descendants::has_exited;
use super::probe::{CommandRunner, ProbeFailure};
use super::procfs;
use super::settings::Process;
use crate::failure::Failure;
use crate::process_exit::Signal;
use crate::sys;
use crate::wall_clock::wall_clock_time;

/// Signals and reloads the running process of a [`Process`] to which it was [given](Process::handle), or fails where
/// none is running. It is cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct ProcessHandle(Arc<Mutex<Option<AttachedProcess>>>);

#[derive(Clone)]
struct AttachedProcess {
    target: HandleTarget,
    /// For a reload command.
    run_command: CommandRunner,
    /// The reason why its last probe could not be made.
    probe_problem: Option<Arc<str>>,
}

impl fmt::Debug for AttachedProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttachedProcess").field("target", &self.target).finish_non_exhaustive()
    }
}

/// The main process of one start.
#[derive(Debug, Clone)]
pub(super) struct HandleTarget {
    pub(super) pid: i32,
    pub(super) pidfd: Arc<OwnedFd>,
    pub(super) since: Instant,
    pub(super) reload: Option<ReloadAction>,
}

/// The way in which a process is asked to read its configuration again.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ReloadAction {
    /// By this signal; usually [`Signal::HUP`].
    Signal(Signal),
    /// By another program, which gets the pid of the process as `MAINPID`. It has all the time that the caller of
    /// [`ProcessHandle::reload`] waits; its output is discarded, except the last line of a failure. Its readiness and
    /// stop settings are ignored.
    Command(Arc<Process>),
}

/// The reason why a process can't be signaled or reloaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProcessHandleError {
    /// The process has not started, or has exited. Retry when its runnable is ready.
    #[error("the process is not running")]
    NotRunning,
    /// The process has no [reload action](Process::reload). Restart it instead.
    #[error("the process has no reload action: restart it instead")]
    NoReload,
    /// The kernel rejected the signal.
    #[error("can't send {signal} to the process")]
    Signal {
        /// The signal.
        signal: Signal,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The reload command failed.
    #[error("the reload command failed: {0}")]
    Command(Failure),
}

impl ProcessHandle {
    /// Sends a signal to exactly the main process. It acts at most on the process that is running at the call, and
    /// does not change how the supervisor sees its exit.
    ///
    /// # Errors
    /// [`ProcessHandleError::NotRunning`] or [`ProcessHandleError::Signal`].
    pub fn send_signal(&self, signal: Signal) -> Result<(), ProcessHandleError> {
        send_signal(&self.attached()?.target, signal)
    }

    /// Performs the reload action. For a command, it returns when that has exited.
    ///
    /// # Errors
    /// Any of [`ProcessHandleError`].
    ///
    /// # Cancel safety
    /// A command that is running is killed when this is dropped.
    pub async fn reload(&self) -> Result<(), ProcessHandleError> {
        // Copied, because the lock must not be held while the command runs.
        let AttachedProcess { target, run_command, .. } = self.attached()?;
        match &target.reload {
            None => Err(ProcessHandleError::NoReload),
            Some(ReloadAction::Signal(signal)) => send_signal(&target, *signal),
            Some(ReloadAction::Command(command)) => {
                let command = Process::clone(command).env("MAINPID", target.pid.to_string());
                run_command(Arc::new(command)).await.map_err(ProcessHandleError::Command)
            }
        }
    }

    /// The pid of the running process.
    pub fn pid(&self) -> Option<u32> {
        self.attached().ok().map(|attached| attached.target.pid.unsigned_abs())
    }

    /// Returns whether a thread of the running process waits in the kernel for something that no signal interrupts, as
    /// for a disk that does not answer: state D of proc_pid_stat(5). A short wait is normal.
    pub fn waits_in_kernel(&self) -> bool {
        self.pid().is_some_and(procfs::waits_in_kernel)
    }

    /// When the running process started, by the wall clock as it is set now: before this program did, if it was adopted.
    pub fn running_since(&self) -> Option<SystemTime> {
        self.attached().ok().map(|attached| wall_clock_time(attached.target.since))
    }

    /// The reason why the running process could not be asked whether it is ready or alive: `could not ask: ...`. The
    /// host had no process, descriptor or memory left for the last probe. `None` once a probe was made.
    pub fn probe_problem(&self) -> Option<Arc<str>> {
        self.attached().ok()?.probe_problem
    }

    pub(super) fn set_probe_problem(&self, problem: Option<&ProbeFailure>) {
        if let Some(attached) = &mut *self.lock() {
            attached.probe_problem = problem.map(|problem| problem.to_string().into());
        }
    }

    /// Acts on this process until the result is dropped.
    pub(super) fn attach(&self, target: HandleTarget, run_command: CommandRunner) -> AttachGuard {
        let pid = target.pid;
        *self.lock() = Some(AttachedProcess { target, run_command, probe_problem: None });
        AttachGuard { handle: self.clone(), pid }
    }

    fn attached(&self) -> Result<AttachedProcess, ProcessHandleError> {
        // It stays attached until its descendants have exited, but its pid may be that of another process by then.
        let running = self.lock().clone().filter(|attached| !has_exited(attached.target.pidfd.as_fd()));
        running.ok_or(ProcessHandleError::NotRunning)
    }

    fn lock(&self) -> MutexGuard<'_, Option<AttachedProcess>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn send_signal(target: &HandleTarget, signal: Signal) -> Result<(), ProcessHandleError> {
    match sys::send_signal(target.pidfd.as_fd(), signal.as_number()) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Err(ProcessHandleError::NotRunning),
        sent => sent.map_err(|source| ProcessHandleError::Signal { signal, source }),
    }
}

/// Detaches a process from its handle, unless a later start is attached.
#[derive(Debug)]
pub(super) struct AttachGuard {
    handle: ProcessHandle,
    pid: i32,
}

impl Drop for AttachGuard {
    fn drop(&mut self) {
        // Another runnable with this handle may have attached its process since.
        let mut attached = self.handle.lock();
        if attached.as_ref().is_some_and(|attached| attached.target.pid == self.pid) {
            *attached = None;
        }
    }
}

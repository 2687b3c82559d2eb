//! The state of a runnable, how it exited, and what it waits for.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::policy::RestartLimit;
use crate::process_exit::{ForcedKill, ProcessExit};

/// The state of a runnable.
///
/// ```text
/// Waiting ──▶ New ──ready──▶ Ready ──done + Ok──▶ Done
///    ▲         │ ◀─not ready── │
///    │         └──────┬────────┘
///    │                ├─ failed ──▶ Dead ─────┐
///    │                └─ canceled ─▶ Canceled ┤
///    └────────── whole subtree exited ────────┘
/// ```
///
/// A done runnable becomes dead when a child exceeds its restart limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RunnableState {
    /// Not running: its start is due after a backoff, when the members of its group that are ending have ended, or when
    /// those before it in a [rest-for-one](crate::GroupPolicy::RestForOne) group are ready.
    Waiting,
    /// Running, not ready: not yet, or not at present.
    New,
    /// Running and ready.
    Ready,
    /// Exited successfully; its children keep running.
    Done,
    /// Exited with a failure.
    Dead,
    /// Exited because its context was canceled.
    Canceled,
    /// Stopped by an operator; not started until an operator starts it.
    Stopped,
}

impl RunnableState {
    /// The state in lower case, as programs should store it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::New => "new",
            Self::Ready => "ready",
            Self::Done => "done",
            Self::Dead => "dead",
            Self::Canceled => "canceled",
            Self::Stopped => "stopped",
        }
    }

    /// Returns whether the runnable's task exists.
    pub fn is_running(self) -> bool {
        matches!(self, Self::New | Self::Ready)
    }
}

impl fmt::Display for RunnableState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The exit of one incarnation of a runnable.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExitReason {
    /// The runnable returned `Ok` after signaling done, or its policy treats a return of `Ok` as success.
    Done,
    /// The runnable returned `Ok` without signaling done.
    ReturnedWithoutDone,
    /// The runnable returned an error; or its child process exited with code 0 although it should keep running.
    Failed {
        /// The error with its causes, outermost first, joined by `: `, cut at [`MAX_ERROR_BYTES`].
        error: String,
        /// The exit of its child process, if it had one.
        process: Option<Arc<ProcessExit>>,
    },
    /// The runnable, or one of its helpers, panicked.
    Panicked {
        /// The message of the panic, cut at [`MAX_ERROR_BYTES`].
        message: String,
    },
    /// The runnable sent signals in an invalid order.
    InvalidSignal {
        /// The invalid signal, and the reason.
        error: String,
    },
    /// A child exceeded its restart limit, which fails the parent as if by itself.
    RestartLimit {
        /// The DN of the child.
        child: Arc<str>,
        /// The limit.
        limit: RestartLimit,
    },
    /// The context was canceled, and it returned [`CanceledError`](crate::CanceledError).
    Canceled {
        /// The exit of its child process, if one had started: the stop was planned, so its code does not matter.
        process: Option<Arc<ProcessExit>>,
    },
    /// The context was canceled. Its child process, or a descendant of it, did not stop within the grace
    /// period, and was killed. The state after it is [`Canceled`](RunnableState::Canceled).
    Killed {
        /// The reason why it was killed.
        kill: ForcedKill,
        /// The exit of the child process.
        process: Arc<ProcessExit>,
    },
    /// The runnable did not stop within its timeout after its context was canceled, and the supervisor dropped its
    /// task.
    Aborted,
}

impl ExitReason {
    /// A failure. The state machine adds the exit of the child process.
    pub(crate) fn failed(error: String) -> Self {
        Self::Failed { error: cut_error(error), process: None }
    }

    pub(crate) fn panicked(message: String) -> Self {
        Self::Panicked { message: cut_error(message) }
    }
}

/// Cuts a text at [`MAX_ERROR_BYTES`].
fn cut_error(mut text: String) -> String {
    let length = text.len();
    if length > MAX_ERROR_BYTES {
        let end = (0..=MAX_ERROR_BYTES).rev().find(|&at| text.is_char_boundary(at));
        text.truncate(end.unwrap_or(0));
        text.push_str(&format!("... (cut from {length} bytes)"));
    }
    text
}

impl fmt::Display for ExitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("done"),
            Self::ReturnedWithoutDone => f.write_str("returned without signaling done"),
            Self::Failed { error, .. } => f.write_str(error),
            Self::Panicked { message } => write!(f, "panicked: {message}"),
            Self::InvalidSignal { error } => f.write_str(error),
            Self::RestartLimit { child, limit } => {
                write!(f, "child {child} failed more than {} times within {:?}", limit.restarts, limit.period)
            }
            Self::Canceled { process: None } => f.write_str("canceled"),
            Self::Canceled { process: Some(exit) } => write!(f, "canceled; {exit}"),
            Self::Killed { kill, .. } => write!(f, "canceled; {kill}"),
            Self::Aborted => f.write_str("did not stop within its timeout and was aborted"),
        }
    }
}

/// One past exit of a runnable.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExitRecord {
    /// When it exited, by the wall clock as it is set now.
    pub at: SystemTime,
    /// The number of this incarnation of its DN, counted from 1.
    pub generation: u64,
    /// The state after it: [`Done`](RunnableState::Done), [`Dead`](RunnableState::Dead) or
    /// [`Canceled`](RunnableState::Canceled).
    pub state: RunnableState,
    /// The exit.
    pub exit: ExitReason,
}

/// The reason why the state of a runnable does not change. `At` is the type of a point in time.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitReason<At = SystemTime> {
    /// Nothing: it is ready, or done.
    Nothing,
    /// The ready signal of its runnable.
    ReadySignal,
    /// The end of what its runnable has reported by
    /// [`signal_not_ready`](crate::Context::signal_not_ready): a clause in the runnable's own words.
    Condition(Arc<str>),
    /// Another runnable to become ready, after a call of [`wait_ready`](crate::Context::wait_ready).
    Dependency(Arc<str>),
    /// The backoff, until this time.
    Backoff(At),
    /// The runnable, which was canceled and has not returned.
    RunnableReturn,
    /// Running descendants that delay its restart: the first few of them.
    Descendants(Vec<Arc<str>>),
    /// Members of its group that end together with it and are still running: the first few of them.
    GroupMembers(Vec<Arc<str>>),
    /// The parent, whose context is canceled: the restarted parent adds it again.
    ParentRestart,
    /// A start by an operator.
    OperatorStart,
}

impl<At> WaitReason<At> {
    /// Converts the point in time.
    pub(crate) fn map_time<Other>(self, time: impl FnOnce(At) -> Other) -> WaitReason<Other> {
        match self {
            Self::Nothing => WaitReason::Nothing,
            Self::ReadySignal => WaitReason::ReadySignal,
            Self::Condition(reason) => WaitReason::Condition(reason),
            Self::Dependency(dn) => WaitReason::Dependency(dn),
            Self::Backoff(until) => WaitReason::Backoff(time(until)),
            Self::RunnableReturn => WaitReason::RunnableReturn,
            Self::Descendants(dns) => WaitReason::Descendants(dns),
            Self::GroupMembers(dns) => WaitReason::GroupMembers(dns),
            Self::ParentRestart => WaitReason::ParentRestart,
            Self::OperatorStart => WaitReason::OperatorStart,
        }
    }
}

impl<At> fmt::Display for WaitReason<At> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing"),
            Self::ReadySignal => f.write_str("its ready signal"),
            Self::Condition(reason) => f.write_str(reason),
            Self::Dependency(dn) => write!(f, "{dn} to become ready"),
            Self::Backoff(_) => f.write_str("its backoff"),
            Self::RunnableReturn => f.write_str("its runnable to return after the cancellation"),
            Self::Descendants(dns) => write!(f, "descendants to exit: {}", dns.join(", ")),
            Self::GroupMembers(dns) => write!(f, "members of its group to exit: {}", dns.join(", ")),
            Self::ParentRestart => f.write_str("its parent to restart"),
            Self::OperatorStart => f.write_str("an operator to start it"),
        }
    }
}

/// The status of one runnable in a [`snapshot`](crate::Supervisor::snapshot).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunnableStatus {
    /// The name in the tree, `root.a.b`.
    pub dn: Arc<str>,
    /// The state.
    pub state: RunnableState,
    /// The time since which it is in this state, by the wall clock as it is set now.
    pub since: SystemTime,
    /// The number of starts of this DN, also before the last restart of its parent.
    pub generation: u64,
    /// Consecutive failures. Readiness for [`stable_after`](crate::ChildPolicy::stable_after) clears them.
    pub failures: u32,
    /// The time of the first of them, by the wall clock as it is set now; `None` without failures.
    pub failing_since: Option<SystemTime>,
    /// The time that it must stay ready until its failures are cleared; `None` if it is not ready, or has
    /// none.
    pub failures_clear_in: Option<Duration>,
    /// The last exits, the newest last, at most [`MAX_EXITS`].
    pub exits: Vec<ExitRecord>,
    /// The reason for which it waits.
    pub waiting_for: WaitReason,
    /// The reason for which [`withhold_ready`](crate::Supervisor::withhold_ready) keeps it from being ready, although it
    /// has signaled that it is.
    pub withheld: Option<Arc<str>>,
}

impl RunnableStatus {
    /// The number of restarts.
    pub fn restart_count(&self) -> u64 {
        self.generation.saturating_sub(1)
    }
}

/// The number of past exits that the tree keeps for each runnable.
pub const MAX_EXITS: usize = 8;

/// The length at which the tree cuts the text of an error, in bytes. It keeps each exit and each event small.
pub const MAX_ERROR_BYTES: usize = 4096;

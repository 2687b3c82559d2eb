//! Where a runnable stands, how it ended, and what it waits for.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use crate::process::ProcessExit;

/// Where a node of the tree stands.
///
/// ```text
///            ┌──────────────────────────────┐
/// Waiting ──▶ New ──ready──▶ Ready ──done + Ok──▶ Done
///    ▲         │               │
///    │         └──────┬────────┘
///    │                ├─ failed ──▶ Dead ─────┐
///    │                └─ cancelled ▶ Canceled ┤
///    └────────── whole subtree exited ────────┘
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Not running: its start is due after a backoff.
    Waiting,
    /// Running, and not ready yet. Only now may it add children.
    New,
    /// Running and ready.
    Ready,
    /// Ended as it should; its children go on.
    Done,
    /// Ended by a failure.
    Dead,
    /// Ended because its context was cancelled.
    Canceled,
    /// Held by an operator: not started until an operator says so.
    Stopped,
}

impl State {
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

    /// Whether the runnable's task exists.
    pub fn is_running(self) -> bool {
        matches!(self, Self::New | Self::Ready)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// How one run of a runnable ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Exit {
    /// It had signalled done, or its policy takes a return for the end of the work, and returned `Ok`.
    Done,
    /// It returned `Ok` without having signalled done.
    Returned,
    /// It returned an error; or its child process, which was not to end, exited with code 0.
    Failed {
        /// The error with its causes, outermost first, joined by `: `.
        error: String,
        /// How the child process ended, where the failure was that.
        process: Option<Arc<ProcessExit>>,
    },
    /// It, or a helper it had spawned, panicked.
    Panicked {
        /// What the panic said.
        message: String,
    },
    /// It broke the order of signals.
    Misused {
        /// The signal that was wrong, and why.
        error: String,
    },
    /// Its context was cancelled, and it said so.
    Cancelled,
    /// It had not stopped within its time after its context was cancelled, and its task was dropped.
    Aborted,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("done"),
            Self::Returned => f.write_str("returned without having signalled done"),
            Self::Failed { error, .. } => f.write_str(error),
            Self::Panicked { message } => write!(f, "panicked: {message}"),
            Self::Misused { error } => f.write_str(error),
            Self::Cancelled => f.write_str("cancelled"),
            Self::Aborted => f.write_str("did not stop in time and was aborted"),
        }
    }
}

/// One end of a runnable, as the tree remembers it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExitRecord {
    /// When it ended.
    pub at: SystemTime,
    /// Which run of this DN it was, counted from 1.
    pub generation: u64,
    /// The state it left the node in: [`Done`](State::Done), [`Dead`](State::Dead) or [`Canceled`](State::Canceled).
    pub state: State,
    /// How it ended.
    pub exit: Exit,
}

/// What keeps a node from going on, with points in time as `At`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitingFor<At = SystemTime> {
    /// Nothing: it is ready, or done for good.
    Nothing,
    /// Its runnable, which has not signalled ready.
    ReadySignal,
    /// Another runnable to become ready, asked for by [`wait_ready`](crate::Context::wait_ready).
    Dependency(Arc<str>),
    /// Its backoff; when that ends.
    Backoff(At),
    /// Its runnable, which has been cancelled and has not returned.
    Return,
    /// Descendants that still run, which keep it from being restarted: the first few of them.
    Descendants(Vec<Arc<str>>),
    /// Its parent, whose context is cancelled: it comes back when the parent adds it again.
    Parent,
    /// An operator's start.
    Operator,
}

impl<At> WaitingFor<At> {
    /// The same by another clock.
    pub(crate) fn at<Other>(self, time: impl FnOnce(At) -> Other) -> WaitingFor<Other> {
        match self {
            Self::Nothing => WaitingFor::Nothing,
            Self::ReadySignal => WaitingFor::ReadySignal,
            Self::Dependency(dn) => WaitingFor::Dependency(dn),
            Self::Backoff(until) => WaitingFor::Backoff(time(until)),
            Self::Return => WaitingFor::Return,
            Self::Descendants(dns) => WaitingFor::Descendants(dns),
            Self::Parent => WaitingFor::Parent,
            Self::Operator => WaitingFor::Operator,
        }
    }
}

impl<At> fmt::Display for WaitingFor<At> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing"),
            Self::ReadySignal => f.write_str("its own ready signal"),
            Self::Dependency(dn) => write!(f, "{dn} to become ready"),
            Self::Backoff(_) => f.write_str("its backoff"),
            Self::Return => f.write_str("its runnable to return after the cancellation"),
            Self::Descendants(dns) => write!(f, "descendants to exit: {}", dns.join(", ")),
            Self::Parent => f.write_str("its parent to start again"),
            Self::Operator => f.write_str("an operator to start it"),
        }
    }
}

/// One node of the tree, as [`snapshot`](crate::Supervisor::snapshot) found it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeStatus {
    /// Its name in the tree, `root.a.b`.
    pub dn: Arc<str>,
    /// Where it stands.
    pub state: State,
    /// Since when it stands there.
    pub since: SystemTime,
    /// How often this DN has been started, also before its parent's last restart.
    pub generation: u64,
    /// Failures in a row; a time of readiness as long as [`stable_after`](crate::Policy::stable_after) clears them.
    pub failures: u32,
    /// The last ends, the newest last, at most [`MAX_EXITS`].
    pub exits: Vec<ExitRecord>,
    /// What keeps it from going on.
    pub waiting_for: WaitingFor,
}

impl NodeStatus {
    /// How often it has been started again.
    pub fn restarts(&self) -> u64 {
        self.generation.saturating_sub(1)
    }
}

/// How many ends a node remembers.
pub const MAX_EXITS: usize = 8;

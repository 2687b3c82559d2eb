//! Changes in the tree, as values.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::policy::RestartLimit;
use crate::process_exit::{AdoptedProcess, ForcedKill};
use crate::state::{ExitReason, RunnableState};

/// One change of one runnable.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event {
    /// The sequence number among the supervisor's events, from 1. A gap means that events were dropped.
    pub seq: u64,
    /// When it happened. [`wall_clock_time`](crate::wall_clock_time) shows it.
    pub at: Instant,
    /// The runnable's name in the tree.
    pub dn: Arc<str>,
    /// The incarnation of this DN that it belongs to, counted from 1; 0 before the first.
    pub generation: u64,
    /// The change.
    pub change: RunnableChange,
}

/// A change of a runnable.
///
/// Every change of [`RunnableState`] is exactly one of these, see [`new_state`](Self::new_state); the others
/// report what led to it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunnableChange {
    /// A start is due after `delay`; zero means at once, or when the members of its group that are ending have
    /// ended. The runnable is [`Waiting`](RunnableState::Waiting).
    Scheduled {
        /// The time until the start.
        delay: Duration,
    },
    /// The runnable was started.
    Started,
    /// The runnable signaled ready.
    Ready,
    /// A ready runnable signaled that it can't do its work at present.
    NotReady {
        /// The reason, in its own words.
        reason: Arc<str>,
    },
    /// The runnable runs a process that an earlier program has started and [kept](crate::process::Process::keep).
    Adopted {
        /// The process.
        process: AdoptedProcess,
    },
    /// A process of an earlier program was killed before the tree started: see
    /// [`ProcessRecords`](crate::process::ProcessRecords). Its DN is `supervisor`, which is not in the tree.
    LeftoverEnded {
        /// The pid.
        pid: u32,
        /// The name, as in `ps -o comm`.
        name: Arc<str>,
    },
    /// The context was canceled while it ran.
    Canceling {
        /// The reason.
        cause: CancelCause,
    },
    /// The runnable is still running this long after its cancellation; the supervisor is aborting its task.
    Straggling {
        /// The time since the cancellation.
        after: Duration,
    },
    /// The child process, or a descendant of it, did not stop within the grace period and is being killed.
    Killed {
        /// The signal and the time that were not enough.
        kill: ForcedKill,
    },
    /// The runnable exited, with its helpers; or it will not be started because its parent ended; or it was
    /// done, and a child exceeded its restart limit.
    Exited {
        /// [`Done`](RunnableState::Done), [`Dead`](RunnableState::Dead) or
        /// [`Canceled`](RunnableState::Canceled).
        state: RunnableState,
        /// The exit.
        exit: ExitReason,
    },
    /// The runnable has failed too often, and stays dead by its [`RestartLimitAction`](crate::RestartLimitAction).
    LimitExceeded {
        /// The limit.
        limit: RestartLimit,
    },
    /// The runnable is stopped, as an operator requested.
    Stopped,
    /// The runnable left the tree: its parent restarts, or a request [removed](crate::Supervisor::remove_runnable)
    /// it.
    Removed,
}

impl RunnableChange {
    /// The state that this change leads to, if it changes the state.
    pub fn new_state(&self) -> Option<RunnableState> {
        match self {
            Self::Scheduled { .. } => Some(RunnableState::Waiting),
            Self::Started | Self::NotReady { .. } => Some(RunnableState::New),
            Self::Ready => Some(RunnableState::Ready),
            Self::Exited { state, .. } => Some(*state),
            Self::Stopped => Some(RunnableState::Stopped),
            Self::Adopted { .. }
            | Self::LeftoverEnded { .. }
            | Self::Canceling { .. }
            | Self::Straggling { .. }
            | Self::Killed { .. }
            | Self::LimitExceeded { .. }
            | Self::Removed => None,
        }
    }
}

impl fmt::Display for RunnableChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scheduled { delay } => write!(f, "scheduled with backoff {delay:?}"),
            Self::Started => f.write_str("started"),
            Self::Ready => f.write_str("ready"),
            Self::NotReady { reason } => write!(f, "not ready: {reason}"),
            Self::Adopted { process } => process.fmt(f),
            Self::LeftoverEnded { pid, name } => {
                write!(f, "killed {name} (pid {pid}), a leftover process of a killed supervisor")
            }
            Self::Canceling { cause } => write!(f, "canceling: {cause}"),
            Self::Straggling { after } => write!(f, "still running {after:?} after its cancellation"),
            Self::Killed { kill } => kill.fmt(f),
            // The exit starts with the state.
            Self::Exited {
                exit: exit @ (ExitReason::Done | ExitReason::Canceled { .. } | ExitReason::Killed { .. }),
                ..
            } => exit.fmt(f),
            Self::Exited { state, exit } => write!(f, "{state}: {exit}"),
            Self::LimitExceeded { limit } => write!(
                f,
                "restart limit exceeded, {} restarts within {:?}: stays dead until it is started again",
                limit.restarts, limit.period
            ),
            Self::Stopped => f.write_str("stopped by an operator"),
            Self::Removed => f.write_str("removed"),
        }
    }
}

/// The reason why a context was canceled.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CancelCause {
    /// A member of its group failed, and its [`GroupPolicy`](crate::GroupPolicy) includes this one.
    Sibling(Arc<str>),
    /// An ancestor ended or is stopping.
    Ancestor(Arc<str>),
    /// The runnable sent an invalid signal, or one of its helpers panicked.
    OwnFailure,
    /// A child exceeded its restart limit.
    RestartLimit(Arc<str>),
    /// An operator requested a stop or a restart.
    Operator,
    /// A runnable that it depends on is no longer ready: it
    /// [restarts with it](crate::ChildSpec::restart_with_dependencies).
    Dependency(Arc<str>),
    /// The supervisor is shutting down.
    Shutdown,
}

impl fmt::Display for CancelCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sibling(dn) => write!(f, "group member {dn} failed"),
            Self::Ancestor(dn) => write!(f, "ancestor {dn} ended"),
            Self::OwnFailure => f.write_str("it failed while running"),
            Self::RestartLimit(dn) => write!(f, "child {dn} exceeded its restart limit"),
            Self::Operator => f.write_str("requested by an operator"),
            Self::Dependency(dn) => write!(f, "its dependency {dn} is no longer ready"),
            Self::Shutdown => f.write_str("shutdown"),
        }
    }
}

/// Gets the [`Event`]s.
///
/// # Contract
/// Called from one task, with one event after the other in the order of [`Event::seq`], each at most once.
/// The last events have been delivered when [`shutdown`](crate::Supervisor::shutdown) returns, unless its report names
/// the hook, which then gets no more. A slow hook
/// does not delay runnables, unless the runtime has one thread: events wait in a [bounded](crate::SupervisorBuilder::max_pending_events)
/// [`FairEventBuffer`](crate::FairEventBuffer). Events that do not fit are a gap in the sequence numbers, which the
/// supervisor logs; a [`snapshot`](crate::Supervisor::snapshot) shows the state after them. The supervisor
/// logs a panic of the hook, and the hook loses only that event.
pub trait EventHook: Send + Sync + 'static {
    /// Handles one event.
    fn on_event(&self, event: &Event);
}

impl<F: Fn(&Event) + Send + Sync + 'static> EventHook for F {
    fn on_event(&self, event: &Event) {
        self(event);
    }
}

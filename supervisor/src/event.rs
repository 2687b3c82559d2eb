//! What happens in the tree, as values.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::state::{Exit, State};

/// One thing that happened to one node.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event {
    /// Its place among the supervisor's events, from 1 without gaps.
    pub seq: u64,
    /// When it happened.
    pub at: SystemTime,
    /// The node's name in the tree.
    pub dn: Arc<str>,
    /// Which run of this DN it belongs to, counted from 1; 0 before the first.
    pub generation: u64,
    /// What happened.
    pub change: Change,
}

/// What happened to a node.
///
/// Every change of [`State`] is exactly one of these, see [`state`](Self::state); the others tell what led to it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// A start is due after `delay`; zero means at once. The node is [`Waiting`](State::Waiting).
    Scheduled {
        /// How long until then.
        delay: Duration,
    },
    /// Its runnable was started.
    Started,
    /// It signalled ready.
    Ready,
    /// Its context was cancelled while it ran.
    Cancelling {
        /// Why.
        cause: Cause,
    },
    /// It still runs though its context was cancelled so long ago; its task is being aborted.
    Straggling {
        /// How long ago.
        after: Duration,
    },
    /// It ended, with its helpers; or it will not be started because its parent ended.
    Exited {
        /// [`Done`](State::Done), [`Dead`](State::Dead) or [`Canceled`](State::Canceled).
        state: State,
        /// How it ended.
        exit: Exit,
    },
    /// An operator's hold took effect.
    Stopped,
    /// It left the tree, because its parent starts from scratch.
    Removed,
}

impl Change {
    /// The state that this change brings, if it brings one.
    pub fn state(&self) -> Option<State> {
        match self {
            Self::Scheduled { .. } => Some(State::Waiting),
            Self::Started => Some(State::New),
            Self::Ready => Some(State::Ready),
            Self::Exited { state, .. } => Some(*state),
            Self::Stopped => Some(State::Stopped),
            Self::Cancelling { .. } | Self::Straggling { .. } | Self::Removed => None,
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scheduled { delay } => write!(f, "scheduled with backoff {delay:?}"),
            Self::Started => f.write_str("started"),
            Self::Ready => f.write_str("ready"),
            Self::Cancelling { cause } => write!(f, "cancelling: {cause}"),
            Self::Straggling { after } => write!(f, "still running {after:?} after its cancellation"),
            Self::Exited { state, exit } => write!(f, "{state}: {exit}"),
            Self::Stopped => f.write_str("stopped by an operator"),
            Self::Removed => f.write_str("removed"),
        }
    }
}

/// Why a context was cancelled.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// A member of its group failed.
    Sibling(Arc<str>),
    /// An ancestor ended or is being stopped.
    Ancestor(Arc<str>),
    /// Its own runnable broke the order of signals, or a helper of its panicked.
    Own,
    /// An operator asked for a stop or a restart.
    Operator,
    /// The supervisor is being shut down.
    Shutdown,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sibling(dn) => write!(f, "{dn} of its group failed"),
            Self::Ancestor(dn) => write!(f, "{dn} above it ended"),
            Self::Own => f.write_str("it failed while still running"),
            Self::Operator => f.write_str("asked for by an operator"),
            Self::Shutdown => f.write_str("shutdown"),
        }
    }
}

/// Hears of every [`Event`].
///
/// # Contract
/// Called from one task, one event after the other in the order of [`Event::seq`], each exactly once; all of them have
/// been delivered when [`shutdown`](crate::Supervisor::shutdown) returns. A slow hook delays no runnable, but the
/// events wait in memory meanwhile. A panic of the hook is logged, and only that event is lost to it.
pub trait EventHook: Send + Sync + 'static {
    /// Takes one event.
    fn event(&self, event: &Event);
}

impl<F: Fn(&Event) + Send + Sync + 'static> EventHook for F {
    fn event(&self, event: &Event) {
        self(event);
    }
}

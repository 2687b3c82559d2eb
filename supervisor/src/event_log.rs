//! The log lines of the events.

use crate::event::{Event, RunnableChange};
use crate::state::RunnableState;

/// Logs a change of a runnable: failures and forced kills under its DN, everything else under `supervisor`.
pub(crate) fn log_event(event: &Event) {
    let (dn, change) = (&*event.dn, &event.change);
    match change {
        RunnableChange::Exited { state: RunnableState::Dead, exit } => {
            tracing::error!(dn, generation = event.generation, "runnable failed: {exit}");
        }
        RunnableChange::Scheduled { delay } => {
            tracing::info!(dn = "supervisor", "restarting runnable {dn} with backoff {delay:?}");
        }
        RunnableChange::LimitExceeded { .. } => {
            tracing::error!(dn, generation = event.generation, "{change}")
        }
        RunnableChange::Killed { kill } => tracing::warn!(dn, generation = event.generation, "{kill}"),
        RunnableChange::Straggling { after } => tracing::warn!(
            dn = "supervisor",
            "runnable {dn} is still running {after:?} after its cancellation; neither its ancestors nor the members of its group that end with it can restart before it exits"
        ),
        RunnableChange::NotReady { reason } => {
            tracing::warn!(dn, generation = event.generation, "runnable is not ready: {reason}");
        }
        _ => tracing::debug!(dn = "supervisor", "{dn}: {change}"),
    }
}

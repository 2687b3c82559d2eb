//! The stream of the node's health.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, stream};
use tokio::sync::watch;
use tokio::time::sleep;

use super::streams::failures_cleared;
use crate::node::NodeState;
use crate::{v1, wire};

/// How often a client that watches is answered while the tree does not change: nothing notifies of a disk that fills
/// up, a clock, or an API server. Without a client nothing is asked.
const PERIOD: Duration = Duration::from_secs(2);

/// Pause after an answer: a tree that changes all the time does not ask every part all the time.
const PAUSE: Duration = Duration::from_millis(200);

/// Streams the health: now, after each change of the tree, and in each [`PERIOD`].
pub(super) fn health_stream(
    shared: Arc<NodeState>,
    mut changes: watch::Receiver<u64>,
) -> impl Stream<Item = v1::HealthResponse> + Send {
    changes.mark_changed();
    stream::unfold((shared, changes, Duration::ZERO), |(shared, mut changes, pause)| async move {
        sleep(pause).await;
        tokio::select! {
            changed = changes.changed() => changed.ok()?,
            () = failures_cleared(&shared) => {}
            () = sleep(PERIOD) => {}
        }
        shared.with_supervisor(|_| ())?;
        let health = wire::health_to_wire(shared.assess_health().await);
        Some((health, (shared, changes, PAUSE)))
    })
}

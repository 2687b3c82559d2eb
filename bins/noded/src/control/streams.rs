//! The streams of the control API. They have no dedicated tasks: when the client disconnects, its stream is
//! dropped, and with it the reader.

use std::sync::Arc;

use futures_util::{Stream, StreamExt as _, stream};
use nodekeel_logtree::LogReader;
use nodekeel_supervisor::Supervisor;
use prost::Message as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::{ResponseStream, stopping_status};
use crate::event_history::EventHistoryReader;
use crate::node::NodeState;
use crate::{v1, wire};

/// Maximum number of entries in one message.
const MAX_ENTRIES: usize = 2000;

/// A message is sent when it reaches this size; a client accepts four times as much by default.
const MAX_BYTES: usize = 1 << 20;

/// Ends a stream with `UNAVAILABLE` when the node stops.
pub(super) fn until_stopped<T: Send + 'static>(
    stop: &CancellationToken,
    items: impl Stream<Item = T> + Send + 'static,
) -> ResponseStream<T> {
    let stopped = stop.clone();
    let last = stop.clone();
    let end = stream::once(async move { last.is_cancelled().then(|| Err(stopping_status())) });
    let items = items.map(Ok::<T, Status>).take_until(stopped.cancelled_owned());
    Box::pin(items.chain(end.filter_map(|end| async move { end })))
}

/// Streams the tree: now, after each change, and when readiness clears failures, which is not a change of the tree.
pub(super) fn tree_stream(
    shared: Arc<NodeState>,
    mut changes: watch::Receiver<u64>,
) -> impl Stream<Item = v1::TreeResponse> + Send {
    changes.mark_changed();
    stream::unfold((shared, changes), |(shared, mut changes)| async move {
        tokio::select! {
            changed = changes.changed() => changed.ok()?,
            () = failures_cleared(&shared) => {}
        }
        shared.with_supervisor(|_| ())?;
        Some((v1::TreeResponse { nodes: shared.tree_nodes() }, (shared, changes)))
    })
}

/// Resolves when readiness clears the failures of a runnable, if nothing changes until then.
pub(super) async fn failures_cleared(shared: &NodeState) {
    let statuses = shared.with_supervisor(Supervisor::snapshot).unwrap_or_default();
    match statuses.iter().filter_map(|status| status.failures_clear_in).min() {
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}

/// Streams log entries, as many in one message as are available and fit.
pub(super) fn log_stream(reader: LogReader) -> impl Stream<Item = v1::LogsResponse> + Send {
    stream::unfold(reader, |mut reader| async move {
        let mut entries = vec![wire::entry_to_wire(reader.next().await?)];
        let mut bytes = entries[0].encoded_len();
        while entries.len() < MAX_ENTRIES
            && bytes < MAX_BYTES
            && let Some(entry) = reader.try_next()
        {
            let entry = wire::entry_to_wire(entry);
            bytes += entry.encoded_len();
            entries.push(entry);
        }
        let cursor = reader.cursor().to_string();
        Some((v1::LogsResponse { entries, cursor }, reader))
    })
}

/// Streams the kept events, then, with `follow`, new ones.
pub(super) fn event_stream(
    reader: EventHistoryReader,
    follow: bool,
) -> impl Stream<Item = v1::EventsResponse> + Send {
    stream::unfold(reader, move |mut reader| async move {
        let mut batch = reader.take_unread(MAX_ENTRIES);
        while batch.is_empty() {
            if !follow {
                return None;
            }
            reader.wait_for_unread().await;
            batch = reader.take_unread(MAX_ENTRIES);
        }
        Some((v1::EventsResponse { events: batch.iter().map(wire::event_to_wire).collect() }, reader))
    })
}

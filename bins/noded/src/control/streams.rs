//! The streams of the control API. None of them has a task of its own: a stream that its caller has left is dropped where
//! it waits, and with it its reader.

use std::sync::Arc;

use futures_util::{Stream, StreamExt as _, stream};
use nodekeel_logtree::Reader;
use prost::Message as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::{Streamed, stopping};
use crate::history::HistoryReader;
use crate::node::Shared;
use crate::{v1, wire};

/// Most entries of one message.
const MAX_ENTRIES: usize = 2000;

/// A message is sent when it has grown to this; what a client accepts by default is four times as much.
const MAX_BYTES: usize = 1 << 20;

/// Ends a stream when the node stops, and says so.
pub(super) fn until<T: Send + 'static>(
    stop: &CancellationToken,
    items: impl Stream<Item = T> + Send + 'static,
) -> Streamed<T> {
    let stopped = stop.clone();
    let last = stop.clone();
    let end = stream::once(async move { last.is_cancelled().then(|| Err(stopping())) });
    let items = items.map(Ok::<T, Status>).take_until(stopped.cancelled_owned());
    Box::pin(items.chain(end.filter_map(|end| async move { end })))
}

/// The tree, and anew at each change.
pub(super) fn trees(
    shared: Arc<Shared>,
    mut changes: watch::Receiver<u64>,
) -> impl Stream<Item = v1::TreeResponse> + Send {
    changes.mark_changed();
    stream::unfold((shared, changes), |(shared, mut changes)| async move {
        changes.changed().await.ok()?;
        shared.ask(|_| ())?;
        Some((v1::TreeResponse { nodes: shared.nodes() }, (shared, changes)))
    })
}

/// What the reader reads, as much at once as is there and fits.
pub(super) fn logs(reader: Reader) -> impl Stream<Item = v1::LogsResponse> + Send {
    stream::unfold(reader, |mut reader| async move {
        let mut entries = vec![wire::entry(reader.next().await?)];
        let mut bytes = entries[0].encoded_len();
        while entries.len() < MAX_ENTRIES
            && bytes < MAX_BYTES
            && let Some(entry) = reader.try_next()
        {
            let entry = wire::entry(entry);
            bytes += entry.encoded_len();
            entries.push(entry);
        }
        Some((v1::LogsResponse { entries }, reader))
    })
}

/// The kept events, then, if so wished, those to come.
pub(super) fn events(reader: HistoryReader, follow: bool) -> impl Stream<Item = v1::EventsResponse> + Send {
    stream::unfold(reader, move |mut reader| async move {
        let mut taken = reader.take(MAX_ENTRIES);
        while taken.is_empty() {
            if !follow {
                return None;
            }
            reader.ready().await;
            taken = reader.take(MAX_ENTRIES);
        }
        Some((v1::EventsResponse { events: taken.iter().map(wire::event).collect() }, reader))
    })
}

//! The streams of the control API. They have no dedicated tasks: when the client disconnects, its stream is
//! dropped, and with it the reader.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use nodekeel_logtree::LogReader;
use nodekeel_supervisor::{RunnableChange, Supervisor};
use prost::Message as _;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::api::ResponseStream;
use crate::control::stopping_status;
use crate::event_history::{EventHistoryReader, NodeEvent, NodeEventKind};
use crate::running::RunningNode;
use crate::{v1, wire};

/// Maximum number of entries in one message.
const MAX_ENTRIES: usize = 2000;

/// A message is sent when it reaches this size; a client accepts four times as much by default.
const MAX_BYTES: usize = 1 << 20;

/// The period in which a client that watches is answered while the tree does not change: nothing notifies of a disk that fills
/// up, a clock, or an API server. Without a client nothing is asked.
const HEALTH_PERIOD: Duration = Duration::from_secs(2);

/// Pause after an answer: a tree that changes all the time does not ask every part all the time.
const HEALTH_PAUSE: Duration = Duration::from_millis(200);

/// Ends a stream with `UNAVAILABLE` when the node stops, after the items that are available then.
pub(super) fn until_stopped<T: Send + 'static>(
    stop: &CancellationToken,
    items: impl Stream<Item = T> + Send + 'static,
) -> ResponseStream<T> {
    let stopped = Box::pin(stop.clone().cancelled_owned());
    Box::pin(stream::unfold(Some((Box::pin(items), stopped)), |state| async move {
        let (mut items, mut stopped) = state?;
        tokio::select! {
            // The available items come before the end of the stream.
            biased;
            item = items.next() => Some((Ok(item?), Some((items, stopped)))),
            () = &mut stopped => Some((Err(stopping_status()), None)),
        }
    }))
}

/// Streams the tree: now, after each change, and when readiness clears failures, which is not a change of the tree.
pub(super) fn tree_stream(
    running: Arc<RunningNode>,
    mut changes: watch::Receiver<u64>,
) -> impl Stream<Item = v1::TreeResponse> + Send {
    // The receiver regards the present tree as a change, so that the first item is sent at once.
    changes.mark_changed();
    stream::unfold((running, changes), |(running, mut changes)| async move {
        tokio::select! {
            changed = changes.changed() => changed.ok()?,
            () = failures_cleared(&running) => {}
        }
        // Without a supervisor the node is stopping, and the stream ends.
        running.supervisor.with(|_| ())?;
        Some((v1::TreeResponse { nodes: running.tree_nodes() }, (running, changes)))
    })
}

/// Resolves when readiness clears the failures of a runnable, if nothing changes until then.
async fn failures_cleared(running: &RunningNode) {
    let statuses = running.supervisor.with(Supervisor::snapshot).unwrap_or_default();
    match statuses.iter().filter_map(|status| status.failures_clear_in).min() {
        Some(time) => sleep(time).await,
        None => std::future::pending().await,
    }
}

/// Streams the health: now, after each change of the tree, and in each [`HEALTH_PERIOD`].
pub(super) fn health_stream(
    running: Arc<RunningNode>,
    mut changes: watch::Receiver<u64>,
) -> impl Stream<Item = v1::HealthResponse> + Send {
    changes.mark_changed();
    stream::unfold((running, changes, Duration::ZERO), |(running, mut changes, pause)| async move {
        sleep(pause).await;
        tokio::select! {
            changed = changes.changed() => changed.ok()?,
            () = failures_cleared(&running) => {}
            () = sleep(HEALTH_PERIOD) => {}
        }
        running.supervisor.with(|_| ())?;
        let health = wire::health_to_wire(running.assess_health().await);
        Some((health, (running, changes, HEALTH_PAUSE)))
    })
}

/// Streams log entries, as many in one message as are available and fit.
pub(super) fn log_stream(reader: LogReader) -> impl Stream<Item = v1::LogsResponse> + Send {
    stream::unfold(reader, |mut reader| async move {
        // The stream waits for the first entry only. The rest of the message is what is available then.
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
        // A client that resumes with this cursor continues after the last entry.
        let cursor = reader.cursor().to_string();
        Some((v1::LogsResponse { entries, cursor }, reader))
    })
}

/// Streams the kept events of the reader's scope, then, with `follow`, new ones, until the server with this DN and generation stops: at a stop of the
/// node, the control API is the last runnable, so that the events of all others come before. Then it ends with `UNAVAILABLE`.
pub(super) fn event_stream(
    reader: EventHistoryReader,
    follow: bool,
    server: String,
    generation: u64,
) -> impl Stream<Item = Result<v1::EventsResponse, Status>> + Send {
    stream::unfold(Some((reader, false, server)), move |state| async move {
        let (mut reader, is_stopping, server) = state?;
        if is_stopping {
            return Some((Err(stopping_status()), None));
        }
        let mut batch = reader.take_unread(MAX_ENTRIES);
        while batch.is_empty() {
            if !follow {
                return None;
            }
            reader.wait_for_unread().await;
            batch = reader.take_unread(MAX_ENTRIES);
        }
        let is_stopping = follow && batch.iter().any(|event| stops_server(event, &server, generation));
        // The end of the stream is an event that may be out of the scope: a message may be empty.
        let in_scope = batch.iter().filter(|event| reader.scope().contains(event));
        let events = in_scope.map(wire::event_to_wire).collect();
        Some((Ok(v1::EventsResponse { events }), Some((reader, is_stopping, server))))
    })
}

fn stops_server(event: &NodeEvent, server: &str, generation: u64) -> bool {
    let is_canceling = matches!(&event.kind, NodeEventKind::Change(RunnableChange::Canceling { .. }));
    // A restart of the server is in the backlog of later streams, which it must not end.
    is_canceling && *event.dn == *server && event.generation == generation
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::time::Instant;

    use nodekeel_supervisor::{CancelCause, ChildSpec, Context};

    use super::*;
    use crate::dn::CONTROL as CONTROL_DN;
    use crate::event_history::{EventHistory, EventScope};

    fn stopping_event(dn: &str, generation: u64) -> NodeEvent {
        let kind = NodeEventKind::Change(RunnableChange::Canceling { cause: CancelCause::Shutdown });
        NodeEvent { seq: 1, at: Instant::now(), dn: dn.into(), generation, kind }
    }

    #[test]
    fn only_the_stop_of_this_incarnation_of_the_control_api_ends_its_streams() {
        assert!(stops_server(&stopping_event("root.control", 2), "root.control", 2));
        assert!(!stops_server(&stopping_event("root.control", 1), "root.control", 2));
        assert!(!stops_server(&stopping_event("root.service.a", 2), "root.control", 2));
    }

    #[tokio::test]
    async fn what_is_available_at_a_stop_is_sent_before_the_end() {
        let stop = CancellationToken::new();
        stop.cancel();
        let items = stream::iter([1, 2, 3]).chain(stream::pending());
        let sent: Vec<_> = until_stopped(&stop, items).collect().await;
        let (last, items) = sent.split_last().expect("an end");
        assert_eq!(items.iter().flatten().collect::<Vec<_>>(), [&1, &2, &3]);
        assert_eq!(last.as_ref().expect_err("the node stops").code(), tonic::Code::Unavailable);
        let complete: Vec<_> = until_stopped(&stop, stream::iter([1])).collect().await;
        assert!(matches!(complete[..], [Ok(1)]), "{complete:?}");
    }

    #[tokio::test]
    async fn a_client_that_follows_gets_every_event_until_the_control_api_stops() {
        let history = EventHistory::new(NonZeroUsize::new(100).expect("not zero"));
        let run = |ctx: Context| async move {
            ctx.signal_ready()?;
            ctx.until_canceled().await
        };
        let root = move |ctx: Context| async move {
            ctx.run_child("control", run)?;
            ctx.run_group([ChildSpec::new("a", run).stop_before([CONTROL_DN])])?;
            ctx.signal_ready()?;
            ctx.until_canceled().await
        };
        let supervisor = Supervisor::builder().event_hook(history.clone()).start(root);
        supervisor.wait_ready("root.a").await.expect("it runs");
        supervisor.wait_ready("root.control").await.expect("it runs");
        let events = tokio::spawn(
            event_stream(history.read_events(None, EventScope::Node), true, "root.control".into(), 1)
                .collect::<Vec<_>>(),
        );
        supervisor.shutdown().await;
        let sent = events.await.expect("it ends");
        let (last, batches) = sent.split_last().expect("an end");
        assert_eq!(last.as_ref().expect_err("the node stops").code(), tonic::Code::Unavailable);
        let events = batches.iter().flatten().flat_map(|batch| &batch.events);
        let seen: Vec<_> = events.map(|event| format!("{} {}", event.dn, event.change)).collect();
        assert!(seen.contains(&"root.a exited".to_owned()), "{seen:?}");
        assert!(seen.contains(&"root.control canceling".to_owned()), "{seen:?}");
    }
}

//! The last events of the node: changes of its tree, conditions, and the requests of clients. DNs share the space: a crash loop evicts
//! its own events only.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use nodekeel_supervisor::{Event, EventHook, FairEventBuffer, NumberedEvent, RunnableChange};
use tokio::sync::watch;

use crate::caller::Caller;
use crate::dependency::is_descendant;
use crate::health::ConditionChange;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeEvent {
    /// The sequence number, from 1. A gap means that events were dropped.
    pub(crate) seq: u64,
    pub(crate) at: Instant,
    /// The DN that it concerns.
    pub(crate) dn: Arc<str>,
    /// The incarnation of this DN that it belongs to, counted from 1; 0 if there was none.
    pub(crate) generation: u64,
    pub(crate) kind: NodeEventKind,
}

/// An event of a node, by its kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NodeEventKind {
    /// A runnable of the tree changed.
    Change(RunnableChange),
    /// A client of the control API requested an action. What comes of it are the events after it.
    Request {
        /// The action, like "restart" or "signal SIGHUP".
        action: Arc<str>,
        /// The client; `None` if the kernel does not report it.
        caller: Option<Caller>,
    },
    /// Something that is no runnable, like a disk, has a condition, or no longer.
    Condition(ConditionChange),
}

impl NumberedEvent for NodeEvent {
    fn seq(&self) -> u64 {
        self.seq
    }

    fn dn(&self) -> &Arc<str> {
        &self.dn
    }
}

/// A bounded list of events. Cheap to clone; all clones share the list.
#[derive(Debug, Clone)]
pub(crate) struct EventHistory(Arc<KeptEvents>);

#[derive(Debug)]
struct KeptEvents {
    events: Mutex<NumberedEvents>,
    /// The `seq` of the newest event.
    newest: watch::Sender<u64>,
}

/// The events, with one numbering of changes and requests.
#[derive(Debug)]
struct NumberedEvents {
    buffer: FairEventBuffer<NodeEvent>,
    newest: u64,
    /// The number of events that the supervisor has not counted.
    own: u64,
}

/// The events that a reader gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EventScope {
    /// All.
    Node,
    /// Those of a DN, or also those of everything below it.
    Dn { dn: String, children: bool },
}

impl EventScope {
    pub(crate) fn contains(&self, event: &NodeEvent) -> bool {
        match self {
            Self::Node => true,
            Self::Dn { dn, children } => *event.dn == **dn || *children && is_descendant(&event.dn, dn),
        }
    }
}

/// Reads an [`EventHistory`]. An event that is evicted before it is read shows as a gap in [`NodeEvent::seq`].
#[derive(Debug)]
pub(crate) struct EventHistoryReader {
    history: EventHistory,
    newest: watch::Receiver<u64>,
    /// The `seq` of the last event that was read.
    last_read: u64,
    scope: EventScope,
}

impl EventHistory {
    /// Creates a history that keeps this number of events, see [`FairEventBuffer`] for which of them.
    pub(crate) fn new(keep: NonZeroUsize) -> Self {
        let events = NumberedEvents { buffer: FairEventBuffer::new(keep), newest: 0, own: 0 };
        Self(Arc::new(KeptEvents { events: Mutex::new(events), newest: watch::Sender::new(0) }))
    }

    /// Adds a request of a client for an action on a DN, in this incarnation of it.
    pub(crate) fn add_request(&self, dn: &str, generation: u64, action: &str, caller: Option<Caller>) {
        self.add_own(dn, generation, NodeEventKind::Request { action: action.into(), caller });
    }

    /// Adds the beginning or the end of a condition, under a DN.
    pub(crate) fn add_condition(&self, dn: &str, change: ConditionChange) {
        self.add_own(dn, 0, NodeEventKind::Condition(change));
    }

    fn add_own(&self, dn: &str, generation: u64, kind: NodeEventKind) {
        self.push_event(|events| {
            events.own += 1;
            NodeEvent { seq: events.newest + 1, at: Instant::now(), dn: dn.into(), generation, kind }
        });
    }

    /// Reads from the newest `backlog` events of the scope on; `None` reads from the oldest kept one.
    pub(crate) fn read_events(&self, backlog: Option<u64>, scope: EventScope) -> EventHistoryReader {
        // Subscribed before the buffer is read: an event in between wakes the reader.
        let newest = self.0.newest.subscribe();
        let count = backlog.map_or(usize::MAX, |count| usize::try_from(count).unwrap_or(usize::MAX));
        let events = self.lock_events();
        let last_read = if scope == EventScope::Node {
            events.buffer.seq_before_newest(count)
        } else {
            let in_scope = events.buffer.events_after(0).filter(|event| scope.contains(event));
            let seqs: Vec<u64> = in_scope.map(|event| event.seq).collect();
            seqs.get(seqs.len().saturating_sub(count)).map_or(events.newest, |first| first - 1)
        };
        drop(events);
        EventHistoryReader { history: self.clone(), newest, last_read, scope }
    }

    fn push_event(&self, event: impl FnOnce(&mut NumberedEvents) -> NodeEvent) {
        let mut events = self.lock_events();
        let event = event(&mut events);
        events.newest = event.seq;
        let evicted = events.buffer.push(event);
        // Sent under the lock, so that readers see the numbers in order.
        self.0.newest.send_replace(events.newest);
        drop(events);
        // Freed without the lock, which the supervisor's hook waits for.
        drop(evicted);
    }

    fn lock_events(&self) -> MutexGuard<'_, NumberedEvents> {
        self.0.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EventHook for EventHistory {
    fn on_event(&self, event: &Event) {
        let Event { seq, at, dn, generation, change, .. } = event.clone();
        let kind = NodeEventKind::Change(change);
        // Each event that the supervisor has not counted has taken a number since.
        self.push_event(|events| NodeEvent { seq: seq + events.own, at, dn, generation, kind });
    }
}

impl EventHistoryReader {
    /// The next events, oldest first, at most `max`; empty if none is available.
    pub(crate) fn take_unread(&mut self, max: usize) -> Vec<NodeEvent> {
        let batch: Vec<_> =
            self.history.lock_events().buffer.events_after(self.last_read).take(max).cloned().collect();
        if let Some(last) = batch.last() {
            self.last_read = last.seq;
        }
        batch
    }

    /// The events to show.
    pub(crate) fn scope(&self) -> &EventScope {
        &self.scope
    }

    /// Waits until [`take_unread`](Self::take_unread) has an event.
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub(crate) async fn wait_for_unread(&mut self) {
        let after = self.last_read;
        // The sender exists as long as the history, which this reader owns.
        let _ = self.newest.wait_for(|newest| *newest > after).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_of_a_dn_gets_its_newest_events_with_or_without_those_below() {
        let history = EventHistory::new(NonZeroUsize::new(100).expect("not zero"));
        for dn in ["root.a", "root.b", "root.a.x", "root.a", "root.ab", "root.b"] {
            history.add_request(dn, 1, "restart", None);
        }
        let read = |backlog, dn: &str, children| {
            let mut reader = history.read_events(backlog, EventScope::Dn { dn: dn.to_owned(), children });
            let batch = reader.take_unread(100);
            let seqs: Vec<u64> =
                batch.iter().filter(|event| reader.scope().contains(event)).map(|event| event.seq).collect();
            (seqs, batch.last().map_or(6, |event| event.seq))
        };
        assert_eq!(read(None, "root.a", false), (vec![1, 4], 6));
        assert_eq!(read(None, "root.a", true), (vec![1, 3, 4], 6));
        assert_eq!(read(Some(1), "root.a", false), (vec![4], 6));
        assert_eq!(read(Some(2), "root.a", true), (vec![3, 4], 6));
        assert_eq!(read(Some(9), "root", true), (vec![1, 2, 3, 4, 5, 6], 6));
        for (backlog, dn) in [(Some(0), "root.a"), (Some(3), "root.c"), (None, "root.c")] {
            assert_eq!(read(backlog, dn, true).0, [0; 0], "{backlog:?} {dn}");
        }
    }
}

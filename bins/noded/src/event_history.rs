//! The last events of the tree, which can be read from any of them on without a gap.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use nodekeel_supervisor::{Event, EventHook};
use tokio::sync::watch;

/// A bounded list of events. Cheap to clone; all clones share the list.
#[derive(Debug, Clone)]
pub struct EventHistory(Arc<EventBuffer>);

#[derive(Debug)]
struct EventBuffer {
    events: Mutex<VecDeque<Event>>,
    keep: usize,
    /// The `seq` of the newest event.
    newest: watch::Sender<u64>,
}

/// Reads an [`EventHistory`]. An event that is evicted before it is read shows as a gap in [`Event::seq`].
#[derive(Debug)]
pub struct EventHistoryReader {
    history: EventHistory,
    newest: watch::Receiver<u64>,
    /// The `seq` of the last event that was read.
    last_read: u64,
}

impl EventHistory {
    /// Creates a history that keeps this number of events.
    pub fn new(keep: NonZeroUsize) -> Self {
        let keep = keep.get();
        Self(Arc::new(EventBuffer { events: Mutex::default(), keep, newest: watch::Sender::new(0) }))
    }

    /// Reads from the newest `backlog` events on; `None` reads from the oldest kept one.
    pub fn read_events(&self, backlog: Option<u64>) -> EventHistoryReader {
        let newest = self.0.newest.subscribe();
        let after = backlog.map_or(0, |count| newest.borrow().saturating_sub(count));
        EventHistoryReader { history: self.clone(), newest, last_read: after }
    }
}

impl EventHook for EventHistory {
    fn on_event(&self, event: &Event) {
        let mut events = self.0.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() == self.0.keep {
            events.pop_front();
        }
        events.push_back(event.clone());
        drop(events);
        self.0.newest.send_replace(event.seq);
    }
}

impl EventHistoryReader {
    /// The next events, oldest first, at most `max`; empty if none is available.
    pub fn take_unread(&mut self, max: usize) -> Vec<Event> {
        let events = self.history.0.events.lock().unwrap_or_else(PoisonError::into_inner);
        let first = events.partition_point(|event| event.seq <= self.last_read);
        let batch: Vec<_> = events.iter().skip(first).take(max).cloned().collect();
        if let Some(last) = batch.last() {
            self.last_read = last.seq;
        }
        batch
    }

    /// Waits until [`take_unread`](Self::take_unread) has an event.
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub async fn wait_for_unread(&mut self) {
        let after = self.last_read;
        // The sender exists as long as the history, which this reader owns.
        let _ = self.newest.wait_for(|newest| *newest > after).await;
    }
}

//! The last events of the tree, to be read from any of them on without a gap.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use nodekeel_supervisor::{Event, EventHook};
use tokio::sync::watch;

/// A bounded list of events. It is cheap to clone; every clone is the same list.
#[derive(Debug, Clone)]
pub struct History(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    events: Mutex<VecDeque<Event>>,
    keep: usize,
    /// The `seq` of the newest event.
    newest: watch::Sender<u64>,
}

/// Reads a [`History`] at its own pace. What it has not read when it is evicted shows as a gap in [`Event::seq`].
#[derive(Debug)]
pub struct HistoryReader {
    history: History,
    newest: watch::Receiver<u64>,
    /// The `seq` of the last event that was read.
    after: u64,
}

impl History {
    /// Keeps so many events.
    pub fn new(keep: NonZeroUsize) -> Self {
        let keep = keep.get();
        Self(Arc::new(Inner { events: Mutex::default(), keep, newest: watch::Sender::new(0) }))
    }

    /// Reads from the newest `backlog` events on; `None` is from the oldest that is kept.
    pub fn read(&self, backlog: Option<u64>) -> HistoryReader {
        let newest = self.0.newest.subscribe();
        let after = backlog.map_or(0, |count| newest.borrow().saturating_sub(count));
        HistoryReader { history: self.clone(), newest, after }
    }
}

impl EventHook for History {
    fn event(&self, event: &Event) {
        let mut events = self.0.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() == self.0.keep {
            events.pop_front();
        }
        events.push_back(event.clone());
        drop(events);
        self.0.newest.send_replace(event.seq);
    }
}

impl HistoryReader {
    /// The next events that are there, oldest first, at most `max`; empty if there are none now.
    pub fn take(&mut self, max: usize) -> Vec<Event> {
        let events = self.history.0.events.lock().unwrap_or_else(PoisonError::into_inner);
        let first = events.partition_point(|event| event.seq <= self.after);
        let taken: Vec<_> = events.iter().skip(first).take(max).cloned().collect();
        if let Some(last) = taken.last() {
            self.after = last.seq;
        }
        taken
    }

    /// Waits until there is one to [`take`](Self::take).
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub async fn ready(&mut self) {
        let after = self.after;
        // The sender lives as long as the history that this reader holds.
        let _ = self.newest.wait_for(|newest| *newest > after).await;
    }
}

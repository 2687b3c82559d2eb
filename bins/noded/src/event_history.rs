//! The last events of the tree. Runnables share the space: a crash loop evicts its own events only.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nodekeel_supervisor::{Event, EventBuffer, EventHook};
use tokio::sync::watch;

/// A bounded list of events. Cheap to clone; all clones share the list.
#[derive(Debug, Clone)]
pub struct EventHistory(Arc<KeptEvents>);

#[derive(Debug)]
struct KeptEvents {
    events: Mutex<EventBuffer>,
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
    /// Creates a history that keeps this number of events, see [`EventBuffer`] for which of them.
    pub fn new(keep: NonZeroUsize) -> Self {
        let events = Mutex::new(EventBuffer::new(keep));
        Self(Arc::new(KeptEvents { events, newest: watch::Sender::new(0) }))
    }

    /// Reads from the newest `backlog` events on; `None` reads from the oldest kept one.
    pub fn read_events(&self, backlog: Option<u64>) -> EventHistoryReader {
        let newest = self.0.newest.subscribe();
        let count = backlog.map_or(usize::MAX, |count| usize::try_from(count).unwrap_or(usize::MAX));
        let last_read = self.lock_events().seq_before_newest(count);
        EventHistoryReader { history: self.clone(), newest, last_read }
    }

    fn lock_events(&self) -> MutexGuard<'_, EventBuffer> {
        self.0.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EventHook for EventHistory {
    fn on_event(&self, event: &Event) {
        // The one that it evicts is dropped without the lock.
        let evicted = self.lock_events().push(event.clone());
        drop(evicted);
        self.0.newest.send_replace(event.seq);
    }
}

impl EventHistoryReader {
    /// The next events, oldest first, at most `max`; empty if none is available.
    pub fn take_unread(&mut self, max: usize) -> Vec<Event> {
        let batch: Vec<_> =
            self.history.lock_events().events_after(self.last_read).take(max).cloned().collect();
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

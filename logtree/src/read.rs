//! Reading: backlog, then live.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::SystemTime;

use futures_core::Stream;
use tokio::task::coop::poll_proceed;

use crate::cursor::{Batch, Item};
use crate::decode::decode;
use crate::journal::Shared;
use crate::{Body, Dropped, Entry};

/// Entries fetched while the lock is held once.
const CHUNK: usize = 512;

/// Entries in order: the backlog, then, if the query follows, what is written from then on. A [`Stream`] too.
///
/// It holds places, not entries: what is written waits in the journal until it is read or evicted there, and then a
/// [`Body::Dropped`] stands in its place with the exact count. Dropping the reader ends it at once.
pub struct Reader {
    shared: Arc<Shared>,
    id: usize,
    follow: bool,
    /// The first number that is not backlog.
    live_from: u64,
    in_backlog: bool,
    ready: VecDeque<Entry>,
    position: u64,
}

impl Reader {
    pub(crate) fn new(
        shared: Arc<Shared>,
        id: usize,
        live_from: u64,
        follow: bool,
        after: Option<u64>,
    ) -> Reader {
        let position = after.unwrap_or(0);
        Reader { shared, id, follow, live_from, in_backlog: true, ready: VecDeque::new(), position }
    }

    /// What is left of the backlog. For a large one see [`Reader::backlog_chunk`].
    pub fn backlog(&mut self) -> Vec<Entry> {
        let mut all = Vec::new();
        loop {
            let chunk = self.backlog_chunk(CHUNK);
            if chunk.is_empty() {
                return all;
            }
            all.extend(chunk);
        }
    }

    /// Up to `max` entries of the backlog; none when it is read.
    pub fn backlog_chunk(&mut self, max: usize) -> Vec<Entry> {
        while self.in_backlog && self.ready.len() < max && self.fetch(max - self.ready.len(), None) {}
        if !self.in_backlog && self.ready.front().is_some_and(|entry| entry.seq >= self.live_from) {
            return Vec::new();
        }
        let chunk: Vec<Entry> = self.ready.drain(..max.min(self.ready.len())).collect();
        self.position = chunk.last().map_or(self.position, |entry| entry.seq);
        chunk
    }

    /// The next entry, waiting for it if the query follows; none at the end of a query that does not.
    ///
    /// # Cancel safety
    /// No entry is lost if the future is dropped.
    pub async fn next(&mut self) -> Option<Entry> {
        poll_fn(|cx| self.poll_entry(cx)).await
    }

    /// The next entry if there is one now.
    pub fn try_next(&mut self) -> Option<Entry> {
        while self.ready.is_empty() && self.fetch(CHUNK, None) {}
        self.take()
    }

    /// The number of the last entry read: give it to [`Query::after`](crate::Query::after) to go on after it.
    pub fn position(&self) -> u64 {
        self.position
    }

    fn take(&mut self) -> Option<Entry> {
        let entry = self.ready.pop_front()?;
        self.position = entry.seq;
        Some(entry)
    }

    fn poll_entry(&mut self, cx: &mut Context<'_>) -> Poll<Option<Entry>> {
        // With enough to read, a task could go on for ever without letting others of its thread run.
        let budget = ready!(poll_proceed(cx));
        loop {
            if let Some(entry) = self.take() {
                budget.made_progress();
                return Poll::Ready(Some(entry));
            }
            if !self.fetch(CHUNK, Some(cx.waker())) && self.ready.is_empty() {
                return if self.follow { Poll::Pending } else { Poll::Ready(None) };
            }
        }
    }

    /// Fetches entries; false when there are no more now. Then, and under the same lock, has `waker` woken by the next.
    fn fetch(&mut self, max: usize, waker: Option<&Waker>) -> bool {
        if !self.in_backlog && !self.follow {
            return false;
        }
        let until = if self.in_backlog { self.live_from } else { u64::MAX };
        let mut batch = Batch::default();
        // Wakers are cloned and dropped without the lock: what they do is not ours.
        let mut waker = waker.cloned();
        let mut state = self.shared.state();
        let all = state.pull(self.id, until, max, &mut batch);
        if all && !self.in_backlog && batch.items.is_empty() {
            waker = waker.and_then(|waker| state.wait(self.id, waker));
        }
        drop(state);
        drop(waker);
        self.decode(batch);
        // The end of the backlog is not the end of what there is, if the query follows.
        let ended_backlog = all && self.in_backlog;
        self.in_backlog &= !all;
        !all || (ended_backlog && self.follow)
    }

    fn decode(&mut self, batch: Batch) {
        let Batch { bytes, items } = batch;
        self.ready.extend(items.into_iter().map(|(dn, item)| match item {
            Item::Record(range) => decode(dn, &bytes[range]),
            Item::Missed(missed) => {
                let body = Body::Dropped(Dropped { count: missed.count, exact: !missed.at_most });
                Entry { seq: missed.seq, dn, time: SystemTime::now(), body }
            }
        }));
    }
}

impl Stream for Reader {
    type Item = Entry;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Entry>> {
        self.get_mut().poll_entry(cx)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let left = self.shared.state().unsubscribe(self.id);
        drop(left);
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader")
            .field("position", &self.position)
            .field("follow", &self.follow)
            .finish_non_exhaustive()
    }
}

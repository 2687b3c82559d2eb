//! Readers: backlog, then live entries.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::SystemTime;

use futures_core::Stream;
use tokio::task::coop::poll_proceed;

use crate::cursor::{BatchItem, RecordBatch};
use crate::decode::decode_record;
use crate::log_store::SharedLogStore;
use crate::{DroppedEntries, EntryBody, LogCursor, LogEntry};

/// Maximum number of entries fetched under one lock.
const CHUNK_ENTRIES: usize = 512;

/// Entries in order: the backlog, then new entries if the query follows. It is a [`Stream`], too.
///
/// It holds positions, not entries: entries wait in the store until they are read or evicted. An
/// [`EntryBody::Dropped`] with the exact count takes the place of evicted entries. Dropping the reader ends
/// it at once.
pub struct LogReader {
    shared: Arc<SharedLogStore>,
    id: usize,
    follow: bool,
    /// The first sequence number after the backlog.
    live_from: u64,
    in_backlog: bool,
    decoded: VecDeque<LogEntry>,
    last_seq: u64,
}

impl LogReader {
    pub(crate) fn new(
        shared: Arc<SharedLogStore>,
        (id, live_from): (usize, u64),
        follow: bool,
        last_seq: u64,
    ) -> LogReader {
        LogReader { shared, id, follow, live_from, in_backlog: true, decoded: VecDeque::new(), last_seq }
    }

    /// Reads the rest of the backlog. For a large backlog, see [`LogReader::read_backlog_chunk`].
    pub fn read_backlog(&mut self) -> Vec<LogEntry> {
        let mut all = Vec::new();
        loop {
            let chunk = self.read_backlog_chunk(CHUNK_ENTRIES);
            if chunk.is_empty() {
                return all;
            }
            all.extend(chunk);
        }
    }

    /// Reads up to `max` entries of the backlog; empty at its end.
    pub fn read_backlog_chunk(&mut self, max: usize) -> Vec<LogEntry> {
        while self.in_backlog
            && self.decoded.len() < max
            && self.fetch_entries(max - self.decoded.len(), None)
        {}
        if !self.in_backlog && self.decoded.front().is_some_and(|entry| entry.seq >= self.live_from) {
            return Vec::new();
        }
        let chunk: Vec<LogEntry> = self.decoded.drain(..max.min(self.decoded.len())).collect();
        self.last_seq = chunk.last().map_or(self.last_seq, |entry| entry.seq);
        chunk
    }

    /// The next entry. Waits for it if the query follows; otherwise `None` at the end of the backlog.
    ///
    /// # Cancel safety
    /// Dropping the future loses no entry.
    pub async fn next(&mut self) -> Option<LogEntry> {
        poll_fn(|cx| self.poll_entry(cx)).await
    }

    /// The next entry if one is available now.
    pub fn try_next(&mut self) -> Option<LogEntry> {
        while self.decoded.is_empty() && self.fetch_entries(CHUNK_ENTRIES, None) {}
        self.take_decoded()
    }

    /// The position of the last entry read: pass it to [`LogQuery::after`](crate::LogQuery::after) to resume
    /// after it.
    pub fn cursor(&self) -> LogCursor {
        LogCursor { store_id: self.shared.lock_state().store_id, seq: self.last_seq }
    }

    /// The sequence number of the last entry read.
    pub fn last_seq(&self) -> u64 {
        self.last_seq
    }

    fn take_decoded(&mut self) -> Option<LogEntry> {
        let entry = self.decoded.pop_front()?;
        self.last_seq = entry.seq;
        Some(entry)
    }

    fn poll_entry(&mut self, cx: &mut Context<'_>) -> Poll<Option<LogEntry>> {
        // With enough entries to read, a task could starve the others of its thread.
        let budget = ready!(poll_proceed(cx));
        loop {
            if let Some(entry) = self.take_decoded() {
                budget.made_progress();
                return Poll::Ready(Some(entry));
            }
            if !self.fetch_entries(CHUNK_ENTRIES, Some(cx.waker())) && self.decoded.is_empty() {
                return if self.follow { Poll::Pending } else { Poll::Ready(None) };
            }
        }
    }

    /// Fetches entries; false if none are left now. In that case, it registers `waker` for the next entry
    /// under the same lock.
    fn fetch_entries(&mut self, max: usize, waker: Option<&Waker>) -> bool {
        if !self.in_backlog && !self.follow {
            return false;
        }
        let until = if self.in_backlog { self.live_from } else { u64::MAX };
        let mut batch = RecordBatch::default();
        // Wakers are cloned and dropped without the lock, because they run foreign code.
        let mut waker = waker.cloned();
        let mut state = self.shared.lock_state();
        let all = state.pull_batch(self.id, until, max, &mut batch);
        if all && !self.in_backlog && batch.items.is_empty() {
            waker = waker.and_then(|waker| state.set_waker(self.id, waker));
        }
        drop(state);
        drop(waker);
        self.decode_batch(batch);
        // If the query follows, live entries may come after the backlog.
        let ended_backlog = all && self.in_backlog;
        self.in_backlog &= !all;
        !all || (ended_backlog && self.follow)
    }

    fn decode_batch(&mut self, batch: RecordBatch) {
        let RecordBatch { bytes, items } = batch;
        self.decoded.extend(items.into_iter().map(|(dn, item)| match item {
            BatchItem::Record(range) => decode_record(dn, &bytes[range]),
            BatchItem::Missed(missed) => {
                let body =
                    EntryBody::Dropped(DroppedEntries { count: missed.count, exact: !missed.is_upper_bound });
                LogEntry { seq: missed.seq, dn, time: SystemTime::now(), body }
            }
        }));
    }
}

impl Stream for LogReader {
    type Item = LogEntry;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<LogEntry>> {
        self.get_mut().poll_entry(cx)
    }
}

impl Drop for LogReader {
    fn drop(&mut self) {
        let left = self.shared.lock_state().remove_reader(self.id);
        drop(left);
    }
}

impl fmt::Debug for LogReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader")
            .field("position", &self.last_seq)
            .field("follow", &self.follow)
            .finish_non_exhaustive()
    }
}

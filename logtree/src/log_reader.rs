//! Readers: backlog, then live entries.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker, ready};

use futures_core::Stream;
use tokio::task::coop::poll_proceed;

use crate::clock::follow_wall_clock;
use crate::merge::{Remaining, RingMerge};
use crate::shared_store::SharedLogStore;
use crate::{EntryBody, LogCursor, LogEntry};

const CHUNK_ENTRIES: usize = 512;

/// Entries in order: the backlog, then new entries if the query follows. It is a [`Stream`], too.
///
/// A reader holds positions, not entries: entries wait in the store until they are read or evicted. An
/// [`EntryBody::Dropped`](crate::EntryBody::Dropped) with the exact count takes the place of evicted entries.
/// Dropping the reader ends it at once.
pub struct LogReader {
    shared: Arc<SharedLogStore>,
    merge: RingMerge,
    follow: bool,
    /// The first sequence number after the backlog.
    live_from: u64,
    in_backlog: bool,
    decoded: VecDeque<LogEntry>,
    last_seq: u64,
}

impl LogReader {
    /// A reader whose live entries begin with number `live_from`.
    pub(crate) fn new(
        shared: Arc<SharedLogStore>,
        merge: RingMerge,
        live_from: u64,
        last_seq: u64,
    ) -> LogReader {
        let follow = merge.follower().is_some();
        LogReader { shared, merge, follow, live_from, in_backlog: true, decoded: VecDeque::new(), last_seq }
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
        while self.in_backlog && self.decoded.len() < max {
            self.fetch_entries(max - self.decoded.len());
        }
        // Only live entries are left, which are not a part of the backlog.
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
        while self.decoded.is_empty()
            && matches!(self.fetch_entries(CHUNK_ENTRIES), FetchResult::Fetched | FetchResult::Rejected)
        {
        }
        self.take_decoded()
    }

    /// The position of the last entry read: pass it to [`LogQuery::after`](crate::LogQuery::after) to resume after it.
    /// Entries from before it that were dropped, and not yet reported to this reader, are reported to the next one as
    /// an upper bound.
    pub fn cursor(&self) -> LogCursor {
        LogCursor { store_id: self.shared.store_id, seq: self.last_seq, missed: self.unreported_entries() }
    }

    /// The maximum number of entries up to the last one read that were dropped and are not reported.
    fn unreported_entries(&self) -> u64 {
        if self.last_seq == 0 {
            // The next reader starts where this one did.
            return 0;
        }
        let decoded = self.decoded.iter().map(|entry| match entry.body {
            EntryBody::Dropped(dropped) => dropped.count,
            _ => 0,
        });
        decoded.fold(self.merge.unreported_up_to(self.last_seq), u64::saturating_add)
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
            match self.fetch_entries(CHUNK_ENTRIES) {
                FetchResult::Fetched => {}
                // The filters may reject very many.
                FetchResult::Rejected => {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                FetchResult::End => return Poll::Ready(None),
                FetchResult::Waiting if self.wait_for_entries(cx.waker()) => return Poll::Pending,
                FetchResult::Waiting => {}
            }
        }
    }

    /// Registers the waker for the next entry; false if there is one already.
    fn wait_for_entries(&self, waker: &Waker) -> bool {
        let Some(follower) = self.merge.follower() else { return true };
        // Wakers are cloned and dropped without a lock, because they run foreign code.
        match follower.set_waker(waker.clone()) {
            Ok(_previous) => true,
            Err(_unused) => false,
        }
    }

    fn fetch_entries(&mut self, max: usize) -> FetchResult {
        if !self.in_backlog && !self.follow {
            return FetchResult::End;
        }
        follow_wall_clock();
        // Read before the notices: a reader with an earlier number has given notice.
        let newest = self.shared.next_seq.0.load(Ordering::Acquire);
        self.merge.take_notices();
        let until = if self.in_backlog { self.live_from } else { newest };
        let before = self.decoded.len();
        let result = self.merge.pull_entries(until, max, &mut self.decoded);
        if result == Remaining::Done && self.in_backlog {
            self.in_backlog = false;
            return FetchResult::Fetched;
        }
        match result {
            _ if self.decoded.len() > before => FetchResult::Fetched,
            Remaining::Done if self.merge.is_drained() => FetchResult::Waiting,
            // There are newer ones by now.
            Remaining::Done => FetchResult::Fetched,
            Remaining::More => FetchResult::Rejected,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FetchResult {
    /// Entries, or the end of the backlog: fetch again for more.
    Fetched,
    /// Only entries that the filters reject, so far.
    Rejected,
    /// Nothing until the next entry is written.
    Waiting,
    /// Nothing ever again.
    End,
}

impl Stream for LogReader {
    type Item = LogEntry;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<LogEntry>> {
        self.get_mut().poll_entry(cx)
    }
}

impl Drop for LogReader {
    fn drop(&mut self) {
        self.shared.remove_reader(self.merge.follower(), self.merge.waiting_names());
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

//! Events in a bounded space, which names share fairly.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::event::Event;

/// An event with a name and a sequence number.
pub trait NumberedEvent {
    /// The sequence number.
    fn seq(&self) -> u64;

    /// The name that it belongs to.
    fn dn(&self) -> &Arc<str>;
}

impl NumberedEvent for Event {
    fn seq(&self) -> u64 {
        self.seq
    }

    fn dn(&self) -> &Arc<str> {
        &self.dn
    }
}

/// Events in the order of their sequence numbers, at most a fixed number. When it is full, the name with the most
/// events loses its oldest one: a crash loop evicts its own events, not those of a quiet runnable.
#[derive(Debug)]
pub struct FairEventBuffer<E = Event> {
    capacity: usize,
    events: BTreeMap<u64, E>,
    /// The sequence numbers of the events of each name, oldest first.
    seqs_by_dn: HashMap<Arc<str>, VecDeque<u64>>,
    /// The number of events of each name, and the oldest of them. The last one is the next to be dropped.
    busiest: BTreeSet<(usize, Reverse<u64>)>,
}

impl<E: NumberedEvent> FairEventBuffer<E> {
    /// An empty buffer for this number of events.
    pub fn new(capacity: NonZeroUsize) -> Self {
        Self {
            capacity: capacity.get(),
            events: BTreeMap::new(),
            seqs_by_dn: HashMap::new(),
            busiest: BTreeSet::new(),
        }
    }

    /// Adds an event, which must be newer than all others, and returns the one that was dropped for it.
    pub fn push(&mut self, event: E) -> Option<E> {
        let seqs = self.seqs_by_dn.entry(Arc::clone(event.dn())).or_default();
        if let Some(oldest) = seqs.front() {
            // The key contains the count, so the entry is removed and inserted again.
            self.busiest.remove(&(seqs.len(), Reverse(*oldest)));
        }
        seqs.push_back(event.seq());
        self.busiest.insert((seqs.len(), Reverse(seqs[0])));
        self.events.insert(event.seq(), event);
        // Of several names with the most events, the one with the oldest event loses it.
        let (_, Reverse(oldest)) = *self.busiest.last().filter(|_| self.events.len() > self.capacity)?;
        self.remove_oldest(oldest)
    }

    /// Removes the oldest event.
    pub fn pop_oldest(&mut self) -> Option<E> {
        let oldest = *self.events.keys().next()?;
        self.remove_oldest(oldest)
    }

    /// The events that are newer than this sequence number, oldest first.
    pub fn events_after(&self, seq: u64) -> impl Iterator<Item = &E> {
        self.events.range(seq.saturating_add(1)..).map(|(_, event)| event)
    }

    /// The sequence number before the newest `count` events: [`events_after`](Self::events_after) it returns
    /// them.
    pub fn seq_before_newest(&self, count: usize) -> u64 {
        let newest = || self.events.keys().next_back().copied().unwrap_or(0);
        match count.checked_sub(1) {
            Some(others) => self.events.keys().rev().nth(others).map_or(0, |first| first - 1),
            None => newest(),
        }
    }

    /// Removes the event with this number, the oldest one of its name.
    fn remove_oldest(&mut self, seq: u64) -> Option<E> {
        let event = self.events.remove(&seq)?;
        let seqs = self.seqs_by_dn.get_mut(event.dn())?;
        self.busiest.remove(&(seqs.len(), Reverse(seq)));
        seqs.pop_front();
        match seqs.front() {
            Some(oldest) => _ = self.busiest.insert((seqs.len(), Reverse(*oldest))),
            None => _ = self.seqs_by_dn.remove(event.dn()),
        }
        Some(event)
    }
}

/// The events that wait for the hook.
#[derive(Debug)]
pub(crate) struct EventQueue {
    state: Mutex<QueueState>,
    changed: Notify,
}

#[derive(Debug)]
struct QueueState {
    waiting: FairEventBuffer,
    /// The number of events that were dropped because the hook was too slow.
    dropped: u64,
    closed: bool,
}

impl EventQueue {
    pub(crate) fn new(capacity: NonZeroUsize) -> Self {
        let waiting = FairEventBuffer::new(capacity);
        Self { state: Mutex::new(QueueState { waiting, dropped: 0, closed: false }), changed: Notify::new() }
    }

    pub(crate) fn push(&self, event: Event) {
        let mut state = self.lock();
        let dropped = state.waiting.push(event);
        state.dropped += u64::from(dropped.is_some());
        drop(state);
        self.changed.notify_one();
    }

    /// Drops the events that wait, and returns the number of them.
    pub(crate) fn discard(&self) -> usize {
        let mut state = self.lock();
        std::iter::from_fn(|| state.waiting.pop_oldest()).count()
    }

    /// No event comes any more.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_one();
    }

    /// The next event and the number of events dropped so far; `None` after the last one.
    pub(crate) async fn next(&self) -> Option<(Event, u64)> {
        loop {
            {
                let mut state = self.lock();
                if let Some(event) = state.waiting.pop_oldest() {
                    return Some((event, state.dropped));
                }
                if state.closed {
                    return None;
                }
            }
            // `notify_one` keeps a permit: an event that was pushed after the lock was released is not missed.
            self.changed.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::RunnableChange;
    use std::time::Instant;

    fn event(seq: u64, dn: &str) -> Event {
        let change = RunnableChange::Started;
        Event { seq, at: Instant::now(), dn: dn.into(), generation: 1, change }
    }

    fn kept(buffer: &FairEventBuffer) -> Vec<(u64, &str)> {
        buffer.events_after(0).map(|event| (event.seq, &*event.dn)).collect()
    }

    #[test]
    fn a_crash_loop_evicts_its_own_events_and_not_those_of_a_quiet_name() {
        let mut buffer = FairEventBuffer::new(NonZeroUsize::new(6).expect("not zero"));
        for (seq, dn) in (1..).zip(["quiet", "quiet", "quiet", "loop"]) {
            assert_eq!(buffer.push(event(seq, dn)), None);
        }
        for seq in 5..1000 {
            buffer.push(event(seq, "loop"));
        }
        let expected =
            [(1, "quiet"), (2, "quiet"), (3, "quiet"), (997, "loop"), (998, "loop"), (999, "loop")];
        assert_eq!(kept(&buffer), expected);
        assert_eq!(buffer.seq_before_newest(4), 2);
        assert_eq!((buffer.seq_before_newest(0), buffer.seq_before_newest(100)), (999, 0));
    }

    /// The model: a list from which the oldest event of a largest name is removed.
    #[test]
    fn random_pushes_and_pops_agree_with_a_simple_model() {
        let mut random = 7_u64;
        for capacity in [1, 2, 5, 17] {
            let mut buffer = FairEventBuffer::new(NonZeroUsize::new(capacity).expect("not zero"));
            let mut model: Vec<Event> = Vec::new();
            for seq in 1..4000 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                if random >> 60 == 0 {
                    let oldest = if model.is_empty() { None } else { Some(model.remove(0)) };
                    assert_eq!(buffer.pop_oldest(), oldest);
                }
                // Some names are much more frequent than others.
                let dn =
                    ["a", "b", "c", "d", "e"][((random >> 33) as u32 % 1000 + 1).ilog(6).min(4) as usize];
                let new = event(seq, dn);
                model.push(new.clone());
                let count = |event: &Event| model.iter().filter(|other| other.dn == event.dn).count();
                let most = model.iter().map(count).max();
                let at = model.iter().position(|event| Some(count(event)) == most);
                let dropped = at.filter(|_| model.len() > capacity).map(|at| model.remove(at));
                assert_eq!(buffer.push(new), dropped);
                assert_eq!(buffer.events_after(0).cloned().collect::<Vec<_>>(), model);
                assert_eq!(buffer.busiest.len(), buffer.seqs_by_dn.len());
            }
        }
    }
}

//! In which order removed volumes are erased: pure, over the entries that wait and the time.

use std::time::{Duration, Instant};

use nodekeel_supervisor::Backoff;

/// Time for which one entry is erased while others wait. After a pause, a directory is read from its start again, so
/// short slices would read large directories often.
const SLICE: Duration = Duration::from_millis(200);

/// The time in which one entry is erased while others wait.
#[derive(Debug)]
pub(super) struct EraseSlice {
    start: Instant,
    /// When the first file was erased.
    first: Option<Instant>,
}

impl EraseSlice {
    pub(super) fn new(now: Instant) -> Self {
        Self { start: now, first: None }
    }

    /// Records that a file was erased, and returns whether the slice has ended: not before files were erased for as
    /// long as it took to find the first one. The next slice has to find it again, in a deep tree level by level.
    pub(super) fn record_progress(&mut self, now: Instant) -> bool {
        let first = *self.first.get_or_insert(now);
        now >= self.start + SLICE && now - first >= first - self.start
    }
}

/// The entries to erase.
///
/// Each turn gives one entry a slice of time: in turn the entry that has had the fewest slices, and the one that
/// was added first. So a small one waits for a large one for one slice at a time, and a large one gets at least
/// every second slice, however many small ones come.
#[derive(Debug)]
pub(super) struct EraseSchedule<E> {
    waiting: Vec<WaitingEntry<E>>,
    added: u64,
    backoff: Backoff,
    is_oldest_next: bool,
}

/// An entry to erase, and what has been done about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WaitingEntry<E> {
    pub(super) entry: E,
    /// Number of entries that were added before it.
    number: u64,
    slices: u64,
    failures: u32,
    /// When it is tried again after a failure.
    due: Option<Instant>,
}

impl<E> WaitingEntry<E> {
    /// Returns whether nothing has been done about it.
    pub(super) fn is_new(&self) -> bool {
        self.slices == 0 && self.failures == 0
    }

    fn is_due(&self, now: Instant) -> bool {
        self.due.is_none_or(|due| due <= now)
    }
}

/// The next action.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum EraseTurn<E> {
    /// Erase this entry, and give it back unless nothing of it is left.
    Erase(WaitingEntry<E>),
    /// Wait until then, or for a new entry: all others have failed.
    WaitUntil(Instant),
    /// Wait for an entry.
    Idle,
}

impl<E> EraseSchedule<E> {
    /// A schedule that tries an entry again after this backoff if it could not be erased.
    pub(super) fn new(backoff: Backoff) -> Self {
        Self { waiting: Vec::new(), added: 0, backoff, is_oldest_next: false }
    }

    pub(super) fn add_entry(&mut self, entry: E) {
        self.waiting.push(WaitingEntry { entry, number: self.added, slices: 0, failures: 0, due: None });
        self.added += 1;
    }

    /// Takes the entry whose turn it is.
    pub(super) fn next_turn(&mut self, now: Instant) -> EraseTurn<E> {
        let candidates = self.waiting.iter().enumerate().filter(|(_, waiting)| waiting.is_due(now));
        // Every second turn is the oldest entry's: otherwise new small ones could keep a large one from its
        // end.
        let next = if self.is_oldest_next {
            candidates.min_by_key(|(_, waiting)| (0, waiting.number))
        } else {
            candidates.min_by_key(|(_, waiting)| (waiting.slices, waiting.number))
        };
        match next.map(|(index, _)| index) {
            Some(index) => {
                self.is_oldest_next = !self.is_oldest_next;
                EraseTurn::Erase(self.waiting.swap_remove(index))
            }
            None => {
                let first = self.waiting.iter().filter_map(|waiting| waiting.due).min();
                first.map_or(EraseTurn::Idle, EraseTurn::WaitUntil)
            }
        }
    }

    /// Gives an entry back whose slice has ended.
    pub(super) fn yield_entry(&mut self, entry: WaitingEntry<E>) {
        // It has made progress, so the next failure starts with the shortest delay again.
        let slices = entry.slices + 1;
        self.waiting.push(WaitingEntry { slices, failures: 0, due: None, ..entry });
    }

    /// Gives an entry back that could not be erased. Returns the delay until it is tried again.
    pub(super) fn fail_entry(&mut self, entry: WaitingEntry<E>, now: Instant) -> Duration {
        let failures = entry.failures.saturating_add(1);
        let delay = self.backoff.base_delay(failures);
        self.waiting.push(WaitingEntry { failures, due: Some(now + delay), ..entry });
        delay
    }

    /// Returns whether another entry could be erased now.
    pub(super) fn is_contended(&self, now: Instant) -> bool {
        self.waiting.iter().any(|waiting| waiting.is_due(now))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    const BACKOFF: Backoff =
        Backoff { initial: Duration::from_secs(1), factor: 2.0, max: Duration::from_secs(300), jitter: 0.0 };

    /// Runs a schedule of entries that need so many slices each and come before so many turns have passed.
    /// Returns the turn in which each was added, and that in which it was erased.
    fn run(entries: &[(usize, u32)]) -> BTreeMap<usize, (usize, usize)> {
        let now = Instant::now();
        let mut schedule = EraseSchedule::new(BACKOFF);
        let (mut left, mut added, mut erased) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        for turn in 0.. {
            for (index, (at, slices)) in entries.iter().enumerate() {
                if *at <= turn && added.insert(index) {
                    schedule.add_entry(index);
                    left.insert(index, *slices);
                }
            }
            match schedule.next_turn(now) {
                EraseTurn::Erase(entry) => {
                    let slices = left.get_mut(&entry.entry).expect("it was added, and is not erased");
                    *slices -= 1;
                    if *slices > 0 {
                        schedule.yield_entry(entry);
                    } else {
                        erased.insert(entry.entry, (entries[entry.entry].0, turn));
                    }
                }
                EraseTurn::Idle if added.len() == entries.len() => return erased,
                EraseTurn::Idle => {}
                EraseTurn::WaitUntil(_) => panic!("none has failed"),
            }
        }
        unreachable!("the turns never end")
    }

    proptest! {
        #[test]
        fn a_small_entry_waits_for_at_most_one_slice_of_a_large_one_per_small_one(
            entries in prop::collection::vec((0usize..40, 1u32..30), 1..20)
        ) {
            let erased = run(&entries);
            prop_assert_eq!(erased.len(), entries.len(), "each is erased, and once");
            for (index, (added, done)) in &erased {
                if entries[*index].1 == 1 {
                    // Those without a slice when it came, or that came with it: each takes a turn, and the
                    // oldest one of all a turn in between.
                    let before = entries.iter().filter(|(at, _)| at <= added).count();
                    prop_assert!(done - added <= 2 * before, "{entries:?}: {index} took {}", done - added);
                }
            }
        }

        #[test]
        fn the_oldest_entry_gets_every_second_slice_however_many_come(slices in 1u32..50, small in 0usize..200) {
            let mut entries = vec![(0, slices)];
            entries.extend((0..small).map(|at| (at, 1)));
            let (_, done) = run(&entries)[&0];
            prop_assert!(done <= 2 * slices as usize, "{done} turns for {slices} slices");
        }
    }

    #[test]
    fn a_deep_tree_is_erased_in_few_slices() {
        let per_level = Duration::from_millis(1);
        let (mut levels, mut slices, mut now) = (5000_u32, 0, Instant::now());
        while levels > 0 {
            slices += 1;
            let mut slice = EraseSlice::new(now);
            now += per_level * levels;
            loop {
                now += per_level;
                levels -= 1;
                if slice.record_progress(now) || levels == 0 {
                    break;
                }
            }
        }
        assert!(slices <= 3, "{slices} slices");
    }

    #[test]
    fn a_failed_entry_waits_and_delays_no_other() {
        let start = Instant::now();
        let mut schedule = EraseSchedule::new(BACKOFF);
        schedule.add_entry('a');
        let EraseTurn::Erase(failed) = schedule.next_turn(start) else { panic!("it waits") };
        assert_eq!(schedule.fail_entry(failed, start), Duration::from_secs(1));
        let due = start + Duration::from_secs(1);
        assert_eq!(schedule.next_turn(start), EraseTurn::WaitUntil(due));
        assert!(!schedule.is_contended(start) && schedule.is_contended(due));
        schedule.add_entry('b');
        assert!(matches!(schedule.next_turn(start), EraseTurn::Erase(WaitingEntry { entry: 'b', .. })));
        let EraseTurn::Erase(failed) = schedule.next_turn(due) else { panic!("it is due") };
        assert_eq!(schedule.fail_entry(failed, due), Duration::from_secs(2), "the delay grows");
        let later = due + Duration::from_secs(2);
        let EraseTurn::Erase(entry) = schedule.next_turn(later) else { panic!("it is due") };
        schedule.yield_entry(entry);
        assert!(schedule.is_contended(later), "it makes progress");
        assert!(matches!(schedule.next_turn(later), EraseTurn::Erase(_)));
        assert_eq!(schedule.next_turn(later), EraseTurn::Idle);
    }
}

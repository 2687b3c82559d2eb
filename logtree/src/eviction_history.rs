//! The number of records of a ring that had been evicted at some sequence numbers: the upper bound for a reader that
//! resumes.

use crate::class::ClassCounts;

/// Maximum number of points. Beyond it, half of them are removed.
const MAX_POINTS: usize = 128;

/// The counts of evicted records, up to and including the record with this sequence number.
#[derive(Clone, Copy, Debug)]
struct EvictionPoint {
    seq: u64,
    evicted: ClassCounts,
}

impl EvictionPoint {
    fn total(&self) -> u64 {
        self.evicted.iter().sum()
    }
}

/// Points in time, oldest first. The more records have been evicted since, the larger is the distance between
/// two points: a count of missed records is too large by a fraction of itself, not of all that ever happened.
#[derive(Debug, Default)]
pub(crate) struct EvictionHistory(Vec<EvictionPoint>);

impl EvictionHistory {
    /// Adds the newest evicted record.
    pub(crate) fn add_point(&mut self, seq: u64, evicted: ClassCounts) {
        self.0.push(EvictionPoint { seq, evicted });
        if self.0.len() == MAX_POINTS {
            // A fraction of 1/4 suffices for 100,000 records, 1/2 for very many more.
            let spaced = [16, 8, 4, 2].map(|fraction| self.spaced_points(fraction));
            let fits = |points: &Vec<EvictionPoint>| points.len() <= MAX_POINTS / 2;
            self.0 = spaced.into_iter().find(fits).unwrap_or_else(|| self.spaced_points(1));
        }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.0.capacity() * size_of::<EvictionPoint>()
    }

    /// As few points as possible with distances of at most a fraction of the records evicted since.
    fn spaced_points(&self, fraction: u64) -> Vec<EvictionPoint> {
        let newest = self.0.last().map_or(0, EvictionPoint::total);
        let since = |point: &EvictionPoint| newest - point.total();
        let mut next_max = 0;
        let mut spaced = Vec::with_capacity(MAX_POINTS / 2);
        for (at, point) in self.0.iter().enumerate().rev() {
            // A point is needed if the next older one would be too far away.
            let older = at.checked_sub(1).map_or(newest, |at| since(&self.0[at]));
            if older > next_max {
                spaced.push(*point);
                next_max = since(point) + (since(point) / fraction).max(1);
            }
        }
        spaced.reverse();
        spaced
    }

    /// The minimum number of evicted records up to this sequence number, and whether it is exact.
    pub(crate) fn evicted_up_to(&self, seq: u64) -> (ClassCounts, bool) {
        match self.0.partition_point(|point| point.seq <= seq).checked_sub(1) {
            Some(at) => (self.0[at].evicted, self.0[at].seq == seq),
            None => ([0; 7], false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_of_missed_records_is_too_large_by_a_fraction_of_itself_at_most() {
        let mut history = EvictionHistory::default();
        let mut evicted = [0; 7];
        for number in 1..=1_000_000_u64 {
            evicted[(number % 7) as usize] += 1;
            history.add_point(number * 3, evicted);
            if !number.is_multiple_of(9_973) && number > 300 {
                continue;
            }
            let mut missed = 0;
            while missed < number {
                let (known, _) = history.evicted_up_to((number - missed) * 3);
                let reported = number - known.iter().sum::<u64>();
                assert!(reported >= missed, "{reported} of {missed}");
                assert!(reported <= missed + missed / 2 + 1, "{reported} for {missed} of {number}");
                missed += 1 + missed / 50;
            }
        }
        assert!(history.0.len() <= MAX_POINTS);
    }

    #[test]
    fn a_point_is_exact_and_before_the_first_nothing_is_known() {
        let mut history = EvictionHistory::default();
        history.add_point(5, [1, 0, 0, 0, 0, 0, 0]);
        history.add_point(9, [1, 0, 1, 0, 0, 0, 0]);
        assert_eq!(history.evicted_up_to(4), ([0; 7], false));
        assert_eq!(history.evicted_up_to(5), ([1, 0, 0, 0, 0, 0, 0], true));
        assert_eq!(history.evicted_up_to(8), ([1, 0, 0, 0, 0, 0, 0], false));
        assert_eq!(history.evicted_up_to(100), ([1, 0, 1, 0, 0, 0, 0], false));
    }
}

//! The number of records that had been evicted at some sequence numbers: the upper bound for a reader that resumes.

use crate::class::ClassCounts;

/// Maximum number of points. Beyond it, half of them are removed.
const MAX_POINTS: usize = 768;
/// The distances of points that are tried when some are removed, as parts of the records evicted since. The first
/// suffices for 50,000 points, which are about a million records.
const FRACTIONS: [u64; 6] = [32, 16, 8, 4, 2, 1];

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
pub(crate) struct EvictionHistory(Option<Box<EvictionPoints>>);

/// At least one point.
#[derive(Debug)]
struct EvictionPoints {
    oldest: EvictionPoint,
    newest: EvictionPoint,
    count: usize,
    /// The differences of each point from the one before: of the number, then a bit for each class with more records,
    /// then the differences of those. Few bytes each instead of 64.
    steps: Vec<u8>,
}

impl EvictionPoints {
    fn new(point: EvictionPoint, steps: Vec<u8>) -> EvictionPoints {
        EvictionPoints { oldest: point, newest: point, count: 1, steps }
    }

    fn push(&mut self, point: EvictionPoint) {
        push_number(&mut self.steps, point.seq - self.newest.seq);
        let more = |class: usize| point.evicted[class] - self.newest.evicted[class];
        let classes = (0..7).filter(|&class| more(class) > 0);
        self.steps.push(classes.clone().fold(0, |bits, class| bits | 1 << class));
        classes.for_each(|class| push_number(&mut self.steps, more(class)));
        self.newest = point;
        self.count += 1;
    }

    fn iter(&self) -> impl Iterator<Item = EvictionPoint> {
        let mut steps = self.steps.iter();
        std::iter::successors(Some(self.oldest), move |before| {
            let mut point = *before;
            // No byte is left after the last point.
            point.seq += take_number(&mut steps)?;
            let classes = *steps.next()?;
            for class in (0..7).filter(|class| classes >> class & 1 == 1) {
                point.evicted[class] += take_number(&mut steps)?;
            }
            Some(point)
        })
    }

    /// Removes points until there are no more than `max`, if a fraction is enough for that.
    fn remove_points(&mut self, max: usize) {
        let points: Vec<_> = self.iter().collect();
        let spaced = FRACTIONS.iter().map(|&fraction| spaced_points(&points, fraction));
        let mut fewest = Vec::new();
        for points in spaced {
            fewest = points;
            if fewest.len() <= max {
                break;
            }
        }
        let mut steps = std::mem::take(&mut self.steps);
        steps.clear();
        let mut rest = fewest.into_iter().rev();
        if let Some(oldest) = rest.next() {
            *self = EvictionPoints::new(oldest, steps);
            rest.for_each(|point| self.push(point));
        }
    }
}

/// Seven bits in each byte, the lowest first; the highest bit of a byte is set if another one follows.
fn push_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn take_number<'a>(bytes: &mut impl Iterator<Item = &'a u8>) -> Option<u64> {
    let (mut number, mut shift) = (0, 0);
    loop {
        let byte = bytes.next()?;
        number |= u64::from(byte & 0x7f) << shift;
        if *byte < 0x80 {
            return Some(number);
        }
        shift += 7;
    }
}

/// As few points as possible with distances of at most a fraction of the records evicted since; newest first.
fn spaced_points(points: &[EvictionPoint], fraction: u64) -> Vec<EvictionPoint> {
    let newest = points.last().map_or(0, EvictionPoint::total);
    let since = |point: &EvictionPoint| newest - point.total();
    let mut next_max = 0;
    let mut spaced = Vec::with_capacity(points.len());
    for (at, point) in points.iter().enumerate().rev() {
        // A point is needed if the next older one would be too far away.
        let older = at.checked_sub(1).map_or(newest, |at| since(&points[at]));
        if older > next_max {
            spaced.push(*point);
            next_max = since(point) + (since(point) / fraction).max(1);
        }
    }
    spaced
}

impl EvictionHistory {
    /// Adds the newest evicted record.
    pub(crate) fn add_point(&mut self, seq: u64, evicted: ClassCounts) {
        let point = EvictionPoint { seq, evicted };
        let Some(points) = &mut self.0 else {
            self.0 = Some(Box::new(EvictionPoints::new(point, Vec::new())));
            return;
        };
        points.push(point);
        if points.count == MAX_POINTS {
            points.remove_points(MAX_POINTS / 2);
        }
    }

    /// Keeps few points, in as little memory as possible.
    pub(crate) fn shrink_to(&mut self, max: usize) {
        let Some(points) = &mut self.0 else { return };
        if points.count > max {
            points.remove_points(max);
        }
        points.steps.shrink_to_fit();
        // One point is the newest evicted record, which the ring knows.
        self.0.take_if(|points| points.count == 1);
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        let bytes = |points: &EvictionPoints| size_of::<EvictionPoints>() + points.steps.capacity();
        self.0.as_deref().map_or(0, bytes)
    }

    /// The minimum number of evicted records up to this sequence number, and whether it is exact.
    pub(crate) fn evicted_up_to(&self, seq: u64) -> (ClassCounts, bool) {
        let points = self.0.iter().flat_map(|points| points.iter());
        match points.take_while(|point| point.seq <= seq).last() {
            Some(point) => (point.evicted, point.seq == seq),
            None => ([0; 7], false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_of_missed_records_is_too_large_by_a_small_fraction_of_itself_at_most() {
        let mut history = EvictionHistory::default();
        let mut evicted = [0; 7];
        for number in 1..=1_000_000_u64 {
            evicted[(number % 7) as usize] += 1;
            history.add_point(number * 3, evicted);
            if !number.is_multiple_of(9_973 * 5) && number > 300 {
                continue;
            }
            let mut missed = 0;
            while missed < number {
                let (known, _) = history.evicted_up_to((number - missed) * 3);
                let reported = number - known.iter().sum::<u64>();
                assert!(reported >= missed, "{reported} of {missed}");
                let fraction = if number <= 50_000 { 32 } else { 16 };
                assert!(reported <= missed + missed / fraction + 1, "{reported} for {missed} of {number}");
                missed += 1 + missed / 50;
            }
        }
        let points = history.0.unwrap();
        assert!(points.count <= MAX_POINTS && points.iter().count() == points.count);
        assert!(points.steps.len() < 8 << 10, "{}", points.steps.len());
    }

    #[test]
    fn a_point_is_exact_and_before_the_first_nothing_is_known() {
        let mut history = EvictionHistory::default();
        history.add_point(5, [1, 0, 0, 0, 0, 0, 0]);
        history.add_point(9, [1, 0, 1, 0, 0, 0, 0]);
        history.add_point(1 << 40, [1 << 30, 0, 1, 0, 0, 0, 7]);
        for _ in 0..2 {
            assert_eq!(history.evicted_up_to(4), ([0; 7], false));
            assert_eq!(history.evicted_up_to(5), ([1, 0, 0, 0, 0, 0, 0], true));
            assert_eq!(history.evicted_up_to(8), ([1, 0, 0, 0, 0, 0, 0], false));
            assert_eq!(history.evicted_up_to(100), ([1, 0, 1, 0, 0, 0, 0], false));
            assert_eq!(history.evicted_up_to(1 << 41), ([1 << 30, 0, 1, 0, 0, 0, 7], false));
            history.shrink_to(3);
        }
    }
}

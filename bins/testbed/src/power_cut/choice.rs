//! Which cuts are checked: a sample of all moments, and of all ways in which writes are lost there.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher as _};

use super::CutMoments;
use super::log::LogEntry;

/// How many ways to lose writes there are at each moment.
const WAYS: u64 = 16;
/// How many draws each cut gets: a short log has fewer different cuts than were asked for.
const DRAWS: u64 = 50;

/// One state that a power cut leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CutPoint {
    /// How many entries of the log came before the cut.
    pub(super) position: usize,
    /// How writes that were not durable were lost: 0 all of them, 1 none, else each by itself.
    pub(super) way: u64,
    pub(super) seed: u64,
}

impl CutPoint {
    /// Before the first write.
    pub(super) const START: Self = Self { position: 0, way: 0, seed: 0 };

    /// Whether a write that was not durable is on the disk, at one of its units.
    pub(super) fn keeps(self, index: usize, unit: u64) -> bool {
        match self.way {
            0 => false,
            1 => true,
            // A write is lost, kept, or torn: each of its units by itself.
            _ => match hash((self, index)) % 3 {
                0 => false,
                1 => true,
                _ => hash((self, index, unit)).is_multiple_of(2),
            },
        }
    }
}

impl Hash for CutPoint {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (self.position, self.way, self.seed).hash(state);
    }
}

/// Different cuts at or behind a position, in ascending order.
///
/// Each stretch between two flushes, durable writes or marks is as likely as any other: most of a log is the bulk of a
/// few formats, and most of what can go wrong is next to a flush.
pub(super) fn choose_cuts(
    entries: &[LogEntry],
    (from, moments): (usize, CutMoments),
    count: usize,
    seed: u64,
) -> Vec<CutPoint> {
    let stretches = find_stretches(entries, from, moments);
    let mut cuts = BTreeSet::new();
    for number in 0..DRAWS * count as u64 {
        if cuts.len() == count || stretches.is_empty() {
            break;
        }
        let draw = |what: &str, of: usize| hash((seed, number, what)) as usize % of;
        let stretch = &stretches[draw("stretch", stretches.len())];
        let position = stretch.start + draw("position", stretch.len());
        let way = draw("way", WAYS as usize) as u64;
        // Without such writes all ways are one.
        let way = if has_volatile_writes(&entries[..position]) { way } else { 1 };
        cuts.insert(CutPoint { position, way, seed });
    }
    cuts.into_iter().collect()
}

/// Whether there are writes behind the last flush that a cut may lose.
fn has_volatile_writes(entries: &[LogEntry]) -> bool {
    let behind = entries.iter().rposition(LogEntry::is_flush).map_or(entries, |flush| &entries[flush..]);
    behind.iter().any(LogEntry::can_be_lost)
}

/// The positions behind each flush, durable write or mark, up to the next one.
fn find_stretches(entries: &[LogEntry], from: usize, moments: CutMoments) -> Vec<std::ops::Range<usize>> {
    let is_end = |entry: &LogEntry| match entry {
        LogEntry::Mark(_) => true,
        LogEntry::Write(write) => write.is_flush || write.is_durable,
    };
    if moments == CutMoments::AtMarks {
        let is_mark = |position: &usize| matches!(entries[position - 1], LogEntry::Mark(_));
        return (from.max(1)..=entries.len())
            .filter(is_mark)
            .map(|position| position..position + 1)
            .collect();
    }
    let ends = (from..entries.len()).filter(|index| is_end(&entries[*index])).map(|index| index + 1);
    let mut stretches = Vec::new();
    let mut start = from;
    for end in ends.chain([entries.len() + 1]) {
        if start < end {
            stretches.push(start..end);
        }
        start = end;
    }
    stretches
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::super::log::LoggedWrite;
    use super::*;

    fn write(length: u64, is_flush: bool) -> LogEntry {
        LogEntry::Write(LoggedWrite { offset: 0, length, data_offset: None, is_flush, is_durable: false })
    }

    /// 100 writes, a flush, a mark, two writes, a flush.
    fn entries() -> Vec<LogEntry> {
        let mut entries = vec![write(512, false); 100];
        entries.extend([write(0, true), LogEntry::Mark("a".into())]);
        entries.extend([write(512, false), write(512, false), write(0, true)]);
        entries
    }

    #[test]
    fn every_stretch_is_cut_and_each_cut_is_another_one() {
        let entries = entries();
        assert_eq!(find_stretches(&entries, 0, CutMoments::Any), [0..101, 101..102, 102..105, 105..106]);
        let cuts = choose_cuts(&entries, (0, CutMoments::Any), 60, 1);
        assert_eq!(cuts.len(), 60);
        assert!(cuts.is_sorted() && cuts.windows(2).all(|pair| pair[0] != pair[1]));
        let behind_mark = cuts.iter().filter(|cut| (103..=104).contains(&cut.position)).count();
        assert!(behind_mark >= 10, "{behind_mark}");
        assert_eq!(cuts, choose_cuts(&entries, (0, CutMoments::Any), 60, 1), "the seed decides");
        assert_ne!(cuts, choose_cuts(&entries, (0, CutMoments::Any), 60, 2));
    }

    #[test]
    fn a_short_log_has_each_of_its_cuts_once() {
        let entries = vec![LogEntry::Mark("a".into()), write(0, true)];
        let positions = choose_cuts(&entries, (0, CutMoments::Any), 9, 1).into_iter().map(|cut| cut.position);
        assert_eq!(positions.collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(choose_cuts(&entries, (0, CutMoments::AtMarks), 9, 1).len(), 1);
        assert_eq!(choose_cuts(&[], (0, CutMoments::Any), 0, 1), []);
    }
}

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
        cuts.insert(CutPoint { position, way: choose_way(&entries[..position], way), seed });
    }
    cuts.into_iter().collect()
}

/// Different moments of several disks together, in ascending order of the first: one [`CutPoint`] of each disk.
///
/// Each disk leads some of the cuts. The others are cut anywhere between the same two marks.
pub(super) fn choose_joint_cuts(
    logs: &[&[LogEntry]],
    (from, moments): (&[usize], CutMoments),
    count: usize,
    seed: u64,
) -> Vec<Vec<CutPoint>> {
    let mut cuts = BTreeSet::new();
    for (leader, entries) in logs.iter().enumerate() {
        let share = count / logs.len() + usize::from(leader < count % logs.len());
        for point in choose_cuts(entries, (from[leader], moments), share, seed) {
            let marks = count_marks(&entries[..point.position]);
            let joint = logs.iter().enumerate().map(|(number, entries)| match number == leader {
                true => point,
                false => choose_between_marks(entries, marks, hash((point, number)), seed),
            });
            cuts.insert(joint.collect());
        }
    }
    cuts.into_iter().collect()
}

/// A cut behind this many marks, and before the next one.
fn choose_between_marks(entries: &[LogEntry], marks: usize, draw: u64, seed: u64) -> CutPoint {
    let is_mark = |(index, entry): (usize, &LogEntry)| matches!(entry, LogEntry::Mark(_)).then_some(index);
    let mut ends = entries.iter().enumerate().filter_map(is_mark).chain([entries.len()]);
    let start = marks.checked_sub(1).and_then(|before| ends.nth(before)).map_or(0, |mark| mark + 1);
    let end = ends.next().unwrap_or(entries.len());
    let position = start + draw as usize % (end + 1).saturating_sub(start).max(1);
    CutPoint { position, way: choose_way(&entries[..position], hash(draw) % WAYS), seed }
}

fn count_marks(entries: &[LogEntry]) -> usize {
    entries.iter().filter(|entry| matches!(entry, LogEntry::Mark(_))).count()
}

/// Without writes that can be lost, all ways are one.
fn choose_way(entries: &[LogEntry], way: u64) -> u64 {
    if has_volatile_writes(entries) { way } else { 1 }
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
    fn disks_are_cut_between_the_same_marks_and_each_of_them_anywhere() {
        let [first, second] = [[30, 0, 2], [0, 20, 1]].map(|counts: [usize; 3]| {
            let stretch = |(number, count): (usize, usize)| {
                let mark = LogEntry::Mark(format!("step-{number}"));
                vec![write(512, false); count].into_iter().chain([write(0, true), mark])
            };
            counts.into_iter().enumerate().flat_map(stretch).collect::<Vec<_>>()
        });
        let logs = [&first[..], &second[..]];
        let cuts = choose_joint_cuts(&logs, (&[0, 0], CutMoments::Any), 60, 1);
        assert!(cuts.len() > 40 && cuts.is_sorted(), "{}", cuts.len());
        for cut in &cuts {
            let marks: Vec<_> =
                cut.iter().zip(logs).map(|(point, log)| count_marks(&log[..point.position])).collect();
            assert_eq!(marks[0], marks[1], "{cut:?}");
        }
        for (disk, log) in logs.iter().enumerate() {
            let positions: BTreeSet<_> = cuts.iter().map(|cut| cut[disk].position).collect();
            assert!(positions.len() > log.len() / 3, "disk {disk}: {positions:?}");
        }
        let alone = choose_joint_cuts(&logs[..1], (&[0], CutMoments::Any), 9, 1).concat();
        assert_eq!(alone, choose_cuts(&first, (0, CutMoments::Any), 9, 1));
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

//! Counts of kills at each point, for `cargo xtask soak`, which adds up what tests print.

use std::collections::BTreeMap;
use std::fmt;

use crate::Table;

/// Where a process was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum KillPlace {
    /// On the machine of the test.
    Host,
    /// In a guest.
    Guest,
}

/// How often processes were killed at each point, by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KillTally(BTreeMap<String, BTreeMap<KillPlace, usize>>);

impl KillPlace {
    fn words(self) -> &'static str {
        match self {
            Self::Host => "kills on the host at",
            Self::Guest => "kills in a guest at",
        }
    }
}

impl KillTally {
    /// Counts a kill at a point, such as `Before CreateDirectory`.
    pub fn record(&mut self, place: KillPlace, point: &str) {
        self.add(place, point, 1);
    }

    fn add(&mut self, place: KillPlace, point: &str, count: usize) {
        *self.0.entry(point.to_owned()).or_default().entry(place).or_default() += count;
    }

    /// Adds the counts of another tally.
    pub fn merge(&mut self, other: &Self) {
        for (point, counts) in &other.0 {
            counts.iter().for_each(|(place, count)| self.add(*place, point, *count));
        }
    }

    /// Adds the count in a line that [`print_lines`](Self::print_lines) has written, behind whatever the test harness
    /// has written; other lines are skipped.
    pub fn read_line(&mut self, line: &str) {
        let count = [KillPlace::Host, KillPlace::Guest].into_iter().find_map(|place| {
            let (point, count) = line.split_once(place.words())?.1.rsplit_once(": ")?;
            Some((place, point.trim(), count.trim().parse().ok()?))
        });
        if let Some((place, point, count)) = count {
            self.add(place, point, count);
        }
    }

    /// Prints a line for each point and place.
    pub fn print_lines(&self) {
        for (point, counts) in &self.0 {
            counts.iter().for_each(|(place, count)| println!("{} {point}: {count}", place.words()));
        }
    }

    /// Whether there was no kill.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All kills in a place.
    pub fn count_at(&self, place: KillPlace) -> usize {
        self.0.values().filter_map(|counts| counts.get(&place)).sum()
    }

    /// The points with fewer kills than this, with their counts.
    pub fn points_below(&self, least: usize) -> impl Iterator<Item = (&str, usize)> {
        let sums = self.0.iter().map(|(point, counts)| (point.as_str(), counts.values().sum()));
        sums.filter(move |(_, sum)| *sum < least)
    }

    /// The number of points.
    pub fn point_count(&self) -> usize {
        self.0.len()
    }
}

/// A table, and the sums.
impl fmt::Display for KillTally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(["host", "guest", "all", "point"]);
        for (point, counts) in &self.0 {
            let [host, guest] =
                [KillPlace::Host, KillPlace::Guest].map(|place| counts.get(&place).copied().unwrap_or(0));
            table.add_row([host.to_string(), guest.to_string(), (host + guest).to_string(), point.clone()]);
        }
        let [host, guest] = [KillPlace::Host, KillPlace::Guest].map(|place| self.count_at(place));
        let fewest: usize = self.0.values().map(|counts| counts.values().sum()).min().unwrap_or(0);
        writeln!(f, "{table}\n")?;
        write!(
            f,
            "{} kills at {} points, {guest} of them in guests; at least {fewest} at each point",
            host + guest,
            self.point_count()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_several_tests_are_added_up() {
        let mut tally = KillTally::default();
        for line in [
            "kills on the host at Before CreateDirectory: 20",
            "test a::b ... kills in a guest at Before CreateDirectory: 4",
            "kills in a guest at After MountVolume: 3",
            "kills in a guest at nothing",
            "test result: ok",
        ] {
            tally.read_line(line);
        }
        assert_eq!([KillPlace::Host, KillPlace::Guest].map(|place| tally.count_at(place)), [20, 7]);
        assert_eq!(tally.points_below(20).collect::<Vec<_>>(), [("After MountVolume", 3)]);
        let text = tally.to_string();
        assert!(text.contains("\n20    4      24   Before CreateDirectory\n"), "{text}");
        let sums = "27 kills at 2 points, 7 of them in guests; at least 3 at each point";
        assert_eq!(text.lines().last(), Some(sums));
        let mut twice = tally.clone();
        twice.merge(&tally);
        assert_eq!(twice.count_at(KillPlace::Guest), 14);
    }

    #[test]
    fn what_is_recorded_is_a_kill_more() {
        let mut tally = KillTally::default();
        assert!(tally.is_empty());
        tally.record(KillPlace::Host, "Before a");
        tally.record(KillPlace::Host, "Before a");
        assert_eq!((tally.count_at(KillPlace::Host), tally.point_count()), (2, 1));
    }
}

//! Counts of kills at each point, for `cargo xtask soak`, which adds up what tests print.

use std::collections::BTreeMap;
use std::fmt;

use crate::Table;

/// Where a process was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KillPlace {
    /// On the machine of the test.
    Host,
    /// In a guest.
    Guest,
}

/// What a line says before the point, for each place.
const WORDS: [(KillPlace, &str); 2] =
    [(KillPlace::Host, "kills on the host at"), (KillPlace::Guest, "kills in a guest at")];

/// How often processes were killed at each point, by their names: on the host, and in guests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KillTally(BTreeMap<String, [usize; 2]>);

impl KillTally {
    /// Counts a kill at a point, such as `Before CreateDirectory`.
    pub fn record(&mut self, place: KillPlace, point: &str) {
        self.add(place, point, 1);
    }

    fn add(&mut self, place: KillPlace, point: &str, count: usize) {
        self.0.entry(point.to_owned()).or_default()[place as usize] += count;
    }

    /// Adds the counts of another tally.
    pub fn merge(&mut self, other: &Self) {
        for (point, counts) in &other.0 {
            WORDS.iter().for_each(|(place, _)| self.add(*place, point, counts[*place as usize]));
        }
    }

    /// Adds the count in a line that [`print_lines`](Self::print_lines) has written, behind whatever the test harness
    /// has written; other lines are skipped.
    pub fn read_line(&mut self, line: &str) {
        let count = WORDS.into_iter().find_map(|(place, words)| {
            let (point, count) = line.split_once(words)?.1.rsplit_once(": ")?;
            Some((place, point.trim(), count.trim().parse().ok()?))
        });
        if let Some((place, point, count)) = count {
            self.add(place, point, count);
        }
    }

    /// Prints a line for each point and place with a kill.
    pub fn print_lines(&self) {
        for (point, counts) in &self.0 {
            for (place, words) in WORDS.into_iter().filter(|(place, _)| counts[*place as usize] > 0) {
                println!("{words} {point}: {}", counts[place as usize]);
            }
        }
    }

    /// Whether there was no kill.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All kills in a place.
    pub fn count_at(&self, place: KillPlace) -> usize {
        self.0.values().map(|counts| counts[place as usize]).sum()
    }

    /// The points with fewer kills than this, with their counts.
    pub fn points_below(&self, least: usize) -> impl Iterator<Item = (&str, usize)> {
        let sums = self.0.iter().map(|(point, counts)| (point.as_str(), counts.iter().sum()));
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
        let mut table = Table::new(["host", "guest", "point"]);
        for (point, [host, guest]) in &self.0 {
            table.add_row([host.to_string(), guest.to_string(), point.clone()]);
        }
        let [host, guest] = WORDS.map(|(place, _)| self.count_at(place));
        write!(f, "{table}\n\n{} kills at {} points, {guest} of them in guests", host + guest, self.0.len())
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
        assert!(text.contains("\n20    4      Before CreateDirectory\n"), "{text}");
        assert!(text.ends_with("\n27 kills at 2 points, 7 of them in guests"), "{text}");
        let mut twice = tally.clone();
        twice.merge(&tally);
        assert_eq!(twice.count_at(KillPlace::Guest), 14);
    }
}

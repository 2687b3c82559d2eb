//! How long the parts of earlier test runs took: a run starts with its longest.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

const FILE: &str = "part-times.json";

/// The longest parts, in the order in which they start where no earlier run has left its times.
const LONGEST: [&str; 4] = [
    "nodekeel-localstorage it in a guest",
    "nodekeel-cluster it ignored, with daemons",
    "provisionerd node ignored, with guests",
    "noded it in a guest",
];

/// The seconds that each part took when it ran last; as JSON: `{"NAME": SECONDS}`.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct PartTimes(BTreeMap<String, f64>);

impl PartTimes {
    /// Empty where no run has left its times there: they only decide an order.
    pub(super) fn read(directory: &Path) -> Self {
        let text = fs::read_to_string(directory.join(FILE)).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// # Errors
    /// The file can't be written.
    pub(super) fn write(&self, directory: &Path) -> Result<()> {
        fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
        let path = directory.join(FILE);
        fs::write(&path, serde_json::to_string_pretty(self)?)
            .with_context(|| format!("write {}", path.display()))
    }

    pub(super) fn record(&mut self, name: String, elapsed: Duration) {
        self.0.insert(name, elapsed.as_secs_f64());
    }

    /// A part without a time comes after those of [`LONGEST`].
    pub(super) fn compare_longest_first(&self, one: &str, other: &str) -> Ordering {
        let seconds = |name: &str| self.0.get(name).copied().unwrap_or_default();
        let rank = |name: &str| LONGEST.iter().position(|known| *known == name).unwrap_or(LONGEST.len());
        seconds(other).total_cmp(&seconds(one)).then(rank(one).cmp(&rank(other)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_ordered_by_their_last_times_and_without_times_by_what_is_known() {
        let directory = tempfile::tempdir().unwrap();
        let mut times = PartTimes::read(directory.path());
        let mut names = ["a", LONGEST[1], "b", LONGEST[0]];
        let sort = |times: &PartTimes, names: &mut [&str]| {
            names.sort_by(|one, other| times.compare_longest_first(one, other));
        };
        sort(&times, &mut names);
        assert_eq!(names, [LONGEST[0], LONGEST[1], "a", "b"]);
        times.record("b".into(), Duration::from_secs(100));
        times.record("a".into(), Duration::from_secs(1));
        times.record("a".into(), Duration::from_secs(200));
        times.write(directory.path()).unwrap();
        let again = PartTimes::read(directory.path());
        assert_eq!(again, times);
        sort(&again, &mut names);
        assert_eq!(names, ["a", "b", LONGEST[0], LONGEST[1]]);
    }
}

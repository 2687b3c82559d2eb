//! Which of the longest tests a run takes: an eighth of each binary's, another one for each commit.
//!
//! Such a test says so: `#[ignore = "sampled: needs …"]`. Most of them run in guests, whose processors are emulated: all of
//! them take longer than a change can wait.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::events::IgnoredTest;
use crate::kernel_test::SEED;

/// Of so many tests of a binary, one runs.
pub(crate) const SHARE: usize = 8;
const MARK: &str = "sampled: ";

/// A choice of the sampled tests.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sample {
    All,
    Seeded(u64),
}

impl Sample {
    /// The choice of `NODEKEEL_SEED`, or of the commit; it is printed.
    ///
    /// # Errors
    /// `NODEKEEL_SEED` is not a number.
    pub(crate) fn of_run() -> Result<Self> {
        let seed = match std::env::var(SEED) {
            Ok(seed) => seed.parse().with_context(|| format!("{SEED} is not a number"))?,
            Err(_) => commit_seed().unwrap_or(1),
        };
        println!("sampled: one of {SHARE}; {SEED}={seed} repeats the choice");
        Ok(Self::Seeded(seed))
    }

    /// The tests that run, each by what else its reason says, and those that are left out.
    pub(crate) fn choose(self, tests: Vec<IgnoredTest>) -> (Vec<IgnoredTest>, Vec<IgnoredTest>) {
        let (sampled, mut chosen): (Vec<_>, Vec<_>) =
            tests.into_iter().partition(|test| test.reason.starts_with(MARK));
        let (sampled, left_out) = self.split(sampled, SHARE, |test| test.name.clone());
        let unmarked = |test: IgnoredTest| IgnoredTest { reason: test.reason.replacen(MARK, "", 1), ..test };
        chosen.extend(sampled.into_iter().map(unmarked));
        (chosen, left_out)
    }

    /// One of so many of some items, rounded up, and the others.
    pub(crate) fn split<T>(
        self,
        mut items: Vec<T>,
        share: usize,
        name: impl Fn(&T) -> String,
    ) -> (Vec<T>, Vec<T>) {
        let Self::Seeded(seed) = self else { return (items, Vec::new()) };
        items.sort_by_cached_key(|item| {
            let mut hasher = DefaultHasher::new();
            (seed, name(item)).hash(&mut hasher);
            hasher.finish()
        });
        let left_out = items.split_off(items.len().div_ceil(share));
        (items, left_out)
    }
}

/// A number of the commit; none outside a clone.
fn commit_seed() -> Option<u64> {
    let mut command = Command::new("git");
    let commit = testbed::command_output(command.args(["rev-parse", "--short=8", "HEAD"])).ok()?;
    u64::from_str_radix(commit.trim().get(..8)?, 16).ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn ignored(name: &str, reason: &str) -> IgnoredTest {
        IgnoredTest { name: name.into(), reason: reason.into() }
    }

    #[test]
    fn an_eighth_of_the_sampled_tests_runs_and_seeds_choose_others() {
        let tests: Vec<_> = (0..10)
            .map(|number| ignored(&format!("long_{number}"), "sampled: needs kernel"))
            .chain([ignored("short", "needs root"), ignored("endless", "soak")])
            .collect();
        let mut seen = BTreeSet::new();
        for seed in 0..50 {
            let (chosen, left_out) = Sample::Seeded(seed).choose(tests.clone());
            assert_eq!((chosen.len(), left_out.len()), (4, 8), "{chosen:?}");
            assert!(
                chosen.contains(&ignored("short", "needs root"))
                    && chosen.contains(&ignored("endless", "soak"))
            );
            seen.extend(chosen.into_iter().map(|test| (test.name, test.reason)));
            let again = Sample::Seeded(seed).choose(tests.clone());
            assert_eq!(again.1, left_out);
        }
        assert_eq!(seen.len(), 12);
        assert!(seen.contains(&("long_3".into(), "needs kernel".into())));
        let (chosen, left_out) = Sample::All.choose(tests);
        assert_eq!((chosen.len(), left_out.len()), (12, 0));
    }

    #[test]
    fn one_sampled_test_always_runs() {
        let tests = vec![ignored("long", "sampled: needs kernel")];
        assert_eq!(Sample::Seeded(7).choose(tests), (vec![ignored("long", "needs kernel")], Vec::new()));
    }
}

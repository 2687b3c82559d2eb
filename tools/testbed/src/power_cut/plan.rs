//! What is asked of a check: which cuts, and what the code under test learns of one.

use std::collections::BTreeSet;
use std::env;
use std::fmt;

use anyhow::{Context as _, Result};

use super::choice::CutPoint;

const DEFAULT_SEED: u64 = 1;
/// The prefix of the marks that only order the writes of several disks.
const STEP: &str = "step-";

/// One cut, for the code that checks what it left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PowerCut {
    /// One of each disk.
    pub(super) points: Vec<CutPoint>,
    pub(super) marks: BTreeSet<String>,
}

/// Which cuts are checked.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "the caller fills all fields: a new one is a decision")]
pub struct CutPlan<'a> {
    /// What is cut, for reports.
    pub operation: &'a str,
    /// The mark from which cuts begin.
    pub from: &'a str,
    /// At which moments.
    pub moments: CutMoments,
    /// How many different ones a test checks by default.
    pub sample_count: usize,
    /// How many `NODEKEEL_POWER_CUTS=all` checks.
    pub whole_count: usize,
    /// The unit in which a write is torn, in bytes: 512, the sector of most disks; 4096 for a file system that, as XFS
    /// does, relies on whole blocks.
    pub torn_bytes: u64,
}

impl<'a> CutPlan<'a> {
    /// Cuts at any moment behind the mark `prepared`, which tear blocks of 4 KiB: so many by default, and in all.
    pub fn new(operation: &'a str, [sample_count, whole_count]: [usize; 2]) -> Self {
        let moments = CutMoments::Any;
        CutPlan { operation, from: "prepared", moments, sample_count, whole_count, torn_bytes: 4096 }
    }
}

/// At which moments the power is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CutMoments {
    /// Between any two writes.
    Any,
    /// Right behind the marks: for guarantees that begin when an operation has returned.
    AtMarks,
}

impl PowerCut {
    /// Whether this mark was written before the cut.
    pub fn has_mark(&self, text: &str) -> bool {
        self.marks.contains(text)
    }

    /// The greatest of the numbers N for which the mark `PREFIX-N` was written before the cut; 0 without one.
    pub fn last_number(&self, prefix: &str) -> usize {
        let number = |mark: &String| mark.strip_prefix(prefix)?.strip_prefix('-')?.parse().ok();
        self.marks.iter().filter_map(number).max().unwrap_or(0)
    }
}

impl fmt::Display for PowerCut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let points = self.points.iter().map(|point| format!("entry {}, way {}", point.position, point.way));
        let points: Vec<_> = points.collect();
        let seed = self.points.first().map_or(0, |point| point.seed);
        let marks: Vec<_> =
            self.marks.iter().map(String::as_str).filter(|mark| !mark.starts_with(STEP)).collect();
        write!(f, "cut behind {}, seed {seed}, marks {}", points.join(" and "), marks.join(" "))
    }
}

impl CutPlan<'_> {
    pub(super) fn selected_count(&self) -> Result<usize> {
        match env::var("NODEKEEL_POWER_CUTS").as_deref() {
            Err(_) => Ok(self.sample_count),
            Ok("all") => Ok(self.whole_count),
            Ok(number) => number.parse().context("read NODEKEEL_POWER_CUTS: a number, or all"),
        }
    }
}

/// The seed of a sample: `NODEKEEL_SEED`, by default the same in each run.
///
/// # Errors
/// The variable is not a number.
pub fn selected_seed() -> Result<u64> {
    match env::var("NODEKEEL_SEED") {
        Err(_) => Ok(DEFAULT_SEED),
        Ok(seed) => seed.parse().context("read NODEKEEL_SEED: a number"),
    }
}

/// The mark of a step.
pub(super) fn step_mark(number: usize) -> String {
    format!("{STEP}{number}")
}

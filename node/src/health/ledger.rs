//! The conditions of the node over time: since when each exists, and how often it has begun.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nodekeel_supervisor::wall_clock_time;

use super::HealthCondition;

/// The time for which a condition that has ended is remembered.
const REMEMBERED: Duration = Duration::from_secs(3600);

/// What identifies a condition: its part and its object. The text of one problem changes while it lasts.
type ConditionKey = (String, String);

#[derive(Debug, Default)]
pub(crate) struct ConditionLedger {
    occurrences: BTreeMap<ConditionKey, Occurrence>,
}

#[derive(Debug)]
struct Occurrence {
    since: Instant,
    /// The time at which it was last found.
    last: Instant,
    is_present: bool,
    count: u32,
    /// As it was last found, for the end.
    text: String,
}

/// The beginning or the end of a condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConditionChange {
    /// The part that reports it.
    pub(crate) part: String,
    pub(crate) object: String,
    /// Object and problem.
    pub(crate) text: String,
    pub(crate) kind: ConditionChangeKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConditionChangeKind {
    Begun,
    Ended,
}

impl ConditionLedger {
    /// Notes all conditions that exist now, sets their age and count, and returns what has changed.
    pub(crate) fn note(&mut self, now: Instant, found: &mut [HealthCondition]) -> Vec<ConditionChange> {
        let mut changes = Vec::new();
        for condition in found.iter_mut() {
            let key = (condition.part.clone(), condition.object.clone());
            let text = condition.to_string();
            let known = self.occurrences.entry(key).or_insert_with(|| Occurrence {
                since: now,
                last: now,
                is_present: false,
                count: 0,
                text: String::new(),
            });
            if !known.is_present {
                (known.is_present, known.since, known.count) = (true, now, known.count.saturating_add(1));
                let HealthCondition { part, object, .. } = condition.clone();
                let kind = ConditionChangeKind::Begun;
                changes.push(ConditionChange { part, object, text: text.clone(), kind });
            }
            (known.last, known.text) = (now, text);
        }
        self.occurrences.retain(|(part, object), known| {
            if known.is_present && known.last != now {
                known.is_present = false;
                let (part, object) = (part.clone(), object.clone());
                let (text, kind) = (std::mem::take(&mut known.text), ConditionChangeKind::Ended);
                changes.push(ConditionChange { part, object, text, kind });
            }
            known.is_present || now.duration_since(known.last) < REMEMBERED
        });
        self.describe(found);
        changes
    }

    /// Lets a condition begin again when it is found next, although it has not ended.
    pub(super) fn begin_again(&mut self, part: &str, object: &str) {
        if let Some(known) = self.occurrences.get_mut(&(part.to_owned(), object.to_owned())) {
            known.is_present = false;
        }
    }

    /// Sets the age and the count of the conditions that are known.
    pub(crate) fn describe(&self, found: &mut [HealthCondition]) {
        for condition in found {
            let key = (condition.part.clone(), condition.object.clone());
            if let Some(known) = self.occurrences.get(&key) {
                condition.since.get_or_insert_with(|| wall_clock_time(known.since));
                condition.count = known.count;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_has_its_age_its_count_and_one_change_for_its_beginning_and_its_end() {
        let start = Instant::now();
        let mut ledger = ConditionLedger::default();
        let mut note = |seconds, problem: Option<&str>| {
            let mut found: Vec<_> =
                problem.map(|text| HealthCondition::problem("fan 1", text)).into_iter().collect();
            let changes = ledger.note(start + Duration::from_secs(seconds), &mut found);
            let changes: Vec<_> = changes.into_iter().map(|change| (change.kind, change.text)).collect();
            (changes, found.first().map(|found| (found.count, found.since.expect("an age"))))
        };
        let begun = |text: &str| vec![(ConditionChangeKind::Begun, text.to_owned())];
        let ended = |text: &str| vec![(ConditionChangeKind::Ended, text.to_owned())];
        let (changes, first) = note(0, Some("is loud"));
        let (count, since) = first.expect("a condition");
        assert_eq!((changes, count), (begun("fan 1: is loud"), 1));
        let (changes, later) = note(60, Some("is louder"));
        let (count, same) = later.expect("a condition");
        assert_eq!((changes, count), (vec![], 1));
        let moved = same.duration_since(since).or_else(|_| since.duration_since(same)).expect("a time");
        assert!(moved < Duration::from_secs(1), "its age moved by {moved:?}");
        assert_eq!(note(70, None), (ended("fan 1: is louder"), None));
        assert_eq!(note(80, None), (vec![], None));
        let (changes, again) = note(90, Some("is loud"));
        assert_eq!((changes, again.expect("a condition").0), (begun("fan 1: is loud"), 2));
        assert_eq!(note(100, None).0, ended("fan 1: is loud"));
        assert_eq!(note(100 + 3599, None), (vec![], None));
        assert_eq!(note(100 + 3600, None), (vec![], None));
        let (_, forgotten) = note(100 + 3601, Some("is loud"));
        assert_eq!(forgotten.expect("a condition").0, 1);
    }

    #[test]
    fn a_source_that_knows_the_age_is_believed() {
        let at = std::time::SystemTime::UNIX_EPOCH;
        let mut found = [HealthCondition::problem("fan 1", "is loud").since(Some(at))];
        ConditionLedger::default().note(Instant::now(), &mut found);
        assert_eq!(found[0].since, Some(at));
    }
}

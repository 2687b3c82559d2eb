use std::cell::Cell;
use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// A file system on which these numbers are taken; it counts what it is asked.
struct Model {
    taken: BTreeSet<u32>,
    questions: Cell<u32>,
}

impl Model {
    fn new(taken: impl IntoIterator<Item = u32>) -> Self {
        Self { taken: taken.into_iter().collect(), questions: Cell::new(0) }
    }
}

impl Taken for Model {
    fn is_taken(&self, project: u32) -> io::Result<bool> {
        self.questions.set(self.questions.get() + 1);
        Ok(self.taken.contains(&project))
    }

    fn next_taken(&self, from: u32) -> io::Result<Option<u32>> {
        self.questions.set(self.questions.get() + 1);
        Ok(self.taken.range(from..).next().copied())
    }
}

fn id(number: u32) -> ProjectId {
    ProjectId::new(number).unwrap()
}

fn range(first: u32, last: u32) -> ProjectRange {
    ProjectRange::new(id(first), id(last)).unwrap()
}

fn find(model: &Model, range: ProjectRange, cursor: u32) -> Option<u32> {
    find_free(model, range, id(cursor)).unwrap().map(ProjectId::get)
}

#[test]
fn the_worked_traces_of_the_reference_never_give_0_nor_what_is_taken() {
    let all = range(1, u32::MAX - 1);
    for (taken, chosen) in [
        (vec![0], 1),
        (vec![0, 1, 2], 3),
        (vec![0, 1, 5], 2),
        (vec![0, 5], 1),
        (vec![3], 1),
        (vec![], 1),
        (vec![1], 2),
    ] {
        let model = Model::new(taken.clone());
        assert_eq!(find(&model, all, 1), Some(chosen), "{taken:?}");
    }
}

#[test]
fn the_kubelets_numbers_and_those_given_by_hand_are_outside_the_default_range() {
    let range = ProjectRange::default();
    for number in [1, 1000, 65_536, 1_048_577, 1_048_577 + 1_000_000, u32::MAX - 1] {
        assert!(!range.contains(id(number)), "{number}");
    }
    assert_eq!(ProjectId::new(0), None);
    assert_eq!(ProjectId::new(u32::MAX), None);
}

#[test]
fn finding_a_number_takes_one_question_however_many_are_taken() {
    for count in [0, 1_000, 10_000, 100_000] {
        let model = Model::new(1..=count);
        assert_eq!(find(&model, range(1, 1 << 30), count + 1), Some(count + 1));
        assert_eq!(model.questions.get(), 1, "{count} taken");
    }
}

#[test]
fn a_process_that_has_just_started_asks_a_logarithm_of_what_is_taken() {
    for count in [0u32, 1, 1_000, 10_000, 100_000] {
        let model = Model::new(1..=count);
        assert_eq!(find(&model, range(1, 1 << 30), 1), Some(count + 1));
        let allowed = 2 * (32 - count.leading_zeros()) + 1;
        assert!(model.questions.get() <= allowed, "{count} taken: {} questions", model.questions.get());
    }
}

#[test]
fn after_the_last_number_it_goes_on_at_the_first_and_ends_when_all_are_taken() {
    let range = range(10, 14);
    assert_eq!(range.after(id(14)), id(10));
    assert_eq!(find(&Model::new([12, 13, 14]), range, 12), Some(10));
    assert_eq!(find(&Model::new(10..=14), range, 12), None);
    assert_eq!(find(&Model::new([]), self::range(7, 7), 7), Some(7));
    assert_eq!(find(&Model::new([7]), self::range(7, 7), 7), None);
    let top = self::range(u32::MAX - 2, u32::MAX - 1);
    assert_eq!(find(&Model::new([u32::MAX - 2]), top, u32::MAX - 2), Some(u32::MAX - 1));
    assert_eq!(top.after(id(u32::MAX - 1)), id(u32::MAX - 2));
}

#[test]
fn who_shares_no_lock_begins_in_another_part_of_the_range() {
    let range = ProjectRange::default();
    let parts: BTreeSet<_> = (100..132).map(|inode| range.part(inode)).collect();
    assert!(parts.len() > 20 && parts.iter().all(|part| range.contains(*part)), "{parts:?}");
    assert_eq!(self::range(5, 6).part(9), id(5));
}

proptest! {
    #[test]
    fn what_is_found_is_free_and_nothing_is_found_only_when_all_are_taken(
        taken in prop::collection::btree_set(0u32..80, 0..80),
        first in 1u32..70,
        length in 0u32..40,
        cursor in 0u32..40,
    ) {
        let range = range(first, first + length);
        let model = Model::new(taken.clone());
        match find(&model, range, first + cursor % (length + 1)) {
            Some(found) => prop_assert!(range.contains(id(found)) && !taken.contains(&found)),
            None => prop_assert!((first..=first + length).all(|number| taken.contains(&number))),
        }
    }
}

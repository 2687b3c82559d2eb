use std::cell::Cell;
use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// A file system with these allocated numbers; it counts lookups.
struct ModelFileSystem {
    allocated: BTreeSet<u32>,
    probes: Cell<u32>,
}

impl ModelFileSystem {
    fn new(allocated: impl IntoIterator<Item = u32>) -> Self {
        Self { allocated: allocated.into_iter().collect(), probes: Cell::new(0) }
    }
}

impl ProjectLookup for ModelFileSystem {
    fn is_allocated(&self, project: u32) -> io::Result<bool> {
        self.probes.set(self.probes.get() + 1);
        Ok(self.allocated.contains(&project))
    }

    fn next_allocated(&self, from: u32) -> io::Result<Option<u32>> {
        self.probes.set(self.probes.get() + 1);
        Ok(self.allocated.range(from..).next().copied())
    }
}

fn id(number: u32) -> ProjectId {
    ProjectId::new(number).unwrap()
}

fn range(first: u32, last: u32) -> ProjectRange {
    ProjectRange::new(id(first), id(last)).unwrap()
}

fn find_in_model(model: &ModelFileSystem, range: ProjectRange, cursor: u32) -> Option<u32> {
    find_free_project(model, range, id(cursor)).unwrap().map(ProjectId::get)
}

#[test]
fn the_reference_traces_never_allocate_0_or_an_allocated_number() {
    let all = range(1, u32::MAX - 1);
    for (allocated, chosen) in [
        (vec![0], 1),
        (vec![0, 1, 2], 3),
        (vec![0, 1, 5], 2),
        (vec![0, 5], 1),
        (vec![3], 1),
        (vec![], 1),
        (vec![1], 2),
    ] {
        let model = ModelFileSystem::new(allocated.clone());
        assert_eq!(find_in_model(&model, all, 1), Some(chosen), "{allocated:?}");
    }
}

#[test]
fn kubelet_and_hand_picked_numbers_are_outside_the_default_range() {
    let range = ProjectRange::default();
    for number in [1, 1000, 65_536, 1_048_577, 1_048_577 + 1_000_000, u32::MAX - 1] {
        assert!(!range.contains(id(number)), "{number}");
    }
    assert_eq!(ProjectId::new(0), None);
    assert_eq!(ProjectId::new(u32::MAX), None);
}

#[test]
fn finding_a_number_takes_one_probe_however_many_are_allocated() {
    for count in [0, 1_000, 10_000, 100_000] {
        let model = ModelFileSystem::new(1..=count);
        assert_eq!(find_in_model(&model, range(1, 1 << 30), count + 1), Some(count + 1));
        assert_eq!(model.probes.get(), 1, "{count} allocated");
    }
}

#[test]
fn a_new_process_needs_logarithmically_many_probes() {
    for count in [0u32, 1, 1_000, 10_000, 100_000] {
        let model = ModelFileSystem::new(1..=count);
        assert_eq!(find_in_model(&model, range(1, 1 << 30), 1), Some(count + 1));
        let allowed = 2 * (32 - count.leading_zeros()) + 1;
        assert!(model.probes.get() <= allowed, "{count} allocated: {} probes", model.probes.get());
    }
}

#[test]
fn the_search_wraps_around_and_ends_when_all_numbers_are_allocated() {
    let range = range(10, 14);
    assert_eq!(range.next_after(id(14)), id(10));
    assert_eq!(find_in_model(&ModelFileSystem::new([12, 13, 14]), range, 12), Some(10));
    assert_eq!(find_in_model(&ModelFileSystem::new(10..=14), range, 12), None);
    assert_eq!(find_in_model(&ModelFileSystem::new([]), self::range(7, 7), 7), Some(7));
    assert_eq!(find_in_model(&ModelFileSystem::new([7]), self::range(7, 7), 7), None);
    let top = self::range(u32::MAX - 2, u32::MAX - 1);
    assert_eq!(find_in_model(&ModelFileSystem::new([u32::MAX - 2]), top, u32::MAX - 2), Some(u32::MAX - 1));
    assert_eq!(top.next_after(id(u32::MAX - 1)), id(u32::MAX - 2));
}

#[test]
fn mounts_without_a_common_lock_start_in_different_parts_of_the_range() {
    let range = ProjectRange::default();
    let parts: BTreeSet<_> = (100..132).map(|inode| range.start_of_part(inode)).collect();
    assert!(parts.len() > 20 && parts.iter().all(|part| range.contains(*part)), "{parts:?}");
    assert_eq!(self::range(5, 6).start_of_part(9), id(5));
}

proptest! {
    #[test]
    fn the_search_finds_a_free_number_unless_all_are_allocated(
        allocated in prop::collection::btree_set(0u32..80, 0..80),
        first in 1u32..70,
        length in 0u32..40,
        cursor in 0u32..40,
    ) {
        let range = range(first, first + length);
        let model = ModelFileSystem::new(allocated.clone());
        match find_in_model(&model, range, first + cursor % (length + 1)) {
            Some(found) => prop_assert!(range.contains(id(found)) && !allocated.contains(&found)),
            None => prop_assert!((first..=first + length).all(|number| allocated.contains(&number))),
        }
    }
}

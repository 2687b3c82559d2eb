//! The implementation in memory.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use nodekeel_fsquota::testing::{MemQuota, conformance};
use nodekeel_fsquota::{
    Bytes, Call, Change, Error, Inodes, Limit, Limits, ProjectId, ProjectRange, QuotaSetter as _, Status,
};
use proptest::prelude::*;

use crate::states;

fn range(first: u32, last: u32) -> ProjectRange {
    let id = |number| ProjectId::new(number).unwrap();
    ProjectRange::new(id(first), id(last)).unwrap()
}

const LIMITED: Change = Change { bytes: Limit::At(Bytes(1 << 20)), inodes: Limit::Keep };

#[test]
fn the_implementation_in_memory_conforms() {
    let scratch = tempfile::tempdir().unwrap();
    let quota = MemQuota::new();
    conformance(&quota, scratch.path());
    assert_eq!(quota.list(), [], "nothing is left");
}

#[test]
fn the_state_table_holds() {
    let scratch = tempfile::tempdir().unwrap();
    states::walk_through(&MemQuota::new(), scratch.path());
}

#[test]
fn a_range_that_is_used_up_is_told_of_and_what_is_released_is_given_again() {
    let scratch = tempfile::tempdir().unwrap();
    let quota = MemQuota::with_range(range(10, 12));
    let make = |name: &str| {
        fs::create_dir(scratch.path().join(name)).unwrap();
        File::open(scratch.path().join(name)).unwrap()
    };
    let given: Vec<u32> =
        ["a", "b", "c"].map(|name| quota.set(make(name).as_fd(), LIMITED).unwrap().project.get()).into();
    assert_eq!(given, [10, 11, 12]);
    let d = make("d");
    let error = quota.set(d.as_fd(), LIMITED).unwrap_err();
    assert_eq!(
        error.to_string(),
        "all project numbers from 10 to 12 are taken: release those of removed directories"
    );
    assert_eq!(quota.status(d.as_fd()).unwrap(), None);
    fs::remove_dir(scratch.path().join("b")).unwrap();
    assert!(
        matches!(quota.set(d.as_fd(), LIMITED), Err(Error::Exhausted { .. })),
        "its limits are still kept"
    );
    assert_eq!(quota.release_unused(&[]).unwrap(), [ProjectId::new(11).unwrap()]);
    assert_eq!(quota.set(d.as_fd(), LIMITED).unwrap().project.get(), 11);
}

#[test]
fn the_limits_of_a_project_in_use_are_not_released() {
    let scratch = tempfile::tempdir().unwrap();
    let quota = MemQuota::new();
    let dir = File::open(scratch.path()).unwrap();
    let status = quota.set(dir.as_fd(), LIMITED).unwrap();
    let error = quota.release(status.project).unwrap_err();
    assert!(matches!(error, Error::InUse { .. }) && error.is_retryable(), "{error:?}");
    assert_eq!(quota.status(dir.as_fd()).unwrap(), Some(status));
    assert_eq!(quota.release_unused(&[]).unwrap(), []);
}

#[test]
fn failures_can_be_asked_for() {
    let scratch = tempfile::tempdir().unwrap();
    let quota = MemQuota::new();
    let dir = File::open(scratch.path()).unwrap();
    quota.fail(Call::WriteLimits, io::ErrorKind::StorageFull);
    let error = quota.set(dir.as_fd(), LIMITED).unwrap_err();
    assert!(matches!(error, Error::Kernel { call: Call::WriteLimits, .. }), "{error:?}");
    quota.set(dir.as_fd(), LIMITED).unwrap();
}

#[derive(Clone, Debug)]
enum Operation {
    Set(usize, Limit<u64>, Limit<u64>),
    Clear(usize),
    Remove(usize),
    Release(usize),
    ReleaseUnused,
}

fn limit(max: u64) -> impl Strategy<Value = Limit<u64>> {
    prop_oneof![Just(Limit::Keep), Just(Limit::Unlimited), (1..max).prop_map(Limit::At)]
}

fn operation() -> impl Strategy<Value = Operation> {
    let place = 0..4usize;
    prop_oneof![
        4 => (place.clone(), limit(1 << 40), limit(1000)).prop_map(|(at, b, i)| Operation::Set(at, b, i)),
        1 => place.clone().prop_map(Operation::Clear),
        2 => place.clone().prop_map(Operation::Remove),
        1 => place.prop_map(Operation::Release),
        1 => Just(Operation::ReleaseUnused),
    ]
}

/// What the contract says, in the plainest way.
struct Model {
    quota: MemQuota,
    scratch: tempfile::TempDir,
    expected: HashMap<usize, Status>,
    last: HashMap<usize, ProjectId>,
}

fn applied<T: Copy>(before: Option<T>, limit: Limit<T>) -> Option<T> {
    match limit {
        Limit::Keep => before,
        Limit::Unlimited => None,
        Limit::At(limit) => Some(limit),
    }
}

impl Model {
    fn path(&self, at: usize) -> PathBuf {
        self.scratch.path().join(at.to_string())
    }

    fn open(&self, at: usize) -> File {
        fs::create_dir_all(self.path(at)).unwrap();
        File::open(self.path(at)).unwrap()
    }

    fn apply(&mut self, operation: &Operation) {
        match *operation {
            Operation::Set(at, bytes, inodes) => self.set(at, bytes, inodes),
            Operation::Clear(at) => {
                self.quota.clear(self.open(at).as_fd()).unwrap();
                self.expected.remove(&at);
            }
            Operation::Remove(at) => {
                let _ = fs::remove_dir(self.path(at));
                self.expected.remove(&at);
            }
            Operation::Release(at) => {
                let Some(project) = self.last.get(&at) else { return };
                let in_use = self.expected.values().any(|status| status.project == *project);
                assert_eq!(self.quota.release(*project).is_err(), in_use);
            }
            Operation::ReleaseUnused => {
                let released = self.quota.release_unused(&[]).unwrap();
                let is_expected = |id| self.expected.values().any(|status| status.project == id);
                assert!(!released.into_iter().any(is_expected));
            }
        }
    }

    fn set(&mut self, at: usize, bytes: Limit<u64>, inodes: Limit<u64>) {
        let before = self.expected.get(&at).copied();
        let limits = before.map(|status| status.limits).unwrap_or_default();
        let rounded =
            applied(limits.bytes.map(|bytes| bytes.0), bytes).map(|bytes| bytes.div_ceil(1024) * 1024);
        let limits = Limits {
            bytes: rounded.map(Bytes),
            inodes: applied(limits.inodes.map(|inodes| inodes.0), inodes).map(Inodes),
        };
        let typed = Change {
            bytes: match bytes {
                Limit::At(bytes) => Limit::At(Bytes(bytes)),
                Limit::Unlimited => Limit::Unlimited,
                Limit::Keep => Limit::Keep,
            },
            inodes: match inodes {
                Limit::At(inodes) => Limit::At(Inodes(inodes)),
                Limit::Unlimited => Limit::Unlimited,
                Limit::Keep => Limit::Keep,
            },
        };
        let status = self.quota.set(self.open(at).as_fd(), typed).unwrap();
        assert_eq!(status.limits, limits);
        assert!(before.is_none_or(|before| before.project == status.project));
        self.expected.insert(at, status);
        self.last.insert(at, status.project);
    }

    fn check(&self) {
        let mut projects: Vec<ProjectId> = self.expected.values().map(|status| status.project).collect();
        projects.sort();
        projects.dedup();
        assert_eq!(projects.len(), self.expected.len(), "no number is given twice");
        for (at, status) in &self.expected {
            assert_eq!(self.quota.status(self.open(*at).as_fd()).unwrap().as_ref(), Some(status));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_operations_keeps_the_contract(operations in prop::collection::vec(operation(), 1..40)) {
        let mut model = Model {
            quota: MemQuota::with_range(range(1, 60)),
            scratch: tempfile::tempdir().unwrap(),
            expected: HashMap::new(),
            last: HashMap::new(),
        };
        for operation in &operations {
            model.apply(operation);
            model.check();
        }
    }
}

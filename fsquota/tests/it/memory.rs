//! The implementation in memory.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use nodekeel_fsquota::testing::{MemQuota, conformance};
use nodekeel_fsquota::{
    Bytes, Error, Inodes, KernelOperation, LimitChange, ProjectId, QuotaChange, QuotaLimits,
    QuotaSetter as _, QuotaStatus,
};
use proptest::prelude::*;

use crate::range;

const LIMITED: QuotaChange =
    QuotaChange { bytes: LimitChange::Set(Bytes(1 << 20)), inodes: LimitChange::Keep };

#[test]
fn the_memory_implementation_conforms() {
    let scratch = tempfile::tempdir().unwrap();
    let quota = MemQuota::new();
    conformance(&quota, scratch.path());
    assert_eq!(quota.list_projects(), [], "nothing is left");
}

#[test]
fn an_exhausted_range_is_an_error_and_released_numbers_are_reused() {
    let scratch = tempfile::tempdir().unwrap();
    let quota = MemQuota::with_range(range(10, 12));
    let make = |name: &str| {
        fs::create_dir(scratch.path().join(name)).unwrap();
        File::open(scratch.path().join(name)).unwrap()
    };
    let numbers: Vec<u32> = ["a", "b", "c"]
        .map(|name| quota.set_limits(make(name).as_fd(), LIMITED).unwrap().project.get())
        .into();
    assert_eq!(numbers, [10, 11, 12]);
    let d = make("d");
    let error = quota.set_limits(d.as_fd(), LIMITED).unwrap_err();
    assert_eq!(
        error.to_string(),
        "all quota project IDs from 10 to 12 are allocated: release those of removed directories, or use a larger \
         range"
    );
    assert_eq!(quota.read_status(d.as_fd()).unwrap(), None);
    fs::remove_dir(scratch.path().join("b")).unwrap();
    assert!(
        matches!(quota.set_limits(d.as_fd(), LIMITED), Err(Error::RangeExhausted { .. })),
        "its limits are still kept"
    );
    assert_eq!(quota.release_unused_projects(&[]).unwrap(), [ProjectId::new(11).unwrap()]);
    assert_eq!(quota.set_limits(d.as_fd(), LIMITED).unwrap().project.get(), 11);
}

#[test]
fn the_limits_of_a_project_in_use_are_not_released() {
    let scratch = tempfile::tempdir().unwrap();
    let quota = MemQuota::new();
    let dir = File::open(scratch.path()).unwrap();
    let status = quota.set_limits(dir.as_fd(), LIMITED).unwrap();
    let error = quota.release_project(status.project).unwrap_err();
    assert!(matches!(error, Error::ProjectInUse { .. }) && error.is_retryable(), "{error:?}");
    assert_eq!(quota.read_status(dir.as_fd()).unwrap(), Some(status));
    assert_eq!(quota.release_unused_projects(&[]).unwrap(), []);
}

#[test]
fn failures_can_be_injected() {
    let scratch = tempfile::tempdir().unwrap();
    let quota = MemQuota::new();
    let dir = File::open(scratch.path()).unwrap();
    quota.fail_next_kernel_call(KernelOperation::WriteLimits, io::ErrorKind::StorageFull);
    let error = quota.set_limits(dir.as_fd(), LIMITED).unwrap_err();
    assert!(matches!(error, Error::Kernel { call: KernelOperation::WriteLimits, .. }), "{error:?}");
    quota.set_limits(dir.as_fd(), LIMITED).unwrap();
}

#[derive(Clone, Debug)]
enum Operation {
    Set(usize, QuotaChange),
    Clear(usize),
    Remove(usize),
    Release(usize),
    ReleaseUnused,
}

fn limit_change<T: Clone + std::fmt::Debug>(
    max: u64,
    limit: fn(u64) -> T,
) -> impl Strategy<Value = LimitChange<T>> {
    let set = (1..max).prop_map(move |number| LimitChange::Set(limit(number)));
    prop_oneof![Just(LimitChange::Keep), Just(LimitChange::Unlimited), set]
}

fn operation() -> impl Strategy<Value = Operation> {
    let index = 0..4usize;
    prop_oneof![
        4 => (index.clone(), limit_change(1 << 40, Bytes), limit_change(1000, Inodes))
            .prop_map(|(index, bytes, inodes)| Operation::Set(index, QuotaChange { bytes, inodes })),
        1 => index.clone().prop_map(Operation::Clear),
        2 => index.clone().prop_map(Operation::Remove),
        1 => index.prop_map(Operation::Release),
        1 => Just(Operation::ReleaseUnused),
    ]
}

/// A minimal model of the contract.
struct QuotaModel {
    quota: MemQuota,
    scratch: tempfile::TempDir,
    expected: HashMap<usize, QuotaStatus>,
    last: HashMap<usize, ProjectId>,
}

fn applied_limit<T: Copy>(before: Option<T>, limit: LimitChange<T>) -> Option<T> {
    match limit {
        LimitChange::Keep => before,
        LimitChange::Unlimited => None,
        LimitChange::Set(limit) => Some(limit),
    }
}

impl QuotaModel {
    fn path(&self, at: usize) -> PathBuf {
        self.scratch.path().join(at.to_string())
    }

    fn open_dir(&self, at: usize) -> File {
        fs::create_dir_all(self.path(at)).unwrap();
        File::open(self.path(at)).unwrap()
    }

    fn apply(&mut self, operation: &Operation) {
        match *operation {
            Operation::Set(at, change) => self.set_limits(at, change),
            Operation::Clear(at) => {
                self.quota.clear_limits(self.open_dir(at).as_fd()).unwrap();
                self.expected.remove(&at);
            }
            Operation::Remove(at) => {
                let _ = fs::remove_dir(self.path(at));
                self.expected.remove(&at);
            }
            Operation::Release(at) => {
                let Some(project) = self.last.get(&at) else { return };
                let in_use = self.expected.values().any(|status| status.project == *project);
                assert_eq!(self.quota.release_project(*project).is_err(), in_use);
            }
            Operation::ReleaseUnused => {
                let released = self.quota.release_unused_projects(&[]).unwrap();
                let is_expected = |id| self.expected.values().any(|status| status.project == id);
                assert!(!released.into_iter().any(is_expected));
            }
        }
    }

    fn set_limits(&mut self, at: usize, change: QuotaChange) {
        let before = self.expected.get(&at).copied();
        let limits = before.map(|status| status.limits).unwrap_or_default();
        let bytes = applied_limit(limits.bytes, change.bytes);
        let limits = QuotaLimits {
            bytes: bytes.map(|bytes| Bytes(bytes.0.next_multiple_of(1024))),
            inodes: applied_limit(limits.inodes, change.inodes),
        };
        let status = self.quota.set_limits(self.open_dir(at).as_fd(), change).unwrap();
        assert_eq!(status.limits, limits);
        assert!(before.is_none_or(|before| before.project == status.project));
        self.expected.insert(at, status);
        self.last.insert(at, status.project);
    }

    fn check(&self) {
        let mut projects: Vec<ProjectId> = self.expected.values().map(|status| status.project).collect();
        projects.sort();
        projects.dedup();
        assert_eq!(projects.len(), self.expected.len(), "no number is allocated twice");
        for (at, status) in &self.expected {
            assert_eq!(self.quota.read_status(self.open_dir(*at).as_fd()).unwrap().as_ref(), Some(status));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_operations_keeps_the_contract(operations in prop::collection::vec(operation(), 1..40)) {
        let mut model = QuotaModel {
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

//! The implementation in memory.

use nodekeel_fsquota::testing::{MemQuota, conformance};

#[test]
fn the_implementation_in_memory_conforms() {
    let scratch = tempfile::tempdir().unwrap();
    let quota = MemQuota::new();
    conformance(&quota, scratch.path());
    assert_eq!(quota.list(), [], "nothing is left");
}

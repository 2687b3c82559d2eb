#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::fs::File;

use super::*;
use crate::owner::OwnerMark;
use crate::testing::memory::MemoryKernel;

#[test]
fn the_directories_above_tell_what_limits_a_directory_and_whether_they_own_it() {
    let scratch = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(scratch.path().join("a/b/c")).unwrap();
    let open = |path: &str| File::open(scratch.path().join(path)).unwrap();
    let kernel = MemoryKernel::default();
    let above = |path: &str| scope_above(&kernel, open(path).as_fd()).unwrap();
    assert_eq!(above("a/b/c"), Scope::Free);
    kernel.set_project_tag(open("a").as_fd(), ProjectTag { project: 3, inherit: true }).unwrap();
    assert_eq!(above("a"), Scope::Free);
    for path in ["a/b", "a/b/c"] {
        assert_eq!(above(path), Scope::Limited { project: 3, is_owned: false }, "{path}");
    }
    let mark = OwnerMark { project: 3, previous: None };
    kernel.set_owner_mark(open("a").as_fd(), Some(mark)).unwrap();
    assert_eq!(above("a/b/c"), Scope::Limited { project: 3, is_owned: true });
    // Another program limits a part of it.
    kernel.set_project_tag(open("a/b").as_fd(), ProjectTag { project: 7, inherit: true }).unwrap();
    assert_eq!(above("a/b/c"), Scope::Limited { project: 7, is_owned: false });
    kernel.set_project_tag(open("a/b").as_fd(), ProjectTag::default()).unwrap();
    // Its owner has removed it from the project: the mark says what it should have.
    kernel.set_project_tag(open("a").as_fd(), ProjectTag::default()).unwrap();
    assert_eq!(above("a/b"), Scope::Limited { project: 3, is_owned: true });
}

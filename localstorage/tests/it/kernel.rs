//! The same on the file systems of a node, each in a kernel that has it.

use nodekeel_localstorage::{Dir, Mode, OsPlacement, testing};
use testbed::guest::inside::{Disk, FileSystem};

use crate::bed::{no_forks, raw_names};
use crate::matrix::{self, Points};

/// At how many of its calls each work is killed, and fails in each of four ways.
const KILLS: usize = 5;
const FAILURES: usize = 2;

/// All that holds on any file system.
fn holds_on(kind: FileSystem) {
    let mut mounted = Disk::take().expect("the guest has a disk").mount(kind, "").expect("it is mounted");
    let dir = Dir::open(mounted.path())
        .and_then(|dir| dir.ensure_dir("top", Mode::PRIVATE_DIR))
        .expect("it is made");
    testing::conformance(&OsPlacement::new(dir.try_clone().expect("a copy")));
    // A guest takes half a second for each process: a sample, unless NODEKEEL_KILLS asks for more.
    for scenario in matrix::ALL {
        matrix::fail(scenario, dir.path(), Points::sample(FAILURES));
        matrix::kill(scenario, dir.path(), Points::sample(KILLS));
    }
    assert_eq!(raw_names(dir.path()), [""; 0]);
    matrix::stays_whole_when_full(&dir, 16 << 20);
    dir.write("kept", b"kept", Mode::PRIVATE_FILE).expect("it is written");
    // Whoever holds a directory open keeps the file system mounted.
    drop(dir);
    let no_forks = no_forks();
    mounted.remount("").expect("it is mounted again");
    drop(no_forks);
    let top = Dir::open(mounted.path()).expect("it opens");
    assert_eq!(top.read("top/kept").expect("it is there"), b"kept");
}

#[test]
#[ignore = "needs kernel with a disk of 512 MiB"]
fn xfs() {
    holds_on(FileSystem::Xfs);
}

#[test]
#[ignore = "needs kernel with a disk of 512 MiB"]
fn ext4() {
    holds_on(FileSystem::PlainExt4);
}

#[test]
#[ignore = "needs kernel with a disk of 512 MiB"]
fn vfat() {
    holds_on(FileSystem::Vfat);
}

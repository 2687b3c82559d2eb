//! The same guarantees on the file systems of a node, in a guest kernel that supports them.

use nodekeel_localstorage::{Dir, FileMode, OsFileStore, testing};
use testbed::guest::disk::{FileSystem, GuestDisk};

use crate::fixture::{in_child_process, raw_names, runs_whole_counts};
use crate::matrix::{self, CallSelection};

/// The number of selected calls at which a scenario is killed, and fails in each of four ways.
const KILLS: usize = 1;
const FAILURES: usize = 1;

const FILE_SYSTEMS: [FileSystem; 3] = [FileSystem::Xfs, FileSystem::PlainExt4, FileSystem::Vfat];

/// Whether the scenario with this number is killed on this file system. A guest takes half a second for each process,
/// so that in a sample each scenario is killed on one of them.
fn is_killed_on(kind: FileSystem, number: usize) -> bool {
    runs_whole_counts() || FILE_SYSTEMS[number % FILE_SYSTEMS.len()] == kind
}

/// Checks all guarantees on a file system.
fn check_guarantees_on(kind: FileSystem) {
    let mut mounted = GuestDisk::acquire().unwrap().format_and_mount(kind, "").unwrap();
    let dir = Dir::open(mounted.mount_point())
        .and_then(|dir| dir.ensure_dir("top", FileMode::PRIVATE_DIR))
        .unwrap();
    testing::file_store_conformance(&OsFileStore::new(dir.try_clone().unwrap()));
    for (number, scenario) in matrix::ALL.iter().enumerate() {
        matrix::fail_at_calls(scenario, dir.path(), CallSelection::sample(FAILURES));
        if is_killed_on(kind, number) {
            matrix::kill_at_calls(scenario, dir.path(), CallSelection::sample(KILLS));
        }
    }
    assert_eq!(raw_names(dir.path()), [""; 0]);
    matrix::check_full_file_system(&dir, 16 << 20);
    dir.write("kept", b"kept", FileMode::PRIVATE_FILE).unwrap();
    // An open directory prevents the unmount.
    drop(dir);
    mounted.remount("").unwrap();
    let top = Dir::open(mounted.mount_point()).unwrap();
    assert_eq!(top.read("top/kept").unwrap(), b"kept");
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 512 MiB"]
fn the_guarantees_hold_on_xfs() {
    in_child_process(the_guarantees_hold_on_xfs, || check_guarantees_on(FileSystem::Xfs));
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 512 MiB"]
fn the_guarantees_hold_on_ext4() {
    in_child_process(the_guarantees_hold_on_ext4, || check_guarantees_on(FileSystem::PlainExt4));
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 512 MiB"]
fn the_guarantees_hold_on_vfat() {
    in_child_process(the_guarantees_hold_on_vfat, || check_guarantees_on(FileSystem::Vfat));
}

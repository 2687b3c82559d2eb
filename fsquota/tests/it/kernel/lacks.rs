//! What is missing is told, and what to do about it.

use std::os::fd::AsRawFd as _;
use std::path::Path;

use nodekeel_fsquota::{OpenError, ProjectQuota, Warning};
use rustix::mount::{MountFlags, UnmountFlags, mount_bind, mount_remount, unmount};
use rustix::thread::CapabilitySet;
use testbed::guest::inside::{Disk, FileSystem};

use super::{Place, on_both, without};

fn refused(path: &Path) -> OpenError {
    ProjectQuota::open(path).expect_err("something is missing")
}

fn mounted_with(kind: FileSystem, options: &str) -> (OpenError, String) {
    let mounted = Disk::take().unwrap().mount(kind, options).unwrap();
    let error = refused(mounted.path());
    let text = error.to_string();
    assert!(text.contains("mount") || text.contains("tune2fs"), "it says what to do: {text}");
    (error, text)
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_mount_without_project_quotas() {
    let (error, text) = mounted_with(FileSystem::Xfs, "");
    assert!(matches!(error, OpenError::NotMounted { .. }) && text.contains("-o prjquota"), "{text}");
    let (error, text) = mounted_with(FileSystem::Xfs, "uquota");
    assert!(matches!(error, OpenError::NotMounted { .. }), "{text}");
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_mount_that_counts_and_does_not_enforce() {
    let (error, text) = mounted_with(FileSystem::Xfs, "pqnoenforce");
    assert!(matches!(error, OpenError::NotEnforced { .. }), "{text}");
    let (error, text) = mounted_with(FileSystem::Ext4, "");
    assert!(matches!(error, OpenError::NotEnforced { .. }), "{text}");
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn an_ext4_that_keeps_no_projects() {
    let (error, text) = mounted_with(FileSystem::PlainExt4, "");
    assert!(matches!(error, OpenError::NoProjectFeature { .. }), "{text}");
    assert!(text.contains("tune2fs -O project,quota -Q prjquota /dev/"), "{text}");
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_read_only_mount() {
    on_both(|place| {
        let path = place.mounted.path().to_owned();
        drop(place.quota);
        mount_remount(&path, MountFlags::RDONLY, "").unwrap();
        let error = refused(&path);
        assert!(matches!(error, OpenError::ReadOnly { .. }), "{error}");
        assert!(error.to_string().contains("remount,rw"));
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn another_file_system() {
    let error = refused(Path::new("/proc"));
    assert!(matches!(&error, OpenError::OtherKind { found, .. } if found == "proc"), "{error}");
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn no_permission() {
    on_both(|place| {
        let error = without(CapabilitySet::SYS_ADMIN, || refused(place.mounted.path()));
        assert!(matches!(error, OpenError::Permission { .. }), "{error}");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_part_of_a_file_system_works_with_a_warning() {
    on_both(|place| {
        place.make("part");
        place.make("there");
        let there = place.path("there");
        mount_bind(place.path("part"), &there).unwrap();
        let quota = ProjectQuota::open(&there).unwrap();
        assert!(quota.warnings().contains(&Warning::PartOfFileSystem), "{:?}", quota.file_system());
        assert!(!place.quota.warnings().contains(&Warning::PartOfFileSystem));
        assert!(place.quota.warnings().contains(&Warning::OthersCanLock), "mkfs lets everybody read it");
        rustix::fs::fchmod(place.quota.root(), rustix::fs::Mode::RWXU).unwrap();
        assert!(!place.quota.warnings().contains(&Warning::OthersCanLock));
        drop(quota);
        unmount(&there, UnmountFlags::empty()).unwrap();
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn any_directory_of_it_names_the_file_system() {
    let place = Place::new(FileSystem::Xfs);
    std::fs::create_dir_all(place.path("a/b")).unwrap();
    let quota = ProjectQuota::open(&place.path("a/b")).unwrap();
    assert_eq!(quota.file_system(), place.quota.file_system());
    assert_eq!(quota.file_system().mount_point, place.mounted.path());
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_mount_that_another_one_covers() {
    let place = Place::new(FileSystem::Xfs);
    std::fs::create_dir(place.path("covering")).unwrap();
    let below = place.make("below");
    mount_bind(place.path("covering"), place.mounted.path()).unwrap();
    let error = refused(Path::new(&format!("/proc/self/fd/{}", below.as_raw_fd())));
    assert!(matches!(error, OpenError::Covered { .. }), "{error}");
    unmount(place.mounted.path(), UnmountFlags::empty()).unwrap();
}

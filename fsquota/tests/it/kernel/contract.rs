//! The contract, the state table, and the numbers.

use std::fs;
use std::os::fd::AsFd as _;
use std::process::Command;

use nodekeel_fsquota::testing::{by_device, conformance};
use nodekeel_fsquota::{Error, ProjectId, ProjectQuota, ProjectRange, QuotaSetter as _};
use rustix::mount::{UnmountFlags, mount_bind, unmount};
use testbed::guest::inside::FileSystem;

use super::{Place, at, on_both};
use crate::states;

fn range(first: u32, last: u32) -> ProjectRange {
    ProjectRange::new(ProjectId::new(first).unwrap(), ProjectId::new(last).unwrap()).unwrap()
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn the_kernels_quotas_conform() {
    on_both(|place| {
        fs::create_dir(place.path("scratch")).unwrap();
        conformance(&place.quota, &place.path("scratch"));
        assert_eq!(place.quota.list().unwrap(), [], "nothing is left");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn the_older_call_by_device_conforms() {
    on_both(|place| {
        fs::create_dir(place.path("scratch")).unwrap();
        let quota = by_device(place.mounted.path()).unwrap();
        conformance(&quota, &place.path("scratch"));
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn the_state_table_holds() {
    on_both(|place| {
        fs::create_dir(place.path("scratch")).unwrap();
        states::walk_through(&place.quota, &place.path("scratch"));
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn the_other_flags_of_a_directory_stay_and_its_project_is_passed_on() {
    on_both(|place| {
        let dir = place.make("dir");
        let nodump = rustix::fs::IFlags::NODUMP;
        rustix::fs::ioctl_setflags(&dir, rustix::fs::ioctl_getflags(&dir).unwrap() | nodump).unwrap();
        let flags = || rustix::fs::ioctl_getflags(place.open("dir")).unwrap();
        assert!(flags().contains(nodump));
        let project = place.quota.set(dir.as_fd(), at(1 << 20, 10)).unwrap().project;
        assert!(flags().contains(nodump));
        fs::create_dir_all(place.path("dir/a/b")).unwrap();
        assert_eq!(place.status("dir/a/b").unwrap().project, project);
        fs::remove_dir_all(place.path("dir/a")).unwrap();
        place.quota.clear(dir.as_fd()).unwrap();
        assert!(flags().contains(nodump));
        assert_eq!(place.status("dir"), None);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_number_in_use_is_not_given_though_its_limits_are_none() {
    on_both(|place| {
        let quota = ProjectQuota::open_with(place.mounted.path(), range(500, 503)).unwrap();
        let unlimited = nodekeel_fsquota::Limits::default().into();
        let set =
            |name: &str| quota.set(place.make(name).as_fd(), unlimited).map(|status| status.project.get());
        assert_eq!(set("a").unwrap(), 500);
        // Another process' view: nothing remembered.
        let quota = ProjectQuota::open_with(place.mounted.path(), range(500, 503)).unwrap();
        let set_again =
            |name: &str| quota.set(place.make(name).as_fd(), unlimited).map(|status| status.project.get());
        assert_eq!(
            [set_again("b").unwrap(), set_again("c").unwrap(), set_again("d").unwrap()],
            [501, 502, 503]
        );
        assert!(matches!(set("e"), Err(Error::Exhausted { .. })));
        assert_eq!(place.status("e"), None);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn everything_is_listed_also_what_others_made() {
    let place = Place::new(FileSystem::Xfs);
    let ours = place.limited("ours", at(1 << 20, 10));
    fs::create_dir(place.path("theirs")).unwrap();
    let theirs = place.path("theirs");
    let commands =
        [format!("project -s -p {} 1048577", theirs.display()), "limit -p bhard=4m 1048577".into()];
    for command in commands {
        testbed::output(Command::new("xfs_quota").args(["-x", "-c", &command]).arg(place.mounted.path()))
            .unwrap();
    }
    let listed = place.quota.list().unwrap();
    let theirs = place.status("theirs").unwrap();
    assert_eq!(listed, [theirs, ours]);
    assert_eq!(
        (theirs.project.get(), theirs.limits.bytes),
        (1_048_577, Some(nodekeel_fsquota::Bytes(4 << 20)))
    );
    assert_eq!(
        place.quota.release_unused(&[]).unwrap(),
        [],
        "what others made is left alone, and what is used"
    );
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn limits_of_removed_directories_are_released_by_number_or_found() {
    on_both(|place| {
        let first = place.limited("first", at(1 << 20, 1000)).project;
        let second = place.limited("second", at(1 << 20, 1000)).project;
        for number in 0..200 {
            fs::write(place.path(&format!("first/{number}")), "x").unwrap();
        }
        assert!(matches!(place.quota.release(first), Err(Error::InUse { .. })));
        fs::remove_dir_all(place.path("first")).unwrap();
        fs::remove_dir(place.path("second")).unwrap();
        // Other tests' children hold what is open here until they execute their programs.
        let is_unused = |project| place.quota.list().unwrap().iter().all(|one| one.project != project);
        while place.quota.release(first).is_err_and(|error| error.is_retryable()) {}
        assert!(is_unused(first));
        while place.quota.release_unused(&[]).unwrap().is_empty() {}
        assert!(is_unused(second));
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn what_was_moved_out_of_a_limited_directory_neither_changes_its_limits_nor_lifts_them() {
    on_both(|place| {
        let outer = place.limited("outer", at(1 << 20, 10));
        fs::create_dir(place.path("outer/inner")).unwrap();
        fs::rename(place.path("outer/inner"), place.path("moved")).unwrap();
        let moved = place.open("moved");
        assert_eq!(
            place.status("moved").unwrap().project,
            outer.project,
            "the kernel lets it keep its project"
        );
        let refused = place.quota.set(moved.as_fd(), at(4 << 20, 20));
        assert!(matches!(refused, Err(Error::Shared { .. })), "{refused:?}");
        place.quota.clear(moved.as_fd()).unwrap();
        assert_eq!(place.status("moved"), None);
        assert_eq!(place.status("outer").unwrap().limits, outer.limits);
        let own = place.quota.set(moved.as_fd(), at(4 << 20, 20)).unwrap();
        assert_ne!(own.project, outer.project);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_directory_that_is_mounted_alone_is_still_inside_the_limited_one() {
    on_both(|place| {
        let outer = place.limited("outer", at(1 << 20, 10));
        for name in ["outer/inner", "there"] {
            fs::create_dir(place.path(name)).unwrap();
        }
        // As the kubelet does for a subPath of a volume.
        mount_bind(place.path("outer/inner"), place.path("there")).unwrap();
        let there = place.open("there");
        let refused = place.quota.set(there.as_fd(), at(4 << 20, 20));
        assert!(matches!(refused, Err(Error::Inherited { .. })), "{refused:?}");
        assert!(matches!(place.quota.clear(there.as_fd()), Err(Error::Inherited { .. })));
        drop(there);
        unmount(place.path("there"), UnmountFlags::empty()).unwrap();
        assert_eq!(place.status("outer").unwrap().limits, outer.limits);
    });
}

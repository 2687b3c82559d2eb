//! The contract, the state table, and the allocation of projects.

use std::fs;
use std::os::fd::AsFd as _;
use std::process::Command;

use nodekeel_fsquota::testing::{RawQuotaCalls, conformance, open_by_device};
use nodekeel_fsquota::{Error, ProjectId, ProjectQuota, QuotaSetter as _};
use rustix::mount::{UnmountFlags, mount_bind, unmount};
use testbed::guest::disk::FileSystem;

use super::{MIB, QuotaFixture, both_limits, on_xfs_and_ext4};
use crate::range;

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn kernel_quotas_conform() {
    on_xfs_and_ext4(|fixture| {
        fs::create_dir(fixture.path("scratch")).unwrap();
        conformance(&fixture.quota, &fixture.path("scratch"));
        assert_eq!(fixture.quota.list_projects().unwrap(), [], "nothing is left");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn quotactl_by_device_conforms() {
    on_xfs_and_ext4(|fixture| {
        fs::create_dir(fixture.path("scratch")).unwrap();
        let quota = open_by_device(fixture.mounted.mount_point()).unwrap();
        conformance(&quota, &fixture.path("scratch"));
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn other_inode_flags_are_kept_and_the_project_is_inherited() {
    on_xfs_and_ext4(|fixture| {
        let dir = fixture.create_dir("dir");
        let nodump = rustix::fs::IFlags::NODUMP;
        rustix::fs::ioctl_setflags(&dir, rustix::fs::ioctl_getflags(&dir).unwrap() | nodump).unwrap();
        let flags = || rustix::fs::ioctl_getflags(fixture.open_dir("dir")).unwrap();
        assert!(flags().contains(nodump));
        let project = fixture.set(&dir, both_limits(MIB, 10)).unwrap().project;
        assert!(flags().contains(nodump));
        fs::create_dir_all(fixture.path("dir/a/b")).unwrap();
        assert_eq!(fixture.read_status("dir/a/b").unwrap().project, project);
        fs::remove_dir_all(fixture.path("dir/a")).unwrap();
        fixture.quota.clear_limits(dir.as_fd()).unwrap();
        assert!(flags().contains(nodump));
        assert_eq!(fixture.read_status("dir"), None);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_project_in_use_without_limits_is_not_reallocated() {
    on_xfs_and_ext4(|fixture| {
        let quota = ProjectQuota::open_with_range(fixture.mounted.mount_point(), range(500, 503)).unwrap();
        let unlimited = nodekeel_fsquota::QuotaLimits::default().into();
        let set = |name: &str| {
            quota.set_limits(fixture.create_dir(name).as_fd(), unlimited).map(|status| status.project.get())
        };
        assert_eq!(set("a").unwrap(), 500);
        // As another process: without a cursor.
        let quota = ProjectQuota::open_with_range(fixture.mounted.mount_point(), range(500, 503)).unwrap();
        let set_again = |name: &str| {
            quota.set_limits(fixture.create_dir(name).as_fd(), unlimited).map(|status| status.project.get())
        };
        assert_eq!(
            [set_again("b").unwrap(), set_again("c").unwrap(), set_again("d").unwrap()],
            [501, 502, 503]
        );
        assert!(matches!(set("e"), Err(Error::RangeExhausted { .. })));
        assert_eq!(fixture.read_status("e"), None);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn projects_of_other_programs_are_listed() {
    let fixture = QuotaFixture::new(FileSystem::Xfs);
    let ours = fixture.create_limited_dir("ours", both_limits(MIB, 10));
    fs::create_dir(fixture.path("theirs")).unwrap();
    let theirs = fixture.path("theirs");
    let commands =
        [format!("project -s -p {} 1048577", theirs.display()), "limit -p bhard=4m 1048577".into()];
    for command in commands {
        testbed::command_output(
            Command::new("xfs_quota").args(["-x", "-c", &command]).arg(fixture.mounted.mount_point()),
        )
        .unwrap();
    }
    let listed = fixture.quota.list_projects().unwrap();
    let theirs = fixture.read_status("theirs").unwrap();
    assert_eq!(listed, [theirs, ours]);
    assert_eq!(
        (theirs.project.get(), theirs.limits.bytes),
        (1_048_577, Some(nodekeel_fsquota::Bytes(4 << 20)))
    );
    assert_eq!(
        fixture.quota.release_unused_projects(&[]).unwrap(),
        [],
        "projects of other programs, and projects in use, are skipped"
    );
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn projects_of_removed_directories_are_released_by_number_or_found() {
    on_xfs_and_ext4(|fixture| {
        let first = fixture.create_limited_dir("first", both_limits(MIB, 1000)).project;
        let second = fixture.create_limited_dir("second", both_limits(MIB, 1000)).project;
        for number in 0..200 {
            fs::write(fixture.path(&format!("first/{number}")), "x").unwrap();
        }
        assert!(matches!(fixture.quota.release_project(first), Err(Error::ProjectInUse { .. })));
        fs::remove_dir_all(fixture.path("first")).unwrap();
        fs::remove_dir(fixture.path("second")).unwrap();
        // Children of other tests inherit our open descriptors until they execute their programs.
        let is_unused =
            |project| fixture.quota.list_projects().unwrap().iter().all(|one| one.project != project);
        while fixture.quota.release_project(first).is_err_and(|error| error.is_retryable()) {}
        assert!(is_unused(first));
        while fixture.quota.release_unused_projects(&[]).unwrap().is_empty() {}
        assert!(is_unused(second));
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn an_empty_directory_moved_out_of_a_limited_one_gets_its_own_project() {
    on_xfs_and_ext4(|fixture| {
        let outer = fixture.create_limited_dir("outer", both_limits(MIB, 10));
        for name in ["set", "cleared"] {
            fs::create_dir(fixture.path(&format!("outer/{name}"))).unwrap();
            fs::rename(fixture.path(&format!("outer/{name}")), fixture.path(name)).unwrap();
            assert_eq!(
                fixture.read_status(name).unwrap().project,
                outer.project,
                "the kernel lets it keep its project"
            );
        }
        let own = fixture.set(&fixture.open_dir("set"), both_limits(4 * MIB, 20)).unwrap();
        assert_ne!(own.project, outer.project);
        fixture.quota.clear_limits(fixture.open_dir("cleared").as_fd()).unwrap();
        assert_eq!(fixture.read_status("cleared"), None);
        assert_eq!(fixture.read_status("outer").unwrap().limits, outer.limits);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn the_largest_project_is_listed() {
    on_xfs_and_ext4(|fixture| {
        let ours = fixture.create_limited_dir("ours", both_limits(MIB, 10));
        let largest = ProjectId::new(u32::MAX - 1).unwrap();
        RawQuotaCalls(&fixture.quota).write_limits(largest, 4096, 0).unwrap();
        let listed = fixture.quota.list_projects().unwrap();
        let numbers: Vec<ProjectId> = listed.into_iter().map(|status| status.project).collect();
        assert_eq!(numbers, [ours.project, largest]);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_bind_mounted_subdirectory_still_belongs_to_the_limited_parent() {
    on_xfs_and_ext4(|fixture| {
        let outer = fixture.create_limited_dir("outer", both_limits(MIB, 10));
        for name in ["outer/inner", "there"] {
            fs::create_dir(fixture.path(name)).unwrap();
        }
        // As the kubelet does for a subPath of a volume.
        mount_bind(fixture.path("outer/inner"), fixture.path("there")).unwrap();
        let there = fixture.open_dir("there");
        let rejected = fixture.set(&there, both_limits(4 * MIB, 20));
        assert!(matches!(rejected, Err(Error::InheritedProject { .. })), "{rejected:?}");
        assert!(matches!(fixture.quota.clear_limits(there.as_fd()), Err(Error::InheritedProject { .. })));
        drop(there);
        unmount(fixture.path("there"), UnmountFlags::empty()).unwrap();
        assert_eq!(fixture.read_status("outer").unwrap().limits, outer.limits);
    });
}

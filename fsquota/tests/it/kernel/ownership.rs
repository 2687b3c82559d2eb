//! Whose limits a project has: the directory that it was allocated to.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};

use nodekeel_fsquota::testing::RawQuotaCalls;
use nodekeel_fsquota::{
    Bytes, Error, LimitChange, ProjectId, ProjectQuota, QuotaChange, QuotaLimits, QuotaSetter as _,
};
use rustix::fs::{IFlags, XattrFlags};
use rustix::mount::UnmountFlags;
use rustix::thread::CapabilitySet;

use super::{
    MARK, MIB, QuotaFixture, both_limits, on_xfs_and_ext4, without_capability, without_sys_resource,
    write_until_error,
};

/// Moves `FROM/sub`, with a file, out of a limited directory.
fn move_out(fixture: &QuotaFixture, from: &str, to: &str) -> File {
    fs::create_dir(fixture.path(&format!("{from}/sub"))).unwrap();
    fs::write(fixture.path(&format!("{from}/sub/f")), "x").unwrap();
    fs::rename(fixture.path(&format!("{from}/sub")), fixture.path(to)).unwrap();
    fixture.open_dir(to)
}

/// Limits a directory as releases did that wrote no marks.
fn limit_as_before(fixture: &QuotaFixture, name: &str, number: u32) -> ProjectId {
    let project = ProjectId::new(number).unwrap();
    let raw = RawQuotaCalls(&fixture.quota);
    raw.write_limits(project, 8 * 1024, 100).unwrap();
    raw.tag_directory(fixture.create_dir(name).as_fd(), project).unwrap();
    project
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_moved_directory_never_changes_or_lifts_the_limits_of_another_one() {
    on_xfs_and_ext4(|fixture| {
        let origin = fixture.create_limited_dir("origin", both_limits(8 * MIB, 100));
        let moved = move_out(&fixture, "origin", "moved");
        for change in [both_limits(MIB, 10), QuotaLimits::default().into()] {
            let rejected = fixture.set(&moved, change);
            assert!(matches!(rejected, Err(Error::SharedProject { .. })), "{rejected:?}");
            assert_eq!(fixture.read_status("origin").unwrap().limits, origin.limits);
        }
        let (own, tree) = fixture.set_tree(&moved, both_limits(2 * MIB, 10));
        assert_ne!(own.project, origin.project);
        assert_eq!((tree.changed, own.usage.inodes.0), (1, 2), "{tree:?}");
        let status = fixture.read_status("origin").unwrap();
        assert_eq!((status.project, status.limits), (origin.project, origin.limits));
        assert_eq!(status.usage.inodes.0, 1, "what was moved out counts elsewhere");
        let (written, _) = without_sys_resource(|| write_until_error(&fixture.path("moved/file")));
        assert!((MIB..=2 * MIB).contains(&written), "{written}");
        fixture.set(&moved, QuotaLimits::default().into()).unwrap();
        let (written, error) = without_sys_resource(|| write_until_error(&fixture.path("origin/file")));
        assert_eq!(error.raw_os_error(), Some(fixture.limit_errno()));
        assert!((7 * MIB..=8 * MIB).contains(&written), "{written}");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_directory_that_something_was_moved_out_of_keeps_its_project() {
    on_xfs_and_ext4(|fixture| {
        let origin = fixture.create_limited_dir("origin", both_limits(8 * MIB, 100));
        move_out(&fixture, "origin", "moved");
        fs::write(fixture.path("origin/file"), "x").unwrap();
        let change = QuotaChange { bytes: LimitChange::Set(Bytes(MIB)), inodes: LimitChange::Keep };
        let status = fixture.set(&fixture.open_dir("origin"), change).unwrap();
        assert_eq!((status.project, status.limits.bytes), (origin.project, Some(Bytes(MIB))));
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_copy_with_all_attributes_gets_its_own_project() {
    on_xfs_and_ext4(|fixture| {
        let origin = fixture.create_limited_dir("origin", both_limits(8 * MIB, 100));
        let copy = fixture.create_dir("copy");
        RawQuotaCalls(&fixture.quota).tag_directory(copy.as_fd(), origin.project).unwrap();
        let mut mark = [0; 256];
        if let Ok(length) = rustix::fs::fgetxattr(fixture.open_dir("origin"), MARK, &mut mark) {
            rustix::fs::fsetxattr(&copy, MARK, &mark[..length], XattrFlags::empty()).unwrap();
        }
        let own = fixture.set(&copy, both_limits(MIB, 10)).unwrap();
        assert_ne!(own.project, origin.project);
        assert_eq!(fixture.read_status("origin").unwrap().limits, origin.limits);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_directory_that_an_earlier_release_limited_keeps_its_project() {
    on_xfs_and_ext4(|fixture| {
        let project = limit_as_before(&fixture, "dir", 2_000_000_000);
        fs::create_dir_all(fixture.path("dir/a/b")).unwrap();
        fs::write(fixture.path("dir/a/file"), vec![1; 64 * 1024]).unwrap();
        fs::hard_link(fixture.path("dir/a/file"), fixture.path("dir/a/b/also")).unwrap();
        fs::write(fixture.path("dir/removed"), "x").unwrap();
        fs::remove_file(fixture.path("dir/removed")).unwrap();
        let set = || fixture.set(&fixture.open_dir("dir"), both_limits(4 * MIB, 50));
        let status = set().unwrap();
        assert_eq!((status.project, status.limits.bytes), (project, Some(Bytes(4 * MIB))));
        // From now on its mark proves it.
        let moved = move_out(&fixture, "dir", "moved");
        assert_eq!(set().unwrap().project, project);
        let (own, _) = fixture.set_tree(&moved, both_limits(MIB, 10));
        assert_ne!(own.project, project);
        assert_eq!(fixture.read_status("dir").unwrap().limits, status.limits);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn uncounted_links_never_make_a_moved_directory_the_owner() {
    on_xfs_and_ext4(|fixture| {
        let dir = fixture.create_dir("origin");
        fs::create_dir(fixture.path("origin/sub")).unwrap();
        // Not counted, as many as the inodes that stay behind.
        symlink("x", fixture.path("origin/sub/link")).unwrap();
        let (origin, tree) = fixture.set_tree(&dir, both_limits(8 * MIB, 100));
        assert_eq!((tree.special, origin.usage.inodes.0), (1, 2), "{tree:?}");
        fs::rename(fixture.path("origin/sub"), fixture.path("moved")).unwrap();
        let moved = fixture.open_dir("moved");
        let rejected = fixture.set(&moved, both_limits(MIB, 10));
        assert!(matches!(rejected, Err(Error::SharedProject { .. })), "{rejected:?}");
        assert_eq!(fixture.read_status("origin").unwrap().limits, origin.limits);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn files_that_come_and_go_never_make_a_moved_directory_the_owner() {
    on_xfs_and_ext4(|fixture| {
        let origin = fixture.create_limited_dir("origin", both_limits(8 * MIB, 1000));
        let moved = move_out(&fixture, "origin", "moved");
        let (is_done, mut outcomes) = (AtomicBool::new(false), Vec::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    let files = || (0..30).map(|number| fixture.path(&format!("moved/{number}")));
                    files().for_each(|file| fs::write(file, "").unwrap());
                    files().for_each(|file| fs::remove_file(file).unwrap());
                }
            });
            for _ in 0..20 {
                outcomes.push(fixture.set(&moved, both_limits(MIB, 10)));
            }
            is_done.store(true, Ordering::Relaxed);
        });
        let is_rejected = |outcome: &_| matches!(outcome, Err(Error::SharedProject { .. }));
        assert!(outcomes.iter().all(is_rejected), "{outcomes:?}");
        assert_eq!(fixture.read_status("origin").unwrap().limits, origin.limits);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn clearing_an_immutable_directory_fails_and_keeps_its_limits() {
    on_xfs_and_ext4(|fixture| {
        let before = fixture.create_limited_dir("dir", both_limits(MIB, 10));
        let dir = fixture.open_dir("dir");
        let flags = rustix::fs::ioctl_getflags(&dir).unwrap();
        rustix::fs::ioctl_setflags(&dir, flags | IFlags::IMMUTABLE).unwrap();
        let failed = fixture.quota.clear_limits(dir.as_fd());
        assert!(matches!(failed, Err(Error::Immutable)), "{failed:?}");
        assert_eq!(fixture.read_status("dir").unwrap().limits, before.limits);
        rustix::fs::ioctl_setflags(&dir, flags).unwrap();
        fixture.quota.clear_limits(dir.as_fd()).unwrap();
        assert_eq!(fixture.read_status("dir"), None);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_directory_moved_out_before_there_were_marks_is_not_taken_for_the_owner() {
    on_xfs_and_ext4(|fixture| {
        let project = limit_as_before(&fixture, "dir", 2_000_000_000);
        let before = fixture.read_status("dir").unwrap().limits;
        let moved = move_out(&fixture, "dir", "moved");
        let rejected = fixture.set(&moved, both_limits(MIB, 10));
        assert!(matches!(rejected, Err(Error::SharedProject { .. })), "{rejected:?}");
        let (own, _) = fixture.set_tree(&moved, both_limits(MIB, 10));
        assert_ne!(own.project, project);
        let status = fixture.read_status("dir").unwrap();
        assert_eq!((status.project, status.limits), (project, before));
        let dir = fixture.open_dir("dir");
        let status = fixture.set(&dir, both_limits(MIB, 10)).unwrap();
        assert_eq!(status.project, project, "nothing else has its project any more");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_recursive_set_and_clear_skip_directories_that_own_their_project() {
    on_xfs_and_ext4(|fixture| {
        let origin = fixture.create_limited_dir("origin", both_limits(8 * MIB, 100));
        move_out(&fixture, "origin", "moved");
        // Where both have the project, the kernel allows it.
        fs::rename(fixture.path("origin"), fixture.path("moved/origin")).unwrap();
        let moved = fixture.open_dir("moved");
        let (own, tree) = fixture.set_tree(&moved, both_limits(MIB, 10));
        assert_eq!((tree.changed, tree.foreign), (1, 1), "{tree:?}");
        let status = fixture.read_status("moved/origin").unwrap();
        assert_eq!((status.project, status.limits), (origin.project, origin.limits));
        assert_ne!(own.project, origin.project);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_pod_can_not_forge_the_mark() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("dir", both_limits(MIB, 10));
        let forged = without_capability(CapabilitySet::SYS_ADMIN, || {
            let value = b"project=2000000000 inode=1 generation=1";
            rustix::fs::fsetxattr(fixture.open_dir("dir"), MARK, value, XattrFlags::empty())
        });
        assert_eq!(
            forged.map_err(|error| io::Error::from(error).kind()),
            Err(io::ErrorKind::PermissionDenied)
        );
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn the_lock_file_in_a_mount_of_a_limited_directory_belongs_to_no_project() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("dir", both_limits(MIB, 10));
        fs::create_dir(fixture.path("mounted")).unwrap();
        rustix::mount::mount_bind(fixture.path("dir"), fixture.path("mounted")).unwrap();
        let quota = ProjectQuota::open(&fixture.path("mounted")).unwrap();
        let status = quota.set_limits(fixture.open_dir("mounted").as_fd(), both_limits(MIB, 20)).unwrap();
        assert_eq!(status.usage.inodes.0, 1, "the directory alone");
        quota.clear_limits(fixture.open_dir("mounted").as_fd()).unwrap();
        assert_eq!(quota.list_projects().unwrap(), []);
        drop(quota);
        rustix::mount::unmount(fixture.path("mounted"), UnmountFlags::DETACH).unwrap();
    });
}

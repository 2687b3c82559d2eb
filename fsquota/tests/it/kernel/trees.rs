//! Directories that are not empty.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::fs::symlink;

use nodekeel_fsquota::{Error, Inodes, QuotaSetter as _};
use rustix::mount::{UnmountFlags, mount_bind, unmount};

use super::{MIB, QuotaFixture, both_limits, on_xfs_and_ext4, without_sys_resource, write_until_error};

fn create_tree(fixture: &QuotaFixture) {
    fs::create_dir_all(fixture.path("full/a/b")).unwrap();
    fs::create_dir(fixture.path("outside")).unwrap();
    for name in ["full/one", "full/a/two", "full/a/b/three", "outside/file"] {
        fs::write(fixture.path(name), vec![1; 64 * 1024]).unwrap();
        File::open(fixture.path(name)).unwrap().sync_all().unwrap();
    }
    symlink("../outside", fixture.path("full/link")).unwrap();
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_non_empty_directory_is_rejected_unless_its_tree_is_set() {
    on_xfs_and_ext4(|fixture| {
        create_tree(&fixture);
        let full = fixture.open_dir("full");
        assert!(matches!(fixture.set(&full, both_limits(MIB, 100)), Err(Error::NotEmpty)));
        assert_eq!(fixture.read_status("full"), None);
        let (status, changed) = fixture.set_tree(&full, both_limits(MIB, 100));
        assert_eq!((changed.changed, changed.special, changed.foreign), (5, 1, 0), "{changed:?}");
        assert_eq!(status.usage.inodes, Inodes(6));
        assert!(status.usage.bytes.0 >= 192 * 1024, "{status:?}");
        assert_eq!(fixture.read_status("outside"), None, "no link was followed");
        let (written, error) = without_sys_resource(|| write_until_error(&fixture.path("full/a/b/more")));
        assert_eq!(error.raw_os_error(), Some(fixture.limit_errno()));
        assert!(written <= MIB - 192 * 1024);
        let (_, again) = fixture.set_tree(&full, both_limits(MIB, 100));
        assert_eq!((again.changed, again.unchanged), (0, 6), "{again:?}");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_cleared_tree_frees_its_project() {
    on_xfs_and_ext4(|fixture| {
        create_tree(&fixture);
        fs::remove_file(fixture.path("full/link")).unwrap();
        let full = fixture.open_dir("full");
        fixture.set_tree(&full, both_limits(MIB, 100));
        assert!(matches!(fixture.quota.clear_limits(full.as_fd()), Err(Error::NotEmpty)));
        let changed = fixture.quota.clear_limits_recursive(full.as_fd()).unwrap();
        assert_eq!(changed.changed, 5, "{changed:?}");
        for name in ["full", "full/a", "full/a/b"] {
            assert_eq!(fixture.read_status(name), None);
        }
        assert_eq!(fixture.quota.list_projects().unwrap(), []);
        fs::write(fixture.path("full/a/large"), vec![1; 4 * MIB as usize]).unwrap();
        assert_eq!(
            fixture.quota.clear_limits_recursive(full.as_fd()).unwrap().changed,
            0,
            "clearing again changes nothing"
        );
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn nested_directories_with_separate_limits_keep_them() {
    on_xfs_and_ext4(|fixture| {
        fs::create_dir(fixture.path("full")).unwrap();
        let inner = fixture.create_limited_dir("full/inner", both_limits(MIB, 10));
        fs::write(fixture.path("full/inner/file"), "x").unwrap();
        let (outer, changed) = fixture.set_tree(&fixture.open_dir("full"), both_limits(8 * MIB, 100));
        assert_eq!((changed.changed, changed.foreign), (0, 1), "{changed:?}");
        assert_ne!(outer.project, inner.project);
        assert_eq!(fixture.read_status("full/inner").unwrap().limits, inner.limits);
        fixture.quota.clear_limits_recursive(fixture.open_dir("full").as_fd()).unwrap();
        assert_eq!(fixture.read_status("full/inner").unwrap().limits, inner.limits);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_bind_mount_in_a_tree_is_a_border() {
    on_xfs_and_ext4(|fixture| {
        create_tree(&fixture);
        mount_bind(fixture.path("outside"), fixture.path("full/a/b")).unwrap();
        let full = fixture.open_dir("full");
        let set = fixture.quota.set_limits_recursive(full.as_fd(), both_limits(MIB, 100));
        unmount(fixture.path("full/a/b"), UnmountFlags::DETACH).unwrap();
        let (_, tree) = set.unwrap();
        assert_eq!((tree.changed, tree.foreign), (3, 1), "{tree:?}");
        assert_eq!(fixture.read_status("outside"), None, "what is mounted lies elsewhere");
        assert_eq!(fixture.read_status("full/a/b"), None, "what it covers is reported as skipped");
        let (_, tree) = fixture.set_tree(&full, both_limits(MIB, 100));
        assert_eq!((tree.changed, tree.foreign), (2, 0), "{tree:?}");
    });
}

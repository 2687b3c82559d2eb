//! Limits are enforced.

use std::fs::{self, File};
use std::os::fd::AsFd as _;

use nodekeel_fsquota::testing::RawQuotaCalls;
use nodekeel_fsquota::{Bytes, Inodes, LimitChange, ProjectQuota, QuotaChange, QuotaSetter as _};

use super::{
    MIB, QuotaFixture, both_limits, create_files_until_error, on_xfs_and_ext4, without_sys_resource,
    write_until_error,
};

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn writing_stops_at_the_limit_of_bytes_and_nowhere_else() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("small", both_limits(MIB, 100));
        fixture.create_limited_dir("large", both_limits(64 * MIB, 100));
        // Files are counted at any depth.
        fixture.create_limited_dir("deep", both_limits(MIB, 100));
        fs::create_dir_all(fixture.path("deep/a/b/c")).unwrap();
        for name in ["small/file", "deep/a/b/c/file"] {
            let (written, error) = without_sys_resource(|| write_until_error(&fixture.path(name)));
            assert_eq!(error.raw_os_error(), Some(fixture.limit_errno()), "{name}");
            assert!((MIB - 128 * 1024..=MIB).contains(&written), "{name}: {written} bytes fit into 1 MiB");
        }
        let status = fixture.read_status("small").unwrap();
        assert!(!status.is_over_limit() && status.usage.bytes <= Bytes(MIB), "{status:?}");
        without_sys_resource(|| fs::write(fixture.path("large/file"), vec![1; 8 * MIB as usize])).unwrap();
        without_sys_resource(|| fs::write(fixture.path("outside"), vec![1; 8 * MIB as usize])).unwrap();
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn making_files_stops_at_the_limit_of_inodes() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("dir", both_limits(64 * MIB, 20));
        let (created, error) = without_sys_resource(|| create_files_until_error(&fixture.path("dir")));
        assert_eq!(
            (created, error.raw_os_error()),
            (19, Some(fixture.limit_errno())),
            "the directory is one of 20"
        );
        assert_eq!(fixture.read_status("dir").unwrap().usage.inodes, Inodes(20));
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn limits_survive_a_remount_and_still_bind() {
    on_xfs_and_ext4(|mut fixture| {
        let before = fixture.create_limited_dir("dir", both_limits(MIB, 20));
        let kept = before.limits;
        drop(fixture.quota);
        fixture.mounted.remount("prjquota").unwrap();
        fixture.quota = ProjectQuota::open(fixture.mounted.mount_point()).unwrap();
        let after = fixture.read_status("dir").unwrap();
        assert_eq!((after.project, after.limits), (before.project, kept));
        let (created, error) = without_sys_resource(|| create_files_until_error(&fixture.path("dir")));
        assert_eq!((created, error.raw_os_error()), (19, Some(fixture.limit_errno())));
        let (written, error) = without_sys_resource(|| write_until_error(&fixture.path("dir/0")));
        assert_eq!(error.raw_os_error(), Some(fixture.limit_errno()));
        assert!((1..=MIB).contains(&written));
        let next = fixture.create_limited_dir("next", both_limits(MIB, 20));
        assert_ne!(next.project, before.project, "allocated projects are found again");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_raised_limit_lets_writing_continue_and_a_lowered_one_stops_it_at_once() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("dir", both_limits(MIB, 100));
        without_sys_resource(|| write_until_error(&fixture.path("dir/file")));
        let set = |bytes| {
            let change = QuotaChange { bytes, inodes: LimitChange::Keep };
            fixture.set(&fixture.open_dir("dir"), change).unwrap()
        };
        set(LimitChange::Set(Bytes(4 * MIB)));
        without_sys_resource(|| fs::write(fixture.path("dir/more"), vec![1; MIB as usize])).unwrap();
        File::open(fixture.path("dir/more")).unwrap().sync_all().unwrap();
        let lowered = set(LimitChange::Set(Bytes(MIB)));
        assert!(lowered.is_over_limit(), "{lowered:?}");
        let (written, error) = without_sys_resource(|| write_until_error(&fixture.path("dir/yet-more")));
        assert_eq!((written, error.raw_os_error()), (0, Some(fixture.limit_errno())));
        let lifted = set(LimitChange::Unlimited);
        assert_eq!((lifted.limits.bytes, lifted.limits.inodes), (None, Some(Inodes(100))));
        without_sys_resource(|| fs::write(fixture.path("dir/yet-more"), vec![1; 8 * MIB as usize])).unwrap();
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn the_reported_usage_is_close_to_what_was_written() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("dir", both_limits(MIB, 100));
        let file = fixture.path("dir/file");
        without_sys_resource(|| fs::write(&file, vec![1; 512 * 1024])).unwrap();
        File::open(&file).unwrap().sync_all().unwrap();
        let status = fixture.read_status("dir").unwrap();
        assert_eq!((status.limits.bytes, status.limits.inodes), (Some(Bytes(MIB)), Some(Inodes(100))));
        assert!(status.usage.bytes.0.abs_diff(512 * 1024) <= 51 * 1024, "{status:?}");
        for number in 0..50 {
            File::create(fixture.path(&format!("dir/{number}"))).unwrap();
        }
        assert_eq!(fixture.read_status("dir").unwrap().usage.inodes, Inodes(52));
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn inside_a_limited_directory_the_file_system_is_as_large_as_the_limit() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("dir", both_limits(8 * MIB, 100));
        let stat = rustix::fs::statvfs(fixture.path("dir")).unwrap();
        assert_eq!((stat.f_blocks * stat.f_frsize, stat.f_files), (8 * MIB, 100));
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn ext4_does_not_limit_privileged_processes_as_the_warning_says() {
    let fixture = QuotaFixture::new(testbed::guest::disk::FileSystem::Ext4);
    assert!(
        fixture.quota.enforcement_gaps().contains(&nodekeel_fsquota::EnforcementGap::PrivilegedCanExceed)
    );
    fixture.create_limited_dir("dir", both_limits(MIB, 100));
    fs::write(fixture.path("dir/file"), vec![1; 4 * MIB as usize]).unwrap();
    File::open(fixture.path("dir/file")).unwrap().sync_all().unwrap();
    assert!(fixture.read_status("dir").unwrap().is_over_limit());
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn limits_that_are_no_longer_enforced_are_neither_set_nor_reported() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("dir", both_limits(MIB, 100));
        // As `xfs_quota -x -c 'disable -p'` and `quotaoff -P` do, while the quotas are open.
        RawQuotaCalls(&fixture.quota).turn_enforcement_off().unwrap();
        let other = fixture.create_dir("other");
        for dir in [fixture.open_dir("dir"), other] {
            let set = fixture.set(&dir, both_limits(MIB, 100));
            let error = set.expect_err("the limits would not bind");
            assert!(error.to_string().contains("does not enforce the limits"), "{error}");
        }
        let error =
            fixture.quota.read_status(fixture.open_dir("dir").as_fd()).expect_err("not true any more");
        assert!(error.to_string().contains("does not enforce the limits"), "{error}");
        let listed = fixture.quota.list_projects().unwrap();
        assert_eq!(listed.len(), 1, "nothing was set: {listed:?}");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_limit_is_verified_by_root_and_leaves_no_use() {
    on_xfs_and_ext4(|fixture| {
        let dir = fixture.create_dir("dir");
        fixture.quota.verify_limit(dir.as_fd()).expect("without a limit there is nothing to verify");
        let before = fixture.set(&dir, both_limits(64 << 10, 16)).unwrap();
        for _ in 0..3 {
            // With all capabilities, as a daemon has them.
            fixture.quota.verify_limit(dir.as_fd()).expect("the limit binds");
        }
        // XFS frees the blocks in the background.
        rustix::fs::syncfs(dir.as_fd()).unwrap();
        let after = fixture.read_status("dir").unwrap();
        assert_eq!((after.project, after.limits), (before.project, before.limits));
        assert!(fs::read_dir(fixture.path("dir")).unwrap().next().is_none());
    });
}

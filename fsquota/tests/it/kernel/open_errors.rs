//! `OpenError` names what is missing and how to fix it.

use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::process::Command;

use nodekeel_fsquota::{EnforcementGap, OpenError, ProjectQuota};
use rustix::mount::{MountFlags, UnmountFlags, mount_bind, mount_remount, unmount};
use rustix::thread::CapabilitySet;
use testbed::guest::disk::{FileSystem, GuestDisk};

use super::{QuotaFixture, on_xfs_and_ext4, without_capability};

fn open_error(path: &Path) -> OpenError {
    ProjectQuota::open(path).expect_err("a requirement is missing")
}

fn open_error_with_options(kind: FileSystem, options: &str) -> OpenError {
    let mounted = GuestDisk::acquire().unwrap().format_and_mount(kind, options).unwrap();
    open_error(mounted.mount_point())
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_mount_that_lacks_something_is_rejected_with_the_command_that_fixes_it() {
    use FileSystem::{Ext4, PlainExt4, Xfs};
    use OpenError::{AccountingOff, EnforcementOff, NoProjectFeature};
    type IsExpected = fn(&OpenError) -> bool;
    let cases: [(FileSystem, &str, IsExpected, &str); 5] = [
        (Xfs, "", |error| matches!(error, AccountingOff { .. }), "-o prjquota"),
        (Xfs, "uquota", |error| matches!(error, AccountingOff { .. }), "mount"),
        (Xfs, "pqnoenforce", |error| matches!(error, EnforcementOff { .. }), "mount"),
        (Ext4, "", |error| matches!(error, EnforcementOff { .. }), "run `quotaon -P /"),
        (
            PlainExt4,
            "",
            |error| matches!(error, NoProjectFeature { .. }),
            "tune2fs -O project,quota -Q prjquota /dev/",
        ),
    ];
    for (kind, options, is_expected, fix) in cases {
        let error = open_error_with_options(kind, options);
        assert!(is_expected(&error) && error.to_string().contains(fix), "{kind:?} {options:?}: {error}");
    }
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn the_command_that_a_disabled_enforcement_advises_turns_it_on_without_an_unmount() {
    for option in ["prjquota", "pqnoenforce"] {
        let mounted = GuestDisk::acquire().unwrap().format_and_mount(FileSystem::Xfs, option).unwrap();
        let run = |command: &str| testbed::command_output(Command::new("sh").args(["-c", command])).unwrap();
        run(&format!("xfs_quota -x -c 'disable -p' {} || true", mounted.mount_point().display()));
        let text = open_error(mounted.mount_point()).to_string();
        assert!(!text.contains("unmount"), "{text}");
        let advised = text.split('`').nth(1).unwrap();
        run(advised);
        ProjectQuota::open(mounted.mount_point()).unwrap_or_else(|error| panic!("{advised}: {error}"));
    }
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_read_only_mount_is_rejected() {
    on_xfs_and_ext4(|fixture| {
        let path = fixture.mounted.mount_point().to_owned();
        drop(fixture.quota);
        mount_remount(&path, MountFlags::RDONLY, "").unwrap();
        let error = open_error(&path);
        assert!(matches!(error, OpenError::ReadOnly { .. }), "{error}");
        assert!(error.to_string().contains("remount,rw"));
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn an_unsupported_file_system_is_rejected() {
    let error = open_error(Path::new("/proc"));
    assert!(matches!(&error, OpenError::UnsupportedFileSystem { found, .. } if found == "proc"), "{error}");
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_process_without_sys_admin_is_rejected() {
    on_xfs_and_ext4(|fixture| {
        let error =
            without_capability(CapabilitySet::SYS_ADMIN, || open_error(fixture.mounted.mount_point()));
        assert!(matches!(error, OpenError::Permission { .. }), "{error}");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_bind_mounted_subdirectory_opens_with_a_warning() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_dir("part");
        fixture.create_dir("there");
        let there = fixture.path("there");
        mount_bind(fixture.path("part"), &there).unwrap();
        let quota = ProjectQuota::open(&there).unwrap();
        assert!(
            quota.enforcement_gaps().contains(&EnforcementGap::PartOfFileSystem),
            "{:?}",
            quota.file_system()
        );
        assert!(!fixture.quota.enforcement_gaps().contains(&EnforcementGap::PartOfFileSystem));
        drop(quota);
        unmount(&there, UnmountFlags::empty()).unwrap();
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn any_directory_identifies_its_file_system() {
    let fixture = QuotaFixture::new(FileSystem::Xfs);
    std::fs::create_dir_all(fixture.path("a/b")).unwrap();
    let quota = ProjectQuota::open(&fixture.path("a/b")).unwrap();
    assert_eq!(quota.file_system(), fixture.quota.file_system());
    assert_eq!(quota.file_system().mount_point, fixture.mounted.mount_point());
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_covered_mount_is_rejected() {
    let fixture = QuotaFixture::new(FileSystem::Xfs);
    std::fs::create_dir(fixture.path("covering")).unwrap();
    let below = fixture.create_dir("below");
    mount_bind(fixture.path("covering"), fixture.mounted.mount_point()).unwrap();
    let error = open_error(Path::new(&format!("/proc/self/fd/{}", below.as_raw_fd())));
    assert!(matches!(error, OpenError::Covered { .. }), "{error}");
    unmount(fixture.mounted.mount_point(), UnmountFlags::empty()).unwrap();
}

//! Entries that do not count for the directory that they are in.

use std::fs::{self, File};
use std::io::Write as _;
use std::num::NonZeroU32;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use nodekeel_fsquota::testing::RawQuotaCalls;
use nodekeel_fsquota::{AuditOptions, AuditReport, FindingKind, ProjectId, QuotaSetter as _, QuotaUsage};
use rustix::fs::{CWD, FileType, Mode, XattrFlags, mknodat};
use rustix::mount::{UnmountFlags, mount_bind, unmount};

use super::{MARK, MIB, QuotaFixture, both_limits, on_xfs_and_ext4};

fn audit(fixture: &QuotaFixture, dir: &str, repair: bool) -> AuditReport {
    let mut options = AuditOptions::default();
    options.repair = repair;
    fixture.quota.audit_tree(fixture.open_dir(dir).as_fd(), options).unwrap()
}

/// Removes an entry from its project, as its owner can with an ioctl.
fn leave_project(fixture: &QuotaFixture, name: &str) {
    let file = File::open(fixture.path(name)).unwrap();
    RawQuotaCalls(&fixture.quota).leave_project(file.as_fd()).unwrap();
}

fn kinds(report: &AuditReport) -> Vec<(&str, FindingKind)> {
    let mut kinds: Vec<_> =
        report.findings.iter().map(|found| (found.path.to_str().unwrap(), found.kind)).collect();
    kinds.sort_by_key(|(path, _)| path.to_owned());
    kinds
}

fn write_synced(path: &Path, bytes: usize) {
    fs::write(path, vec![1; bytes]).unwrap();
    File::open(path).unwrap().sync_all().unwrap();
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn what_escaped_by_its_owners_ioctl_is_found_with_its_bytes_and_repaired() {
    on_xfs_and_ext4(|fixture| {
        let origin = fixture.create_limited_dir("dir", both_limits(8 * MIB, 100));
        fs::create_dir_all(fixture.path("dir/sub/below")).unwrap();
        for name in ["dir/kept", "dir/left", "dir/sub/below/file"] {
            write_synced(&fixture.path(name), 64 * 1024);
        }
        let before = fixture.read_status("dir").unwrap().usage;
        assert!(audit(&fixture, "dir", false).is_clean());
        fs::hard_link(fixture.path("dir/left"), fixture.path("dir/left.again")).unwrap();
        for name in ["dir/left", "dir/sub"] {
            leave_project(&fixture, name);
        }
        let report = audit(&fixture, "", false);
        let left = fs::metadata(fixture.path("dir/left")).unwrap().blocks() * 512;
        let sub = fs::metadata(fixture.path("dir/sub")).unwrap().blocks() * 512;
        let mut escaped = QuotaUsage::default();
        (escaped.bytes.0, escaped.inodes.0) = (left + sub, 2);
        assert_eq!((report.summary.escaped, report.summary.owners), (escaped, 1), "{report:?}");
        let found = kinds(&report);
        // By either of its names.
        assert!(found[0].0.starts_with("dir/left"), "{found:?}");
        assert_eq!(found[1..], [("dir/sub", FindingKind::Escaped)]);
        assert_eq!(audit(&fixture, "", true).summary.repaired, 2);
        assert!(audit(&fixture, "", false).is_clean());
        let status = fixture.read_status("dir").unwrap();
        assert_eq!((status.project, status.limits), (origin.project, origin.limits));
        assert_eq!(status.usage, before, "everything counts again");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_file_keeps_the_project_of_the_owner_below_which_it_has_one_of_its_names() {
    on_xfs_and_ext4(|fixture| {
        // The file had its names before the limits: links to a directory with another project are rejected.
        for name in ["free", "first", "second"] {
            fixture.create_dir(name);
        }
        fs::write(fixture.path("first/file"), "x").unwrap();
        for name in ["free/file", "second/file"] {
            fs::hard_link(fixture.path("first/file"), fixture.path(name)).unwrap();
        }
        for name in ["first", "second"] {
            let dir = fixture.open_dir(name);
            fixture.set_tree(&dir, both_limits(8 * MIB, 100));
        }
        let inodes = |name| fixture.read_status(name).unwrap().usage.inodes.0;
        for _ in 0..2 {
            let report = audit(&fixture, "", true);
            assert!(report.is_clean() && report.summary.repaired == 0, "{report:?}");
            assert_eq!(["first", "second"].map(inodes), [2, 1]);
        }
        fs::remove_file(fixture.path("first/file")).unwrap();
        assert_eq!(audit(&fixture, "", true).summary.repaired, 1, "it is below its owner by no name");
        assert_eq!(inodes("first"), 1);
        audit(&fixture, "", true);
        assert_eq!(inodes("second"), 2);
        assert!(audit(&fixture, "", false).is_clean());
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn an_owner_that_left_its_project_returns_to_it_and_so_does_what_took_an_unlimited_one() {
    on_xfs_and_ext4(|fixture| {
        let origin = fixture.create_limited_dir("dir", both_limits(8 * MIB, 100));
        let below = fixture.create_dir("dir/below");
        RawQuotaCalls(&fixture.quota).tag_directory(below.as_fd(), ProjectId::new(1).unwrap()).unwrap();
        assert_eq!(audit(&fixture, "dir", true).summary.repaired, 1);
        assert_eq!(fixture.quota.find_project(below.as_fd()).unwrap(), Some(origin.project));
        for audited in ["", "dir"] {
            leave_project(&fixture, "dir");
            assert_eq!(fixture.read_status("dir"), None);
            let report = audit(&fixture, audited, true);
            assert_eq!(
                (report.summary.repaired, report.findings[0].kind),
                (1, FindingKind::Escaped),
                "{report:?}"
            );
            let status = fixture.read_status("dir").unwrap();
            assert_eq!((status.project, status.limits), (origin.project, origin.limits));
            assert_eq!(fixture.quota.find_project(below.as_fd()).unwrap(), Some(origin.project));
        }
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn moves_copies_and_restores_are_told_apart_and_only_those_of_known_owners_are_changed() {
    on_xfs_and_ext4(|fixture| {
        let origin = fixture.create_limited_dir("origin", both_limits(8 * MIB, 100));
        let raw = RawQuotaCalls(&fixture.quota);
        fs::create_dir(fixture.path("origin/sub")).unwrap();
        fs::write(fixture.path("origin/sub/file"), "x").unwrap();
        fs::rename(fixture.path("origin/sub"), fixture.path("moved")).unwrap();
        let unknown = ProjectId::new(4_000).unwrap();
        let mut mark = [0; 256];
        let length = rustix::fs::fgetxattr(fixture.open_dir("origin"), MARK, &mut mark).unwrap();
        for (name, project, is_marked) in
            [("copied", origin.project, true), ("restored", unknown, true), ("other", unknown, false)]
        {
            let dir = fixture.create_dir(name);
            raw.tag_directory(dir.as_fd(), project).unwrap();
            if is_marked {
                rustix::fs::fsetxattr(&dir, MARK, &mark[..length], XattrFlags::empty()).unwrap();
            }
            fs::write(fixture.path(&format!("{name}/file")), "x").unwrap();
        }
        let report = audit(&fixture, "", true);
        let found = kinds(&report);
        let expected = [
            ("copied", FindingKind::Copied),
            ("copied/file", FindingKind::Copied),
            ("moved", FindingKind::MovedOut),
            ("moved/file", FindingKind::MovedOut),
            ("other", FindingKind::Unowned),
            ("restored", FindingKind::Restored),
        ];
        assert_eq!(found, expected);
        assert_eq!((report.summary.outside.inodes.0, report.summary.unowned.inodes.0), (4, 4), "{report:?}");
        assert_eq!(report.summary.repaired, 4);
        for (name, project) in
            [("moved", None), ("copied", None), ("other", Some(unknown)), ("restored", Some(unknown))]
        {
            assert_eq!(
                fixture.quota.find_project(fixture.open_dir(name).as_fd()).unwrap(),
                project,
                "{name}"
            );
        }
        assert_eq!(fixture.read_status("origin").unwrap().usage.inodes.0, 1, "it alone is left");
        let directories =
            |project| fixture.quota.find_directories(fixture.quota.mount_dir(), project).unwrap();
        assert_eq!(directories(origin.project).owner.as_deref(), Some(Path::new("origin")));
        assert_eq!(directories(origin.project).others, Vec::<std::path::PathBuf>::new());
        let mut others = directories(unknown).others;
        others.sort();
        assert_eq!(others, ["other", "restored"].map(std::path::PathBuf::from));
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn an_audit_follows_no_link_enters_no_mount_and_counts_what_it_can_not_read() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("dir", both_limits(8 * MIB, 100));
        fs::create_dir(fixture.path("outside")).unwrap();
        fs::write(fixture.path("outside/file"), "x").unwrap();
        fs::create_dir(fixture.path("dir/mounted")).unwrap();
        symlink("../outside", fixture.path("dir/link")).unwrap();
        mount_bind(fixture.path("outside"), fixture.path("dir/mounted")).unwrap();
        for name in ["outside/fifo", "dir/fifo"] {
            mknodat(CWD, fixture.path(name), FileType::Fifo, Mode::RUSR, 0).unwrap();
        }
        mount_bind(fixture.path("outside/fifo"), fixture.path("dir/fifo")).unwrap();
        let report = audit(&fixture, "dir", true);
        for name in ["dir/mounted", "dir/fifo"] {
            unmount(fixture.path(name), UnmountFlags::DETACH).unwrap();
        }
        assert_eq!((report.summary.mounts, report.summary.repaired), (2, 0), "{report:?}");
        assert!(report.is_clean() && report.summary.special <= 1, "{report:?}");
        assert_eq!(fixture.read_status("outside"), None);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_directory_that_uses_more_than_its_limit_is_counted() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("dir", both_limits(8 * MIB, 100));
        write_synced(&fixture.path("dir/file"), 64 * 1024);
        assert_eq!(audit(&fixture, "", false).summary.over_limit, 0);
        let dir = fixture.open_dir("dir");
        fixture.set(&dir, both_limits(4096, 100)).unwrap();
        let report = audit(&fixture, "", false);
        assert!(report.summary.over_limit == 1 && report.is_clean(), "{report:?}");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn an_audit_of_a_part_knows_the_owner_above_and_takes_its_time() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("dir", both_limits(8 * MIB, 200));
        fs::create_dir(fixture.path("dir/sub")).unwrap();
        for number in 0..50 {
            fs::write(fixture.path(&format!("dir/sub/{number}")), "x").unwrap();
        }
        leave_project(&fixture, "dir/sub/7");
        let mut options = AuditOptions::default();
        (options.repair, options.entries_per_second) = (true, NonZeroU32::new(100));
        let start = std::time::Instant::now();
        let report = fixture.quota.audit_tree(fixture.open_dir("dir/sub").as_fd(), options).unwrap();
        assert_eq!((report.summary.entries, report.summary.repaired), (51, 1), "{report:?}");
        assert!(start.elapsed().as_millis() >= 400, "{:?} for 50 entries", start.elapsed());
        assert!(audit(&fixture, "", false).is_clean());
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_leased_file_is_named_and_the_rest_is_audited() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("dir", both_limits(8 * MIB, 100));
        for name in ["dir/a", "dir/z"] {
            fs::write(fixture.path(name), "x").unwrap();
            leave_project(&fixture, name);
        }
        // Opened this once: a process that another test starts meanwhile may keep a file open that was closed here.
        let mut leased = File::create_new(fixture.path("dir/leased")).unwrap();
        leased.write_all(b"x").unwrap();
        RawQuotaCalls(&fixture.quota).leave_project(leased.as_fd()).unwrap();
        RawQuotaCalls::hold_write_lease(leased.as_fd()).unwrap();
        let report = audit(&fixture, "", true);
        // Linux 6.17 tells the project of what can't be opened.
        if report.is_complete() {
            assert_eq!(report.summary.repaired, 3, "{report:?}");
        } else {
            assert_eq!((report.summary.repaired, report.summary.unread), (2, 1), "{report:?}");
            assert_eq!(report.unread, [Path::new("dir/leased")]);
        }
        RawQuotaCalls::release_lease(leased.as_fd()).unwrap();
        let report = audit(&fixture, "", true);
        assert!(report.is_complete() && audit(&fixture, "", false).is_clean(), "{report:?}");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn directories_that_are_renamed_during_an_audit_do_not_end_it() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("dir", both_limits(8 * MIB, 400));
        for name in ["dir/first", "dir/second", "dir/zero"] {
            fs::create_dir(fixture.path(name)).unwrap();
        }
        for number in 0..10 {
            fs::create_dir_all(fixture.path(&format!("dir/first/{number}/below"))).unwrap();
            fs::write(fixture.path(&format!("dir/first/{number}/below/file")), "x").unwrap();
        }
        fs::write(fixture.path("dir/zero/left"), "x").unwrap();
        leave_project(&fixture, "dir/zero/left");
        let mut options = AuditOptions::default();
        options.entries_per_second = NonZeroU32::new(100);
        let (dir, is_done) = (fixture.open_dir("dir"), AtomicBool::new(false));
        let report = std::thread::scope(|scope| {
            // As a pod can, as fast as it can.
            scope.spawn(|| {
                for parents in [["first", "second"], ["second", "first"]].iter().cycle() {
                    for number in 0..10 {
                        let [from, to] = parents.map(|name| fixture.path(&format!("dir/{name}/{number}")));
                        fs::rename(from, to).unwrap();
                    }
                    if is_done.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
            let report = fixture.quota.audit_tree(dir.as_fd(), options);
            is_done.store(true, Ordering::Relaxed);
            report.unwrap()
        });
        assert_eq!(kinds(&report), [("zero/left", FindingKind::Escaped)], "{report:?}");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn an_audit_in_the_background_changes_nothing_and_ends_when_it_is_canceled() {
    on_xfs_and_ext4(|fixture| {
        fixture.create_limited_dir("dir", both_limits(8 * MIB, 100));
        fs::write(fixture.path("dir/left"), "x").unwrap();
        leave_project(&fixture, "dir/left");
        let mut options = AuditOptions::default();
        options.repair = true;
        let dir = fixture.open_dir("dir");
        let usage =
            |is_canceled: &dyn Fn() -> bool| fixture.quota.audit_usage(dir.as_fd(), options, is_canceled);
        let report = usage(&|| false).unwrap().unwrap();
        assert_eq!((report.summary.escaped.inodes.0, report.summary.repaired), (1, 0), "{report:?}");
        // The audited directory owns the project.
        assert_eq!(report.uncounted, [(PathBuf::new(), 1)].into(), "{report:?}");
        let canceled = usage(&|| true).unwrap_err();
        assert!(matches!(canceled, nodekeel_fsquota::Error::Canceled), "{canceled}");
    });
}

//! Volumes whose limits were lost on a disk with quotas, as after a restore: they are found, and limited again.

use std::cell::Cell;
use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::process::Command;

use nodekeel_fsquota::testing::RawQuotaCalls;
use nodekeel_fsquota::{AuditOptions, Bytes, Inodes, ProjectId, ProjectQuota, QuotaLimits, QuotaSetter as _};
use nodekeel_provisioner::{DirStore, OpenVolume, VolumeOpener as _, VolumeStore as _};
use testbed::guest::disk::FileSystem;

use crate::fixture::{MIB, id, open_on_disk};

const LIMITS: QuotaLimits = QuotaLimits { bytes: Some(Bytes(8 * MIB)), inodes: Some(Inodes(100)) };

async fn check_lost_limits(kind: FileSystem) {
    let (disk, store) = open_on_disk(kind).await;
    let volume = disk.mount_point().join("volumes").join(id(1).as_str());
    store.create(&id(1), LIMITS).await.expect("create");
    fs::create_dir(volume.join("below")).expect("a directory");
    fs::write(volume.join("below/file"), vec![7; MIB as usize]).expect("written");
    let backup = disk.mount_point().join("backup");
    let copy = |from: &std::path::Path, to: &std::path::Path| {
        assert!(Command::new("cp").arg("-a").args([from, to]).status().expect("cp").success());
    };
    let quota = ProjectQuota::open(disk.mount_point()).expect("quotas");
    let open_volume = || File::open(&volume).expect("opened");
    let run_shell = |script: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-ec", script]).env("V", &volume).env("B", &backup);
        assert!(shell.status().expect("a shell").success(), "{script}");
    };
    let raw = || RawQuotaCalls(&quota);
    let project = |number| ProjectId::new(number).expect("a project");
    let unused = Cell::new(77);
    // Of another program.
    raw().write_limits(project(4242), 1 << 20, 1000).expect("limited");
    let losses: [(&str, &dyn Fn()); 7] = [
        // None of them knows of projects.
        ("cp -a", &|| run_shell("cp -a $V $B; rm -rf $V; cp -a $B $V; rm -rf $B")),
        ("tar", &|| run_shell("tar -C $V -cf $B .; rm -rf $V; mkdir $V; tar -C $V -xpf $B; rm $B")),
        // As rsync, which makes each directory before its files.
        ("cpio", &|| {
            run_shell("cd $V; find . | cpio -o -H newc -F $B; cd /; rm -rf $V; mkdir $V");
            run_shell("cd $V; cpio -idm -F $B; cd /; rm $B");
        }),
        // As `chproj 0`, and `chproj` to a project of another program, of the root alone.
        ("chproj 0", &|| raw().leave_project(open_volume().as_fd()).expect("changed")),
        ("chproj", &|| {
            unused.set(unused.get() + 1);
            raw().tag_directory(open_volume().as_fd(), project(unused.get())).expect("changed");
        }),
        // As `limit -p bsoft=0 bhard=0` of xfs_quota(8), or setquota(8).
        ("limit -p 0", &|| {
            let unlimited = quota.set_limits(open_volume().as_fd(), QuotaLimits::default().into());
            assert_eq!(unlimited.expect("unlimited").limits, QuotaLimits::default());
        }),
        // As `chproj -R`: all that is made in a limited directory has its project.
        ("another project", &|| {
            let other = disk.mount_point().join("other");
            fs::create_dir(&other).expect("a directory");
            quota.set_limits(File::open(&other).expect("opened").as_fd(), LIMITS.into()).expect("limited");
            copy(&volume, &other.join("volume"));
            fs::remove_dir_all(&volume).expect("removed");
            fs::rename(other.join("volume"), &volume).expect("renamed");
            fs::remove_dir(&other).expect("removed");
        }),
    ];
    for (loss, lose) in losses {
        for is_published in [false, true] {
            let case = format!("{kind:?}, {loss}, published: {is_published}");
            lose();
            let found =
                store.find_limits(&id(1), false).await.expect("readable").expect("limits can be lost");
            assert!(found.limits.bytes.is_none() || !found.is_own, "{case}: {found:?}");
            if is_published {
                // A pod comes before the next audit: what was promised is known.
                let opened = store.open(&id(1)).expect("opened");
                assert!(matches!(opened, OpenVolume::Directory(_)));
            } else {
                assert_eq!(store.restore_limits(&id(1), LIMITS).await.expect("set again"), 0, "{case}");
            }
            let found =
                store.find_limits(&id(1), false).await.expect("readable").expect("limits can be lost");
            // Who opens a volume does not know its class, and leaves the inode limit that it finds to other projects.
            let inodes = if is_published { Some(Inodes(4096)) } else { LIMITS.inodes };
            let expected = QuotaLimits { inodes, ..LIMITS };
            assert_eq!((found.limits, found.is_own), (expected, true), "{case}");
            // All that was restored counts, and what is written below stops at the limit.
            assert!(found.usage.bytes >= Bytes(MIB) && found.usage.inodes == Inodes(3), "{case}: {found:?}");
            quota.verify_limit(open_volume().as_fd()).expect("it binds");
            let capacity = store.capacity().await.expect("a capacity").expect("it is limited");
            assert_eq!(capacity.promised, Bytes(8 * MIB), "{case}");
        }
    }
    assert_eq!(uncounted(&store).await, None, "{kind:?}: nothing is left of it");

    // A part of the volume leaves its limits: the root is as it was, and only an audit finds it.
    let below = || File::open(volume.join("below")).expect("opened");
    let leave = |file: &File| raw().leave_project(file.as_fd()).expect("changed");
    let enter_other = || raw().tag_directory(below().as_fd(), project(4242)).expect("changed");
    let parts: [(&str, &dyn Fn(), u64); 3] = [
        ("a file, as `chattr -p 0`", &|| leave(&File::open(volume.join("below/file")).expect("opened")), 1),
        ("a directory, as `chproj 0`", &|| leave(&below()), 1),
        // With the file, which has not the project of its directory.
        ("a directory, as `chproj` to a limited project", &enter_other, 2),
    ];
    for (part, lose, count) in parts {
        lose();
        let found = store.find_limits(&id(1), false).await.expect("readable").expect("limits can be lost");
        assert!(found.is_own, "{kind:?}, {part}");
        assert_eq!(uncounted(&store).await, Some(count), "{kind:?}, {part}");
        // The commands that the condition of the volume names: `chattr -p 0`, and `dirquota audit --repair`.
        leave(&below());
        let mut options = AuditOptions::default();
        options.repair = true;
        quota.audit_tree(open_volume().as_fd(), options).expect("repaired");
        assert_eq!(uncounted(&store).await, None, "{kind:?}, {part}");
    }
    // What a restore finds in another program's project stays there, and is told.
    enter_other();
    leave(&open_volume());
    assert_eq!(store.restore_limits(&id(1), LIMITS).await.expect("set again"), 1, "{kind:?}");
    assert!(uncounted(&store).await.is_some_and(|count| count > 0), "{kind:?}");
}

/// How much of the volume does not count against its limits.
async fn uncounted(store: &DirStore) -> Option<u64> {
    let audit = store.audit_limits(AuditOptions::default()).await.expect("audited");
    audit.expect("limits can be lost").uncounted.get(&id(1)).copied()
}

#[tokio::test]
#[ignore = "sampled: needs kernel with a disk of 512 MiB"]
async fn on_xfs_a_volume_whose_limits_were_lost_is_limited_again() {
    check_lost_limits(FileSystem::Xfs).await;
}

#[tokio::test]
#[ignore = "sampled: needs kernel with a disk of 512 MiB"]
async fn on_ext4_a_volume_whose_limits_were_lost_is_limited_again() {
    check_lost_limits(FileSystem::Ext4).await;
}

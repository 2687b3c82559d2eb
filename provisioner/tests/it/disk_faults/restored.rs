//! Volumes whose limits were lost on a disk with quotas, as after a restore: they are found, and limited again.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::process::Command;

use nodekeel_fsquota::{Bytes, Inodes, ProjectQuota, QuotaLimits, QuotaSetter as _};
use nodekeel_provisioner::{OpenVolume, VolumeOpener as _, VolumeStore as _};
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
    let losses: [(&str, &dyn Fn()); 3] = [
        // As tar and rsync, it knows nothing of projects.
        ("cp -a", &|| {
            copy(&volume, &backup);
            fs::remove_dir_all(&volume).expect("removed");
            copy(&backup, &volume);
            fs::remove_dir_all(&backup).expect("removed");
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
                store.restore_limits(&id(1), LIMITS).await.expect("set again");
            }
            let found =
                store.find_limits(&id(1), false).await.expect("readable").expect("limits can be lost");
            assert_eq!((found.limits.bytes, found.is_own), (LIMITS.bytes, true), "{case}");
            // All that was restored counts, and what is written below stops at the limit.
            assert!(found.usage.bytes >= Bytes(MIB) && found.usage.inodes == Inodes(3), "{case}: {found:?}");
            quota.verify_limit(open_volume().as_fd()).expect("it binds");
            let capacity = store.capacity().await.expect("a capacity").expect("it is limited");
            assert_eq!(capacity.promised, Bytes(8 * MIB), "{case}");
        }
    }
}

#[tokio::test]
#[ignore = "needs kernel with a disk of 512 MiB"]
async fn on_xfs_a_volume_whose_limits_were_lost_is_limited_again() {
    check_lost_limits(FileSystem::Xfs).await;
}

#[tokio::test]
#[ignore = "needs kernel with a disk of 512 MiB"]
async fn on_ext4_a_volume_whose_limits_were_lost_is_limited_again() {
    check_lost_limits(FileSystem::Ext4).await;
}

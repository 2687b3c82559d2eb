//! Volumes whose limits were lost or changed, in a directory store with quotas in memory.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::sync::Arc;

use nodekeel_fsquota::testing::MemQuota;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits, QuotaSetter as _};
use nodekeel_provisioner::{IMAGE_FILE, ImageFormat, OpenVolume, VolumeOpener as _, VolumeStore as _};

use crate::fixture::{MIB, id, new_store, open};

const LIMITS: QuotaLimits = QuotaLimits { bytes: Some(Bytes(8 * MIB)), inodes: Some(Inodes(100)) };

/// The inode limit of 8 MiB of a class that sets none.
const DEFAULT: QuotaLimits = QuotaLimits { bytes: LIMITS.bytes, inodes: Some(Inodes(4096)) };

#[tokio::test]
async fn a_directory_with_a_file_named_image_stays_a_directory_whatever_limits_it_has_lost() {
    let (base, quota, store) = new_store().await;
    store.create(&id(1), LIMITS).await.expect("create");
    let volume = base.path().join("volumes").join(id(1).as_str());
    fs::write(volume.join(IMAGE_FILE), "of the pod").expect("written");
    // As an operator does who sets the limit of bytes by hand.
    let no_inodes = QuotaLimits { inodes: None, ..LIMITS };
    let opened = File::open(&volume).expect("opened");
    quota.set_limits(opened.as_fd(), no_inodes.into()).expect("set");
    store.usage(&id(1)).await.expect_err("it looks like an image that has lost its mark");
    let found = store.find_limits(&id(1), false).await.expect("readable").expect("they can be lost");
    assert_eq!((found.limits, found.is_own), (no_inodes, true));
    store.restore_limits(&id(1), LIMITS).await.expect("set again");
    assert_eq!(store.usage(&id(1)).await.expect("a directory").limits, LIMITS);
    drop(store);

    // Another quota knows nothing of it, as after a restore.
    let store = open(base.path(), &Arc::new(MemQuota::new())).await;
    store.count_promised(&[(id(1), Bytes(8 * MIB))]);
    let opened = store.open(&id(1)).expect("opened");
    assert!(matches!(opened, OpenVolume::Directory(_)));
    let attempts = store.wait_for_publish().await;
    assert_eq!((attempts.restored, attempts.has_failed), ([(id(1), 0)].into(), false));
    let found = store.find_limits(&id(1), false).await.expect("readable").expect("they can be lost");
    assert_eq!((found.limits, found.is_own), (DEFAULT, true));
    store.usage(&id(1)).await.expect("a directory");
}

#[tokio::test]
async fn the_directory_of_an_image_has_the_limits_of_its_size_or_has_lost_them() {
    let (base, quota, store) = new_store().await;
    let size = QuotaLimits { bytes: Some(Bytes(8 * MIB)), inodes: None };
    store.create_image(&id(1), ImageFormat::Block, Bytes(8 * MIB)).await.expect("create");
    let directory = File::open(base.path().join("volumes").join(id(1).as_str())).expect("opened");
    let limits = || quota.read_status(directory.as_fd()).expect("readable").expect("limited").limits;
    let found = || async {
        store.find_limits(&id(1), true).await.expect("readable").expect("they can be lost").limits
    };
    let right = limits();
    assert_eq!(found().await, size);
    for changed in [1, 999].map(|mebibytes| QuotaLimits { bytes: Some(Bytes(mebibytes * MIB)), inodes: None })
    {
        quota.set_limits(directory.as_fd(), changed.into()).expect("changed");
        assert_eq!(found().await, QuotaLimits::default(), "{changed:?}");
        store.restore_limits(&id(1), size).await.expect("set again");
        assert_eq!((found().await, limits()), (size, right));
    }
    store.find_limits(&id(1), false).await.expect_err("it is no directory");
}

//! The conformance suite of stores with block and strict volumes.

use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};

use crate::id::VolumeId;
use crate::image::{ImageFormat, VolumeKind};
use crate::snapshot::{SnapshotId, SnapshotStore, StoredId};
use crate::store::{VolumeStore, VolumeStoreError};

const MIB: u64 = 1 << 20;

/// Checks that a store keeps the contract of [`VolumeStore`] and [`SnapshotStore`] for block and strict volumes of these
/// formats, as far as it does not concern their content.
///
/// Creates and removes sparse volumes of at most a gibibyte and snapshots with fixed ids (UIDs that start with
/// `c0ffee02-`), which must be free, and changes no others.
///
/// # Panics
/// If the store breaks the contract; the message names the broken part.
pub async fn image_conformance(store: &(impl SnapshotStore + VolumeStore), formats: &[ImageFormat]) {
    let others = (store.list().await.expect("list"), store.list_snapshots().await.expect("list"));
    for format in formats {
        check_life(store, *format).await;
        check_publication(store, *format).await;
        check_kinds(store, *format).await;
        check_copies(store, *format).await;
    }
    let left = (store.list().await.expect("list"), store.list_snapshots().await.expect("list"));
    assert_eq!(left, others, "others stay, and nothing of the test is left");
}

fn uid(number: u8) -> String {
    format!("c0ffee02-0000-4000-8000-0000000000{number:02x}")
}

fn volume(number: u8) -> VolumeId {
    VolumeId::from_uid(&uid(number)).expect("a UUID")
}

fn snapshot(number: u8) -> SnapshotId {
    SnapshotId::from_uid(&uid(number)).expect("a UUID")
}

/// A size that each format can have, and more.
fn size(format: ImageFormat, more_mib: u64) -> Bytes {
    Bytes(format.min_size().0.max(8 * MIB) + more_mib * MIB)
}

fn limits(size: Bytes) -> QuotaLimits {
    QuotaLimits { bytes: Some(size), inodes: None }
}

async fn read_limits(store: &dyn VolumeStore, id: &VolumeId) -> QuotaLimits {
    store.usage(id).await.expect("the usage of a volume that exists").limits
}

async fn check_life(store: &dyn VolumeStore, format: ImageFormat) {
    let id = volume(1);
    let missing = store.resize(&id, limits(size(format, 0))).await;
    assert!(matches!(missing, Err(VolumeStoreError::NotFound { .. })), "{format}: a missing one has no size");
    for more in [0, 0, 8, 4] {
        store.create_image(&id, format, size(format, more)).await.expect("creating an existing one succeeds");
        assert!(store.list().await.expect("list").contains(&id), "{format}: it is listed");
    }
    let grown = size(format, 8);
    assert_eq!(
        read_limits(store, &id).await,
        limits(grown),
        "{format}: create raises the size, and never lowers it"
    );
    for more in [16, 16] {
        store.resize(&id, limits(size(format, more))).await.expect("it grows, again and again");
        assert_eq!(read_limits(store, &id).await, limits(size(format, more)), "{format}: it has the size");
    }
    let unfit = QuotaLimits { inodes: Some(Inodes(7)), ..limits(size(format, 16)) };
    for wrong in [limits(size(format, 8)), QuotaLimits::default(), unfit] {
        store.resize(&id, wrong).await.expect_err("it can't shrink, and has a size and no inode limit");
        assert_eq!(read_limits(store, &id).await, limits(size(format, 16)), "{format}: it keeps its size");
    }
    for _ in 0..2 {
        store.remove(&id).await.expect("removing it, also a missing one, succeeds");
        assert!(!store.list().await.expect("list").contains(&id), "{format}: a removed one is not listed");
    }
}

async fn check_publication(store: &(impl SnapshotStore + VolumeStore), format: ImageFormat) {
    let id = volume(2);
    store.create_image(&id, format, size(format, 0)).await.expect("create");
    assert!(
        store.remove_empty(&id).await.expect("removed"),
        "{format}: it counts as empty until it is published"
    );
    assert!(!store.list().await.expect("list").contains(&id), "{format}: it is gone");
    store.create_image(&id, format, size(format, 0)).await.expect("create");
    store.mark_published(&id).await.expect("marked");
    assert!(!store.remove_empty(&id).await.expect("kept"), "{format}: a published one may have data");
    store.remove(&id).await.expect("remove");
}

async fn check_kinds(store: &dyn VolumeStore, format: ImageFormat) {
    let id = volume(3);
    store.create_image(&id, format, size(format, 0)).await.expect("create");
    let others = ImageFormat::ALL.into_iter().filter(|other| *other != format);
    for other in others {
        let created = store.create_image(&id, other, size(other, 0)).await;
        assert!(matches!(created, Err(VolumeStoreError::Create { .. })), "{format} is not {other}");
    }
    let directory = QuotaLimits { bytes: Some(size(format, 0)), inodes: Some(Inodes(1024)) };
    store.create(&id, directory).await.expect_err("it is not a directory");
    assert_eq!(read_limits(store, &id).await, limits(size(format, 0)), "{format}: nothing has changed");
    store.remove(&id).await.expect("remove");
    store.create(&id, directory).await.expect("the name of a removed volume is free for any kind");
    store.create_image(&id, format, size(format, 0)).await.expect_err("a directory is not an image");
    assert_eq!(read_limits(store, &id).await, directory, "{format}: the directory has not changed");
    store.remove(&id).await.expect("remove");
}

async fn check_copies(store: &(impl SnapshotStore + VolumeStore), format: ImageFormat) {
    let (of, taken) = (volume(4), snapshot(4));
    store.create_image(&of, format, size(format, 4)).await.expect("create");
    let info = store.create_snapshot(&taken, &of).await.expect("a snapshot");
    assert_eq!(info.kind, VolumeKind::Image(format), "a snapshot has the kind of its volume");
    assert_eq!(info.restore_size, size(format, 4), "{format}: it restores to the size of its volume");
    for (number, source) in [(5, StoredId::from(taken.clone())), (6, StoredId::from(of.clone()))] {
        let copy = volume(number);
        let small = store.create_image_from(&copy, &source, format, size(format, 0)).await;
        assert!(
            matches!(small, Err(VolumeStoreError::Create { .. })),
            "{format}: a copy of {source} is too small"
        );
        for other in ImageFormat::ALL.into_iter().filter(|other| *other != format) {
            let copied = store.create_image_from(&copy, &source, other, Bytes(1 << 30)).await;
            assert!(
                matches!(copied, Err(VolumeStoreError::Create { .. })),
                "no {other} is a copy of {format}"
            );
        }
        let directory = QuotaLimits { bytes: Some(Bytes(1 << 30)), inodes: Some(Inodes(1024)) };
        store.create_volume_from(&copy, &source, directory).await.expect_err("no directory is a copy of it");
        assert!(!store.list().await.expect("list").contains(&copy), "{format}: a failed copy is not visible");
        for more in [6, 6, 4] {
            store.create_image_from(&copy, &source, format, size(format, more)).await.expect("a copy");
            assert_eq!(
                read_limits(store, &copy).await,
                limits(size(format, 6)),
                "{format}: it has its own size"
            );
        }
        assert!(
            store.remove_empty(&copy).await.expect("removed"),
            "{format}: an unpublished copy counts as empty"
        );
    }
    assert_eq!(
        read_limits(store, &of).await,
        limits(size(format, 4)),
        "{format}: the source has not changed"
    );
    store.remove_snapshot(&taken).await.expect("remove");
    store.remove(&of).await.expect("remove");
    check_directory_copies(store, format).await;
}

async fn check_directory_copies(store: &(impl SnapshotStore + VolumeStore), format: ImageFormat) {
    let (of, copy) = (volume(7), volume(8));
    let directory = QuotaLimits { bytes: Some(Bytes(MIB)), inodes: Some(Inodes(1024)) };
    store.create(&of, directory).await.expect("create");
    let copied = store.create_image_from(&copy, &of.clone().into(), format, size(format, 0)).await;
    assert!(matches!(copied, Err(VolumeStoreError::Create { .. })), "no {format} is a copy of a directory");
    store.remove(&of).await.expect("remove");
}

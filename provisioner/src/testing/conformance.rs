//! The conformance suite of volume stores.

use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};

use crate::capacity::policy::StoreCapacity;
use crate::id::VolumeId;
use crate::store::{VolumeStore, VolumeStoreError};

const MIB: u64 = 1 << 20;

/// Checks that a store keeps the contract of [`VolumeStore`].
///
/// Creates and removes volumes of a few megabytes with fixed ids (claim UIDs that start with `c0ffee00-`),
/// which must be free, and does not change other volumes. It cannot check behaviour after a crash.
///
/// # Panics
/// If the store breaks the contract; the message names the broken part.
pub async fn conformance(store: &dyn VolumeStore) {
    let others = list_ids(store).await;
    check_create(store, &test_id(1)).await;
    check_create_only_raises_limits(store, &test_id(2)).await;
    check_resize(store, &test_id(3)).await;
    check_unknown_volume(store, &test_id(4)).await;
    check_remove(store, &test_id(5)).await;
    check_remove_empty(store, &test_id(8)).await;
    check_concurrency(store).await;
    check_probe(store, &test_id(9)).await;
    assert_eq!(list_ids(store).await, others, "other volumes stay, and no test volume is left");
}

fn test_id(number: u8) -> VolumeId {
    let uid = format!("c0ffee00-0000-4000-8000-0000000000{number:02x}");
    VolumeId::from_uid(&uid).expect("a UUID")
}

fn test_limits(mib: u64, inodes: u64) -> QuotaLimits {
    QuotaLimits { bytes: Some(Bytes(mib * MIB)), inodes: Some(Inodes(inodes)) }
}

async fn list_ids(store: &dyn VolumeStore) -> Vec<VolumeId> {
    let ids = store.list().await.expect("list");
    assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "list returns each id once, sorted");
    ids
}

async fn remove_volume(store: &dyn VolumeStore, id: &VolumeId) {
    store.remove(id).await.expect("remove");
}

async fn read_limits(store: &dyn VolumeStore, id: &VolumeId) -> QuotaLimits {
    store.usage(id).await.expect("the usage of a volume that exists").limits
}

async fn check_create(store: &dyn VolumeStore, id: &VolumeId) {
    store.create(id, test_limits(4, 2048)).await.expect("create");
    let volume = store.usage(id).await.expect("usage");
    assert_eq!(volume.limits, test_limits(4, 2048), "a volume is created with its limits, unrounded");
    assert!(volume.usage.bytes.0 <= 64 << 10, "a new volume is empty, not {:?}", volume.usage);
    assert!(volume.usage.inodes.0 <= 1, "a new volume has one inode, its directory, not {:?}", volume.usage);
    assert!(list_ids(store).await.contains(id), "a volume is listed");
    remove_volume(store, id).await;
}

async fn check_create_only_raises_limits(store: &dyn VolumeStore, id: &VolumeId) {
    store.create(id, test_limits(4, 2048)).await.expect("create");
    store.create(id, test_limits(4, 2048)).await.expect("creating an existing volume succeeds");
    assert_eq!(list_ids(store).await.iter().filter(|found| *found == id).count(), 1, "it is one volume");
    store.create(id, test_limits(8, 1024)).await.expect("create with other limits");
    assert_eq!(
        read_limits(store, id).await,
        test_limits(8, 2048),
        "create raises a limit and never lowers one"
    );
    remove_volume(store, id).await;
}

async fn check_resize(store: &dyn VolumeStore, id: &VolumeId) {
    store.create(id, test_limits(4, 2048)).await.expect("create");
    for to in [test_limits(8, 4096), test_limits(2, 1024), test_limits(2, 1024)] {
        store.resize(id, to).await.expect("resize");
        assert_eq!(read_limits(store, id).await, to, "resize sets the limits, up and down, again and again");
    }
    remove_volume(store, id).await;
}

async fn check_unknown_volume(store: &dyn VolumeStore, id: &VolumeId) {
    let not_found =
        |result: Result<(), VolumeStoreError>| matches!(result, Err(VolumeStoreError::NotFound { .. }));
    assert!(
        not_found(store.resize(id, test_limits(4, 2048)).await),
        "resizing an unknown volume fails with NotFound"
    );
    assert!(
        not_found(store.usage(id).await.map(|_| ())),
        "the usage of an unknown volume fails with NotFound"
    );
    store.remove(id).await.expect("removing an unknown volume succeeds");
    assert!(!list_ids(store).await.contains(id), "no other method creates a volume");
}

async fn check_remove(store: &dyn VolumeStore, id: &VolumeId) {
    store.create(id, test_limits(4, 2048)).await.expect("create");
    remove_volume(store, id).await;
    assert!(!list_ids(store).await.contains(id), "a removed volume is not listed");
    assert!(
        matches!(store.usage(id).await, Err(VolumeStoreError::NotFound { .. })),
        "the usage of a removed volume fails with NotFound"
    );
    remove_volume(store, id).await;
    store.create(id, test_limits(2, 1024)).await.expect("the name of a removed volume is free at once");
    assert_eq!(
        read_limits(store, id).await,
        test_limits(2, 1024),
        "a new volume inherits nothing from the removed one"
    );
    remove_volume(store, id).await;
}

async fn check_remove_empty(store: &dyn VolumeStore, id: &VolumeId) {
    store.remove_empty(id).await.expect("removing an unknown volume if it is empty");
    store.create(id, test_limits(4, 2048)).await.expect("create");
    let is_gone = store.remove_empty(id).await.expect("removing an empty volume");
    assert_eq!(!list_ids(store).await.contains(id), is_gone, "remove_empty says whether the volume is gone");
    remove_volume(store, id).await;
}

async fn check_probe(store: &dyn VolumeStore, id: &VolumeId) {
    store.create(id, test_limits(4, 2048)).await.expect("create");
    let (before, capacity) = (list_ids(store).await, store.capacity().await.expect("capacity"));
    // Each waits for the other, and both say the same.
    let (a, b) = futures_util::future::join(store.probe(), store.probe()).await;
    a.and(b).and(store.probe().await).expect("a store that creates volumes is able");
    let promised = |capacity: Option<StoreCapacity>| capacity.map(|capacity| capacity.promised);
    assert_eq!(list_ids(store).await, before, "a probe is no volume");
    // Less, where the data of a removed volume are being erased.
    let now = promised(store.capacity().await.expect("capacity"));
    assert!(now <= promised(capacity), "a probe is promised nothing: {now:?} after {capacity:?}");
    assert_eq!(read_limits(store, id).await, test_limits(4, 2048), "a probe changes no volume");
    remove_volume(store, id).await;
}

async fn check_concurrency(store: &dyn VolumeStore) {
    let (first, second) = (test_id(6), test_id(7));
    let same = futures_util::future::join3(
        store.create(&first, test_limits(4, 2048)),
        store.create(&first, test_limits(4, 2048)),
        store.create(&second, test_limits(2, 1024)),
    );
    let (a, b, c) = same.await;
    a.and(b).and(c).expect("creating concurrently");
    assert_eq!(read_limits(store, &first).await, test_limits(4, 2048), "each volume has separate limits");
    assert_eq!(read_limits(store, &second).await, test_limits(2, 1024), "each volume has separate limits");
    let (a, b) = futures_util::future::join(store.remove(&first), store.remove(&first)).await;
    a.and(b).expect("removing the same volume twice concurrently");
    assert_eq!(read_limits(store, &second).await, test_limits(2, 1024), "removing a volume affects no other");
    remove_volume(store, &second).await;
}

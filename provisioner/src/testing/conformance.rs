//! The contract of a store, as a check.

use nodekeel_fsquota::{Bytes, Inodes, Limits};

use crate::id::VolumeId;
use crate::store::{StoreError, VolumeStore};

const MIB: u64 = 1 << 20;

/// Checks that a store keeps the contract of [`VolumeStore`].
///
/// It makes and destroys volumes of a few megabytes under fixed ids (claim UIDs that begin with `c0ffee00-`), which must be
/// free, and leaves other volumes alone. What only a crash would show, it can't show.
///
/// # Panics
/// The store breaks the contract; the text says which part of it.
pub async fn conformance(store: &dyn VolumeStore) {
    let others = ids(store).await;
    birth(store, &id(1)).await;
    raise_but_never_lower(store, &id(2)).await;
    resize(store, &id(3)).await;
    unknown(store, &id(4)).await;
    death(store, &id(5)).await;
    emptiness(store, &id(8)).await;
    side_by_side(store).await;
    assert_eq!(ids(store).await, others, "what is not removed stays, and nothing else is left");
}

fn id(number: u8) -> VolumeId {
    let uid = format!("c0ffee00-0000-4000-8000-0000000000{number:02x}");
    VolumeId::from_uid(&uid).expect("a UUID")
}

fn limits(mib: u64, inodes: u64) -> Limits {
    Limits { bytes: Some(Bytes(mib * MIB)), inodes: Some(Inodes(inodes)) }
}

async fn ids(store: &dyn VolumeStore) -> Vec<VolumeId> {
    let ids = store.list().await.expect("list");
    assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "a list is in the order of the ids, each once");
    ids
}

async fn remove(store: &dyn VolumeStore, id: &VolumeId) {
    store.remove(id).await.expect("remove");
}

async fn limits_of(store: &dyn VolumeStore, id: &VolumeId) -> Limits {
    store.usage(id).await.expect("the usage of a volume that exists").limits
}

async fn birth(store: &dyn VolumeStore, id: &VolumeId) {
    store.create(id, limits(4, 2048)).await.expect("create");
    let volume = store.usage(id).await.expect("usage");
    assert_eq!(volume.limits, limits(4, 2048), "a volume is born with its limits, unrounded");
    assert!(volume.usage.bytes.0 <= 64 << 10, "a new volume is empty, not {:?}", volume.usage);
    assert!(volume.usage.inodes.0 <= 1, "a new volume holds nothing but itself, not {:?}", volume.usage);
    assert!(ids(store).await.contains(id), "a volume is listed");
    remove(store, id).await;
}

async fn raise_but_never_lower(store: &dyn VolumeStore, id: &VolumeId) {
    store.create(id, limits(4, 2048)).await.expect("create");
    store.create(id, limits(4, 2048)).await.expect("creating what is there is success");
    assert_eq!(ids(store).await.iter().filter(|found| *found == id).count(), 1, "it is one volume");
    store.create(id, limits(8, 1024)).await.expect("create with other limits");
    assert_eq!(limits_of(store, id).await, limits(8, 2048), "create raises a limit and never lowers one");
    remove(store, id).await;
}

async fn resize(store: &dyn VolumeStore, id: &VolumeId) {
    store.create(id, limits(4, 2048)).await.expect("create");
    for to in [limits(8, 4096), limits(2, 1024), limits(2, 1024)] {
        store.resize(id, to).await.expect("resize");
        assert_eq!(limits_of(store, id).await, to, "resize sets the limits, up and down, again and again");
    }
    remove(store, id).await;
}

async fn unknown(store: &dyn VolumeStore, id: &VolumeId) {
    let not_found = |result: Result<(), StoreError>| matches!(result, Err(StoreError::NotFound { .. }));
    assert!(not_found(store.resize(id, limits(4, 2048)).await), "resizing an unknown volume is NotFound");
    assert!(not_found(store.usage(id).await.map(|_| ())), "the usage of an unknown volume is NotFound");
    store.remove(id).await.expect("removing an unknown volume is success");
    assert!(!ids(store).await.contains(id), "no question makes a volume");
}

async fn death(store: &dyn VolumeStore, id: &VolumeId) {
    store.create(id, limits(4, 2048)).await.expect("create");
    remove(store, id).await;
    assert!(!ids(store).await.contains(id), "a removed volume is not listed");
    assert!(
        matches!(store.usage(id).await, Err(StoreError::NotFound { .. })),
        "a removed volume is NotFound"
    );
    remove(store, id).await;
    store.create(id, limits(2, 1024)).await.expect("the name of a removed volume is free at once");
    assert_eq!(limits_of(store, id).await, limits(2, 1024), "nothing of the removed volume is inherited");
    remove(store, id).await;
}

async fn emptiness(store: &dyn VolumeStore, id: &VolumeId) {
    store.remove_empty(id).await.expect("removing an unknown volume if it is empty");
    store.create(id, limits(4, 2048)).await.expect("create");
    let is_gone = store.remove_empty(id).await.expect("removing an empty volume");
    assert_eq!(!ids(store).await.contains(id), is_gone, "remove_empty says whether the volume is gone");
    remove(store, id).await;
}

async fn side_by_side(store: &dyn VolumeStore) {
    let (first, second) = (id(6), id(7));
    let same = futures_util::future::join3(
        store.create(&first, limits(4, 2048)),
        store.create(&first, limits(4, 2048)),
        store.create(&second, limits(2, 1024)),
    );
    let (a, b, c) = same.await;
    a.and(b).and(c).expect("creating at the same time");
    assert_eq!(limits_of(store, &first).await, limits(4, 2048), "each volume has its own limits");
    assert_eq!(limits_of(store, &second).await, limits(2, 1024), "each volume has its own limits");
    let (a, b) = futures_util::future::join(store.remove(&first), store.remove(&first)).await;
    a.and(b).expect("removing the same volume twice at the same time");
    assert_eq!(limits_of(store, &second).await, limits(2, 1024), "a removed volume takes no other along");
    remove(store, &second).await;
}

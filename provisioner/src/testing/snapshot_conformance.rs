//! The conformance suite of stores of snapshots.

use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};

use crate::id::VolumeId;
use crate::snapshot::{SnapshotId, SnapshotStore, SnapshotStoreError, StoredId};
use crate::store::{VolumeStore, VolumeStoreError};

const MIB: u64 = 1 << 20;

/// Checks that a store keeps the contract of [`SnapshotStore`], as far as it does not concern the files.
///
/// Creates and removes volumes of a few megabytes and snapshots with fixed ids (UIDs that start with `c0ffee01-`),
/// which must be free, and changes no others.
///
/// # Panics
/// If the store breaks the contract; the message names the broken part.
pub async fn snapshot_conformance(store: &(impl SnapshotStore + VolumeStore)) {
    let others = (store.list().await.expect("list"), list_snapshots(store).await);
    check_snapshots(store).await;
    check_copies(store).await;
    check_publication(store).await;
    check_concurrency(store).await;
    let left = (store.list().await.expect("list"), list_snapshots(store).await);
    assert_eq!(left, others, "others stay, and nothing of the test is left");
}

fn uid(number: u8) -> String {
    format!("c0ffee01-0000-4000-8000-0000000000{number:02x}")
}

fn volume(number: u8) -> VolumeId {
    VolumeId::from_uid(&uid(number)).expect("a UUID")
}

fn snapshot(number: u8) -> SnapshotId {
    SnapshotId::from_uid(&uid(number)).expect("a UUID")
}

fn limits(mib: u64, inodes: u64) -> QuotaLimits {
    QuotaLimits { bytes: Some(Bytes(mib * MIB)), inodes: Some(Inodes(inodes)) }
}

async fn list_snapshots(store: &dyn SnapshotStore) -> Vec<SnapshotId> {
    let ids = store.list_snapshots().await.expect("list");
    assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "list returns each id once, sorted");
    ids
}

async fn check_snapshots(store: &(impl SnapshotStore + VolumeStore)) {
    let (of, id) = (volume(1), snapshot(1));
    let missing = store.create_snapshot(&id, &of).await;
    assert!(matches!(missing, Err(SnapshotStoreError::NoVolume { .. })), "a missing volume has no snapshot");
    assert_eq!(store.find_snapshot(&id).await.expect("find"), None, "a failed snapshot is not visible");
    store.create(&of, limits(4, 2048)).await.expect("create");
    let info = store.create_snapshot(&id, &of).await.expect("a snapshot");
    assert_eq!(info.restore_size, Bytes(4 * MIB), "a snapshot restores to the size of its volume");
    assert_eq!(store.find_snapshot(&id).await.expect("find"), Some(info));
    assert!(list_snapshots(store).await.contains(&id) && store.list().await.expect("list").contains(&of));
    store.resize(&of, limits(8, 2048)).await.expect("resize");
    let again = store.create_snapshot(&id, &of).await.expect("creating an existing snapshot succeeds");
    assert_eq!(again, info, "an existing snapshot is not changed, and neither is it by its volume");
    store.remove(&of).await.expect("remove");
    assert_eq!(store.find_snapshot(&id).await.expect("find"), Some(info), "it survives its volume");
    for _ in 0..2 {
        store.remove_snapshot(&id).await.expect("removing a snapshot, also a missing one, succeeds");
        assert_eq!(store.find_snapshot(&id).await.expect("find"), None, "a removed snapshot is not found");
        assert!(!list_snapshots(store).await.contains(&id), "a removed snapshot is not listed");
    }
}

async fn check_copies(store: &(impl SnapshotStore + VolumeStore)) {
    let (of, id) = (volume(2), snapshot(2));
    store.create(&of, limits(4, 2048)).await.expect("create");
    store.create_snapshot(&id, &of).await.expect("a snapshot");
    for (number, source) in [(3, StoredId::from(id.clone())), (4, StoredId::from(of.clone()))] {
        let copy = volume(number);
        store.create_volume_from(&copy, &source, limits(6, 4096)).await.expect("a copy");
        let read = async || store.usage(&copy).await.expect("usage").limits;
        assert_eq!(read().await, limits(6, 4096), "a copy of {source} has its own limits");
        store
            .create_volume_from(&copy, &source, limits(8, 1024))
            .await
            .expect("creating an existing copy succeeds");
        assert_eq!(read().await, limits(8, 4096), "it raises a limit and never lowers one");
        assert_eq!(
            store.usage(&of).await.expect("usage").limits,
            limits(4, 2048),
            "the source is not changed"
        );
    }
    store.remove_snapshot(&id).await.expect("remove");
    store.remove(&of).await.expect("remove");
    for source in [StoredId::from(id), StoredId::from(of)] {
        let copied = store.create_volume_from(&volume(5), &source, limits(4, 2048)).await;
        assert!(matches!(copied, Err(VolumeStoreError::Create { .. })), "a missing {source} has no copy");
        assert!(!store.list().await.expect("list").contains(&volume(5)), "a failed copy is not visible");
    }
    for number in [3, 4] {
        store.usage(&volume(number)).await.expect("a copy survives its source");
        store.remove(&volume(number)).await.expect("remove");
    }
}

async fn check_publication(store: &(impl SnapshotStore + VolumeStore)) {
    let (of, copy) = (volume(6), volume(7));
    store.create(&of, limits(4, 2048)).await.expect("create");
    store.create_volume_from(&copy, &of.clone().into(), limits(4, 2048)).await.expect("a copy");
    assert!(
        store.remove_empty(&copy).await.expect("removed"),
        "a copy that was not published counts as empty"
    );
    assert!(!store.list().await.expect("list").contains(&copy), "it is gone");
    store.create_volume_from(&copy, &of.clone().into(), limits(4, 2048)).await.expect("a copy");
    for id in [&copy, &of, &volume(8)] {
        store.mark_published(id).await.expect("any volume, existing or not, can be marked");
    }
    assert!(store.list().await.expect("list").contains(&copy), "a mark removes nothing");
    store.remove(&copy).await.expect("remove");
    store.remove(&of).await.expect("remove");
}

async fn check_concurrency(store: &(impl SnapshotStore + VolumeStore)) {
    let (of, id) = (volume(9), snapshot(9));
    store.create(&of, limits(4, 2048)).await.expect("create");
    let both =
        futures_util::future::join(store.create_snapshot(&id, &of), store.create_snapshot(&id, &of)).await;
    assert_eq!(
        both.0.expect("a snapshot"),
        both.1.expect("the same snapshot"),
        "of two calls, each succeeds"
    );
    let (source, first, second) = (StoredId::from(id.clone()), volume(10), volume(11));
    let copies = futures_util::future::join3(
        store.create_volume_from(&first, &source, limits(4, 2048)),
        store.create_volume_from(&first, &source, limits(4, 2048)),
        store.create_volume_from(&second, &source, limits(4, 2048)),
    );
    let (a, b, c) = copies.await;
    a.and(b).and(c).expect("creating copies concurrently");
    let (a, b) = futures_util::future::join(store.remove_snapshot(&id), store.remove_snapshot(&id)).await;
    a.and(b).expect("removing the same snapshot twice concurrently");
    for number in 9..=11 {
        store.remove(&volume(number)).await.expect("remove");
    }
}

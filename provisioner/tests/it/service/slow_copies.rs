//! Copies that take long: other claims do not wait for them.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use nodekeel_fsquota::QuotaLimits;
use nodekeel_provisioner::testing::objects::{NODE, sample_identity};
use nodekeel_provisioner::testing::{MemStore, ObjectKind};
use nodekeel_provisioner::{
    Deps, Provisioner, ProvisionerConfig, SnapshotId, SnapshotInfo, SnapshotStore, SnapshotStoreError,
    StoredId, VolumeId, VolumeStore as _, VolumeStoreError,
};
use serde_json::json;
use tokio::sync::Semaphore;

use super::harness::{
    ApiFixture as _, RunningProvisioner, advance_time, id, test_api, test_deps, wait_bound, wait_until,
};

/// Each copy waits for a permit.
#[derive(Debug)]
struct SlowStore {
    inner: MemStore,
    permits: Semaphore,
    copies: Semaphore,
}

#[async_trait]
impl SnapshotStore for SlowStore {
    async fn create_snapshot(
        &self,
        id: &SnapshotId,
        volume: &VolumeId,
    ) -> Result<SnapshotInfo, SnapshotStoreError> {
        self.inner.create_snapshot(id, volume).await
    }

    async fn find_snapshot(&self, id: &SnapshotId) -> Result<Option<SnapshotInfo>, SnapshotStoreError> {
        self.inner.find_snapshot(id).await
    }

    async fn remove_snapshot(&self, id: &SnapshotId) -> Result<(), SnapshotStoreError> {
        self.inner.remove_snapshot(id).await
    }

    async fn list_snapshots(&self) -> Result<Vec<SnapshotId>, SnapshotStoreError> {
        self.inner.list_snapshots().await
    }

    async fn create_volume_from(
        &self,
        id: &VolumeId,
        source: &StoredId,
        limits: QuotaLimits,
    ) -> Result<(), VolumeStoreError> {
        self.copies.add_permits(1);
        self.permits.acquire().await.expect("never closed").forget();
        self.inner.create_volume_from(id, source, limits).await
    }

    async fn mark_published(&self, id: &VolumeId) -> Result<(), VolumeStoreError> {
        self.inner.mark_published(id).await
    }
}

#[tokio::test(start_paused = true)]
async fn claims_are_served_however_many_slow_restores_are_in_progress() {
    const COPIES: u32 = 40;
    let api = test_api();
    let store = Arc::new(SlowStore {
        inner: MemStore::default(),
        permits: Semaphore::new(0),
        copies: Semaphore::new(0),
    });
    let config = ProvisionerConfig::new(sample_identity(NODE));
    let copy_concurrency = usize::from(config.copy_concurrency.get());
    let deps = Deps { snapshots: Some(store.clone()), ..test_deps(&api, &store.inner) };
    let running = RunningProvisioner::spawn(Provisioner::new(config, deps), || {});
    api.create_claim(1, json!({}));
    wait_bound(&api, "claim-1").await;

    let source = json!({ "kind": "PersistentVolumeClaim", "name": "claim-1" });
    for number in 2..2 + COPIES {
        api.create_claim(number, json!({ "spec": { "dataSource": source } }));
    }
    wait_until(&api, |_| store.copies.available_permits() > 0).await;
    // A claim is provisioned, and resized.
    api.create_claim(100, json!({}));
    let started = tokio::time::Instant::now();
    wait_bound(&api, "claim-100").await;
    let larger = json!({ "spec": { "resources": { "requests": { "storage": "1Gi" } } } });
    api.patch_object(ObjectKind::Claim, "claim-100", larger);
    wait_until(&api, |api| {
        let claim = api.get_object(ObjectKind::Claim, "claim-100").expect("a claim");
        claim["status"]["capacity"]["storage"] == "1Gi"
    })
    .await;
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    advance_time(60).await;
    assert_eq!(store.copies.available_permits(), copy_concurrency, "the others wait for their turn");

    store.permits.add_permits(COPIES as usize);
    for number in 2..2 + COPIES {
        wait_bound(&api, &format!("claim-{number}")).await;
    }
    assert_eq!(store.inner.create_count(&id(2)), 1);
    assert_eq!(store.inner.list().await.expect("a list").len(), COPIES as usize + 2);
    running.stop().await;
}

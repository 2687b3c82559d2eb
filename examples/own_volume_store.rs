//! A custom volume store for `nodekeel-provisioner`, which passes the conformance suite.
//!
//! `cargo run -p examples --example own_volume_store`
//!
//! This one books volumes in a map and rejects overbooking of the node. A real one would create a logical
//! volume or a dataset instead of an entry; the rest of the provisioner would not change.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits, QuotaUsage};
use nodekeel_provisioner::testing::conformance;
use nodekeel_provisioner::{VolumeId, VolumeStore, VolumeStoreError, VolumeUsage};

/// Volumes whose total size is limited to the capacity of the node.
#[derive(Debug)]
struct BookingStore {
    capacity: Bytes,
    volumes: Mutex<BTreeMap<VolumeId, QuotaLimits>>,
}

impl BookingStore {
    fn new(capacity: Bytes) -> Self {
        Self { capacity, volumes: Mutex::default() }
    }

    fn volumes(&self) -> MutexGuard<'_, BTreeMap<VolumeId, QuotaLimits>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Books a volume, or returns `Exhausted`: another node should provision it.
    fn book_volume(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError> {
        let mut volumes = self.volumes();
        let bytes = |limits: &QuotaLimits| limits.bytes.map_or(0, |bytes| u128::from(bytes.0));
        let others: u128 =
            volumes.iter().filter(|(other, _)| *other != id).map(|(_, limits)| bytes(limits)).sum();
        if others + bytes(&limits) > u128::from(self.capacity.0) {
            return Err(VolumeStoreError::Exhausted {
                id: id.clone(),
                source: "the node is fully booked".into(),
            });
        }
        volumes.insert(id.clone(), limits);
        Ok(())
    }

    fn find_limits(&self, id: &VolumeId) -> Result<QuotaLimits, VolumeStoreError> {
        self.volumes().get(id).copied().ok_or_else(|| VolumeStoreError::NotFound { id: id.clone() })
    }
}

/// The higher of two limits; `None` is the highest.
fn higher_limit<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
    a.zip(b).map(|(a, b)| a.max(b))
}

#[async_trait]
impl VolumeStore for BookingStore {
    async fn create(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError> {
        // An existing volume keeps a higher limit.
        let limits = match self.find_limits(id) {
            Ok(old) => QuotaLimits {
                bytes: higher_limit(old.bytes, limits.bytes),
                inodes: higher_limit(old.inodes, limits.inodes),
            },
            Err(_) => limits,
        };
        self.book_volume(id, limits)
    }

    async fn resize(&self, id: &VolumeId, limits: QuotaLimits) -> Result<(), VolumeStoreError> {
        self.find_limits(id)?;
        self.book_volume(id, limits)
    }

    async fn usage(&self, id: &VolumeId) -> Result<VolumeUsage, VolumeStoreError> {
        let usage = QuotaUsage { bytes: Bytes(0), inodes: Inodes(1) };
        Ok(VolumeUsage { limits: self.find_limits(id)?, usage })
    }

    async fn remove(&self, id: &VolumeId) -> Result<(), VolumeStoreError> {
        self.volumes().remove(id);
        Ok(())
    }

    async fn list(&self) -> Result<Vec<VolumeId>, VolumeStoreError> {
        Ok(self.volumes().keys().cloned().collect())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let store = BookingStore::new(Bytes(64 << 20));
    conformance(&store).await;
    println!("conformance suite passed");

    let limits = QuotaLimits { bytes: Some(Bytes(48 << 20)), inodes: Some(Inodes(1024)) };
    let ids = ["9f0e5d3c-1b2a-4c5d-8e6f-000000000001", "9f0e5d3c-1b2a-4c5d-8e6f-000000000002"];
    for uid in ids {
        let id = VolumeId::from_uid(uid)?;
        match store.create(&id, limits).await {
            Ok(()) => println!("{id}: created"),
            Err(error) if error.is_exhausted() => println!("{error}: the claim goes to another node"),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

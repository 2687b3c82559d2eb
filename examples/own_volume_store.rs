//! Volumes of your own: a store for `nodekeel-provisioner`, checked against the contract that ours keep.
//!
//! `cargo run -p examples --example own_volume_store`
//!
//! This one books volumes in a map and refuses what would overbook the node. A real one would make a logical volume or a
//! dataset where this one makes an entry; the rest of the provisioner does not know the difference.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use nodekeel_fsquota::{Bytes, Inodes, Limits, Usage};
use nodekeel_provisioner::testing::conformance;
use nodekeel_provisioner::{StoreError, VolumeId, VolumeStore, VolumeUsage};

/// Volumes that together may take no more than the node has.
#[derive(Debug)]
struct Booked {
    capacity: Bytes,
    volumes: Mutex<BTreeMap<VolumeId, Limits>>,
}

impl Booked {
    fn new(capacity: Bytes) -> Self {
        Self { capacity, volumes: Mutex::default() }
    }

    fn volumes(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Limits>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Books a volume, or says that another node should.
    fn book(&self, id: &VolumeId, limits: Limits) -> Result<(), StoreError> {
        let mut volumes = self.volumes();
        let bytes = |limits: &Limits| limits.bytes.map_or(0, |bytes| u128::from(bytes.0));
        let others: u128 =
            volumes.iter().filter(|(other, _)| *other != id).map(|(_, limits)| bytes(limits)).sum();
        if others + bytes(&limits) > u128::from(self.capacity.0) {
            return Err(StoreError::Exhausted { id: id.clone(), source: "the node is booked out".into() });
        }
        volumes.insert(id.clone(), limits);
        Ok(())
    }

    fn find(&self, id: &VolumeId) -> Result<Limits, StoreError> {
        self.volumes().get(id).copied().ok_or_else(|| StoreError::NotFound { id: id.clone() })
    }
}

/// The higher of two limits; none is the highest.
fn higher<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
    a.zip(b).map(|(a, b)| a.max(b))
}

#[async_trait]
impl VolumeStore for Booked {
    async fn create(&self, id: &VolumeId, limits: Limits) -> Result<(), StoreError> {
        // A volume that is there already keeps its limits where they are higher.
        let limits = match self.find(id) {
            Ok(old) => {
                Limits { bytes: higher(old.bytes, limits.bytes), inodes: higher(old.inodes, limits.inodes) }
            }
            Err(_) => limits,
        };
        self.book(id, limits)
    }

    async fn resize(&self, id: &VolumeId, limits: Limits) -> Result<(), StoreError> {
        self.find(id)?;
        self.book(id, limits)
    }

    async fn usage(&self, id: &VolumeId) -> Result<VolumeUsage, StoreError> {
        let usage = Usage { bytes: Bytes(0), inodes: Inodes(1) };
        Ok(VolumeUsage { limits: self.find(id)?, usage })
    }

    async fn remove(&self, id: &VolumeId) -> Result<(), StoreError> {
        self.volumes().remove(id);
        Ok(())
    }

    async fn list(&self) -> Result<Vec<VolumeId>, StoreError> {
        Ok(self.volumes().keys().cloned().collect())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let store = Booked::new(Bytes(64 << 20));
    conformance(&store).await;
    println!("the store keeps the contract");

    let limits = Limits { bytes: Some(Bytes(48 << 20)), inodes: Some(Inodes(1024)) };
    let ids = ["9f0e5d3c-1b2a-4c5d-8e6f-000000000001", "9f0e5d3c-1b2a-4c5d-8e6f-000000000002"];
    for uid in ids {
        let id = VolumeId::from_uid(uid)?;
        match store.create(&id, limits).await {
            Ok(()) => println!("{id}: made"),
            Err(error) if error.is_exhausted() => println!("{error}: the claim goes to another node"),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

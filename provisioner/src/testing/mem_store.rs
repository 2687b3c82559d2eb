//! Volumes in memory.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use nodekeel_fsquota::{Bytes, Inodes, Limits, Usage};

use crate::id::VolumeId;
use crate::store::{Cause, StoreError, VolumeStore, VolumeUsage, larger};

/// A store that holds volumes in memory: nothing is written, nothing survives. Clones share their volumes.
#[derive(Clone, Default)]
pub struct MemStore(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    volumes: BTreeMap<VolumeId, VolumeUsage>,
    capacity: Option<Bytes>,
    failures: Vec<Cause>,
    creates: BTreeMap<VolumeId, u32>,
    removes: BTreeMap<VolumeId, u32>,
}

impl MemStore {
    /// A store that refuses a volume when the sum of all byte limits would exceed `capacity`.
    pub fn with_capacity(capacity: Bytes) -> Self {
        let store = Self::default();
        store.state().capacity = Some(capacity);
        store
    }

    /// Lets the next call that changes a volume fail for this reason. Several failures are used up in turn.
    pub fn fail_next(&self, cause: impl Into<Cause>) {
        self.state().failures.insert(0, cause.into());
    }

    /// Writes so much into a volume, as a pod would, whatever its limits are.
    pub fn fill(&self, id: &VolumeId, usage: Usage) {
        if let Some(volume) = self.state().volumes.get_mut(id) {
            volume.usage = usage;
        }
    }

    /// How often a volume of this id came into being (a `create` that found it there doesn't count).
    pub fn births(&self, id: &VolumeId) -> u32 {
        self.state().creates.get(id).copied().unwrap_or(0)
    }

    /// How often a volume of this id was destroyed (a `remove` that found none doesn't count).
    pub fn deaths(&self, id: &VolumeId) -> u32 {
        self.state().removes.get(id).copied().unwrap_or(0)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Whether the limits of `id` could be these.
    fn has_room(&self, id: &VolumeId, limits: Limits) -> bool {
        let Some(capacity) = self.capacity else { return true };
        let others = self.volumes.iter().filter(|(other, _)| *other != id);
        let taken = others.filter_map(|(_, volume)| volume.limits.bytes).map(|bytes| u128::from(bytes.0));
        taken.sum::<u128>() + u128::from(limits.bytes.map_or(0, |bytes| bytes.0)) <= u128::from(capacity.0)
    }

    fn check_room(&self, id: &VolumeId, limits: Limits) -> Result<(), StoreError> {
        match self.has_room(id, limits) {
            true => Ok(()),
            false => {
                Err(StoreError::Exhausted { id: id.clone(), source: "the store's capacity is taken".into() })
            }
        }
    }
}

#[async_trait]
impl VolumeStore for MemStore {
    async fn create(&self, id: &VolumeId, limits: Limits) -> Result<(), StoreError> {
        let mut state = self.state();
        if let Some(source) = state.failures.pop() {
            return Err(StoreError::Create { id: id.clone(), source });
        }
        let old = state.volumes.get(id).copied();
        let limits = match old {
            Some(old) => Limits {
                bytes: larger(old.limits.bytes, limits.bytes),
                inodes: larger(old.limits.inodes, limits.inodes),
            },
            None => limits,
        };
        state.check_room(id, limits)?;
        if old.is_none() {
            *state.creates.entry(id.clone()).or_default() += 1;
        }
        let usage = old.map_or(Usage { bytes: Bytes(0), inodes: Inodes(1) }, |old| old.usage);
        state.volumes.insert(id.clone(), VolumeUsage { limits, usage });
        Ok(())
    }

    async fn resize(&self, id: &VolumeId, limits: Limits) -> Result<(), StoreError> {
        let mut state = self.state();
        if let Some(source) = state.failures.pop() {
            return Err(StoreError::Resize { id: id.clone(), source });
        }
        state.check_room(id, limits)?;
        let volume = state.volumes.get_mut(id).ok_or_else(|| StoreError::NotFound { id: id.clone() })?;
        volume.limits = limits;
        Ok(())
    }

    async fn usage(&self, id: &VolumeId) -> Result<VolumeUsage, StoreError> {
        let state = self.state();
        state.volumes.get(id).copied().ok_or_else(|| StoreError::NotFound { id: id.clone() })
    }

    async fn remove(&self, id: &VolumeId) -> Result<(), StoreError> {
        let mut state = self.state();
        if let Some(source) = state.failures.pop() {
            return Err(StoreError::Remove { id: id.clone(), source });
        }
        if state.volumes.remove(id).is_some() {
            *state.removes.entry(id.clone()).or_default() += 1;
        }
        Ok(())
    }

    async fn remove_empty(&self, id: &VolumeId) -> Result<bool, StoreError> {
        let is_empty = |volume: &VolumeUsage| volume.usage.inodes.0 <= 1;
        let is_empty = self.state().volumes.get(id).is_none_or(is_empty);
        match is_empty {
            true => self.remove(id).await.map(|()| true),
            false => Ok(false),
        }
    }

    async fn list(&self) -> Result<Vec<VolumeId>, StoreError> {
        Ok(self.state().volumes.keys().cloned().collect())
    }
}

impl fmt::Debug for MemStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.state().volumes.keys()).finish()
    }
}

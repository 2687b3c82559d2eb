//! Performs the steps of the [plan](super::plan).

use std::sync::Arc;

use nodekeel_localstorage::volume::{LuksVolume, UnlockKey, UnlockSecret, VolumeError};

use super::cluster_keys::ClusterKeyStore;
use super::plan::{KeyStep, SlotFacts, next_step};
use super::{VolumeKeyError, run_on_volume};
use crate::parts::storage::unlock::VolumeUnlock;

/// The key slots of a volume. The calls block.
pub(super) trait KeySlotDevice: Send + Sync + 'static {
    /// Reads the header.
    fn slot_facts(&self) -> Result<SlotFacts, VolumeError>;

    /// The generation of the newest slot that a secret opens.
    fn test_secret(&self, secret: &UnlockSecret) -> Result<Option<u32>, VolumeError>;

    /// Adds a slot with new keys, and returns the cluster's half.
    fn rotate_keys(&self, secret: &UnlockSecret) -> Result<Option<UnlockKey>, VolumeError>;

    /// Removes what a secret supersedes.
    fn confirm_secret(&self, secret: &UnlockSecret) -> Result<(), VolumeError>;
}

impl KeySlotDevice for LuksVolume {
    fn slot_facts(&self) -> Result<SlotFacts, VolumeError> {
        self.encryption_status().map(|status| SlotFacts::of(&status))
    }

    fn test_secret(&self, secret: &UnlockSecret) -> Result<Option<u32>, VolumeError> {
        LuksVolume::test_secret(self, secret)
    }

    fn rotate_keys(&self, secret: &UnlockSecret) -> Result<Option<UnlockKey>, VolumeError> {
        LuksVolume::rotate_keys(self, secret)
    }

    fn confirm_secret(&self, secret: &UnlockSecret) -> Result<(), VolumeError> {
        LuksVolume::confirm_secret(self, secret)
    }
}

/// Keeps the key that only this process has.
pub(super) trait HeldKey: Sync {
    fn held(&self) -> Option<UnlockKey>;
    fn keep(&self, key: UnlockKey);
    /// The cluster has this key, which alone is left.
    fn keep_stored(&self, key: &UnlockKey);
}

impl HeldKey for VolumeUnlock {
    fn held(&self) -> Option<UnlockKey> {
        self.cluster_key()
    }

    fn keep(&self, key: UnlockKey) {
        self.keep_cluster_key(key);
    }

    fn keep_stored(&self, key: &UnlockKey) {
        self.keep_stored_key(key.clone());
    }
}

/// The outcome when no step is left.
#[derive(Debug)]
pub(super) enum KeyOutcome {
    /// The volume needs no key of the cluster.
    NotSplit,
    /// The cluster has this key, and no other one.
    Stored(UnlockKey),
    /// No key at hand opens the volume.
    Lost,
}

/// The most steps at a time: a rotation has five. A store that loses what it was given would be given it for ever.
const MAX_ROUNDS: usize = 16;

/// Performs steps until none is left. Dropped or killed at any point, it is to be called again.
pub(super) async fn settle_keys<D: KeySlotDevice>(
    device: &Arc<D>,
    store: &impl ClusterKeyStore,
    held: &impl HeldKey,
) -> Result<KeyOutcome, VolumeKeyError> {
    for _ in 0..MAX_ROUNDS {
        // Each step is decided from what is there now: the step before may have been made late, or not at all.
        let slots = on_thread(device, |device| device.slot_facts()).await?;
        // The version makes the cluster refuse a change of this round if another one has come in between.
        let (mut keys, version) = store.load_keys(&slots.volume).await?;
        let mut opened = Vec::new();
        for key in &keys {
            opened.push(test_key(device, key).await?);
        }
        let mine = held.held();
        let mine_opens = match &mine {
            Some(key) => test_key(device, key).await?,
            None => None,
        };
        match (next_step(&slots, &opened, mine_opens), mine) {
            (KeyStep::NotSplit, _) => return Ok(KeyOutcome::NotSplit),
            (KeyStep::Done(only), _) => {
                let key = keys.swap_remove(only);
                held.keep_stored(&key);
                return Ok(KeyOutcome::Stored(key));
            }
            (KeyStep::Deposit, Some(mine)) => {
                // Keys that open no slot are dropped. The key before the new one stays until that is confirmed.
                let useful = keys.into_iter().zip(opened).filter_map(|(key, opens)| opens.map(|_| key));
                let keys: Vec<_> = useful.chain([mine]).collect();
                store.replace_keys(version, &keys).await?;
                tracing::info!("stored the cluster's half of the data volume's key in the cluster");
            }
            (KeyStep::Confirm(current), _) => {
                // The key was read from the cluster in this round, and so older slots are not needed any more.
                let secret = UnlockSecret::Cluster(keys.swap_remove(current));
                on_thread(device, move |device| device.confirm_secret(&secret)).await?;
                tracing::info!("the older keys of the data volume are void");
            }
            (KeyStep::Trim(current), _) => store.replace_keys(version, &keys[current..=current]).await?,
            (KeyStep::RotateByCluster(older), _) => {
                rotate(device, held, UnlockSecret::Cluster(keys.swap_remove(older))).await?;
            }
            (KeyStep::RotateByNode, _) => rotate(device, held, UnlockSecret::Node).await?,
            (KeyStep::Lost, _) | (KeyStep::Deposit, None) => return Ok(KeyOutcome::Lost),
        }
    }
    Err(VolumeKeyError::Unsettled)
}

async fn test_key<D: KeySlotDevice>(device: &Arc<D>, key: &UnlockKey) -> Result<Option<u32>, VolumeKeyError> {
    let secret = UnlockSecret::Cluster(key.clone());
    on_thread(device, move |device| device.test_secret(&secret)).await
}

/// Makes new keys, since the newest one is lost.
async fn rotate<D: KeySlotDevice>(
    device: &Arc<D>,
    held: &impl HeldKey,
    secret: UnlockSecret,
) -> Result<(), VolumeKeyError> {
    tracing::info!("the data volume gets new keys: the newest of the cluster's was never stored");
    if let Some(key) = on_thread(device, move |device| device.rotate_keys(&secret)).await? {
        held.keep(key);
    }
    Ok(())
}

async fn on_thread<D: KeySlotDevice, T: Send + 'static>(
    device: &Arc<D>,
    call: impl FnOnce(&D) -> Result<T, VolumeError> + Send + 'static,
) -> Result<T, VolumeKeyError> {
    let device = Arc::clone(device);
    run_on_volume(move || call(&device)).await
}

//! The unlock keys of an encrypted data volume: the cluster keeps its half, and no superseded key opens the volume.
//!
//! ```text
//!  a new volume ─┐                         etcd: /unlock-keys/NODE            the header
//!  a rotation ───┴▶ key in this process ──▶ deposit ──▶ read back ──▶ confirm ──▶ older slots removed
//! ```
//!
//! [`plan`] decides each step from what the header, the cluster and this process have. So a kill at any point leaves a
//! volume that opens, and the next run resumes.

mod cluster_keys;
mod error;
mod health;
mod plan;
mod service;
mod settle;
#[cfg(test)]
mod settle_test;

use std::sync::{Arc, Mutex, PoisonError};

use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_localstorage::volume::{
    EncryptionStatus, HeaderBackup, KeyPolicy, LuksVolume, RecoveryPassphrase, SlotKind, UnlockSecret,
    VolumeEncryption, VolumeError,
};
use tokio::sync::Notify;

use self::cluster_keys::{NodeKeyStore, VoterKeyStore};
use self::plan::SlotFacts;
use self::settle::{KeyOutcome, settle_keys};
use super::tang::TangKeyStore;
use super::unlock::VolumeUnlock;
use crate::blocking::run_blocking;
use crate::error_chain::error_chain;
use crate::parts::api::Api;

pub(crate) use self::error::VolumeKeyError;
pub(crate) use self::health::key_health;
pub(crate) use self::service::{KeyService, RemoteKeyService};

/// The place of the cluster unlock key, in the cluster or with Tang servers, as far as this process knows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum ClusterKeyState {
    /// The volume has none, or the node is not in its cluster yet.
    #[default]
    Unknown,
    /// The cluster has it, and each step is done.
    Stored,
    /// So it is with Tang, but some of its servers can't give it back, for these reasons.
    Incomplete(String),
    /// A step could not be done, for this reason; it is repeated.
    Pending(String),
    /// No key of the cluster opens the volume.
    Lost,
}

/// Changes the keys of the data volume, one change at a time.
#[derive(Debug, Default)]
pub(crate) struct VolumeKeys {
    unlock: Arc<VolumeUnlock>,
    /// The Tang servers that keep the cluster unlock key, in the place of the cluster.
    tang: Option<Arc<TangKeyStore>>,
    /// The API by which a worker calls the voters, which keep it for the node.
    voters: Option<Arc<Api>>,
    busy: tokio::sync::Mutex<()>,
    state: Mutex<ClusterKeyState>,
    /// A change has left something to do.
    unsettled: Notify,
}

impl VolumeKeys {
    pub(crate) fn new(
        unlock: Arc<VolumeUnlock>,
        tang: Option<Arc<TangKeyStore>>,
        voters: Option<Arc<Api>>,
    ) -> Self {
        Self { unlock, tang, voters, ..Self::default() }
    }

    /// Returns whether the volume may have a key that the cluster keeps.
    pub(crate) fn may_be_in_cluster(&self) -> bool {
        self.tang.is_none() && self.unlock.encrypted_volume().is_some()
    }

    /// The API of a worker whose cluster may keep a key of the volume.
    pub(crate) fn kept_by_voters(&self) -> Option<&Arc<Api>> {
        self.voters.as_ref().filter(|_| self.may_be_in_cluster())
    }

    /// Returns whether Tang servers keep the cluster unlock key.
    pub(crate) fn are_with_tang(&self) -> bool {
        self.tang.is_some()
    }

    /// The place of the cluster unlock key.
    pub(crate) fn cluster_key_state(&self) -> ClusterKeyState {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the header of the volume; `None` if the volume is not encrypted.
    ///
    /// # Errors
    /// [`VolumeKeyError::Volume`].
    pub(crate) async fn encryption_status(&self) -> Result<Option<EncryptionStatus>, VolumeKeyError> {
        match self.unlock.encrypted_volume() {
            Some(volume) => run_on_volume(move || volume.encryption_status()).await.map(Some),
            None => Ok(None),
        }
    }

    /// Does what is left to do with the cluster unlock key: stores it in the cluster or with Tang servers, and removes what it
    /// supersedes.
    ///
    /// # Errors
    /// The step that failed: it is to be repeated.
    pub(crate) async fn settle(&self, cluster: Option<&ClusterNode>) -> Result<(), VolumeKeyError> {
        let _busy = self.busy.lock().await;
        self.settle_locked(cluster).await.map(drop)
    }

    /// Waits until a change has left something to do.
    pub(crate) async fn wait_unsettled(&self) {
        self.unsettled.notified().await;
    }

    /// Gives the volume new keys, permitted by a passphrase or by the keys at hand. Returns when nothing else than the
    /// new keys, and the recovery passphrase, opens the volume.
    ///
    /// # Errors
    /// See [`VolumeKeyError`]. The volume opens with the keys before or with the new ones, and what is left to do is done
    /// once the node is in its cluster.
    pub(crate) async fn rotate(
        &self,
        cluster: Option<&ClusterNode>,
        passphrase: Option<RecoveryPassphrase>,
    ) -> Result<(), VolumeKeyError> {
        // One change at a time: two would remove each other's slots.
        let _busy = self.busy.lock().await;
        let secret = match passphrase {
            Some(passphrase) => UnlockSecret::Recovery(passphrase),
            None => self.key_at_hand(cluster).await?,
        };
        self.rotate_locked(cluster, secret).await
    }

    async fn rotate_locked(
        &self,
        cluster: Option<&ClusterNode>,
        secret: UnlockSecret,
    ) -> Result<(), VolumeKeyError> {
        let volume = self.require_volume()?;
        let facts = self.slot_facts(&volume).await?;
        if facts.keys == KeyPolicy::Split {
            if facts.needs_temporary_slot() {
                return Err(VolumeKeyError::LacksPassphrase);
            }
            // Without a store, no one would keep the new key.
            self.open_store(cluster)?;
        }
        let key = run_on_volume(move || volume.rotate_keys(&secret)).await?;
        // The node's new key opens the volume at a restart of root.storage, and a remembered passphrase is not
        // needed.
        if facts.keys == KeyPolicy::Local {
            self.unlock.keep_secret(UnlockSecret::Node);
        }
        if let Some(key) = key {
            // The key is kept before the deposit, which may fail: nothing else has it.
            self.unlock.keep_cluster_key(key);
            let settled = self.settle_locked(cluster).await;
            // The service repeats the deposit if it has failed.
            self.unsettled.notify_one();
            settled?;
        }
        Ok(())
    }

    /// Begins a re-encryption: gives the volume new unlock keys, so that a header of before is known by its generation, and
    /// adds slots of a new volume key. One that was begun already gets the passphrase, if there is one.
    ///
    /// # Errors
    /// See [`VolumeKeyError`], with nothing changed but the keys.
    pub(crate) async fn reencrypt(
        &self,
        cluster: Option<&ClusterNode>,
        passphrase: Option<RecoveryPassphrase>,
        may_go: Vec<u32>,
    ) -> Result<(), VolumeKeyError> {
        let _busy = self.busy.lock().await;
        let volume = self.require_volume()?;
        let passphrase = passphrase.map(UnlockSecret::Recovery);
        let read = Arc::clone(&volume);
        let status = run_on_volume(move || read.encryption_status()).await?;
        if status.encryption == VolumeEncryption::EncryptedAndAuthenticated {
            return Err(VolumeKeyError::Authenticated);
        }
        if status.reencryption.is_some() {
            return self.keep_passphrase(passphrase).await;
        }
        if let Some(slot) = may_go.iter().find(|slot| !may_drop(&status, **slot)) {
            return Err(VolumeKeyError::KeptSlot { slot: *slot });
        }
        if SlotFacts::of(&without_slots(&status, &may_go)).lacks_passphrase {
            return Err(VolumeKeyError::LacksPassphrase);
        }
        // What would be lost is known before anything is changed.
        let secrets = self.secrets_at_hand(cluster, passphrase.clone()).await?;
        let (checked, go) = (Arc::clone(&volume), may_go.clone());
        run_blocking(move || checked.check_reencryption(&secrets, &go))
            .await
            .map_err(VolumeKeyError::of_reencryption)?;
        let permit = match self.key_at_hand(cluster).await {
            Err(VolumeKeyError::NeedsPassphrase) => {
                passphrase.clone().ok_or(VolumeKeyError::NeedsPassphrase)?
            }
            secret => secret?,
        };
        self.rotate_locked(cluster, permit).await?;
        let secrets = self.secrets_at_hand(cluster, passphrase).await?;
        run_blocking(move || volume.begin_reencryption(&secrets, &may_go))
            .await
            .map_err(VolumeKeyError::of_reencryption)
    }

    /// Keeps a passphrase that opens the volume, for a re-encryption that lacks a key.
    async fn keep_passphrase(&self, passphrase: Option<UnlockSecret>) -> Result<(), VolumeKeyError> {
        let Some(secret) = passphrase else { return Ok(()) };
        let (volume, tested) = (self.require_volume()?, secret.clone());
        if run_on_volume(move || volume.test_secret(&tested)).await?.is_none() {
            return Err(VolumeKeyError::NeedsPassphrase);
        }
        if self.unlock.secret().is_none() {
            self.unlock.keep_secret(secret);
        }
        Ok(())
    }

    /// All secrets that the node has: its own, the cluster's, and the given passphrase.
    async fn secrets_at_hand(
        &self,
        cluster: Option<&ClusterNode>,
        passphrase: Option<UnlockSecret>,
    ) -> Result<Vec<UnlockSecret>, VolumeKeyError> {
        let facts = self.slot_facts(&self.require_volume()?).await?;
        let of_cluster = match facts.keys {
            KeyPolicy::Split => match self.settle_locked(cluster).await? {
                KeyOutcome::Stored(key) => Some(UnlockSecret::Cluster(key)),
                KeyOutcome::NotSplit | KeyOutcome::Lost => None,
            },
            _ => None,
        };
        Ok([UnlockSecret::Node].into_iter().chain(of_cluster).chain(passphrase).collect())
    }

    /// Adds a recovery passphrase, permitted by another one or by the keys at hand.
    ///
    /// # Errors
    /// See [`VolumeKeyError`].
    pub(crate) async fn add_recovery_passphrase(
        &self,
        cluster: Option<&ClusterNode>,
        passphrase: Option<RecoveryPassphrase>,
    ) -> Result<RecoveryPassphrase, VolumeKeyError> {
        let _busy = self.busy.lock().await;
        let volume = self.require_volume()?;
        let secret = match passphrase {
            Some(passphrase) => UnlockSecret::Recovery(passphrase),
            None => self.key_at_hand(cluster).await?,
        };
        run_on_volume(move || volume.add_recovery_passphrase(&secret)).await
    }

    /// The operator has the newest recovery passphrase: it counts from now on, and the one before is removed.
    ///
    /// # Errors
    /// [`VolumeKeyError::Volume`], [`VolumeKeyError::NotEncrypted`].
    pub(crate) async fn confirm_recovery_passphrase(
        &self,
        passphrase: RecoveryPassphrase,
    ) -> Result<(), VolumeKeyError> {
        let _busy = self.busy.lock().await;
        let volume = self.require_volume()?;
        run_on_volume(move || volume.confirm_secret(&UnlockSecret::Recovery(passphrase))).await?;
        // The temporary slot may have waited for this confirmation.
        self.unsettled.notify_one();
        Ok(())
    }

    /// Copies the header of the volume.
    ///
    /// # Errors
    /// [`VolumeKeyError::Volume`], [`VolumeKeyError::NotEncrypted`].
    pub(crate) async fn back_up_header(&self) -> Result<HeaderBackup, VolumeKeyError> {
        let _busy = self.busy.lock().await;
        let volume = self.require_volume()?;
        run_on_volume(move || volume.back_up_header()).await
    }

    /// The key that the node has without an operator: its own, or the cluster's.
    async fn key_at_hand(&self, cluster: Option<&ClusterNode>) -> Result<UnlockSecret, VolumeKeyError> {
        let facts = self.slot_facts(&self.require_volume()?).await?;
        // A key that was read back from the cluster is known to open the volume.
        if facts.keys == KeyPolicy::Split
            && (cluster.is_some() || self.voters.is_some() || self.are_with_tang())
            && let KeyOutcome::Stored(key) = self.settle_locked(cluster).await?
        {
            return Ok(UnlockSecret::Cluster(key));
        }
        if facts.has_local { Ok(UnlockSecret::Node) } else { Err(VolumeKeyError::NeedsPassphrase) }
    }

    fn open_store(&self, cluster: Option<&ClusterNode>) -> Result<KeyStore, VolumeKeyError> {
        match (&self.tang, &self.voters) {
            (Some(tang), _) => Ok(KeyStore::Tang(Arc::clone(tang))),
            (None, Some(api)) => Ok(KeyStore::Voters(VoterKeyStore(Arc::clone(api)))),
            (None, None) => {
                NodeKeyStore::open(cluster.ok_or(VolumeKeyError::NoCluster)?).map(KeyStore::Cluster)
            }
        }
    }

    async fn settle_locked(&self, cluster: Option<&ClusterNode>) -> Result<KeyOutcome, VolumeKeyError> {
        let settled = self.settle_with_store(cluster).await;
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = match &settled {
            Ok((KeyOutcome::NotSplit, _)) => ClusterKeyState::Unknown,
            Ok((KeyOutcome::Stored(_), problems)) if problems.is_empty() => ClusterKeyState::Stored,
            Ok((KeyOutcome::Stored(_), problems)) => ClusterKeyState::Incomplete(problems.join("; ")),
            Ok((KeyOutcome::Lost, _)) => ClusterKeyState::Lost,
            Err(error) => ClusterKeyState::Pending(error_chain(error)),
        };
        settled.map(|(outcome, _)| outcome)
    }

    /// Settles the keys. Returns the problems of Tang servers of which another one is enough.
    async fn settle_with_store(
        &self,
        cluster: Option<&ClusterNode>,
    ) -> Result<(KeyOutcome, Vec<String>), VolumeKeyError> {
        let volume = self.require_volume()?;
        let facts = self.slot_facts(&volume).await?;
        if facts.keys != KeyPolicy::Split {
            return Ok((KeyOutcome::NotSplit, Vec::new()));
        }
        let tang = match self.open_store(cluster)? {
            KeyStore::Cluster(store) => {
                return Ok((settle_keys(&volume, &store, &*self.unlock).await?, Vec::new()));
            }
            KeyStore::Voters(store) => {
                return Ok((settle_keys(&volume, &store, &*self.unlock).await?, Vec::new()));
            }
            KeyStore::Tang(tang) => tang,
        };
        let outcome = settle_keys(&volume, &*tang, &*self.unlock).await?;
        let problems = match &outcome {
            KeyOutcome::Stored(key) => {
                tang.complete(&facts.volume, key).await.map_err(VolumeKeyError::Tang)?
            }
            _ => Vec::new(),
        };
        Ok((outcome, problems))
    }

    fn require_volume(&self) -> Result<Arc<LuksVolume>, VolumeKeyError> {
        self.unlock.encrypted_volume().ok_or(VolumeKeyError::NotEncrypted)
    }

    async fn slot_facts(&self, volume: &Arc<LuksVolume>) -> Result<SlotFacts, VolumeKeyError> {
        let volume = Arc::clone(volume);
        run_on_volume(move || volume.encryption_status().map(|status| SlotFacts::of(&status))).await
    }
}

/// Returns whether a slot may be lost: no slot of the node's own keys.
fn may_drop(status: &EncryptionStatus, slot: u32) -> bool {
    let found = status.slots.iter().find(|found| found.slot == slot);
    found.is_some_and(|found| found.name.is_none_or(|(kind, _)| kind == SlotKind::Recovery))
}

fn without_slots(status: &EncryptionStatus, slots: &[u32]) -> EncryptionStatus {
    let mut status = status.clone();
    status.slots.retain(|slot| !slots.contains(&slot.slot));
    status
}

/// The keeper of the cluster unlock key.
enum KeyStore {
    Cluster(NodeKeyStore),
    Voters(VoterKeyStore),
    Tang(Arc<TangKeyStore>),
}

/// Runs what reads or changes the header of the volume, which blocks.
async fn run_on_volume<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, VolumeError> + Send + 'static,
) -> Result<T, VolumeKeyError> {
    run_blocking(work).await.map_err(VolumeKeyError::Volume)
}

//! Meeting point of the keys of the data volume: root.storage opens it, the cluster keeps its half of the key, an operator
//! types a passphrase, and the control API shows it all.
//!
//! ```text
//!  root.storage   opening ──▶ open ◀── a secret that opens it ─┐
//!                    │          └─ a new volume: the cluster's half of its key, until the cluster has it
//!                    └──────▶ locked ── nodectl storage unlock, the cluster's peers ─┘
//! ```

use std::error::Error;
use std::fmt;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use nodekeel_localstorage::volume::{
    CopyProgress, LuksVolume, SlotKind, UnlockKey, UnlockSecret, WipeProgress,
};
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};

use super::reading::ReadingStatus;

/// The answer of a [`ClusterKeySource`].
pub type ClusterKeysFuture<'a> =
    Pin<Box<dyn Future<Output = Result<Vec<UnlockKey>, Box<dyn Error + Send + Sync>>> + Send + 'a>>;

/// Gets the cluster unlock key of a node that starts cold. With `storage.cold_start = "peers"`, noded asks the other nodes of the
/// cluster by their APIs, or the source of the program; with `"tang"`, Tang servers.
///
/// # Contract
/// - Its future may be dropped at any time.
/// - An error is shown as the reason why the volume is locked, and so is a key that does not open it. root.storage asks again
///   after a backoff of up to 10 s.
pub trait ClusterKeySource: fmt::Debug + Send + Sync + 'static {
    /// The cluster unlock keys of this node, one of which opens its volume: during a rotation the cluster has two.
    fn cluster_keys(&self) -> ClusterKeysFuture<'_>;
}

/// The state of the data volume in root.storage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum UnlockStatus {
    /// Nothing: it is stopped, or between two attempts. Why the last one failed, what erases the disk that it found, and
    /// whether the node's volume is not there.
    Closed { error: Option<String>, erase_token: Option<String>, is_lost: bool },
    /// Opening or creating the volume. What takes long of a creation.
    Opening { work: Option<CreationWork> },
    /// No key at hand opens the volume: it waits for one.
    Locked { since: Instant, reason: String },
    /// Open, by this kind of key slot; `None` if it is not encrypted, or if an earlier noded has left it open.
    Open { slot: Option<SlotKind> },
}

/// The work of a creation that takes as long as reading or writing a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CreationWork {
    /// The whole disk is read, to see whether it is blank.
    Reading(ReadingStatus),
    /// A new authenticated volume is wiped.
    Wiping(WipeProgress),
    /// The volume of another disk is copied.
    Copying { from: PathBuf, copy: CopyProgress },
}

impl Default for UnlockStatus {
    fn default() -> Self {
        Self::Closed { error: None, erase_token: None, is_lost: false }
    }
}

/// The reason why a secret was not tried or did not help, or why an erasure was not permitted.
#[derive(Debug, Error)]
pub(crate) enum UnlockError {
    #[error("the data volume does not wait for a key: see nodectl storage status")]
    NotLocked,
    /// It could not be opened for another reason than a key.
    #[error("the data volume does not wait for a key: {0}")]
    Closed(String),
    #[error("can't open the data volume with this key: {0}")]
    Rejected(String),
    #[error(
        "token {given:?} is not that of the disk: see nodectl storage status, and use the token that it shows"
    )]
    WrongToken { given: String },
}

/// A secret for a locked volume, and who waits for the result.
pub(crate) struct UnlockOffer {
    pub(crate) secret: UnlockSecret,
    pub(crate) result: oneshot::Sender<Result<(), String>>,
}

/// The secrets for a locked volume. Dropping it ends the wait.
pub(crate) type UnlockOffers = mpsc::Receiver<UnlockOffer>;

/// The keys of the data volume, shared by root.storage, the cluster and the control API.
#[derive(Default)]
pub(crate) struct VolumeUnlock(Mutex<UnlockSlots>);

#[derive(Default)]
struct UnlockSlots {
    status: UnlockStatus,
    /// Set by the preparation of root.storage.
    volume: Option<Arc<LuksVolume>>,
    /// The cluster unlock key of a new volume, which only this process has.
    cluster_key: Option<UnlockKey>,
    /// The secret that opens the volume again in this process.
    secret: Option<UnlockSecret>,
    /// Takes secrets while the volume is locked.
    offers: Option<mpsc::Sender<UnlockOffer>>,
    /// The next attempt may erase the disk whose contents have this token.
    erase_permit: Option<String>,
    /// root.storage is stopped: it reads and wipes no further.
    is_work_canceled: bool,
}

impl fmt::Debug for VolumeUnlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolumeUnlock").field("status", &self.status()).finish_non_exhaustive()
    }
}

impl VolumeUnlock {
    /// The state of root.storage.
    pub(crate) fn status(&self) -> UnlockStatus {
        self.lock().status.clone()
    }

    /// The encrypted volume, to read and change its key slots; `None` if the volume is not encrypted. Its calls block.
    pub(crate) fn encrypted_volume(&self) -> Option<Arc<LuksVolume>> {
        self.lock().volume.clone()
    }

    /// The cluster unlock key that only this process has. It stays here until [`keep_stored_key`]: the caller may be
    /// killed before the cluster has it.
    ///
    /// [`keep_stored_key`]: Self::keep_stored_key
    pub(crate) fn cluster_key(&self) -> Option<UnlockKey> {
        self.lock().cluster_key.clone()
    }

    /// The cluster has this key: it was read back from there. It opens the volume again, if root.storage restarts: the slot
    /// that has opened it may be gone.
    pub(crate) fn keep_stored_key(&self, key: UnlockKey) {
        let mut slots = self.lock();
        slots.cluster_key = None;
        slots.secret = Some(UnlockSecret::Cluster(key));
    }

    /// Keeps the cluster unlock key of a new volume, or of a rotation.
    pub(crate) fn keep_cluster_key(&self, key: UnlockKey) {
        self.lock().cluster_key = Some(key);
    }

    /// Opens a locked volume with a secret. It stays locked if the secret does not open it.
    ///
    /// # Errors
    /// [`UnlockError::NotLocked`], [`UnlockError::Closed`], [`UnlockError::Rejected`].
    pub(crate) async fn unlock(&self, secret: UnlockSecret) -> Result<(), UnlockError> {
        // The sender is cloned, since the lock must not be held over the send.
        let offers = {
            let slots = self.lock();
            slots.offers.clone().ok_or_else(|| match &slots.status {
                UnlockStatus::Closed { error: Some(error), .. } => UnlockError::Closed(error.clone()),
                _ => UnlockError::NotLocked,
            })?
        };
        let (result, is_open) = oneshot::channel();
        offers.send(UnlockOffer { secret, result }).await.map_err(|_| UnlockError::NotLocked)?;
        // root.storage drops the sender if it is stopped.
        is_open.await.map_err(|_| UnlockError::NotLocked)?.map_err(UnlockError::Rejected)
    }

    /// Permits the next attempt of root.storage, which the caller restarts, to erase the disk that the last one found:
    /// the token is that of the contents, which must still be the same.
    ///
    /// # Errors
    /// [`UnlockError::WrongToken`].
    pub(crate) fn permit_erase(&self, token: &str) -> Result<(), UnlockError> {
        let mut slots = self.lock();
        let found = match &slots.status {
            UnlockStatus::Closed { erase_token, .. } => [erase_token, &None],
            // The operator does not wait for the end.
            UnlockStatus::Opening { work: Some(CreationWork::Reading(reading)) } => {
                [&reading.erase_token, &reading.read_token]
            }
            _ => [&None; 2],
        };
        if found.iter().any(|found| found.as_deref() == Some(token)) {
            slots.erase_permit = Some(token.to_owned())
        } else {
            return Err(UnlockError::WrongToken { given: token.to_owned() });
        }
        Ok(())
    }

    /// The token of the contents that this attempt may erase.
    pub(crate) fn take_erase_permit(&self) -> Option<String> {
        self.lock().erase_permit.take()
    }

    /// The secret that opens the volume again in this process: a restart of root.storage alone needs no operator.
    pub(crate) fn secret(&self) -> Option<UnlockSecret> {
        self.lock().secret.clone()
    }

    /// Keeps what has opened the volume, until noded exits.
    pub(crate) fn keep_secret(&self, secret: UnlockSecret) {
        self.lock().secret = Some(secret);
    }

    /// Sets the encrypted volume of the node.
    pub(crate) fn set_encrypted_volume(&self, volume: Option<Arc<LuksVolume>>) {
        self.lock().volume = volume;
    }

    /// Sets what root.storage does. Secrets are taken only while the volume is locked.
    pub(crate) fn set_status(&self, status: UnlockStatus) {
        let mut slots = self.lock();
        // An offer that comes later finds no receiver.
        slots.offers = None;
        slots.status = status;
    }

    /// A creation makes progress. Its work ends if it was canceled, or if root.storage has ended.
    pub(crate) fn report_work(&self, work: CreationWork) -> ControlFlow<()> {
        let mut slots = self.lock();
        if slots.is_work_canceled || slots.status == UnlockStatus::default() {
            return ControlFlow::Break(());
        }
        slots.status = UnlockStatus::Opening { work: Some(work) };
        ControlFlow::Continue(())
    }

    /// Ends a reading or a wipe of the disk soon; the next attempt resumes it. `false` permits it again.
    pub(crate) fn cancel_work(&self, is_canceled: bool) {
        self.lock().is_work_canceled = is_canceled;
    }

    /// The volume is locked: takes secrets from now on.
    pub(crate) fn wait_for_secrets(&self, reason: String) -> UnlockOffers {
        // One offer is tried at a time.
        let (sender, offers) = mpsc::channel(1);
        let mut slots = self.lock();
        slots.offers = Some(sender);
        slots.status = UnlockStatus::Locked { since: Instant::now(), reason };
        offers
    }

    /// Replaces the reason why the volume is locked. Returns whether it is another one.
    pub(crate) fn set_lock_reason(&self, text: String) -> bool {
        match &mut self.lock().status {
            UnlockStatus::Locked { reason, .. } if *reason != text => {
                *reason = text;
                true
            }
            _ => false,
        }
    }

    fn lock(&self) -> MutexGuard<'_, UnlockSlots> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A random number in `[0, 1)`, for the jitter of a backoff: after a power cut all nodes ask at once.
pub(crate) fn random_fraction() -> f64 {
    use std::hash::{BuildHasher as _, RandomState};
    f64::from(RandomState::new().hash_one(0) as u32) / (f64::from(u32::MAX) + 1.0)
}

#[cfg(test)]
mod tests {
    use nodekeel_localstorage::volume::ReadingProgress;

    use super::*;

    fn secret() -> UnlockSecret {
        UnlockSecret::Cluster(UnlockKey::from_bytes(&[1; 32]).expect("32 bytes"))
    }

    #[tokio::test]
    async fn a_secret_is_taken_only_while_the_volume_is_locked() {
        let unlock = VolumeUnlock::default();
        assert!(matches!(unlock.unlock(secret()).await, Err(UnlockError::NotLocked)));
        let mut offers = unlock.wait_for_secrets("no key".into());
        let storage = async {
            for result in [Err("wrong".to_owned()), Ok(())] {
                let offer = offers.recv().await.expect("offered");
                offer.result.send(result).expect("awaited");
            }
            unlock.set_status(UnlockStatus::Open { slot: Some(SlotKind::Recovery) });
        };
        let operator = async {
            let rejected = unlock.unlock(secret()).await;
            assert!(matches!(rejected, Err(UnlockError::Rejected(why)) if why == "wrong"));
            unlock.unlock(secret()).await.expect("opened");
        };
        tokio::join!(storage, operator);
        assert!(matches!(unlock.unlock(secret()).await, Err(UnlockError::NotLocked)));
    }

    #[tokio::test]
    async fn who_has_offered_a_secret_learns_that_storage_has_stopped() {
        let unlock = VolumeUnlock::default();
        let mut offers = unlock.wait_for_secrets("no key".into());
        let stopping = async { drop(offers.recv().await) };
        let (_, result) = tokio::join!(stopping, unlock.unlock(secret()));
        assert!(matches!(result, Err(UnlockError::NotLocked)));
    }

    #[test]
    fn a_wipe_is_reported_until_it_is_canceled_or_root_storage_has_ended() {
        let (unlock, wipe) = (VolumeUnlock::default(), WipeProgress { done_bytes: 1, total_bytes: 2 });
        for before in [
            UnlockStatus::Opening { work: None },
            UnlockStatus::Closed {
                error: Some("the disk is absent".into()),
                erase_token: None,
                is_lost: false,
            },
        ] {
            unlock.set_status(before);
            assert!(unlock.report_work(CreationWork::Wiping(wipe)).is_continue());
            assert_eq!(unlock.status(), UnlockStatus::Opening { work: Some(CreationWork::Wiping(wipe)) });
        }
        unlock.cancel_work(true);
        assert!(unlock.report_work(CreationWork::Wiping(wipe)).is_break());
        unlock.cancel_work(false);
        unlock.set_status(UnlockStatus::default());
        assert!(unlock.report_work(CreationWork::Wiping(wipe)).is_break());
        assert_eq!(unlock.status(), UnlockStatus::default());
    }

    #[test]
    fn a_reading_is_reported_until_it_is_canceled_and_its_disk_can_be_given_up() {
        let unlock = VolumeUnlock::default();
        let reading = || ReadingStatus {
            device: "/dev/sdb".into(),
            progress: ReadingProgress::new(1, 2, None),
            left: None,
            erase_token: Some("unread-sampled-1".into()),
            read_token: Some("data-read-1".into()),
        };
        assert!(unlock.report_work(CreationWork::Reading(reading())).is_break(), "root.storage has ended");
        unlock.set_status(UnlockStatus::Opening { work: None });
        assert!(unlock.report_work(CreationWork::Reading(reading())).is_continue());
        assert_eq!(unlock.status(), UnlockStatus::Opening { work: Some(CreationWork::Reading(reading())) });
        assert!(unlock.permit_erase("unread-sampled-2").is_err());
        unlock.permit_erase("unread-sampled-1").expect("that of the disk");
        unlock.permit_erase("data-read-1").expect("that of the reading before");
        unlock.cancel_work(true);
        assert!(unlock.report_work(CreationWork::Reading(reading())).is_break());
        unlock.cancel_work(false);
        assert!(unlock.report_work(CreationWork::Reading(reading())).is_continue());
    }

    #[test]
    fn only_the_disk_that_was_found_is_erased_and_once() {
        let unlock = VolumeUnlock::default();
        assert!(matches!(unlock.permit_erase("ext4-1"), Err(UnlockError::WrongToken { .. })));
        let erase_token = Some("ext4-1".to_owned());
        unlock.set_status(UnlockStatus::Closed { error: Some("ext4".into()), erase_token, is_lost: false });
        assert!(matches!(unlock.permit_erase("ext4-2"), Err(UnlockError::WrongToken { .. })));
        unlock.permit_erase("ext4-1").expect("that of the disk");
        assert_eq!(unlock.take_erase_permit().as_deref(), Some("ext4-1"));
        assert_eq!(unlock.take_erase_permit(), None);
    }
}

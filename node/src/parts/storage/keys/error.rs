//! Errors of changing the keys of the data volume.

use nodekeel_cluster::enrolment::{KvAccessError, NodeUnavailable};
use nodekeel_cluster::node::NodeStoreError;
use nodekeel_localstorage::volume::{LuksError, VolumeError};
use thiserror::Error;

use crate::parts::api::peer_client::PeerKeysError;
use crate::parts::storage::tang::TangKeyError;

/// The reason why the keys of the data volume could not be changed. Keys that opened it still do.
#[derive(Debug, Error)]
pub(crate) enum VolumeKeyError {
    /// The volume has no keys.
    #[error("the data volume is not encrypted: its storage.encryption was chosen when it was created")]
    NotEncrypted,
    /// The header of the volume can't be read or changed.
    #[error("can't read or change the keys of the data volume")]
    Volume(#[source] VolumeError),
    /// The node is in no cluster, by its configuration.
    #[error(
        "half of the data volume's key belongs into the node's cluster, but [cluster] is missing in the configuration"
    )]
    NoCluster,
    /// The node is not in its cluster at present.
    #[error("half of the data volume's key is in the node's cluster: wait until root.cluster is ready")]
    Cluster(#[source] KvAccessError),
    /// The same.
    #[error("half of the data volume's key is in the node's cluster: wait until root.cluster is ready")]
    Identity(#[source] NodeUnavailable),
    /// The cluster does not answer, or has another version of the keys.
    #[error("can't read or change the cluster's half of the data volume's key")]
    Store(#[source] NodeStoreError),
    /// No voter gives or keeps the key of a worker.
    #[error("can't read or change the cluster's half of the data volume's key")]
    Voters(#[source] PeerKeysError),
    /// Its keeper answers differently each time.
    #[error("the keeper of the other half of the data volume's key does not give back what it was given")]
    Unsettled,
    /// No Tang server keeps or gives back the key.
    #[error("can't store or recover the other half of the data volume's key")]
    Tang(#[source] TangKeyError),
    /// Neither the node nor its cluster has a key that opens the volume.
    #[error(
        "neither the node nor its cluster has a key that opens the data volume: type the recovery passphrase, with --recovery"
    )]
    NeedsPassphrase,
    /// cryptsetup can't re-encrypt blocks with an HMAC.
    #[error(
        "can't re-encrypt the data volume: it is encrypted and authenticated, and its volume key is fixed when it is created; \
         if a copy of its header may be in the wrong hands, copy it to another disk (storage.copy_from): see docs/noded.md, \
         \"Move to another disk\""
    )]
    Authenticated,
    /// Slots would be lost.
    #[error(
        "can't re-encrypt the data volume: give the recovery passphrase with --recovery, and name each other key slot that may \
         go with --drop-slot"
    )]
    Reencryption(#[source] VolumeError),
    /// A slot that was to go, and does not exist, or is the node's own.
    #[error(
        "can't drop key slot {slot}: the volume has none with this number, or it is one of the node's own; see \
         `nodectl storage status`"
    )]
    KeptSlot {
        /// The number.
        slot: u32,
    },
    /// The volume has to keep the slot that a rotation would remove.
    #[error(
        "the data volume has no confirmed recovery passphrase, without which nobody would open it after a power cut: \
         type nodectl storage recovery, confirm what it shows, and then try again"
    )]
    LacksPassphrase,
}

impl VolumeKeyError {
    /// The error of a re-encryption that could not begin. Other slots that may go help only if one would be lost.
    pub(super) fn of_reencryption(error: VolumeError) -> Self {
        let would_lose_slots = matches!(
            &error,
            VolumeError::Encryption { source, .. }
                if matches!(**source, LuksError::UnknownSlots { .. } | LuksError::LastSlot { .. })
        );
        if would_lose_slots { Self::Reencryption(error) } else { Self::Volume(error) }
    }
}

//! The status of an encrypted volume, as its header describes it.

use super::rollback::HeaderRollback;
use super::slot_kind::KeySlotStatus;
use super::token::{ColdStart, KeyPolicy, VolumeEncryption};

/// The encryption of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EncryptionStatus {
    /// The UUID of the volume, as text.
    pub volume: String,
    /// The encryption of its blocks.
    pub encryption: VolumeEncryption,
    /// The keys that open it, as recorded when it was created.
    pub keys: KeyPolicy,
    /// The way a split volume is opened after a power cut, as recorded when it was created; `None` for another volume.
    pub cold_start: Option<ColdStart>,
    /// True if it is authenticated, and was created [without a wipe](super::LuksVolume::without_wipe): a block that was
    /// never written can't be read.
    pub is_unwiped: bool,
    /// The node that created it.
    pub node: Option<String>,
    /// True if both copies of the header are correct. The next change of a key slot repairs one.
    pub has_both_headers: bool,
    /// All key slots, by their numbers.
    pub slots: Vec<KeySlotStatus>,
    /// How the header is older than the newest one that this node has written.
    pub rollback: Option<HeaderRollback>,
    /// The tokens of other programs, each as its identifier and its type. They stay, and are never used.
    pub foreign_tokens: Vec<String>,
    /// True if the newest cluster unlock key of a split volume is still to be
    /// [confirmed](super::LuksVolume::confirm_secret).
    pub needs_confirmation: bool,
    /// A re-encryption that was begun, and is not complete.
    pub reencryption: Option<ReencryptionProgress>,
}

/// The progress of a re-encryption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReencryptionProgress {
    /// The bytes of the data that have the new volume key.
    pub done_bytes: u64,
    /// The bytes of the data.
    pub total_bytes: u64,
}

impl ReencryptionProgress {
    /// A progress, as a fake reports it.
    pub fn new(done_bytes: u64, total_bytes: u64) -> ReencryptionProgress {
        ReencryptionProgress { done_bytes, total_bytes }
    }
}

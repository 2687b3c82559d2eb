//! What the header of a volume says about its encryption and its keys.

use std::sync::PoisonError;

use super::super::VolumeError;
use super::LuksVolume;
use super::slots::{KeySlotStatus, UnlockSecret, describe_slots, needs_confirmation};
use super::token::{ColdStart, KeyPolicy, VolumeEncryption};

/// The encryption of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EncryptionStatus {
    /// The UUID of the volume, as text.
    pub volume: String,
    /// How its blocks are encrypted.
    pub encryption: VolumeEncryption,
    /// Which keys open it, as recorded when it was created.
    pub keys: KeyPolicy,
    /// How a split volume is opened after a power cut, as recorded when it was created; `None` for another volume.
    pub cold_start: Option<ColdStart>,
    /// The node that created it.
    pub node: Option<String>,
    /// Whether both copies of the header are correct. The next change of a key slot repairs one.
    pub has_both_headers: bool,
    /// All key slots, by their numbers.
    pub slots: Vec<KeySlotStatus>,
    /// Whether the newest cluster unlock key of a split volume is still to be [confirmed](LuksVolume::confirm_secret).
    pub needs_confirmation: bool,
}

impl LuksVolume {
    /// Reads the encryption and the key slots from the header.
    ///
    /// # Errors
    /// [`VolumeError::Encryption`] if no header meets the policy; [`VolumeError::Device`].
    pub fn encryption_status(&self) -> Result<EncryptionStatus, VolumeError> {
        self.with_header(|_, header, token| {
            let opened = *self.opened_slot.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(EncryptionStatus {
                volume: header.uuid.to_string(),
                encryption: token.encryption,
                keys: token.keys,
                cold_start: token.cold_start(),
                node: token.node.clone(),
                has_both_headers: header.has_both_copies,
                slots: describe_slots(&header.summary, token, opened),
                needs_confirmation: needs_confirmation(&header.summary, token),
            })
        })
    }

    /// The generation of the newest slot that a secret opens; `None` if the secret opens none of its kind.
    ///
    /// # Errors
    /// [`VolumeError::Encryption`]: it can't be tried, as where the node unlock key is missing; [`VolumeError::Device`].
    pub fn test_secret(&self, secret: &UnlockSecret) -> Result<Option<u32>, VolumeError> {
        self.with_header(|slots, header, _| match slots.open_slot(header, secret) {
            Ok(opened) => Ok(Some(opened.generation)),
            Err(error) if error.is_wrong_secret() => Ok(None),
            Err(error) => Err(error),
        })
    }
}

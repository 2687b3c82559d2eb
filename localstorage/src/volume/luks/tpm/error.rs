//! The errors of a TPM.

use std::io;

use super::pcr::PcrSelection;
use super::signatures::PcrSignatureError;

/// A policy is not that of the values given. *Source:* TPM 2.0 Library, part 2, 6.6.3, `TPM_RC_VALUE`.
const WRONG_VALUE: u32 = 0x84;
/// A PCR was extended since the session met its policy. *Source:* the same, `TPM_RC_PCR_CHANGED`.
const PCR_CHANGED: u32 = 0x128;

/// A failure of a TPM to seal or unseal a node unlock key. The volume and its keys are as they were.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TpmError {
    /// The machine has no TPM, or the kernel has no driver for it.
    #[error("no TPM: switch it on in the firmware, or open the volume with the recovery passphrase")]
    Absent(#[source] io::Error),
    /// Another TPM has sealed the key, or this one was cleared since.
    #[error(
        "another TPM has sealed the key, or this one was cleared since: put the disk back into its machine, or open the volume with the recovery passphrase and rotate its keys"
    )]
    OtherTpm,
    /// Other firmware, another configuration of it, or another system was booted than when the key was sealed.
    #[error(
        "PCRs {changed} have changed since the key was sealed: find out what was booted, then open the volume with the recovery passphrase and rotate its keys"
    )]
    PcrsChanged {
        /// The PCRs whose values have changed.
        changed: PcrSelection,
    },
    /// The key is for values of PCRs that are signed, and those of the booted kernel are not.
    #[error(transparent)]
    Signature(PcrSignatureError),
    /// The TPM has no values of these PCRs in its bank SHA-256.
    #[error(
        "the TPM has no SHA-256 values of PCRs {missing}: switch the bank on in the firmware, or choose other PCRs"
    )]
    NoPcrs {
        /// The PCRs.
        missing: PcrSelection,
    },
    /// The owner hierarchy has a password, which this crate does not know.
    #[error("the TPM's owner hierarchy has a password: remove it with tpm2_changeauth -c owner")]
    OwnerPassword,
    /// The TPM could not be opened, written or read. A retry may help.
    #[error("can't talk to the TPM: check its driver in the kernel's log")]
    Connection(#[source] io::Error),
    /// A command failed.
    #[error("{command} failed with response code {response_code:#x}: look it up with tpm2_rc_decode")]
    Failed {
        /// The command.
        command: &'static str,
        /// The response code.
        response_code: u32,
    },
    /// The response is not one of a TPM 2.0.
    #[error("the response to {command} is invalid: check that the device is a TPM 2.0")]
    InvalidResponse {
        /// The command.
        command: &'static str,
    },
}

impl TpmError {
    /// Returns whether the first parameter or session failed in this way.
    ///
    /// *Source:* TPM 2.0 Library, part 2, 6.6.2: bits 0 to 5 and 7 of a format-one code give the reason; the others, the place.
    pub(super) fn is_format_one(&self, reason: u32) -> bool {
        matches!(self, TpmError::Failed { response_code, .. } if response_code & 0xbf == reason)
    }

    /// Returns whether a PCR may have been extended between the commands of one attempt.
    pub(super) fn is_race_with_pcrs(&self) -> bool {
        self.is_format_one(WRONG_VALUE) || matches!(self, TpmError::Failed { response_code: PCR_CHANGED, .. })
    }
}

//! The errors of encrypted volumes.

use std::io;

use thiserror::Error;

use super::cryptsetup::CryptsetupError;
use super::header::HeaderError;
use super::policy::PolicyViolation;
use super::rollback::HeaderRollback;
use super::seal::SealError;
use super::slot_kind::SlotKind;
use super::token::VolumeEncryption;
use crate::error::Error as FileError;
use crate::step_journal::StepListError;
use crate::volume::VolumeError;

/// A failure to create, open or change an encrypted volume. None of these ever leads to a format: the data
/// are as they were.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LuksError {
    /// The header can't be read. Restore it from a backup, or find out who damaged it.
    #[error("the encryption header can't be used: restore it from a backup")]
    Header(#[source] HeaderError),
    /// Another program has written the header, or changed it. It was not opened.
    #[error(
        "the encryption header was changed, or is not of this volume; nothing was opened: find out who wrote it"
    )]
    Policy(#[source] PolicyViolation),
    /// The volume has no such key slot: use another key.
    #[error("the volume has no {kind} key slot: open it with another key (see its slots)")]
    NoSlot {
        /// The kind.
        kind: SlotKind,
    },
    /// The ESP has no key for this volume: the wrong ESP is mounted, or the key was lost.
    #[error(
        "the node unlock key of volume {volume} is missing: attach the node's own ESP, or use the recovery passphrase"
    )]
    NodeKeyMissing {
        /// The UUID of the volume.
        volume: String,
    },
    /// The node unlock key is another one than that of the volume.
    #[error(
        "the node unlock key is not that of volume {volume}: attach the node's own ESP, or use the recovery passphrase"
    )]
    WrongNodeKey {
        /// The UUID of the volume.
        volume: String,
    },
    /// The node unlock key is right, but the cluster unlock key is not.
    #[error(
        "the cluster unlock key is not that of volume {volume}: get this node's key from its cluster, or use the recovery passphrase"
    )]
    WrongClusterKey {
        /// The UUID of the volume.
        volume: String,
    },
    /// The slot does not open with the right node unlock key, or with the recovery passphrase.
    #[error(
        "the {kind} key slot does not open: use another key or passphrase, or restore the header from a backup"
    )]
    SlotClosed {
        /// The kind.
        kind: SlotKind,
    },
    /// The header is older than the newest one that this node has written, and its key does not open it. Restore the newer
    /// one; or, if this one is to stay, open the volume by its recovery passphrase, and rotate the keys by it.
    #[error(
        "the encryption header of volume {volume} was rolled back: {rollback}; restore the newer header, or, if this one is \
         to stay, open the volume by its recovery passphrase, and rotate its keys by it"
    )]
    RolledBack {
        /// The UUID of the volume.
        volume: String,
        /// The generations.
        rollback: HeaderRollback,
        /// The reason why the key does not open it. Not in the chain: its advice is for a header that is right.
        key_error: Box<LuksError>,
    },
    /// A restore of the header was interrupted. Repeat it with the same backup.
    #[error("a restore of the encryption header was interrupted: repeat it with the same backup")]
    RestoreInterrupted {
        /// The reason why the key does not open it. Not in the chain, either.
        key_error: Box<LuksError>,
    },
    /// The backup is older than the newest header that this node has written. Restore the newest one; who agrees that keys
    /// and passphrases of that time open the volume again, allows it.
    #[error(
        "the backup is older than the newest header: {rollback}; the keys and passphrases of that time would open the volume \
         again"
    )]
    OlderBackup {
        /// The generations.
        rollback: HeaderRollback,
    },
    /// The header has a volume key of before a re-encryption: with it, nothing of the data can be read.
    #[error(
        "the header is from before the volume was re-encrypted: its volume key decrypts nothing of the data; use a backup \
         that was made after it"
    )]
    Reencrypted,
    /// A re-encryption is not complete: the header can't be changed, copied or replaced until then.
    #[error("can't {operation} while the volume is re-encrypted: wait for its end")]
    Reencrypting {
        /// The operation.
        operation: &'static str,
    },
    /// Key slots whose secret was not given would be lost with the former volume key.
    #[error(
        "a re-encryption keeps only key slots whose secret is given, and those of {slots} are not: give them, or name the \
         slots that may go"
    )]
    UnknownSlots {
        /// The slots, for people.
        slots: String,
    },
    /// The header has no room for as many slots again.
    #[error(
        "a re-encryption needs as many key slots again, and the header has no room for them: remove some"
    )]
    TooManySlots,
    /// cryptsetup was killed, or failed, while it re-encrypted a piece of the open volume. All that is read and written there
    /// fails, until the volume is closed, and opened again.
    #[error(
        "cryptsetup was killed or has failed in a piece of the re-encryption: the volume is to be closed and opened again"
    )]
    ReencryptionKilled,
    /// The kernel does not end what a killed cryptsetup has left.
    #[error("can't end what a killed cryptsetup has left of a re-encryption: restart the machine")]
    EndKilled(#[source] io::Error),
    /// The file is no backup of a header of this crate.
    #[error(
        "a backup of the header has {} bytes, this file has {bytes}: use a file of luksHeaderBackup",
        super::HeaderBackup::BYTES
    )]
    BackupSize {
        /// The bytes of the file.
        bytes: u64,
    },
    /// The backup is of an unfinished creation, or of another program's volume.
    #[error("the backup is not of a complete data volume: use a later one")]
    UnfinishedBackup,
    /// The disk is in use, and has another header than the backup. Close the volume first.
    #[error("the volume is open, or another program uses its disk: close it first")]
    HeaderInUse,
    /// The header can't be written. Repeat the restore.
    #[error("can't write the encryption header: repeat the restore")]
    WriteHeader(#[source] io::Error),
    /// The record of the newest header can't be read or written.
    #[error("can't read or write the record of the newest header")]
    HeaderRecord(#[source] FileError),
    /// The node unlock key can't be kept or read.
    #[error("can't keep or read the node unlock key")]
    Seal(#[source] SealError),
    /// A new slot did not open with its passphrase. The old slots remain.
    #[error("new key slot {slot} does not open, and the old ones remain: try again, and check the disk")]
    SlotNotVerified {
        /// The number of the slot.
        slot: u32,
    },
    /// All key slots are in use.
    #[error("all key slots are in use: confirm a key to remove those that it supersedes")]
    NoFreeSlot,
    /// The last key slot is never removed.
    #[error("key slot {slot} is the last one that opens the volume: add another first")]
    LastSlot {
        /// The number of the slot.
        slot: u32,
    },
    /// The secret opens an older slot than the newest of its kind.
    #[error("this key is older than the newest {kind} key slot: confirm the newest one")]
    NotNewest {
        /// The kind.
        kind: SlotKind,
    },
    /// The volume can't do this with its encryption.
    #[error("can't {operation} a volume that is {encryption}: it is fixed when the volume is created")]
    Unsupported {
        /// The operation.
        operation: &'static str,
        /// The encryption.
        encryption: VolumeEncryption,
    },
    /// Blocks of an authenticated volume were changed below it, by an attacker or a failing disk.
    #[error(
        "blocks of the volume were changed below its authentication: suspect tampering or a failing disk, and restore the data"
    )]
    Tampering(#[source] Box<VolumeError>),
    /// A key opens the header, and the data below are no file system: the header is of the volume on another disk, or the
    /// start of the data was overwritten.
    #[error(
        "a key opens the encryption header, but what it decrypts is no file system: the header is of another disk, or the \
         data were overwritten; attach the disk of this header, or restore the header of this disk"
    )]
    OtherData(#[source] Box<VolumeError>),
    /// Another volume is mapped under the name.
    #[error(
        "mapping {name:?} is in use by another volume: close it with cryptsetup close, or choose another name"
    )]
    MappingInUse {
        /// The name.
        name: String,
    },
    /// The kernel's list of mappings can't be read.
    #[error("can't list the mappings in /sys/block")]
    FindMapping(#[source] io::Error),
    /// What a killed cryptsetup has left on the disk of an unfinished volume can't be removed. A retry tries it again.
    #[error("can't remove the left mapping {name}: type `dmsetup remove {name}`")]
    RemoveMapping {
        /// The name.
        name: String,
        /// The answer of the kernel.
        #[source]
        source: io::Error,
    },
    /// cryptsetup can't be run, or failed.
    #[error("can't run or complete cryptsetup")]
    Command(#[source] CryptsetupError),
    /// The journal of the creation can't be read or written.
    #[error("can't read or write the journal of the volume's creation")]
    Journal(#[source] StepListError),
    /// A record of this crate can't be read or written as JSON.
    #[error("can't read or write the record of the volume")]
    Record(#[source] serde_json::Error),
    /// The checked copy of the header can't be written to the runtime directory.
    #[error("can't keep a copy of the header in the runtime directory")]
    HeaderCopy(#[source] FileError),
    /// The disk has less room than the volume that is to be copied to it, or its mapping has. Use a larger one.
    #[error(
        "can't copy a volume of {needed_bytes} bytes to one of {found_bytes}: use a disk that is at least as large"
    )]
    CopyTooSmall {
        /// The bytes of the disk, or of the mapping, of the volume to copy.
        needed_bytes: u64,
        /// Those of the new one.
        found_bytes: u64,
    },
    /// A block of the volume can't be read any more, and an earlier run has copied it, as it was then. Clear the new disk, and
    /// copy again.
    #[error(
        "the block at byte {offset} can't be read any more, and the copy has it as it was earlier: clear the disk of the copy, \
         which starts over then: `blkdiscard -z DISK`"
    )]
    CopyOutdated {
        /// Its offset in the mapping.
        offset: u64,
    },
    /// The sectors of the volume do not divide the disk. Use another one, or a partition of it.
    #[error(
        "can't copy a volume with sectors of 4096 bytes to a disk of {found_bytes} bytes: use one whose size is a multiple, or a \
         partition of it"
    )]
    CopySectors {
        /// The bytes of the disk.
        found_bytes: u64,
    },
    /// The caller could not record that the copy takes the place of the volume. A retry compares both, and tries it again.
    #[error("can't record that the copy takes the place of the volume")]
    Commit(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The kernel yields no random numbers.
    #[error("can't generate a key")]
    Random(#[source] io::Error),
    /// The disk can't be read.
    #[error("can't read the encryption header")]
    Device(#[source] Box<VolumeError>),
}

impl LuksError {
    /// The error of the key, also of one that does not open a header that was rolled back, or restored in part.
    pub fn key_error(&self) -> &LuksError {
        match self {
            LuksError::RolledBack { key_error, .. } | LuksError::RestoreInterrupted { key_error } => {
                key_error.key_error()
            }
            other => other,
        }
    }

    /// Returns whether the secret was tried, and opens no slot of its kind.
    pub(super) fn is_wrong_secret(&self) -> bool {
        matches!(
            self.key_error(),
            LuksError::NoSlot { .. } | LuksError::SlotClosed { .. } | LuksError::WrongClusterKey { .. }
        )
    }

    pub(super) fn device(error: VolumeError) -> LuksError {
        LuksError::Device(Box::new(error))
    }
}

//! Errors of opening the data volume, with what to do.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use nodekeel_localstorage::mount::MountError;
use nodekeel_localstorage::volume::{
    ContentsDigest, DigestScope, DiskFinding, DiskReport, InvalidPublicKey, LuksError, PartitionError,
    VOLUME_MARK, VOLUME_MARK_FILE, VolumeContents, VolumeError,
};
use thiserror::Error;

use crate::program_name::program_name;

/// The data volume can't be opened.
#[derive(Debug, Error)]
pub(super) enum StorageError {
    #[error("can't open the data volume")]
    Open(#[source] VolumeError),
    #[error(
        "can't open the data volume: {} has files, but not the file {VOLUME_MARK_FILE}, which marks a data volume; move \
         them away, or, if they are this node's, type: echo '{}' > {}",
        path.display(), VOLUME_MARK.trim_end(), path.join(VOLUME_MARK_FILE).display()
    )]
    Unmarked { path: PathBuf },
    #[error(
        "the node's data volume is lost: the file system that was mounted on {} is not mounted; mount it, or, if its data \
         are lost and the node is to start without them, type: nodectl reset",
        path.display()
    )]
    NotMounted { path: PathBuf },
    #[error(
        "the node's data volume is lost: {} {found}; attach or mount the node's own, or, if its data are lost and the node \
         is to start without them, type: nodectl reset",
        path.display()
    )]
    LostVolume { path: PathBuf, found: &'static str },
    #[error(
        "the data volume is open as mapping {mapping}, and this node has not opened it: give a key, or stop the program that \
         has opened it"
    )]
    OpenElsewhere { mapping: String, source: Box<StorageError> },
    #[error("the data volume closes, and opens again, as its re-encryption was cut off")]
    Reencryption(#[source] VolumeError),
    #[error("the node has no data volume yet")]
    NoVolume,
    #[error("can't open the directory of the data volume")]
    Directory(#[source] nodekeel_localstorage::Error),
    #[error(
        "can't create the data volume on {}: the disk has {found}, and {} wrote nothing to it; attach the node's own \
         disk, or, if nobody needs what it has, type: nodectl storage erase {} ({})",
        device.display(), program_name(), found.erase_token().unwrap_or_default(), describe_scope(found)
    )]
    Occupied { device: PathBuf, found: VolumeContents },
    #[error(
        "can't create the data volume; correct the cause, or, if nobody needs what the disk has, type: nodectl storage erase \
         {} ({})",
        found.erase_token().unwrap_or_default(), describe_scope(found)
    )]
    Unreadable { found: VolumeContents, source: Box<VolumeError> },
    #[error(
        "can't open the data volume on {}: the disk {report}, but storage.encryption is {configured}; correct the \
         configuration, or attach the node's own disk",
        device.display()
    )]
    OtherEncryption { device: PathBuf, report: Box<DiskReport>, configured: &'static str },
    #[error(
        "the node's data volume is lost: on {}, the disk {report}, but this node has had a volume; attach its disk, or, if \
         its data are lost and the node is to start without them, type: nodectl reset",
        device.display()
    )]
    Lost { device: PathBuf, report: Box<DiskReport> },
    #[error(
        "the node's data volume is lost: the encryption header on {} is damaged or gone: the disk, of the size that esp/ \
         records, {report}; restore the header, type: nodectl storage header restore FILE; or attach the node's own disk; if \
         there is no backup of the header, its data are lost: nodectl reset",
        device.display()
    )]
    HeaderLost { device: PathBuf, report: Box<DiskReport> },
    #[error(
        "the node's data volume is lost: on {}, the disk {report}, and is volume {}, but esp/ records volume {recorded}; attach \
         the node's own disk, or, if the disk is right, its own ESP; if the header is of another disk, type: nodectl storage \
         header restore FILE; if its data are lost and the node is to start without them, nodectl reset",
        device.display(), found_volume(report)
    )]
    OtherVolume { device: PathBuf, report: Box<DiskReport>, recorded: String },
    #[error(
        "can't open the data volume on {}: the disk has {found} bytes, {} fewer than the {recorded} that esp/ records: attach \
         the node's own disk, or give it its size back",
        device.display(), recorded.saturating_sub(*found)
    )]
    Shrunk { device: PathBuf, found: u64, recorded: u64 },
    #[error(
        "can't open the data volume: restore its newer header (nodectl storage header restore FILE), or, if this one is to stay, \
         type nodectl storage unlock, and then nodectl storage rotate --recovery"
    )]
    RolledBack(#[source] VolumeError),
    #[error(
        "can't open the data volume: its header is restored in part; use the same backup again, type: nodectl storage header \
         restore FILE"
    )]
    RestoreInterrupted(#[source] VolumeError),
    #[error("the data volume is not one that {} encrypts on a device: it has no header", program_name())]
    NotEncrypted,
    #[error(
        "can't restore a header on {}: esp/ has no record of a volume there; attach the node's own ESP, or use cryptsetup \
         luksHeaderRestore",
        device.display()
    )]
    Unrecorded { device: PathBuf },
    #[error(
        "the backup is of volume {backup}, but esp/ records volume {recorded}: use the backup of this node's volume"
    )]
    OtherBackup { backup: String, recorded: String },
    #[error(
        "the node's own key does not open this header: authorize by the recovery passphrase of its time, with --recovery"
    )]
    NeedsPassphrase(#[source] VolumeError),
    #[error("can't restore the header{hint}")]
    Restore { hint: &'static str, source: VolumeError },
    #[error(
        "can't create the data volume on {}: another node has begun to erase the disk; attach the node's own disk, or, if \
         nobody needs what it has, type: nodectl reset --give-up-volume",
        device.display()
    )]
    OtherErasure { device: PathBuf },
    #[error(
        "can't mount a file system on {}: the directory has files, which the file system would hide; move them away",
        path.display()
    )]
    Hidden { path: PathBuf },
    #[error(
        "can't copy the data volume from {}: esp/ has no record of a volume; attach the node's own ESP (storage.esp_device), or, if \
         the node is to start without data, remove storage.copy_from",
        from.display()
    )]
    NothingToCopy { from: PathBuf },
    #[error(
        "the node's data volume is neither on {} nor on {}, where the disk {report}: set storage.copy_from, and name the disk that \
         has it",
        device.display(), from.display()
    )]
    NoCopySource { device: PathBuf, from: PathBuf, report: Box<DiskReport> },
    #[error(
        "can't copy the data volume to {}: the disk {found}, and nothing was written to it; name a blank disk as storage.device, \
         or, if nobody needs what this one has, type: blkdiscard -z {}",
        device.display(), device.display()
    )]
    CopyTarget { device: PathBuf, found: String },
    #[error("the data volume is still on {}, and its copy to {} is not complete", from.display(), device.display())]
    Uncopied { device: PathBuf, from: PathBuf },
    #[error("can't find the data volume")]
    Find(#[source] PartitionError),
    #[error("can't mount the EFI system partition: correct the cause, and restart {}", program_name())]
    Esp(#[source] Arc<EspError>),
    #[error(
        "the node's data volume is lost: it is on a disk, and storage.kind is \"directory\"; set storage.kind as it was, or, \
         if its data are lost and the node is to start without them, type: nodectl reset"
    )]
    OnDevice,
    #[error(
        "the kernel has removed the disk of the data volume; attach it again: the volume then opens by itself; if it does \
         not, stop what still uses {}, or restart the machine",
        path.display()
    )]
    Removed { path: PathBuf },
    #[error(
        "the file system of the data volume has shut down after an error, see: nodectl logs root.kernel; it is mounted again \
         when nothing uses {}; if it does not mount, restore the files on another disk",
        path.display()
    )]
    ShutDown { path: PathBuf },
    #[error("can't read or write the record of the data volume")]
    Record(#[source] nodekeel_localstorage::Error),
    #[error("can't read {}: it is of a newer release; run that one", path.display())]
    NewerIdentity { path: PathBuf },
    #[error("can't read or write the id of the data volume")]
    Identity(#[source] nodekeel_localstorage::Error),
    #[error("storage.tpm_public_key: can't use {}", path.display())]
    Signer { path: PathBuf, source: SignerError },
}

fn found_volume(report: &DiskReport) -> &str {
    match &report.volume {
        DiskFinding::Encrypted { volume, .. } => volume,
        _ => "unknown",
    }
}

/// What a token covers.
fn describe_scope(found: &VolumeContents) -> &'static str {
    match found.digest().map(ContentsDigest::scope) {
        Some(DigestScope::Read) => "a token of every byte of this disk",
        _ => "a token of samples of this disk: other data may be between them",
    }
}

/// The public key that signs PCRs can't be used.
#[derive(Debug, Error)]
pub(super) enum SignerError {
    #[error("can't read it; correct the path, or put the public key there")]
    Read(#[source] io::Error),
    #[error(transparent)]
    Invalid(InvalidPublicKey),
}

/// The EFI system partition can't be mounted.
#[derive(Debug, Error)]
pub(super) enum EspError {
    #[error("can't find it; attach it")]
    Find(#[source] PartitionError),
    #[error(transparent)]
    Mount(MountError),
    #[error("{} has files, which the partition would hide: move them to the partition, or set storage.esp = \"directory\"", path.display())]
    Hidden { path: PathBuf },
    #[error("can't open its mount point")]
    Directory(#[source] nodekeel_localstorage::Error),
}

impl StorageError {
    /// Returns whether another key may open the volume.
    pub(super) fn needs_key(&self) -> bool {
        match self {
            Self::Open(error) | Self::RolledBack(error) | Self::RestoreInterrupted(error) => {
                Self::needs_key_of(error)
            }
            Self::OpenElsewhere { source, .. } => source.needs_key(),
            _ => false,
        }
    }

    /// Returns whether the error of a volume is that of a key, and another one may open it.
    pub(super) fn needs_key_of(error: &VolumeError) -> bool {
        let VolumeError::Encryption { source, .. } = error else { return false };
        matches!(
            source.key_error(),
            LuksError::NoSlot { .. }
                | LuksError::NodeKeyMissing { .. }
                | LuksError::WrongNodeKey { .. }
                | LuksError::WrongClusterKey { .. }
                | LuksError::SlotClosed { .. }
                | LuksError::Seal(_)
        )
    }

    /// The failure to open a volume that exists.
    pub(super) fn of_opening(error: VolumeError) -> Self {
        let VolumeError::Encryption { source, .. } = &error else { return Self::Open(error) };
        match **source {
            LuksError::RolledBack { .. } => Self::RolledBack(error),
            LuksError::RestoreInterrupted { .. } => Self::RestoreInterrupted(error),
            _ => Self::Open(error),
        }
    }

    /// The failure to restore a header with the node's own key, or with a passphrase.
    pub(super) fn of_restore(error: VolumeError, is_own_key: bool) -> Self {
        let VolumeError::Encryption { source, .. } = &error else {
            return Self::Restore { hint: "", source: error };
        };
        let hint = match &**source {
            LuksError::OlderBackup { .. } => {
                ": use the newest backup, or, if there is none, repeat it with --older"
            }
            LuksError::HeaderInUse => ": type nodectl stop root.storage, and repeat it",
            LuksError::Reencrypted => ", also with --older",
            LuksError::NoSlot { .. }
            | LuksError::NodeKeyMissing { .. }
            | LuksError::WrongNodeKey { .. }
            | LuksError::SlotClosed { .. }
            | LuksError::Seal(_)
                if is_own_key =>
            {
                return Self::NeedsPassphrase(error);
            }
            _ => "",
        };
        Self::Restore { hint, source: error }
    }

    /// Returns whether the node's volume is not there: only an operator can give it up.
    pub(super) fn is_lost(&self) -> bool {
        matches!(
            self,
            Self::Lost { .. }
                | Self::HeaderLost { .. }
                | Self::OtherVolume { .. }
                | Self::LostVolume { .. }
                | Self::NotMounted { .. }
                | Self::OnDevice
        )
    }

    /// The token that names the contents of the disk, to erase them.
    pub(super) fn erase_token(&self) -> Option<String> {
        match self {
            Self::Occupied { found, .. } | Self::Unreadable { found, .. } => found.erase_token(),
            Self::OtherEncryption { report, .. }
            | Self::Lost { report, .. }
            | Self::HeaderLost { report, .. }
            | Self::OtherVolume { report, .. } => report.contents.erase_token(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_or_wrong_key_is_waited_for() {
        let error = |source| {
            StorageError::Open(VolumeError::Encryption { path: "/dev/sdb".into(), source: Box::new(source) })
        };
        assert!(error(LuksError::NodeKeyMissing { volume: String::new() }).needs_key());
        assert!(error(LuksError::WrongClusterKey { volume: String::new() }).needs_key());
        assert!(!error(LuksError::NoFreeSlot).needs_key());
        assert!(!StorageError::Open(VolumeError::Absent { path: "/dev/sdb".into() }).needs_key());
    }

    #[test]
    fn a_header_that_is_restored_in_part_names_the_command_that_completes_it() {
        let key_error = Box::new(LuksError::WrongNodeKey { volume: String::new() });
        let source = Box::new(LuksError::RestoreInterrupted { key_error });
        let error = StorageError::of_opening(VolumeError::Encryption { path: "/dev/sdb".into(), source });
        assert!(error.needs_key(), "a passphrase may open it");
        assert!(error.to_string().ends_with("type: nodectl storage header restore FILE"), "{error}");
    }
}

//! Errors of opening the data volume, with what to do.

use std::path::PathBuf;
use std::sync::Arc;

use nodekeel_localstorage::mount::MountError;
use nodekeel_localstorage::volume::{
    DiskReport, LuksError, PartitionError, VOLUME_MARK, VOLUME_MARK_FILE, VolumeContents, VolumeError,
};
use thiserror::Error;

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
        "can't open the data volume: the file system that was mounted on {} is not mounted; mount it, or, if the node is \
         to keep its data in the directory itself, type: rm {}",
        path.display(), record.display()
    )]
    NotMounted { path: PathBuf, record: PathBuf },
    #[error("can't open the directory of the data volume")]
    Directory(#[source] nodekeel_localstorage::Error),
    #[error(
        "can't create the data volume on {}: the disk has {found}, and noded wrote nothing to it; attach the node's own \
         disk, or, if nobody needs what it has, type: nodectl storage erase {}",
        device.display(), found.erase_token().unwrap_or_default()
    )]
    Occupied { device: PathBuf, found: VolumeContents },
    #[error(
        "can't open the data volume on {}: the disk {report}, but storage.encryption is {configured}; correct the \
         configuration, or attach the node's own disk",
        device.display()
    )]
    OtherEncryption { device: PathBuf, report: Box<DiskReport>, configured: &'static str },
    #[error(
        "can't open the data volume on {}: the disk {report}, but this node has had a volume; attach its disk, or, if its \
         data are lost and the node is to start without them, type: rm {}",
        device.display(), record.display()
    )]
    Lost { device: PathBuf, report: Box<DiskReport>, record: PathBuf },
    #[error(
        "can't mount a file system on {}: the directory has files, which the file system would hide; move them away",
        path.display()
    )]
    Hidden { path: PathBuf },
    #[error("can't find the data volume")]
    Find(#[source] PartitionError),
    #[error("can't mount the EFI system partition: correct the cause, and restart noded")]
    Esp(#[source] Arc<EspError>),
    #[error(
        "can't open the data volume in a directory: this node has had one on a disk; set storage.kind as it was, or, if \
         that volume's data are lost, type: rm {}",
        record.display()
    )]
    OnDevice { record: PathBuf },
    #[error("can't read or write the record of the data volume")]
    Record(#[source] nodekeel_localstorage::Error),
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
        let Self::Open(VolumeError::Encryption { source, .. }) = self else { return false };
        matches!(
            **source,
            LuksError::NoSlot { .. }
                | LuksError::NodeKeyMissing { .. }
                | LuksError::WrongNodeKey { .. }
                | LuksError::WrongClusterKey { .. }
                | LuksError::SlotClosed { .. }
                | LuksError::Seal(_)
        )
    }

    /// The token that names the contents of the disk, to erase them.
    pub(super) fn erase_token(&self) -> Option<String> {
        match self {
            Self::Occupied { found, .. } => found.erase_token(),
            Self::OtherEncryption { report, .. } | Self::Lost { report, .. } => report.contents.erase_token(),
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
}

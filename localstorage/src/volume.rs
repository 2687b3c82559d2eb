//! The volume of a node's data: created once, then opened, and never created over data that may still be
//! needed.
//!
//! ```text
//!               mount_new / mount_existing
//!  Unmounted ───────────────────────────────▶ Mounting ──▶ Mounted
//!      ▲                                         │            │
//!      └───────── any error, undone ─────────────┴── unmount ─┘
//! ```

mod claim;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod conformance;
mod directory_volume;
mod disk;
mod disk_ends;
mod disk_volume;
mod filesystem;
mod inspection;
mod lifecycle;
#[cfg(feature = "luks")]
pub(crate) mod luks;
mod marker;
pub(crate) mod partition;
mod places;
pub(crate) mod probe;
mod signatures;
mod uuid;

use std::fmt;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::dir::Dir;
use crate::error::Error;
use crate::mount::MountError;

pub use directory_volume::DirectoryVolume;
pub use disk_volume::DiskVolume;
pub use inspection::{DiskFinding, DiskReport, inspect_disk};
#[cfg(feature = "luks")]
pub use luks::{
    ActiveMapping, ColdStart, Cryptsetup, CryptsetupCall, CryptsetupError, CryptsetupProgram,
    EncryptedVolume, EncryptionStatus, FileSeal, HeaderError, InvalidPcr, InvalidRecoveryPassphrase,
    InvalidUnlockKey, KeyPolicy, KeySeal, KeySlotStatus, LuksError, LuksVolume, LuksVolumeConfig,
    PcrSelection, PolicyViolation, RecoveryPassphrase, SealError, SealId, SlotKind, TpmConnection, TpmError,
    TpmSeal, UnlockKey, UnlockSecret, VolumeEncryption, WipeProgress,
};
pub use partition::{
    BlockDevices, CopyFault, GrowthRefusal, InvalidPartitionType, Partition, PartitionError, PartitionGrowth,
    PartitionQuery, PartitionType, TableCopies, TableError,
};
pub use probe::{DiskSignature, VolumeContents, probe_disk};

/// The name of the file in the root directory of a volume that marks it as complete. [`DataVolume::mount_new`] of the
/// volumes here writes it last, and an operator can write it to keep the files of a directory that was restored without
/// it.
pub const VOLUME_MARK_FILE: &str = marker::MARKER_NAME;

/// Its content: a line with the version of its format.
pub const VOLUME_MARK: &str = marker::COMPLETE_MARK;

/// The volume of a node's data.
///
/// # Contract
/// - [`mount_new`](DataVolume::mount_new) erases only the contents that the caller agreed to erase. A call
///   that was killed at any point can be repeated with the same arguments, and resumes. If it was killed
///   after the last step, the repeated call fails with [`Occupied`](VolumeError::Occupied), and the volume
///   exists.
/// - [`mount_existing`](DataVolume::mount_existing) writes nothing, and opens only volumes that `mount_new`
///   has completed.
/// - Both return the open root directory of the volume: a write through it reaches the volume or fails.
/// - A failed call leaves the volume [`Unmounted`](MountState::Unmounted), and can be repeated.
/// - One call runs at a time: a concurrent call, or one on a mounted volume, is
///   [`VolumeError::InvalidState`].
///
/// `testing::volume_conformance` (feature `testing`) checks it.
pub trait DataVolume: Send + Sync + fmt::Debug {
    /// Creates an empty volume and mounts it.
    ///
    /// # Errors
    /// [`VolumeError::Occupied`] if there are contents that `erase` does not name, and the steps that can
    /// fail.
    fn mount_new(&self, erase: ErasePolicy) -> Result<Dir, VolumeError>;

    /// Mounts a volume created earlier by [`mount_new`](DataVolume::mount_new).
    ///
    /// # Errors
    /// [`VolumeError::Absent`], [`VolumeError::Unfinished`], [`VolumeError::ForeignData`] report what exists
    /// instead.
    fn mount_existing(&self) -> Result<Dir, VolumeError>;

    /// Unmounts the volume; does nothing if it is not mounted. Open directories of the volume prevent it.
    ///
    /// # Errors
    /// [`VolumeError::Mount`], with the volume still mounted; [`VolumeError::InvalidState`]; any other error of a step
    /// behind that, with the volume [`Unmounted`](MountState::Unmounted), as when a mapping is in use.
    fn unmount(&self) -> Result<(), VolumeError>;

    /// The current state.
    fn state(&self) -> MountState;
}

/// The state of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MountState {
    /// It is not mounted.
    Unmounted,
    /// A call is in progress.
    Mounting,
    /// It is mounted.
    Mounted,
}

impl fmt::Display for MountState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MountState::Unmounted => "not mounted",
            MountState::Mounting => "being mounted",
            MountState::Mounted => "mounted",
        })
    }
}

/// What creating a volume may erase.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErasePolicy {
    /// Nothing.
    Nothing,
    /// These contents, as reported by [`VolumeError::Occupied`]. They are erased only if they are unchanged
    /// and still on the same disk, even if another disk has its name now ([`DiskSignature::fingerprint`]):
    /// the caller has seen what is erased.
    Exactly(VolumeContents),
}

/// Why a volume could not be created, opened or closed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VolumeError {
    /// Another call is in progress, or the volume is mounted already, or is not mounted yet.
    #[error("the data volume is {state}, which this operation does not allow")]
    InvalidState {
        /// The state.
        state: MountState,
    },
    /// There are contents already. Use [`ErasePolicy::Exactly`] to erase them.
    #[error(
        "{} already contains {found}, and nothing was written to it: use an empty disk, or erase this one",
        .path.display()
    )]
    Occupied {
        /// The device, or the directory.
        path: PathBuf,
        /// The contents.
        found: VolumeContents,
    },
    /// The volume does not exist yet: create one.
    #[error("no data volume on {}: it is blank; create one, or attach the node's disk", .path.display())]
    Absent {
        /// The device, or the directory.
        path: PathBuf,
    },
    /// Its creation was interrupted, before any data was on it: create it again.
    #[error(
        "creation of the data volume on {} was interrupted, before it had data: create it again",
        .path.display()
    )]
    Unfinished {
        /// The device, or the directory.
        path: PathBuf,
    },
    /// The contents were not created by [`DataVolume::mount_new`].
    #[error(
        "{} contains {found}, which is not a nodekeel data volume; nothing was written: attach the node's \
         disk",
        .path.display()
    )]
    ForeignData {
        /// The device, or the directory.
        path: PathBuf,
        /// The contents.
        found: VolumeContents,
    },
    /// The device could not be opened, read or written, or is in use: its contents are unknown. A retry may
    /// help.
    #[error("can't {step} disk {}", .path.display())]
    Device {
        /// The failed step.
        step: &'static str,
        /// The device.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// `mkfs.xfs` could not be started, or failed: install xfsprogs, or read its output. A retry starts over.
    #[error("can't format {}{}", .path.display(), in_parentheses(.stderr))]
    Format {
        /// The device.
        path: PathBuf,
        /// Its error output, if it was started.
        stderr: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// `xfs_growfs` could not be started, or failed: install xfsprogs, or read its output.
    #[error("can't grow the file system on {}{}", .path.display(), in_parentheses(.stderr))]
    Grow {
        /// Where it is mounted.
        path: PathBuf,
        /// Its error output, if it was started.
        stderr: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The volume could not be encrypted, or opened with a key.
    #[cfg(feature = "luks")]
    #[error("can't use encrypted volume {}", .path.display())]
    Encryption {
        /// The device.
        path: PathBuf,
        /// Why, and what to do.
        #[source]
        source: Box<luks::LuksError>,
    },
    /// The volume could not be mounted or unmounted.
    #[error("can't mount or unmount the data volume")]
    Mount(#[source] MountError),
    /// The root directory of the volume could not be opened, listed, or marked as complete.
    #[error("can't read the data volume's root directory, or record there that the volume is complete")]
    Finish(#[source] Error),
}

fn in_parentheses(stderr: &str) -> String {
    if stderr.is_empty() { String::new() } else { format!(" ({stderr})") }
}

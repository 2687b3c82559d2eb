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
pub(crate) mod data_volume;
mod digest;
mod directory_volume;
mod disk;
mod disk_ends;
mod disk_volume;
mod error;
mod filesystem;
mod holders;
mod identity;
mod inspection;
mod lifecycle;
#[cfg(feature = "luks")]
pub(crate) mod luks;
mod marker;
pub(crate) mod partition;
mod places;
pub(crate) mod probe;
mod reading;
mod signatures;
mod uuid;

pub use data_volume::{DataVolume, ErasePolicy};
pub use digest::{ContentsDigest, DigestScope};
pub use directory_volume::DirectoryVolume;
pub use disk_volume::DiskVolume;
pub use error::VolumeError;
pub use identity::DiskIdentity;
pub use inspection::{DiskFinding, DiskReport, inspect_disk};
pub use lifecycle::MountState;
#[cfg(feature = "luks")]
pub use luks::{
    ActiveMapping, ColdStart, CopyCommit, CopyProgress, CopySource, Cryptsetup, CryptsetupCall,
    CryptsetupError, CryptsetupProgram, EncryptedVolume, EncryptionStatus, FileSeal, HeaderBackup,
    HeaderError, HeaderGenerations, HeaderRollback, InvalidPcr, InvalidPublicKey, InvalidRecoveryPassphrase,
    InvalidUnlockKey, KeyPolicy, KeySeal, KeySlotStatus, LuksError, LuksVolume, LuksVolumeConfig,
    PcrPublicKey, PcrSelection, PcrSignatureError, PcrSignatures, PolicyViolation, RecoveryPassphrase,
    ReencryptionEnd, ReencryptionProgress, SealError, SealId, SignedPcrs, SlotKind, TpmConnection, TpmError,
    TpmSeal, UnlockKey, UnlockSecret, UnreadableBlocks, VolumeEncryption, WipeProgress,
};
pub use partition::{
    BlockDevices, CopyFault, GrowthRefusal, InvalidPartitionType, Partition, PartitionError, PartitionGrowth,
    PartitionQuery, PartitionType, TableCopies, TableError,
};
pub use probe::{DiskSignature, VolumeContents, probe_disk};
pub use reading::ReadingProgress;

/// The name of the file in the root directory of a volume that marks it as complete. [`DataVolume::mount_new`] of the
/// volumes here writes it last, and an operator can write it to keep the files of a directory that was restored without
/// it.
pub const VOLUME_MARK_FILE: &str = marker::MARKER_NAME;

/// The content of that file: a line with the version of its format.
pub const VOLUME_MARK: &str = marker::COMPLETE_MARK;

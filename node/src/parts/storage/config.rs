//! `[storage]`: the data volume of the node.

pub(crate) mod device;

use std::fmt;
use std::path::PathBuf;

use nodekeel_localstorage::volume::{ColdStart, KeyPolicy};
use serde::Deserialize;

/// `[storage]`
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct StorageConfig {
    /// The kind of the volume that holds the node's data.
    pub kind: VolumeKind,
    /// The disk; with `kind = "partition"`, the disk on which the partition is, if there are several.
    pub device: Option<PathBuf>,
    /// The GPT type of the partition. Default: nodekeel's.
    pub partition_type: Option<String>,
    /// The GPT label of the partition. Default: any.
    pub partition_label: Option<String>,
    /// The encryption of the disk's blocks. A volume keeps that of its creation.
    pub encryption: Option<EncryptionMode>,
    /// Which keys open it.
    pub keys: Option<KeyPolicy>,
    /// The way in which a node with split keys opens its volume when its cluster does not run yet.
    pub cold_start: Option<ColdStart>,
    /// The Tang servers that give the other half of the key back; any one of them opens the volume.
    pub tang: Option<Vec<TangConfig>>,
    /// The seal that keeps the node's half of the key.
    pub seal: Option<SealKind>,
    /// The platform configuration registers to which a TPM binds the node's half. Default: 7.
    pub tpm_pcrs: Option<Vec<u32>>,
    /// The PEM file of the public key whose owner signs the values of more registers, so that each kernel that is signed opens
    /// the volume.
    pub tpm_public_key: Option<PathBuf>,
    /// The registers whose values are signed. Default: 11.
    pub tpm_public_key_pcrs: Option<Vec<u32>>,
    /// The file with the signatures that came with the kernel. Default: where systemd has it.
    pub tpm_signature: Option<PathBuf>,
    /// The place of `esp/` of the data directory.
    pub esp: EspKind,
    /// The EFI system partition.
    pub esp_device: Option<PathBuf>,
    /// True if discards reach an encrypted disk. Default: no.
    pub discards: Option<bool>,
    /// True if an authenticated volume is wiped when it is created. Default: yes.
    pub wipe: Option<bool>,
    /// The disk or partition whose volume is copied to this one.
    pub copy_from: Option<PathBuf>,
}

/// A Tang server.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct TangConfig {
    /// `http://HOST` or `http://HOST:PORT`.
    pub url: String,
    /// The SHA-256 thumbprint of the key that signs for the server, as `tang-show-keys` prints it.
    pub thumbprint: String,
}

/// The kind of the volume that holds the node's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum VolumeKind {
    /// `"directory"`: the directory `data` below the data directory, or the file system that is mounted there.
    #[default]
    Directory,
    /// `"disk"`: a whole disk, or another block device that `device` names.
    Disk,
    /// `"partition"`: a partition, by its GPT type and label.
    Partition,
}

impl fmt::Display for VolumeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Directory => "directory",
            Self::Disk => "disk",
            Self::Partition => "partition",
        })
    }
}

/// The encryption of a disk's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum EncryptionMode {
    /// `"encrypted-and-authenticated"`: a thief of the disk can't read it, and a changed block is an error.
    EncryptedAndAuthenticated,
    /// `"encrypted"`: a thief of the disk can't read it.
    Encrypted,
    /// `"none"`
    None,
}

/// The seal that keeps the node's half of the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SealKind {
    /// `"file"`: a file in `esp/`.
    #[default]
    File,
    /// `"tpm"`: a file in `esp/` that only the TPM of this machine can read.
    Tpm,
}

/// The place of `esp/` of the data directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum EspKind {
    /// `"directory"`: the directory itself.
    #[default]
    Directory,
    /// `"partition"`: an EFI system partition, which noded mounts there.
    Partition,
}

//! The settings of an encrypted volume, which creating and opening it share.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use super::super::VolumeError;
use super::super::disk::{Disk, DiskAccess, VolumeDevice};
use super::super::filesystem::{DEFAULT_LABEL, VolumeMount};
use super::super::identity::device_directory;
use super::super::reading::{DiskReader, ReadingHook};
use super::cryptsetup::{ActiveMapping, Cryptsetup};
use super::device::LuksDevice;
use super::error::LuksError;
use super::key_slots::KeySlots;
use super::policy::PolicyViolation;
use super::rollback::HeaderRecords;
use super::seal::KeySeal;
use super::token::{ColdStart, KeyPolicy, VolumeEncryption, VolumeToken};
use super::wipe::WipeHook;
use crate::dir::Dir;
use crate::mount::Mounter;

/// The device by which device-mapper is controlled. *Source:* Linux `dm-ioctl.c`, `DM_DIR`, `DM_CONTROL_NODE`.
pub(super) const DEVICE_MAPPER: &str = "/dev/mapper/control";

/// The disk, directories and programs of a [`LuksVolume`](super::LuksVolume).
#[derive(Debug)]
#[expect(clippy::exhaustive_structs, reason = "the caller fills all fields: a new one is a decision")]
pub struct LuksVolumeConfig {
    /// The disk or partition.
    pub device: PathBuf,
    /// The mount point: the absolute path of an existing directory.
    pub target: PathBuf,
    /// The encryption of its blocks. A header with another encryption is rejected.
    pub encryption: VolumeEncryption,
    /// The keys that open it, for its creation: an existing volume has recorded that. One that is recorded as
    /// [`Local`](KeyPolicy::Local) is rejected as [`Split`](KeyPolicy::Split): a thief of the disk can have changed the
    /// record, and the next keys would be weaker.
    pub keys: KeyPolicy,
    /// A durable directory outside of the volume, on the ESP: the journal of the creation, and the record of the newest
    /// header.
    pub journal: Dir,
    /// A directory in memory, for root alone: the copy of the header that cryptsetup opens, and the progress of the
    /// reading of a whole disk.
    pub runtime: Dir,
    /// Keeps the node unlock key.
    pub seal: Arc<dyn KeySeal>,
    /// Mounts the file system.
    pub mounter: Arc<dyn Mounter>,
    /// Runs cryptsetup.
    pub cryptsetup: Arc<dyn Cryptsetup>,
}

/// All settings of a volume: those that the caller must choose, and those that have a default.
pub(super) struct LuksSettings {
    pub(super) config: LuksVolumeConfig,
    pub(super) device: VolumeDevice,
    pub(super) mount: VolumeMount,
    pub(super) label: String,
    pub(super) mkfs: PathBuf,
    pub(super) mapping_name: String,
    /// The node that creates the volume, recorded for people.
    pub(super) node: Option<String>,
    pub(super) cold_start: ColdStart,
    /// True if an authenticated volume is wiped when it is created.
    pub(super) wipe: bool,
    pub(super) allow_discards: bool,
    pub(super) progress: Option<WipeHook>,
    pub(super) reading_hook: Option<ReadingHook>,
}

impl LuksSettings {
    pub(super) fn new(config: LuksVolumeConfig) -> LuksSettings {
        LuksSettings {
            device: VolumeDevice::new(config.device.clone()),
            mount: VolumeMount { target: config.target.clone(), mounter: Arc::clone(&config.mounter) },
            config,
            label: DEFAULT_LABEL.into(),
            mkfs: "mkfs.xfs".into(),
            mapping_name: "nodekeel-data".into(),
            node: None,
            cold_start: ColdStart::default(),
            wipe: true,
            allow_discards: false,
            progress: None,
            reading_hook: None,
        }
    }

    /// Opens the disk, and locks it.
    pub(super) fn open_disk(&self, access: DiskAccess) -> Result<Disk, VolumeError> {
        self.device.open(access)
    }

    pub(super) fn reading(&self) -> DiskReader<'_> {
        DiskReader { hook: self.reading_hook.as_ref(), directory: Some(&self.config.runtime) }
    }

    /// Rejects an operation that an authenticated volume does not support.
    pub(super) fn check_support(&self, operation: &'static str) -> Result<(), VolumeError> {
        let encryption = self.config.encryption;
        if encryption == VolumeEncryption::EncryptedAndAuthenticated {
            return Err(self.error(LuksError::Unsupported { operation, encryption }));
        }
        Ok(())
    }

    pub(super) fn check_discards(&self) -> Result<(), VolumeError> {
        if self.allow_discards { self.check_support("pass discards to") } else { Ok(()) }
    }

    /// Rejects a volume whose header records weaker keys than these settings.
    pub(super) fn check_keys(&self, token: &VolumeToken) -> Result<(), LuksError> {
        // No keys are weaker than those of a local volume.
        if self.config.keys != KeyPolicy::Split {
            return Ok(());
        }
        if token.keys == KeyPolicy::Local {
            return Err(LuksError::Policy(PolicyViolation::Keys));
        }
        if token.keeps_local_slot() && self.cold_start != ColdStart::Local {
            return Err(LuksError::Policy(PolicyViolation::ColdStart));
        }
        Ok(())
    }

    /// The key slots of the disk, which the caller has locked by opening it.
    pub(super) fn slots_of<'a>(&'a self, disk: &'a Disk) -> KeySlots<'a> {
        let device = LuksDevice {
            disk,
            tool: &*self.config.cryptsetup,
            runtime: &self.config.runtime,
            encryption: self.config.encryption,
        };
        KeySlots { device, seal: &*self.config.seal, records: HeaderRecords(&self.config.journal) }
    }

    /// Opens the device of a mapping, which is checked to be that of this mapping: its name may be another device's by
    /// now.
    pub(super) fn open_mapping_device(&self, mapping: &ActiveMapping) -> Result<File, VolumeError> {
        let to_error = |source| self.mapping_error(mapping, source);
        let device = File::open(&mapping.device_path).map_err(to_error)?;
        // An image stands for a mapping in tests.
        if let Some(directory) = device_directory(&device).map_err(to_error)? {
            let identifier = fs::read_to_string(directory.join("dm/uuid")).map_err(to_error)?;
            if identifier.trim_end() != mapping.identifier {
                return Err(VolumeError::Replaced { path: mapping.device_path.clone() });
            }
        }
        Ok(device)
    }

    pub(super) fn mapping_error(&self, mapping: &ActiveMapping, source: io::Error) -> VolumeError {
        VolumeError::Device { step: "open mapping", path: mapping.device_path.clone(), source }
    }

    /// The error of the volume, with the path of its device.
    pub(super) fn error(&self, error: LuksError) -> VolumeError {
        match error {
            LuksError::Device(error) => *error,
            source => VolumeError::Encryption { path: self.config.device.clone(), source: Box::new(source) },
        }
    }
}

//! Encrypted volumes: LUKS2 by the cryptsetup program, opened by the node and its cluster together.
//!
//! ```text
//!  layer          decides                                            here
//!  file system    XFS with project quotas, on a fresh device         mkfs.xfs on the mapping
//!  mapping        none, or LUKS2 by a header that was checked        cryptsetup open --header COPY
//!  claim          blank, ours, unfinished, or somebody's             journal + claim sector + header's token
//!  disk
//! ```
//!
//! Only the claim may destroy. What it knows at each point of a creation:
//!
//! ```text
//!  journal (ESP)   disk                                  mount_existing   mount_new
//!  –               blank                                 Absent           starts
//!  UUIDs, format   claim sector, and remains             ForeignData      formats again
//!  UUIDs, format   header with the UUID, no token yet    ForeignData      formats again
//!  UUIDs, …        header with the UUID, unfinished      Unfinished       resumes
//!  –               header, unfinished                    Unfinished       Occupied
//!  any             header, complete                      opens            Occupied
//!  any             anything else                         ForeignData      Occupied
//! ```
//!
//! Keys: `local` slots open with the node unlock key, `split` slots with node and cluster unlock key together, by
//! HKDF; `recovery` slots with a passphrase. See [`KeyPolicy`] for which of them a volume keeps.

mod creation;
mod cryptsetup;
mod description;
mod device;
mod error;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod fake;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod fuzz;
mod header;
mod key;
mod opening;
mod policy;
mod recovery;
pub(crate) mod seal;
mod slots;
mod status;
mod token;
pub(crate) mod tpm;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::disk::{Disk, DiskAccess};
use super::filesystem::{DEFAULT_LABEL, VolumeMount, clean_label};
use super::lifecycle::MountLifecycle;
use super::{DataVolume, ErasePolicy, MountState, VolumeError};
use crate::dir::Dir;
use crate::mount::Mounter;
use device::{CheckedHeader, LuksDevice};
use slots::KeySlots;
use token::{VolumeProgress, VolumeToken};

pub(super) use description::describe_header;

pub use cryptsetup::{
    ActiveMapping, Cryptsetup, CryptsetupCall, CryptsetupError, CryptsetupProgram, WipeProgress,
};
pub use error::LuksError;
pub use header::HeaderError;
pub use key::{InvalidUnlockKey, UnlockKey};
pub use policy::PolicyViolation;
pub use recovery::{InvalidRecoveryPassphrase, RecoveryPassphrase};
pub use seal::{FileSeal, KeySeal, SealError, SealId};
pub use slots::{KeySlotStatus, UnlockSecret};
pub use status::EncryptionStatus;
pub use token::{ColdStart, KeyPolicy, SlotKind, VolumeEncryption};
pub use tpm::{InvalidPcr, PcrSelection, TpmConnection, TpmError, TpmSeal};

/// A volume that keys open.
///
/// # Contract
/// That of [`DataVolume`], whose `mount_new` loses the cluster unlock key, and whose `mount_existing` has the node
/// unlock key alone. A secret that does not open the volume is an error, and changes nothing.
pub trait EncryptedVolume: DataVolume {
    /// Creates an empty volume, mounts it, and returns the cluster unlock key, if the volume needs one: it is not
    /// stored anywhere else. Until it is [confirmed](LuksVolume::confirm_secret), the node unlock key alone opens the
    /// volume, too.
    ///
    /// # Errors
    /// Those of [`DataVolume::mount_new`].
    fn mount_new_with_key(&self, erase: ErasePolicy) -> Result<(Dir, Option<UnlockKey>), VolumeError>;

    /// Opens the volume with a secret, and mounts it.
    ///
    /// # Errors
    /// Those of [`DataVolume::mount_existing`]; [`VolumeError::Encryption`].
    fn mount_existing_with(&self, secret: &UnlockSecret) -> Result<Dir, VolumeError>;
}

/// What a [`LuksVolume`] needs.
#[derive(Debug)]
#[expect(clippy::exhaustive_structs, reason = "the caller fills all fields: a new one is a decision")]
pub struct LuksVolumeConfig {
    /// The disk or partition.
    pub device: PathBuf,
    /// Where it is mounted: the absolute path of an existing directory.
    pub target: PathBuf,
    /// How its blocks are encrypted. A header with another encryption is rejected.
    pub encryption: VolumeEncryption,
    /// Which keys open it, for its creation: an existing volume has recorded that. One that is recorded as
    /// [`Local`](KeyPolicy::Local) is rejected as [`Split`](KeyPolicy::Split): anybody who had the disk can have
    /// changed the record, and the next keys would be weaker.
    pub keys: KeyPolicy,
    /// A durable directory outside of the volume, on the ESP: the journal of the creation.
    pub journal: Dir,
    /// A directory in memory, for root alone: the copy of the header that cryptsetup opens.
    pub runtime: Dir,
    /// Keeps the node unlock key.
    pub seal: Arc<dyn KeySeal>,
    /// Mounts the file system.
    pub mounter: Arc<dyn Mounter>,
    /// Runs cryptsetup.
    pub cryptsetup: Arc<dyn Cryptsetup>,
}

/// Receives the progress of a wipe, about once a second.
type WipeHook = Arc<dyn Fn(WipeProgress) + Send + Sync>;

/// A disk with LUKS2, formatted as XFS and mounted with project quotas.
///
/// AES-256-XTS, with an HMAC-SHA256 of each block if [authenticated](VolumeEncryption::EncryptedAndAuthenticated). An
/// authenticated volume is wiped when it is created, since blocks that were never written can't be read.
pub struct LuksVolume {
    config: LuksVolumeConfig,
    mount: VolumeMount,
    label: String,
    mkfs: PathBuf,
    mapping_name: String,
    node: Option<String>,
    cold_start: ColdStart,
    wipe: bool,
    allow_discards: bool,
    progress: Option<WipeHook>,
    lifecycle: MountLifecycle,
    /// The number of the slot that opened the volume.
    opened_slot: Mutex<Option<u32>>,
}

impl fmt::Debug for LuksVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LuksVolume").field("config", &self.config).finish_non_exhaustive()
    }
}

impl LuksVolume {
    /// A volume on this disk.
    pub fn new(config: LuksVolumeConfig) -> LuksVolume {
        LuksVolume {
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
            lifecycle: MountLifecycle::default(),
            opened_slot: Mutex::default(),
        }
    }

    /// Sets the label of the file system, as [`DiskVolume::with_label`](super::DiskVolume::with_label).
    pub fn with_label(self, label: &str) -> LuksVolume {
        LuksVolume { label: clean_label(label).unwrap_or(self.label), ..self }
    }

    /// Sets the path of `mkfs.xfs`, instead of the first one in `PATH`. `xfs_growfs` is beside it.
    pub fn with_mkfs(self, mkfs: impl Into<PathBuf>) -> LuksVolume {
        LuksVolume { mkfs: mkfs.into(), ..self }
    }

    /// Sets the name of the mapping, instead of `nodekeel-data`: two volumes of one host need different ones.
    pub fn with_mapping_name(self, name: impl Into<String>) -> LuksVolume {
        LuksVolume { mapping_name: name.into(), ..self }
    }

    /// Records in the header which node creates the volume, for people.
    pub fn with_node(self, node: impl Into<String>) -> LuksVolume {
        LuksVolume { node: Some(node.into()), ..self }
    }

    /// Sets how a split volume is opened after a power cut, for its creation, instead of [`ColdStart::Operator`]: an
    /// existing volume has recorded that. One that is recorded as [`Local`](ColdStart::Local) is rejected otherwise, as
    /// in [`LuksVolumeConfig::keys`].
    pub fn with_cold_start(self, cold_start: ColdStart) -> LuksVolume {
        LuksVolume { cold_start, ..self }
    }

    /// Does not wipe an authenticated volume when it is created, which takes hours on large disks: reading a block
    /// that was never written then fails as if somebody had changed it. XFS reads no such block, but other programs
    /// that read the whole mapping do.
    pub fn without_wipe(self) -> LuksVolume {
        LuksVolume { wipe: false, ..self }
    }

    /// Passes discards to the disk. They tell anybody who has the disk which blocks are in use, and so how much data
    /// there is and of what kind of file system. Authenticated volumes can't do it.
    pub fn with_discards(self) -> LuksVolume {
        LuksVolume { allow_discards: true, ..self }
    }

    /// Sets the function that receives the progress of a wipe.
    pub fn with_progress(self, progress: impl Fn(WipeProgress) + Send + Sync + 'static) -> LuksVolume {
        LuksVolume { progress: Some(Arc::new(progress)), ..self }
    }

    /// The path of the device.
    pub fn device_path(&self) -> &Path {
        &self.config.device
    }

    /// Gives the volume new keys: seals a new node unlock key, and adds a key slot. The secret must open the volume.
    ///
    /// A split volume returns its new cluster unlock key. The old slots remain until the caller has stored that key,
    /// and [confirms](Self::confirm_secret) it; a call that was killed is repeated with the old secret, and replaces what it
    /// has left. A recovery passphrase does not say which key the cluster has: with one, the oldest slots remain, and
    /// the keys of rotations that were not confirmed are void. A local volume has only its new key when this returns.
    /// Slots that the header does not name are removed, also those that an operator has added.
    ///
    /// # Errors
    /// [`VolumeError::Encryption`], with the old keys still valid.
    pub fn rotate_keys(&self, secret: &UnlockSecret) -> Result<Option<UnlockKey>, VolumeError> {
        self.with_header(|slots, _, token| slots.rotate(secret, token))
    }

    /// Adds a key slot with a new recovery passphrase, to be shown once. It opens the volume from now on, but is marked as
    /// [unconfirmed](KeySlotStatus::is_unconfirmed) until it is [confirmed](Self::confirm_secret): typed by the person that
    /// has it. Until then, the one before remains, and the next call replaces it, unless it is what permits that call.
    ///
    /// # Errors
    /// [`VolumeError::Encryption`], with nothing changed or an unnamed slot that the next call removes.
    pub fn add_recovery_passphrase(&self, secret: &UnlockSecret) -> Result<RecoveryPassphrase, VolumeError> {
        self.with_header(|slots, _, _| slots.add_recovery(secret))
    }

    /// Confirms that a secret is kept where it has to be: as read back from the cluster, or typed. Checks that it opens
    /// the newest slot of its kind, and removes the slots that it supersedes, those without a name, and, for a
    /// cluster unlock key, the temporary slot of the node unlock key alone; with a [local cold start](ColdStart::Local),
    /// that slot gets the new node unlock key instead. May be repeated.
    ///
    /// # Errors
    /// [`VolumeError::Encryption`]: nothing is removed if the secret does not open its slot, or an older one.
    pub fn confirm_secret(&self, secret: &UnlockSecret) -> Result<(), VolumeError> {
        self.with_header(|slots, _, token| slots.confirm(secret, token))
    }

    /// Grows the mapping and the file system of the mounted volume to the size of the disk.
    ///
    /// # Errors
    /// [`LuksError::Unsupported`] if it is authenticated; [`VolumeError::InvalidState`] unless it is mounted;
    /// [`VolumeError::Grow`].
    pub fn grow_volume(&self, secret: &UnlockSecret) -> Result<(), VolumeError> {
        self.check_support("grow", true)?;
        let state = self.lifecycle.state();
        if state != MountState::Mounted {
            return Err(VolumeError::InvalidState { state });
        }
        self.with_header(|slots, header, _| {
            let opened = slots.open_slot(header, secret)?;
            slots.device.resize(header, &opened.passphrase, &self.mapping_name)
        })?;
        self.mount.grow_file_system(&self.mkfs)
    }

    /// Rejects what an authenticated volume can't do.
    fn check_support(&self, operation: &'static str, is_asked: bool) -> Result<(), VolumeError> {
        let encryption = self.config.encryption;
        if is_asked && encryption == VolumeEncryption::EncryptedAndAuthenticated {
            return Err(self.error(LuksError::Unsupported { operation, encryption }));
        }
        Ok(())
    }

    fn check_keys(&self, token: &VolumeToken) -> Result<(), LuksError> {
        match (self.config.keys, token.keys) {
            (KeyPolicy::Split, KeyPolicy::Local) => Err(LuksError::Policy(PolicyViolation::Keys)),
            (KeyPolicy::Split, KeyPolicy::Split)
                if token.keeps_local_slot() && self.cold_start != ColdStart::Local =>
            {
                Err(LuksError::Policy(PolicyViolation::ColdStart))
            }
            _ => Ok(()),
        }
    }

    /// Runs `work` with the checked header of a complete volume, under the lock of the disk.
    fn with_header<R>(
        &self,
        work: impl FnOnce(&KeySlots<'_>, &CheckedHeader, &VolumeToken) -> Result<R, LuksError>,
    ) -> Result<R, VolumeError> {
        let disk = Disk::open(&self.config.device, DiskAccess::Read)?;
        let slots = self.slots_of(&disk);
        let header = slots.device.check_header().map_err(|error| self.error(error))?;
        match &header.summary.volume {
            Some(token) if token.state == VolumeProgress::Complete => {
                let done = self.check_keys(token).and_then(|()| work(&slots, &header, token));
                done.map_err(|error| self.error(error))
            }
            _ => Err(VolumeError::Unfinished { path: self.config.device.clone() }),
        }
    }

    fn slots_of<'a>(&'a self, disk: &'a Disk) -> KeySlots<'a> {
        let device = LuksDevice {
            disk,
            tool: &*self.config.cryptsetup,
            runtime: &self.config.runtime,
            encryption: self.config.encryption,
        };
        KeySlots { device, seal: &*self.config.seal }
    }

    fn error(&self, error: LuksError) -> VolumeError {
        LuksError::of(&self.config.device)(error)
    }
}

impl DataVolume for LuksVolume {
    fn mount_new(&self, erase: ErasePolicy) -> Result<Dir, VolumeError> {
        self.mount_new_with_key(erase).map(|(top, _)| top)
    }

    fn mount_existing(&self) -> Result<Dir, VolumeError> {
        self.mount_existing_with(&UnlockSecret::Node)
    }

    fn unmount(&self) -> Result<(), VolumeError> {
        let mut closed = Ok(());
        self.lifecycle.unmount(|| {
            self.mount.unmount()?;
            // Where it can't be closed, it is not mounted any more: a caller that took it for mounted would write to the
            // directory below.
            closed = self.close_unmounted();
            Ok(())
        })?;
        closed
    }

    fn state(&self) -> MountState {
        self.lifecycle.state()
    }
}

impl EncryptedVolume for LuksVolume {
    fn mount_new_with_key(&self, erase: ErasePolicy) -> Result<(Dir, Option<UnlockKey>), VolumeError> {
        let mut cluster_key = None;
        let top = self.lifecycle.mount(|| {
            let (top, key) = self.create_volume(&erase)?;
            cluster_key = key;
            Ok(top)
        })?;
        Ok((top, cluster_key))
    }

    fn mount_existing_with(&self, secret: &UnlockSecret) -> Result<Dir, VolumeError> {
        self.lifecycle.mount(|| self.open_volume(secret))
    }
}

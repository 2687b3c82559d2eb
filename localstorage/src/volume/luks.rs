//! Encrypted volumes: LUKS2 by the cryptsetup program, opened by the node and its cluster together.
//!
//! ```text
//!  layer          decides                                            here
//!  file system    XFS with project quotas, on a fresh device         mkfs.xfs on the mapping
//!  mapping        none, or LUKS2 by a header that was checked        cryptsetup open --header COPY
//!  claim          blank, ours, unfinished, or foreign                journal + claim sector + header's token
//!  disk
//! ```
//!
//! Only the claim may destroy. At each point of a creation it finds:
//!
//! ```text
//!  journal (ESP)   disk                                  mount_existing   mount_new
//!  –               blank: all of it was read             Absent           starts
//!  UUIDs, format   claim sector, and remains             ForeignData      formats again
//!  UUIDs, format   header with the UUID, no token yet    ForeignData      formats again
//!  UUIDs, …        header with the UUID, unfinished      Unfinished       resumes, a wipe where it was
//!  –               header, unfinished                    Unfinished       Occupied
//!  any             header, complete                      opens            Occupied
//!  any             anything else                         ForeignData      Occupied
//! ```
//!
//! A re-encryption gives the data another volume key, piece by piece and below the open file system; see
//! [`LuksVolume::begin_reencryption`]. Killed at any point, the header tells which pieces have which key.
//!
//! Keys: `local` slots open with the node unlock key, `split` slots with node and cluster unlock key together, by
//! HKDF; `recovery` slots with a passphrase. See [`KeyPolicy`] for which of them a volume keeps.

mod copy;
mod creation;
mod cryptsetup;
mod device;
mod error;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod fake;
mod header;
mod header_file;
mod key;
mod key_slots;
mod opening;
pub(crate) mod policy;
mod recovery;
mod reencryption;
mod reencryption_run;
mod rollback;
pub(crate) mod seal;
mod settings;
mod slot_kind;
mod status;
mod token;
pub(crate) mod tpm;
mod wipe;

use std::fmt;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::disk::DiskAccess;
use super::filesystem::clean_label;
use super::identity::DiskIdentity;
use super::lifecycle::MountLifecycle;
use super::reading::{ReadingHook, ReadingProgress};
use super::{DataVolume, ErasePolicy, MountState, VolumeError};
use crate::dir::Dir;
use creation::LuksCreation;
use device::CheckedHeader;
use header::HEADER_AREA_BYTES;
use header_file::HeaderFiles;
use key_slots::{KeySlots, describe_slots, needs_confirmation};
use opening::LuksOpening;
use reencryption_run::ReencryptionRun;
use settings::LuksSettings;

pub(super) use device::read_volume_of;
pub(super) use token::{VolumeProgress, VolumeToken};

pub use copy::{CopyCommit, CopyProgress, CopySource, UnreadableBlocks};
pub use cryptsetup::{ActiveMapping, Cryptsetup, CryptsetupCall, CryptsetupError, CryptsetupProgram};
pub use error::LuksError;
pub use header::HeaderError;
pub use header_file::HeaderBackup;
pub use key::{InvalidUnlockKey, UnlockKey};
pub use key_slots::UnlockSecret;
pub use policy::PolicyViolation;
pub use recovery::{InvalidRecoveryPassphrase, RecoveryPassphrase};
pub use reencryption_run::ReencryptionEnd;
pub use rollback::{HeaderGenerations, HeaderRollback};
pub use seal::{FileSeal, KeySeal, SealError, SealId};
pub use settings::LuksVolumeConfig;
pub use slot_kind::{KeySlotStatus, SlotKind};
pub use status::{EncryptionStatus, ReencryptionProgress};
pub use token::{ColdStart, KeyPolicy, VolumeEncryption};
pub use tpm::{
    InvalidPcr, InvalidPublicKey, PcrPublicKey, PcrSelection, PcrSignatureError, PcrSignatures, SignedPcrs,
    TpmConnection, TpmError, TpmSeal,
};
pub use wipe::WipeProgress;

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

/// A disk with LUKS2, formatted as XFS and mounted with project quotas.
///
/// AES-256-XTS, with an HMAC-SHA256 of each block if [authenticated](VolumeEncryption::EncryptedAndAuthenticated). An
/// authenticated volume is wiped when it is created, since blocks that were never written can't be read.
pub struct LuksVolume {
    settings: LuksSettings,
    lifecycle: MountLifecycle,
    /// The number of the slot that opened the volume.
    opened_slot: Mutex<Option<u32>>,
}

impl fmt::Debug for LuksVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LuksVolume").field("config", &self.settings.config).finish_non_exhaustive()
    }
}

impl LuksVolume {
    /// A volume on this disk.
    pub fn new(config: LuksVolumeConfig) -> LuksVolume {
        LuksVolume {
            settings: LuksSettings::new(config),
            lifecycle: MountLifecycle::default(),
            opened_slot: Mutex::default(),
        }
    }

    /// Sets the label of the file system, as [`DiskVolume::with_label`](super::DiskVolume::with_label).
    pub fn with_label(mut self, label: &str) -> LuksVolume {
        if let Some(label) = clean_label(label) {
            self.settings.label = label;
        }
        self
    }

    /// Sets the path of `mkfs.xfs`, instead of the first one in `PATH`. `xfs_growfs` is in the same directory.
    pub fn with_mkfs(mut self, mkfs: impl Into<PathBuf>) -> LuksVolume {
        self.settings.mkfs = mkfs.into();
        self
    }

    /// Sets the name of the mapping, instead of `nodekeel-data`: two volumes of one host need different ones.
    pub fn with_mapping_name(mut self, name: impl Into<String>) -> LuksVolume {
        self.settings.mapping_name = name.into();
        self
    }

    /// Records in the header which node creates the volume, for people.
    pub fn with_node(mut self, node: impl Into<String>) -> LuksVolume {
        self.settings.node = Some(node.into());
        self
    }

    /// Sets how a split volume is opened after a power cut, for its creation, instead of [`ColdStart::Operator`]: an
    /// existing volume has recorded that. One that is recorded as [`Local`](ColdStart::Local) is rejected otherwise, as
    /// in [`LuksVolumeConfig::keys`].
    pub fn with_cold_start(mut self, cold_start: ColdStart) -> LuksVolume {
        self.settings.cold_start = cold_start;
        self
    }

    /// Does not wipe an authenticated volume when it is created, which takes hours on large disks: reading a block
    /// that was never written then fails as if a thief had changed it. XFS reads no such block, but other programs
    /// that read the whole mapping do.
    pub fn without_wipe(mut self) -> LuksVolume {
        self.settings.wipe = false;
        self
    }

    /// Passes discards to the disk. They show a thief of the disk which blocks are in use, and so how much data there
    /// is and of what kind of file system. Authenticated volumes can't do it.
    pub fn with_discards(mut self) -> LuksVolume {
        self.settings.allow_discards = true;
        self
    }

    /// Sets the function that receives the progress of a wipe, many times a second, and cancels it by `Break`: the next
    /// creation resumes it.
    pub fn with_progress(
        mut self,
        progress: impl Fn(WipeProgress) -> ControlFlow<()> + Send + Sync + 'static,
    ) -> LuksVolume {
        self.settings.progress = Some(Arc::new(progress));
        self
    }

    /// Uses no other disk at this path than the one that was inspected.
    pub fn expecting(mut self, disk: DiskIdentity) -> LuksVolume {
        self.settings.device.identity = Some(disk);
        self
    }

    /// Sets the function that receives the progress of the reading of a whole disk, before it counts as blank, and
    /// cancels it by `Break`.
    pub fn with_reading_progress(
        mut self,
        progress: impl Fn(ReadingProgress) -> ControlFlow<()> + Send + Sync + 'static,
    ) -> LuksVolume {
        self.settings.reading_hook = Some(ReadingHook(Arc::new(progress)));
        self
    }

    /// Reads the whole disk, if only that shows whether it is blank. A [`mount_new`](DataVolume::mount_new) does it as
    /// well.
    ///
    /// # Errors
    /// [`VolumeError::Occupied`] if it has data; [`VolumeError::ReadingCanceled`], [`VolumeError::Device`].
    pub fn read_disk(&self) -> Result<(), VolumeError> {
        self.settings.device.read_disk(self.settings.reading())
    }

    /// The path of the device.
    pub fn device_path(&self) -> &Path {
        &self.settings.config.device
    }

    /// Gives the volume new keys: seals a new node unlock key, and adds a key slot. The secret must open the volume.
    ///
    /// A split volume returns its new cluster unlock key. The old slots remain until the caller has stored that key,
    /// and [confirms](Self::confirm_secret) it; a call that was killed is repeated with the old secret, and replaces what it
    /// has left. A recovery passphrase does not tell which key the cluster has: with one, the oldest slots remain, and
    /// the keys of rotations that were not confirmed are void. A local volume has only its new key when this returns.
    /// Slots that an operator has added stay, see [`KeySlotStatus::name`].
    ///
    /// # Errors
    /// [`VolumeError::Encryption`], with the old keys still valid.
    pub fn rotate_keys(&self, secret: &UnlockSecret) -> Result<Option<UnlockKey>, VolumeError> {
        self.with_settled_header("rotate the keys", |slots, token| slots.rotate(secret, token))
    }

    /// Adds a key slot with a new recovery passphrase, to be shown once. It opens the volume from now on, but is marked as
    /// [unconfirmed](KeySlotStatus::is_unconfirmed) until it is [confirmed](Self::confirm_secret): typed by the person that
    /// has it. Until then, the one before remains, and the next call replaces it, unless it is what permits that call.
    ///
    /// # Errors
    /// [`VolumeError::Encryption`], with nothing changed or an unnamed slot that the next call removes.
    pub fn add_recovery_passphrase(&self, secret: &UnlockSecret) -> Result<RecoveryPassphrase, VolumeError> {
        self.with_settled_header("add a passphrase", |slots, _| slots.add_recovery(secret))
    }

    /// Confirms that a secret is kept where it has to be: as read back from the cluster, or typed. Checks that it opens
    /// the newest slot of its kind, and removes the slots that it supersedes, those of interrupted rotations, and, for a
    /// cluster unlock key, the temporary slot of the node unlock key alone; with a [local cold start](ColdStart::Local),
    /// that slot gets the new node unlock key instead. May be repeated.
    ///
    /// # Errors
    /// [`VolumeError::Encryption`]: nothing is removed if the secret does not open its slot, or an older one.
    pub fn confirm_secret(&self, secret: &UnlockSecret) -> Result<(), VolumeError> {
        self.with_settled_header("confirm a key", |slots, token| slots.confirm(secret, token))
    }

    /// Begins to re-encrypt the data with a new volume key: adds key slots for it, and encrypts nothing yet. Each secret keeps
    /// the slots that it opens. A slot whose secret is not given is lost, and so it has to be among those that may go. No header
    /// of before opens the data, once the re-encryption is complete. One that was begun already is left as it is.
    ///
    /// # Errors
    /// [`LuksError::Unsupported`] if the volume is authenticated; [`LuksError::UnknownSlots`], with nothing changed;
    /// [`VolumeError::Encryption`].
    pub fn begin_reencryption(&self, secrets: &[UnlockSecret], may_go: &[u32]) -> Result<(), VolumeError> {
        self.settings.check_support("re-encrypt")?;
        self.with_header(|slots, header, _| match header.summary.reencryption {
            Some(_) => Ok(()),
            None => slots.begin_reencryption(header, secrets, may_go),
        })
    }

    /// Checks what [`begin_reencryption`](Self::begin_reencryption) checks, and changes nothing.
    ///
    /// # Errors
    /// Those of `begin_reencryption`.
    pub fn check_reencryption(&self, secrets: &[UnlockSecret], may_go: &[u32]) -> Result<(), VolumeError> {
        self.settings.check_support("re-encrypt")?;
        self.with_header(|slots, header, _| match header.summary.reencryption {
            Some(_) => Ok(()),
            None => slots.plan_reencryption(header, secrets, may_go).map(drop),
        })
    }

    /// Continues a re-encryption to its end, which takes hours, below the volume if it is open. `report` receives the progress,
    /// twice a second, and stops it by `Break`: the next call continues it. So does the death of this process.
    ///
    /// # Errors
    /// [`LuksError::ReencryptionKilled`] if the volume is to be closed now, and opened again; [`VolumeError::Encryption`], after
    /// which a call continues it.
    pub fn run_reencryption(
        &self,
        secret: &UnlockSecret,
        report: impl FnMut(ReencryptionProgress) -> ControlFlow<()>,
    ) -> Result<ReencryptionEnd, VolumeError> {
        ReencryptionRun(&self.settings).run(secret, report)
    }

    /// Grows the mapping and the file system of the mounted volume to the size of the disk.
    ///
    /// # Errors
    /// [`LuksError::Unsupported`] if it is authenticated; [`VolumeError::InvalidState`] unless it is mounted;
    /// [`VolumeError::Grow`].
    pub fn grow_volume(&self, secret: &UnlockSecret) -> Result<(), VolumeError> {
        self.settings.check_support("grow")?;
        let state = self.lifecycle.state();
        if state != MountState::Mounted {
            return Err(VolumeError::InvalidState { state });
        }
        self.with_settled_header("grow the volume", |slots, _| {
            let header = &slots.device.check_header()?;
            let opened = slots.open_slot(header, secret)?;
            slots.device.resize(header, &opened.passphrase, &self.settings.mapping_name)
        })?;
        // Last: the file system can't grow beyond its mapping.
        // A repetition completes a call that was killed in between.
        self.settings.mount.grow_file_system(&self.settings.mkfs)
    }

    /// Creates the volume as a copy of another one, and mounts it: on a blank disk, with a volume key and unlock keys of its own,
    /// which open nothing of the other disk, as its keys open nothing of this one. The file system takes all of the disk,
    /// which has to be at least as large. The other volume stays as it is; nothing may use it meanwhile.
    ///
    /// A call that was killed or canceled is repeated: it compares what is copied with what the other volume has then. Blocks
    /// of an authenticated volume that can't be read are left out, and can't be read in the copy either. Returns the
    /// cluster unlock key as [`mount_new_with_key`](EncryptedVolume::mount_new_with_key).
    ///
    /// # Errors
    /// Those of opening the other volume, with nothing written; those of a creation; [`VolumeError::CopyCanceled`];
    /// [`LuksError::CopyTooSmall`], [`LuksError::Commit`].
    pub fn mount_copy(
        &self,
        source: &CopySource<'_>,
    ) -> Result<(Dir, Option<UnlockKey>, UnreadableBlocks), VolumeError> {
        let mut unreadable = UnreadableBlocks::default();
        let (top, key) = self.mount_created(|creation| {
            let (top, key, left_out) = creation.copy_volume(source)?;
            unreadable = left_out;
            Ok((top, key))
        })?;
        Ok((top, key, unreadable))
    }

    /// Completes a [copy](Self::mount_copy) that was committed as this volume, and mounts it.
    ///
    /// # Errors
    /// Those of a creation; [`VolumeError::Absent`] unless the disk has that copy, unfinished.
    pub fn mount_copied(&self, volume: &str) -> Result<(Dir, Option<UnlockKey>), VolumeError> {
        self.mount_created(|creation| creation.complete_copy(volume))
    }

    fn mount_created(
        &self,
        create: impl FnOnce(LuksCreation<'_>) -> Result<(Dir, Option<UnlockKey>), VolumeError>,
    ) -> Result<(Dir, Option<UnlockKey>), VolumeError> {
        let mut cluster_key = None;
        let top = self.lifecycle.mount(|| {
            let creation = LuksCreation { settings: &self.settings, opening: self.opening() };
            let (top, key) = create(creation)?;
            // The lifecycle returns only the directory, so the key leaves the closure by this variable.
            cluster_key = key;
            Ok(top)
        })?;
        Ok((top, cluster_key))
    }

    /// Mounts the volume by the mapping that an earlier process has left open, which needs no key; none if it is
    /// not open. A process that was killed, or that could not unmount the volume, leaves one.
    ///
    /// # Errors
    /// Those of [`mount_existing_with`](EncryptedVolume::mount_existing_with), but for those of keys.
    pub fn mount_active(&self) -> Result<Option<Dir>, VolumeError> {
        let opening = self.opening();
        // The identifier of a mapping contains the UUID, so the mapping of another volume is not taken for this one.
        if opening.find_active_mapping()?.is_none() {
            return Ok(None);
        }
        // A mapping in which a killed cryptsetup has left a piece is closed, and opened again by a secret.
        if ReencryptionRun(&self.settings).fail_left_hot_zone()? {
            self.settings.mount.unmount()?;
            opening.close_unmounted()?;
            return Ok(None);
        }
        self.lifecycle.mount(|| opening.mount_complete()).map(Some)
    }

    /// The identity of the open mapping of this volume, which this process, an earlier one, or another program has opened;
    /// none if it is not open. One that is opened later has another identity.
    ///
    /// # Errors
    /// Those of [`mount_active`](Self::mount_active), but for those of the mount.
    pub fn active_mapping(&self) -> Result<Option<DiskIdentity>, VolumeError> {
        let Some(mapping) = self.opening().find_active_mapping()? else { return Ok(None) };
        let identity = DiskIdentity::of(&self.settings.open_mapping_device(&mapping)?);
        identity.map(Some).map_err(|source| self.settings.mapping_error(&mapping, source))
    }

    /// The name of the mapping.
    pub fn mapping_name(&self) -> &str {
        &self.settings.mapping_name
    }

    /// Reads the encryption and the key slots from the header.
    ///
    /// # Errors
    /// [`VolumeError::Encryption`] if no header meets the policy; [`VolumeError::Device`].
    pub fn encryption_status(&self) -> Result<EncryptionStatus, VolumeError> {
        self.with_header(|slots, header, token| {
            let opened = *self.opened_slot.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(EncryptionStatus {
                volume: header.uuid.to_string(),
                encryption: token.encryption,
                keys: token.keys,
                cold_start: token.cold_start(),
                is_unwiped: token.unwiped,
                node: token.node.clone(),
                has_both_headers: header.has_both_copies,
                slots: describe_slots(&header.summary, token, opened),
                rollback: slots.rollback(header)?,
                foreign_tokens: header
                    .summary
                    .foreign_tokens
                    .iter()
                    .map(|(at, kind)| format!("{at} {kind}"))
                    .collect(),
                needs_confirmation: needs_confirmation(&header.summary, token),
                reencryption: header.summary.reencryption.map(|state| {
                    let total_bytes = slots.device.disk.size().saturating_sub(HEADER_AREA_BYTES);
                    ReencryptionProgress { done_bytes: state.done_bytes.min(total_bytes), total_bytes }
                }),
            })
        })
    }

    /// Copies the header, after it was checked: both copies of the metadata are correct in the backup.
    ///
    /// # Errors
    /// [`VolumeError::Encryption`] if no header meets the policy; [`VolumeError::Device`].
    pub fn back_up_header(&self) -> Result<HeaderBackup, VolumeError> {
        self.with_settled_header("copy the header", |slots, _| {
            Ok(HeaderBackup(slots.device.check_header()?.area))
        })
    }

    /// Writes a header of this volume to its disk, after it was checked like that of a disk, and a secret has opened one of
    /// its slots. The caller checks that the volume of the backup is the one that belongs to the disk: the header there may be
    /// that of another disk. A call that was killed is repeated. Returns the generations of the header.
    ///
    /// # Errors
    /// [`VolumeError::Encryption`]: [`LuksError::OlderBackup`] unless that is allowed; [`LuksError::HeaderInUse`] if the
    /// volume is open, and its header another one; an error of the backup, with nothing written; [`LuksError::WriteHeader`].
    pub fn restore_header(
        &self,
        backup: &HeaderBackup,
        secret: &UnlockSecret,
        allow_older: bool,
    ) -> Result<HeaderGenerations, VolumeError> {
        HeaderFiles(&self.settings).restore(backup, secret, allow_older)
    }

    /// The generation of the newest slot that a secret opens; `None` if the secret opens none of its kind.
    ///
    /// # Errors
    /// [`VolumeError::Encryption`]: it can't be tried, as where the node unlock key is missing; [`VolumeError::Device`].
    pub fn test_secret(&self, secret: &UnlockSecret) -> Result<Option<u32>, VolumeError> {
        self.with_header(|slots, header, _| match slots.open_slot(header, secret) {
            Ok(opened) => Ok(Some(opened.generation)),
            // A wrong secret is the answer; any other error leaves the question open.
            Err(error) if error.is_wrong_secret() => Ok(None),
            Err(error) => Err(error),
        })
    }

    /// Runs what changes or copies the header of a volume that is not being re-encrypted.
    fn with_settled_header<R>(
        &self,
        operation: &'static str,
        work: impl FnOnce(&KeySlots<'_>, &VolumeToken) -> Result<R, LuksError>,
    ) -> Result<R, VolumeError> {
        self.with_header(|slots, header, token| match header.summary.reencryption {
            // cryptsetup refuses most of it, and would remove a slot that the other key needs.
            Some(_) => Err(LuksError::Reencrypting { operation }),
            None => work(slots, token),
        })
    }

    /// Runs `work` with the checked header of a complete volume, under the lock of the disk.
    fn with_header<R>(
        &self,
        work: impl FnOnce(&KeySlots<'_>, &CheckedHeader, &VolumeToken) -> Result<R, LuksError>,
    ) -> Result<R, VolumeError> {
        let device = &self.settings.config.device;
        // The lock of the open disk serializes changes of its header. Read access suffices, since cryptsetup
        // opens the disk itself; udev would probe a disk that this process had open to write.
        let disk = self.settings.open_disk(DiskAccess::Read)?;
        let slots = self.settings.slots_of(&disk);
        let header = slots.device.check_header().map_err(|error| self.settings.error(error))?;
        match &header.summary.volume {
            // Until the volume is complete, only its creation changes its slots.
            Some(token) if token.state == VolumeProgress::Complete => {
                let done = self.settings.check_keys(token).and_then(|()| work(&slots, &header, token));
                done.map_err(|error| self.settings.error(error))
            }
            _ => Err(VolumeError::Unfinished { path: device.clone() }),
        }
    }

    fn opening(&self) -> LuksOpening<'_> {
        LuksOpening { settings: &self.settings, opened_slot: &self.opened_slot }
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
            self.settings.mount.unmount()?;
            // If closing fails, the volume is unmounted all the same: a caller that took it for mounted would write to
            // the directory below.
            closed = self.opening().close_unmounted();
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
        self.mount_created(|creation| creation.create_volume(&erase))
    }

    fn mount_existing_with(&self, secret: &UnlockSecret) -> Result<Dir, VolumeError> {
        self.lifecycle.mount(|| self.opening().open_volume(secret))
    }
}

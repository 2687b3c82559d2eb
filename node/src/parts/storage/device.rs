//! The data volume on a disk or partition: found, decided upon, opened or created, and grown.

use std::error::Error;
use std::fmt;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::mount::OsMounter;
use nodekeel_localstorage::volume::{
    CopySource, CryptsetupProgram, DataVolume, DiskFinding, DiskIdentity, DiskReport, DiskVolume,
    EncryptedVolume as _, ErasePolicy, FileSeal, HeaderBackup, KeySeal, LuksVolume, LuksVolumeConfig,
    MountState, ReadingProgress, RecoveryPassphrase, SlotKind, UnlockSecret, UnreadableBlocks,
    VolumeContents, VolumeEncryption, VolumeError, inspect_disk,
};

use super::adoption::{has_opened, record_opening};
use super::config::device::{DeviceConfig, EncryptionConfig, SealConfig};
use super::decision::{Attempt, DiskStep, Expectation, ExpectedCopy, decide_step, may_complete};
use super::error::StorageError;
use super::faults::VolumeFaults;
use super::gap::clear_mount_point;
use super::identity::{RecordedVolume, forget_volume, settle_identity};
use super::location::{FoundDevice, find_device, resume_growth};
use super::reading::{ReadingSpeed, ReadingStatus};
use super::record::VolumeRecord;
use super::tpm_seal::new_tpm_seal;
use super::unlock::{CreationWork, VolumeUnlock};
use crate::device_faults::{DeviceFault, FaultKind};
use crate::error_chain::error_chain;
use crate::layout::{ESP_DIR, VOLUME_DIR};
use crate::program_name::program_name;

/// The name of the mapping of a volume while it is copied.
const FORMER_MAPPING: &str = "nodekeel-data-former";

/// The programs that format and open a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VolumePrograms {
    pub(super) mkfs: PathBuf,
    pub(super) cryptsetup: PathBuf,
}

/// A volume on a device.
#[derive(Debug, Clone)]
pub(super) enum DeviceVolume {
    Plain(Arc<DiskVolume>),
    Encrypted(Arc<LuksVolume>),
}

impl DeviceVolume {
    /// Reads the whole disk, if only that shows whether it is blank.
    fn read_disk(&self) -> Result<(), VolumeError> {
        match self {
            Self::Plain(volume) => volume.read_disk(),
            Self::Encrypted(volume) => volume.read_disk(),
        }
    }

    fn as_volume(&self) -> Arc<dyn DataVolume> {
        match self {
            Self::Plain(volume) => Arc::clone(volume) as _,
            Self::Encrypted(volume) => Arc::clone(volume) as _,
        }
    }
}

#[derive(Debug)]
pub(super) struct OpenedVolume {
    pub(super) volume: Arc<dyn DataVolume>,
    pub(super) dir: Dir,
    /// The kind of key slot that opened it; `None` if it is not encrypted, or was open.
    pub(super) slot: Option<SlotKind>,
    /// The blocks that its copy, in this attempt, has left out.
    pub(super) left_out: UnreadableBlocks,
}

/// Why a volume is smaller than its disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SizeProblem {
    /// It could not be grown.
    Failed(String),
    /// Its partition stays as it is, since its volume can't grow.
    UnusedRoom { bytes: u64 },
}

impl fmt::Display for SizeProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => f.write_str(error),
            Self::UnusedRoom { bytes } => write!(
                f,
                "{} MiB behind its partition stay unused: can't grow a volume that is encrypted and authenticated",
                bytes >> 20
            ),
        }
    }
}

/// Opens the volume on a device, again and again.
#[derive(Debug)]
pub(super) struct DeviceOpener {
    pub(super) config: DeviceConfig,
    pub(super) programs: VolumePrograms,
    /// The name of the node.
    pub(super) node: String,
    /// The data directory, by its real path.
    pub(super) data: Dir,
    pub(super) esp: Dir,
    /// A directory for root alone, for copies of headers.
    pub(super) runtime: Dir,
    pub(super) unlock: Arc<VolumeUnlock>,
    /// The volume of the last attempt, and what opened it. It is still mounted if it could not be unmounted.
    pub(super) last: Mutex<Option<(DeviceVolume, Option<SlotKind>)>>,
    /// The problem of the open volume's size.
    pub(super) size_problem: Mutex<Option<SizeProblem>>,
    /// The data that a reading of the whole disk has found last.
    pub(super) read: Mutex<Option<VolumeContents>>,
    /// The disk from which the open volume was copied, if it still has one.
    pub(super) former: Mutex<Option<PathBuf>>,
}

impl DeviceOpener {
    /// Opens the volume with a secret, if it is encrypted, or creates it on a blank disk, which takes as long as reading all
    /// of it. It blocks.
    pub(super) fn open(
        &self,
        secret: &UnlockSecret,
        attempt: Attempt<'_>,
    ) -> Result<OpenedVolume, StorageError> {
        if let Some((volume, opened)) = self.reopen_mounted()? {
            // It grows while it is in use. What keeps it from that keeps nobody from using it.
            if attempt != Attempt::Open {
                self.grow_mounted_or_warn(&volume, secret);
            }
            return Ok(opened);
        }
        // Until a growth that was cut off is complete, the kernel does not show the partition.
        resume_growth(&self.config.location).map_err(StorageError::Find)?;
        let found = find_device(&self.config.location)?;
        clear_mount_point(&self.data, attempt != Attempt::Open)?;
        // Decide before anything is written: by the disk, the configuration and the record.
        let record = read_record(&self.esp)?;
        let mut report = inspect_disk(&found.path).map_err(StorageError::Open)?;
        let sampled = report.contents.clone();
        let sampled = Some(&sampled).filter(|_| report.volume == DiskFinding::Unread);
        let erase_permit = attempt.erase_permit();
        // The volume checks that the whole disk still has the contents whose token was given.
        let is_given = |read: &VolumeContents| read.erase_token().as_deref() == erase_permit;
        if let Some(read) =
            lock(&self.read).clone().filter(|_| report.volume == DiskFinding::Unread).filter(is_given)
        {
            report.contents = read;
        }
        let expected = expect_device(&self.config, &found.path, record.clone(), &report);
        let source = expected.copy.as_ref().and_then(|copy| copy.report.as_ref().ok()).cloned();
        let step = decide_step(&report, Expectation { erase_permit, ..expected })?;
        if attempt == Attempt::Open && step != DiskStep::Open {
            return Err(match (step, self.configured_source()) {
                (DiskStep::Copy | DiskStep::CompleteCopy, Some(from)) => {
                    StorageError::Uncopied { device: found.path, from: from.to_owned() }
                }
                _ => StorageError::NoVolume,
            });
        }
        let volume = self.new_volume(&found.path, &report)?;
        // Remembered before it is opened: a failed attempt may leave it mounted.
        *lock(&self.last) = Some((volume.clone(), None));
        // The partition grows first, so that the new volume takes all of it; but that of another owner stays as it is, and a
        // token names the partition as it is: an erased one grows at the next start.
        if matches!(step, DiskStep::Create | DiskStep::Copy)
            && report.volume == DiskFinding::Unread
            && found.growable_bytes() > 0
        {
            volume.read_disk().map_err(|error| self.creation_error(error, sampled))?;
            found.grow_partition();
        }
        let opened = match step {
            DiskStep::Open => match self.mount_existing(&volume, secret) {
                // The creation was cut off before its last step: the volume has no data, and is not the one that the node
                // has had.
                Err(VolumeError::Unfinished { .. }) if !may_complete(record.as_ref()) => {
                    let (device, report) = (found.path.clone(), Box::new(report.clone()));
                    Err(StorageError::Lost { device, report })
                }
                Err(VolumeError::Unfinished { .. }) if attempt == Attempt::Open => {
                    Err(StorageError::NoVolume)
                }
                Err(VolumeError::Unfinished { .. }) => self.create(&volume, sampled, ErasePolicy::Nothing),
                opened => opened.map_err(|error| Self::opening_error(&volume, error)),
            },
            DiskStep::Create => self.create(&volume, sampled, ErasePolicy::Nothing),
            DiskStep::Erase => {
                // The record comes before the erasure: after a kill, the blank disk does not count as a lost
                // volume.
                VolumeRecord::of_given_up(&report).write_to(&self.esp)?;
                forget_volume(&self.esp)?;
                self.create(&volume, sampled, ErasePolicy::Exactly(report.contents.clone()))
            }
            DiskStep::Copy | DiskStep::CompleteCopy => {
                let recorded = record.as_ref().and_then(|record| record.volume.clone()).unwrap_or_default();
                let source = source.filter(|_| step == DiskStep::Copy);
                self.copy(&volume, &report, source.as_ref(), &recorded, secret)
            }
        }?;
        *lock(&self.last) = Some((volume.clone(), opened.slot));
        *lock(&self.former) = self.find_former(&report.identity);
        // Before anything more is written to it, or of it.
        if let Err(error) = settle_identity(&self.esp, &opened.dir, attempt) {
            let OpenedVolume { volume, dir, .. } = opened;
            drop(dir);
            // One that can't be unmounted is found mounted by the next attempt, and refused again.
            let _ = volume.unmount();
            return Err(error);
        }
        if attempt == Attempt::Open {
            return Ok(opened);
        }
        // Only after the volume has opened is the partition known to be the node's.
        if step == DiskStep::Open && !self.is_authenticated() {
            found.grow_partition();
        }
        let known = record.filter(|_| step == DiskStep::Open).and_then(|record| record.disk_bytes);
        self.use_whole_disk(&volume, found, &report, known, secret)?;
        Ok(opened)
    }

    /// Grows the volume that is open, if its disk has grown.
    pub(super) fn follow_size(&self, secret: &UnlockSecret) {
        if let Some((volume, _)) = lock(&self.last).clone() {
            self.grow_mounted_or_warn(&volume, secret);
        }
    }

    fn grow_mounted_or_warn(&self, volume: &DeviceVolume, secret: &UnlockSecret) {
        if let Err(error) = self.grow_mounted(volume, secret) {
            tracing::warn!("can't see whether the disk has grown: {}", error_chain(&error));
        }
    }

    /// Grows the volume that is mounted, if its disk has grown.
    fn grow_mounted(&self, volume: &DeviceVolume, secret: &UnlockSecret) -> Result<(), StorageError> {
        let found = find_device(&self.config.location)?;
        let report = inspect_disk(&found.path).map_err(StorageError::Open)?;
        let record = read_record(&self.esp)?;
        let known = record.as_ref().and_then(|record| record.disk_bytes);
        // What is mounted may not be what the path leads to by now.
        let may_be_of = |record: VolumeRecord| record.is_of(&report) && known <= Some(report.size_bytes);
        if !record.is_some_and(may_be_of) {
            return Err(StorageError::Open(VolumeError::Replaced { path: found.path }));
        }
        if !self.is_authenticated() {
            found.grow_partition();
        }
        self.use_whole_disk(volume, found, &report, known, secret)
    }

    /// Grows the volume to the size of its disk or partition, and records that. Authenticated volumes can't grow.
    fn use_whole_disk(
        &self,
        volume: &DeviceVolume,
        found: FoundDevice,
        before: &DiskReport,
        known: Option<u64>,
        secret: &UnlockSecret,
    ) -> Result<(), StorageError> {
        let room = if self.is_authenticated() { found.growable_bytes() } else { 0 };
        // The size is read again: the partition may have grown.
        let report = inspect_disk(&found.path).map_err(StorageError::Open)?;
        if report.identity != before.identity {
            return Err(StorageError::Open(VolumeError::Replaced { path: found.path }));
        }
        let has_grown = known.is_some_and(|known| known < report.size_bytes);
        let failure = has_grown.then(|| self.grow(volume, secret).err()).flatten();
        // The record is written last: until then, each attempt grows the volume again.
        let record = VolumeRecord::of_disk(&report);
        if failure.is_none() && VolumeRecord::read_from(&self.esp)?.as_ref() != Some(&record) {
            record.write_to(&self.esp)?;
        }
        let unused = (room > 0).then_some(SizeProblem::UnusedRoom { bytes: room });
        self.set_size_problem(failure.map(SizeProblem::Failed).or(unused));
        Ok(())
    }

    /// The node runs also on a volume that is smaller than its disk.
    fn set_size_problem(&self, problem: Option<SizeProblem>) {
        let mut last = lock(&self.size_problem);
        // Attempts are repeated, and what they find is told once.
        if let Some(problem) = problem.as_ref().filter(|problem| last.as_ref() != Some(problem)) {
            tracing::warn!("the data volume is smaller than its disk: {problem}");
        }
        *last = problem;
    }

    fn is_authenticated(&self) -> bool {
        let encryption = self.config.encryption.as_ref().map(|config| config.encryption);
        encryption == Some(VolumeEncryption::EncryptedAndAuthenticated)
    }

    /// Uses a volume that is still mounted, since something uses it that noded does not stop.
    fn reopen_mounted(&self) -> Result<Option<(DeviceVolume, OpenedVolume)>, StorageError> {
        let Some((last, slot)) = lock(&self.last).clone() else { return Ok(None) };
        let volume = last.as_volume();
        match (volume.unmount(), volume.state()) {
            // With an error: its mapping is in use, and is used as it is open.
            (_, MountState::Unmounted) => Ok(None),
            (Err(_), MountState::Mounted) => {
                let dir = Dir::open(self.target()).map_err(StorageError::Directory)?;
                let left_out = UnreadableBlocks::default();
                Ok(Some((last, OpenedVolume { volume, dir, slot, left_out })))
            }
            (Err(error), _) => Err(StorageError::Open(error)),
            (Ok(()), _) => Ok(None),
        }
    }

    /// Records that the operator gave up what the disk has: the next attempt names the token that erases it.
    pub(super) fn give_up_volume(&self) -> Result<(), StorageError> {
        let found = find_device(&self.config.location)?;
        let report = inspect_disk(&found.path).map_err(StorageError::Open)?;
        VolumeRecord::of_given_up(&report).write_to(&self.esp)?;
        forget_volume(&self.esp)
    }

    /// Writes a header of the node's volume to its disk. The node's own key opens it, or the given passphrase. It blocks.
    pub(super) fn restore_header(
        &self,
        backup: &HeaderBackup,
        passphrase: Option<RecoveryPassphrase>,
        allow_older: bool,
    ) -> Result<(), StorageError> {
        let config = self.config.encryption.as_ref().ok_or(StorageError::NotEncrypted)?;
        let found = find_device(&self.config.location)?;
        let report = inspect_disk(&found.path).map_err(StorageError::Open)?;
        let record = read_record(&self.esp)?.filter(|record| record.given_up.is_none());
        // Without a record, the disk may be anybody's.
        let Some(VolumeRecord { disk_bytes: Some(recorded), volume, .. }) = record else {
            return Err(StorageError::Unrecorded { device: found.path });
        };
        if recorded > report.size_bytes {
            return Err(StorageError::Shrunk { device: found.path, found: report.size_bytes, recorded });
        }
        // A record of an earlier release does not name the volume: then the header on the disk decides, if there is one.
        let known = volume.or_else(|| VolumeRecord::of_disk(&report).volume);
        if let (Some(recorded), Some(backup)) = (known, backup.volume())
            && recorded != backup
        {
            return Err(StorageError::OtherBackup { backup, recorded });
        }
        let is_own_key = passphrase.is_none();
        let secret = passphrase.map_or(UnlockSecret::Node, UnlockSecret::Recovery);
        let volume = self.new_luks_volume(&found.path, config)?.expecting(report.identity);
        let generations = volume
            .restore_header(backup, &secret, allow_older)
            .map_err(|error| StorageError::of_restore(error, is_own_key))?;
        tracing::info!("restored the encryption header of the data volume, with {generations}");
        Ok(())
    }

    /// Describes what the next start does with the disk once the node has given its volume up: a lost one, or this disk.
    pub(super) fn describe_next_start(&self, is_lost: bool) -> String {
        describe_step(&self.config, |report| (!is_lost).then(|| VolumeRecord::of_given_up(report)))
    }

    /// The mount point of the volume.
    fn target(&self) -> PathBuf {
        self.data.path().join(VOLUME_DIR)
    }

    fn mount_existing(
        &self,
        volume: &DeviceVolume,
        secret: &UnlockSecret,
    ) -> Result<OpenedVolume, VolumeError> {
        let (dir, slot) = match volume {
            DeviceVolume::Plain(volume) => (volume.mount_existing()?, None),
            DeviceVolume::Encrypted(volume) => {
                // This node has left it open, when it was killed or could not unmount it. Whatever another program has
                // opened needs a secret.
                let active = volume.active_mapping().ok().flatten();
                let is_own = active.is_some_and(|mapping| has_opened(&self.runtime, &mapping));
                match if is_own { volume.mount_active()? } else { None } {
                    Some(dir) => (dir, None),
                    None => {
                        let dir = volume.mount_existing_with(secret)?;
                        self.record_opening(volume);
                        (dir, Some(secret.slot_kind()))
                    }
                }
            }
        };
        let left_out = UnreadableBlocks::default();
        Ok(OpenedVolume { volume: volume.as_volume(), dir, slot, left_out })
    }

    /// A noded that replaces this one, if it is killed, uses the volume without a secret.
    fn record_opening(&self, volume: &LuksVolume) {
        let record = || -> Result<(), Box<dyn Error>> {
            if let Some(mapping) = volume.active_mapping()? {
                record_opening(&self.runtime, &mapping)?;
            }
            Ok(())
        };
        if let Err(error) = record() {
            tracing::warn!(
                "can't record that the data volume is open, and if this process is killed, the next one needs a key: {}",
                error_chain(&*error)
            );
        }
    }

    /// The failure to open a volume. One that asks for a key says whether the volume is open.
    fn opening_error(volume: &DeviceVolume, error: VolumeError) -> StorageError {
        let error = StorageError::of_opening(error);
        match volume {
            DeviceVolume::Encrypted(volume)
                if error.needs_key() && matches!(volume.active_mapping(), Ok(Some(_))) =>
            {
                StorageError::OpenElsewhere {
                    mapping: volume.mapping_name().to_owned(),
                    source: Box::new(error),
                }
            }
            _ => error,
        }
    }

    fn create(
        &self,
        volume: &DeviceVolume,
        sampled: Option<&VolumeContents>,
        erase: ErasePolicy,
    ) -> Result<OpenedVolume, StorageError> {
        let created = match volume {
            DeviceVolume::Plain(volume) => volume.mount_new(erase).map(|dir| (dir, None)),
            DeviceVolume::Encrypted(volume) => volume.mount_new_with_key(erase).map(|(dir, cluster_key)| {
                // Only this process has the cluster's half of the key, until the cluster stores it.
                cluster_key.into_iter().for_each(|key| self.unlock.keep_cluster_key(key));
                self.record_opening(volume);
                (dir, Some(SlotKind::Local))
            }),
        };
        let (dir, slot) = created.map_err(|error| self.creation_error(error, sampled))?;
        tracing::info!("created the data volume");
        let left_out = UnreadableBlocks::default();
        Ok(OpenedVolume { volume: volume.as_volume(), dir, slot, left_out })
    }

    /// Copies the volume that the secret opens, from the disk of this report; without one, completes the copy that is recorded.
    fn copy(
        &self,
        volume: &DeviceVolume,
        report: &DiskReport,
        source: Option<&DiskReport>,
        recorded: &str,
        secret: &UnlockSecret,
    ) -> Result<OpenedVolume, StorageError> {
        let (DeviceVolume::Encrypted(luks), Some(config)) = (volume, &self.config.encryption) else {
            return Err(StorageError::NotEncrypted);
        };
        let (device, from) =
            (luks.device_path(), self.configured_source().unwrap_or(Path::new("another disk")));
        let mut left_out = None;
        let copied = match source {
            None => luks.mount_copied(recorded).map_err(|error| match error {
                VolumeError::Absent { .. } | VolumeError::Occupied { .. } => {
                    StorageError::Lost { device: device.to_owned(), report: Box::new(report.clone()) }
                }
                error => StorageError::of_opening(error),
            }),
            Some(source) => {
                let former = self.new_luks_volume(from, config)?;
                let former =
                    Arc::new(former.with_mapping_name(FORMER_MAPPING).expecting(source.identity.clone()));
                // Until all is copied, it is the node's: its keys are asked for.
                self.unlock.set_encrypted_volume(Some(Arc::clone(&former)));
                let copy = CopySource {
                    volume: &former,
                    secret,
                    progress: &|copy| {
                        self.unlock.report_work(CreationWork::Copying { from: from.to_owned(), copy })
                    },
                    commit: &|volume, disk_bytes, unreadable| {
                        if let Some(fault) = left_out_fault(unreadable) {
                            // Durable before the copy counts.
                            let faults = VolumeFaults::read_from(&self.esp);
                            faults.add_at_least(fault, unreadable.bytes / BLOCK_BYTES);
                            faults.record(&self.esp)?;
                        }
                        let (disk_bytes, volume) = (Some(disk_bytes), Some(volume.to_owned()));
                        let record = VolumeRecord { disk_bytes, volume, ..VolumeRecord::default() };
                        Ok(record.write_to(&self.esp)?)
                    },
                };
                let copied = luks.mount_copy(&copy).map(|(dir, key, unreadable)| {
                    left_out = Some(unreadable);
                    (dir, key)
                });
                copied.map_err(|error| match error {
                    VolumeError::Occupied { found, .. } => {
                        let found = format!("has {found}");
                        StorageError::CopyTarget { device: device.to_owned(), found }
                    }
                    error => StorageError::of_opening(error),
                })
            }
        };
        let (dir, cluster_key) = copied?;
        self.unlock.set_encrypted_volume(Some(Arc::clone(luks)));
        cluster_key.into_iter().for_each(|key| self.unlock.keep_cluster_key(key));
        self.record_opening(luks);
        tracing::info!("copied the data volume from {}", from.display());
        let left_out = left_out.unwrap_or_default();
        Ok(OpenedVolume { volume: volume.as_volume(), dir, slot: Some(SlotKind::Local), left_out })
    }

    /// `storage.copy_from`
    fn configured_source(&self) -> Option<&Path> {
        self.config.encryption.as_ref()?.copy_from.as_deref()
    }

    /// The disk from which the open volume was copied, if it still has a volume: another one, on another disk.
    fn find_former(&self, device: &DiskIdentity) -> Option<PathBuf> {
        let from = self.configured_source()?;
        let report = inspect_disk(from).ok().filter(|report| report.identity != *device)?;
        let recorded = read_record(&self.esp).ok().flatten()?.volume?;
        let is_former =
            matches!(&report.volume, DiskFinding::Encrypted { volume, .. } if *volume != recorded);
        is_former.then(|| from.to_owned())
    }

    /// That disk, as it was when the volume was opened.
    pub(super) fn former_disk(&self) -> Option<PathBuf> {
        lock(&self.former).clone()
    }

    /// The error of a creation on a disk that shows no data where it was sampled, or on another one.
    fn creation_error(&self, error: VolumeError, sampled: Option<&VolumeContents>) -> StorageError {
        match (error, sampled) {
            (VolumeError::Occupied { path, found }, _) => {
                *lock(&self.read) = Some(found.clone());
                StorageError::Occupied { device: path, found }
            }
            // Its owner can give the disk up without a reading, which may fail again.
            (source @ VolumeError::Device { .. }, Some(found)) => {
                StorageError::Unreadable { found: found.clone(), source: Box::new(source) }
            }
            (error, _) => StorageError::Open(error),
        }
    }

    fn grow(&self, volume: &DeviceVolume, secret: &UnlockSecret) -> Result<(), String> {
        let grown = match volume {
            DeviceVolume::Plain(volume) => volume.grow_volume(),
            DeviceVolume::Encrypted(volume) => volume.grow_volume(secret),
        };
        grown.map_err(|error| error_chain(&error))?;
        tracing::info!("grew the data volume to the size of its disk");
        Ok(())
    }

    /// The problem of the open volume's size.
    pub(super) fn size_problem(&self) -> Option<String> {
        lock(&self.size_problem).as_ref().map(SizeProblem::to_string)
    }

    /// Returns whether the last attempt to grow the volume has failed, and another one may not.
    pub(super) fn may_grow_later(&self) -> bool {
        !self.is_authenticated() && matches!(*lock(&self.size_problem), Some(SizeProblem::Failed(_)))
    }

    fn new_volume(&self, device: &Path, report: &DiskReport) -> Result<DeviceVolume, StorageError> {
        let reading = self.reading_hook(device, report);
        let volume = match &self.config.encryption {
            None => {
                let volume = DiskVolume::new(device, self.target(), Arc::new(OsMounter));
                let runtime = self.runtime.try_clone().map_err(StorageError::Directory)?;
                let volume = volume.with_mkfs(&self.programs.mkfs).with_runtime(runtime);
                let volume = volume.expecting(report.identity.clone()).with_reading_progress(reading);
                DeviceVolume::Plain(Arc::new(volume))
            }
            Some(config) => {
                let volume = self.new_luks_volume(device, config)?;
                let volume = volume.expecting(report.identity.clone()).with_reading_progress(reading);
                DeviceVolume::Encrypted(Arc::new(volume))
            }
        };
        self.unlock.set_encrypted_volume(match &volume {
            DeviceVolume::Plain(_) => None,
            DeviceVolume::Encrypted(volume) => Some(Arc::clone(volume)),
        });
        Ok(volume)
    }

    /// Shows the reading of a whole disk, and ends it when root.storage is stopped.
    fn reading_hook(
        &self,
        device: &Path,
        report: &DiskReport,
    ) -> impl Fn(ReadingProgress) -> ControlFlow<()> + Send + Sync + 'static {
        // Nothing is erased for a copy.
        let is_copy = self.configured_source().is_some();
        let (device, erase_token) = (device.to_owned(), report.contents.erase_token().filter(|_| !is_copy));
        let read = lock(&self.read).as_ref().and_then(VolumeContents::erase_token);
        let read_token = read.filter(|_| !is_copy);
        let (speed, unlock) = (Mutex::new(ReadingSpeed::new()), Arc::downgrade(&self.unlock));
        move |progress| {
            let Some(unlock) = unlock.upgrade() else { return ControlFlow::Break(()) };
            let left = lock(&speed).time_left(progress, Instant::now());
            let (device, erase_token, read_token) = (device.clone(), erase_token.clone(), read_token.clone());
            unlock.report_work(CreationWork::Reading(ReadingStatus {
                device,
                progress,
                left,
                erase_token,
                read_token,
            }))
        }
    }

    fn new_luks_volume(&self, device: &Path, config: &EncryptionConfig) -> Result<LuksVolume, StorageError> {
        let clone = |dir: &Dir| dir.try_clone().map_err(StorageError::Directory);
        let seal: Arc<dyn KeySeal> = match &config.seal {
            SealConfig::File => Arc::new(FileSeal::new(clone(&self.esp)?)),
            SealConfig::Tpm(tpm) => Arc::new(new_tpm_seal(clone(&self.esp)?, tpm)?),
        };
        let volume = LuksVolume::new(LuksVolumeConfig {
            device: device.to_owned(),
            target: self.target(),
            encryption: config.encryption,
            keys: config.keys,
            journal: clone(&self.esp)?,
            runtime: clone(&self.runtime)?,
            seal,
            mounter: Arc::new(OsMounter),
            cryptsetup: Arc::new(CryptsetupProgram::new(&self.programs.cryptsetup)),
        });
        // `VolumeUnlock` owns the volume, too: in a cycle neither would be dropped, nor their open files on the ESP.
        let unlock = Arc::downgrade(&self.unlock);
        let report = move |wipe| {
            unlock
                .upgrade()
                .map_or(ControlFlow::Break(()), |unlock| unlock.report_work(CreationWork::Wiping(wipe)))
        };
        let volume = volume.with_mkfs(&self.programs.mkfs).with_node(&self.node).with_progress(report);
        let volume = config.cold_start.into_iter().fold(volume, LuksVolume::with_cold_start);
        let volume = if config.discards { volume.with_discards() } else { volume };
        Ok(if config.wipe { volume } else { volume.without_wipe() })
    }
}

/// The fault that the blocks are which a copy has left out; none if there are none. The device has the name of its mapping, as
/// those that the kernel names.
pub(super) fn left_out_fault(left_out: UnreadableBlocks) -> Option<DeviceFault> {
    let sector = Some(left_out.first_offset / 512);
    let device = "nodekeel-data".to_owned();
    (left_out.bytes > 0).then_some(DeviceFault { device, kind: FaultKind::Unauthentic, sector })
}

/// The blocks in which a copy leaves data out, in bytes.
pub(super) const BLOCK_BYTES: u64 = 4096;

/// Describes a disk as the configuration and the node's record know it.
fn expect_device<'a>(
    config: &'a DeviceConfig,
    device: &'a Path,
    record: Option<VolumeRecord>,
    report: &DiskReport,
) -> Expectation<'a> {
    let encryption = config.encryption.as_ref().map(|config| config.encryption);
    let known = record.as_ref().and_then(|record| record.volume.as_ref());
    let has_volume = matches!(&report.volume, DiskFinding::Encrypted { volume, .. } if known == Some(volume));
    let from = config.encryption.as_ref().and_then(|config| config.copy_from.as_deref());
    // A copy that is complete does not need the other disk.
    let copy = from.filter(|_| !has_volume).map(|from| ExpectedCopy { from, report: inspect_disk(from) });
    Expectation { device, encryption, record, erase_permit: None, copy }
}

/// The record by which the node knows its disk.
fn read_record(esp: &Dir) -> Result<Option<VolumeRecord>, StorageError> {
    let has_had = RecordedVolume::read_from(esp)?.exists();
    Ok(VolumeRecord::of_node(VolumeRecord::read_from(esp)?, has_had))
}

/// Describes what noded would do with the disk, for people: the end of a sentence about the volume. Changes nothing.
pub(super) fn describe_device(config: &DeviceConfig, data: &Path) -> String {
    let record = Dir::open(data.join(ESP_DIR)).ok().and_then(|esp| read_record(&esp).ok().flatten());
    describe_step(config, |_| record)
}

/// Describes what a node with this record of the disk would do with it.
fn describe_step(config: &DeviceConfig, record: impl FnOnce(&DiskReport) -> Option<VolumeRecord>) -> String {
    let inspect = |found: FoundDevice| {
        let device = found.path;
        let report = inspect_disk(&device).map_err(StorageError::Open)?;
        let is_ours = report.contents.erase_token().is_none();
        let next = match decide_step(&report, expect_device(config, &device, record(&report), &report))? {
            DiskStep::Open => "opens it",
            DiskStep::Copy => "copies the node's data volume to it, if it is blank",
            DiskStep::CompleteCopy => "completes the copy of the node's data volume",

            DiskStep::Create if report.volume == DiskFinding::Unread => {
                "reads all of it, and creates the volume if it is blank"
            }
            DiskStep::Create if is_ours => "creates the volume",
            DiskStep::Create | DiskStep::Erase => "creates no volume there",
        };
        Ok(format!("on {}, which {report}, and {} {next}", device.display(), program_name()))
    };
    find_device(&config.location)
        .and_then(inspect)
        .unwrap_or_else(|error| format!("{}, which does not open: {}", config.location, error_chain(&error)))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::super::config::device::{DeviceLocation, EspLocation};
    use super::*;

    /// A node whose disk shows no data.
    fn new_opener(scratch: &Path) -> DeviceOpener {
        let dir = |name: &str| {
            std::fs::create_dir_all(scratch.join(name)).expect("made");
            Dir::open(scratch.join(name)).expect("there")
        };
        dir("data/data");
        let disk = scratch.join("disk");
        std::fs::File::create(&disk).and_then(|disk| disk.set_len(8 << 20)).expect("made");
        let location = DeviceLocation::Disk(disk);
        DeviceOpener {
            config: DeviceConfig { location, encryption: None, esp: EspLocation::Directory },
            programs: VolumePrograms { mkfs: "/bin/false".into(), cryptsetup: PathBuf::new() },
            node: "node-1".into(),
            data: dir("data"),
            esp: dir("esp"),
            runtime: dir("run"),
            unlock: Arc::default(),
            last: Mutex::default(),
            size_problem: Mutex::default(),
            read: Mutex::default(),
            former: Mutex::default(),
        }
    }

    #[test]
    fn an_attempt_that_changes_nothing_leaves_a_disk_that_was_given_up() {
        let scratch = tempfile::tempdir().expect("a directory");
        let opener = new_opener(scratch.path());
        opener.give_up_volume().expect("recorded");
        let disk = || std::fs::read(scratch.path().join("disk")).expect("read");
        let before = disk();
        let opened = opener.open(&UnlockSecret::Node, Attempt::Open);
        assert!(matches!(opened, Err(StorageError::NoVolume)), "{opened:?}");
        assert!(disk() == before, "it was written to");
    }

    #[test]
    fn a_disk_that_cannot_be_read_can_be_given_up() {
        let scratch = tempfile::tempdir().expect("a directory");
        let opener = new_opener(scratch.path());
        let path = scratch.path().join("disk");
        let found = inspect_disk(&path).expect("read").contents;
        let source = io::Error::from_raw_os_error(5);
        let error = VolumeError::Device { step: "read all of", path, source };
        let error = opener.creation_error(error, Some(&found));
        let token = error.erase_token().expect("that of samples");
        assert!(token.starts_with("unread-sampled-"), "{token}");
        assert!(error.to_string().contains(&format!("nodectl storage erase {token}")), "{error}");
        opener.unlock.set_status(super::super::unlock::UnlockStatus::Closed {
            error: Some(error_chain(&error)),
            erase_token: error.erase_token(),
            is_lost: false,
        });
        opener.unlock.permit_erase(&token).expect("offered");
    }

    #[test]
    fn the_next_start_is_described_as_it_decides() {
        let scratch = tempfile::tempdir().expect("a directory");
        let opener = new_opener(scratch.path());
        let mut superblock = [0; 512];
        superblock[..4].copy_from_slice(b"XFSB");
        superblock[108..116].copy_from_slice(b"nodekeel");
        for (start, lost, given_up) in [
            (&[][..], ", and noded reads all of it", ", and noded reads all of it"),
            (&superblock[..], ", and noded opens it", "type: nodectl storage erase xfs-sampled-"),
            (
                &b"LUKS\xba\xbe"[..],
                ", and noded creates no volume there",
                "type: nodectl storage erase luks-sampled-",
            ),
        ] {
            let mut image = start.to_vec();
            image.resize(8 << 20, 0);
            std::fs::write(scratch.path().join("disk"), image).expect("written");
            for (is_lost, says) in [(true, lost), (false, given_up)] {
                let text = opener.describe_next_start(is_lost);
                assert!(text.contains(says), "{text}");
            }
        }
    }
}

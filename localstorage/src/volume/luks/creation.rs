//! The creation of an encrypted volume: decided by the disk and the journal, in steps that resume after a kill.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::{self, Seek as _, SeekFrom};
use std::ops::ControlFlow;
use std::os::fd::AsFd as _;

use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::super::disk::{Disk, DiskAccess};
use super::super::filesystem::XfsFormat;
use super::super::holders::{Holder, holders_of};
use super::super::identity::device_numbers;
use super::super::marker::VolumeMarker;
use super::super::uuid::Uuid;
use super::super::{ErasePolicy, VolumeContents, VolumeError};
use super::copy::{CopyFault, CopyOptions, CopyProgress, CopySource, UnreadableBlocks, copy_device};
use super::cryptsetup::ActiveMapping;
use super::device::{CheckedHeader, FIRST_SLOT, close_mapping, mapping_identifier};
use super::error::LuksError;
use super::header::{HEADER_AREA_BYTES, HeaderError};
use super::key::{UnlockKey, derive_passphrase};
use super::key_slots::{KeySlots, OpenedSlot, UnlockSecret};
use super::opening::LuksOpening;
use super::policy::read_volume_token;
use super::seal::SealId;
use super::settings::{DEVICE_MAPPER, LuksSettings};
use super::slot_kind::{SlotKind, SlotToken};
use super::token::{KeyPolicy, VolumeEncryption, VolumeProgress, VolumeToken};
use super::wipe::{WipeProgress, wipe_device};
use crate::dir::Dir;
use crate::step_journal::{StepJournal, StepList, StepListError, StepRun};
use crate::{sys, syscalls};

const JOURNAL_NAME: &str = "data-volume";

/// Generates and seals the node unlock key.
const SEAL: &str = "seal";
/// Writes the header, with one slot.
const FORMAT: &str = "format";
/// Writes each block of an authenticated volume.
const WIPE: &str = "wipe";
/// Formats the mapping.
const FILE_SYSTEM: &str = "file-system";
/// Mounts it, adds the cluster's slot, and records that the volume is complete.
const COMPLETE: &str = "complete";

const FIRST_GENERATION: u32 = 1;

/// The bytes that dm-integrity writes after the header when it is formatted: its superblock, and a journal of up to
/// 64 MiB.
///
/// *Source:* Linux `dm-integrity.c`, `DEFAULT_MAX_JOURNAL_SECTORS`.
const INTEGRITY_AREA_BYTES: u64 = 80 << 20;

/// The record in the journal, which is written before the first byte of the header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CreationRecord {
    /// The UUID of the volume. It is always a new one: that of a claim could be the UUID of another volume, whose key
    /// has the same name.
    #[serde(with = "uuid_text")]
    uuid: Uuid,
    /// The UUID in the claim of the disk.
    #[serde(with = "uuid_text")]
    claim: Uuid,
    /// The size of the disk, in bytes.
    disk_bytes: u64,
    encryption: VolumeEncryption,
    /// The bytes of the mapping that the wipe has written. None before the format, or where there is nothing to wipe:
    /// so an earlier release has left it, in which the format was also the wipe.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    wiped_bytes: Option<u64>,
    /// Of a copy: the offset up to which the room behind it is wiped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    wiped_behind_copy: Option<u64>,
}

/// What a new volume has.
#[derive(Clone, Copy)]
enum Origin<'a> {
    /// An empty file system.
    Empty,
    /// What another volume has.
    Copy(&'a OpenSource<'a>),
    /// What another volume had: all of it is copied to the volume with this UUID.
    Copied(&'a str),
}

/// A volume that is copied, with its mapping.
struct OpenSource<'a> {
    source: &'a CopySource<'a>,
    mapping: ActiveMapping,
    /// The size of the mapping.
    bytes: u64,
    /// It has blocks that were never written, and so has the copy.
    is_unwiped: bool,
    /// The bytes of a sector of the mapping: the file system can't be used with larger ones.
    sector_bytes: u32,
    unreadable: Cell<UnreadableBlocks>,
}

impl OpenSource<'_> {
    fn open_device(&self) -> Result<File, VolumeError> {
        self.source.volume.settings.open_mapping_device(&self.mapping)
    }

    fn close(&self) -> Result<(), VolumeError> {
        let settings = &self.source.volume.settings;
        close_mapping(&*settings.config.cryptsetup, &settings.mapping_name)
            .map_err(|error| settings.error(error))
    }

    fn error(&self, step: &'static str, source: io::Error) -> VolumeError {
        let path = self.source.volume.settings.config.device.clone();
        VolumeError::Device { step, path, source }
    }
}

/// The contents of the disk, together with the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DiskState {
    /// Proved blank, or only claimed by an interrupted format.
    Blank,
    /// Only written by this creation, which the journal records.
    Ours,
    /// Anything else.
    Occupied,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CreationStart {
    /// Start over, with a new UUID.
    Fresh,
    /// Resume at the recorded step.
    Resume,
    /// Change nothing.
    Reject,
}

fn plan_creation(state: DiskState, found: &VolumeContents, erase: &ErasePolicy) -> CreationStart {
    match state {
        // This needs no consent: only this creation has written to the disk.
        DiskState::Ours => CreationStart::Resume,
        DiskState::Blank => CreationStart::Fresh,
        DiskState::Occupied if *erase == ErasePolicy::Exactly(found.clone()) => CreationStart::Fresh,
        DiskState::Occupied => CreationStart::Reject,
    }
}

/// Returns whether cryptsetup has made a mapping for the volume with this UUID, on whose disk it is. The temporary ones
/// of a format, and those below a mapping that keep its integrity, do not have the UUID.
///
/// *Source:* cryptsetup, `INTEGRITY_format`, `dm_prepare_uuid`.
fn is_leftover(holder: &Holder, uuid: Uuid, mapping_name: &str) -> bool {
    let Some(rest) = holder.identifier.strip_prefix("CRYPT-") else { return false };
    let name = holder.name.strip_suffix("_dif").unwrap_or(&holder.name);
    rest.contains(&uuid.to_string().replace('-', ""))
        || rest.starts_with("INTEGRITY-")
            && (name == mapping_name || name.starts_with("temporary-cryptsetup-"))
}

/// Creates a volume, with the settings of its caller.
pub(super) struct LuksCreation<'a> {
    pub(super) settings: &'a LuksSettings,
    pub(super) opening: LuksOpening<'a>,
}

impl LuksCreation<'_> {
    pub(super) fn create_volume(&self, erase: &ErasePolicy) -> Result<(Dir, Option<UnlockKey>), VolumeError> {
        self.create_from(Origin::Empty, erase)
    }

    /// Creates the volume as a copy of another one, whose secret is tried before anything is written.
    pub(super) fn copy_volume(
        &self,
        source: &CopySource<'_>,
    ) -> Result<(Dir, Option<UnlockKey>, UnreadableBlocks), VolumeError> {
        let open = self.open_source(source)?;
        let created = self.create_from(Origin::Copy(&open), &ErasePolicy::Nothing);
        if created.is_err() {
            // The first error is the useful one.
            let _ = open.close();
        }
        created.map(|(top, key)| (top, key, open.unreadable.get()))
    }

    /// Completes a copy that was committed.
    pub(super) fn complete_copy(&self, volume: &str) -> Result<(Dir, Option<UnlockKey>), VolumeError> {
        self.create_from(Origin::Copied(volume), &ErasePolicy::Nothing)
    }

    fn open_source<'s>(&self, source: &'s CopySource<'s>) -> Result<OpenSource<'s>, VolumeError> {
        let (settings, opening) = (&source.volume.settings, source.volume.opening());
        let disk = settings.open_disk(DiskAccess::Read)?;
        let slots = settings.slots_of(&disk);
        let header = opening.check_volume(&slots)?;
        // A larger disk has a larger mapping, with the same encryption.
        let found_bytes = self.settings.open_disk(DiskAccess::Read)?.size();
        if found_bytes < disk.size() {
            let needed_bytes = disk.size();
            return Err(self.settings.error(LuksError::CopyTooSmall { needed_bytes, found_bytes }));
        }
        let sector_bytes = header.summary.sector_bytes;
        if !found_bytes.is_multiple_of(sector_bytes.into()) {
            return Err(self.settings.error(LuksError::CopySectors { found_bytes }));
        }
        // A killed process has left it open by the name of the copy, or even mounted.
        self.close_interrupted(header.uuid)?;
        let header = opening.repair(&slots, header, source.secret).map_err(|error| settings.error(error))?;
        let (_, mapping) = opening.open_mapping(&slots, &header, source.secret)?;
        let is_unwiped = header.summary.volume.as_ref().is_some_and(|token| token.unwiped);
        let unreadable = Cell::default();
        let mut open = OpenSource { source, mapping, bytes: 0, is_unwiped, sector_bytes, unreadable };
        let size = open.open_device().and_then(|mut device| {
            device.seek(SeekFrom::End(0)).map_err(|error| open.error("measure", error))
        });
        open.bytes = size.inspect_err(|_| {
            let _ = open.close();
        })?;
        Ok(open)
    }

    fn create_from(
        &self,
        origin: Origin<'_>,
        erase: &ErasePolicy,
    ) -> Result<(Dir, Option<UnlockKey>), VolumeError> {
        self.settings.check_discards()?;
        let disk = self.settings.open_disk(DiskAccess::Write)?;
        let slots = self.settings.slots_of(&disk);
        // The disk is locked, so no other creation on it runs at this time.
        let recorded = self.recorded_run()?;
        // Before the disk is read, which needs exclusive use of it.
        if let Some((record, _)) = &recorded
            && self.is_unfinished(&slots, record)?
        {
            self.remove_leftovers(&disk, record.uuid)?;
        }
        let found = disk.read_undecided(disk.probe_contents()?, erase, self.settings.reading())?;
        let state = self.disk_state(&slots, &found, recorded.as_ref())?;
        let (record, run, erased) = match (plan_creation(state, &found, erase), recorded) {
            (CreationStart::Resume, Some((record, run))) => (record, run, VolumeContents::Interrupted),
            (CreationStart::Fresh, recorded) if !matches!(origin, Origin::Copied(_)) => {
                let (record, run) = self.start_creation(&disk, &found, recorded)?;
                (record, run, found)
            }
            _ => return Err(VolumeError::Occupied { path: self.settings.config.device.clone(), found }),
        };
        if let Origin::Copied(volume) = origin
            && (record.uuid.to_string() != volume || matches!(run.current_step(), Some(SEAL | FORMAT)))
        {
            // Another creation, which was not committed, has no data.
            return Err(VolumeError::Absent { path: self.settings.config.device.clone() });
        }
        self.settings.reading().forget();
        let uuid = record.uuid;
        // A killed call leaves the mapping open, or even mounted: cryptsetup and mkfs.xfs would find the disk in use.
        self.close_interrupted(uuid)?;
        let created = self.run_steps(&slots, record, run, &erased, origin);
        if created.is_err() {
            // The first error is the useful one.
            let _ = self.close_interrupted(uuid);
        }
        created
    }

    /// Decides what is on the disk. Only this function may call it ours.
    fn disk_state(
        &self,
        slots: &KeySlots<'_>,
        found: &VolumeContents,
        recorded: Option<&(CreationRecord, StepRun)>,
    ) -> Result<DiskState, VolumeError> {
        if matches!(found, VolumeContents::Blank | VolumeContents::Interrupted) {
            return Ok(DiskState::Blank);
        }
        let disk = slots.device.disk;
        let Some((record, run)) = recorded.filter(|(record, _)| {
            // The journal of another disk, or of another configuration, proves nothing about this one.
            record.disk_bytes == disk.size() && record.encryption == self.settings.config.encryption
        }) else {
            return Ok(DiskState::Occupied);
        };
        let uuid = record.uuid;
        let is_ours = match slots.device.read_header().map_err(|error| self.settings.error(error))? {
            // A header without a token was cut off between both; a complete one may have data.
            Ok(header) => {
                let token = read_volume_token(&header.json);
                header.uuid == uuid && token.is_none_or(|token| token.state == VolumeProgress::Unfinished)
            }
            // luksFormat was cut off: a part of a header must be ours, and other data may only be where it writes.
            Err(HeaderError::Absent | HeaderError::Damaged) if run.current_step() == Some(FORMAT) => {
                !slots.device.has_foreign_header(uuid).map_err(|error| self.settings.error(error))?
                    && disk.has_only_claimed_data(
                        record.claim,
                        self.formatted_bytes(),
                        self.settings.reading(),
                    )?
            }
            // Once the format is recorded, the volume may be complete: a damaged header is no permission to erase it.
            Err(_) => false,
        };
        Ok(if is_ours { DiskState::Ours } else { DiskState::Occupied })
    }

    /// The bytes at the start of the disk that a format writes before its header is complete.
    fn formatted_bytes(&self) -> u64 {
        match self.settings.config.encryption {
            VolumeEncryption::Encrypted => HEADER_AREA_BYTES,
            VolumeEncryption::EncryptedAndAuthenticated => HEADER_AREA_BYTES + INTEGRITY_AREA_BYTES,
        }
    }

    /// Claims the disk, and then records the claim and the UUID of the volume. A journal of another disk, or of an
    /// earlier claim of this one, is removed: that volume has no data.
    fn start_creation(
        &self,
        disk: &Disk,
        found: &VolumeContents,
        recorded: Option<(CreationRecord, StepRun)>,
    ) -> Result<(CreationRecord, StepRun), VolumeError> {
        if let Some((earlier, run)) = recorded {
            // Before its format is recorded, no volume is complete: nothing needs its key any more.
            let is_key_unused = matches!(run.current_step(), Some(SEAL | FORMAT));
            run.remove_journal().map_err(|error| self.settings.error(LuksError::Journal(error)))?;
            // After the journal: a kill in between leaves an unused key, and no run that needs a removed one.
            if is_key_unused {
                let id = SealId { volume: earlier.uuid, generation: FIRST_GENERATION };
                self.settings
                    .config
                    .seal
                    .remove_key(id)
                    .map_err(|error| self.settings.error(LuksError::Seal(error)))?;
            }
        }
        // The claim is durable before the journal records it. A kill in between leaves a disk that is only
        // claimed, on which the next call starts over.
        let record = CreationRecord {
            uuid: self.new_uuid()?,
            claim: disk.claim(&self.settings.label, found)?,
            disk_bytes: disk.size(),
            encryption: self.settings.config.encryption,
            wiped_bytes: None,
            wiped_behind_copy: None,
        };
        let state = self.encode(&record)?;
        let run = self.start_run(self.open_journal()?, &state)?;
        Ok((record, run))
    }

    fn encode(&self, record: &CreationRecord) -> Result<Vec<u8>, VolumeError> {
        serde_json::to_vec(record).map_err(|error| self.settings.error(LuksError::Record(error)))
    }

    fn new_uuid(&self) -> Result<Uuid, VolumeError> {
        Uuid::new_v4().map_err(|errno| self.settings.error(LuksError::Random(errno.into())))
    }

    fn recorded_run(&self) -> Result<Option<(CreationRecord, StepRun)>, VolumeError> {
        let journal = self.open_journal()?;
        // Starting a run would commit its first record, before the disk is claimed.
        if journal.committed_state().is_none() {
            return Ok(None);
        }
        let run = self.start_run(journal, b"")?;
        let record = serde_json::from_slice(run.recorded_state());
        Ok(Some((record.map_err(|error| self.settings.error(LuksError::Record(error)))?, run)))
    }

    fn open_journal(&self) -> Result<StepJournal, VolumeError> {
        StepJournal::open(&self.settings.config.journal, JOURNAL_NAME)
            .map_err(|error| self.settings.error(LuksError::Journal(StepListError::Journal(error))))
    }

    fn start_run(&self, journal: StepJournal, state: &[u8]) -> Result<StepRun, VolumeError> {
        let steps =
            StepList::try_new([SEAL, FORMAT, WIPE, FILE_SYSTEM, COMPLETE]).expect("the list is valid");
        steps.start_run(journal, state).map_err(|error| self.settings.error(LuksError::Journal(error)))
    }

    /// Returns whether the disk is that of the recorded creation, and has no data yet: it has its claim, or its header
    /// without the token of a complete volume.
    fn is_unfinished(&self, slots: &KeySlots<'_>, record: &CreationRecord) -> Result<bool, VolumeError> {
        let disk = slots.device.disk;
        if record.disk_bytes != disk.size() {
            return Ok(false);
        }
        match slots.device.read_header().map_err(|error| self.settings.error(error))? {
            Ok(header) => {
                let token = read_volume_token(&header.json);
                Ok(header.uuid == record.uuid
                    && token.is_none_or(|token| token.state == VolumeProgress::Unfinished))
            }
            Err(_) => Ok(disk.claimed_uuid()? == Some(record.claim)),
        }
    }

    /// Removes the mappings that a killed cryptsetup has left on the disk of an unfinished creation. One that something
    /// has open stays, and exclusive use of the disk fails with its name.
    fn remove_leftovers(&self, disk: &Disk, uuid: Uuid) -> Result<(), VolumeError> {
        let to_error = |source| self.settings.error(LuksError::FindMapping(source));
        let holders = holders_of(disk.file()).map_err(to_error)?;
        let is_left = |holder: &&Holder| is_leftover(holder, uuid, &self.settings.mapping_name);
        for holder in holders.iter().filter(is_left) {
            let control = File::options().read(true).write(true).open(DEVICE_MAPPER).map_err(to_error)?;
            match sys::remove_mapping(control, &holder.identifier) {
                // Gone by now, or in use.
                Ok(()) | Err(Errno::NXIO | Errno::BUSY) => {}
                Err(errno) => {
                    let (name, source) = (holder.name.clone(), errno.into());
                    return Err(self.settings.error(LuksError::RemoveMapping { name, source }));
                }
            }
        }
        Ok(())
    }

    /// Unmounts and closes what an earlier incarnation of this creation has opened.
    fn close_interrupted(&self, uuid: Uuid) -> Result<(), VolumeError> {
        let name = &self.settings.mapping_name;
        let active = self.settings.config.cryptsetup.find_mapping(name);
        let active = active.map_err(|error| self.settings.error(LuksError::FindMapping(error)))?;
        // Another volume may use the name. Its mapping stays, and opening this volume fails.
        let Some(active) = active.filter(|active| active.identifier == mapping_identifier(uuid, name)) else {
            return Ok(());
        };
        let metadata = fs::metadata(&active.device_path).map_err(|source| VolumeError::Device {
            step: "inspect",
            path: active.device_path.clone(),
            source,
        })?;
        // Only what is mounted from this mapping: the target may have another file system.
        if self.settings.mount.is_mounted_from(device_numbers(&metadata))? {
            self.settings.mount.unmount()?;
        }
        self.opening.close_unmounted()
    }

    fn run_steps(
        &self,
        slots: &KeySlots<'_>,
        mut record: CreationRecord,
        mut run: StepRun,
        erased: &VolumeContents,
        origin: Origin<'_>,
    ) -> Result<(Dir, Option<UnlockKey>), VolumeError> {
        let id = SealId { volume: record.uuid, generation: FIRST_GENERATION };
        let mut is_repeated = true;
        loop {
            match run.current_step() {
                Some(SEAL) => slots.seal_new_key(id).map(drop).map_err(|error| self.settings.error(error))?,
                Some(FORMAT) => {
                    self.format(slots, id, erased, origin)?;
                    is_repeated = false;
                    let is_authenticated = record.encryption == VolumeEncryption::EncryptedAndAuthenticated;
                    record.wiped_bytes = is_authenticated.then_some(0);
                }
                // The journal never records that a copy is made: what it is made from may change before it counts.
                Some(WIPE | FILE_SYSTEM) if !matches!(origin, Origin::Empty) => break,
                Some(WIPE) => self.wipe(slots, &mut record, &mut run)?,
                Some(FILE_SYSTEM) => self.format_mapping(slots)?,
                _ => break,
            }
            run.complete_step(self.encode(&record)?)
                .map_err(|error| self.settings.error(LuksError::Journal(error)))?;
        }
        if let Origin::Copy(open) = origin {
            self.copy(slots, &mut record, &mut run, open, is_repeated)?;
        }
        // The journal never records this step: the token in the header does. Until then a killed call must
        // repeat it, since the cluster unlock key that it returns is lost.
        let created = self.complete(slots, id, origin)?;
        // The token records that the volume is complete: if the journal stays after a kill, it changes nothing.
        run.remove_journal().map_err(|error| self.settings.error(LuksError::Journal(error)))?;
        Ok(created)
    }

    fn format(
        &self,
        slots: &KeySlots<'_>,
        id: SealId,
        erased: &VolumeContents,
        origin: Origin<'_>,
    ) -> Result<(), VolumeError> {
        let device = &slots.device;
        // A resumed creation has not claimed the disk again: another program may use it by now.
        device.disk.check_unused()?;
        let to_error = |error| self.settings.error(error);
        let node_key = slots.node_key(id).map_err(to_error)?;
        let passphrase = derive_passphrase(id.volume, SlotKind::Local, &node_key, None);
        let (is_unwiped, sector_bytes) = match origin {
            Origin::Copy(open) => (open.is_unwiped, open.sector_bytes),
            // dm-crypt can't address the rest of a disk that has no whole number of sectors.
            _ if device.disk.size().is_multiple_of(4096) => (false, 4096),
            _ => (false, 512),
        };
        if let Err(error) = device.format(id.volume, &passphrase, sector_bytes) {
            // A format that wrote nothing leaves no claim, which would cover data that another program writes later.
            device.disk.release_unused_claim(erased);
            return Err(self.settings.error(error));
        }
        let check = node_key.check_value(id.volume);
        let slot_token = SlotToken::new(FIRST_SLOT, SlotKind::Local, id.generation, Some(check));
        device.write_slot_token(FIRST_SLOT, &slot_token).map_err(to_error)?;
        // After the token of the slot: a header with the token of the volume always has a slot that can be opened.
        let token = self.token_of(VolumeProgress::Unfinished, is_unwiped);
        device.write_volume_token(&token).map_err(to_error)?;
        // A header that does not meet the policy must fail here; the next step opens it.
        device.check_header().map_err(to_error)?;
        // The token records from here on that the volume is unfinished, so the claim is no longer needed.
        device.disk.release_claim()
    }

    /// Wipes the mapping from the recorded offset on. It is closed then: the file system gets one with a journal.
    fn wipe(
        &self,
        slots: &KeySlots<'_>,
        record: &mut CreationRecord,
        run: &mut StepRun,
    ) -> Result<(), VolumeError> {
        let Some(start) = record.wiped_bytes.filter(|_| self.settings.wipe) else { return Ok(()) };
        let to_error =
            |source| VolumeError::Device { step: "wipe", path: self.settings.config.device.clone(), source };
        let device = self.open_to_fill(slots)?;
        let report = |wipe| {
            self.settings.progress.as_ref().map_or(ControlFlow::Continue(()), |progress| progress(wipe))
        };
        let keep = |offset| {
            record.wiped_bytes = Some(offset);
            run.record_state(self.encode(record)?)
                .map_err(|error| self.settings.error(LuksError::Journal(error)))
        };
        let flow = wipe_device(&device, start, report, keep, to_error)?;
        drop(device);
        if flow.is_break() {
            return Err(VolumeError::WipeCanceled { path: self.settings.config.device.clone() });
        }
        self.opening.close_unmounted()
    }

    /// Opens the mapping to write each block of it.
    fn open_to_fill(&self, slots: &KeySlots<'_>) -> Result<File, VolumeError> {
        let header = slots.device.check_header().map_err(|error| self.settings.error(error))?;
        let (_, mapping) = match self.settings.config.encryption {
            VolumeEncryption::EncryptedAndAuthenticated => {
                self.opening.open_mapping_to_wipe(slots, &header, &UnlockSecret::Node)?
            }
            VolumeEncryption::Encrypted => self.opening.open_mapping(slots, &header, &UnlockSecret::Node)?,
        };
        open_past_cache(&self.settings.open_mapping_device(&mapping)?, OFlags::RDWR).map_err(|source| {
            VolumeError::Device { step: "open mapping of", path: self.settings.config.device.clone(), source }
        })
    }

    /// Wipes what is behind the copy, and copies. Both mappings are closed then.
    fn copy(
        &self,
        slots: &KeySlots<'_>,
        record: &mut CreationRecord,
        run: &mut StepRun,
        open: &OpenSource<'_>,
        is_repeated: bool,
    ) -> Result<(), VolumeError> {
        let path = || self.settings.config.device.clone();
        let to_error = |source| VolumeError::Device { step: "copy the volume to", path: path(), source };
        let mut target = self.open_to_fill(slots)?;
        let found_bytes = target.seek(SeekFrom::End(0)).map_err(to_error)?;
        if found_bytes < open.bytes {
            let needed_bytes = open.bytes;
            return Err(self.settings.error(LuksError::CopyTooSmall { needed_bytes, found_bytes }));
        }
        let is_wiped = record.wiped_bytes.is_some() && self.settings.wipe;
        let total_bytes = if is_wiped { found_bytes } else { open.bytes };
        let report = |done_bytes| (open.source.progress)(CopyProgress { done_bytes, total_bytes });
        if is_wiped {
            let start = record.wiped_behind_copy.unwrap_or(0).max(open.bytes);
            let keep = |offset| {
                record.wiped_behind_copy = Some(offset);
                run.record_state(self.encode(record)?)
                    .map_err(|error| self.settings.error(LuksError::Journal(error)))
            };
            let report_wipe = |wipe: WipeProgress| report(wipe.done_bytes - open.bytes);
            if wipe_device(&target, start, report_wipe, keep, to_error)?.is_break() {
                return Err(VolumeError::CopyCanceled { path: path() });
            }
        }
        let source = open_past_cache(&open.open_device()?, OFlags::RDONLY)
            .map_err(|error| open.error("open mapping of", error))?;
        let is_authenticated = record.encryption == VolumeEncryption::EncryptedAndAuthenticated;
        let options = CopyOptions { bytes: open.bytes, is_authenticated, is_repeated };
        let behind = total_bytes - open.bytes;
        match copy_device(&source, &target, options, |copied| report(behind + copied)) {
            Ok(Some(_)) if open.is_unwiped => {}
            Ok(Some(unreadable)) => open.unreadable.set(unreadable),
            Ok(None) => return Err(VolumeError::CopyCanceled { path: path() }),
            Err(CopyFault::Read(error)) => return Err(open.error("read the volume on", error)),
            Err(CopyFault::Write(error)) => return Err(to_error(error)),
            Err(CopyFault::Outdated(offset)) => {
                return Err(self.settings.error(LuksError::CopyOutdated { offset }));
            }
        }
        drop((source, target));
        open.close()?;
        self.opening.close_unmounted()
    }

    fn format_mapping(&self, slots: &KeySlots<'_>) -> Result<(), VolumeError> {
        let header = slots.device.check_header().map_err(|error| self.settings.error(error))?;
        let (_, mapping) = self.opening.open_mapping(slots, &header, &UnlockSecret::Node)?;
        let uuid = self.new_uuid()?;
        // Forced: what mkfs.xfs would recognize is noise, or what an interrupted call has written.
        let format = XfsFormat { mkfs: &self.settings.mkfs, label: &self.settings.label, force: true };
        let device = self.settings.open_mapping_device(&mapping)?;
        format.run_mkfs(device.as_fd(), &mapping.device_path, uuid)
    }

    /// Mounts the volume, and records last of all that it is complete. The cluster unlock key exists only in memory:
    /// the slot of one that was lost with a killed process is replaced.
    fn complete(
        &self,
        slots: &KeySlots<'_>,
        id: SealId,
        origin: Origin<'_>,
    ) -> Result<(Dir, Option<UnlockKey>), VolumeError> {
        let header = slots.device.check_header().map_err(|error| self.settings.error(error))?;
        let (opened, _) = self.opening.open_mapping(slots, &header, &UnlockSecret::Node)?;
        let top = self.opening.mount_mapping(|top| {
            match VolumeMarker::read_from(top).map_err(VolumeError::Finish)? {
                // A killed call has written the marker, but not the token of the header.
                VolumeMarker::Complete => Ok(()),
                VolumeMarker::Unfinished => VolumeMarker::write_complete(top).map_err(VolumeError::Finish),
                VolumeMarker::Erasing | VolumeMarker::Foreign { .. } => {
                    let found =
                        VolumeContents::Files { entries: top.list().map_err(VolumeError::Finish)?.len() };
                    Err(VolumeError::Occupied { path: self.settings.config.device.clone(), found })
                }
            }
        })?;
        if let Origin::Copy(open) = origin {
            // Before it counts: once the volume is complete, nothing grows an authenticated one.
            self.settings.mount.grow_file_system(&self.settings.mkfs)?;
            let (volume, disk_bytes) = (id.volume.to_string(), slots.device.disk.size());
            let committed = (open.source.commit)(&volume, disk_bytes, open.unreadable.get());
            committed.map_err(|error| self.settings.error(LuksError::Commit(error)))?;
        }
        let cluster_key =
            self.add_cluster_slot(slots, &header, &opened, id).map_err(|error| self.settings.error(error))?;
        Ok((top, cluster_key))
    }

    fn add_cluster_slot(
        &self,
        slots: &KeySlots<'_>,
        header: &CheckedHeader,
        opened: &OpenedSlot,
        id: SealId,
    ) -> Result<Option<UnlockKey>, LuksError> {
        // A killed call may have added the slot of a cluster unlock key that it never returned.
        let is_older = |slot: &&u32| **slot != opened.slot && header.summary.slot_token(**slot).is_some();
        for slot in header.summary.slots.iter().filter(is_older) {
            slots.device.remove_slot(*slot)?;
        }
        slots.remove_interrupted(header)?;
        let cluster_key = match self.settings.config.keys {
            KeyPolicy::Local => None,
            KeyPolicy::Split => {
                let node_key = slots.node_key(id)?;
                let key = UnlockKey::generate().map_err(LuksError::Random)?;
                slots.add_key_slot(&opened.passphrase, id, &node_key, Some(&key))?;
                Some(key)
            }
        };
        // Last of all: from here on no creation resumes on this disk, and the volume may have data.
        let is_unwiped = header.summary.volume.as_ref().is_some_and(|token| token.unwiped);
        slots.device.write_volume_token(&self.token_of(VolumeProgress::Complete, is_unwiped))?;
        slots.device.check_header()?;
        Ok(cluster_key)
    }

    fn token_of(&self, state: VolumeProgress, is_unwiped: bool) -> VolumeToken {
        let mut token = VolumeToken::new(
            self.settings.config.encryption,
            self.settings.config.keys,
            self.settings.cold_start,
        );
        token.state = state;
        let is_authenticated = token.encryption == VolumeEncryption::EncryptedAndAuthenticated;
        token.unwiped = is_authenticated && (is_unwiped || !self.settings.wipe);
        token.node.clone_from(&self.settings.node);
        token
    }
}

/// Past the cache: the memory of the host is left to its programs. And a mapping closes only if no other file of it is open.
fn open_past_cache(mapping: &File, access: OFlags) -> io::Result<File> {
    Ok(syscalls::reopen(mapping, access | OFlags::DIRECT | OFlags::EXCL)?.into())
}

mod uuid_text {
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serializer};

    use crate::volume::uuid::Uuid;

    pub(super) fn serialize<S: Serializer>(uuid: &Uuid, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(uuid)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Uuid, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|()| D::Error::custom("the UUID of the volume is invalid"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mappings_of_the_volume_and_of_its_format_are_left_over() {
        let uuid: Uuid = "01234567-89ab-4def-8123-456789abcdef".parse().unwrap();
        let text = "0123456789ab4def8123456789abcdef";
        for (name, identifier, expected) in [
            ("data", format!("CRYPT-LUKS2-{text}-data"), true),
            ("temporary-cryptsetup-7", format!("CRYPT-LUKS2-{text}-temporary-cryptsetup-7"), true),
            ("temporary-cryptsetup-7_dif", "CRYPT-INTEGRITY-temporary-cryptsetup-7_dif".into(), true),
            ("temporary-cryptsetup-7", "CRYPT-INTEGRITY-temporary-cryptsetup-7".into(), true),
            ("data_dif", format!("CRYPT-SUBDEV-{text}-data_dif"), true),
            ("data_dif", "CRYPT-INTEGRITY-data_dif".into(), true),
            // Those of another volume, and of other programs.
            ("data", "CRYPT-LUKS2-1123456789ab4def8123456789abcdef-data".into(), false),
            ("other_dif", "CRYPT-INTEGRITY-other_dif".into(), false),
            ("data", "LVM-abc".into(), false),
            ("data", String::new(), false),
        ] {
            let holder = Holder::new("dm-0", name, &identifier);
            assert_eq!(is_leftover(&holder, uuid, "data"), expected, "{name} {identifier}");
        }
    }

    #[test]
    fn only_blank_disks_and_agreed_contents_are_formatted() {
        let found = VolumeContents::Files { entries: 1 };
        let other = ErasePolicy::Exactly(VolumeContents::Files { entries: 2 });
        let agreed = ErasePolicy::Exactly(found.clone());
        for (state, erase, expected) in [
            (DiskState::Blank, &ErasePolicy::Nothing, CreationStart::Fresh),
            (DiskState::Ours, &ErasePolicy::Nothing, CreationStart::Resume),
            (DiskState::Ours, &agreed, CreationStart::Resume),
            (DiskState::Occupied, &ErasePolicy::Nothing, CreationStart::Reject),
            (DiskState::Occupied, &other, CreationStart::Reject),
            (DiskState::Occupied, &agreed, CreationStart::Fresh),
        ] {
            assert_eq!(plan_creation(state, &found, erase), expected, "{state:?}, {erase:?}");
        }
    }
}

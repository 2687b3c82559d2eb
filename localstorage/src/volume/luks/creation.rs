//! The creation of an encrypted volume: decided by the disk and the journal, in steps that resume after a kill.

use std::fs;
use std::os::fd::AsFd as _;

use serde::{Deserialize, Serialize};

use super::super::disk::{Disk, DiskAccess, device_numbers};
use super::super::filesystem::XfsFormat;
use super::super::marker::VolumeMarker;
use super::super::uuid::Uuid;
use super::super::{ErasePolicy, VolumeContents, VolumeError};
use super::device::{CheckedHeader, FIRST_SLOT, mapping_identifier};
use super::error::LuksError;
use super::header::{HEADER_AREA_BYTES, HeaderError};
use super::key::{UnlockKey, derive_passphrase};
use super::key_slots::{KeySlots, OpenedSlot, UnlockSecret};
use super::opening::LuksOpening;
use super::policy::read_volume_token;
use super::seal::SealId;
use super::settings::LuksSettings;
use super::slot_kind::{SlotKind, SlotToken};
use super::token::{KeyPolicy, VolumeEncryption, VolumeProgress, VolumeToken};
use crate::dir::Dir;
use crate::step_journal::{StepJournal, StepList, StepListError, StepRun};

const JOURNAL_NAME: &str = "data-volume";

/// Generates and seals the node unlock key.
const SEAL: &str = "seal";
/// Writes the header, with one slot, and wipes the data.
const FORMAT: &str = "format";
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

/// Creates a volume, with the settings of its caller.
pub(super) struct LuksCreation<'a> {
    pub(super) settings: &'a LuksSettings,
    pub(super) opening: LuksOpening<'a>,
}

impl LuksCreation<'_> {
    pub(super) fn create_volume(&self, erase: &ErasePolicy) -> Result<(Dir, Option<UnlockKey>), VolumeError> {
        self.settings.check_discards()?;
        let disk = self.settings.open_disk(DiskAccess::Write)?;
        let slots = self.settings.slots_of(&disk);
        let found = disk.read_undecided(disk.probe_contents()?, erase, self.settings.reading())?;
        // The disk is locked, so no other creation on it runs at this time.
        let recorded = self.recorded_run()?;
        let state = self.disk_state(&slots, &found, recorded.as_ref())?;
        let (record, run, erased) = match (plan_creation(state, &found, erase), recorded) {
            (CreationStart::Resume, Some((record, run))) => (record, run, VolumeContents::Interrupted),
            (CreationStart::Fresh, recorded) => {
                let (record, run) = self.start_creation(&disk, &found, recorded)?;
                (record, run, found)
            }
            _ => return Err(VolumeError::Occupied { path: self.settings.config.device.clone(), found }),
        };
        self.settings.reading().forget();
        let uuid = record.uuid;
        // A killed call leaves the mapping open, or even mounted: cryptsetup and mkfs.xfs would find the disk in use.
        self.close_interrupted(uuid)?;
        let created = self.run_steps(&slots, uuid, run, &erased);
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
        };
        let state =
            serde_json::to_vec(&record).map_err(|error| self.settings.error(LuksError::Record(error)))?;
        let run = self.start_run(self.open_journal()?, &state)?;
        Ok((record, run))
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
        let steps = StepList::try_new([SEAL, FORMAT, FILE_SYSTEM, COMPLETE]).expect("the list is valid");
        steps.start_run(journal, state).map_err(|error| self.settings.error(LuksError::Journal(error)))
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
        uuid: Uuid,
        mut run: StepRun,
        erased: &VolumeContents,
    ) -> Result<(Dir, Option<UnlockKey>), VolumeError> {
        let id = SealId { volume: uuid, generation: FIRST_GENERATION };
        loop {
            match run.current_step() {
                Some(SEAL) => slots.seal_new_key(id).map(drop).map_err(|error| self.settings.error(error))?,
                Some(FORMAT) => self.format(slots, id, erased)?,
                Some(FILE_SYSTEM) => self.format_mapping(slots)?,
                _ => break,
            }
            // The recorded UUIDs stay the same in all steps.
            let state = run.recorded_state().to_vec();
            run.complete_step(state).map_err(|error| self.settings.error(LuksError::Journal(error)))?;
        }
        // The journal never records this step: the token in the header does. Until then a killed call must
        // repeat it, since the cluster unlock key that it returns is lost.
        let created = self.complete(slots, id)?;
        // The token records that the volume is complete: if the journal stays after a kill, it changes nothing.
        run.remove_journal().map_err(|error| self.settings.error(LuksError::Journal(error)))?;
        Ok(created)
    }

    fn format(&self, slots: &KeySlots<'_>, id: SealId, erased: &VolumeContents) -> Result<(), VolumeError> {
        let device = &slots.device;
        // A resumed creation has not claimed the disk again: another program may use it by now.
        device.disk.check_unused()?;
        let to_error = |error| self.settings.error(error);
        let node_key = slots.node_key(id).map_err(to_error)?;
        let passphrase = derive_passphrase(id.volume, SlotKind::Local, &node_key, None);
        let formatted =
            device.format(id.volume, &passphrase, self.settings.wipe, self.settings.progress.as_deref());
        if let Err(error) = formatted {
            // A format that wrote nothing leaves no claim, which would cover data that another program writes later.
            device.disk.release_unused_claim(erased);
            return Err(self.settings.error(error));
        }
        let check = node_key.check_value(id.volume);
        let slot_token = SlotToken::new(FIRST_SLOT, SlotKind::Local, id.generation, Some(check));
        device.write_slot_token(FIRST_SLOT, &slot_token).map_err(to_error)?;
        // After the token of the slot: a header with the token of the volume always has a slot that can be opened.
        device.write_volume_token(&self.token_of(VolumeProgress::Unfinished)).map_err(to_error)?;
        // A header that does not meet the policy must fail here; the next step opens it.
        device.check_header().map_err(to_error)?;
        // The token records from here on that the volume is unfinished, so the claim is no longer needed.
        device.disk.release_claim()
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
    fn complete(&self, slots: &KeySlots<'_>, id: SealId) -> Result<(Dir, Option<UnlockKey>), VolumeError> {
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
        slots.device.write_volume_token(&self.token_of(VolumeProgress::Complete))?;
        slots.device.check_header()?;
        Ok(cluster_key)
    }

    fn token_of(&self, state: VolumeProgress) -> VolumeToken {
        let mut token = VolumeToken::new(
            self.settings.config.encryption,
            self.settings.config.keys,
            self.settings.cold_start,
        );
        token.state = state;
        token.node.clone_from(&self.settings.node);
        token
    }
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

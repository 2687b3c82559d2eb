//! Opening an encrypted volume: its header is checked, its slot opened, its data mapped and mounted.

use std::error::Error as _;
use std::io;
use std::sync::{Mutex, PoisonError};

use super::super::disk::{Disk, DiskAccess};
use super::super::filesystem::MountSource;
use super::super::identity::device_numbers;
use super::super::marker::VolumeMarker;
use super::super::{VolumeContents, VolumeError};
use super::cryptsetup::ActiveMapping;
use super::device::{CheckedHeader, close_mapping};
use super::error::LuksError;
use super::header::HeaderError;
use super::key_slots::{KeySlots, OpenedSlot, UnlockSecret};
use super::policy::read_volume_token;
use super::reencryption::ReencryptionStage;
use super::reencryption_run::ReencryptionRun;
use super::rollback::HeaderRecords;
use super::settings::LuksSettings;
use super::token::{VolumeEncryption, VolumeProgress};
use crate::dir::Dir;
use crate::mount::MountError;

/// Opens a volume that exists, with the settings of its caller.
pub(super) struct LuksOpening<'a> {
    pub(super) settings: &'a LuksSettings,
    /// Receives the number of the slot that opened the volume.
    pub(super) opened_slot: &'a Mutex<Option<u32>>,
}

impl LuksOpening<'_> {
    pub(super) fn open_volume(&self, secret: &UnlockSecret) -> Result<Dir, VolumeError> {
        self.settings.check_discards()?;
        let disk = self.settings.open_disk(DiskAccess::Read)?;
        let slots = self.settings.slots_of(&disk);
        let header = self.check_volume(&slots)?;
        if let Ok(None) = slots.device.find_mapping_of(header.uuid, &self.settings.mapping_name) {
            ReencryptionRun(self.settings).remove_left_mappings(header.uuid)?;
        }
        let header = self.repair(&slots, header, secret).map_err(|error| self.settings.error(error))?;
        self.open_mapping(&slots, &header, secret)?;
        // The volume opens also where these can't be written: the next opening tries again.
        let _ = slots.records.raise_to_header(header.uuid, &header.summary);
        let _ = slots.remove_left(&header.summary);
        let recorded = slots.records.volume_key(header.uuid).ok().flatten();
        let is_other_key = recorded.is_some_and(|recorded| recorded != header.summary.volume_key);
        let records = HeaderRecords(&self.settings.config.journal);
        drop(disk);
        match self.mount_complete() {
            // An operator has re-encrypted the volume since.
            Ok(top) if is_other_key => {
                let _ = records.record_volume_key(header.uuid, &header.summary.volume_key);
                Ok(top)
            }
            Err(error) if is_other_key && is_other_data(&error) => {
                Err(self.settings.error(LuksError::Reencrypted))
            }
            mounted => mounted,
        }
    }

    /// Completes the piece of a re-encryption in which cryptsetup was killed, while the volume is not mapped.
    pub(super) fn repair(
        &self,
        slots: &KeySlots<'_>,
        header: CheckedHeader,
        secret: &UnlockSecret,
    ) -> Result<CheckedHeader, LuksError> {
        let needs_repair =
            header.summary.reencryption.is_some_and(|state| state.stage == ReencryptionStage::Repair);
        let name = &self.settings.mapping_name;
        if !needs_repair || slots.device.find_mapping_of(header.uuid, name)?.is_some() {
            return Ok(header);
        }
        let opened = slots.open_slot(&header, secret)?;
        slots.device.repair(&opened.passphrase)?;
        slots.device.check_header()
    }

    /// Checks that the disk has a complete volume, whose header may be used. Before any key: none is unsealed for another
    /// disk.
    pub(super) fn check_volume(&self, slots: &KeySlots<'_>) -> Result<CheckedHeader, VolumeError> {
        self.check_complete(slots.device.disk)?;
        let header = slots.device.check_header().and_then(|header| {
            header.summary.volume.as_ref().map_or(Ok(()), |token| self.settings.check_keys(token))?;
            Ok(header)
        });
        header.map_err(|error| self.settings.error(error))
    }

    /// The open mapping of this volume, which may be one that an earlier process has left.
    pub(super) fn find_active_mapping(&self) -> Result<Option<ActiveMapping>, VolumeError> {
        let disk = self.settings.open_disk(DiskAccess::Read)?;
        let slots = self.settings.slots_of(&disk);
        let header = self.check_volume(&slots)?;
        match slots.device.find_mapping_of(header.uuid, &self.settings.mapping_name) {
            Err(LuksError::MappingInUse { .. }) => Ok(None),
            found => found.map_err(|error| self.settings.error(error)),
        }
    }

    /// Mounts the open mapping of a volume that is complete.
    pub(super) fn mount_complete(&self) -> Result<Dir, VolumeError> {
        self.mount_mapping(|top| VolumeMarker::check_complete(top, &self.settings.config.device))
    }

    /// Checks that the disk has a header of a complete volume of this crate; its policy is checked later.
    fn check_complete(&self, disk: &Disk) -> Result<(), VolumeError> {
        let path = || self.settings.config.device.clone();
        let header = match self
            .settings
            .slots_of(disk)
            .device
            .read_header()
            .map_err(|error| self.settings.error(error))?
        {
            Ok(header) => header,
            // The other contents of the disk decide which error helps.
            Err(HeaderError::Absent) => {
                return Err(match disk.probe_contents()? {
                    VolumeContents::Unread { .. } => VolumeError::Absent { path: path() },
                    VolumeContents::Interrupted => VolumeError::Unfinished { path: path() },
                    found => VolumeError::ForeignData { path: path(), found },
                });
            }
            Err(error) => return Err(self.settings.error(LuksError::Header(error))),
        };
        match read_volume_token(&header.json).map(|token| token.state) {
            Some(VolumeProgress::Complete) => Ok(()),
            Some(VolumeProgress::Unfinished) => Err(VolumeError::Unfinished { path: path() }),
            // Another program has written the header, or a format was cut off before its token.
            None => Err(VolumeError::ForeignData { path: path(), found: disk.probe_contents()? }),
        }
    }

    /// Maps the data by the newest slot that a secret opens. An earlier incarnation of this process may have mapped them.
    pub(super) fn open_mapping(
        &self,
        slots: &KeySlots<'_>,
        header: &CheckedHeader,
        secret: &UnlockSecret,
    ) -> Result<(OpenedSlot, ActiveMapping), VolumeError> {
        let options: &[&str] = if self.settings.allow_discards { &["--allow-discards"] } else { &[] };
        self.open_mapping_with(slots, header, secret, options)
    }

    /// Opens the mapping to wipe it: what a power cut tears is written again, so dm-integrity need not write all of it
    /// to its journal first.
    pub(super) fn open_mapping_to_wipe(
        &self,
        slots: &KeySlots<'_>,
        header: &CheckedHeader,
        secret: &UnlockSecret,
    ) -> Result<(OpenedSlot, ActiveMapping), VolumeError> {
        self.open_mapping_with(slots, header, secret, &["--integrity-no-journal"])
    }

    fn open_mapping_with(
        &self,
        slots: &KeySlots<'_>,
        header: &CheckedHeader,
        secret: &UnlockSecret,
        options: &[&str],
    ) -> Result<(OpenedSlot, ActiveMapping), VolumeError> {
        let (device, name) = (&slots.device, &self.settings.mapping_name);
        let open = || {
            let active = device.find_mapping_of(header.uuid, name)?;
            let opened = slots.open_slot_by(header, secret, |slot, passphrase| match active {
                Some(_) => device.opens(header, slot, passphrase),
                None => device.open(header, slot, passphrase, name, options),
            })?;
            let mapping = device.find_mapping_of(header.uuid, name)?;
            Ok((opened, mapping.ok_or_else(|| LuksError::MappingInUse { name: name.clone() })?))
        };
        let (opened, mapping) = open().map_err(|error| self.settings.error(error))?;
        *self.opened_slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(opened.slot);
        Ok((opened, mapping))
    }

    /// Mounts the open mapping, and closes it again if that fails.
    pub(super) fn mount_mapping(
        &self,
        check: impl FnOnce(&Dir) -> Result<(), VolumeError>,
    ) -> Result<Dir, VolumeError> {
        let name = &self.settings.mapping_name;
        // By its name: a process that was killed may have opened the mapping.
        let mapping = match self.settings.config.cryptsetup.find_mapping(name) {
            Ok(Some(mapping)) => mapping,
            Ok(None) => return Err(self.settings.error(LuksError::MappingInUse { name: name.clone() })),
            Err(error) => return Err(self.settings.error(LuksError::FindMapping(error))),
        };
        let source = self.mapping_source(&mapping);
        let mounted = source.and_then(|source| self.settings.mount.mount_and_check(&source, check));
        mounted.map_err(|error| {
            // The first error is the useful one. The next call finds a mapping that stays open.
            let _ = self.close_unmounted();
            let is_authenticated =
                self.settings.config.encryption == VolumeEncryption::EncryptedAndAuthenticated;
            if is_authenticated && is_wrong_block(&error) {
                return self.settings.error(LuksError::Tampering(Box::new(error)));
            }
            if is_no_file_system(&error) {
                return self.settings.error(LuksError::OtherData(Box::new(error)));
            }
            error
        })
    }

    /// The device of an open mapping, with its numbers.
    fn mapping_source(&self, mapping: &ActiveMapping) -> Result<MountSource, VolumeError> {
        let device = self.settings.open_mapping_device(mapping)?;
        let metadata = device.metadata().map_err(|source| self.settings.mapping_error(mapping, source))?;
        Ok(MountSource { path: mapping.device_path.clone(), device: device_numbers(&metadata) })
    }

    /// Closes the mapping, unless something is mounted from it: then it is in use, and stays.
    pub(super) fn close_unmounted(&self) -> Result<(), VolumeError> {
        if self.settings.mount.info()?.is_some() {
            return Ok(());
        }
        *self.opened_slot.lock().unwrap_or_else(PoisonError::into_inner) = None;
        close_mapping(&*self.settings.config.cryptsetup, &self.settings.mapping_name)
            .map_err(|error| self.settings.error(error))
    }
}

/// Returns whether the kernel reported a block whose HMAC is wrong, in the mount or the first reads.
fn is_wrong_block(error: &VolumeError) -> bool {
    /// EIO, and EILSEQ: `BLK_STS_PROTECTION` of dm-crypt. *Source:* Linux `blk_errors`.
    const WRONG_BLOCK: [i32; 2] = [5, 84];
    let source = match error {
        VolumeError::Mount(MountError::Mount { source, .. }) => Some(source),
        VolumeError::Finish(error) => error.source().and_then(|source| source.downcast_ref::<io::Error>()),
        _ => None,
    };
    source.and_then(io::Error::raw_os_error).is_some_and(|number| WRONG_BLOCK.contains(&number))
}

/// Returns whether a key has decrypted something else than a file system.
fn is_other_data(error: &VolumeError) -> bool {
    matches!(error, VolumeError::Encryption { source, .. } if matches!(**source, LuksError::OtherData(_)))
}

/// Returns whether the kernel found no superblock where it was to mount one.
///
/// *Source:* Linux `xfs_mount.c`, `xfs_readsb`: EINVAL if the magic number is wrong.
fn is_no_file_system(error: &VolumeError) -> bool {
    const EINVAL: i32 = 22;
    matches!(error, VolumeError::Mount(MountError::Mount { source, .. }) if source.raw_os_error() == Some(EINVAL))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, FileOperation};

    #[test]
    fn a_changed_block_is_known_in_the_mount_and_in_the_first_reads() {
        for (number, is_wrong) in [(5, true), (84, true), (2, false)] {
            let source = || io::Error::from_raw_os_error(number);
            let mount = MountError::Mount {
                target: "/".into(),
                fstype: "xfs",
                kernel: String::new(),
                source: source(),
            };
            assert_eq!(is_wrong_block(&VolumeError::Mount(mount)), is_wrong);
            let read = Error::new(FileOperation::Read, "/marker", source());
            assert_eq!(is_wrong_block(&VolumeError::Finish(read)), is_wrong);
        }
    }
}

//! The header of a volume as a file: backed up, and restored. cryptsetup's luksHeaderBackup and luksHeaderRestore write and
//! read the same.
//!
//! A restore writes the second copy, then the areas of the key slots, then the first copy. Killed in between, at least one
//! copy is correct, and a record says that it is to be repeated:
//!
//! ```text
//!  copies on the disk    killed here, the volume
//!  old   old             opens as before
//!  old   new, areas      may not open: the record says why
//!  new   new             opens by the restored header
//! ```

use super::super::VolumeError;
use super::super::disk::{Disk, DiskAccess};
use super::device::CheckedHeader;
use super::error::LuksError;
use super::header::{COPIES_BYTES, COPY_BYTES, HEADER_AREA_BYTES, LuksHeader};
use super::key_slots::UnlockSecret;
use super::rollback::{HeaderGenerations, HeaderRollback};
use super::settings::LuksSettings;
use super::token::VolumeProgress;

/// A copy of the header of a volume: both copies of its metadata, and the areas of its key slots.
///
/// Who has it, and a key or passphrase of that time, opens the volume forever, also after its keys were rotated.
#[derive(Clone, PartialEq, Eq)]
pub struct HeaderBackup(pub(super) Vec<u8>);

impl HeaderBackup {
    /// The size of each backup, in bytes.
    pub const BYTES: u64 = HEADER_AREA_BYTES;

    /// The backup in a file. Restoring it checks its contents.
    pub fn from_bytes(bytes: Vec<u8>) -> HeaderBackup {
        HeaderBackup(bytes)
    }

    /// The UUID of its volume; none if the file has no header that can be read. Nothing else is checked.
    pub fn volume(&self) -> Option<String> {
        LuksHeader::parse(&self.0).ok().map(|header| header.uuid.to_string())
    }

    /// The bytes of the file.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Without the bytes.
impl std::fmt::Debug for HeaderBackup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeaderBackup").field("bytes", &self.0.len()).finish()
    }
}

/// The header that a disk has now, as far as a restore depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PresentHeader {
    /// None that can be used.
    Unusable,
    /// That of the backup, byte for byte.
    Equal,
    /// Another one.
    Other,
    /// Another one, of a re-encryption in progress.
    Reencrypting,
}

/// What a restore does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RestoreStep {
    /// Nothing: the disk has this header.
    Nothing,
    Write,
}

/// Decides about a backup that meets the policy and opens.
fn plan_restore(
    present: PresentHeader,
    is_in_use: bool,
    rollback: Option<HeaderRollback>,
    allow_older: bool,
) -> Result<RestoreStep, LuksError> {
    match (present, is_in_use, rollback) {
        (PresentHeader::Equal, ..) => Ok(RestoreStep::Nothing),
        // Part of the data has another key by now.
        (PresentHeader::Reencrypting, ..) => Err(LuksError::Reencrypting { operation: "restore a header" }),
        // The kernel holds the volume key of the header that opened it: the disk would keep one that fits no data.
        (_, true, _) => Err(LuksError::HeaderInUse),
        (_, _, Some(rollback)) if !allow_older => Err(LuksError::OlderBackup { rollback }),
        _ => Ok(RestoreStep::Write),
    }
}

/// Reads and writes the header of a disk, with the settings of its caller.
pub(super) struct HeaderFiles<'a>(pub(super) &'a LuksSettings);

impl HeaderFiles<'_> {
    pub(super) fn restore(
        &self,
        backup: &HeaderBackup,
        secret: &UnlockSecret,
        allow_older: bool,
    ) -> Result<HeaderGenerations, VolumeError> {
        let disk = self.0.open_disk(DiskAccess::Write)?;
        self.restore_to(&disk, backup, secret, allow_older).map_err(|error| self.0.error(error))
    }

    fn restore_to(
        &self,
        disk: &Disk,
        backup: &HeaderBackup,
        secret: &UnlockSecret,
        allow_older: bool,
    ) -> Result<HeaderGenerations, LuksError> {
        let slots = self.0.slots_of(disk);
        if backup.0.len() as u64 != HEADER_AREA_BYTES {
            return Err(LuksError::BackupSize { bytes: backup.0.len() as u64 });
        }
        let header = slots.device.check_area(backup.0.clone())?;
        match &header.summary.volume {
            Some(token) if token.state == VolumeProgress::Complete => self.0.check_keys(token)?,
            _ => return Err(LuksError::UnfinishedBackup),
        }
        // How far the data are re-encrypted is in no copy that is older than the last step.
        if header.summary.reencryption.is_some() {
            return Err(LuksError::Reencrypting { operation: "restore a header that was copied" });
        }
        let volume_key = slots.records.volume_key(header.uuid).map_err(LuksError::HeaderRecord)?;
        if volume_key.is_some_and(|recorded| recorded != header.summary.volume_key) {
            return Err(LuksError::Reencrypted);
        }
        // Any damage of the slots shows now, and not when the header that the disk has is gone.
        slots.open_header_slot(&header, secret, |slot, passphrase| {
            slots.device.opens(&header, slot, passphrase)
        })?;
        let present = match slots.device.check_header() {
            Ok(present) if is_same(&present, &header) => PresentHeader::Equal,
            Ok(present) if present.summary.reencryption.is_some() => PresentHeader::Reencrypting,
            Ok(_) => PresentHeader::Other,
            Err(LuksError::Header(_) | LuksError::Policy(_)) => PresentHeader::Unusable,
            Err(error) => return Err(error),
        };
        let is_mapped =
            slots.device.tool.find_mapping(&self.0.mapping_name).map_err(LuksError::FindMapping)?.is_some();
        let is_in_use = is_mapped || disk.check_unused().is_err();
        let step = plan_restore(present, is_in_use, slots.rollback(&header)?, allow_older)?;
        let generations = HeaderGenerations::newest_of(&header.summary);
        if step == RestoreStep::Write {
            slots.records.begin_restore(header.uuid).map_err(LuksError::HeaderRecord)?;
            write_area(disk, &header)?;
        }
        // Also of a restore that was killed after its last write.
        slots.records.end_restore(header.uuid).map_err(LuksError::HeaderRecord)?;
        Ok(generations)
    }
}

/// Returns whether a disk has this header already, in both copies. Each copy has a random number of its own, which means
/// nothing.
fn is_same(present: &CheckedHeader, header: &CheckedHeader) -> bool {
    let parse = |header: &CheckedHeader| LuksHeader::parse(&header.area).ok();
    present.has_both_copies
        && parse(present) == parse(header)
        && present.area[COPIES_BYTES..] == header.area[COPIES_BYTES..]
}

/// Writes a header, and never damages both copies at once.
fn write_area(disk: &Disk, header: &CheckedHeader) -> Result<(), LuksError> {
    let (first, rest) = header.area.split_at(COPY_BYTES);
    let (second, areas) = rest.split_at(COPY_BYTES);
    let second_at = COPY_BYTES as u64;
    for (offset, bytes) in [(second_at, second), (2 * second_at, areas), (0, first)] {
        disk.write_durably(offset, bytes).map_err(LuksError::WriteHeader)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_header_is_restored_below_an_open_volume_and_an_older_one_only_if_agreed() {
        let older = HeaderGenerations::default().rollback_from(HeaderGenerations { keys: 2, recovery: 0 });
        for present in
            [PresentHeader::Unusable, PresentHeader::Equal, PresentHeader::Other, PresentHeader::Reencrypting]
        {
            for (is_in_use, rollback, allow_older) in [
                (false, None, false),
                (false, older, false),
                (false, older, true),
                (true, None, false),
                (true, older, true),
            ] {
                let step = plan_restore(present, is_in_use, rollback, allow_older);
                match (present, is_in_use, rollback.is_some() && !allow_older) {
                    (PresentHeader::Equal, ..) => assert!(matches!(step, Ok(RestoreStep::Nothing))),
                    (PresentHeader::Reencrypting, ..) => {
                        assert!(matches!(step, Err(LuksError::Reencrypting { .. })));
                    }
                    (_, true, _) => assert!(matches!(step, Err(LuksError::HeaderInUse))),
                    (_, _, true) => assert!(matches!(step, Err(LuksError::OlderBackup { .. }))),
                    _ => assert!(matches!(step, Ok(RestoreStep::Write))),
                }
            }
        }
    }
}

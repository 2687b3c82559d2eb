//! The run of a re-encryption: cryptsetup works below the open volume for hours, and is stopped, killed and continued.
//!
//! While it works on a piece of the open volume, the hot zone, the kernel holds back what is read and written there. A SIGTERM
//! lets it complete the piece. After a SIGKILL, nobody releases the hot zone: its reads and writes are made to fail, the volume
//! is closed, and the next opening completes the piece by the checksums in the header. To release it instead would read and
//! write with the wrong key.
//!
//! A file that is locked by this process and its cryptsetup shows who comes later that one of them is still at work.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use super::super::VolumeError;
use super::super::disk::DiskAccess;
use super::super::uuid::Uuid;
use super::device::continue_reencryption;
use super::error::LuksError;
use super::key_slots::UnlockSecret;
use super::settings::{DEVICE_MAPPER, LuksSettings};
use super::status::ReencryptionProgress;
use crate::error::{Error as FileError, FileOperation};
use crate::{sys, syscalls};

/// The end of a call that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReencryptionEnd {
    /// All data have the new key, and nothing has the former one any more; also if no re-encryption was begun.
    Complete,
    /// It was stopped, and is to be continued.
    Stopped,
}

/// Runs a re-encryption, with the settings of its caller.
pub(super) struct ReencryptionRun<'a>(pub(super) &'a LuksSettings);

impl ReencryptionRun<'_> {
    pub(super) fn run(
        &self,
        secret: &UnlockSecret,
        mut report: impl FnMut(ReencryptionProgress) -> ControlFlow<()>,
    ) -> Result<ReencryptionEnd, VolumeError> {
        let to_error = |error| self.0.error(error);
        let lock = self.open_lock().map_err(to_error)?;
        // The cryptsetup of a process that was killed ends soon. The disk is not locked for that time.
        syscalls::lock(&lock).map_err(|errno| to_error(lock_error(errno)))?;
        let disk = self.0.open_disk(DiskAccess::Read)?;
        let slots = self.0.slots_of(&disk);
        let header = slots.device.check_header().map_err(to_error)?;
        if header.summary.reencryption.is_none() {
            return Ok(ReencryptionEnd::Complete);
        }
        // A call that was killed between both has not recorded it.
        slots
            .records
            .record_volume_key(header.uuid, &header.summary.volume_key)
            .map_err(|error| to_error(LuksError::HeaderRecord(error)))?;
        let opened = slots.open_slot(&header, secret).map_err(to_error)?;
        let unlocked = disk.reopen_unlocked()?;
        // The header can be read while it works.
        drop(disk);
        let mut is_stopped = false;
        let tool = &*self.0.config.cryptsetup;
        let ran = continue_reencryption(tool, &unlocked, &opened.passphrase, lock.as_fd(), &mut |progress| {
            let flow = report(progress);
            is_stopped |= flow.is_break();
            flow
        });
        drop(unlocked);
        syscalls::unlock(&lock);
        let disk = self.0.open_disk(DiskAccess::Read)?;
        let after = self.0.slots_of(&disk).device.check_header().map_err(to_error)?;
        match ran {
            _ if after.summary.reencryption.is_none() => Ok(ReencryptionEnd::Complete),
            Err(LuksError::Command(error)) if error.is_killed() && self.fail_hot_zone(header.uuid)? => {
                Err(to_error(LuksError::ReencryptionKilled))
            }
            // After an error in the middle of a piece, cryptsetup has let the reads and writes there fail itself.
            Err(LuksError::Command(error))
                if after.summary.reencryption.is_some_and(|state| state.needs_repair)
                    && !error.is_running_elsewhere() =>
            {
                Err(to_error(LuksError::ReencryptionKilled))
            }
            Err(LuksError::Command(_)) if is_stopped => Ok(ReencryptionEnd::Stopped),
            Err(error) => Err(to_error(error)),
            Ok(()) => Ok(ReencryptionEnd::Stopped),
        }
    }

    /// Lets reads and writes of the hot zone fail that a killed cryptsetup has left. Returns whether there is one; not while a
    /// cryptsetup is at work.
    pub(super) fn fail_left_hot_zone(&self) -> Result<bool, VolumeError> {
        let to_error = |error| self.0.error(error);
        let header = {
            let disk = self.0.open_disk(DiskAccess::Read)?;
            self.0.slots_of(&disk).device.check_header().map_err(to_error)?
        };
        if header.summary.reencryption.is_none() {
            return Ok(false);
        }
        let lock = self.open_lock().map_err(to_error)?;
        let is_free = syscalls::try_lock(&lock).map_err(|errno| to_error(lock_error(errno)))?;
        Ok(is_free && self.fail_hot_zone(header.uuid)?)
    }

    fn fail_hot_zone(&self, volume: Uuid) -> Result<bool, VolumeError> {
        let name = format!("{}-hotzone-forward", self.0.mapping_name);
        let to_error = |source| self.0.error(LuksError::FailHotZone(source));
        let found = self.0.config.cryptsetup.find_mapping(&name);
        let found = found.map_err(|error| self.0.error(LuksError::FindMapping(error)))?;
        // *Source:* cryptsetup, `dm_prepare_uuid`.
        let identifier = format!("CRYPT-SUBDEV-{}-{name}", volume.to_string().replace('-', ""));
        let Some(mapping) = found.filter(|found| found.identifier == identifier) else { return Ok(false) };
        let device = mapping.device_path.file_name().unwrap_or(OsStr::new(""));
        let size = fs::read_to_string(Path::new("/sys/block").join(device).join("size")).map_err(to_error)?;
        let sectors =
            size.trim_end().parse().map_err(|_| to_error(std::io::ErrorKind::InvalidData.into()))?;
        let control = File::options().read(true).write(true).open(DEVICE_MAPPER).map_err(to_error)?;
        sys::fail_mapping(control, &identifier, sectors).map_err(|errno| to_error(errno.into()))?;
        Ok(true)
    }

    fn open_lock(&self) -> Result<OwnedFd, LuksError> {
        let name = format!("reencryption-{}", self.0.mapping_name);
        syscalls::open_or_create_file(&self.0.config.runtime, OsStr::new(&name)).map_err(lock_error)
    }
}

fn lock_error(errno: rustix::io::Errno) -> LuksError {
    LuksError::HeaderCopy(FileError::new(FileOperation::Lock, "the lock of the re-encryption", errno))
}

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
use super::cryptsetup::ActiveMapping;
use super::device::{CheckedHeader, continue_reencryption};
use super::error::LuksError;
use super::key_slots::{KeySlots, UnlockSecret};
use super::reencryption::ReencryptionStage;
use super::settings::{DEVICE_MAPPER, LuksSettings};
use super::status::ReencryptionProgress;
use crate::error::{Error as FileError, FileOperation};
use crate::{sys, syscalls};

/// The name of the piece that is being worked on, in those of mappings.
const HOT_ZONE: &str = "hotzone-forward";

/// The end of a call that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReencryptionEnd {
    /// All data have the new key, and nothing has the former one any more; also if no re-encryption was begun.
    Complete,
    /// It was stopped, and is to be continued.
    Stopped,
}

/// How cryptsetup has ended, with the re-encryption not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ToolEnd {
    /// By itself, or it had nothing to do.
    Ended,
    /// By the caller, after a piece.
    Stopped,
    Killed,
    /// It could not begin: another cryptsetup is at work.
    Busy,
    Failed,
}

impl ToolEnd {
    fn of(ran: &Result<(), LuksError>, is_stopped: bool) -> ToolEnd {
        match ran {
            Ok(()) => ToolEnd::Ended,
            Err(LuksError::Command(error)) if error.is_killed() => ToolEnd::Killed,
            Err(LuksError::Command(error)) if error.is_running_elsewhere() => ToolEnd::Busy,
            Err(LuksError::Command(_)) if is_stopped => ToolEnd::Stopped,
            Err(_) => ToolEnd::Failed,
        }
    }

    /// After an error in the middle of a piece, cryptsetup has let the reads and writes there fail itself.
    fn may_leave_hot_zone(self) -> bool {
        matches!(self, ToolEnd::Ended | ToolEnd::Killed)
    }
}

/// What the end of cryptsetup asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EndStep {
    /// The header is written without the old key.
    Finish,
    /// The volume is closed, and opened again.
    Reopen,
    Stop,
    /// The error of cryptsetup is the caller's.
    Fail,
}

fn plan_end(ended: ToolEnd, stage: ReencryptionStage, has_hot_zone: bool) -> EndStep {
    match (ended, stage) {
        (ToolEnd::Busy, _) => EndStep::Fail,
        // Also where the last piece is complete: the open volume reads and writes by what the killed cryptsetup has left.
        _ if has_hot_zone => EndStep::Reopen,
        (_, ReencryptionStage::Header) => EndStep::Finish,
        (ToolEnd::Killed | ToolEnd::Stopped | ToolEnd::Failed, ReencryptionStage::Repair) => EndStep::Reopen,
        (ToolEnd::Ended | ToolEnd::Stopped, _) => EndStep::Stop,
        (ToolEnd::Killed | ToolEnd::Failed, ReencryptionStage::Data) => EndStep::Fail,
    }
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
        Self::record_key(&slots, &header).map_err(to_error)?;
        let opened = slots.open_slot(&header, secret).map_err(to_error)?;
        let unlocked = disk.reopen_unlocked()?;
        // The header can be read while it works.
        drop(disk);
        let mut is_stopped = false;
        let tool = &*self.0.config.cryptsetup;
        let ran = match header.summary.is_unfinished() {
            // cryptsetup would need a slot of the old key.
            true => Ok(()),
            false => {
                continue_reencryption(tool, &unlocked, &opened.passphrase, lock.as_fd(), &mut |progress| {
                    let flow = report(progress);
                    is_stopped |= flow.is_break();
                    flow
                })
            }
        };
        drop(unlocked);
        let after = {
            let disk = self.0.open_disk(DiskAccess::Read)?;
            self.0.slots_of(&disk).device.check_header().map_err(to_error)?
        };
        let Some(state) = after.summary.reencryption else { return Ok(ReencryptionEnd::Complete) };
        let ended = ToolEnd::of(&ran, is_stopped);
        let has_hot_zone = ended.may_leave_hot_zone() && self.fail_hot_zone(header.uuid)?;
        match plan_end(ended, state.stage, has_hot_zone) {
            EndStep::Finish => self.finish().map(|()| ReencryptionEnd::Complete),
            EndStep::Reopen => Err(to_error(LuksError::ReencryptionKilled)),
            EndStep::Stop => Ok(ReencryptionEnd::Stopped),
            EndStep::Fail => ran.map(|()| ReencryptionEnd::Stopped).map_err(to_error),
        }
    }

    /// Records the new volume key: a call that was killed after the begin has not done it.
    fn record_key(slots: &KeySlots<'_>, header: &CheckedHeader) -> Result<(), LuksError> {
        let key = &header.summary.volume_key;
        let recorded = slots.records.volume_key(header.uuid).map_err(LuksError::HeaderRecord)?;
        // The end has the key of the begin, and each opening records it: this header is an older one, which was put back.
        if header.summary.is_unfinished() && recorded.is_some_and(|recorded| recorded != *key) {
            return Err(LuksError::Reencrypted);
        }
        slots.records.record_volume_key(header.uuid, key).map_err(LuksError::HeaderRecord)
    }

    /// Writes the header that cryptsetup has not. Ours has ended, and an operator's writes no header over another one than it
    /// has read.
    fn finish(&self) -> Result<(), VolumeError> {
        let disk = self.0.open_disk(DiskAccess::Write)?;
        let device = self.0.slots_of(&disk).device;
        let finished = device.check_header().and_then(|header| match header.summary.is_unfinished() {
            true => device.finish_header(&header),
            false => Ok(()),
        });
        finished.map_err(|error| self.0.error(error))
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

    /// Removes the mappings below a volume that is not open. A cryptsetup that was killed at its end, when the volume did not need
    /// them any more, has left them there, and they keep the disk in use. Not while a cryptsetup is at work.
    pub(super) fn remove_left_mappings(&self, volume: Uuid) -> Result<(), VolumeError> {
        let to_error = |error| self.0.error(error);
        // The first lies on the second.
        for part in ["overlay", HOT_ZONE] {
            let Some(mapping) = self.find_part(volume, part)? else { continue };
            let lock = self.open_lock().map_err(to_error)?;
            if !syscalls::try_lock(&lock).map_err(|errno| to_error(lock_error(errno)))? {
                return Ok(());
            }
            let removed = File::options().read(true).write(true).open(DEVICE_MAPPER).and_then(|control| {
                sys::remove_mapping(control, &mapping.identifier).map_err(std::io::Error::from)
            });
            removed.map_err(|source| to_error(LuksError::EndKilled(source)))?;
        }
        Ok(())
    }

    /// The mapping by which cryptsetup works on a part of the volume.
    fn find_part(&self, volume: Uuid, part: &str) -> Result<Option<ActiveMapping>, VolumeError> {
        let name = format!("{}-{part}", self.0.mapping_name);
        let found = self.0.config.cryptsetup.find_mapping(&name);
        let found = found.map_err(|error| self.0.error(LuksError::FindMapping(error)))?;
        // *Source:* cryptsetup, `dm_prepare_uuid`.
        let identifier = format!("CRYPT-SUBDEV-{}-{name}", volume.to_string().replace('-', ""));
        Ok(found.filter(|found| found.identifier == identifier))
    }

    fn fail_hot_zone(&self, volume: Uuid) -> Result<bool, VolumeError> {
        let to_error = |source| self.0.error(LuksError::EndKilled(source));
        let Some(mapping) = self.find_part(volume, HOT_ZONE)? else { return Ok(false) };
        let device = mapping.device_path.file_name().unwrap_or(OsStr::new(""));
        let size = fs::read_to_string(Path::new("/sys/block").join(device).join("size")).map_err(to_error)?;
        let sectors =
            size.trim_end().parse().map_err(|_| to_error(std::io::ErrorKind::InvalidData.into()))?;
        let control = File::options().read(true).write(true).open(DEVICE_MAPPER).map_err(to_error)?;
        sys::fail_mapping(control, &mapping.identifier, sectors).map_err(|errno| to_error(errno.into()))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_finished_once_all_data_have_the_new_key_and_nobody_else_is_at_work() {
        use ReencryptionStage::{Data, Header, Repair};
        use ToolEnd::{Busy, Ended, Failed, Killed, Stopped};
        for (ended, stage, has_hot_zone, step) in [
            (Killed, Header, false, EndStep::Finish),
            (Failed, Header, false, EndStep::Finish),
            (Ended, Header, false, EndStep::Finish),
            (Stopped, Header, false, EndStep::Finish),
            (Busy, Header, false, EndStep::Fail),
            (Killed, Header, true, EndStep::Reopen),
            (Ended, Header, true, EndStep::Reopen),
            (Killed, Repair, true, EndStep::Reopen),
            // Below a volume that is not open.
            (Killed, Repair, false, EndStep::Reopen),
            (Failed, Repair, false, EndStep::Reopen),
            (Busy, Repair, false, EndStep::Fail),
            (Ended, Data, false, EndStep::Stop),
            (Stopped, Data, false, EndStep::Stop),
            (Killed, Data, false, EndStep::Fail),
            (Failed, Data, false, EndStep::Fail),
        ] {
            assert_eq!(plan_end(ended, stage, has_hot_zone), step, "{ended:?} {stage:?} {has_hot_zone}");
        }
    }
}

//! One LUKS2 device: the calls of cryptsetup on it, and the check of its header before each use.

use std::ffi::OsString;
use std::fs::File;
use std::ops::ControlFlow;
use std::os::fd::{AsFd as _, BorrowedFd};

use serde::Deserialize;
use zeroize::Zeroizing;

use super::super::VolumeError;
use super::super::disk::Disk;
use super::super::uuid::Uuid;
use super::cryptsetup::{ActiveMapping, Cryptsetup, CryptsetupCall};
use super::error::LuksError;
use super::header::{
    COPIES_BYTES, COPY_BYTES, HEADER_AREA_BYTES, HeaderError, LuksHeader, has_foreign_magic,
};
use super::policy::{
    CIPHER, HeaderSummary, MIN_PBKDF2_ITERATIONS, PolicyViolation, check_header, read_volume_token,
};
use super::reencryption::finish_metadata;
use super::slot_kind::SlotToken;
use super::status::ReencryptionProgress;
use super::token::{VOLUME_TOKEN, VolumeEncryption, VolumeToken};
use crate::dir::Dir;
use crate::metadata::FileMode;
use crate::syscalls;

/// The slot that luksFormat creates.
pub(super) const FIRST_SLOT: u32 = 0;
/// The number of key slots for which a token has an identifier. LUKS2 has 32 tokens.
const SLOT_COUNT: u32 = 31;
/// The readings of a header that was found damaged before it counts as that.
const READ_ATTEMPTS: u32 = 4;
/// The piece of the data that a re-encryption works on: reads and writes of it wait until it is done.
const HOT_ZONE: &str = "32M";

pub(super) type Passphrase = Zeroizing<Vec<u8>>;

/// A header that meets the policy.
#[derive(Debug)]
pub(super) struct CheckedHeader {
    pub(super) uuid: Uuid,
    pub(super) summary: HeaderSummary,
    /// True if both copies on the disk are correct.
    pub(super) has_both_copies: bool,
    /// The header area, with nothing but what was checked. At the end of a re-encryption, it is the one that is still to be
    /// [written](LuksDevice::finish_header).
    pub(super) area: Vec<u8>,
}

/// A disk with LUKS2, or to be formatted as such, under the lock of this process.
#[derive(Clone, Copy, Debug)]
pub(super) struct LuksDevice<'a> {
    pub(super) disk: &'a Disk,
    pub(super) tool: &'a dyn Cryptsetup,
    /// The directory of the checked copy of the header while cryptsetup uses it: a directory in memory.
    pub(super) runtime: &'a Dir,
    pub(super) encryption: VolumeEncryption,
}

impl LuksDevice<'_> {
    /// The header as it is on the disk. Its metadata are not checked.
    pub(super) fn read_header(&self) -> Result<Result<LuksHeader, HeaderError>, LuksError> {
        let start = self.disk.read_start(COPIES_BYTES as u64).map_err(LuksError::device)?;
        Ok(LuksHeader::parse(&start))
    }

    /// Returns whether the disk has a header that a format with this UUID has not written, not even half.
    pub(super) fn has_foreign_header(&self, uuid: Uuid) -> Result<bool, LuksError> {
        let start = self.disk.read_start(COPIES_BYTES as u64).map_err(LuksError::device)?;
        Ok(has_foreign_magic(&start, uuid))
    }

    /// Reads the header, and checks it against the policy.
    pub(super) fn check_header(&self) -> Result<CheckedHeader, LuksError> {
        let read = || self.disk.read_start(HEADER_AREA_BYTES).map_err(LuksError::device);
        // A re-encryption writes it again and again, without our lock.
        for _ in 0..READ_ATTEMPTS {
            match self.check_area(read()?) {
                Err(LuksError::Header(HeaderError::Damaged | HeaderError::Contradiction)) => {}
                checked => return checked,
            }
        }
        self.check_area(read()?)
    }

    /// Checks a header area, of the disk or a backup, against the policy.
    pub(super) fn check_area(&self, mut area: Vec<u8>) -> Result<CheckedHeader, LuksError> {
        let header = LuksHeader::parse(&area).map_err(LuksError::Header)?;
        let summary = check_header(&header.json, self.encryption).map_err(LuksError::Policy)?;
        header.keep_only_current(&mut area);
        if summary.is_unfinished() {
            let finished = finish_metadata(&header.json).ok_or_else(|| {
                LuksError::Policy(PolicyViolation::Reencryption("its end does not fit".to_owned()))
            })?;
            header.replace_metadata(&mut area, &finished);
        }
        let has_both_copies = header.current_copies == [true; 2];
        Ok(CheckedHeader { uuid: header.uuid, summary, has_both_copies, area })
    }

    /// Formats the disk with one key slot. Of an authenticated one, no block can be read before it was written.
    pub(super) fn format(
        &self,
        uuid: Uuid,
        passphrase: &Passphrase,
        sector_bytes: u32,
    ) -> Result<(), LuksError> {
        // Everything that the policy checks is set here: the defaults of cryptsetup differ between its builds.
        let mut arguments = words(&["--type", "luks2", "--cipher", CIPHER, "--key-size", "512"]);
        arguments.extend(words(&["--offset", &(HEADER_AREA_BYTES / 512).to_string()]));
        arguments.extend(words(&["--sector-size", &sector_bytes.to_string(), "--uuid", &uuid.to_string()]));
        arguments.extend(slot_options());
        if self.encryption == VolumeEncryption::EncryptedAndAuthenticated {
            // cryptsetup can't resume a wipe, and leaves its mappings when it is killed in one.
            arguments.extend(words(&["--integrity", "hmac-sha256", "--integrity-no-wipe"]));
        }
        arguments.extend(words(&["--key-slot", &FIRST_SLOT.to_string(), "--key-file", "-"]));
        self.run("luksFormat", arguments, passphrase.clone())
    }

    /// Adds a key slot, which a token announces before and names afterwards. If the process is killed in between, the next
    /// rotation removes the slot: without the announcement, it would be one that an operator has added.
    pub(super) fn add_slot(
        &self,
        existing: &Passphrase,
        new: &Passphrase,
        token: impl FnOnce(u32) -> SlotToken,
    ) -> Result<(), LuksError> {
        let header = self.check_header()?;
        let slot = free_slot(&header.summary).ok_or(LuksError::NoFreeSlot)?;
        let token = token(slot);
        self.write_slot_token(slot, &token.to_announcement())?;
        let mut arguments = slot_options();
        arguments.extend(words(&["--key-file=-", &format!("--keyfile-size={}", existing.len())]));
        arguments.extend(words(&["--new-key-slot", &slot.to_string()]));
        // cryptsetup reads the passphrase of this length, and the rest as the new one.
        let input = Zeroizing::new([&existing[..], &new[..]].concat());
        if let Err(error) = self.run("luksAddKey", arguments, input) {
            // The error that led here is the useful one.
            let _ = self.take_back_announcement(slot);
            return Err(error);
        }
        self.write_slot_token(slot, &token)?;
        // The caller may remove the old slot next, so the new one is tried by the header that is on the disk now.
        if self.opens(&self.check_header()?, slot, new)? {
            Ok(())
        } else {
            Err(LuksError::SlotNotVerified { slot })
        }
    }

    /// Removes the announcement of a slot that was not added: one that an operator adds later would be taken for it.
    fn take_back_announcement(&self, slot: u32) -> Result<(), LuksError> {
        let was_added = self.check_header()?.summary.slots.contains(&slot);
        if was_added { Ok(()) } else { self.remove_token(slot + 1) }
    }

    /// Writes the token of a slot that has none.
    pub(super) fn write_slot_token(&self, slot: u32, token: &SlotToken) -> Result<(), LuksError> {
        self.replace_slot_token(slot + 1, token)
    }

    pub(super) fn replace_slot_token(&self, identifier: u32, token: &SlotToken) -> Result<(), LuksError> {
        self.write_token(identifier, serde_json::to_vec(token).map_err(LuksError::Record)?)
    }

    pub(super) fn write_volume_token(&self, token: &VolumeToken) -> Result<(), LuksError> {
        self.write_token(VOLUME_TOKEN, serde_json::to_vec(token).map_err(LuksError::Record)?)
    }

    fn write_token(&self, identifier: u32, json: Vec<u8>) -> Result<(), LuksError> {
        let identifier = identifier.to_string();
        let arguments = words(&["--json-file=-", "--token-replace", "--token-id", &identifier]);
        self.run("token import", arguments, Zeroizing::new(json))
    }

    /// Removes a key slot with a key of no data. Its token is that of another slot.
    pub(super) fn remove_unused_slot(&self, slot: u32) -> Result<(), LuksError> {
        self.call("luksKillSlot", self.device_arguments(&[&slot.to_string()]), Passphrase::default())
    }

    /// Removes a key slot, and then its token.
    pub(super) fn remove_slot(&self, slot: u32) -> Result<(), LuksError> {
        let summary = self.check_header()?.summary;
        // Nothing would open the volume any more, and in batch mode cryptsetup does not ask.
        if summary.slots == [slot] {
            return Err(LuksError::LastSlot { slot });
        }
        // The slot first: a token without a slot opens nothing, and the next rotation removes it.
        if summary.slots.contains(&slot) {
            let arguments = self.device_arguments(&[&slot.to_string()]);
            self.call("luksKillSlot", arguments, Passphrase::default())?;
        }
        let token = summary.token_of(slot);
        let names_another =
            |identifier: &u32| summary.slot_tokens[identifier].slots().any(|named| named != slot);
        token
            .filter(|identifier| !names_another(identifier))
            .map_or(Ok(()), |identifier| self.remove_token(identifier))
    }

    pub(super) fn remove_token(&self, identifier: u32) -> Result<(), LuksError> {
        let identifier = identifier.to_string();
        self.run("token remove", words(&["--token-id", &identifier]), Passphrase::default())
    }

    /// Returns whether a passphrase opens this slot of the header that was checked.
    pub(super) fn opens(
        &self,
        header: &CheckedHeader,
        slot: u32,
        passphrase: &Passphrase,
    ) -> Result<bool, LuksError> {
        let arguments = words(&["--test-passphrase"]);
        self.open_by_copy(header, slot, passphrase, arguments, &[])
    }

    /// Maps the data under a name that is not in use, with the header that was checked, and further options of cryptsetup.
    /// Returns whether the passphrase opens the slot.
    pub(super) fn open(
        &self,
        header: &CheckedHeader,
        slot: u32,
        passphrase: &Passphrase,
        name: &str,
        options: &[&str],
    ) -> Result<bool, LuksError> {
        self.open_by_copy(header, slot, passphrase, words(options), &[name])
    }

    /// Grows the mapping to the end of the disk.
    pub(super) fn resize(
        &self,
        header: &CheckedHeader,
        passphrase: &Passphrase,
        name: &str,
    ) -> Result<(), LuksError> {
        let file = self.write_copy(header)?;
        let mut arguments = words(&["--key-file", "-", "--header"]);
        arguments.extend([self.runtime.path().join(&file).into(), "--".into(), name.into()]);
        let resized = self.call("resize", arguments, passphrase.clone());
        self.remove_copy(&file)?;
        resized
    }

    /// The open mapping of a volume. Only the kernel knows its device node, without udev.
    ///
    /// # Errors
    /// [`LuksError::MappingInUse`] if another volume uses the name.
    pub(super) fn find_mapping_of(
        &self,
        volume: Uuid,
        name: &str,
    ) -> Result<Option<ActiveMapping>, LuksError> {
        match self.tool.find_mapping(name).map_err(LuksError::FindMapping)? {
            Some(active) if active.identifier != mapping_identifier(volume, name) => {
                Err(LuksError::MappingInUse { name: name.to_owned() })
            }
            found => Ok(found),
        }
    }

    /// Runs `cryptsetup open` with the header that was checked. Returns whether the passphrase opens the slot.
    fn open_by_copy(
        &self,
        header: &CheckedHeader,
        slot: u32,
        passphrase: &Passphrase,
        mut arguments: Vec<OsString>,
        behind: &[&str],
    ) -> Result<bool, LuksError> {
        // The handlers of external tokens are libraries, which the header could make cryptsetup load.
        arguments.extend(words(&["--type", "luks2", "--disable-external-tokens"]));
        let file = self.write_copy(header)?;
        arguments.extend(words(&["--key-file", "-"]));
        let is_reencrypting = header.summary.reencryption.is_some() && !header.summary.is_unfinished();
        // A volume with two keys needs a slot of each, which the same passphrase opens.
        if !is_reencrypting {
            arguments.extend(words(&["--key-slot", &slot.to_string()]));
        }
        arguments.push("--header".into());
        arguments.push(self.runtime.path().join(&file).into());
        arguments.extend(self.device_arguments(behind));
        let done = self.call("open", arguments, passphrase.clone());
        // Removed also after a failure: the next call writes the header that it has checked itself.
        self.remove_copy(&file)?;
        match done {
            Ok(()) => Ok(true),
            Err(LuksError::Command(error)) if error.is_wrong_passphrase() => Ok(false),
            Err(LuksError::Command(error)) if is_reencrypting && error.is_unusable_passphrase() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Begins a re-encryption: adds a slot of a new volume key for each slot that there is, and encrypts nothing yet. The
    /// passphrases are those of all slots, in the order of their numbers.
    pub(super) fn begin_reencryption(&self, passphrases: &[Passphrase]) -> Result<(), LuksError> {
        let mut arguments = slot_options();
        arguments.extend(words(&["--init-only", "--resilience", "checksum", "--resilience-hash", "sha256"]));
        arguments.extend(self.disk.is_image().then(|| "--force-offline-reencrypt".into()));
        let bytes = passphrases.iter().map(|passphrase| passphrase.len() + 1).sum();
        // Without a file of keys, cryptsetup asks for each slot, and reads a line: no passphrase has a newline.
        let mut input = Zeroizing::new(Vec::with_capacity(bytes));
        for passphrase in passphrases {
            input.extend_from_slice(passphrase);
            input.push(b'\n');
        }
        self.run("reencrypt", arguments, input)
    }

    /// Completes the piece in which cryptsetup was killed. The volume must not be mapped: cryptsetup does nothing otherwise.
    pub(super) fn repair(&self, passphrase: &Passphrase) -> Result<(), LuksError> {
        self.run("repair", words(&["--key-file", "-"]), passphrase.clone())
    }

    /// Writes the header without the old key, where all data have the new one. The disk is open to write. At least one copy is
    /// correct at each point, and both open the volume. The areas of the old slots stay: they hold a key of no data.
    pub(super) fn finish_header(&self, header: &CheckedHeader) -> Result<(), LuksError> {
        let (first, second) = header.area[..COPIES_BYTES].split_at(COPY_BYTES);
        for (offset, copy) in [(COPY_BYTES as u64, second), (0, first)] {
            self.disk.write_durably(offset, copy).map_err(LuksError::WriteHeader)?;
        }
        Ok(())
    }

    /// The file with the header that was checked: cryptsetup opens the volume by it, even if the disk has another
    /// header by then.
    fn write_copy(&self, header: &CheckedHeader) -> Result<String, LuksError> {
        let name = format!("luks-header-{}", header.uuid);
        self.runtime.write(&name, &header.area, FileMode::PRIVATE_FILE).map_err(LuksError::HeaderCopy)?;
        Ok(name)
    }

    fn remove_copy(&self, name: &str) -> Result<(), LuksError> {
        self.runtime.remove_file(name).map(|_| ()).map_err(LuksError::HeaderCopy)
    }

    fn run(
        &self,
        action: &'static str,
        mut arguments: Vec<OsString>,
        input: Passphrase,
    ) -> Result<(), LuksError> {
        arguments.extend(self.device_arguments(&[]));
        self.call(action, arguments, input)
    }

    fn call(
        &self,
        action: &'static str,
        mut arguments: Vec<OsString>,
        input: Passphrase,
    ) -> Result<(), LuksError> {
        // cryptsetup would otherwise ask for confirmations.
        arguments.insert(0, "--batch-mode".into());
        let device = Some(self.disk.as_fd());
        let call = CryptsetupCall { action, arguments, device, input };
        let done = self.tool.run(&call).map_err(LuksError::Command);
        // A disk that was replaced explains any failure.
        self.disk.check_identity().map_err(LuksError::device)?;
        done
    }

    /// The device, and what follows it. The lock that cryptsetup takes on a disk image is the one that we hold on it;
    /// on a block device they are different.
    fn device_arguments(&self, behind: &[&str]) -> Vec<OsString> {
        let mut arguments = Vec::new();
        arguments.extend(self.disk.is_image().then(|| "--disable-locks".into()));
        arguments.extend(["--".into(), syscalls::proc_path(self.disk.as_fd()).into_os_string()]);
        arguments.extend(words(behind));
        arguments
    }
}

/// The UUID and the token of the volume on a disk, before its policy is checked; none if the disk has no header of this
/// crate.
pub(crate) fn read_volume_of(disk: &Disk) -> Result<Option<(Uuid, VolumeToken)>, VolumeError> {
    let start = disk.read_start(COPIES_BYTES as u64)?;
    let header = LuksHeader::parse(&start).ok();
    Ok(header.and_then(|header| Some((header.uuid, read_volume_token(&header.json)?))))
}

/// Continues a re-encryption to its end, below the open volume if it is open. It takes hours, so the disk is one that is not
/// locked. A child that outlives this process keeps the other lock, and ends soon.
pub(super) fn continue_reencryption(
    tool: &dyn Cryptsetup,
    disk: &File,
    passphrase: &Passphrase,
    lock: BorrowedFd<'_>,
    report: &mut dyn FnMut(ReencryptionProgress) -> ControlFlow<()>,
) -> Result<(), LuksError> {
    let mut arguments = words(&["--batch-mode", "--resume-only", "--key-file", "-"]);
    arguments.extend(words(&["--resilience", "checksum", "--resilience-hash", "sha256"]));
    arguments.extend(words(&["--hotzone-size", HOT_ZONE, "--progress-json"]));
    if disk.metadata().is_ok_and(|metadata| metadata.is_file()) {
        arguments.extend(words(&["--force-offline-reencrypt", "--disable-locks"]));
    }
    arguments.extend(["--".into(), syscalls::proc_path(disk).into_os_string()]);
    let call = CryptsetupCall {
        action: "reencrypt",
        arguments,
        device: Some(disk.as_fd()),
        input: passphrase.clone(),
    };
    let mut report = |line: &str| parse_progress(line).map_or(ControlFlow::Continue(()), &mut *report);
    tool.run_long(&call, lock, &mut report).map_err(LuksError::Command)
}

/// A line of `--progress-json`. All numbers are strings.
///
/// *Source:* cryptsetup-reencrypt(8), `--progress-json`.
#[derive(Deserialize)]
struct ProgressLine {
    device_bytes: String,
    device_size: String,
}

/// The progress in a line of cryptsetup's output; none if it is another one.
fn parse_progress(line: &str) -> Option<ReencryptionProgress> {
    let line: ProgressLine = serde_json::from_str(line).ok()?;
    let (done_bytes, total_bytes) = (line.device_bytes.parse().ok()?, line.device_size.parse().ok()?);
    (done_bytes <= total_bytes).then_some(ReencryptionProgress { done_bytes, total_bytes })
}

/// Closes a mapping, if there is one.
pub(super) fn close_mapping(tool: &dyn Cryptsetup, name: &str) -> Result<(), LuksError> {
    if tool.find_mapping(name).map_err(LuksError::FindMapping)?.is_none() {
        return Ok(());
    }
    let call = CryptsetupCall {
        action: "close",
        arguments: words(&["--batch-mode", "--", name]),
        device: None,
        input: Passphrase::default(),
    };
    tool.run(&call).map_err(LuksError::Command)
}

/// *Source:* cryptsetup, `dm_prepare_uuid`.
pub(super) fn mapping_identifier(uuid: Uuid, name: &str) -> String {
    format!("CRYPT-LUKS2-{}-{name}", uuid.to_string().replace('-', ""))
}

/// The lowest number without a slot and without a token.
fn free_slot(summary: &HeaderSummary) -> Option<u32> {
    let is_used = |slot: &u32| summary.slots.contains(slot) || summary.unused_slots.contains(slot);
    (0..SLOT_COUNT).find(|slot| !is_used(slot) && !summary.has_token(slot + 1))
}

/// The passphrases have at least 160 random bits: a slow function would add seconds and no safety.
fn slot_options() -> Vec<OsString> {
    let iterations = MIN_PBKDF2_ITERATIONS.to_string();
    words(&["--pbkdf", "pbkdf2", "--hash", "sha256", "--pbkdf-force-iterations", &iterations])
}

fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_is_read_from_the_lines_of_cryptsetup_and_from_no_other() {
        let line = r#"{"device":"/dev/vdc","device_bytes":"16777216","device_size":"251658240","speed":"12213398","eta_ms":"19231","time_ms":"1373"}"#;
        let progress = ReencryptionProgress { done_bytes: 16_777_216, total_bytes: 251_658_240 };
        assert_eq!(parse_progress(line), Some(progress));
        for other in
            ["", "Finished, time 00m18s", "{}", r#"{"device_bytes":"2","device_size":"1"}"#, &line[..60]]
        {
            assert_eq!(parse_progress(other), None, "{other}");
        }
    }
}

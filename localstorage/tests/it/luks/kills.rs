//! Creation, rotation and confirmation killed at each call of cryptsetup and at each system call.

use std::fs;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nodekeel_localstorage::testing::{SyscallAction, with_failpoint_hook};
use nodekeel_localstorage::volume::{
    ActiveMapping, Cryptsetup, CryptsetupCall, CryptsetupError, DataVolume as _, EncryptedVolume as _,
    ErasePolicy, KeyPolicy, LuksVolume, UnlockSecret, VolumeError,
};

use super::{HEADER_BYTES, LuksFixture, MIB, slots_of};

/// Kills at every call if it is `all`, else at a sample from one that `NODEKEEL_SEED` chooses.
const KILLS_VARIABLE: &str = "NODEKEEL_LUKS_KILLS";

/// The numbers of the calls at which to kill, without end: of so many, one is in the sample.
pub(super) fn choose_calls(one_of: usize) -> impl Iterator<Item = usize> {
    let kills_at_each = std::env::var(KILLS_VARIABLE).is_ok_and(|count| count == "all");
    let seed = std::env::var("NODEKEEL_SEED").map_or(0, |seed| seed.parse().unwrap());
    let (first, step) = if kills_at_each { (1, 1) } else { (1 + seed % one_of, one_of) };
    (first..).step_by(step)
}

/// The call of cryptsetup at which a process is killed, counted from 1, and whether it is executed first.
#[derive(Clone, Copy, Debug)]
pub(super) struct KillMoment {
    number: usize,
    is_executed: bool,
}

impl KillMoment {
    pub(super) fn before(number: usize) -> KillMoment {
        KillMoment { number, is_executed: false }
    }

    pub(super) fn after(number: usize) -> KillMoment {
        KillMoment { number, is_executed: true }
    }
}

/// Panics at one call, before or after it: the rest of the process does not run.
#[derive(Debug)]
pub(super) struct KilledAt {
    tool: Box<dyn Cryptsetup>,
    moment: KillMoment,
    calls: AtomicUsize,
}

impl KilledAt {
    pub(super) fn new(tool: impl Cryptsetup + 'static, moment: KillMoment) -> KilledAt {
        KilledAt { tool: Box::new(tool), moment, calls: AtomicUsize::new(0) }
    }
}

impl Cryptsetup for KilledAt {
    fn run(&self, call: &CryptsetupCall<'_>) -> Result<(), CryptsetupError> {
        if self.calls.fetch_add(1, Ordering::Relaxed) + 1 != self.moment.number {
            return self.tool.run(call);
        }
        if self.moment.is_executed {
            self.tool.run(call)?;
        }
        panic!("killed at {}", call.action);
    }

    fn find_mapping(&self, name: &str) -> io::Result<Option<ActiveMapping>> {
        self.tool.find_mapping(name)
    }
}

/// Runs `work` in a process that is killed at this call of cryptsetup. Returns what it returns, or none if it is
/// killed.
fn kill_at<R>(
    fixture: &LuksFixture,
    keys: KeyPolicy,
    moment: KillMoment,
    work: impl FnOnce(&LuksVolume) -> R,
) -> Option<R> {
    let volume = fixture.volume_by(keys, Arc::new(KilledAt::new(fixture.tool(), moment)));
    panic::catch_unwind(AssertUnwindSafe(|| work(&volume))).ok()
}

/// Runs `work` with volumes whose process is killed at one call of cryptsetup, before or after it, and then at one
/// system call, for each call until the work is complete. `check` is given the same machine after its restart.
pub(super) fn for_each_kill(
    keys: KeyPolicy,
    prepare: impl Fn() -> LuksFixture,
    work: impl Fn(&LuksVolume) -> bool,
    check: impl Fn(&LuksFixture, &str),
) {
    let mut calls = 0;
    for moment in (1..).flat_map(|number| [KillMoment::before(number), KillMoment::after(number)]) {
        let fixture = prepare();
        let is_complete = kill_at(&fixture, keys, moment, &work) == Some(true);
        check(&fixture, &format!("cryptsetup: {moment:?}"));
        if is_complete {
            break;
        }
        calls = moment.number;
    }
    assert!(calls >= 3, "the work takes {calls} calls of cryptsetup");
    for number in choose_calls(32) {
        let fixture = prepare();
        let mut count = 0;
        let fail = move |_call: &'static str| {
            count += 1;
            if count < number { SyscallAction::Proceed } else { SyscallAction::Fail(5) }
        };
        let volume = fixture.volume(keys);
        let is_complete = with_failpoint_hook(fail, || work(&volume));
        drop(volume);
        check(&fixture, &format!("system call {number}"));
        if is_complete {
            break;
        }
    }
}

#[test]
#[ignore = "sampled: needs cryptsetup"]
fn a_creation_killed_at_any_call_resumes_and_never_opens_before() {
    let create = |volume: &LuksVolume| volume.mount_new_with_key(ErasePolicy::Nothing).is_ok();
    let check = |fixture: &LuksFixture, moment: &str| {
        let volume = fixture.volume(KeyPolicy::Split);
        let created = volume.mount_new_with_key(ErasePolicy::Nothing);
        let key = match created {
            Ok((_, key)) => key,
            // It was killed after the last step: the volume exists, and its node opens it.
            Err(VolumeError::Occupied { .. }) => {
                volume.mount_existing().unwrap_or_else(|error| panic!("{moment}: {error:?}"));
                volume.rotate_keys(&UnlockSecret::Node).unwrap()
            }
            Err(error) => panic!("{moment}: {error:?}"),
        };
        volume.confirm_secret(&UnlockSecret::Cluster(key.unwrap())).unwrap();
        assert_eq!(volume.encryption_status().unwrap().slots.len(), 1, "{moment}");
        volume.unmount().unwrap();
    };
    for_each_kill(KeyPolicy::Split, LuksFixture::new, create, check);
}

#[test]
#[ignore = "sampled: needs cryptsetup"]
fn an_interrupted_creation_is_unfinished_and_has_no_data() {
    // The last call, the sixth, records that the volume is complete.
    for number in 1..6 {
        let fixture = LuksFixture::new();
        let create = |volume: &LuksVolume| volume.mount_new(ErasePolicy::Nothing).is_ok();
        assert_eq!(kill_at(&fixture, KeyPolicy::Local, KillMoment::after(number), create), None);
        let existing = fixture.volume(KeyPolicy::Local).mount_existing().unwrap_err();
        let is_known = matches!(existing, VolumeError::Unfinished { .. } | VolumeError::ForeignData { .. });
        assert!(is_known, "call {number}: {existing:?}");
        // Another node, without the journal, does not format it either.
        fs::remove_dir_all(fixture.path("esp")).unwrap();
        fs::create_dir(fixture.path("esp")).unwrap();
        let before = fixture.ends();
        let rejected = fixture.volume(KeyPolicy::Local).mount_new(ErasePolicy::Nothing);
        assert!(matches!(rejected, Err(VolumeError::Occupied { .. })), "call {number}: {rejected:?}");
        assert!(before == fixture.ends(), "call {number}: the disk has changed");
    }
}

#[test]
#[ignore = "sampled: needs cryptsetup"]
fn a_rotation_killed_at_any_call_leaves_a_key_that_opens_and_can_be_repeated() {
    for keys in [KeyPolicy::Local, KeyPolicy::Split] {
        let (template, key) = LuksFixture::with_volume(keys);
        let old = key.map_or(UnlockSecret::Node, UnlockSecret::Cluster);
        template.volume(keys).confirm_secret(&old).unwrap();
        let rotate = |volume: &LuksVolume| volume.rotate_keys(&old).is_ok();
        let check = |fixture: &LuksFixture, moment: &str| {
            let volume = fixture.volume(keys);
            volume.mount_existing_with(&old).unwrap_or_else(|error| panic!("{moment}: {error:?}"));
            let new = volume.rotate_keys(&old).unwrap_or_else(|error| panic!("{moment}: {error:?}"));
            let new = new.map_or(UnlockSecret::Node, UnlockSecret::Cluster);
            volume.confirm_secret(&new).unwrap();
            volume.unmount().unwrap();
            volume.mount_existing_with(&new).unwrap();
            let slots = slots_of(&volume);
            assert!(!slots.contains("stale") && !slots.contains(','), "{moment}: {slots}");
            assert_eq!(fixture.key_files().len(), 1, "{moment}");
            volume.unmount().unwrap();
        };
        for_each_kill(keys, || template.copy(), rotate, check);
    }
}

#[test]
#[ignore = "sampled: needs cryptsetup"]
fn a_confirmation_killed_at_any_call_is_repeated() {
    let (template, key) = LuksFixture::with_volume(KeyPolicy::Split);
    let old = UnlockSecret::Cluster(key.unwrap());
    let new = template.volume(KeyPolicy::Split).rotate_keys(&old).unwrap();
    let new = UnlockSecret::Cluster(new.unwrap());
    assert_eq!(slots_of(&template.volume(KeyPolicy::Split)), "local 1 stale, split 1 stale, split 2");
    let confirm = |volume: &LuksVolume| volume.confirm_secret(&new).is_ok();
    let check = |fixture: &LuksFixture, moment: &str| {
        let volume = fixture.volume(KeyPolicy::Split);
        volume.mount_existing_with(&new).unwrap_or_else(|error| panic!("{moment}: {error:?}"));
        volume.confirm_secret(&new).unwrap_or_else(|error| panic!("{moment}: {error:?}"));
        volume.unmount().unwrap();
        assert_eq!((slots_of(&volume), fixture.key_files().len()), ("split 2".into(), 1), "{moment}");
    };
    for_each_kill(KeyPolicy::Split, || template.copy(), confirm, check);
}

#[test]
#[ignore = "sampled: needs cryptsetup"]
fn a_confirmation_of_a_passphrase_killed_at_any_call_leaves_a_confirmed_one_and_is_repeated() {
    let (template, _) = LuksFixture::with_volume(KeyPolicy::Local);
    let volume = template.volume(KeyPolicy::Local);
    let add = || UnlockSecret::Recovery(volume.add_recovery_passphrase(&UnlockSecret::Node).unwrap());
    let old = add();
    volume.confirm_secret(&old).unwrap();
    let new = add();
    assert_eq!(slots_of(&volume), "local 1, recovery 1 stale, recovery 2 unconfirmed");
    let confirm = |volume: &LuksVolume| volume.confirm_secret(&new).is_ok();
    let check = |fixture: &LuksFixture, moment: &str| {
        let volume = fixture.volume(KeyPolicy::Local);
        let opens = |secret| volume.test_secret(secret).unwrap().is_some();
        let is_confirmed = !slots_of(&volume).contains("unconfirmed");
        assert!(opens(&new) && (is_confirmed || opens(&old)), "{moment}: {}", slots_of(&volume));
        volume.confirm_secret(&new).unwrap_or_else(|error| panic!("{moment}: {error:?}"));
        assert_eq!(slots_of(&volume), "local 1, recovery 2", "{moment}");
    };
    for_each_kill(KeyPolicy::Local, || template.copy(), confirm, check);
}

#[test]
#[ignore = "sampled: needs cryptsetup"]
fn another_encrypted_disk_made_since_an_agreed_format_was_interrupted_is_kept() {
    let fixture = LuksFixture::new();
    fixture.write(1080, b"\x53\xef");
    let Err(VolumeError::Occupied { found, .. }) =
        fixture.volume(KeyPolicy::Local).mount_new(ErasePolicy::Nothing)
    else {
        panic!("an ext4 was formatted")
    };
    let create = |volume: &LuksVolume| volume.mount_new(ErasePolicy::Exactly(found)).is_ok();
    assert_eq!(kill_at(&fixture, KeyPolicy::Local, KillMoment::before(1), create), None);
    // The operator decides otherwise, and uses the disk.
    fixture.format_by_hand(&["--type=luks1"]);
    fixture.write(4 * MIB, &[7; 4096]);
    let before = fixture.ends();
    let rejected = fixture.volume(KeyPolicy::Local).mount_new(ErasePolicy::Nothing);
    assert!(matches!(rejected, Err(VolumeError::Occupied { .. })), "{rejected:?}");
    assert!(before == fixture.ends(), "the disk has changed");
}

#[test]
#[ignore = "sampled: needs cryptsetup"]
fn a_format_cut_before_its_header_is_repeated_unless_other_data_were_written_since() {
    // The node was killed before luksFormat: the disk is claimed, and the journal knows it.
    let interrupted = || {
        let fixture = LuksFixture::new();
        let create = |volume: &LuksVolume| volume.mount_new(ErasePolicy::Nothing).is_ok();
        assert_eq!(kill_at(&fixture, KeyPolicy::Local, KillMoment::before(1), create), None);
        fixture
    };
    let noise: Vec<u8> = (0..MIB).map(|at| ((at * 2_654_435_761) >> 13) as u8).collect();
    for (offset, bytes, is_ours) in [
        // Areas of key slots, and a half-written header.
        (32_768, &noise[..], true),
        (0, b"LUKS\xba\xbe\0\x02", true),
        (HEADER_BYTES - 4096, &noise[..4096], true),
        // A foreign header, of another version or in another place, and a device of integritysetup.
        (0, b"LUKS\xba\xbe\0\x01", false),
        (16_384, b"SKUL\xba\xbe\0\x03", false),
        (32_768, b"SKUL\xba\xbe\0\x02", false),
        (0, b"integrt\0", false),
        // Foreign data.
        (HEADER_BYTES, &noise[..4096], false),
        (63 * MIB, b"diary", false),
        (1080, b"\x53\xef", false),
        (64 * MIB - 512, b"EFI PART", false),
    ] {
        let fixture = interrupted();
        fixture.write(offset, bytes);
        let before = fixture.ends();
        match fixture.volume(KeyPolicy::Local).mount_new(ErasePolicy::Nothing) {
            Ok(_) => assert!(is_ours, "byte {offset} was formatted over"),
            Err(VolumeError::Occupied { .. }) => {
                assert!(!is_ours, "byte {offset} prevents the format");
                assert!(before == fixture.ends(), "the disk has changed");
            }
            Err(error) => panic!("byte {offset}: {error:?}"),
        }
    }
}

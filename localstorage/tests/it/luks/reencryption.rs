//! Re-encryptions that are killed: cryptsetup at each of its writes, as noded's death kills it too.
//!
//! The data are those of an image: cryptsetup encrypts them for real, below a volume that is not mapped.

use std::fs::{self, File};
use std::io::Write as _;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;

use nodekeel_localstorage::volume::{
    DataVolume as _, EncryptedVolume as _, HeaderBackup, KeyPolicy, LuksError, LuksVolume,
    RecoveryPassphrase, ReencryptionEnd, SlotKind, UnlockSecret, VolumeError,
};

use super::kills::choose_calls;
use super::{HEADER_BYTES, LuksFixture, MIB, luks_error};

const DISK_BYTES: u64 = HEADER_BYTES + 12 * MIB;

/// A volume with a passphrase, and a copy of its header that somebody has stolen.
struct StolenFrom {
    fixture: LuksFixture,
    passphrase: RecoveryPassphrase,
    stolen: HeaderBackup,
}

impl StolenFrom {
    fn new() -> StolenFrom {
        let (fixture, _) = LuksFixture::with_volume(KeyPolicy::Local);
        // Two pieces of data: each call reads and encrypts them all.
        File::options().write(true).open(fixture.path("disk")).unwrap().set_len(DISK_BYTES).unwrap();
        let volume = fixture.volume(KeyPolicy::Local);
        let passphrase = volume.add_recovery_passphrase(&UnlockSecret::Node).unwrap();
        volume.confirm_secret(&UnlockSecret::Recovery(passphrase.clone())).unwrap();
        let stolen = volume.back_up_header().unwrap();
        volume.rotate_keys(&UnlockSecret::Node).unwrap();
        StolenFrom { fixture, passphrase, stolen }
    }

    fn secrets(&self) -> [UnlockSecret; 2] {
        [UnlockSecret::Node, UnlockSecret::Recovery(self.passphrase.clone())]
    }

    /// Opens a volume by each secret, completes its re-encryption, and opens it again.
    fn check_end(&self, fixture: &LuksFixture, killed: &str) {
        let volume = fixture.volume(KeyPolicy::Local);
        self.check_open(&volume, killed);
        let ended = run(&volume).unwrap_or_else(|error| panic!("{killed}: {error:?}"));
        assert_eq!(ended, ReencryptionEnd::Complete, "{killed}");
        self.check_open(&volume, killed);
        let status = volume.encryption_status().unwrap();
        assert!(status.reencryption.is_none(), "{killed}: {status:?}");
        let mut slots: Vec<_> = status.slots.iter().filter_map(|slot| slot.name).collect();
        slots.sort_unstable();
        assert_eq!(
            (&*slots, status.slots.len()),
            (&[(SlotKind::Local, 2), (SlotKind::Recovery, 1)][..], 2),
            "{killed}"
        );
        // Keys can be changed again: cryptsetup reads the header, too, and repairs the copy that was not written.
        volume.rotate_keys(&UnlockSecret::Node).unwrap_or_else(|error| panic!("{killed}: {error:?}"));
        assert!(volume.encryption_status().unwrap().has_both_headers, "{killed}");
        let restored = luks_error(volume.restore_header(&self.stolen, &self.secrets()[1], true).map(drop));
        assert!(matches!(restored, LuksError::Reencrypted), "{killed}: {restored}");
    }

    /// Continues a re-encryption without this crate, until that is killed.
    fn run_by_hand(&self, fixture: &LuksFixture, point: KillPoint<'_>) {
        let options =
            ["reencrypt", "--batch-mode", "--resume-only", "--force-offline-reencrypt", "--key-file=-"];
        let mut command = Command::new(killed_tool(fixture, point));
        command.args(options).arg(fixture.path("disk")).stdin(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(self.passphrase.reveal().as_bytes()).unwrap();
        child.wait().unwrap();
    }

    fn check_open(&self, volume: &LuksVolume, killed: &str) {
        for secret in self.secrets() {
            let opened = volume.mount_existing_with(&secret);
            drop(opened.unwrap_or_else(|error| panic!("{killed}, {:?}: {error:?}", secret.slot_kind())));
            volume.unmount().unwrap();
        }
        let status = volume.encryption_status().unwrap_or_else(|error| panic!("{killed}: {error:?}"));
        assert_eq!(status.rollback, None, "{killed}");
    }
}

fn run(volume: &LuksVolume) -> Result<ReencryptionEnd, VolumeError> {
    volume.run_reencryption(&UnlockSecret::Node, |_| ControlFlow::Continue(()))
}

/// A system call at which cryptsetup is killed.
type KillPoint<'a> = (&'a str, usize);

/// A cryptsetup that is killed at a system call, by strace. Its death leaves a file.
fn killed_tool(fixture: &LuksFixture, (call, number): KillPoint<'_>) -> PathBuf {
    let script = format!(
        "#!/bin/sh\n[ \"$1\" = reencrypt ] || exec cryptsetup \"$@\"\n\
         strace -f -qq -o /dev/null -e trace={call} -e inject={call}:signal=KILL:when={number} cryptsetup \"$@\"\n\
         code=$?; [ $code = 137 ] || exit $code\n: >\"$0.killed\"; kill -KILL $$\n"
    );
    let program = fixture.path("cryptsetup");
    testbed::write_program(&program, &script).unwrap();
    program
}

/// A volume with that cryptsetup.
fn killed_volume(fixture: &LuksFixture, point: KillPoint<'_>) -> LuksVolume {
    let tool = fixture.tool().with_program(killed_tool(fixture, point));
    fixture.volume_by(KeyPolicy::Local, Arc::new(tool))
}

/// Calls `work` with copies of a volume, to be killed at a later write (of a sample) or flush each time, until it was not
/// killed. Returns the number of the last one at which it could be.
fn kill_at_each(
    from: &LuksFixture,
    call: &str,
    work: impl Fn(&LuksFixture, KillPoint<'_>),
    check: impl Fn(&LuksFixture, &str),
) -> usize {
    let mut last = 0;
    for number in choose_calls(if call == "write" { 4 } else { 1 }) {
        let fixture = from.copy();
        work(&fixture, (call, number));
        check(&fixture, &format!("killed at {call} {number}"));
        if !fixture.path("cryptsetup.killed").exists() {
            break;
        }
        last = number;
    }
    last
}

fn data(fixture: &LuksFixture) -> Vec<u8> {
    let mut data = vec![0; (DISK_BYTES - HEADER_BYTES) as usize];
    File::open(fixture.path("disk")).unwrap().read_exact_at(&mut data, HEADER_BYTES).unwrap();
    data
}

#[test]
#[ignore = "sampled: needs strace"]
fn a_begin_that_is_killed_at_any_write_leaves_a_volume_that_opens_and_is_reencrypted() {
    let from = StolenFrom::new();
    let begin = |volume: &LuksVolume| volume.begin_reencryption(&from.secrets(), &[]);
    for (call, least) in [("fsync", 12), ("write", 27)] {
        let kills = kill_at_each(
            &from.fixture,
            call,
            |fixture, point| drop(begin(&killed_volume(fixture, point))),
            |fixture, killed| {
                let volume = fixture.volume(KeyPolicy::Local);
                assert_eq!(volume.encryption_status().unwrap().slots.len(), 2, "{killed}");
                // Also below an open volume, where the next call finds what the kill has left.
                if call == "fsync" {
                    from.check_open(&volume, killed);
                }
                begin(&volume).unwrap_or_else(|error| panic!("{killed}: {error:?}"));
                from.check_end(fixture, killed);
            },
        );
        assert!(kills >= least, "{kills} kills at {call}");
    }
}

#[test]
#[ignore = "sampled: needs strace"]
fn a_reencryption_that_is_killed_at_any_write_keeps_all_data_and_is_completed() {
    let from = StolenFrom::new();
    from.fixture.volume(KeyPolicy::Local).begin_reencryption(&from.secrets(), &[]).unwrap();
    let whole = from.fixture.copy();
    from.check_end(&whole, "not killed");
    let whole = data(&whole);
    let check = |fixture: &LuksFixture, killed: &str| {
        from.check_end(fixture, killed);
        assert!(data(fixture) == whole, "{killed}: the data are others");
    };
    // The caller is killed, too, or it is an operator's cryptsetup.
    let by_hand = |fixture: &LuksFixture, point: KillPoint<'_>| from.run_by_hand(fixture, point);
    let kills = kill_at_each(&from.fixture, "fsync", by_hand, check);
    assert!(kills >= 13, "{kills}");
    let by_volume = |fixture: &LuksFixture, point: KillPoint<'_>| drop(run(&killed_volume(fixture, point)));
    let kills = kill_at_each(&from.fixture, "write", by_volume, check);
    assert!(kills >= 32, "{kills}");
}

#[test]
#[ignore = "sampled: needs strace"]
fn a_header_with_another_key_than_the_recorded_one_is_not_finished() {
    let from = StolenFrom::new();
    let fixture = &from.fixture;
    let volume = fixture.volume(KeyPolicy::Local);
    volume.begin_reencryption(&from.secrets(), &[]).unwrap();
    // After the first of the old slots was removed.
    from.run_by_hand(fixture, ("fsync", 8));
    let progress = volume.encryption_status().unwrap().reencryption.unwrap();
    assert_eq!(progress.done_bytes, progress.total_bytes);
    let record = fixture.path("esp").join(format!("{}.header", volume.encryption_status().unwrap().volume));
    let recorded = fs::read_to_string(&record).unwrap();
    let (before, _) = recorded.split_once("volume key = ").unwrap();
    fs::write(&record, format!("{before}volume key = 0123456789abcdef\n")).unwrap();
    let header = fixture.header();
    let refused = luks_error(run(&volume));
    assert!(matches!(refused, LuksError::Reencrypted) && header == fixture.header(), "{refused}");
    // Data that the key decrypts are what counts.
    drop(volume.mount_existing().unwrap());
    assert_eq!(fs::read_to_string(&record).unwrap(), recorded);
    assert_eq!(run(&volume).unwrap(), ReencryptionEnd::Complete);
}

#[test]
#[ignore = "sampled: needs strace"]
fn the_status_of_a_reencryption_never_names_a_rolled_back_or_changed_header() {
    let from = StolenFrom::new();
    let volume = from.fixture.volume(KeyPolicy::Local);
    volume.begin_reencryption(&from.secrets(), &[]).unwrap();
    // Each flush takes a while: the header is read between all of its writes.
    let slow = "#!/bin/sh\n[ \"$1\" = reencrypt ] || exec cryptsetup \"$@\"\n\
         exec strace -f -qq -o /dev/null -e trace=write,fsync -e inject=write,fsync:delay_exit=100000 cryptsetup \"$@\"\n";
    let program = from.fixture.path("cryptsetup");
    testbed::write_program(&program, slow).unwrap();
    let slow = from.fixture.volume_by(KeyPolicy::Local, Arc::new(from.fixture.tool().with_program(program)));
    let mut readings = 0;
    thread::scope(|scope| {
        let running = scope.spawn(|| run(&slow));
        while !running.is_finished() {
            let status = volume.encryption_status().unwrap();
            assert_eq!((status.rollback, status.slots.len()), (None, 2), "{status:?}");
            readings += 1;
        }
        assert_eq!(running.join().unwrap().unwrap(), ReencryptionEnd::Complete);
    });
    assert!(readings > 50, "{readings}");
}

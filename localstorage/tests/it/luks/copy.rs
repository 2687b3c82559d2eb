//! Copies of volumes to another disk.

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::testing::FileCryptsetup;
use nodekeel_localstorage::volume::{
    CopySource, DataVolume as _, EncryptedVolume as _, ErasePolicy, FileSeal, KeyPolicy, LuksError,
    LuksVolume, LuksVolumeConfig, UnlockKey, UnlockSecret, VolumeEncryption, VolumeError,
};

use super::kills::for_each_kill;
use super::{LuksFixture, MIB, luks_error, slots_of};

const COMMITTED: &str = "committed";

/// A node whose volume is on the disk `old`, beside a blank one, and what opens it.
fn with_old_volume(keys: KeyPolicy) -> (LuksFixture, UnlockSecret) {
    let (fixture, key) = LuksFixture::with_volume(keys);
    let secret = key.map_or(UnlockSecret::Node, UnlockSecret::Cluster);
    fixture.volume(keys).confirm_secret(&secret).unwrap();
    fs::rename(fixture.path("disk"), fixture.path("old")).unwrap();
    File::create(fixture.path("disk")).unwrap().set_len(64 * MIB).unwrap();
    let noise: Vec<u8> = (0..2 * MIB).map(|at| ((at * 2_654_435_761) >> 13) as u8).collect();
    write_old(&fixture, 9 * MIB, &noise);
    testbed::write_program(&fixture.path("xfs_growfs"), "#!/bin/sh\n").unwrap();
    (fixture, secret)
}

fn copy_of(template: &LuksFixture) -> LuksFixture {
    let other = template.copy();
    for name in ["old", "xfs_growfs"] {
        let (from, to) = (template.path(name), other.path(""));
        let copied = Command::new("cp").args(["-a", "--sparse=always"]).arg(from).arg(to).status();
        assert!(copied.unwrap().success());
    }
    other
}

/// The volume on the disk `old`, beside the disk of another one.
fn old_volume(beside: &LuksVolume, keys: KeyPolicy) -> Result<LuksVolume, VolumeError> {
    let path = |name: &str| beside.device_path().with_file_name(name);
    let dir = |name: &str| Dir::open(path(name)).map_err(VolumeError::Finish);
    let config = LuksVolumeConfig {
        device: path("old"),
        target: path("data"),
        encryption: VolumeEncryption::Encrypted,
        keys,
        journal: dir("esp")?,
        runtime: dir("run")?,
        seal: Arc::new(FileSeal::new(dir("esp")?)),
        mounter: Arc::new(nodekeel_localstorage::testing::RecordingMounter::default()),
        cryptsetup: Arc::new(FileCryptsetup::new(path("mappings"))),
    };
    Ok(LuksVolume::new(config).with_mapping_name("old"))
}

/// Copies the volume on the disk `old`, and commits into a file.
fn copy_with(
    volume: &LuksVolume,
    keys: KeyPolicy,
    secret: &UnlockSecret,
    flow: ControlFlow<()>,
) -> Result<Option<UnlockKey>, VolumeError> {
    let committed = volume.device_path().with_file_name(COMMITTED);
    let old = old_volume(volume, keys)?;
    let source = CopySource {
        volume: &old,
        secret,
        progress: &|progress| {
            assert!(progress.done_bytes <= progress.total_bytes, "{progress:?}");
            flow
        },
        commit: &|volume, _, _| Ok(fs::write(&committed, volume)?),
    };
    let (_, key, unreadable) = volume.mount_copy(&source)?;
    assert_eq!(unreadable.bytes, 0);
    Ok(key)
}

fn copy(
    volume: &LuksVolume,
    keys: KeyPolicy,
    secret: &UnlockSecret,
) -> Result<Option<UnlockKey>, VolumeError> {
    copy_with(volume, keys, secret, ControlFlow::Continue(()))
}

/// The file that stands for the mapping of the volume with a header.
fn mapping_of(fixture: &LuksFixture, disk: &str) -> PathBuf {
    let mut uuid = [0; 36];
    File::open(fixture.path(disk)).unwrap().read_exact_at(&mut uuid, 168).unwrap();
    fixture.path(&format!("mappings/{}.img", String::from_utf8_lossy(&uuid)))
}

fn write_old(fixture: &LuksFixture, offset: u64, bytes: &[u8]) {
    let mapping = File::options().write(true).open(mapping_of(fixture, "old")).unwrap();
    mapping.write_all_at(bytes, offset).unwrap();
}

fn has_copy(fixture: &LuksFixture) -> bool {
    let read = |disk| fs::read(mapping_of(fixture, disk)).unwrap();
    read("disk") == read("old")
}

fn is_blank(fixture: &LuksFixture) -> bool {
    fixture.ends().iter().all(|byte| *byte == 0)
}

#[test]
#[ignore = "sampled: needs cryptsetup"]
fn a_copy_has_the_files_of_the_volume_and_other_keys() {
    for keys in [KeyPolicy::Local, KeyPolicy::Split] {
        let (fixture, old_secret) = with_old_volume(keys);
        let volume = fixture.volume(keys);
        let key = copy(&volume, keys, &old_secret).unwrap();
        let secret = key.map_or(UnlockSecret::Node, UnlockSecret::Cluster);
        volume.confirm_secret(&secret).unwrap();
        volume.unmount().unwrap();
        assert!(has_copy(&fixture), "{keys}");
        let committed = fs::read_to_string(fixture.path(COMMITTED)).unwrap();
        assert_eq!(volume.encryption_status().unwrap().volume, committed);
        assert_eq!(fixture.key_files().len(), 2, "each has its own");
        volume.mount_existing_with(&secret).unwrap();
        volume.unmount().unwrap();
        // The other one stays as it was.
        let old = old_volume(&volume, keys).unwrap();
        assert!(old.test_secret(&old_secret).unwrap().is_some());
        if keys == KeyPolicy::Split {
            assert_eq!(old.test_secret(&secret).unwrap(), None);
            assert_eq!(volume.test_secret(&old_secret).unwrap(), None);
        }
        assert!(old.active_mapping().unwrap().is_none(), "its mapping is closed");
    }
}

#[test]
#[ignore = "sampled: needs cryptsetup"]
fn a_copy_killed_at_any_call_is_repeated_or_completed_and_has_what_the_volume_has_then() {
    let keys = KeyPolicy::Split;
    let (template, old_secret) = with_old_volume(keys);
    let work = |volume: &LuksVolume| copy(volume, keys, &old_secret).is_ok();
    let check = |fixture: &LuksFixture, moment: &str| {
        let volume = fixture.volume(keys);
        let key = match fs::read_to_string(fixture.path(COMMITTED)) {
            // Nothing opens the other volume any more.
            Ok(committed) => match volume.mount_copied(&committed) {
                Err(VolumeError::Occupied { .. }) => {
                    volume.mount_existing().unwrap_or_else(|error| panic!("{moment}: {error:?}"));
                    volume.rotate_keys(&UnlockSecret::Node).unwrap()
                }
                completed => completed.unwrap_or_else(|error| panic!("{moment}: {error:?}")).1,
            },
            // The volume was used in between.
            Err(_) => {
                write_old(fixture, 10 * MIB, moment.as_bytes());
                copy(&volume, keys, &old_secret).unwrap_or_else(|error| panic!("{moment}: {error:?}"))
            }
        };
        volume.confirm_secret(&UnlockSecret::Cluster(key.unwrap())).unwrap();
        assert_eq!(volume.encryption_status().unwrap().slots.len(), 1, "{moment}: {}", slots_of(&volume));
        volume.unmount().unwrap();
        assert!(has_copy(fixture), "{moment}");
    };
    for_each_kill(keys, || copy_of(&template), work, check);
}

#[test]
#[ignore = "sampled: needs cryptsetup"]
fn a_copy_that_can_not_be_made_writes_nothing() {
    let keys = KeyPolicy::Split;
    let (fixture, secret) = with_old_volume(keys);
    let volume = fixture.volume(keys);
    let wrong = luks_error(copy(&volume, keys, &UnlockSecret::Cluster(UnlockKey::generate().unwrap())));
    assert!(matches!(wrong, LuksError::WrongClusterKey { .. }), "{wrong:?}");
    let missing = luks_error(copy(&volume, keys, &UnlockSecret::Node));
    assert!(matches!(missing, LuksError::NoSlot { .. }), "{missing:?}");
    assert!(is_blank(&fixture) && fixture.key_files().len() == 1);

    let disk = File::options().write(true).open(fixture.path("disk")).unwrap();
    disk.set_len(64 * MIB - 512).unwrap();
    let small = luks_error(copy(&volume, keys, &secret));
    let LuksError::CopyTooSmall { needed_bytes, found_bytes } = small else { panic!("{small:?}") };
    assert_eq!((needed_bytes, found_bytes), (64 * MIB, 64 * MIB - 512));
    disk.set_len(64 * MIB).unwrap();
    assert!(is_blank(&fixture));

    // A disk with data is not copied over, nor is one for an empty volume completed as a copy.
    fixture.write(1080, b"\x53\xef");
    assert!(matches!(copy(&volume, keys, &secret), Err(VolumeError::Occupied { .. })));
    fixture.write(1080, &[0; 2]);
    assert!(is_blank(&fixture));
    assert!(volume.mount_copied("8c0f0a9e-3f0e-4a9d-9c5c-1f1f4c1f0d6b").is_err() && is_blank(&fixture));
    let canceled = copy_with(&volume, keys, &secret, ControlFlow::Break(()));
    assert!(matches!(canceled, Err(VolumeError::CopyCanceled { .. })), "{canceled:?}");
    let other = volume.mount_copied("8c0f0a9e-3f0e-4a9d-9c5c-1f1f4c1f0d6b");
    assert!(matches!(other, Err(VolumeError::Absent { .. })), "{other:?}");
    assert!(matches!(volume.mount_existing_with(&secret), Err(VolumeError::Unfinished { .. })));
    copy(&volume, keys, &secret).unwrap();
    assert!(has_copy(&fixture) && volume.mount_new(ErasePolicy::Nothing).is_err());
}

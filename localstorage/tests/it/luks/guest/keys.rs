//! Keys that are wrong, gone, or being rotated, on dm-crypt and dm-integrity.

use std::fs;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;

use nodekeel_localstorage::FileMode;
use nodekeel_localstorage::volume::{
    CryptsetupProgram, DataVolume as _, EncryptedVolume as _, ErasePolicy, KeyPolicy, LuksError, LuksVolume,
    LuksVolumeConfig, UnlockKey, UnlockSecret, VolumeEncryption,
};

use super::super::kills::{KillMoment, KilledAt};
use super::super::{luks_error, replace_node_key, slots_of};
use super::NodeDisk;
use crate::fixture::in_child_process;

const AUTHENTICATED: VolumeEncryption = VolumeEncryption::EncryptedAndAuthenticated;

/// A split volume with a file, and the key that opens it.
fn split_volume(node: &NodeDisk) -> (LuksVolume, UnlockSecret) {
    let volume = node.volume(AUTHENTICATED, KeyPolicy::Split).without_wipe();
    let (top, key) = volume.mount_new_with_key(ErasePolicy::Nothing).unwrap();
    top.write("witness", b"data", FileMode::PRIVATE_FILE).unwrap();
    drop(top);
    let secret = UnlockSecret::Cluster(key.unwrap());
    volume.confirm_secret(&secret).unwrap();
    volume.unmount().unwrap();
    (volume, secret)
}

/// Opens the volume, finds its file, and closes it.
fn check_opens(volume: &LuksVolume, secret: &UnlockSecret, moment: &str) {
    let top = volume.mount_existing_with(secret).unwrap_or_else(|error| panic!("{moment}: {error:?}"));
    assert_eq!(top.read("witness").unwrap(), b"data", "{moment}");
    drop(top);
    volume.unmount().unwrap();
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn a_wrong_half_and_a_lost_esp_are_named_and_the_passphrase_opens() {
    in_child_process(a_wrong_half_and_a_lost_esp_are_named_and_the_passphrase_opens, || {
        let node = NodeDisk::new(448);
        let (volume, secret) = split_volume(&node);
        let recovery = UnlockSecret::Recovery(volume.add_recovery_passphrase(&secret).unwrap());
        let other = UnlockSecret::Cluster(UnlockKey::generate().unwrap());
        let wrong = luks_error(volume.mount_existing_with(&other));
        assert!(matches!(wrong, LuksError::WrongClusterKey { .. }), "{wrong:?}");
        replace_node_key(&node.path("esp"));
        let wrong = luks_error(volume.mount_existing_with(&secret));
        assert!(matches!(wrong, LuksError::WrongNodeKey { .. }), "{wrong:?}");
        fs::remove_dir_all(node.path("esp")).unwrap();
        fs::create_dir(node.path("esp")).unwrap();
        let volume = node.volume(AUTHENTICATED, KeyPolicy::Split);
        let missing = luks_error(volume.mount_existing_with(&secret));
        assert!(matches!(missing, LuksError::NodeKeyMissing { .. }), "{missing:?}");
        check_opens(&volume, &recovery, "by the passphrase");

        let new = UnlockSecret::Cluster(volume.rotate_keys(&recovery).unwrap().unwrap());
        volume.confirm_secret(&new).unwrap();
        check_opens(&volume, &new, "with new halves");
    });
}

#[test]
#[ignore = "soak: needs kernel with a disk of 1 GiB"]
fn a_rotation_killed_at_each_call_leaves_the_old_key_valid() {
    in_child_process(a_rotation_killed_at_each_call_leaves_the_old_key_valid, || {
        let node = NodeDisk::new(448);
        let (volume, secret) = split_volume(&node);
        let rotated = (1..).find_map(|number| {
            let cryptsetup = Arc::new(KilledAt::new(CryptsetupProgram::default(), KillMoment::after(number)));
            let config = node.config(AUTHENTICATED, KeyPolicy::Split);
            let killed = node.new_volume(LuksVolumeConfig { cryptsetup, ..config });
            let rotated = panic::catch_unwind(AssertUnwindSafe(|| killed.rotate_keys(&secret)));
            check_opens(&volume, &secret, &format!("killed behind call {number}"));
            assert!(number < 30, "a rotation takes {number} calls");
            rotated.ok()
        });
        let new = UnlockSecret::Cluster(rotated.unwrap().unwrap().unwrap());
        volume.confirm_secret(&new).unwrap();
        check_opens(&volume, &new, "confirmed");
        assert_eq!(slots_of(&volume).matches("split").count(), 1, "{}", slots_of(&volume));
    });
}

//! Key slots that supersede each other.

use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;

use nodekeel_localstorage::testing::FileCryptsetup;
use nodekeel_localstorage::volume::{
    ActiveMapping, ColdStart, Cryptsetup, CryptsetupCall, CryptsetupError, DataVolume as _,
    EncryptedVolume as _, ErasePolicy, HeaderBackup, KeyPolicy, LuksError, PolicyViolation,
    RecoveryPassphrase, ReencryptionEnd, SlotKind, UnlockKey, UnlockSecret, VolumeError,
};

use super::{LuksFixture, luks_error, slots_of};

#[test]
#[ignore = "needs cryptsetup"]
fn a_key_slot_that_an_operator_has_added_stays() {
    let (fixture, key) = LuksFixture::with_volume(KeyPolicy::Split);
    let volume = fixture.volume(KeyPolicy::Split);
    let recovery = volume.add_recovery_passphrase(&UnlockSecret::Node).unwrap();
    fixture.add_key_by_hand(recovery.reveal(), "the operator's");
    let recovery = UnlockSecret::Recovery(recovery);
    let foreign = || {
        let slots = volume.encryption_status().unwrap().slots;
        slots
            .iter()
            .filter(|slot| slot.name.is_none())
            .map(|slot| (slot.slot, slot.is_stale))
            .collect::<Vec<_>>()
    };
    let found = foreign();
    assert!(found.len() == 1 && !found[0].1, "{found:?}");
    volume.confirm_secret(&UnlockSecret::Cluster(key.unwrap())).unwrap();
    let key = volume.rotate_keys(&recovery).unwrap().unwrap();
    volume.confirm_secret(&UnlockSecret::Cluster(key)).unwrap();
    volume.confirm_secret(&recovery).unwrap();
    volume
        .add_recovery_passphrase(&UnlockSecret::Recovery(volume.add_recovery_passphrase(&recovery).unwrap()))
        .unwrap();
    assert_eq!(foreign(), found, "the operator's slot was removed");
    assert!(!volume.encryption_status().unwrap().needs_confirmation, "nothing is left to do");
    fixture.run_by_hand(&["open", "--test-passphrase", "--key-file=-"], b"the operator's");
}

/// Adds no key slot.
#[derive(Debug)]
struct RefusedAddition(FileCryptsetup);

impl Cryptsetup for RefusedAddition {
    fn run(&self, call: &CryptsetupCall<'_>) -> Result<(), CryptsetupError> {
        match call.action {
            "luksAddKey" => Err(CryptsetupError::TimedOut { action: call.action }),
            _ => self.0.run(call),
        }
    }

    fn find_mapping(&self, name: &str) -> io::Result<Option<ActiveMapping>> {
        self.0.find_mapping(name)
    }
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_key_slot_that_an_operator_adds_after_a_failed_addition_stays() {
    let (fixture, _) = LuksFixture::with_volume(KeyPolicy::Local);
    let volume = fixture.volume(KeyPolicy::Local);
    let recovery = volume.add_recovery_passphrase(&UnlockSecret::Node).unwrap();
    let refusing = fixture.volume_by(KeyPolicy::Local, Arc::new(RefusedAddition(fixture.tool())));
    refusing.rotate_keys(&UnlockSecret::Node).unwrap_err();
    // At the cost of the slots of this crate.
    let size = format!("--keyfile-size={}", recovery.reveal().len());
    let options =
        ["luksAddKey", "-q", "--pbkdf=pbkdf2", "--pbkdf-force-iterations=1000", "--key-file=-", &size];
    fixture.run_by_hand(&options, format!("{}the operator's", recovery.reveal()).as_bytes());
    let slots = || volume.encryption_status().unwrap().slots;
    let foreign: Vec<_> = slots().iter().filter(|slot| slot.is_foreign()).map(|slot| slot.slot).collect();
    assert_eq!(foreign.len(), 1, "{:?}", slots());
    volume.rotate_keys(&UnlockSecret::Node).unwrap();
    fixture.run_by_hand(&["open", "--test-passphrase", "--key-file=-"], b"the operator's");
}

#[test]
#[ignore = "needs cryptsetup"]
fn rotations_by_a_recovery_passphrase_whose_keys_are_lost_replace_each_other() {
    for keys in [KeyPolicy::Local, KeyPolicy::Split] {
        let (fixture, key) = LuksFixture::with_volume(keys);
        let volume = fixture.volume(keys);
        let recovery = UnlockSecret::Recovery(volume.add_recovery_passphrase(&UnlockSecret::Node).unwrap());
        if let Some(key) = key.clone() {
            volume.confirm_secret(&UnlockSecret::Cluster(key)).unwrap();
        }
        for _ in 0..4 {
            volume.rotate_keys(&recovery).unwrap();
        }
        let Some(key) = key else {
            assert_eq!(slots_of(&volume), "local 5, recovery 1 unconfirmed");
            continue;
        };
        // The key that was confirmed before is still valid, as long as no other one is.
        assert_eq!(slots_of(&volume), "split 5, split 1 stale, recovery 1 unconfirmed");
        assert_eq!(volume.test_secret(&UnlockSecret::Cluster(key)).unwrap(), Some(1));
        let new = UnlockSecret::Cluster(volume.rotate_keys(&recovery).unwrap().unwrap());
        volume.confirm_secret(&new).unwrap();
        assert_eq!(slots_of(&volume), "split 6, recovery 1 unconfirmed");
    }
}

#[test]
#[ignore = "needs cryptsetup"]
fn recovery_passphrases_that_nobody_confirms_replace_each_other() {
    let (fixture, _) = LuksFixture::with_volume(KeyPolicy::Local);
    let volume = fixture.volume(KeyPolicy::Local);
    let add = |permit: &UnlockSecret| UnlockSecret::Recovery(volume.add_recovery_passphrase(permit).unwrap());
    // The answer with the first one is lost: nobody knows it.
    let lost = add(&UnlockSecret::Node);
    let first = add(&UnlockSecret::Node);
    assert_eq!(slots_of(&volume), "local 1, recovery 2 unconfirmed");
    assert_eq!(volume.test_secret(&lost).unwrap(), None);
    for secret in [&first, &UnlockSecret::Recovery(volume.add_recovery_passphrase(&first).unwrap())] {
        // The passphrase that permits another was typed, and stays until that one is confirmed.
        assert!(volume.test_secret(secret).unwrap().is_some());
    }
    assert_eq!(slots_of(&volume), "local 1, recovery 2 unconfirmed stale, recovery 3 unconfirmed");
    assert!(matches!(luks_error(volume.confirm_secret(&first)), LuksError::NotNewest { .. }));
    let confirmed = add(&UnlockSecret::Node);
    volume.confirm_secret(&confirmed).unwrap();
    assert_eq!(slots_of(&volume), "local 1, recovery 4");
    // A confirmed one stays, whatever permits the next.
    for permit in [&UnlockSecret::Node, &confirmed, &UnlockSecret::Node] {
        add(permit);
    }
    let newest = add(&confirmed);
    assert_eq!(slots_of(&volume), "local 1, recovery 4 stale, recovery 8 unconfirmed");
    volume.confirm_secret(&newest).unwrap();
    assert_eq!(slots_of(&volume), "local 1, recovery 8");
    volume.confirm_secret(&newest).unwrap();
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_local_cold_start_keeps_a_slot_of_the_node_that_each_confirmation_renews() {
    let fixture = LuksFixture::new();
    let open = || fixture.volume(KeyPolicy::Split).with_cold_start(ColdStart::Local);
    let key = open().mount_new_with_key(ErasePolicy::Nothing).unwrap().1.unwrap();
    let volume = open();
    let status = volume.encryption_status().unwrap();
    assert_eq!((status.cold_start, status.needs_confirmation), (Some(ColdStart::Local), false));
    volume.confirm_secret(&UnlockSecret::Cluster(key.clone())).unwrap();
    assert_eq!(slots_of(&volume), "local 1, split 1");
    let new = UnlockSecret::Cluster(volume.rotate_keys(&UnlockSecret::Cluster(key)).unwrap().unwrap());
    assert_eq!(slots_of(&volume), "local 1, split 1 stale, split 2");
    assert!(volume.encryption_status().unwrap().needs_confirmation);
    for _ in 0..2 {
        volume.confirm_secret(&new).unwrap();
        assert_eq!(slots_of(&volume), "split 2, local 2");
        assert_eq!(fixture.key_files().len(), 1);
        assert!(!volume.encryption_status().unwrap().needs_confirmation);
    }
    volume.mount_existing().unwrap();
    volume.unmount().unwrap();
    // Anybody who had the disk can have written that into the header.
    let rejected = luks_error(fixture.volume(KeyPolicy::Split).mount_existing_with(&new));
    assert!(matches!(rejected, LuksError::Policy(PolicyViolation::ColdStart)), "{rejected:?}");
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_secret_is_tested_without_opening_the_volume() {
    let (fixture, key) = LuksFixture::with_volume(KeyPolicy::Split);
    let volume = fixture.volume(KeyPolicy::Split);
    let test = |secret: &UnlockSecret| volume.test_secret(secret).unwrap();
    assert_eq!(test(&UnlockSecret::Node), Some(1));
    let other = UnlockSecret::Cluster(UnlockKey::generate().unwrap());
    assert_eq!((test(&UnlockSecret::Cluster(key.unwrap())), test(&other)), (Some(1), None));
    let recovery = RecoveryPassphrase::generate().unwrap();
    assert_eq!(test(&UnlockSecret::Recovery(recovery)), None);
    assert_eq!(volume.encryption_status().unwrap().cold_start, Some(ColdStart::Operator));
    fs::remove_file(fixture.key_files().remove(0)).unwrap();
    let missing = luks_error(volume.test_secret(&UnlockSecret::Node));
    assert!(matches!(missing, LuksError::NodeKeyMissing { .. }), "{missing:?}");
}

#[test]
#[ignore = "needs cryptsetup"]
fn tokens_and_settings_of_other_programs_stay() {
    let (fixture, _) = LuksFixture::with_volume(KeyPolicy::Local);
    let volume = fixture.volume(KeyPolicy::Local);
    let recovery = volume.add_recovery_passphrase(&UnlockSecret::Node).unwrap();
    fixture.add_key_by_hand(recovery.reveal(), "the operator's");
    let json = r#"{"type":"clevis","keyslots":["2"],"jwe":{}}"#;
    fixture.run_by_hand(&["token", "import", "--token-id=4", "--json-file=-"], json.as_bytes());
    fixture.run_by_hand(&["config", "-q", "--label=data", "--subsystem=node"], b"");
    fixture.run_by_hand(&["config", "-q", "--key-slot=2", "--priority=prefer"], b"");
    volume.mount_existing().unwrap();
    for _ in 0..3 {
        volume.rotate_keys(&UnlockSecret::Node).unwrap();
    }
    assert_eq!(volume.encryption_status().unwrap().foreign_tokens, ["4 clevis"]);
    fixture.run_by_hand(&["open", "--test-passphrase", "--key-file=-"], b"the operator's");
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_volume_that_its_operator_has_reencrypted_opens_by_the_passphrase_and_gets_a_new_key() {
    let (fixture, _) = LuksFixture::with_volume(KeyPolicy::Local);
    let volume = fixture.volume(KeyPolicy::Local);
    let passphrase = volume.add_recovery_passphrase(&UnlockSecret::Node).unwrap();
    let recovery = UnlockSecret::Recovery(passphrase.clone());
    volume.confirm_secret(&recovery).unwrap();
    let reencrypt = |options: &[&str]| {
        let by = ["reencrypt", "-q", "--key-file=-"];
        fixture.run_by_hand(&[&by, options].concat(), passphrase.reveal().as_bytes());
    };
    reencrypt(&["--init-only", "--key-slot=1", "--pbkdf=pbkdf2", "--pbkdf-force-iterations=1000"]);
    // The node's own slot goes, and so it opens the volume no more.
    assert!(matches!(luks_error(volume.mount_existing()), LuksError::NoSlot { .. }));
    assert!(volume.encryption_status().unwrap().reencryption.is_some_and(|state| state.done_bytes == 0));
    let ended = volume.run_reencryption(&recovery, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(ended, ReencryptionEnd::Complete);
    assert_eq!(slots_of(&volume), "recovery 1");
    assert!(matches!(luks_error(volume.mount_existing()), LuksError::NoSlot { .. }));
    volume.mount_existing_with(&recovery).unwrap();
    volume.rotate_keys(&recovery).unwrap();
    volume.unmount().unwrap();
    volume.mount_existing().unwrap();
    assert_eq!(slots_of(&volume), "local 2 opened, recovery 1");
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_reencryption_keeps_the_slots_whose_secret_is_given_and_drops_others_only_if_they_are_named() {
    let (fixture, _) = LuksFixture::with_volume(KeyPolicy::Local);
    let volume = fixture.volume(KeyPolicy::Local);
    let recovery = UnlockSecret::Recovery(volume.add_recovery_passphrase(&UnlockSecret::Node).unwrap());
    let stolen = volume.back_up_header().unwrap();
    let node_key = || fs::read_dir(fixture.path("esp")).unwrap().count();
    let keys = node_key();
    volume.rotate_keys(&UnlockSecret::Node).unwrap();
    assert_eq!(node_key(), keys + 1, "the key is another one, and its generation is recorded");
    fixture.add_key_by_hand(&reveal(&recovery), "the operator's");
    let before = fixture.header();
    for (secrets, may_go, unknown) in [
        (
            &[UnlockSecret::Node][..],
            &[][..],
            "key slot 0 (of another program), key slot 1 (recovery, not confirmed)",
        ),
        (&[UnlockSecret::Node, recovery.clone()], &[], "key slot 0 (of another program)"),
        (std::slice::from_ref(&recovery), &[0], "key slot 2 (local)"),
    ] {
        let refused = luks_error(volume.begin_reencryption(secrets, may_go));
        assert!(matches!(&refused, LuksError::UnknownSlots { slots } if slots == unknown), "{refused}");
        let refused = luks_error(volume.check_reencryption(secrets, may_go));
        assert!(matches!(refused, LuksError::UnknownSlots { .. }), "{refused}");
    }
    assert!(before == fixture.header(), "a refusal changes nothing");
    let authenticated = fixture.authenticated_volume();
    let refused = luks_error(authenticated.begin_reencryption(&[UnlockSecret::Node], &[]));
    assert!(refused.to_string().starts_with("can't re-encrypt a volume that is encrypted and"), "{refused}");

    volume.begin_reencryption(&[UnlockSecret::Node, recovery.clone()], &[0]).unwrap();
    for secret in [UnlockSecret::Node, recovery.clone()] {
        drop(volume.mount_existing_with(&secret).unwrap());
        volume.unmount().unwrap();
    }
    // A process that was killed before the end has left it to the next one.
    let next = fixture.volume(KeyPolicy::Local);
    let ended = next.run_reencryption(&UnlockSecret::Node, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(ended, ReencryptionEnd::Complete);
    let kinds: Vec<_> = next.encryption_status().unwrap().slots.iter().map(|slot| slot.name).collect();
    assert_eq!(kinds.len(), 2, "{kinds:?}");
    assert!(kinds.contains(&Some((SlotKind::Local, 2))) && kinds.contains(&Some((SlotKind::Recovery, 1))));
    for secret in [UnlockSecret::Node, recovery.clone()] {
        drop(next.mount_existing_with(&secret).unwrap());
        next.unmount().unwrap();
    }
    // Also where the disk has no header any more.
    let restored = luks_error(next.restore_header(&stolen, &recovery, true).map(drop));
    assert!(matches!(restored, LuksError::Reencrypted), "{restored}");
    fixture.write(0, &[0; 32 << 10]);
    let restored = luks_error(next.restore_header(&stolen, &recovery, true).map(drop));
    assert!(matches!(restored, LuksError::Reencrypted), "{restored}");
}

fn reveal(secret: &UnlockSecret) -> String {
    match secret {
        UnlockSecret::Recovery(passphrase) => passphrase.reveal().to_owned(),
        other => panic!("{other:?}"),
    }
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_rolled_back_header_is_named_and_its_next_keys_spare_those_of_the_newer_one() {
    let (fixture, _) = LuksFixture::with_volume(KeyPolicy::Local);
    let volume = fixture.volume(KeyPolicy::Local);
    let recovery = UnlockSecret::Recovery(volume.add_recovery_passphrase(&UnlockSecret::Node).unwrap());
    volume.confirm_secret(&recovery).unwrap();
    let old = fixture.header();
    volume.rotate_keys(&UnlockSecret::Node).unwrap();
    assert_eq!(volume.encryption_status().unwrap().rollback, None);
    let new = fixture.header();

    fixture.write(0, &old);
    let error = luks_error(volume.mount_existing());
    let LuksError::RolledBack { rollback, .. } = &error else { panic!("{error:?}") };
    assert!(matches!(error.key_error(), LuksError::NodeKeyMissing { .. }), "{error:?}");
    assert_eq!((rollback.found.keys, rollback.recorded.keys), (1, 2));
    volume.mount_existing_with(&recovery).unwrap();
    assert!(volume.encryption_status().unwrap().rollback.is_some(), "it is still rolled back");
    volume.unmount().unwrap();
    volume.rotate_keys(&recovery).unwrap();
    assert_eq!(
        (slots_of(&volume).as_str(), volume.encryption_status().unwrap().rollback),
        ("recovery 1, local 3", None)
    );
    // The key of the newer header is still there.
    fixture.write(0, &new);
    volume.mount_existing().unwrap();
    assert!(volume.encryption_status().unwrap().rollback.is_some(), "generation 3 is newer");
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_header_is_backed_up_and_restored_as_cryptsetup_does_it() {
    let (fixture, _) = LuksFixture::with_volume(KeyPolicy::Local);
    let volume = fixture.volume(KeyPolicy::Local);
    let recovery = UnlockSecret::Recovery(volume.add_recovery_passphrase(&UnlockSecret::Node).unwrap());
    volume.confirm_secret(&recovery).unwrap();
    let backup = volume.back_up_header().unwrap();
    let restore = |backup: &HeaderBackup| volume.restore_header(backup, &UnlockSecret::Node, false);
    let file = fixture.path("backup");
    let by_cryptsetup = |action: &str| {
        let option = format!("--header-backup-file={}", file.display());
        fixture.run_by_hand(&[action, "-q", &option], b"");
    };
    by_cryptsetup("luksHeaderBackup");
    assert!(fs::read(&file).unwrap() == backup.as_bytes());
    fixture.write(16 << 10, &[0xff; 4096]);
    let repaired = volume.back_up_header().unwrap();
    assert_eq!(repaired.as_bytes()[16 << 10..][..6], *b"SKUL\xba\xbe");
    volume.restore_header(&repaired, &UnlockSecret::Node, false).unwrap();
    assert!(volume.encryption_status().unwrap().has_both_headers);
    fixture.write(0, &[0xff; 32 << 10]);
    assert!(matches!(volume.mount_existing(), Err(VolumeError::ForeignData { .. })));
    restore(&backup).unwrap();
    volume.mount_existing().unwrap();
    restore(&backup).unwrap();
    volume.rotate_keys(&UnlockSecret::Node).unwrap();
    let newer = volume.back_up_header().unwrap();
    assert!(matches!(luks_error(volume.restore_header(&backup, &recovery, true)), LuksError::HeaderInUse));
    volume.unmount().unwrap();
    fs::write(&file, newer.as_bytes()).unwrap();
    fixture.write(0, &[0xff; 32 << 10]);
    by_cryptsetup("luksHeaderRestore");
    volume.mount_existing().unwrap();
    volume.unmount().unwrap();

    let before = fixture.ends();
    let key = luks_error(restore(&backup));
    assert!(matches!(key, LuksError::NodeKeyMissing { .. }), "{key:?}");
    let older = luks_error(volume.restore_header(&backup, &recovery, false));
    assert!(matches!(&older, LuksError::OlderBackup { rollback } if rollback.found.keys == 1), "{older:?}");
    let (other, _) = LuksFixture::with_volume(KeyPolicy::Local);
    let foreign = other.volume(KeyPolicy::Local).back_up_header().unwrap();
    assert!(matches!(luks_error(restore(&foreign)), LuksError::NodeKeyMissing { .. }));
    let short = HeaderBackup::from_bytes(newer.as_bytes()[1..].to_vec());
    assert!(matches!(luks_error(restore(&short)), LuksError::BackupSize { .. }));
    let mut damaged = newer.as_bytes().to_vec();
    damaged[32 << 10..].fill(0);
    let damaged = luks_error(restore(&HeaderBackup::from_bytes(damaged)));
    assert!(matches!(damaged, LuksError::SlotClosed { .. }), "{damaged:?}");
    assert!(before == fixture.ends(), "the disk has changed");
    let generations = volume.restore_header(&backup, &recovery, true).unwrap();
    assert_eq!((generations.keys, generations.recovery), (1, 1));
    assert!(volume.encryption_status().unwrap().rollback.is_some(), "the operator has agreed to it");
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_restore_that_was_killed_is_named_and_repeated() {
    let (fixture, _) = LuksFixture::with_volume(KeyPolicy::Local);
    let volume = fixture.volume(KeyPolicy::Local);
    let backup = volume.back_up_header().unwrap();
    volume.rotate_keys(&UnlockSecret::Node).unwrap();
    let old = fixture.header();
    // After the second copy, and after a part of the areas.
    let record = format!("esp/{}.restore", volume.encryption_status().unwrap().volume);
    for end in [32 << 10, 300 << 10] {
        fixture.write(0, &old);
        fixture.write(16 << 10, &backup.as_bytes()[16 << 10..end]);
        fs::write(fixture.path(&record), "").unwrap();
        if let Err(error) = volume.mount_existing().map(drop) {
            let error = luks_error(Err::<(), _>(error));
            assert!(matches!(error, LuksError::RestoreInterrupted { .. }), "{error:?}");
        } else {
            volume.unmount().unwrap();
        }
        let newer = HeaderBackup::from_bytes(old.clone());
        volume.restore_header(&newer, &UnlockSecret::Node, false).unwrap();
        assert!(!fixture.path(&record).exists());
        volume.mount_existing().unwrap();
        volume.unmount().unwrap();
    }
}

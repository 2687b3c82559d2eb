use proptest::prelude::*;
use serde_json::json;

use super::super::reencryption::finish_metadata;
use super::super::slot_kind::SlotKind;
use super::super::token::{ColdStart, KeyPolicy, VolumeProgress};
use super::*;

/// Written by cryptsetup 2.6.1, with both kinds of slots and tokens.
const ENCRYPTED: &str = include_str!("../../../testdata/luks/encrypted.json");
/// The same with what `--integrity hmac-sha256` adds. `tests/it/luks/guest.rs` checks real ones.
const AUTHENTICATED: &str = include_str!("../../../testdata/luks/authenticated.json");

fn check(json: &str) -> Result<HeaderSummary, PolicyViolation> {
    check_header(json.as_bytes(), VolumeEncryption::Encrypted)
}

/// The header after a change.
fn violation(change: impl FnOnce(&mut Value)) -> PolicyViolation {
    let mut metadata: Value = serde_json::from_str(ENCRYPTED).unwrap();
    change(&mut metadata);
    check(&metadata.to_string()).unwrap_err()
}

#[test]
fn headers_of_cryptsetup_are_accepted_for_their_encryption_alone() {
    let summary = check(ENCRYPTED).unwrap();
    assert_eq!(summary.slots, [0, 1]);
    let volume = summary.volume.unwrap();
    assert_eq!((volume.state, volume.keys), (VolumeProgress::Complete, KeyPolicy::Split));
    assert_eq!(volume.node.as_deref(), Some("node-1"));
    // Of the release before the field.
    assert_eq!(volume.cold_start(), Some(ColdStart::Operator));
    let kinds: Vec<_> = summary
        .slot_tokens
        .values()
        .map(|token| (token.slots().next(), token.kind, token.generation))
        .collect();
    assert_eq!(kinds, [(Some(0), SlotKind::Local, 1), (Some(1), SlotKind::Split, 1)]);
    let authenticated = VolumeEncryption::EncryptedAndAuthenticated;
    check_header(AUTHENTICATED.as_bytes(), authenticated).unwrap();

    // A downgrade, in both directions.
    let downgraded = check_header(ENCRYPTED.as_bytes(), authenticated).unwrap_err();
    assert!(matches!(downgraded, PolicyViolation::Integrity { .. }), "{downgraded}");
    let other = check(AUTHENTICATED).unwrap_err();
    assert!(matches!(other, PolicyViolation::Integrity { .. }), "{other}");
}

#[test]
fn the_token_of_a_volume_says_how_it_is_opened_after_a_power_cut() {
    let token = |keys, cold_start| {
        let token = VolumeToken::new(VolumeEncryption::Encrypted, keys, cold_start);
        serde_json::to_string(&token).unwrap()
    };
    // Headers with these tokens exist.
    let base =
        r#"{"type":"nodekeel-volume","keyslots":[],"format":1,"state":"unfinished","encryption":"encrypted""#;
    for (cold_start, text) in [
        (ColdStart::Local, "local"),
        (ColdStart::Operator, "operator"),
        (ColdStart::Peers, "peers"),
        (ColdStart::Tang, "tang"),
    ] {
        let split = format!(r#"{base},"keys":"split","cold_start":"{text}"}}"#);
        assert_eq!(token(KeyPolicy::Split, cold_start), split);
        let Some(Token::Volume(read)) = Token::parse(&serde_json::from_str(&split).unwrap()) else {
            panic!()
        };
        assert_eq!((read.cold_start(), cold_start.to_string()), (Some(cold_start), text.to_owned()));
        assert_eq!(read.keeps_local_slot(), cold_start == ColdStart::Local);
        assert_eq!(token(KeyPolicy::Local, cold_start), format!(r#"{base},"keys":"local"}}"#));
    }
}

#[test]
fn a_null_cipher_or_a_weaker_one_is_rejected() {
    for cipher in ["cipher_null-ecb", "null", "aes-cbc-essiv:sha256", "aes-xts-plain", "capi:gcm(aes)-random"]
    {
        let data = violation(|header| header["segments"]["0"]["encryption"] = json!(cipher));
        assert!(matches!(data, PolicyViolation::Cipher { .. }), "{data}");
        let slot = violation(|header| header["keyslots"]["1"]["area"]["encryption"] = json!(cipher));
        assert!(matches!(slot, PolicyViolation::Cipher { .. }), "{slot}");
    }
    for key_size in [0, 16, 32, 96] {
        let slot = violation(|header| header["keyslots"]["0"]["key_size"] = json!(key_size));
        assert!(matches!(slot, PolicyViolation::Cipher { .. }), "{slot}");
    }
}

#[test]
fn several_segments_or_a_part_of_the_disk_are_rejected() {
    let changes: [fn(&mut Value); 6] = [
        |header| header["segments"]["1"] = header["segments"]["0"].clone(),
        |header| header["segments"] = json!({}),
        |header| header["segments"]["0"]["type"] = json!("linear"),
        |header| header["segments"]["0"]["size"] = json!("1048576"),
        |header| header["segments"]["0"]["offset"] = json!("33554432"),
        |header| header["segments"]["0"]["sector_size"] = json!(1024),
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let segments = violation(change);
        assert!(matches!(segments, PolicyViolation::Segments(_)), "{index}: {segments}");
    }
}

#[test]
fn a_weak_key_slot_is_rejected() {
    let changes: [fn(&mut Value); 6] = [
        |slot| slot["kdf"]["iterations"] = json!(999),
        |slot| slot["kdf"]["hash"] = json!("sha1"),
        |slot| {
            slot["kdf"] = json!({"type": "argon2id", "time": 1, "memory": 65536, "cpus": 1, "salt": "AA=="})
        },
        |slot| slot["af"]["stripes"] = json!(1),
        |slot| slot["area"]["offset"] = json!("16777216"),
        |slot| slot["area"]["size"] = json!("18446744073709551615"),
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let weak = violation(|header| change(&mut header["keyslots"]["0"]));
        assert!(matches!(&weak, PolicyViolation::WeakKeySlot { slot, .. } if slot == "0"), "{index}: {weak}");
    }
    let mut metadata: Value = serde_json::from_str(ENCRYPTED).unwrap();
    metadata["keyslots"]["0"]["kdf"] =
        json!({"type": "argon2id", "time": 4, "memory": 1_048_576, "cpus": 4, "salt": "AA=="});
    check(&metadata.to_string()).unwrap();
}

#[test]
fn another_volume_key_requirements_and_unknown_tokens_are_rejected() {
    let unbound = violation(|header| header["digests"]["0"]["keyslots"] = json!(["0"]));
    assert_eq!(unbound, PolicyViolation::Digest("key slot 1 has another volume key".into()));
    let two = violation(|header| header["digests"]["1"] = header["digests"]["0"].clone());
    assert!(matches!(two, PolicyViolation::Digest(_)), "{two}");
    let requirements =
        violation(|header| header["config"]["requirements"] = json!({"mandatory": ["inline-hw-tags"]}));
    assert!(matches!(requirements, PolicyViolation::Requirements(_)), "{requirements}");
    let newer = violation(|header| header["tokens"]["0"]["format"] = json!(2));
    assert_eq!(newer, PolicyViolation::UnknownToken("nodekeel-volume".into()));
    let twice = violation(|header| header["tokens"]["1"]["keyslots"] = json!(["1"]));
    assert_eq!(twice, PolicyViolation::UnknownToken("nodekeel-slot".into()));
    let flag = violation(|header| header["config"]["flags"] = json!(["same-cpu-crypt", "allow-discards"]));
    assert_eq!(flag, PolicyViolation::Flag("allow-discards".into()));
}

#[test]
fn headers_that_cryptsetups_own_maintenance_leaves_are_accepted() {
    // Label and subsystem, priorities, another key slot, and tokens of systemd's and Clevis's kind.
    let maintained = check(include_str!("../../../testdata/luks/maintained.json")).unwrap();
    assert_eq!(maintained.slots, [0, 1, 2]);
    assert!(maintained.slot_token(2).is_none() && !maintained.is_interrupted(2));
    let foreign: Vec<_> = maintained.foreign_tokens.iter().map(|(at, kind)| (*at, kind.as_str())).collect();
    assert_eq!(foreign, [(5, "luks2-keyring"), (7, "clevis")]);
    // A reencryption by the recovery passphrase: that has another slot, and the node's has gone.
    let reencrypted = check(include_str!("../../../testdata/luks/reencrypted.json")).unwrap();
    assert_eq!(reencrypted.slots, [2]);
    assert_eq!(
        (reencrypted.token_of(2), reencrypted.slot_token(2).unwrap().kind),
        (Some(2), SlotKind::Recovery)
    );
    assert_eq!(reencrypted.slot_tokens[&1].slots().count(), 0);
    let changes: [fn(&mut Value); 5] = [
        |header| header["config"]["requirements"] = json!({"mandatory": []}),
        |header| header["config"]["flags"] = json!(["no-read-workqueue", "no-write-workqueue"]),
        |header| header["keyslots"]["0"]["priority"] = json!(0),
        |header| {
            header["keyslots"]["0"]["kdf"] =
                json!({"type": "argon2i", "time": 4, "memory": 1_048_576, "cpus": 4, "salt": "AA=="});
        },
        |header| header["tokens"]["1"]["keyslots"] = json!([]),
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let mut metadata: Value = serde_json::from_str(ENCRYPTED).unwrap();
        change(&mut metadata);
        assert!(check(&metadata.to_string()).is_ok(), "{index}");
    }
}

/// Begun by cryptsetup 2.6.1 for a volume with two slots, of which one is kept.
const REENCRYPTING: &str = include_str!("../../../testdata/luks/reencrypting.json");
/// Killed in a hot zone, below an open volume.
const KILLED: &str = include_str!("../../../testdata/luks/reencrypting-killed.json");

#[test]
fn a_reencryption_in_progress_is_accepted_with_the_slots_that_will_be_left() {
    let begun = check(REENCRYPTING).unwrap();
    assert_eq!(begun.slots, [2]);
    assert_eq!(begun.slot_token(2).map(|token| token.kind), Some(SlotKind::Recovery));
    let progress = begun.reencryption.unwrap();
    assert_eq!((progress.done_bytes, progress.stage), (0, ReencryptionStage::Data));
    let killed = check(KILLED).unwrap();
    assert_eq!(killed.slots, [2, 3]);
    let progress = killed.reencryption.unwrap();
    assert_eq!((progress.done_bytes, progress.stage), (75_497_472, ReencryptionStage::Repair));
    // The name is that of the new key: once it is complete, it does not change.
    let mut complete: Value = serde_json::from_str(KILLED).unwrap();
    let digest = complete["digests"]["1"].clone();
    complete["digests"] = json!({"1": digest});
    complete["digests"]["1"]["segments"] = json!(["0"]);
    let whole = json!({"type": "crypt", "offset": "16777216", "size": "dynamic", "iv_tweak": "0",
        "encryption": CIPHER, "sector_size": 4096});
    complete["segments"] = json!({"0": whole});
    complete["config"].as_object_mut().unwrap().remove("requirements");
    for slot in ["0", "1", "4"] {
        complete["keyslots"].as_object_mut().unwrap().remove(slot);
    }
    let complete = check(&complete.to_string()).unwrap();
    assert_eq!((complete.volume_key, complete.reencryption), (killed.volume_key, None));
    // No other requirement, and none of an authenticated volume.
    let other = check_header(KILLED.as_bytes(), VolumeEncryption::EncryptedAndAuthenticated).unwrap_err();
    assert!(matches!(other, PolicyViolation::Reencryption(_)), "{other}");
    assert!(other.to_string().contains("cryptsetup reencrypt --resume-only"), "{other}");
}

/// The newest header of a disk, after cryptsetup 2.6.1 was killed at a system call of `reencrypt --init-only`, or of
/// `--resume-only`.
#[derive(Deserialize)]
struct KilledHeader {
    killed: String,
    metadata: Value,
}

fn killed_headers() -> Vec<KilledHeader> {
    serde_json::from_str(include_str!("../../../testdata/luks/reencryption-kills.json")).unwrap()
}

#[test]
fn a_header_of_a_killed_reencryption_is_accepted_with_the_slots_of_the_data() {
    use ReencryptionStage::{Data, Header, Repair};
    const NONE: &[u32] = &[];
    let expected = [
        ("begin, fsync 2", &[0, 1][..], &[2][..], None),
        ("begin, fsync 4", &[0, 1], &[2], None),
        ("begin, fsync 7", &[0, 1], &[2, 3], None),
        ("begin, fsync 9", &[0, 1], &[2, 3], None),
        ("begin, fsync 12", &[2, 3], NONE, Some((0, Data))),
        ("run, fsync 1", &[2, 3], NONE, Some((0, Repair))),
        ("run, fsync 3", &[2, 3], NONE, Some((u64::MAX, Header))),
        ("run, fsync 6", &[2, 3], NONE, Some((u64::MAX, Header))),
        ("run, fsync 9", &[2, 3], NONE, Some((u64::MAX, Header))),
        ("run, fsync 12", &[2, 3], NONE, None),
    ];
    let headers = killed_headers();
    let keys = headers.iter().zip(expected).map(|(header, expected)| {
        let json = header.metadata.to_string();
        let summary = check(&json).unwrap_or_else(|error| panic!("{}: {error}", header.killed));
        let stage = summary.reencryption.map(|state| (state.done_bytes, state.stage));
        assert_eq!((&*header.killed, &*summary.slots, &*summary.left_slots, stage), expected);
        assert_eq!(summary.unused_slots, summary.left_slots);
        for slot in &summary.slots {
            assert!(summary.slot_token(*slot).is_some(), "{}: slot {slot}", header.killed);
        }
        assert_eq!(finish_metadata(json.as_bytes()).is_some(), summary.is_unfinished(), "{}", header.killed);
        if let Some(finished) = finish_metadata(json.as_bytes()) {
            let finished = check(std::str::from_utf8(&finished).unwrap()).unwrap();
            assert_eq!(finished, HeaderSummary { reencryption: None, ..summary.clone() });
        }
        summary.volume_key
    });
    // The old key until it has begun, and the new one ever after.
    let keys: Vec<_> = keys.collect();
    assert!(keys[..4].iter().all(|key| *key == keys[0]) && keys[0] != keys[4]);
    assert!(keys[5..].iter().all(|key| *key == keys[5]));
}

#[test]
fn a_header_with_data_of_the_old_key_is_never_finished() {
    let changes: [fn(&mut Value); 8] = [
        |header| header["segments"]["0"]["flags"] = json!(["in-reencryption"]),
        |header| header["segments"]["0"]["size"] = json!("8388608"),
        // The whole data are of the old key, or of both.
        |header| header["digests"]["1"]["segments"] = json!(["2"]),
        |header| header["digests"]["0"]["segments"] = json!(["0", "1"]),
        |header| {
            header["digests"]["0"]["segments"] = json!(["0", "1"]);
            header["digests"]["1"]["segments"] = json!(["2"]);
        },
        |header| header["segments"]["1"]["flags"] = json!([]),
        |header| header["segments"]["2"]["flags"] = json!(["backup-previous"]),
        |header| header["digests"]["1"]["keyslots"] = json!([]),
    ];
    let unfinished = killed_headers().into_iter().find(|header| header.killed == "run, fsync 6").unwrap();
    for (index, change) in changes.into_iter().enumerate() {
        let mut metadata = unfinished.metadata.clone();
        change(&mut metadata);
        assert_eq!(finish_metadata(metadata.to_string().as_bytes()), None, "{index}");
        assert!(!check(&metadata.to_string()).is_ok_and(|summary| summary.is_unfinished()), "{index}");
    }
    for header in [ENCRYPTED, REENCRYPTING, KILLED] {
        assert_eq!(finish_metadata(header.as_bytes()), None);
    }
    // What is finished meets the policy, too.
    let mut weak = unfinished.metadata;
    weak["segments"]["0"]["encryption"] = json!("cipher_null-ecb");
    assert!(matches!(check(&weak.to_string()), Err(PolicyViolation::Cipher { .. })));
}

#[test]
fn unbound_slots_of_an_operator_stay_and_open_nothing() {
    let begun = &killed_headers()[0];
    let mut metadata = begun.metadata.clone();
    metadata["keyslots"]["2"]["kdf"]["iterations"] = json!(1001);
    let summary = check(&metadata.to_string()).unwrap();
    assert_eq!(
        (&*summary.slots, &*summary.unused_slots, &*summary.left_slots),
        (&[0, 1][..], &[2][..], &[][..])
    );
    // A begin by hand has copied the first slot, with its token.
    metadata["tokens"]["1"]["keyslots"] = json!(["0", "2"]);
    assert_eq!(check(&metadata.to_string()).unwrap().left_slots, [2]);
    for change in [
        |header: &mut Value| header["keyslots"]["2"]["area"]["offset"] = json!("16777216"),
        |header: &mut Value| header["keyslots"]["2"]["unknown"] = json!("x"),
        |header: &mut Value| header["digests"]["1"]["iterations"] = json!(999),
        |header: &mut Value| header["digests"]["1"]["unknown"] = json!("x"),
        |header: &mut Value| header["digests"]["1"]["keyslots"] = json!([]),
    ] {
        let mut metadata = begun.metadata.clone();
        change(&mut metadata);
        assert!(check(&metadata.to_string()).is_err());
    }
}

#[test]
fn a_reencryption_of_any_other_kind_is_rejected() {
    let changes: [fn(&mut Value); 27] = [
        |header| header["config"]["requirements"] = json!({"mandatory": ["online-reencrypt"]}),
        |header| header["config"]["requirements"] = json!({"mandatory": ["online-reencrypt-v2", "x"]}),
        |header| header["config"]["requirements"] = json!({"mandatory": ["offline-reencrypt"]}),
        // To plain text, from plain text, and the other way round.
        |header| header["keyslots"]["4"]["mode"] = json!("decrypt"),
        |header| header["keyslots"]["4"]["mode"] = json!("encrypt"),
        |header| header["keyslots"]["4"]["direction"] = json!("backward"),
        |header| header["keyslots"]["4"]["key_size"] = json!(64),
        |header| header["keyslots"]["4"]["area"]["type"] = json!("none"),
        |header| header["keyslots"]["4"]["area"]["type"] = json!("datashift"),
        |header| header["keyslots"]["4"]["area"]["hash"] = json!("sha1"),
        |header| header["keyslots"]["4"]["area"]["size"] = json!("16777216"),
        |header| header["keyslots"]["4"]["area"]["offset"] = json!("18446744073709551615"),
        |header| header["segments"]["0"]["type"] = json!("linear"),
        |header| header["segments"]["1"]["encryption"] = json!("cipher_null-ecb"),
        |header| header["segments"]["4"]["encryption"] = json!("cipher_null-ecb"),
        |header| header["segments"]["3"]["sector_size"] = json!(512),
        |header| header["segments"]["1"]["offset"] = json!("92274689"),
        |header| header["segments"]["2"]["iv_tweak"] = json!("0"),
        |header| header["segments"]["1"]["flags"] = json!(["in-reencryption", "x"]),
        |header| header["segments"]["3"]["flags"] = json!(["backup-final"]),
        // Pieces in another order, or of no key.
        |header| header["digests"]["0"]["segments"] = json!(["0", "1", "3"]),
        |header| header["digests"]["1"]["segments"] = json!(["0", "4"]),
        |header| header["digests"]["1"]["segments"] = json!(["1", "0", "2", "4"]),
        // Slots of both keys, or of none.
        |header| header["digests"]["1"]["keyslots"] = json!(["2", "3", "0"]),
        |header| header["digests"]["1"]["keyslots"] = json!(["2"]),
        |header| header["digests"]["2"]["keyslots"] = json!(["4", "0"]),
        |header| header["digests"]["3"] = header["digests"]["2"].clone(),
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let mut metadata: Value = serde_json::from_str(KILLED).unwrap();
        change(&mut metadata);
        assert!(check(&metadata.to_string()).is_err(), "{index}");
    }
    // A weaker slot or digest is rejected on either side.
    for slot in ["0", "3"] {
        let mut metadata: Value = serde_json::from_str(KILLED).unwrap();
        metadata["keyslots"][slot]["kdf"]["iterations"] = json!(999);
        let weak = check(&metadata.to_string()).unwrap_err();
        assert!(matches!(weak, PolicyViolation::WeakKeySlot { .. }), "{weak}");
    }
}

#[test]
fn every_unknown_field_is_rejected() {
    fn paths(value: &Value, path: String, all: &mut Vec<String>) {
        if let Value::Object(fields) = value {
            all.push(path.clone());
            for (name, field) in fields {
                paths(field, format!("{path}/{name}"), all);
            }
        }
    }
    for header in [ENCRYPTED, KILLED] {
        let metadata: Value = serde_json::from_str(header).unwrap();
        let mut all = Vec::new();
        paths(&metadata, String::new(), &mut all);
        assert!(all.len() > 15, "{all:?}");
        for path in all {
            let mut changed = metadata.clone();
            changed.pointer_mut(&path).unwrap()["unknown"] = json!("x");
            assert!(check(&changed.to_string()).is_err(), "{path}");
        }
    }
}

#[test]
fn whose_a_volume_is_can_be_read_from_any_header() {
    let mut metadata: Value = serde_json::from_str(ENCRYPTED).unwrap();
    metadata["segments"]["0"]["encryption"] = json!("cipher_null-ecb");
    let token = read_volume_token(metadata.to_string().as_bytes()).unwrap();
    assert_eq!(token.state, VolumeProgress::Complete);
    for other in ["", "{}", r#"{"tokens":{"0":{"type":"systemd-tpm2","keyslots":[]}}}"#] {
        assert_eq!(read_volume_token(other.as_bytes()), None);
    }
}

proptest! {
    #[test]
    fn arbitrary_and_changed_headers_are_read_safely(bytes in prop::collection::vec(any::<u8>(), 0..2000),
        at in 0..2000_usize, replacement in "[0-9a-z{}\":,]{0,8}") {
        fuzz_luks_header(&bytes);
        let mut changed = ENCRYPTED.to_owned();
        let at = at.min(changed.len());
        changed.replace_range(at..(at + replacement.len()).min(ENCRYPTED.len()), &replacement);
        fuzz_luks_header(changed.as_bytes());
        let mut changed = KILLED.to_owned();
        changed.replace_range(at..(at + replacement.len()).min(KILLED.len()), &replacement);
        fuzz_luks_header(changed.as_bytes());
        for header in killed_headers() {
            let mut changed = header.metadata.to_string();
            let at = at.min(changed.len());
            changed.replace_range(at..(at + replacement.len()).min(changed.len()), &replacement);
            fuzz_luks_header(changed.as_bytes());
        }
    }
}

#[test]
fn a_header_of_cryptsetup_is_encoded_alike() {
    let uuid = "11111111-2222-4333-8444-555555555555".parse().unwrap();
    let header = LuksHeader::parse(&encode_header(uuid, 9, ENCRYPTED.trim().as_bytes())).unwrap();
    assert_eq!((header.uuid, header.sequence), (uuid, 9));
    check(std::str::from_utf8(&header.json).unwrap()).unwrap();
}

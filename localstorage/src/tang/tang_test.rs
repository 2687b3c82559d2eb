//! Bindings and recoveries with a server in memory: what fits, and what is refused.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::jwk::{decode, encode};
use super::server::{TangKeys, fuzz_tang_answer};
use super::{Advertisement, Binding, TangError, Thumbprint};

const URL: &str = "http://tang.example:8080";

fn verify(keys: &TangKeys) -> Advertisement {
    Advertisement::verify(keys.advertise().as_bytes(), &keys.signer(), []).unwrap()
}

fn recover(keys: &TangKeys, binding: &Binding) -> Result<Vec<u8>, TangError> {
    let recovery = binding.start_recovery().unwrap();
    let answer = keys.recover(&recovery.path(), recovery.request().as_bytes()).unwrap();
    recovery.finish(answer.as_bytes()).map(|secret| secret.to_vec())
}

/// The text of a binding with a changed header.
fn with_header(binding: &Binding, change: impl FnOnce(&mut Value)) -> String {
    let (header, rest) = binding.as_str().split_once('.').unwrap();
    let mut header = serde_json::from_slice(&decode(header).unwrap()).unwrap();
    change(&mut header);
    format!("{}.{rest}", encode(header.to_string().as_bytes()))
}

#[test]
fn a_secret_is_recovered_and_each_recovery_sends_another_point() {
    let keys = TangKeys::generate();
    let binding = verify(&keys).bind(URL, &[7; 32]).unwrap();
    let read = Binding::parse(&format!("{}\n", binding.as_str())).unwrap();
    assert_eq!((read.url(), read.key_id()), (URL, binding.key_id()));
    assert!(verify(&keys).has_key_of(&read));
    assert_eq!(recover(&keys, &read).unwrap(), [7; 32]);
    let requests = [(); 2].map(|()| read.start_recovery().unwrap().request());
    assert_ne!(requests[0], requests[1]);
    // The same secret is encrypted by another key.
    assert_ne!(verify(&keys).bind(URL, &[7; 32]).unwrap().as_str(), binding.as_str());
}

/// *Source:* the key is that of tang 11, and the binding that of clevis 19.
#[test]
fn what_clevis_has_bound_is_recovered() {
    let key: Value = serde_json::from_str(include_str!("../../testdata/tang/exchange-key.json")).unwrap();
    let keys = TangKeys::with_exchange_key(&decode(key["d"].as_str().unwrap()).unwrap());
    let binding = Binding::parse(include_str!("../../testdata/tang/clevis.jwe")).unwrap();
    assert_eq!(binding.url(), "http://127.0.0.1:17654");
    assert_eq!(recover(&keys, &binding).unwrap(), b"the secret of a golden file");
}

#[test]
fn an_advertisement_of_another_key_is_refused() {
    let (keys, other) = (TangKeys::generate(), TangKeys::generate());
    let refused = |answer: &str, signer: &Thumbprint| {
        Advertisement::verify(answer.as_bytes(), signer, []).unwrap_err().to_string()
    };
    let not_signed = "has no advertisement that key";
    assert!(refused(&other.advertise(), &keys.signer()).contains(not_signed));
    // Another server that has copied the set of keys.
    let mut forged: Value = serde_json::from_str(&keys.advertise()).unwrap();
    let signature = serde_json::from_str::<Value>(&other.advertise()).unwrap()["signature"].clone();
    forged["signature"] = signature;
    assert!(refused(&forged.to_string(), &keys.signer()).contains(not_signed));
    // The payload of one, and the signature of the other.
    let mut mixed: Value = serde_json::from_str(&keys.advertise()).unwrap();
    mixed["payload"] = serde_json::from_str::<Value>(&other.advertise()).unwrap()["payload"].clone();
    assert!(refused(&mixed.to_string(), &keys.signer()).contains(not_signed));
    for (answer, says) in [
        ("", "no signed JSON"),
        ("[]", "no signed JSON"),
        (r#"{"payload": "e30"}"#, "no set of keys"),
        (r#"{"payload": "e3="}"#, "no set of keys"),
    ] {
        assert!(refused(answer, &keys.signer()).contains(says), "{answer}");
    }
}

#[test]
fn a_server_that_signs_with_a_newer_key_is_known_by_the_binding() {
    let (old, new) = (TangKeys::generate(), TangKeys::generate());
    let binding = verify(&old).bind(URL, b"secret").unwrap();
    // Tang lists the newer keys, and signs also with the older one that is asked for.
    let payload = serde_json::from_str::<Value>(&new.advertise()).unwrap()["payload"].clone();
    let set: Value = serde_json::from_slice(&decode(payload.as_str().unwrap()).unwrap()).unwrap();
    let by = |keys: &TangKeys| {
        let jws: Value = serde_json::from_str(&keys.sign(&set)).unwrap();
        json!({ "protected": jws["protected"], "signature": jws["signature"] })
    };
    let answer = json!({ "payload": payload, "signatures": [by(&new), by(&old)] }).to_string();
    let advertisement =
        |bindings: &[Binding]| Advertisement::verify(answer.as_bytes(), &old.signer(), bindings);
    assert!(matches!(advertisement(&[]), Err(TangError::NotSigned { .. })));
    let newer = advertisement(std::slice::from_ref(&binding)).unwrap();
    assert!(!newer.has_key_of(&binding), "the exchange key was replaced");
    assert_eq!(recover(&old, &binding).unwrap(), b"secret");
    let again = newer.bind(URL, b"secret").unwrap();
    assert_eq!(recover(&new, &again).unwrap(), b"secret");
    assert!(Advertisement::verify(answer.as_bytes(), &old.signer(), [&again]).unwrap().has_key_of(&again));
}

#[test]
fn exchange_keys_that_are_no_points_or_for_another_use_are_not_bound_to() {
    let keys = TangKeys::generate();
    let jws: Value = serde_json::from_str(&keys.advertise()).unwrap();
    let set: Value = serde_json::from_slice(&decode(jws["payload"].as_str().unwrap()).unwrap()).unwrap();
    let zero = encode(&[0; 66]);
    let changes: [fn(&mut Value, &str); 6] = [
        |key, zero| key["x"] = zero.into(),
        |key, zero| (key["x"], key["y"]) = (zero.into(), zero.into()),
        |key, _| key["alg"] = "ES512".into(),
        |key, _| key["key_ops"] = json!(["sign"]),
        |key, _| key["crv"] = "P-256".into(),
        |key, _| key["kty"] = 7.into(),
    ];
    for change in changes {
        let mut set = set.clone();
        change(&mut set["keys"][1], &zero);
        let answer = keys.sign(&set);
        let refused = Advertisement::verify(answer.as_bytes(), &keys.signer(), []);
        assert!(matches!(refused, Err(TangError::NoExchangeKey)), "{set}: {refused:?}");
    }
}

#[test]
fn an_answer_of_any_other_key_opens_nothing() {
    let keys = TangKeys::generate();
    let binding = verify(&keys).bind(URL, b"secret").unwrap();
    let valid = {
        let recovery = binding.start_recovery().unwrap();
        keys.recover(&recovery.path(), recovery.request().as_bytes()).unwrap()
    };
    let zero = encode(&[0; 66]);
    let with = |member: &str, value: Value| {
        let mut answer: Value = serde_json::from_str(&valid).unwrap();
        answer[member] = value;
        answer.to_string()
    };
    let refused = |answer: &str| binding.start_recovery().unwrap().finish(answer.as_bytes()).unwrap_err();
    // A point of an earlier recovery does not fit this one.
    assert!(matches!(refused(&valid), TangError::WrongAnswer));
    for answer in [
        String::new(),
        "null".into(),
        "{}".into(),
        "[".repeat(60_000),
        with("crv", "P-384".into()),
        with("x", zero.as_str().into()),
        with("x", Value::Null),
        with("y", "".into()),
    ] {
        assert!(matches!(refused(&answer), TangError::Answer(_)), "{answer}");
    }
    assert!(keys.recover("/rec/other", binding.start_recovery().unwrap().request().as_bytes()).is_none());
}

#[test]
fn a_binding_that_is_changed_anywhere_is_refused_or_opens_nothing() {
    let keys = TangKeys::generate();
    let binding = verify(&keys).bind(URL, b"secret").unwrap();
    let other = verify(&TangKeys::generate()).bind(URL, b"secret").unwrap();
    for (text, says) in [
        (String::new(), "no JWE"),
        ("a.b.c.d.e".into(), "no JWE"),
        ("x".repeat(300 << 10), "too long"),
        (with_header(&binding, |header| header["alg"] = "dir".into()), "unknown"),
        (with_header(&binding, |header| header["zip"] = "DEF".into()), "unknown"),
        (with_header(&binding, |header| header["clevis"]["pin"] = "sss".into()), "no Tang server"),
        (with_header(&binding, |header| header["kid"] = other.key_id().to_string().into()), "that it names"),
        (with_header(&binding, |header| header["epk"]["x"] = encode(&[0; 66]).into()), "ephemeral"),
    ] {
        let refused = Binding::parse(&text).unwrap_err().to_string();
        assert!(refused.contains(says), "{refused}");
    }
    // Who changes the URL gets a point that tells nothing, and the answer opens nothing.
    let moved = with_header(&binding, |header| header["clevis"]["tang"]["url"] = "http://thief".into());
    let moved = Binding::parse(&moved).unwrap();
    assert!(matches!(recover(&keys, &moved), Err(TangError::WrongAnswer)));
    let (cut, last) = binding.as_str().split_at(binding.as_str().len() - 1);
    let changed = format!("{cut}{}", if last == "A" { "Q" } else { "A" });
    assert!(Binding::parse(&changed).is_err() || recover(&keys, &Binding::parse(&changed).unwrap()).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_answer_is_refused(bytes in prop::collection::vec(any::<u8>(), 0..256)) {
        fuzz_tang_answer(&bytes);
    }

    #[test]
    fn any_set_of_keys_is_used_or_refused(
        members in prop::collection::btree_map("kty|crv|x|y|alg|key_ops", "EC|P-521|ECMR|[A-Za-z_-]{0,90}", 0..6),
    ) {
        fuzz_tang_answer(json!({ "keys": [members] }).to_string().as_bytes());
        fuzz_tang_answer(json!(members).to_string().as_bytes());
    }
}

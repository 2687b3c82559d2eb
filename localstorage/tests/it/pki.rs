//! Credentials: whole and right together, or an error that says which file; and never made anew unasked.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nodekeel_localstorage::mem::{Fault, MemPlacement};
use nodekeel_localstorage::pki::{
    Certificate, CommonName, Credentials, FormatError, PkiError, PrivateKey, RevocationList, Template,
};
use nodekeel_localstorage::testing::credentials_file;
use nodekeel_localstorage::tree::{Data, File, Pki, Site};
use nodekeel_localstorage::{Mode, Placement};
use proptest::prelude::*;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, IsCa, Issuer, KeyIdMethod, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PKCS_ED25519, RevokedCertParams, SerialNumber, date_time_ymd,
};

struct Bench {
    placement: Arc<MemPlacement>,
    data: Data,
}

impl Bench {
    fn new() -> Bench {
        let placement = Arc::new(MemPlacement::default());
        let data = Site::new(placement.clone(), "/data").place().unwrap();
        Bench { placement, data }
    }

    fn pki(&self) -> &Pki {
        &self.data.node.credentials
    }

    fn files(&self) -> [Option<Vec<u8>>; 3] {
        let Pki { ca, certificate, key, .. } = self.pki();
        [ca, certificate, key].map(|file: &File| file.read_if_present().unwrap())
    }
}

/// An authority outside of the tree.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: Certificate,
}

impl Authority {
    fn new(is_ca: bool) -> Authority {
        let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let mut params = CertificateParams::default();
        if is_ca {
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        }
        let certificate = Certificate::from_der(params.self_signed(&key).unwrap().der()).unwrap();
        Authority { issuer: Issuer::new(params, key), certificate }
    }

    /// A key with a certificate of this authority, with this serial number.
    fn issue(&self, serial: u64) -> Credentials {
        let pair = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let mut params = CertificateParams::new(vec!["node".into()]).unwrap();
        params.serial_number = Some(SerialNumber::from(serial));
        let certificate = params.signed_by(&pair, &self.issuer).unwrap();
        Credentials {
            key: PrivateKey::from_pkcs8(pair.serialized_der()).unwrap(),
            certificate: Certificate::from_der(certificate.der()).unwrap(),
            ca: self.certificate.clone(),
        }
    }

    fn revoke(&self, serial: u64) -> Vec<u8> {
        let revoked = RevokedCertParams {
            serial_number: SerialNumber::from(serial),
            revocation_time: date_time_ymd(2024, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2024, 1, 1),
            next_update: date_time_ymd(2034, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: vec![revoked],
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&self.issuer).unwrap().der().to_vec()
    }
}

fn malformed(result: Result<Option<Credentials>, PkiError>) -> (String, FormatError) {
    match result.map(|loaded| loaded.is_some()) {
        Err(PkiError::Malformed { file, source }) => {
            (file.file_name().unwrap().to_str().unwrap().to_owned(), source)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn credentials_are_made_once_and_are_those_of_a_node() {
    let bench = Bench::new();
    assert!(bench.pki().presence().unwrap().is_none());
    assert!(bench.pki().load().unwrap().is_none());
    let made = bench.pki().ensure_self_signed(&Template::default()).unwrap();
    let name = format!("nodekeel-{}", made.key.public().short_id());
    assert_eq!(made.certificate.common_name(), Some(name.as_str()));
    let end = SystemTime::UNIX_EPOCH + Duration::from_secs(253_402_300_799);
    assert_eq!(made.certificate.not_after(), end, "the last second of 9999");
    assert!(made.certificate.serial().len() <= 16 && made.certificate.serial()[0] < 0x80);
    assert!(bench.pki().presence().unwrap().is_all());
    let before = bench.files();
    let again = bench.pki().ensure_self_signed(&Template::default()).unwrap();
    assert_eq!((again.key.public(), &again.certificate), (made.key.public(), &made.certificate));
    assert_eq!(bench.files(), before, "what is there is not written again");
    let pem = String::from_utf8(before[2].clone().unwrap()).unwrap();
    assert!(pem.starts_with("-----BEGIN PRIVATE KEY-----\n") && pem.ends_with("-----END PRIVATE KEY-----\n"));
}

#[test]
fn a_template_says_what_is_in_the_certificate() {
    let mut template = Template::default();
    template.common_name = CommonName::Is("registry".into());
    template.hosts = vec!["registry.local".into(), "10.0.0.1".into()];
    template.ca = true;
    let key = PrivateKey::generate().unwrap();
    let certificate = template.self_sign(&key).unwrap();
    assert_eq!((certificate.common_name(), certificate.is_ca()), (Some("registry"), true));
    assert!(certificate.is_signed_by(&certificate));
    assert_ne!(template.self_sign(&key).unwrap().serial(), certificate.serial(), "serials are random");
    let bytes = String::from_utf8_lossy(certificate.der()).into_owned();
    assert!(bytes.contains("registry.local"));
}

#[test]
fn a_key_that_waits_for_its_certificate_is_kept() {
    let bench = Bench::new();
    let key = bench.pki().ensure_key().unwrap().public();
    assert_eq!(bench.pki().ensure_key().unwrap().public(), key);
    assert_eq!(bench.pki().load_key().unwrap().unwrap().public(), key);
    let incomplete = bench.pki().load().unwrap_err();
    assert!(incomplete.to_string().ends_with("incomplete: CA absent, certificate absent, key present"));
    assert_eq!(bench.pki().ensure_self_signed(&Template::default()).unwrap().key.public(), key);
}

#[test]
fn files_that_are_missing_are_told_and_nothing_is_made_in_their_place() {
    for missing in [[0].as_slice(), &[1], &[2], &[0, 2], &[1, 2]] {
        let bench = Bench::new();
        bench.pki().ensure_self_signed(&Template::default()).unwrap();
        let Pki { ca, certificate, key, .. } = bench.pki();
        for at in missing {
            [ca, certificate, key][*at].remove().unwrap();
        }
        let before = bench.files();
        let presence = bench.pki().presence().unwrap();
        assert!(!presence.is_all() && !presence.is_none());
        for result in
            [bench.pki().load().map(|_| ()), bench.pki().ensure_self_signed(&Template::default()).map(|_| ())]
        {
            assert!(matches!(result, Err(PkiError::Incomplete { .. })), "{missing:?}: {result:?}");
        }
        if missing.contains(&2) {
            assert!(matches!(bench.pki().ensure_key(), Err(PkiError::Incomplete { .. })));
        }
        assert_eq!(bench.files(), before);
    }
}

#[test]
fn an_error_of_reading_costs_no_identity() {
    let bench = Bench::new();
    bench.pki().ensure_self_signed(&Template::default()).unwrap();
    let before = bench.files();
    let mut failures = 0;
    for at in 1.. {
        bench.placement.fail(at, Fault::Device);
        let ensured = bench.pki().ensure_self_signed(&Template::default());
        bench.placement.restart();
        assert_eq!(bench.files(), before, "reading failed at {at}");
        match ensured {
            Ok(_) => break,
            Err(PkiError::Read { .. }) => failures += 1,
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!(failures >= 6, "{failures}");
}

#[test]
fn making_credentials_killed_at_any_step_gives_one_identity() {
    for fault in [Fault::CrashBefore, Fault::CrashAfter, Fault::Full, Fault::Device] {
        for at in 1.. {
            let bench = Bench::new();
            bench.placement.fail(at, fault);
            let made = bench.pki().ensure_self_signed(&Template::default());
            bench.placement.restart();
            // As after a restart: the tree is placed again.
            let data: Data = Site::new(bench.placement.clone(), "/data").place().unwrap();
            let key = data.node.credentials.load_key().unwrap().map(|key| key.public());
            let ensured = data.node.credentials.ensure_self_signed(&Template::default()).unwrap();
            assert!(key.is_none_or(|key| key == ensured.key.public()), "a key that was written is kept");
            if let Ok(made) = made {
                assert_eq!(made.certificate, ensured.certificate);
                break;
            }
        }
    }
}

#[test]
fn a_change_of_credentials_killed_at_any_step_never_mixes_generations() {
    let (one, other) = (Authority::new(true), Authority::new(true));
    for fault in [Fault::CrashBefore, Fault::CrashAfter, Fault::Full, Fault::Device] {
        let mut outcomes = Vec::new();
        for at in 1.. {
            let bench = Bench::new();
            let (old, new) = (one.issue(1), other.issue(2));
            bench.pki().store(&old).unwrap();
            bench.placement.fail(at, fault);
            let stored = bench.pki().store(&new);
            bench.placement.restart();
            // Also through the handles of before, and after the tree is placed again.
            let data: Data = Site::new(bench.placement.clone(), "/data").place().unwrap();
            for pki in [bench.pki(), &data.node.credentials] {
                let found = pki.load().unwrap().unwrap();
                let is_new = found.certificate == new.certificate;
                assert!(is_new || found.certificate == old.certificate);
                assert!(is_new || stored.is_err(), "what was said to be stored is");
                outcomes.push(is_new);
            }
            if stored.is_ok() {
                break;
            }
        }
        assert!(outcomes.contains(&true) && outcomes.len() > 8, "{fault:?}: {outcomes:?}");
        // The record is the first thing written: only where that fails are they the old ones.
        assert_eq!(outcomes.contains(&false), fault != Fault::CrashAfter, "{fault:?}: {outcomes:?}");
    }
}

#[test]
fn what_does_not_fit_together_is_refused_before_it_is_stored_and_when_it_is_loaded() {
    let (authority, other) = (Authority::new(true), Authority::new(true));
    let bench = Bench::new();
    let good = authority.issue(1);
    bench.pki().store(&good).unwrap();
    let before = bench.files();

    let foreign_key = Credentials { key: PrivateKey::generate().unwrap(), ..authority.issue(2) };
    let refused = bench.pki().store(&foreign_key).unwrap_err();
    assert!(matches!(refused, PkiError::KeyMismatch { .. }), "{refused:?}");
    let foreign_ca = Credentials { ca: other.certificate.clone(), ..authority.issue(2) };
    let refused = bench.pki().store(&foreign_ca).unwrap_err();
    assert!(matches!(refused, PkiError::NotIssued { .. }), "{refused:?}");
    let no_ca = Authority::new(false).issue(3);
    assert!(matches!(bench.pki().store(&no_ca), Err(PkiError::NotIssued { .. })));
    assert_eq!(bench.files(), before);

    let key = PrivateKey::generate().unwrap();
    bench.pki().key.write(key.to_pem().as_bytes()).unwrap();
    let mismatch = bench.pki().load().unwrap_err();
    assert_eq!(
        mismatch.to_string(),
        "/data/node/credentials/cert-key.pem is not the key of /data/node/credentials/cert.pem"
    );
    let ensured = bench.pki().ensure_self_signed(&Template::default());
    assert!(matches!(ensured, Err(PkiError::KeyMismatch { .. })), "a mismatch is not mended by a new key");
    bench.pki().key.write(good.key.to_pem().as_bytes()).unwrap();
    bench.pki().ca.write(other.certificate.to_pem().as_bytes()).unwrap();
    assert!(matches!(bench.pki().load(), Err(PkiError::NotIssued { .. })));
}

#[test]
fn each_file_cut_at_every_byte_is_named_and_stays() {
    let bench = Bench::new();
    bench.pki().store(&Authority::new(true).issue(1)).unwrap();
    let Pki { ca, certificate, key, .. } = bench.pki();
    for file in [ca, certificate, key] {
        let whole = file.read().unwrap();
        // Without the last newline it is whole.
        for len in 0..whole.len() - 1 {
            file.write(&whole[..len]).unwrap();
            let (name, why) = malformed(bench.pki().load());
            assert_eq!(name, file.path().file_name().unwrap().to_str().unwrap());
            assert!(matches!(why, FormatError::NoPem | FormatError::Truncated), "{name} cut at {len}: {why}");
            let ensured = bench.pki().ensure_self_signed(&Template::default());
            assert!(matches!(ensured, Err(PkiError::Malformed { .. })), "{ensured:?}");
            assert_eq!(file.read().unwrap(), whole[..len], "it stays");
        }
        file.write(&whole).unwrap();
        bench.pki().load().unwrap().unwrap();
    }
}

#[test]
fn der_cut_at_every_byte_is_refused() {
    let issued = Authority::new(true).issue(1);
    for len in 0..issued.certificate.der().len() {
        let cut = Certificate::from_der(&issued.certificate.der()[..len]);
        assert_eq!(cut, Err(FormatError::Der { what: "certificate" }));
    }
    let key = issued.key.expose_pkcs8();
    for len in 0..key.len() {
        let cut = PrivateKey::from_pkcs8(&key[..len]).unwrap_err();
        assert_eq!(cut, FormatError::Der { what: "private key" });
    }
    let more = [issued.certificate.der(), b"\0"].concat();
    assert_eq!(Certificate::from_der(&more), Err(FormatError::TrailingData));
    assert!(PrivateKey::from_pkcs8(&[key, b"\0"].concat()).is_err());
}

#[test]
fn files_of_another_kind_are_told_as_what_they_are() {
    let bench = Bench::new();
    let issued = Authority::new(true).issue(1);
    bench.pki().store(&issued).unwrap();
    let Pki { certificate, key, .. } = bench.pki();
    let (key_pem, certificate_pem) = (issued.key.to_pem(), issued.certificate.to_pem());

    key.write(certificate_pem.as_bytes()).unwrap();
    let (file, why) = malformed(bench.pki().load());
    let found = "CERTIFICATE".to_owned();
    assert_eq!(
        (file.as_str(), why),
        ("cert-key.pem", FormatError::WrongLabel { found, expected: "PRIVATE KEY" })
    );
    key.write(&[key_pem.as_bytes(), certificate_pem.as_bytes()].concat()).unwrap();
    assert_eq!(malformed(bench.pki().load()).1, FormatError::TrailingData);
    let ecdsa = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    key.write(ecdsa.serialize_pem().as_bytes()).unwrap();
    assert_eq!(malformed(bench.pki().load()), ("cert-key.pem".into(), FormatError::NotEd25519));
    key.write(key_pem.as_bytes()).unwrap();
    let foreign = CertificateParams::default().self_signed(&ecdsa).unwrap();
    certificate.write(foreign.pem().replace("\r\n", "\n").as_bytes()).unwrap();
    assert_eq!(malformed(bench.pki().load()), ("cert.pem".into(), FormatError::NotEd25519));
    certificate.write(b"").unwrap();
    assert_eq!(malformed(bench.pki().load()), ("cert.pem".into(), FormatError::NoPem));
}

#[test]
fn keys_and_certificates_of_other_tools_are_read() {
    // PKCS #8 of version 1, without the public key: as Go and OpenSSL write it. *Source:* RFC 8410, section 10.3.
    let openssl = b"-----BEGIN PRIVATE KEY-----\n\
        MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n-----END PRIVATE KEY-----\n";
    let key = PrivateKey::from_pem(openssl).unwrap();
    assert_eq!(key.public().short_id(), "19bf44096984cdfe8541bac167dc3b96");
    assert_eq!(key.to_pem().as_bytes(), openssl);
    let pair = KeyPair::generate_for(&PKCS_ED25519).unwrap();
    let theirs = CertificateParams::default().self_signed(&pair).unwrap();
    assert!(Certificate::from_pem(theirs.pem().as_bytes()).is_ok());
}

#[test]
fn a_private_key_is_not_printable() {
    let bench = Bench::new();
    let credentials = bench.pki().ensure_self_signed(&Template::default()).unwrap();
    assert_eq!(format!("{:?}", credentials.key), "PrivateKey { .. }");
    let pem = credentials.key.to_pem();
    let secret = pem.lines().nth(1).unwrap();
    let error = PrivateKey::from_pem(pem.replace("END", "FIN").as_bytes()).unwrap_err();
    for text in [format!("{credentials:?}"), format!("{:?}", bench.data), format!("{error:?} {error}")] {
        assert!(!text.contains(secret) && !text.contains("-----"), "{text}");
    }
}

#[test]
fn a_list_of_revoked_certificates_is_checked_against_the_authority() {
    let bench = Bench::new();
    let (authority, other) = (Authority::new(true), Authority::new(true));
    assert_eq!(bench.data.etcd.load_revoked(&authority.certificate).unwrap(), None);
    let list = RevocationList::from_der(&authority.revoke(7), &authority.certificate).unwrap();
    bench.data.etcd.store_revoked(&list).unwrap();
    let list = bench.data.etcd.load_revoked(&authority.certificate).unwrap().unwrap();
    assert!(list.revokes(&authority.issue(7).certificate) && !list.revokes(&authority.issue(8).certificate));
    let forged = bench.data.etcd.load_revoked(&other.certificate).unwrap_err();
    assert!(matches!(forged, PkiError::Malformed { source: FormatError::Signature, .. }), "{forged:?}");
    for len in 0..list.der().len() {
        let cut = RevocationList::from_der(&list.der()[..len], &authority.certificate);
        assert_eq!(cut, Err(FormatError::Der { what: "revocation list" }));
    }
    let more = [list.der(), b"\0"].concat();
    assert_eq!(RevocationList::from_der(&more, &authority.certificate), Err(FormatError::TrailingData));
    bench.placement.write(Path::new("etcd/peer_crl"), b"noise", Mode::PRIVATE_FILE).unwrap();
    let broken = bench.data.etcd.load_revoked(&authority.certificate).unwrap_err();
    assert!(broken.to_string().ends_with("etcd/peer_crl"), "{broken}");
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
        credentials_file(&bytes);
    }

    #[test]
    fn a_changed_byte_never_panics_and_never_passes_for_the_same(
        at in any::<prop::sample::Index>(),
        flip in 1u8..,
    ) {
        let issued = Authority::new(true).issue(1);
        let mut der = issued.certificate.der().to_vec();
        let at = at.index(der.len());
        der[at] ^= flip;
        credentials_file(&der);
        if let Ok(certificate) = Certificate::from_der(&der) {
            prop_assert!(!certificate.is_signed_by(&issued.ca));
        }
    }
}

//! Credentials: complete and matching, or an error that names the file; never replaced implicitly.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nodekeel_localstorage::mem::{InjectedFault, MemFileStore};
use nodekeel_localstorage::pki::{
    Certificate, CertificateTemplate, CommonName, Credentials, PkiEncodingError, PkiError, PrivateKey,
    RevocationList,
};
use nodekeel_localstorage::testing::fuzz_credentials_file;
use nodekeel_localstorage::tree::{LayoutFile, LayoutTarget, PkiDir};
use nodekeel_localstorage::{FileMode, FileStore};
use proptest::prelude::*;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, IsCa, Issuer, KeyIdMethod, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PKCS_ED25519, RevokedCertParams, SerialNumber, date_time_ymd,
};

use crate::monogon_root::DataPartition;

struct PkiFixture {
    store: Arc<MemFileStore>,
    data: DataPartition,
}

impl PkiFixture {
    fn new() -> PkiFixture {
        let store = Arc::new(MemFileStore::default());
        let data = LayoutTarget::new(store.clone(), "/data").create_layout().unwrap();
        PkiFixture { store, data }
    }

    fn pki(&self) -> &PkiDir {
        &self.data.node.credentials
    }

    fn files(&self) -> [Option<Vec<u8>>; 3] {
        let PkiDir { ca, certificate, key, .. } = self.pki();
        [ca, certificate, key].map(|file: &LayoutFile| file.read_if_present().unwrap())
    }
}

/// A CA outside of the layout.
pub(crate) struct TestCa {
    issuer: Issuer<'static, KeyPair>,
    certificate: Certificate,
}

impl TestCa {
    pub(crate) fn new(is_ca: bool) -> TestCa {
        let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let mut params = CertificateParams::default();
        if is_ca {
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        }
        let certificate = Certificate::from_der(params.self_signed(&key).unwrap().der()).unwrap();
        TestCa { issuer: Issuer::new(params, key), certificate }
    }

    /// A key with a certificate of this CA, with this serial number.
    pub(crate) fn issue(&self, serial: u64) -> Credentials {
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

fn expect_malformed(result: Result<Option<Credentials>, PkiError>) -> (String, PkiEncodingError) {
    match result.map(|loaded| loaded.is_some()) {
        Err(PkiError::Malformed { file, source }) => {
            (file.file_name().unwrap().to_str().unwrap().to_owned(), source)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn self_signed_credentials_are_created_once() {
    let fixture = PkiFixture::new();
    assert!(fixture.pki().credential_presence().unwrap().is_absent());
    assert!(fixture.pki().load_credentials().unwrap().is_none());
    let created = fixture.pki().ensure_self_signed(&CertificateTemplate::default()).unwrap();
    let name = format!("nodekeel-{}", created.key.public_key().short_id());
    assert_eq!(created.certificate.common_name(), Some(name.as_str()));
    let end = SystemTime::UNIX_EPOCH + Duration::from_secs(253_402_300_799);
    assert_eq!(created.certificate.not_after(), end, "the last second of 9999");
    assert!(created.certificate.serial_number().len() <= 16 && created.certificate.serial_number()[0] < 0x80);
    assert!(fixture.pki().credential_presence().unwrap().is_complete());
    let before = fixture.files();
    let again = fixture.pki().ensure_self_signed(&CertificateTemplate::default()).unwrap();
    assert_eq!(
        (again.key.public_key(), &again.certificate),
        (created.key.public_key(), &created.certificate)
    );
    assert_eq!(fixture.files(), before, "existing files are not rewritten");
    let pem = String::from_utf8(before[2].clone().unwrap()).unwrap();
    assert!(pem.starts_with("-----BEGIN PRIVATE KEY-----\n") && pem.ends_with("-----END PRIVATE KEY-----\n"));
}

#[test]
fn a_template_defines_the_certificate() {
    let mut template = CertificateTemplate::default();
    template.common_name = CommonName::Exact("registry".into());
    template.hosts = vec!["registry.local".into(), "10.0.0.1".into()];
    template.is_ca = true;
    let key = PrivateKey::generate().unwrap();
    let certificate = template.self_sign(&key).unwrap();
    assert_eq!((certificate.common_name(), certificate.is_ca()), (Some("registry"), true));
    assert!(certificate.is_signed_by(&certificate));
    assert_ne!(
        template.self_sign(&key).unwrap().serial_number(),
        certificate.serial_number(),
        "serials are random"
    );
    let bytes = String::from_utf8_lossy(certificate.der_bytes()).into_owned();
    assert!(bytes.contains("registry.local"));
}

#[test]
fn a_key_without_a_certificate_is_kept() {
    let fixture = PkiFixture::new();
    let key = fixture.pki().ensure_key().unwrap().public_key();
    assert_eq!(fixture.pki().ensure_key().unwrap().public_key(), key);
    assert_eq!(fixture.pki().load_key().unwrap().unwrap().public_key(), key);
    let incomplete = fixture.pki().load_credentials().unwrap_err();
    assert!(incomplete.to_string().contains("incomplete: CA absent, certificate absent, key present"));
    assert_eq!(
        fixture.pki().ensure_self_signed(&CertificateTemplate::default()).unwrap().key.public_key(),
        key
    );
}

#[test]
fn missing_files_are_reported_and_never_replaced() {
    for missing in [[0].as_slice(), &[1], &[2], &[0, 2], &[1, 2]] {
        let fixture = PkiFixture::new();
        fixture.pki().ensure_self_signed(&CertificateTemplate::default()).unwrap();
        let PkiDir { ca, certificate, key, .. } = fixture.pki();
        for at in missing {
            [ca, certificate, key][*at].remove().unwrap();
        }
        let before = fixture.files();
        let presence = fixture.pki().credential_presence().unwrap();
        assert!(!presence.is_complete() && !presence.is_absent());
        for result in [
            fixture.pki().load_credentials().map(|_| ()),
            fixture.pki().ensure_self_signed(&CertificateTemplate::default()).map(|_| ()),
        ] {
            assert!(matches!(result, Err(PkiError::Incomplete { .. })), "{missing:?}: {result:?}");
        }
        if missing.contains(&2) {
            assert!(matches!(fixture.pki().ensure_key(), Err(PkiError::Incomplete { .. })));
        }
        assert_eq!(fixture.files(), before);
    }
}

#[test]
fn a_read_error_never_replaces_an_identity() {
    let fixture = PkiFixture::new();
    fixture.pki().ensure_self_signed(&CertificateTemplate::default()).unwrap();
    let before = fixture.files();
    let mut failures = 0;
    for at in 1.. {
        fixture.store.fail_nth(at, InjectedFault::IoError);
        let ensured = fixture.pki().ensure_self_signed(&CertificateTemplate::default());
        fixture.store.clear_fault();
        assert_eq!(fixture.files(), before, "reading failed at {at}");
        match ensured {
            Ok(_) => break,
            Err(PkiError::Read { .. }) => failures += 1,
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!(failures >= 6, "{failures}");
}

#[test]
fn creating_credentials_killed_at_any_step_yields_one_identity() {
    for fault in [
        InjectedFault::CrashBefore,
        InjectedFault::CrashAfter,
        InjectedFault::NoSpace,
        InjectedFault::IoError,
    ] {
        for at in 1.. {
            let fixture = PkiFixture::new();
            fixture.store.fail_nth(at, fault);
            let created = fixture.pki().ensure_self_signed(&CertificateTemplate::default());
            fixture.store.clear_fault();
            // As after a restart: the layout is created again.
            let data: DataPartition =
                LayoutTarget::new(fixture.store.clone(), "/data").create_layout().unwrap();
            let key = data.node.credentials.load_key().unwrap().map(|key| key.public_key());
            let ensured = data.node.credentials.ensure_self_signed(&CertificateTemplate::default()).unwrap();
            assert!(key.is_none_or(|key| key == ensured.key.public_key()), "a written key is kept");
            if let Ok(created) = created {
                assert_eq!(created.certificate, ensured.certificate);
                break;
            }
        }
    }
}

#[test]
fn replacing_credentials_killed_at_any_step_never_mixes_generations() {
    let (one, other) = (TestCa::new(true), TestCa::new(true));
    for fault in [
        InjectedFault::CrashBefore,
        InjectedFault::CrashAfter,
        InjectedFault::NoSpace,
        InjectedFault::IoError,
    ] {
        let mut outcomes = Vec::new();
        for at in 1.. {
            let fixture = PkiFixture::new();
            let (old, new) = (one.issue(1), other.issue(2));
            fixture.pki().store_credentials(&old).unwrap();
            fixture.store.fail_nth(at, fault);
            let stored = fixture.pki().store_credentials(&new);
            fixture.store.clear_fault();
            // Also through the old handles, and after the layout is created again.
            let data: DataPartition =
                LayoutTarget::new(fixture.store.clone(), "/data").create_layout().unwrap();
            for pki in [fixture.pki(), &data.node.credentials] {
                let found = pki.load_credentials().unwrap().unwrap();
                let is_new = found.certificate == new.certificate;
                assert!(is_new || found.certificate == old.certificate);
                assert!(is_new || stored.is_err(), "reported credentials are stored");
                outcomes.push(is_new);
            }
            if stored.is_ok() {
                break;
            }
        }
        assert!(outcomes.contains(&true) && outcomes.len() > 8, "{fault:?}: {outcomes:?}");
        // The record is written first: the credentials are the old ones only if that fails.
        assert_eq!(outcomes.contains(&false), fault != InjectedFault::CrashAfter, "{fault:?}: {outcomes:?}");
    }
}

#[test]
fn mismatched_credentials_are_rejected_on_store_and_on_load() {
    let (test_ca, other_ca) = (TestCa::new(true), TestCa::new(true));
    let fixture = PkiFixture::new();
    let good = test_ca.issue(1);
    fixture.pki().store_credentials(&good).unwrap();
    let before = fixture.files();

    let foreign_key = Credentials { key: PrivateKey::generate().unwrap(), ..test_ca.issue(2) };
    let rejected = fixture.pki().store_credentials(&foreign_key).unwrap_err();
    assert!(matches!(rejected, PkiError::KeyMismatch { .. }), "{rejected:?}");
    let foreign_ca = Credentials { ca: other_ca.certificate.clone(), ..test_ca.issue(2) };
    let rejected = fixture.pki().store_credentials(&foreign_ca).unwrap_err();
    assert!(matches!(rejected, PkiError::NotIssued { .. }), "{rejected:?}");
    let no_ca = TestCa::new(false).issue(3);
    assert!(matches!(fixture.pki().store_credentials(&no_ca), Err(PkiError::NotIssued { .. })));
    assert_eq!(fixture.files(), before);

    let key = PrivateKey::generate().unwrap();
    fixture.pki().key.write(key.to_pem().as_bytes()).unwrap();
    let mismatch = fixture.pki().load_credentials().unwrap_err();
    assert_eq!(
        mismatch.to_string(),
        "private key /data/node/credentials/cert-key.pem does not belong to certificate \
         /data/node/credentials/cert.pem: restore the file that was replaced"
    );
    let ensured = fixture.pki().ensure_self_signed(&CertificateTemplate::default());
    assert!(
        matches!(ensured, Err(PkiError::KeyMismatch { .. })),
        "a mismatch is not repaired with a new key"
    );
    fixture.pki().key.write(good.key.to_pem().as_bytes()).unwrap();
    fixture.pki().ca.write(other_ca.certificate.to_pem().as_bytes()).unwrap();
    assert!(matches!(fixture.pki().load_credentials(), Err(PkiError::NotIssued { .. })));
}

#[test]
fn a_file_cut_at_any_byte_is_reported_by_name_and_stays() {
    let fixture = PkiFixture::new();
    fixture.pki().store_credentials(&TestCa::new(true).issue(1)).unwrap();
    let PkiDir { ca, certificate, key, .. } = fixture.pki();
    for file in [ca, certificate, key] {
        let whole = file.read().unwrap();
        // The file is complete without the last newline.
        for len in 0..whole.len() - 1 {
            file.write(&whole[..len]).unwrap();
            let (name, why) = expect_malformed(fixture.pki().load_credentials());
            assert_eq!(name, file.path().file_name().unwrap().to_str().unwrap());
            assert!(
                matches!(why, PkiEncodingError::NoPem | PkiEncodingError::Truncated),
                "{name} cut at {len}: {why}"
            );
            let ensured = fixture.pki().ensure_self_signed(&CertificateTemplate::default());
            assert!(matches!(ensured, Err(PkiError::Malformed { .. })), "{ensured:?}");
            assert_eq!(file.read().unwrap(), whole[..len], "the file stays unchanged");
        }
        file.write(&whole).unwrap();
        fixture.pki().load_credentials().unwrap().unwrap();
    }
}

#[test]
fn der_cut_at_any_byte_is_rejected() {
    let issued = TestCa::new(true).issue(1);
    for len in 0..issued.certificate.der_bytes().len() {
        let cut = Certificate::from_der(&issued.certificate.der_bytes()[..len]);
        assert_eq!(cut, Err(PkiEncodingError::Der { what: "certificate" }));
    }
    let key = issued.key.expose_pkcs8();
    for len in 0..key.len() {
        let cut = PrivateKey::from_pkcs8(&key[..len]).unwrap_err();
        assert_eq!(cut, PkiEncodingError::Der { what: "private key" });
    }
    let more = [issued.certificate.der_bytes(), b"\0"].concat();
    assert_eq!(Certificate::from_der(&more), Err(PkiEncodingError::TrailingData));
    assert!(PrivateKey::from_pkcs8(&[key, b"\0"].concat()).is_err());
}

#[test]
fn files_of_another_kind_are_reported_as_such() {
    let fixture = PkiFixture::new();
    let issued = TestCa::new(true).issue(1);
    fixture.pki().store_credentials(&issued).unwrap();
    let PkiDir { certificate, key, .. } = fixture.pki();
    let (key_pem, certificate_pem) = (issued.key.to_pem(), issued.certificate.to_pem());

    key.write(certificate_pem.as_bytes()).unwrap();
    let (file, why) = expect_malformed(fixture.pki().load_credentials());
    let found = "CERTIFICATE".to_owned();
    assert_eq!(
        (file.as_str(), why),
        ("cert-key.pem", PkiEncodingError::WrongLabel { found, expected: "PRIVATE KEY" })
    );
    key.write(&[key_pem.as_bytes(), certificate_pem.as_bytes()].concat()).unwrap();
    assert_eq!(expect_malformed(fixture.pki().load_credentials()).1, PkiEncodingError::TrailingData);
    let ecdsa = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    key.write(ecdsa.serialize_pem().as_bytes()).unwrap();
    assert_eq!(
        expect_malformed(fixture.pki().load_credentials()),
        ("cert-key.pem".into(), PkiEncodingError::NotEd25519)
    );
    key.write(key_pem.as_bytes()).unwrap();
    let foreign = CertificateParams::default().self_signed(&ecdsa).unwrap();
    certificate.write(foreign.pem().replace("\r\n", "\n").as_bytes()).unwrap();
    assert_eq!(
        expect_malformed(fixture.pki().load_credentials()),
        ("cert.pem".into(), PkiEncodingError::NotEd25519)
    );
    certificate.write(b"").unwrap();
    assert_eq!(
        expect_malformed(fixture.pki().load_credentials()),
        ("cert.pem".into(), PkiEncodingError::NoPem)
    );
}

#[test]
fn keys_and_certificates_from_other_tools_are_read() {
    // PKCS #8 of version 1, without the public key: as Go and OpenSSL write it. *Source:* RFC 8410, section
    // 10.3.
    let openssl = b"-----BEGIN PRIVATE KEY-----\n\
        MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n-----END PRIVATE KEY-----\n";
    let key = PrivateKey::from_pem(openssl).unwrap();
    assert_eq!(key.public_key().short_id(), "19bf44096984cdfe8541bac167dc3b96");
    assert_eq!(key.to_pem().as_bytes(), openssl);
    let pair = KeyPair::generate_for(&PKCS_ED25519).unwrap();
    let theirs = CertificateParams::default().self_signed(&pair).unwrap();
    assert!(Certificate::from_pem(theirs.pem().as_bytes()).is_ok());
}

#[test]
fn a_private_key_is_not_printable() {
    let fixture = PkiFixture::new();
    let credentials = fixture.pki().ensure_self_signed(&CertificateTemplate::default()).unwrap();
    assert_eq!(format!("{:?}", credentials.key), "PrivateKey { .. }");
    let pem = credentials.key.to_pem();
    let secret = pem.lines().nth(1).unwrap();
    let error = PrivateKey::from_pem(pem.replace("END", "FIN").as_bytes()).unwrap_err();
    for text in [format!("{credentials:?}"), format!("{:?}", fixture.data), format!("{error:?} {error}")] {
        assert!(!text.contains(secret) && !text.contains("-----"), "{text}");
    }
}

#[test]
fn a_revocation_list_is_verified_against_the_ca() {
    let fixture = PkiFixture::new();
    let (test_ca, other_ca) = (TestCa::new(true), TestCa::new(true));
    assert_eq!(fixture.data.etcd.load_revocation_list(&test_ca.certificate).unwrap(), None);
    let list = RevocationList::from_der(&test_ca.revoke(7), &test_ca.certificate).unwrap();
    fixture.data.etcd.store_revocation_list(&list).unwrap();
    let list = fixture.data.etcd.load_revocation_list(&test_ca.certificate).unwrap().unwrap();
    assert!(
        list.is_revoked(&test_ca.issue(7).certificate) && !list.is_revoked(&test_ca.issue(8).certificate)
    );
    let forged = fixture.data.etcd.load_revocation_list(&other_ca.certificate).unwrap_err();
    assert!(matches!(forged, PkiError::Malformed { source: PkiEncodingError::Signature, .. }), "{forged:?}");
    for len in 0..list.der_bytes().len() {
        let cut = RevocationList::from_der(&list.der_bytes()[..len], &test_ca.certificate);
        assert_eq!(cut, Err(PkiEncodingError::Der { what: "revocation list" }));
    }
    let more = [list.der_bytes(), b"\0"].concat();
    assert_eq!(RevocationList::from_der(&more, &test_ca.certificate), Err(PkiEncodingError::TrailingData));
    fixture.store.write(Path::new("etcd/peer_crl"), b"noise", FileMode::PRIVATE_FILE).unwrap();
    let broken = fixture.data.etcd.load_revocation_list(&test_ca.certificate).unwrap_err();
    assert!(broken.to_string().ends_with("etcd/peer_crl"), "{broken}");
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
        fuzz_credentials_file(&bytes);
    }

    #[test]
    fn a_changed_certificate_byte_never_panics_and_never_verifies(
        at in any::<prop::sample::Index>(),
        flip in 1u8..,
    ) {
        let issued = TestCa::new(true).issue(1);
        let mut der = issued.certificate.der_bytes().to_vec();
        let at = at.index(der.len());
        der[at] ^= flip;
        fuzz_credentials_file(&der);
        if let Ok(certificate) = Certificate::from_der(&der) {
            prop_assert!(!certificate.is_signed_by(&issued.ca));
        }
    }
}

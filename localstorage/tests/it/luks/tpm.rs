//! Keys that a TPM has sealed, by one in software.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::testing::key_seal_conformance;
use nodekeel_localstorage::volume::{
    DataVolume as _, EncryptedVolume as _, ErasePolicy, KeyPolicy, KeySeal as _, LuksError, LuksVolume,
    PcrPublicKey, PcrSelection, PcrSignatureError, SealError, SealId, SignedPcrs, TpmConnection, TpmError,
    TpmSeal, UnlockKey, UnlockSecret,
};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;
use testbed::SoftwareTpm;

use super::{LuksFixture, luks_error, slots_of};
use crate::fixture::temp_base;

/// The PCR that nobody but a debugger extends.
pub(super) const DEBUG_PCR: u32 = 16;

/// Extends a PCR, as the firmware does with what it starts.
pub(super) fn extend_pcr(tpm: &mut impl TpmConnection, number: u8) {
    extend_pcr_by(tpm, number, &[7; 32]);
}

fn extend_pcr_by(tpm: &mut impl TpmConnection, number: u8, digest: &[u8; 32]) {
    // TPM2_PCR_Extend: the PCR, an empty password, and one digest of SHA-256.
    let body =
        [&[0, 0, 0, number][..], &[0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 0, 0, 0], &[0, 0, 0, 1, 0, 11], digest];
    run(tpm, 0x182, &body.concat());
}

/// Clears the TPM, as its owner does in the firmware's menu.
fn clear(tpm: &mut impl TpmConnection) {
    run(tpm, 0x126, &[0x40, 0, 0, 12, 0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 0, 0, 0]);
}

/// Runs a command with a session.
fn run(tpm: &mut impl TpmConnection, code: u32, body: &[u8]) {
    let length = u32::try_from(10 + body.len()).unwrap();
    let command = [&[0x80, 2][..], &length.to_be_bytes(), &code.to_be_bytes(), body].concat();
    tpm.write_all(&command).unwrap();
    let mut response = [0; 256];
    let count = tpm.read(&mut response).unwrap();
    assert_eq!(response[6..10], [0; 4], "{:?}", &response[..count]);
}

fn pcrs(numbers: &[u32]) -> PcrSelection {
    PcrSelection::try_new(numbers.iter().copied()).unwrap()
}

/// A TPM and an ESP.
struct TpmFixture {
    tpm: Arc<SoftwareTpm>,
    esp: TempDir,
}

impl TpmFixture {
    fn new() -> TpmFixture {
        let esp = tempfile::tempdir_in(temp_base()).unwrap();
        TpmFixture { tpm: Arc::new(SoftwareTpm::start().unwrap()), esp }
    }

    fn seal(&self, numbers: &[u32]) -> TpmSeal {
        seal_with(&self.tpm, self.esp.path().to_owned(), numbers)
    }

    fn connect(&self) -> UnixStream {
        self.tpm.connect().unwrap()
    }
}

fn seal_with(tpm: &Arc<SoftwareTpm>, esp: PathBuf, numbers: &[u32]) -> TpmSeal {
    let tpm = Arc::clone(tpm);
    TpmSeal::new(Dir::open(esp).unwrap(), pcrs(numbers)).with_connector(move || tpm.connect())
}

fn tpm_error(result: Result<Option<UnlockKey>, SealError>) -> TpmError {
    match result {
        Err(SealError::Tpm { source, .. }) => source,
        other => panic!("not an error of the TPM: {other:?}"),
    }
}

#[test]
#[ignore = "needs swtpm"]
fn keys_that_a_tpm_has_sealed_keep_the_contract() {
    let fixture = TpmFixture::new();
    // None, one, and more than one response has.
    for numbers in [&[][..], &[7], &[0, 1, 2, 3, 4, 5, 6, 7, 11, 14, 16, 23]] {
        key_seal_conformance(&fixture.seal(numbers));
    }
    assert_eq!(fixture.esp.path().read_dir().unwrap().count(), 0);
}

#[test]
#[ignore = "needs swtpm"]
fn a_key_is_sealed_for_its_pcrs_and_those_that_changed_are_named() {
    let fixture = TpmFixture::new();
    let [id, bound] = [1, 2].map(|generation| SealId::new([1; 16], generation));
    let key = UnlockKey::generate().unwrap();
    fixture.seal(&[7]).seal_key(id, &key).unwrap();
    let seal = fixture.seal(&[7, 11, DEBUG_PCR]);
    seal.seal_key(bound, &key).unwrap();
    let is_unsealed = |id| seal.unseal_key(id).unwrap().unwrap().expose_bytes() == key.expose_bytes();
    assert!(is_unsealed(id) && is_unsealed(bound));

    extend_pcr(&mut fixture.connect(), 16);
    extend_pcr(&mut fixture.connect(), 11);
    assert!(is_unsealed(id), "the file names the PCRs, not the configuration");
    let changed = tpm_error(seal.unseal_key(bound));
    assert!(
        matches!(changed, TpmError::PcrsChanged { changed } if changed == pcrs(&[11, 16])),
        "{changed:?}"
    );
    seal.seal_key(bound, &key).unwrap();
    assert!(is_unsealed(bound));
    let text = std::fs::read(fixture.esp.path().join(format!("{bound}.tpm"))).unwrap();
    assert!(text.windows(32).all(|window| window != key.expose_bytes()), "the file has no secret");
}

#[test]
#[ignore = "needs swtpm"]
fn another_tpm_a_cleared_one_and_a_changed_file_are_told_apart() {
    let (fixture, other) = (TpmFixture::new(), TpmFixture::new());
    let id = SealId::new([1; 16], 1);
    let seal = fixture.seal(&[7]);
    seal.seal_key(id, &UnlockKey::generate().unwrap()).unwrap();
    let elsewhere = seal_with(&other.tpm, fixture.esp.path().to_owned(), &[7]);
    assert!(matches!(tpm_error(elsewhere.unseal_key(id)), TpmError::OtherTpm));

    // Somebody has changed the private part, and the checksum too.
    let path = fixture.esp.path().join(format!("{id}.tpm"));
    let text = std::fs::read_to_string(&path).unwrap();
    let private = text.lines().find(|line| line.starts_with("private ")).unwrap();
    let last = if private.ends_with('0') { "1" } else { "0" };
    let forged = text.replace(private, &[&private[..private.len() - 1], last].concat());
    let body = &forged[..forged.find("checksum").unwrap()];
    let sum = crc32c::crc32c_append(crc32c::crc32c(id.to_string().as_bytes()), body.as_bytes());
    std::fs::write(&path, format!("{body}checksum {sum:08x}\n")).unwrap();
    assert!(matches!(seal.unseal_key(id), Err(SealError::Damaged { .. })));
    std::fs::write(&path, text).unwrap();
    assert!(seal.unseal_key(id).unwrap().is_some());

    clear(&mut fixture.connect());
    assert!(matches!(tpm_error(seal.unseal_key(id)), TpmError::OtherTpm));
    let TpmFixture { tpm, esp } = fixture;
    let path = tpm.socket_path().to_owned();
    drop((seal, tpm));
    let gone = TpmSeal::new(Dir::open(esp.path()).unwrap(), pcrs(&[7]))
        .with_connector(move || -> io::Result<UnixStream> { UnixStream::connect(&path) });
    assert!(matches!(tpm_error(gone.unseal_key(id)), TpmError::Absent(_)));
}

/// A volume whose node unlock key the TPM has sealed.
fn volume_of(fixture: &LuksFixture, tpm: &Arc<SoftwareTpm>, keys: KeyPolicy, numbers: &[u32]) -> LuksVolume {
    let seal = seal_with(tpm, fixture.path("esp"), numbers);
    fixture.volume_with_seal(keys, Arc::new(seal))
}

fn tpm_files(fixture: &LuksFixture) -> usize {
    let entries = fixture.path("esp").read_dir().unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "tpm")).count()
}

#[test]
#[ignore = "needs cryptsetup and swtpm"]
fn a_volume_whose_pcrs_changed_opens_by_its_passphrase_and_is_sealed_again() {
    for keys in [KeyPolicy::Local, KeyPolicy::Split] {
        let (fixture, tpm) = (LuksFixture::new(), Arc::new(SoftwareTpm::start().unwrap()));
        let volume = volume_of(&fixture, &tpm, keys, &[7, DEBUG_PCR]);
        let key = volume.mount_new_with_key(ErasePolicy::Nothing).unwrap().1;
        let secret = key.map_or(UnlockSecret::Node, UnlockSecret::Cluster);
        volume.confirm_secret(&secret).unwrap();
        let recovery = UnlockSecret::Recovery(volume.add_recovery_passphrase(&secret).unwrap());
        volume.unmount().unwrap();
        volume.mount_existing_with(&secret).unwrap();
        volume.unmount().unwrap();

        extend_pcr(&mut tpm.connect().unwrap(), 16);
        let refused = luks_error(volume.mount_existing_with(&secret));
        let LuksError::Seal(SealError::Tpm { source: TpmError::PcrsChanged { changed }, .. }) = refused
        else {
            panic!("{keys:?}: {refused:?}")
        };
        assert_eq!(changed, pcrs(&[DEBUG_PCR]));
        volume.mount_existing_with(&recovery).unwrap();
        let new = volume.rotate_keys(&recovery).unwrap();
        let new = new.map_or(UnlockSecret::Node, UnlockSecret::Cluster);
        volume.confirm_secret(&new).unwrap();
        volume.unmount().unwrap();
        volume.mount_existing_with(&new).unwrap();
        let slots = slots_of(&volume);
        assert!(!slots.contains("stale") && slots.contains("recovery 1"), "{keys:?}: {slots}");
        assert_eq!(tpm_files(&fixture), 1, "{keys:?}");
        volume.unmount().unwrap();
    }
}

#[test]
#[ignore = "needs cryptsetup and swtpm"]
fn a_planned_change_needs_no_passphrase() {
    let (fixture, tpm) = (LuksFixture::new(), Arc::new(SoftwareTpm::start().unwrap()));
    let volume = |numbers: &[u32]| volume_of(&fixture, &tpm, KeyPolicy::Local, numbers);
    let update = || extend_pcr(&mut tpm.connect().unwrap(), 16);
    volume(&[DEBUG_PCR]).mount_new(ErasePolicy::Nothing).unwrap();
    // Before the update the key is sealed for the TPM alone, and after it for the PCRs again.
    volume(&[]).rotate_keys(&UnlockSecret::Node).unwrap();
    update();
    volume(&[DEBUG_PCR]).rotate_keys(&UnlockSecret::Node).unwrap();
    update();
    let refused = luks_error(volume(&[DEBUG_PCR]).rotate_keys(&UnlockSecret::Node));
    assert!(matches!(refused, LuksError::Seal(SealError::Tpm { .. })), "{refused:?}");
}

/// The files of `testdata/tpm`, which systemd-measure has made: see its README.
fn testdata(name: &str) -> String {
    std::fs::read_to_string(format!("{}/testdata/tpm/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// A machine that boots kernels, each with its file of signatures.
struct SignedFixture {
    machine: TpmFixture,
    id: SealId,
}

impl SignedFixture {
    fn new() -> SignedFixture {
        SignedFixture { machine: TpmFixture::new(), id: SealId::new([1; 16], 1) }
    }

    fn signatures(&self) -> PathBuf {
        self.machine.esp.path().join("signatures.json")
    }

    /// A seal for values of PCR 11 that this key has signed, and for these PCRs.
    fn seal(&self, signer: &str, numbers: &[u32]) -> TpmSeal {
        let public_key = PcrPublicKey::from_pem(testdata(signer).as_bytes()).unwrap();
        let signed = SignedPcrs { public_key, pcrs: pcrs(&[11]) };
        self.machine.seal(numbers).with_signed_pcrs(signed).with_signature_file(self.signatures())
    }

    /// Boots a kernel up to the initrd: the stub measures the names and contents of the image's sections.
    fn boot(self, kernel: &str, signatures: &str) -> SignedFixture {
        let TpmFixture { tpm, esp } = self.machine;
        let tpm = Arc::into_inner(tpm).expect("nothing else uses the TPM").reboot().unwrap();
        let booted = SignedFixture { machine: TpmFixture { tpm: Arc::new(tpm), esp }, id: self.id };
        for measured in [".linux\0", kernel, ".osrel\0", "ID=node-os\n"] {
            booted.measure(measured);
        }
        booted.measure("enter-initrd");
        std::fs::write(booted.signatures(), signatures).unwrap();
        booted
    }

    /// Extends PCR 11, as systemd-stub does with a section, and systemd-pcrphase with a phase of the boot.
    fn measure(&self, text: &str) {
        extend_pcr_by(&mut self.machine.connect(), 11, &Sha256::digest(text).into());
    }

    fn is_unsealed(&self, key: &UnlockKey) -> bool {
        let unsealed = self.seal("signer.pem", &[]).unseal_key(self.id).unwrap().unwrap();
        unsealed.expose_bytes() == key.expose_bytes()
    }

    fn refusal(&self) -> PcrSignatureError {
        signature_error(self.seal("signer.pem", &[]).unseal_key(self.id))
    }
}

fn signature_error(result: Result<Option<UnlockKey>, SealError>) -> PcrSignatureError {
    match tpm_error(result) {
        TpmError::Signature(error) => error,
        other => panic!("not an error of a signature: {other:?}"),
    }
}

#[test]
#[ignore = "needs swtpm"]
fn a_key_opens_with_each_kernel_that_is_signed_and_with_no_other() {
    let fixture = SignedFixture::new().boot("kernel 1\n", &testdata("kernel-1.json"));
    key_seal_conformance(&fixture.seal("signer.pem", &[7]));
    let key = UnlockKey::generate().unwrap();
    fixture.seal("signer.pem", &[]).seal_key(fixture.id, &key).unwrap();
    assert!(fixture.is_unsealed(&key));
    // The end of the initrd alone is not signed, and the phase after it is.
    fixture.measure("leave-initrd");
    assert!(matches!(fixture.refusal(), PcrSignatureError::NotSigned { .. }));
    fixture.measure("sysinit");
    assert!(fixture.is_unsealed(&key), "a later phase of the boot is signed");

    let fixture = fixture.boot("kernel 2\n", &testdata("kernel-2.json"));
    assert!(fixture.is_unsealed(&key), "the kernel was upgraded");
    // Another kernel with the signatures of that one.
    let fixture = fixture.boot("kernel 3\n", &testdata("kernel-2.json"));
    let refused = fixture.refusal();
    assert!(matches!(refused, PcrSignatureError::NotSigned { pcrs: found, .. } if found == pcrs(&[11])));
    let says =
        format!("{} has no signature for the present values of PCRs 11", fixture.signatures().display());
    assert!(refused.to_string().starts_with(&says), "{refused}");
    let resealed = fixture.seal("signer.pem", &[]).seal_key(fixture.id, &key).unwrap_err();
    let is_named =
        |error: &TpmError| matches!(error, TpmError::Signature(PcrSignatureError::NotSigned { .. }));
    assert!(matches!(&resealed, SealError::Tpm { source, .. } if is_named(source)), "{resealed:?}");
    let fixture = fixture.boot("kernel 1\n", &testdata("kernel-1.json"));
    assert!(fixture.is_unsealed(&key), "the kernel before opens, too");
}

#[test]
#[ignore = "needs swtpm"]
fn a_signature_by_another_key_or_a_changed_one_opens_nothing() {
    let fixture = SignedFixture::new().boot("kernel 1\n", &testdata("kernel-1.json"));
    fixture.seal("signer.pem", &[]).seal_key(fixture.id, &UnlockKey::generate().unwrap()).unwrap();
    let foreign = testdata("kernel-2-other-signer.json");
    let fixture = fixture.boot("kernel 2\n", &foreign);
    assert!(matches!(fixture.refusal(), PcrSignatureError::OtherKey { .. }));
    // The other key's owner names this one: the TPM verifies, and finds the forgery.
    let fingerprint = |signer| PcrPublicKey::from_pem(testdata(signer).as_bytes()).unwrap().fingerprint();
    let forged = foreign.replace(&fingerprint("other-signer.pem"), &fingerprint("signer.pem"));
    assert_ne!(forged, foreign);
    let fixture = fixture.boot("kernel 2\n", &forged);
    assert!(matches!(fixture.refusal(), PcrSignatureError::Forged { .. }));
    // The configured key is for keys to come: a sealed one keeps its signer.
    let fixture = fixture.boot("kernel 2\n", &foreign);
    let other = fixture.seal("other-signer.pem", &[]);
    assert!(matches!(signature_error(other.unseal_key(fixture.id)), PcrSignatureError::OtherKey { .. }));
    let key = UnlockKey::generate().unwrap();
    other.seal_key(fixture.id, &key).unwrap();
    assert!(fixture.is_unsealed(&key), "the file names the signer, not the configuration");

    for (damaged, is_named) in [
        (&foreign[..500], (|error| matches!(error, PcrSignatureError::Invalid { .. })) as fn(_) -> bool),
        (&foreign.replace("\"sig\" : \"", "\"sig\" : \"AAAA"), |error| {
            matches!(error, PcrSignatureError::Forged { .. })
        }),
    ] {
        std::fs::write(fixture.signatures(), damaged).unwrap();
        assert!(is_named(fixture.refusal()), "{damaged}");
    }
    std::fs::remove_file(fixture.signatures()).unwrap();
    assert!(matches!(fixture.refusal(), PcrSignatureError::NoFile { .. }));
}

#[test]
#[ignore = "needs swtpm"]
fn values_and_signed_values_are_both_needed() {
    let fixture = SignedFixture::new().boot("kernel 1\n", &testdata("kernel-1.json"));
    let key = UnlockKey::generate().unwrap();
    fixture.seal("signer.pem", &[7, DEBUG_PCR]).seal_key(fixture.id, &key).unwrap();
    let fixture = fixture.boot("kernel 2\n", &testdata("kernel-2.json"));
    assert!(fixture.is_unsealed(&key));
    extend_pcr(&mut fixture.machine.connect(), 16);
    let changed = tpm_error(fixture.seal("signer.pem", &[]).unseal_key(fixture.id));
    assert!(matches!(changed, TpmError::PcrsChanged { changed } if changed == pcrs(&[DEBUG_PCR])));
    // A key that was sealed before the operator configured a signer stays as it is until it is sealed again.
    fixture.machine.seal(&[7]).seal_key(fixture.id, &key).unwrap();
    std::fs::remove_file(fixture.signatures()).unwrap();
    assert!(fixture.is_unsealed(&key));
    let fixture = fixture.boot("kernel 3\n", "");
    assert!(fixture.is_unsealed(&key));
}

/// Extends a PCR before the first `TPM2_Unseal`, as a system does while it starts.
struct StartingSystem(UnixStream, Arc<AtomicBool>);

impl Write for StartingSystem {
    fn write(&mut self, command: &[u8]) -> io::Result<usize> {
        if command[6..10] == 0x15e_u32.to_be_bytes() && !self.1.swap(true, Ordering::SeqCst) {
            extend_pcr(&mut self.0, 14);
        }
        self.0.write(command)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Read for StartingSystem {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

#[test]
#[ignore = "needs swtpm"]
fn a_pcr_that_is_extended_while_a_key_is_unsealed_is_no_failure() {
    let fixture = TpmFixture::new();
    let (id, key) = (SealId::new([1; 16], 1), UnlockKey::generate().unwrap());
    fixture.seal(&[7]).seal_key(id, &key).unwrap();
    let (tpm, was_extended) = (Arc::clone(&fixture.tpm), Arc::new(AtomicBool::default()));
    let seen = Arc::clone(&was_extended);
    let connect = move || Ok(StartingSystem(tpm.connect()?, Arc::clone(&was_extended)));
    let unsealed = fixture.seal(&[7]).with_connector(connect).unseal_key(id).unwrap().unwrap();
    assert!(unsealed.expose_bytes() == key.expose_bytes() && seen.load(Ordering::SeqCst));
}

//! Keys that a TPM has sealed, by one in software.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::testing::key_seal_conformance;
use nodekeel_localstorage::volume::{
    DataVolume as _, EncryptedVolume as _, ErasePolicy, KeyPolicy, KeySeal as _, LuksError, LuksVolume,
    PcrSelection, SealError, SealId, TpmConnection, TpmError, TpmSeal, UnlockKey, UnlockSecret,
};
use tempfile::TempDir;
use testbed::SoftwareTpm;

use super::{LuksFixture, luks_error, slots_of};
use crate::fixture::temp_base;

/// The PCR that nobody but a debugger extends.
pub(super) const DEBUG_PCR: u32 = 16;

/// Extends a PCR, as the firmware does with what it starts.
pub(super) fn extend_pcr(tpm: &mut impl TpmConnection, number: u8) {
    // TPM2_PCR_Extend: the PCR, an empty password, and one digest of SHA-256.
    let body =
        [&[0, 0, 0, number][..], &[0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 0, 0, 0], &[0, 0, 0, 1, 0, 11], &[7; 32]];
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

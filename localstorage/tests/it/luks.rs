//! Encrypted volumes on disk images, with real headers, key slots and tokens. Mappings are files.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::testing::{FileCryptsetup, RecordingMounter};
use nodekeel_localstorage::volume::{
    ActiveMapping, Cryptsetup, CryptsetupCall, CryptsetupError, CryptsetupProgram, DataVolume as _,
    EncryptedVolume as _, ErasePolicy, FileSeal, HeaderError, KeyPolicy, KeySeal, LuksError, LuksVolume,
    LuksVolumeConfig, MountState, PolicyViolation, SealError, SealId, SlotKind, UnlockKey, UnlockSecret,
    VolumeEncryption, VolumeError,
};

use crate::fixture::{NodeDirs, temp_base};

mod copy;
mod guest;
mod kills;
mod reencryption;
mod slots;
mod tpm;

const MIB: u64 = 1 << 20;

/// The bytes before the data of a volume.
const HEADER_BYTES: u64 = 16 * MIB;

/// A disk image, and the directories of a node.
struct LuksFixture {
    dirs: NodeDirs,
    mounter: Arc<RecordingMounter>,
}

impl LuksFixture {
    fn new() -> LuksFixture {
        let dirs = NodeDirs::new_in(&temp_base());
        File::create(dirs.path("disk")).unwrap().set_len(64 * MIB).unwrap();
        testbed::write_program(&dirs.path("mkfs"), "#!/bin/sh\n").unwrap();
        LuksFixture { dirs, mounter: Arc::default() }
    }

    /// With a complete volume, whose cluster unlock key is returned.
    fn with_volume(keys: KeyPolicy) -> (LuksFixture, Option<UnlockKey>) {
        let fixture = LuksFixture::new();
        let volume = fixture.volume(keys);
        let key = volume.mount_new_with_key(ErasePolicy::Nothing).unwrap().1;
        volume.unmount().unwrap();
        (fixture, key)
    }

    /// Another machine with the same disk and ESP.
    fn copy(&self) -> LuksFixture {
        let other = LuksFixture::new();
        for name in ["disk", "esp", "mappings", "data"] {
            let (from, to) = (self.path(name), other.path(""));
            let copied = Command::new("cp").args(["-a", "--sparse=always"]).arg(from).arg(to).status();
            assert!(copied.unwrap().success());
        }
        other
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dirs.path(name)
    }

    fn tool(&self) -> FileCryptsetup {
        FileCryptsetup::new(self.path("mappings"))
    }

    fn volume(&self, keys: KeyPolicy) -> LuksVolume {
        self.volume_by(keys, Arc::new(self.tool()))
    }

    fn volume_by(&self, keys: KeyPolicy, cryptsetup: Arc<dyn Cryptsetup>) -> LuksVolume {
        self.new_volume(LuksVolumeConfig { keys, cryptsetup, ..self.config() })
    }

    fn volume_with_seal(&self, keys: KeyPolicy, seal: Arc<dyn KeySeal>) -> LuksVolume {
        self.new_volume(LuksVolumeConfig { keys, seal, ..self.config() })
    }

    /// One whose header has to say that its blocks are authenticated.
    fn authenticated_volume(&self) -> LuksVolume {
        let encryption = VolumeEncryption::EncryptedAndAuthenticated;
        self.new_volume(LuksVolumeConfig { encryption, ..self.config() })
    }

    fn config(&self) -> LuksVolumeConfig {
        LuksVolumeConfig {
            mounter: self.mounter.clone(),
            cryptsetup: Arc::new(self.tool()),
            ..self.dirs.luks_config(&self.path("disk"), VolumeEncryption::Encrypted)
        }
    }

    fn new_volume(&self, config: LuksVolumeConfig) -> LuksVolume {
        LuksVolume::new(config).with_mkfs(self.path("mkfs")).with_node("node-1")
    }

    fn header(&self) -> Vec<u8> {
        self.ends()[..HEADER_BYTES as usize].to_vec()
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        File::options().write(true).open(self.path("disk")).unwrap().write_all_at(bytes, offset).unwrap();
    }

    /// The header area and the end of the disk.
    fn ends(&self) -> Vec<u8> {
        let disk = File::open(self.path("disk")).unwrap();
        let mut bytes = vec![0; (HEADER_BYTES + MIB) as usize];
        let (head, tail) = bytes.split_at_mut(HEADER_BYTES as usize);
        disk.read_exact_at(head, 0).unwrap();
        disk.read_exact_at(tail, disk.metadata().unwrap().len() - MIB).unwrap();
        bytes
    }

    /// Formats the disk with cryptsetup alone, and the key `key`.
    fn format_by_hand(&self, options: &[&str]) {
        let options =
            [&["luksFormat", "-q", "--pbkdf=pbkdf2", "--pbkdf-force-iterations=1000"], options].concat();
        self.run_by_hand(&options, b"key");
    }

    fn import_token(&self, json: &str) {
        self.run_by_hand(
            &["token", "import", "--token-id=0", "--token-replace", "--json-file=-"],
            json.as_bytes(),
        );
    }

    fn run_by_hand(&self, arguments: &[&str], input: &[u8]) {
        let mut command = Command::new("cryptsetup");
        command.args(arguments).arg(self.path("disk")).stdin(Stdio::piped());
        let mut child = command.spawn().unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), input).unwrap();
        assert!(child.wait().unwrap().success(), "{arguments:?}");
    }

    /// Adds a key slot as an operator does, with what opens another one.
    fn add_key_by_hand(&self, existing: &str, new: &str) {
        let size = format!("--keyfile-size={}", existing.len());
        let options = ["luksAddKey", "-q", "--pbkdf=pbkdf2", "--key-file=-", &size];
        self.run_by_hand(&options, format!("{existing}{new}").as_bytes());
    }

    fn key_files(&self) -> Vec<PathBuf> {
        key_files_in(&self.path("esp"))
    }
}

fn luks_error(result: Result<impl std::fmt::Debug, VolumeError>) -> LuksError {
    match result {
        Err(VolumeError::Encryption { source, .. }) => *source,
        other => panic!("not an error of the encryption: {other:?}"),
    }
}

/// The kinds and generations of all slots, with a mark for stale ones.
fn slots_of(volume: &LuksVolume) -> String {
    let slots = volume.encryption_status().unwrap().slots;
    let describe = |slot: &nodekeel_localstorage::volume::KeySlotStatus| {
        let name = slot.name.map_or("unnamed".into(), |(kind, generation)| format!("{kind} {generation}"));
        format!(
            "{name}{}{}{}",
            if slot.is_unconfirmed { " unconfirmed" } else { "" },
            if slot.is_stale { " stale" } else { "" },
            if slot.is_opened { " opened" } else { "" }
        )
    };
    slots.iter().map(describe).collect::<Vec<_>>().join(", ")
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_local_volume_opens_with_the_key_on_the_esp_alone() {
    let fixture = LuksFixture::new();
    let volume = fixture.volume(KeyPolicy::Local);
    assert!(matches!(volume.mount_existing(), Err(VolumeError::Absent { .. })));
    let top = volume.mount_new(ErasePolicy::Nothing).unwrap();
    assert_eq!(top.read(".data-volume").unwrap(), b"nodekeel data volume, format 1\n");
    assert_eq!(slots_of(&volume), "local 1 opened");
    drop(top);
    volume.unmount().unwrap();
    assert_eq!(fs::read_dir(fixture.path("run")).unwrap().count(), 0, "no copy of the header stays");
    let esp: Vec<_> = fs::read_dir(fixture.path("esp")).unwrap().collect();
    assert_eq!((esp.len(), fixture.key_files().len()), (1, 1), "the journal is removed: {esp:?}");

    let occupied = volume.mount_new(ErasePolicy::Nothing);
    let Err(VolumeError::Occupied { found, .. }) = occupied else { panic!("{occupied:?}") };
    volume.mount_existing().unwrap();
    let status = volume.encryption_status().unwrap();
    assert_eq!((status.encryption, status.keys), (VolumeEncryption::Encrypted, KeyPolicy::Local));
    assert_eq!((status.node.as_deref(), status.has_both_headers), (Some("node-1"), true));
    volume.unmount().unwrap();
    // With consent, the volume is a new one.
    volume.mount_new(ErasePolicy::Exactly(found)).unwrap();
    assert_eq!(fixture.key_files().len(), 2, "a key is removed only when its volume has another");
}

/// Can't close its mapping, as while a bind mount of the volume is left.
#[derive(Debug)]
struct BusyMapping {
    tool: FileCryptsetup,
    is_busy: AtomicBool,
}

impl Cryptsetup for BusyMapping {
    fn run(&self, call: &CryptsetupCall<'_>) -> Result<(), CryptsetupError> {
        if call.action == "close" && self.is_busy.load(Ordering::SeqCst) {
            let source = io::ErrorKind::ResourceBusy.into();
            return Err(CryptsetupError::Start { program: "cryptsetup".into(), source });
        }
        self.tool.run(call)
    }

    fn find_mapping(&self, name: &str) -> io::Result<Option<ActiveMapping>> {
        self.tool.find_mapping(name)
    }
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_volume_whose_mapping_stays_in_use_is_unmounted_and_mounts_again() {
    let fixture = LuksFixture::new();
    let tool = Arc::new(BusyMapping { tool: fixture.tool(), is_busy: AtomicBool::default() });
    let volume = fixture.volume_by(KeyPolicy::Local, Arc::clone(&tool) as _);
    volume.mount_new(ErasePolicy::Nothing).unwrap();
    tool.is_busy.store(true, Ordering::SeqCst);
    let busy = luks_error(volume.unmount());
    assert!(matches!(busy, LuksError::Command(_)), "{busy:?}");
    assert_eq!(volume.state(), MountState::Unmounted, "nothing is mounted on the directory");
    assert!(volume.mount_active().unwrap().is_some());
    tool.is_busy.store(false, Ordering::SeqCst);
    volume.unmount().unwrap();
    assert!(tool.find_mapping("nodekeel-data").unwrap().is_none());
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_split_volume_opens_with_both_halves_together_alone() {
    let (fixture, key) = LuksFixture::with_volume(KeyPolicy::Split);
    let secret = UnlockSecret::Cluster(key.unwrap());
    let volume = fixture.volume(KeyPolicy::Split);
    // Until the cluster's half is confirmed, the node's opens the volume, too.
    volume.mount_existing().unwrap();
    assert_eq!(slots_of(&volume), "local 1 stale opened, split 1");
    let other = UnlockSecret::Cluster(UnlockKey::generate().unwrap());
    assert!(matches!(luks_error(volume.confirm_secret(&other)), LuksError::WrongClusterKey { .. }));
    assert_eq!(slots_of(&volume), "local 1 stale opened, split 1", "a wrong key removes nothing");
    for _ in 0..2 {
        volume.confirm_secret(&secret).unwrap();
    }
    volume.unmount().unwrap();

    let without_cluster = luks_error(volume.mount_existing());
    assert!(matches!(without_cluster, LuksError::NoSlot { kind: SlotKind::Local }), "{without_cluster:?}");
    assert!(matches!(luks_error(volume.mount_existing_with(&other)), LuksError::WrongClusterKey { .. }));
    volume.mount_existing_with(&secret).unwrap();
    assert_eq!(slots_of(&volume), "split 1 opened");
    volume.unmount().unwrap();

    // The node's half is damaged, that of another volume, and gone.
    let key_file = fixture.key_files().remove(0);
    let right = fs::read(&key_file).unwrap();
    fs::write(&key_file, &right[1..]).unwrap();
    let damaged = luks_error(volume.mount_existing_with(&secret));
    assert!(matches!(damaged, LuksError::Seal(SealError::Damaged { .. })), "{damaged:?}");
    let (stranger, _) = LuksFixture::with_volume(KeyPolicy::Local);
    fs::write(&key_file, fs::read(stranger.key_files().remove(0)).unwrap()).unwrap();
    let damaged = luks_error(volume.mount_existing_with(&secret));
    assert!(matches!(damaged, LuksError::Seal(SealError::Damaged { .. })), "{damaged:?}");
    fs::remove_file(&key_file).unwrap();
    let missing = luks_error(volume.mount_existing_with(&secret));
    assert!(matches!(missing, LuksError::NodeKeyMissing { .. }), "{missing:?}");
    assert_eq!(fs::read_dir(fixture.path("mappings")).unwrap().count(), 1, "nothing was opened");
    fs::write(&key_file, right).unwrap();
    volume.mount_existing_with(&secret).unwrap();
}

/// Seals another key in the place of the only one.
fn replace_node_key(esp: &Path) {
    let seal = FileSeal::new(Dir::open(esp).unwrap());
    let name = key_files_in(esp).remove(0);
    let (volume, generation) = name.file_stem().unwrap().to_str().unwrap().split_once('.').unwrap();
    let volume = u128::from_str_radix(&volume.replace('-', ""), 16).unwrap().to_be_bytes();
    let id = SealId::new(volume, generation.parse().unwrap());
    seal.seal_key(id, &UnlockKey::generate().unwrap()).unwrap();
}

fn key_files_in(esp: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(esp).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|extension| extension == "key")).collect()
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_mapping_that_an_earlier_process_has_left_needs_no_key() {
    let (fixture, key) = LuksFixture::with_volume(KeyPolicy::Split);
    let secret = UnlockSecret::Cluster(key.unwrap());
    let killed = fixture.volume(KeyPolicy::Split);
    assert!(killed.mount_active().unwrap().is_none(), "nothing is open");
    killed.mount_existing_with(&secret).unwrap();
    killed.confirm_secret(&secret).unwrap();
    drop(killed);

    let volume = fixture.volume(KeyPolicy::Split);
    assert!(matches!(luks_error(volume.mount_existing()), LuksError::NoSlot { .. }));
    volume.mount_active().unwrap().expect("the mapping is open");
    assert!(matches!(volume.mount_active(), Err(VolumeError::InvalidState { .. })));
    volume.unmount().unwrap();
    assert!(volume.mount_active().unwrap().is_none(), "the mapping is closed");
    // A mapping of that name may be another volume's.
    let (other, _) = LuksFixture::with_volume(KeyPolicy::Local);
    other.volume(KeyPolicy::Local).mount_existing().unwrap();
    let mapping = "mappings/nodekeel-data";
    fs::copy(other.path(mapping), fixture.path(mapping)).unwrap();
    assert!(volume.mount_active().unwrap().is_none(), "it is another volume's");
}

#[test]
#[ignore = "needs cryptsetup"]
fn another_key_in_the_right_place_is_named_as_the_wrong_half() {
    let (fixture, key) = LuksFixture::with_volume(KeyPolicy::Split);
    replace_node_key(&fixture.path("esp"));
    let volume = fixture.volume(KeyPolicy::Split);
    for secret in [UnlockSecret::Node, UnlockSecret::Cluster(key.unwrap())] {
        let wrong = luks_error(volume.mount_existing_with(&secret));
        assert!(matches!(wrong, LuksError::WrongNodeKey { .. }), "{wrong:?}");
    }
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_recovery_passphrase_opens_the_volume_without_the_esp() {
    let (fixture, key) = LuksFixture::with_volume(KeyPolicy::Split);
    let volume = fixture.volume(KeyPolicy::Split);
    let cluster = UnlockSecret::Cluster(key.unwrap());
    let first = UnlockSecret::Recovery(volume.add_recovery_passphrase(&cluster).unwrap());
    volume.confirm_secret(&first).unwrap();
    let second = volume.add_recovery_passphrase(&cluster).unwrap();
    assert_eq!(slots_of(&volume), "local 1 stale, split 1, recovery 1 stale, recovery 2 unconfirmed");
    let second = UnlockSecret::Recovery(second);
    assert!(matches!(luks_error(volume.confirm_secret(&first)), LuksError::NotNewest { .. }));
    volume.confirm_secret(&second).unwrap();
    volume.confirm_secret(&cluster).unwrap();
    assert_eq!(slots_of(&volume), "split 1, recovery 2");
    assert!(matches!(luks_error(volume.mount_existing_with(&first)), LuksError::SlotClosed { .. }));

    // The ESP is lost. The passphrase opens the volume, and gives it new keys.
    fs::remove_file(fixture.key_files().remove(0)).unwrap();
    volume.mount_existing_with(&second).unwrap();
    let new = UnlockSecret::Cluster(volume.rotate_keys(&second).unwrap().unwrap());
    volume.confirm_secret(&new).unwrap();
    assert_eq!(slots_of(&volume), "split 2, recovery 2 opened");
    volume.unmount().unwrap();
    volume.mount_existing_with(&new).unwrap();
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_disk_with_the_claim_of_another_volume_leaves_its_key() {
    let (fixture, _) = LuksFixture::with_volume(KeyPolicy::Local);
    let key_file = fixture.key_files().remove(0);
    let key = fs::read(&key_file).unwrap();
    let name = key_file.file_name().unwrap().to_str().unwrap();
    fs::rename(fixture.path("disk"), fixture.path("first-disk")).unwrap();
    File::create(fixture.path("disk")).unwrap().set_len(64 * MIB).unwrap();
    let claim = format!(
        "nodekeel data volume, format 1: being formatted\nas {}\nxfs at byte 0, 00000000\n",
        name.split('.').next().unwrap()
    );
    fixture.write(64 * MIB - (512 << 10), claim.as_bytes());
    let volume = fixture.volume(KeyPolicy::Local);
    volume.mount_new(ErasePolicy::Nothing).unwrap();
    volume.unmount().unwrap();
    assert!(key == fs::read(&key_file).unwrap(), "the key of the first volume was replaced");
    fs::rename(fixture.path("first-disk"), fixture.path("disk")).unwrap();
    fixture.volume(KeyPolicy::Local).mount_existing().unwrap();
}

#[test]
#[ignore = "needs cryptsetup"]
fn creations_that_fail_leave_one_key() {
    let fixture = LuksFixture::new();
    for _ in 0..3 {
        let tool = Arc::new(CryptsetupProgram::new("/nowhere/cryptsetup"));
        let failed = luks_error(fixture.volume_by(KeyPolicy::Local, tool).mount_new(ErasePolicy::Nothing));
        assert!(matches!(failed, LuksError::Command(_)), "{failed:?}");
        assert_eq!(fixture.key_files().len(), 1);
    }
    fixture.volume(KeyPolicy::Local).mount_new(ErasePolicy::Nothing).unwrap();
    assert_eq!(fixture.key_files().len(), 1);
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_header_that_weakens_the_keys_is_rejected() {
    let (fixture, key) = LuksFixture::with_volume(KeyPolicy::Split);
    // Somebody had the disk, and comes again for it and the ESP once the keys are rotated.
    fixture.import_token(COMPLETE_TOKEN);
    let secret = UnlockSecret::Cluster(key.unwrap());
    let volume = fixture.volume(KeyPolicy::Split);
    for error in [
        luks_error(volume.mount_existing_with(&secret)),
        luks_error(volume.rotate_keys(&secret)),
        luks_error(volume.confirm_secret(&secret)),
    ] {
        assert!(matches!(error, LuksError::Policy(PolicyViolation::Keys)), "{error:?}");
    }
}

#[test]
#[ignore = "needs cryptsetup"]
fn rotations_whose_keys_are_lost_replace_each_other() {
    let (fixture, _) = LuksFixture::with_volume(KeyPolicy::Split);
    let volume = fixture.volume(KeyPolicy::Split);
    for _ in 0..3 {
        volume.rotate_keys(&UnlockSecret::Node).unwrap();
    }
    assert_eq!(slots_of(&volume), "local 1 stale, split 1 stale, split 4");
}

#[test]
#[ignore = "needs cryptsetup"]
fn no_secret_is_in_the_arguments_of_a_process() {
    #[derive(Debug)]
    struct Recorder(FileCryptsetup, std::sync::Mutex<Vec<String>>);
    impl Cryptsetup for Recorder {
        fn run(&self, call: &CryptsetupCall<'_>) -> Result<(), CryptsetupError> {
            self.1.lock().unwrap().push(format!("{call:?}"));
            self.0.run(call)
        }

        fn find_mapping(&self, name: &str) -> io::Result<Option<ActiveMapping>> {
            self.0.find_mapping(name)
        }
    }
    let fixture = LuksFixture::new();
    let recorder = Arc::new(Recorder(fixture.tool(), std::sync::Mutex::default()));
    let volume = fixture.volume_by(KeyPolicy::Split, recorder.clone());
    let key = volume.mount_new_with_key(ErasePolicy::Nothing).unwrap().1.unwrap();
    let recovery = volume.add_recovery_passphrase(&UnlockSecret::Node).unwrap();
    volume.rotate_keys(&UnlockSecret::Recovery(recovery.clone())).unwrap();
    let calls = recorder.1.lock().unwrap().join("\n");
    assert!(calls.contains("luksFormat") && calls.contains("luksAddKey"), "{calls}");
    let node_key = fs::read_to_string(fixture.key_files().remove(0)).unwrap();
    let hex: String = key.expose_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    for secret in [recovery.reveal(), node_key.lines().nth(1).unwrap(), &hex] {
        assert!(!calls.contains(secret), "{calls}");
    }
    let debug = format!("{volume:?} {key:?} {recovery:?}");
    assert!(!debug.contains(recovery.reveal()) && !debug.contains(&hex), "{debug}");
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_damaged_header_is_an_error_and_one_damaged_copy_is_reported() {
    let (fixture, _) = LuksFixture::with_volume(KeyPolicy::Local);
    let volume = fixture.volume(KeyPolicy::Local);
    fixture.write(5000, b"x");
    volume.mount_existing().unwrap();
    assert!(!volume.encryption_status().unwrap().has_both_headers);
    // The next change of a slot repairs it.
    volume.rotate_keys(&UnlockSecret::Node).unwrap();
    assert!(volume.encryption_status().unwrap().has_both_headers);
    assert_eq!(slots_of(&volume), "local 2");
    volume.unmount().unwrap();

    fixture.write(5000, b"x");
    fixture.write(16_384 + 5000, b"x");
    let before = fixture.ends();
    let damaged = luks_error(volume.mount_existing());
    assert!(matches!(damaged, LuksError::Header(HeaderError::Damaged)), "{damaged:?}");
    assert!(matches!(volume.mount_new(ErasePolicy::Nothing), Err(VolumeError::Occupied { .. })));
    assert!(before == fixture.ends(), "the disk has changed");
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_header_that_somebody_else_wrote_is_rejected_and_never_opened() {
    // Others need a kernel that has their ciphers: `guest` has them.
    check_rejected_header(&LuksFixture::new(), &["--offset=65536"], "areas of 12288 and 33521664 bytes");
}

/// The token of a complete volume, as an attacker copies it.
const COMPLETE_TOKEN: &str = r#"{"type":"nodekeel-volume","keyslots":[],"format":1,"state":"complete","encryption":"encrypted","keys":"local"}"#;

fn check_rejected_header(fixture: &LuksFixture, options: &[&str], violation: &str) {
    fixture.format_by_hand(options);
    let volume = fixture.volume(KeyPolicy::Local);
    // Without a token of this crate it is somebody else's.
    assert!(matches!(volume.mount_existing(), Err(VolumeError::ForeignData { .. })));
    fixture.import_token(COMPLETE_TOKEN);
    let before = fixture.ends();
    let rejected = luks_error(volume.mount_existing());
    let LuksError::Policy(found) = &rejected else { panic!("{rejected:?}") };
    assert!(found.to_string().contains(violation), "{found}");
    assert!(matches!(volume.encryption_status(), Err(VolumeError::Encryption { .. })));
    assert!(matches!(volume.mount_new(ErasePolicy::Nothing), Err(VolumeError::Occupied { .. })));
    assert_eq!(fs::read_dir(fixture.path("mappings")).unwrap().count(), 0);
    assert!(before == fixture.ends(), "the disk has changed");
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_volume_that_has_lost_its_authentication_is_rejected_and_kept() {
    let (fixture, _) = LuksFixture::with_volume(KeyPolicy::Local);
    let before = fixture.ends();
    let volume = fixture.authenticated_volume();
    let rejected = luks_error(volume.mount_existing());
    assert!(matches!(rejected, LuksError::Policy(_)), "{rejected:?}");
    assert!(matches!(volume.mount_new(ErasePolicy::Nothing), Err(VolumeError::Occupied { .. })));
    assert!(before == fixture.ends(), "the disk has changed");
    fixture.volume(KeyPolicy::Local).mount_existing().unwrap();
}

#[test]
fn an_authenticated_volume_is_neither_trimmed_nor_grown() {
    let fixture = LuksFixture::new();
    let volume = fixture.authenticated_volume().with_discards();
    for error in [
        luks_error(volume.grow_volume(&UnlockSecret::Node)),
        luks_error(volume.mount_existing()),
        luks_error(volume.mount_new(ErasePolicy::Nothing)),
    ] {
        assert!(matches!(error, LuksError::Unsupported { .. }), "{error:?}");
    }
    assert!(fixture.ends().iter().all(|byte| *byte == 0));
}

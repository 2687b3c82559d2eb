//! Encrypted volumes on real disks, by dm-crypt and dm-integrity of a real kernel.

use std::fs::{self, File};
use std::io::{Seek as _, SeekFrom};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use nodekeel_localstorage::FileMode;
use nodekeel_localstorage::testing::{key_seal_conformance, volume_conformance};
use nodekeel_localstorage::volume::{
    ActiveMapping, Cryptsetup as _, CryptsetupProgram, DataVolume as _, EncryptedVolume as _, ErasePolicy,
    KeyPolicy, LuksError, LuksVolume, LuksVolumeConfig, PcrSelection, SealError, TpmError, TpmSeal,
    UnlockKey, UnlockSecret, VolumeEncryption, VolumeError,
};
use rustix::fs::{FallocateFlags, fallocate};
use testbed::command_output;
use testbed::guest::disk::GuestDisk;

use super::tpm::{DEBUG_PCR, extend_pcr};
use super::{LuksFixture, MIB, check_rejected_header, luks_error};
use crate::fixture::{NodeDirs, in_child_process, write_mkfs};

mod copy;
mod keys;
mod limits;
mod reencryption;

/// Behind the header and the journal of dm-integrity, which has 1/128 of the disk.
const BEFORE_DATA: u64 = 24 * MIB;
/// The size of parts that are read or wiped whole, in MiB: each byte takes an emulated processor its time.
const SMALL_MIB: u64 = 192;
const BLOCK_BYTES: usize = 4096;

/// A part of a guest's disk, which can grow, and the directories of a node.
struct NodeDisk {
    dirs: NodeDirs,
    disk: GuestDisk,
    name: String,
    part: PathBuf,
}

impl NodeDisk {
    /// A blank part of this many MiB.
    fn new(mebibytes: u64) -> NodeDisk {
        let (dirs, disk) = (NodeDirs::new(), GuestDisk::acquire().unwrap());
        write_mkfs(&dirs.path(""), "");
        let whole = File::options().write(true).open(disk.device_path()).unwrap();
        fallocate(&whole, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 1024 * MIB).unwrap();
        whole.sync_all().unwrap();
        let name = format!("part-{}", disk.device_path().file_name().unwrap().display());
        run_dmsetup(&["create", &name, "--noudevsync", "--table", &table(&disk, mebibytes)]);
        let minor = run_dmsetup(&["info", "--columns", "--noheadings", "--options", "minor", &name]);
        let part = format!("/dev/dm-{}", minor.trim()).into();
        NodeDisk { dirs, disk, name, part }
    }

    fn grow(&self, mebibytes: u64) {
        run_dmsetup(&["reload", &self.name, "--table", &table(&self.disk, mebibytes)]);
        run_dmsetup(&["resume", &self.name, "--noudevsync"]);
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dirs.path(name)
    }

    fn mapping_name(&self) -> String {
        format!("crypt-{}", self.name)
    }

    fn config(&self, encryption: VolumeEncryption, keys: KeyPolicy) -> LuksVolumeConfig {
        LuksVolumeConfig { keys, ..self.dirs.luks_config(&self.part, encryption) }
    }

    fn volume(&self, encryption: VolumeEncryption, keys: KeyPolicy) -> LuksVolume {
        self.new_volume(self.config(encryption, keys))
    }

    fn new_volume(&self, config: LuksVolumeConfig) -> LuksVolume {
        LuksVolume::new(config).with_mapping_name(self.mapping_name()).with_mkfs(self.path("mkfs"))
    }

    /// The mapping of the open volume.
    fn mapping(&self) -> Option<ActiveMapping> {
        CryptsetupProgram::default().find_mapping(&self.mapping_name()).unwrap()
    }

    /// Which blocks of a part of [`SMALL_MIB`], behind the header and the journal of dm-integrity, have been written.
    fn written_blocks(&self) -> Vec<bool> {
        let part = File::open(&self.part).unwrap();
        let mut bytes = vec![0; MIB as usize];
        let mut written = Vec::new();
        for at in (BEFORE_DATA..SMALL_MIB * MIB).step_by(MIB as usize) {
            part.read_exact_at(&mut bytes, at).unwrap();
            // Slices are compared fast, without optimisation and in a guest, too.
            written.extend(bytes.chunks(BLOCK_BYTES).map(|block| block != [0; BLOCK_BYTES]));
        }
        written
    }

    /// Changes one bit of each of these blocks.
    fn change_blocks(&self, blocks: impl Iterator<Item = bool>) -> usize {
        let part = File::options().read(true).write(true).open(&self.part).unwrap();
        let offsets = (BEFORE_DATA..).step_by(BLOCK_BYTES).zip(blocks).filter(|(_, is_chosen)| *is_chosen);
        let changed = offsets.map(|(offset, _)| {
            let mut byte = [0];
            part.read_exact_at(&mut byte, offset).unwrap();
            part.write_all_at(&[byte[0] ^ 1], offset).unwrap();
        });
        let count = changed.count();
        part.sync_all().unwrap();
        count
    }
}

impl Drop for NodeDisk {
    fn drop(&mut self) {
        self.dirs.close_volume(&self.mapping_name());
        let mut remove = Command::new("dmsetup");
        let _ = remove.args(["remove", "--retry", &self.name]).env("DM_DISABLE_UDEV", "1").output();
    }
}

fn table(disk: &GuestDisk, mebibytes: u64) -> String {
    format!("0 {} linear {} 0", mebibytes * 2048, disk.device_path().display())
}

fn run_dmsetup(arguments: &[&str]) -> String {
    // While another test has the kernel load it, its control device can't be opened.
    command_output(Command::new("modprobe").arg("dm-mod")).unwrap();
    command_output(Command::new("dmsetup").args(arguments).env("DM_DISABLE_UDEV", "1")).unwrap()
}

fn size_of_file_system(path: &Path) -> u64 {
    let stat = rustix::fs::statvfs(path).unwrap();
    stat.f_blocks * stat.f_frsize
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn an_encrypted_volume_keeps_the_volume_contract_and_enforces_quotas() {
    in_child_process(an_encrypted_volume_keeps_the_volume_contract_and_enforces_quotas, || {
        let node = NodeDisk::new(512);
        let volume = node.volume(VolumeEncryption::Encrypted, KeyPolicy::Local);
        volume_conformance(&volume);
        assert_eq!(node.mapping(), None);
        let top = volume.mount_existing().unwrap();
        let state =
            command_output(Command::new("xfs_quota").args(["-x", "-c", "state -p"]).arg(node.path("data")));
        assert_eq!(state.unwrap().matches(": ON").count(), 2, "accounting and enforcement");
        // Another incarnation of the process finds it open.
        let again = node.volume(VolumeEncryption::Encrypted, KeyPolicy::Local).mount_existing().unwrap();
        again.write("kept", b"kept", FileMode::PRIVATE_FILE).unwrap();
        assert_eq!(top.read("kept").unwrap(), b"kept");
    });
}

#[test]
#[ignore = "soak: needs kernel with a disk of 1 GiB"]
fn an_authenticated_volume_keeps_the_volume_contract() {
    in_child_process(an_authenticated_volume_keeps_the_volume_contract, || {
        let node = NodeDisk::new(448);
        let volume = node.volume(VolumeEncryption::EncryptedAndAuthenticated, KeyPolicy::Local);
        volume_conformance(&volume.without_wipe());
        assert_eq!(node.mapping(), None);
    });
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn an_authenticated_split_volume_opens_with_both_halves_and_reports_a_changed_block() {
    in_child_process(
        an_authenticated_split_volume_opens_with_both_halves_and_reports_a_changed_block,
        || {
            let node = NodeDisk::new(SMALL_MIB);
            let authenticated = VolumeEncryption::EncryptedAndAuthenticated;
            let volume = node.volume(authenticated, KeyPolicy::Split).without_wipe();
            let started = Instant::now();
            let (top, key) = volume.mount_new_with_key(ErasePolicy::Nothing).unwrap();
            println!("created without a wipe in {:?}", started.elapsed());
            drop(top);
            let secret = UnlockSecret::Cluster(key.unwrap());
            volume.confirm_secret(&secret).unwrap();
            volume.unmount().unwrap();
            let before = node.written_blocks();

            let other = UnlockSecret::Cluster(UnlockKey::generate().unwrap());
            assert!(matches!(
                luks_error(volume.mount_existing_with(&other)),
                LuksError::WrongClusterKey { .. }
            ));
            assert!(matches!(luks_error(volume.mount_existing()), LuksError::NoSlot { .. }));
            let downgraded = node.volume(VolumeEncryption::Encrypted, KeyPolicy::Split);
            assert!(matches!(luks_error(downgraded.mount_existing_with(&secret)), LuksError::Policy(_)));
            let top = volume.mount_existing_with(&secret).unwrap();
            top.write("witness", &vec![7; 16 << 20], FileMode::PRIVATE_FILE).unwrap();
            drop(top);
            volume.unmount().unwrap();

            // What the file has written.
            let after = node.written_blocks();
            let blocks_of_file = before.iter().zip(&after).map(|(before, after)| after & !before);
            let count = node.change_blocks(blocks_of_file);
            assert!(count >= 1024, "{count} blocks");
            let top = volume.mount_existing_with(&secret).unwrap();
            let changed = fs::read(node.path("data/witness")).unwrap_err();
            assert_eq!(changed.raw_os_error(), Some(5), "{changed:?}");
            drop(top);
            volume.unmount().unwrap();

            // The file system itself.
            node.change_blocks(before.into_iter());
            let tampering = luks_error(volume.mount_existing_with(&secret));
            assert!(matches!(tampering, LuksError::Tampering(_)), "{tampering:?}");
            assert_eq!(node.mapping(), None);
        },
    );
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn an_authenticated_volume_is_wiped_with_progress_and_can_be_read_everywhere() {
    in_child_process(an_authenticated_volume_is_wiped_with_progress_and_can_be_read_everywhere, || {
        let node = NodeDisk::new(SMALL_MIB);
        let seen = Arc::new(AtomicU64::new(0));
        let last = Arc::clone(&seen);
        let volume = node
            .volume(VolumeEncryption::EncryptedAndAuthenticated, KeyPolicy::Local)
            .with_progress(move |progress| {
                assert!(progress.done_bytes <= progress.total_bytes, "{progress:?}");
                last.fetch_max(progress.done_bytes, Ordering::Relaxed);
                ControlFlow::Continue(())
            });
        let started = Instant::now();
        volume.mount_new(ErasePolicy::Nothing).unwrap();
        println!("created with a wipe in {:?}", started.elapsed());
        assert!(seen.load(Ordering::Relaxed) > 0, "progress is reported");
        let mapping = node.mapping().unwrap();
        // Blocks can be read at any place, also where nothing was written.
        let mut device = File::open(mapping.device_path).unwrap();
        let size = device.seek(SeekFrom::End(0)).unwrap();
        assert!(size > 150 * MIB, "{size}");
        let mut bytes = vec![0; MIB as usize];
        for at in (0..size - MIB).step_by(8 * MIB as usize).chain([size - MIB]) {
            device.read_exact_at(&mut bytes, at).unwrap();
        }
    });
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn an_encrypted_volume_grows_with_its_disk_and_discards_on_request() {
    in_child_process(an_encrypted_volume_grows_with_its_disk_and_discards_on_request, || {
        let node = NodeDisk::new(448);
        let volume = node.volume(VolumeEncryption::Encrypted, KeyPolicy::Split).with_discards();
        let (top, key) = volume.mount_new_with_key(ErasePolicy::Nothing).unwrap();
        let secret = UnlockSecret::Cluster(key.unwrap());
        let before = size_of_file_system(&node.path("data"));
        node.grow(960);
        volume.grow_volume(&secret).unwrap();
        let after = size_of_file_system(&node.path("data"));
        assert!(after - before > 500 * MIB, "{before} bytes became {after}");
        volume.grow_volume(&secret).unwrap();
        let mapping = node.mapping().unwrap();
        let queue = Path::new("/sys/block").join(mapping.device_path.file_name().unwrap()).join("queue");
        let discards = fs::read_to_string(queue.join("discard_max_bytes")).unwrap();
        println!("discard_max_bytes {}", discards.trim());
        drop(top);
        volume.unmount().unwrap();
        assert!(matches!(volume.grow_volume(&secret), Err(VolumeError::InvalidState { .. })));
    });
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn a_mapping_that_is_opened_again_has_another_identity() {
    in_child_process(a_mapping_that_is_opened_again_has_another_identity, || {
        let node = NodeDisk::new(448);
        let volume = node.volume(VolumeEncryption::Encrypted, KeyPolicy::Local);
        drop(volume.mount_new(ErasePolicy::Nothing).unwrap());
        let identity = || volume.active_mapping().unwrap();
        let opened = identity().expect("it is open");
        assert_eq!(identity(), Some(opened.clone()), "of the same mapping");
        volume.unmount().unwrap();
        assert_eq!(identity(), None);
        drop(volume.mount_existing().unwrap());
        assert_ne!(identity().expect("it is open"), opened);
        volume.unmount().unwrap();
    });
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB and tpm"]
fn a_volume_sealed_by_the_tpm_is_refused_when_a_pcr_has_changed_and_sealed_again() {
    in_child_process(a_volume_sealed_by_the_tpm_is_refused_when_a_pcr_has_changed_and_sealed_again, || {
        let node = NodeDisk::new(448);
        let pcrs = PcrSelection::try_new([7, DEBUG_PCR]).unwrap();
        let seal = Arc::new(TpmSeal::new(node.dirs.dir("esp"), pcrs));
        key_seal_conformance(&*seal);
        let config = node.config(VolumeEncryption::Encrypted, KeyPolicy::Local);
        let volume = node.new_volume(LuksVolumeConfig { seal, ..config });
        drop(volume.mount_new(ErasePolicy::Nothing).unwrap());
        let recovery = volume.add_recovery_passphrase(&UnlockSecret::Node).unwrap();
        let recovery = UnlockSecret::Recovery(recovery);
        volume.unmount().unwrap();
        drop(volume.mount_existing().unwrap());
        volume.unmount().unwrap();

        extend_pcr(&mut File::options().read(true).write(true).open("/dev/tpmrm0").unwrap(), 16);
        let refused = luks_error(volume.mount_existing());
        let LuksError::Seal(SealError::Tpm { source: TpmError::PcrsChanged { changed }, .. }) = refused
        else {
            panic!("{refused:?}")
        };
        assert_eq!(changed, PcrSelection::try_new([DEBUG_PCR]).unwrap());
        drop(volume.mount_existing_with(&recovery).unwrap());
        volume.rotate_keys(&recovery).unwrap();
        volume.unmount().unwrap();
        drop(volume.mount_existing().unwrap());
    });
}

#[test]
#[ignore = "sampled: needs kernel"]
fn a_header_with_a_null_cipher_is_rejected_and_never_opened() {
    in_child_process(a_header_with_a_null_cipher_is_rejected_and_never_opened, || {
        for (cipher, key_bits) in
            [("cipher_null-ecb", 256), ("aes-cbc-essiv:sha256", 256), ("aes-xts-plain64", 256)]
        {
            let options =
                [format!("--cipher={cipher}"), format!("--key-size={key_bits}"), "--offset=32768".into()];
            let fixture = LuksFixture::new();
            check_rejected_header(&fixture, &options.each_ref().map(String::as_str), cipher);
        }
    });
}

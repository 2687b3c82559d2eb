//! The copy of an authenticated volume to a larger disk, on dm-crypt and dm-integrity.

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::Command;

use nodekeel_localstorage::FileMode;
use nodekeel_localstorage::volume::{
    CopySource, DataVolume as _, ErasePolicy, KeyPolicy, LuksError, LuksVolumeConfig, UnlockSecret,
    VolumeEncryption, VolumeError,
};

use super::super::{HEADER_BYTES, MIB, luks_error};
use super::{BEFORE_DATA, BLOCK_BYTES, NodeDisk, run_dmsetup, size_of_file_system};
use crate::fixture::in_child_process;

const AUTHENTICATED: VolumeEncryption = VolumeEncryption::EncryptedAndAuthenticated;

/// The size of the new disk.
const OTHER_MIB: u64 = 160;

/// Another part of the disk of a node.
struct OtherPart {
    name: String,
    path: PathBuf,
}

impl OtherPart {
    fn new(node: &NodeDisk, mebibytes: u64) -> OtherPart {
        let name = format!("{}-other", node.name);
        let disk = node.disk.device_path().display();
        let table = format!("0 {} linear {disk} {}", mebibytes * 2048, 512 * 2048);
        run_dmsetup(&["create", &name, "--noudevsync", "--table", &table]);
        let minor = run_dmsetup(&["info", "--columns", "--noheadings", "--options", "minor", &name]);
        OtherPart { path: format!("/dev/dm-{}", minor.trim()).into(), name }
    }
}

impl Drop for OtherPart {
    fn drop(&mut self) {
        let mut remove = Command::new("dmsetup");
        let _ = remove.args(["remove", "--retry", &self.name]).env("DM_DISABLE_UDEV", "1").output();
    }
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn an_authenticated_volume_is_copied_and_a_stolen_header_opens_nothing_of_the_copy() {
    in_child_process(an_authenticated_volume_is_copied_and_a_stolen_header_opens_nothing_of_the_copy, || {
        let node = NodeDisk::new(112);
        let other = OtherPart::new(&node, OTHER_MIB);
        let keys = KeyPolicy::Local;
        let old = node.volume(AUTHENTICATED, keys);
        let witness: Vec<u8> = (0..3 * MIB).map(|at| ((at * 2_654_435_761) >> 13) as u8).collect();
        let use_volume = |name: &str| {
            let top = old.mount_existing().unwrap();
            top.write(name, &witness, FileMode::PRIVATE_FILE).unwrap();
            drop(top);
            old.unmount().unwrap();
        };
        drop(old.mount_new(ErasePolicy::Nothing).unwrap());
        let before = size_of_file_system(&node.path("data"));
        old.unmount().unwrap();
        use_volume("witness");
        let earlier = fs::read(&node.part).unwrap();
        use_volume("more");
        let changed = longest_change(&earlier, &fs::read(&node.part).unwrap());
        let stolen = &earlier[..HEADER_BYTES as usize];

        let copy = || {
            let config = node.config(AUTHENTICATED, keys);
            node.new_volume(LuksVolumeConfig { device: other.path.clone(), ..config })
        };
        let make = |is_canceled: bool| {
            let volume = copy();
            let source = CopySource {
                volume: &node
                    .new_volume(node.config(AUTHENTICATED, keys))
                    .with_mapping_name(format!("{}-source", node.mapping_name())),
                secret: &UnlockSecret::Node,
                progress: &|progress| match progress.done_bytes == progress.total_bytes {
                    true if is_canceled => ControlFlow::Break(()),
                    _ => ControlFlow::Continue(()),
                },
                commit: &|_, _, _| Ok(()),
            };
            volume.mount_copy(&source).map(|(_, _, unreadable)| (volume, unreadable))
        };
        // All is copied, and does not count yet: the volume is used again, and then changed by somebody.
        let canceled = make(true);
        assert!(matches!(canceled, Err(VolumeError::CopyCanceled { .. })), "{canceled:?}");
        use_volume("since");
        let part = File::options().write(true).open(&node.part).unwrap();
        part.write_all_at(&[7; 512], changed).unwrap();
        part.sync_all().unwrap();
        let outdated = luks_error(make(false));
        assert!(matches!(outdated, LuksError::CopyOutdated { .. }), "{outdated:?}");
        // As `blkdiscard -z`, which the guest does not have.
        let cleared = File::options().write(true).open(&other.path).unwrap();
        for at in 0..OTHER_MIB {
            cleared.write_all_at(&vec![0; MIB as usize], at * MIB).unwrap();
        }
        cleared.sync_all().unwrap();
        drop(cleared);
        let (volume, unreadable) = make(false).unwrap();
        println!("{unreadable:?}");
        assert!(unreadable.bytes > 0 && unreadable.bytes < MIB, "{unreadable:?}");
        for name in ["witness", "since"] {
            assert!(fs::read(node.path(&format!("data/{name}"))).unwrap() == witness, "{name}");
        }
        let after = size_of_file_system(&node.path("data"));
        assert!(after > before + 30 * MIB, "{before} bytes became {after}");
        volume.unmount().unwrap();

        // With the node's old key, which is still there.
        let part = File::options().write(true).open(&other.path).unwrap();
        part.write_all_at(stolen, 0).unwrap();
        part.sync_all().unwrap();
        let refused = luks_error(copy().mount_existing());
        assert!(matches!(refused, LuksError::Tampering(_) | LuksError::OtherData(_)), "{refused:?}");
    });
}

/// The middle of the longest run of blocks that have changed, behind the journal of dm-integrity, in bytes.
fn longest_change(before: &[u8], after: &[u8]) -> u64 {
    let blocks = before.chunks(BLOCK_BYTES).zip(after.chunks(BLOCK_BYTES)).enumerate();
    let (mut longest, mut run) = (0..0, 0..0);
    for (at, (before, after)) in blocks.skip(BEFORE_DATA as usize / BLOCK_BYTES) {
        run = if before == after { at + 1..at + 1 } else { run.start..at + 1 };
        if run.len() > longest.len() {
            longest = run.clone();
        }
    }
    ((longest.start + longest.end) / 2 * BLOCK_BYTES) as u64
}

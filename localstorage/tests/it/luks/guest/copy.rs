//! The copy of an authenticated volume to a larger disk, on dm-crypt and dm-integrity.

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use nodekeel_localstorage::FileMode;
use nodekeel_localstorage::volume::{
    CopySource, DataVolume as _, ErasePolicy, KeyPolicy, LuksError, LuksVolumeConfig, UnlockSecret,
    VolumeEncryption,
};

use super::super::{HEADER_BYTES, MIB, luks_error};
use super::{NodeDisk, run_dmsetup, size_of_file_system};
use crate::fixture::in_child_process;

const AUTHENTICATED: VolumeEncryption = VolumeEncryption::EncryptedAndAuthenticated;

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
        run_dmsetup(&["remove", "--retry", "--noudevsync", &self.name]);
    }
}

#[test]
#[ignore = "needs kernel with a disk of 1 GiB"]
fn an_authenticated_volume_is_copied_and_a_stolen_header_opens_nothing_of_the_copy() {
    in_child_process(an_authenticated_volume_is_copied_and_a_stolen_header_opens_nothing_of_the_copy, || {
        let node = NodeDisk::new(112);
        let other = OtherPart::new(&node, 160);
        let keys = KeyPolicy::Local;
        let old = node.volume(AUTHENTICATED, keys).without_wipe();
        let top = old.mount_new(ErasePolicy::Nothing).unwrap();
        let witness: Vec<u8> = (0..3 * MIB).map(|at| ((at * 2_654_435_761) >> 13) as u8).collect();
        top.write("witness", &witness, FileMode::PRIVATE_FILE).unwrap();
        drop(top);
        let before = size_of_file_system(&node.path("data"));
        old.unmount().unwrap();
        let mut stolen = vec![0; HEADER_BYTES as usize];
        File::open(&node.part).unwrap().read_exact_at(&mut stolen, 0).unwrap();

        let copy = || {
            let config = node.config(AUTHENTICATED, keys);
            node.new_volume(LuksVolumeConfig { device: other.path.clone(), ..config })
        };
        let make = |until: u64| {
            let volume = copy();
            let source = CopySource {
                volume: &node
                    .new_volume(node.config(AUTHENTICATED, keys))
                    .with_mapping_name(format!("{}-source", node.mapping_name())),
                secret: &UnlockSecret::Node,
                progress: &|progress| match progress.done_bytes {
                    done if done < until => ControlFlow::Continue(()),
                    _ => ControlFlow::Break(()),
                },
                commit: &|_, _| Ok(()),
            };
            volume.mount_copy(&source).map(|(_, _, unreadable)| (volume, unreadable))
        };
        make(60 * MIB).unwrap_err();
        // The volume is used again before the copy goes on.
        let top = old.mount_existing().unwrap();
        top.write("since", b"since", FileMode::PRIVATE_FILE).unwrap();
        drop(top);
        old.unmount().unwrap();
        let (volume, unreadable) = make(u64::MAX).unwrap();
        // What the old volume has never written, and the file system does not use.
        println!("{unreadable:?}");
        assert!(unreadable.bytes > 0 && unreadable.bytes % 4096 == 0, "{unreadable:?}");
        assert!(fs::read(node.path("data/witness")).unwrap() == witness);
        assert_eq!(fs::read(node.path("data/since")).unwrap(), b"since");
        let after = size_of_file_system(&node.path("data"));
        assert!(after > before + 30 * MIB, "{before} bytes became {after}");
        assert!(volume.encryption_status().unwrap().is_unwiped, "as the volume that was copied");
        let mapping = File::open(node.mapping().unwrap().device_path).unwrap();
        let mut block = [0; 4096];
        let left_out = mapping.read_exact_at(&mut block, unreadable.first_offset);
        assert!(left_out.is_err(), "a block without its contents must not be readable");
        let end = rustix::fs::seek(&mapping, rustix::fs::SeekFrom::End(0)).unwrap();
        mapping.read_exact_at(&mut block, end - 4096).unwrap();
        drop(mapping);
        volume.unmount().unwrap();

        // With the node's old key, which is still there.
        let part = File::options().write(true).open(&other.path).unwrap();
        part.write_all_at(&stolen, 0).unwrap();
        part.sync_all().unwrap();
        let refused = luks_error(copy().mount_existing());
        assert!(matches!(refused, LuksError::Tampering(_) | LuksError::OtherData(_)), "{refused:?}");
    });
}

//! A re-encryption below an open volume, which is stopped and killed.

use std::fs::{self, File};
use std::io::Write as _;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use nodekeel_localstorage::FileMode;
use nodekeel_localstorage::volume::{
    DataVolume as _, EncryptedVolume as _, ErasePolicy, KeyPolicy, LuksError, LuksVolume, ReencryptionEnd,
    UnlockSecret, VolumeEncryption,
};
use rustix::process::{Pid, Signal, kill_process};

use super::{MIB, NodeDisk, luks_error, run_dmsetup};
use crate::fixture::in_child_process;

/// Some pieces. Each byte takes an emulated processor its time.
const DATA_BYTES: u64 = 96 * MIB;

/// Kills the cryptsetup that this process runs.
fn kill_child() {
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let children = fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default();
        for child in children.split_whitespace() {
            let name = fs::read_to_string(format!("/proc/{child}/comm")).unwrap_or_default();
            if name.trim_end() == "cryptsetup" {
                kill_process(Pid::from_raw(child.parse().unwrap()).unwrap(), Signal::KILL).unwrap();
            }
        }
    }
}

/// The key slots in the first copy of a header; none while it is being written.
fn count_slots(part: &Path) -> Option<usize> {
    let mut bytes = vec![0; 12 << 10];
    File::open(part).unwrap().read_exact_at(&mut bytes, 4 << 10).unwrap();
    let end = bytes.iter().position(|byte| *byte == 0)?;
    let metadata: serde_json::Value = serde_json::from_slice(&bytes[..end]).ok()?;
    metadata["keyslots"].as_object().map(serde_json::Map::len)
}

fn done_bytes(volume: &LuksVolume) -> Option<u64> {
    volume.encryption_status().unwrap().reencryption.map(|progress| progress.done_bytes)
}

/// Runs cryptsetup on the part with a header of before, as who has stolen it does.
fn open_by_stolen(header: &Path, node: &NodeDisk, passphrase: &str, arguments: &[&str]) -> ExitStatus {
    let mut command = Command::new("cryptsetup");
    command.args(["open", "--type=luks2", "--key-file=-", "--header"]).arg(header).arg(&node.part);
    let mut child =
        command.args(arguments).env("DM_DISABLE_UDEV", "1").stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(passphrase.as_bytes()).unwrap();
    child.wait().unwrap()
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn a_reencryption_that_is_stopped_and_killed_keeps_all_data_and_leaves_a_stolen_header_nothing() {
    in_child_process(
        a_reencryption_that_is_stopped_and_killed_keeps_all_data_and_leaves_a_stolen_header_nothing,
        || {
            let node = NodeDisk::new(16 + DATA_BYTES / MIB);
            let volume = node.volume(VolumeEncryption::Encrypted, KeyPolicy::Local);
            let top = volume.mount_new(ErasePolicy::Nothing).unwrap();
            let witness: Vec<u8> = (0..8 * MIB as u32 / 4).flat_map(|at| at.to_le_bytes()).collect();
            top.write("witness", &witness, FileMode::PRIVATE_FILE).unwrap();
            drop(top);
            let passphrase = volume.add_recovery_passphrase(&UnlockSecret::Node).unwrap();
            let recovery = UnlockSecret::Recovery(passphrase.clone());
            volume.confirm_secret(&recovery).unwrap();
            let stolen = volume.back_up_header().unwrap();
            let stolen_file = node.path("stolen");
            fs::write(&stolen_file, stolen.as_bytes()).unwrap();
            let assert_witness = || assert!(fs::read(node.path("data/witness")).unwrap() == witness);

            // The slot of the passphrase would be lost.
            let lost = luks_error(volume.begin_reencryption(&[UnlockSecret::Node], &[]));
            assert!(
                matches!(&lost, LuksError::UnknownSlots { slots } if slots == "key slot 1 (recovery)"),
                "{lost}"
            );
            volume.rotate_keys(&UnlockSecret::Node).unwrap();
            assert_eq!(
                volume.run_reencryption(&UnlockSecret::Node, |_| ControlFlow::Continue(())).unwrap(),
                ReencryptionEnd::Complete,
                "none was begun"
            );
            let secrets = [UnlockSecret::Node, recovery.clone()];
            volume.begin_reencryption(&secrets, &[]).unwrap();
            assert_eq!(done_bytes(&volume), Some(0));
            volume.begin_reencryption(&secrets, &[]).unwrap();

            let stopped = volume.run_reencryption(&UnlockSecret::Node, |progress| {
                assert_eq!(progress.total_bytes, DATA_BYTES);
                ControlFlow::Break(())
            });
            assert_eq!(stopped.unwrap(), ReencryptionEnd::Stopped);
            let first = done_bytes(&volume).unwrap();
            assert!(first > 0, "{first}");
            assert_witness();
            for refused in [
                luks_error(volume.rotate_keys(&UnlockSecret::Node).map(drop)),
                luks_error(volume.add_recovery_passphrase(&UnlockSecret::Node).map(drop)),
                luks_error(volume.back_up_header().map(drop)),
                luks_error(volume.restore_header(&stolen, &recovery, true).map(drop)),
            ] {
                let is_named = matches!(refused, LuksError::Reencrypting { .. } | LuksError::Reencrypted);
                assert!(is_named, "{refused}");
            }
            volume.unmount().unwrap();
            // Both secrets open a volume with two keys, and a wrong one does not.
            drop(volume.mount_existing_with(&recovery).unwrap());
            assert_witness();
            volume.unmount().unwrap();
            let other = node.volume(VolumeEncryption::Encrypted, KeyPolicy::Local);
            drop(other.mount_existing().unwrap());
            other.unmount().unwrap();

            // Amid a piece or between two, and where the old slots are being removed.
            for kill_at in [first, DATA_BYTES] {
                drop(volume.mount_existing().unwrap());
                let ended = volume.run_reencryption(&UnlockSecret::Node, |progress| {
                    if progress.done_bytes >= kill_at {
                        while kill_at == DATA_BYTES && count_slots(&node.part).is_none_or(|count| count > 4) {
                        }
                        kill_child();
                    }
                    ControlFlow::Continue(())
                });
                // The header is completed below the open volume.
                let is_complete = matches!(ended, Ok(ReencryptionEnd::Complete));
                assert_eq!(is_complete, kill_at == DATA_BYTES, "{ended:?}");
                assert_eq!(done_bytes(&volume).is_none(), is_complete);
                // A process that is killed, too, leaves it to the next one.
                let next = node.volume(VolumeEncryption::Encrypted, KeyPolicy::Local);
                let found = next.mount_active().unwrap();
                if found.is_none() {
                    drop(next.mount_existing().unwrap());
                }
                drop(found);
                assert_witness();
                next.unmount().unwrap();
                let _ = volume.unmount();
            }

            drop(volume.mount_existing().unwrap());
            let complete = volume.run_reencryption(&UnlockSecret::Node, |_| ControlFlow::Continue(()));
            assert_eq!((complete.unwrap(), done_bytes(&volume)), (ReencryptionEnd::Complete, None));
            assert_witness();
            volume.unmount().unwrap();
            // As a cryptsetup leaves it that is killed when the volume does not lie on it any more.
            let left = node.mapping_name() + "-overlay";
            let uuid = volume.encryption_status().unwrap().volume.replace('-', "");
            let uuid = format!("CRYPT-SUBDEV-{uuid}-{left}");
            let table = format!("0 8 linear {} 0", node.part.display());
            run_dmsetup(&["create", &left, "--noudevsync", "--uuid", &uuid, "--table", &table]);
            for secret in secrets {
                drop(volume.mount_existing_with(&secret).unwrap());
                assert_witness();
                volume.unmount().unwrap();
            }
            let status = volume.encryption_status().unwrap();
            assert_eq!((status.slots.len(), status.rollback), (2, None), "{:?}", status.slots);

            // The stolen header has its key slots, and its volume key decrypts nothing of the data.
            let opens =
                |arguments: &[&str]| open_by_stolen(&stolen_file, &node, passphrase.reveal(), arguments);
            assert!(opens(&["--test-passphrase"]).success());
            assert!(opens(&["stolen"]).success());
            let mounted = Command::new("mount")
                .args(["-t", "xfs", "-o", "ro,norecovery,nouuid", "/dev/mapper/stolen"])
                .arg(node.path("data"))
                .output()
                .unwrap();
            let mut start = vec![0; MIB as usize];
            File::open("/dev/mapper/stolen").unwrap().read_exact_at(&mut start, 0).unwrap();
            let mut close = Command::new("cryptsetup");
            assert!(close.args(["close", "stolen"]).env("DM_DISABLE_UDEV", "1").status().unwrap().success());
            assert!(!mounted.status.success() && !start.starts_with(b"XFSB"), "{mounted:?}");
            // It is not restored, and one that was put back is named.
            let restored = luks_error(volume.restore_header(&stolen, &recovery, true).map(drop));
            assert!(matches!(restored, LuksError::Reencrypted), "{restored}");
            let part = File::options().write(true).open(&node.part).unwrap();
            part.write_all_at(stolen.as_bytes(), 0).unwrap();
            part.sync_all().unwrap();
            let by_key = luks_error(volume.mount_existing().map(drop));
            assert!(matches!(by_key, LuksError::RolledBack { .. }), "{by_key}");
            let by_passphrase = luks_error(volume.mount_existing_with(&recovery).map(drop));
            assert!(matches!(by_passphrase, LuksError::Reencrypted), "{by_passphrase}");
            assert_eq!(node.mapping(), None);
        },
    );
}

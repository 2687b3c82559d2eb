//! The data volume on a partition of a GPT disk with an EFI system partition, in a guest.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use nodekeel_localstorage::mount::mount_table;
use testbed::guest::disk::{FileSystem, GuestDisk};
use testbed::{ScratchDir, command_output};

use crate::harness::NO_DAEMONS;
use crate::storage_device::{DeviceNode, mebibytes_of_file_system, only_node, wipe_device};

const SECTOR_BYTES: u64 = 512;
const ENTRIES: usize = 128;
const ENTRY_BYTES: usize = 128;
/// c12a7328-f81f-11d2-ba4b-00a0c93ec93b, as a GPT stores it.
const ESP_TYPE: &[u8; 16] = b"\x28\x73\x2a\xc1\x1f\xf8\xd2\x11\xba\x4b\x00\xa0\xc9\x3e\xc9\x3b";
/// 50f0da07-f692-49a7-8a4c-25a207fd3f25.
const DATA_TYPE: &[u8; 16] = b"\x07\xda\xf0\x50\x92\xf6\xa7\x49\x8a\x4c\x25\xa2\x07\xfd\x3f\x25";

/// A partition: type, label, first and last MiB.
type PartitionEntry<'a> = (&'a [u8; 16], &'a str, u64, u64);

/// The sectors that the disk had when its table was written: it has grown since.
const SECTORS: u64 = 512 << 11;

/// Writes both copies of a partition table, and has the kernel read it. Gives its entries.
fn write_table(path: &Path, partitions: &[PartitionEntry<'_>]) -> Vec<u8> {
    let disk = File::options().write(true).open(path).unwrap();
    let mut entries = vec![0; ENTRIES * ENTRY_BYTES];
    for (entry, (number, (kind, label, first, end))) in
        entries.chunks_mut(ENTRY_BYTES).zip((1_u8..).zip(partitions))
    {
        entry[..16].copy_from_slice(*kind);
        entry[16..32].copy_from_slice(&[number; 16]);
        entry[32..40].copy_from_slice(&(first * 2048).to_le_bytes());
        entry[40..48].copy_from_slice(&(end * 2048 - 1).to_le_bytes());
        for (place, unit) in entry[56..].chunks_mut(2).zip(label.encode_utf16()) {
            place.copy_from_slice(&unit.to_le_bytes());
        }
    }
    let last = SECTORS - 1;
    for (place, other, entries_at) in [(1, last, 2), (last, 1, last - 32)] {
        disk.write_all_at(&entries, entries_at * SECTOR_BYTES).unwrap();
        let header = table_header([place, other, entries_at], &entries);
        disk.write_all_at(&header, place * SECTOR_BYTES).unwrap();
    }
    let mut protective = [0; 512];
    // One partition of type 0xee, from sector 1 to the end.
    protective[446..462].copy_from_slice(b"\0\0\x02\0\xee\xff\xff\xff\x01\0\0\0\xff\xff\xff\xff");
    protective[510..].copy_from_slice(b"\x55\xaa");
    disk.write_all_at(&protective, 0).unwrap();
    disk.sync_all().unwrap();
    drop(disk);
    command_output(Command::new("blockdev").arg("--rereadpt").arg(path)).unwrap();
    entries
}

/// *Source:* UEFI specification 2.10, 5.3.2.
fn table_header([place, other, entries_at]: [u64; 3], entries: &[u8]) -> Vec<u8> {
    let mut header = b"EFI PART\0\0\x01\0\x5c\0\0\0\0\0\0\0\0\0\0\0".to_vec();
    for number in [place, other, 34, SECTORS - 34] {
        header.extend(number.to_le_bytes());
    }
    header.extend([7; 16]);
    header.extend(entries_at.to_le_bytes());
    for number in [ENTRIES as u32, ENTRY_BYTES as u32, crc32(entries)] {
        header.extend(number.to_le_bytes());
    }
    let sum = crc32(&header);
    header[16..20].copy_from_slice(&sum.to_le_bytes());
    header
}

/// The CRC-32 of ISO 3309.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0xedb8_8320 * (sum & 1)))
    })
}

/// The partition with this number.
fn partition_path(disk: &GuestDisk, number: u32) -> PathBuf {
    PathBuf::from(format!("{}{number}", disk.device_path().display()))
}

/// Unmounts the ESP, and makes the disk an empty one for the tests after this.
struct RestoredDisk<'a>(&'a GuestDisk, PathBuf);

impl Drop for RestoredDisk<'_> {
    fn drop(&mut self) {
        for name in ["data", "esp"] {
            let _ = Command::new("umount").arg(self.1.join(name)).output();
        }
        let mut close = Command::new("cryptsetup");
        let _ = close.args(["close", "nodekeel-data"]).env("DM_DISABLE_UDEV", "1").output();
        wipe_device(self.0.device_path());
        let _ = Command::new("blockdev").arg("--rereadpt").arg(self.0.device_path()).output();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
async fn a_partition_is_found_by_its_type_and_its_key_lies_on_the_esp_of_its_disk() {
    let _turn = only_node().await;
    let (scratch, disk) = (ScratchDir::new().unwrap(), GuestDisk::acquire().unwrap());
    let data = scratch.path().canonicalize().unwrap().join("data");
    let _restored = RestoredDisk(&disk, data.clone());
    wipe_device(disk.device_path());
    let first_entries =
        write_table(disk.device_path(), &[(ESP_TYPE, "ESP", 1, 64), (DATA_TYPE, "data", 64, 500)]);
    FileSystem::Vfat.format_device(&partition_path(&disk, 1)).unwrap();
    let config = format!(
        "{NO_DAEMONS}[storage]\nkind = \"partition\"\npartition_label = \"data\"\ndevice = {:?}\n\
         encryption = \"encrypted\"\nkeys = \"local\"\nesp = \"partition\"\n",
        disk.device_path()
    );
    let node = DeviceNode::start(&config, &data).await;
    node.wait_open().await;
    fs::write(data.join("data/witness"), "data").unwrap();
    assert!(mebibytes_of_file_system(&data.join("data")) > 700, "it grows with its disk");
    let is_mounted = || mount_table().unwrap().iter().any(|entry| entry.target == data.join("esp"));
    assert!(is_mounted());
    assert_eq!(fs::metadata(data.join("esp")).unwrap().permissions().mode() & 0o7777, 0o700);
    node.stop().await;
    // As after a power cut in the middle of the growth: the kernel knows no partition until it is completed.
    command_output(Command::new("umount").arg(data.join("esp"))).unwrap();
    let header = table_header([1, SECTORS - 1, 2], &first_entries);
    let grown = File::options().write(true).open(disk.device_path()).unwrap();
    grown.write_all_at(&header, SECTOR_BYTES).unwrap();
    grown.sync_all().unwrap();
    drop(grown);
    command_output(Command::new("blockdev").arg("--rereadpt").arg(disk.device_path())).unwrap();
    assert!(!partition_path(&disk, 1).exists());
    let node = DeviceNode::start(&config, &data).await;
    node.wait_open().await;
    assert_eq!(fs::read_to_string(data.join("data/witness")).unwrap(), "data");
    node.stop().await;
    // As after a reboot, and as after an exit.
    for unmounts in [true, false] {
        if unmounts {
            command_output(Command::new("umount").arg(data.join("esp"))).unwrap();
            assert_eq!(fs::read_dir(data.join("esp")).unwrap().count(), 0, "the key is on the partition");
        }
        let node = DeviceNode::start(&config, &data).await;
        node.wait_open().await;
        assert_eq!(fs::read_to_string(data.join("data/witness")).unwrap(), "data");
        node.stop().await;
        assert!(is_mounted());
    }

    // Without its ESP, the node reports that, and writes nothing.
    command_output(Command::new("umount").arg(data.join("esp"))).unwrap();
    write_table(disk.device_path(), &[(DATA_TYPE, "ESP", 1, 64), (DATA_TYPE, "data", 64, 500)]);
    let mut node = DeviceNode::start(&config, &data).await;
    let status = node.wait_status(|status| !status.detail.is_empty()).await;
    assert!(status.detail.starts_with("can't mount the EFI system partition: "), "{status:?}");
    assert!(status.detail.contains("attach it"), "{status:?}");
    assert!(status.detail.contains("can't find a partition with type c12a7328-"), "{status:?}");
    node.stop().await;
}

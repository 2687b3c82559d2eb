//! Partitions of real disks: found in real tables, grown while they are in use, and disks with large blocks.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use nodekeel_localstorage::FileMode;
use nodekeel_localstorage::mount::OsMounter;
use nodekeel_localstorage::testing::volume_conformance;
use nodekeel_localstorage::volume::{
    BlockDevices, DataVolume as _, DiskVolume, EncryptedVolume as _, ErasePolicy, GrowthRefusal, LuksVolume,
    Partition, PartitionError, PartitionGrowth, PartitionQuery, PartitionType, TableCopies, UnlockSecret,
    VolumeEncryption, VolumeError,
};
use rustix::fs::{FallocateFlags, fallocate};
use testbed::command_output;
use testbed::guest::disk::GuestDisk;

use crate::fixture::{NodeDirs, in_child_process, runs_whole_counts};

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 1024 * MIB;

/// A disk of a guest, and the directories of a node.
struct NodeDisk {
    dirs: NodeDirs,
    disk: GuestDisk,
}

impl NodeDisk {
    fn new(disk: GuestDisk) -> NodeDisk {
        let node = NodeDisk { dirs: NodeDirs::new(), disk };
        node.wipe();
        node
    }

    fn wipe(&self) {
        let disk = File::options().write(true).open(self.disk_path()).unwrap();
        fallocate(&disk, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, DISK_BYTES).unwrap();
        disk.sync_all().unwrap();
        drop(disk);
        self.reread_table();
    }

    fn disk_path(&self) -> &Path {
        self.disk.device_path()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dirs.path(name)
    }

    /// Has the kernel read the partition table.
    fn reread_table(&self) {
        let mut reread = Command::new("blockdev");
        command_output(reread.arg("--rereadpt").arg(self.disk_path())).unwrap();
    }

    /// An ESP, and a data partition in the rest.
    fn partition_disk(&self) {
        create_table(self.disk_path());
        self.reread_table();
    }

    /// The same table as that of a disk of half the size: what a disk that has grown has, and one with the image of a
    /// smaller one.
    fn partition_half(&self) {
        let half = self.path("half");
        File::create(&half).unwrap().set_len(DISK_BYTES / 2).unwrap();
        create_table(&half);
        let (from, to) =
            (File::open(&half).unwrap(), File::options().write(true).open(self.disk_path()).unwrap());
        for offset in [0, DISK_BYTES / 2 - MIB] {
            let mut bytes = vec![0; MIB as usize];
            from.read_exact_at(&mut bytes, offset).unwrap();
            to.write_all_at(&bytes, offset).unwrap();
        }
        to.sync_all().unwrap();
        drop(to);
        self.reread_table();
    }

    /// The verdict of sgdisk on the table.
    fn verify_table(&self) -> String {
        command_output(Command::new("sgdisk").arg("--verify").arg(self.disk_path())).unwrap()
    }

    fn find_data(&self, devices: &BlockDevices) -> Result<Partition, PartitionError> {
        devices.find_partition(&PartitionQuery {
            partition_type: PartitionType::NODEKEEL_DATA,
            label: Some("data".into()),
            disk: Some(self.disk_path().to_owned()),
        })
    }

    fn plain_volume(&self, device: &Path) -> DiskVolume {
        DiskVolume::new(device, self.path("data"), Arc::new(OsMounter))
    }

    fn luks_volume(&self, device: &Path, encryption: VolumeEncryption) -> LuksVolume {
        LuksVolume::new(self.dirs.luks_config(device, encryption)).with_mapping_name(self.mapping_name())
    }

    fn mapping_name(&self) -> String {
        format!("crypt-{}", self.disk_path().file_name().unwrap().display())
    }

    fn free_bytes(&self) -> u64 {
        let stat = rustix::fs::statvfs(self.path("data")).unwrap();
        stat.f_blocks * stat.f_frsize
    }
}

impl Drop for NodeDisk {
    fn drop(&mut self) {
        self.dirs.close_volume(&self.mapping_name());
    }
}

/// Partitions a disk or an image, by its block size.
fn create_table(disk: &Path) {
    let data = format!("--typecode=2:{}", PartitionType::NODEKEEL_DATA);
    let esp = format!("--typecode=1:{}", PartitionType::EFI_SYSTEM);
    let mut sgdisk = Command::new("sgdisk");
    sgdisk.args(["--new=1:0:+64M", &esp, "--change-name=1:EFI"]);
    sgdisk.args(["--new=2:0:0", &data, "--change-name=2:data"]).arg(disk);
    command_output(&mut sgdisk).unwrap();
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn the_partition_of_a_mounted_volume_grows_with_its_disk() {
    in_child_process(the_partition_of_a_mounted_volume_grows_with_its_disk, || {
        let node = NodeDisk::new(GuestDisk::acquire().unwrap());
        let devices = BlockDevices::of_host().unwrap();
        node.partition_half();
        let found = node.find_data(&devices).unwrap();
        assert_eq!((found.number, found.table_copies.clone()), (2, TableCopies::Both));
        let esp = devices.find_esp(node.disk_path()).unwrap();
        assert_eq!((esp.number, esp.label.as_str(), esp.size_bytes), (1, "EFI", 64 * MIB));

        let volume = node.plain_volume(&found.device_path);
        let top = volume.mount_new(ErasePolicy::Nothing).unwrap();
        top.write("kept", b"kept", FileMode::PRIVATE_FILE).unwrap();
        let before = node.free_bytes();
        let refused = devices.grow_partition(&esp).unwrap_err();
        let PartitionError::Growth { source, .. } = refused else { panic!("{refused:?}") };
        assert_eq!(source, GrowthRefusal::NotLast { last: 2 });
        let grown = devices.grow_partition(&found).unwrap();
        let to_bytes = node.find_data(&devices).unwrap().size_bytes;
        assert_eq!(grown, PartitionGrowth::Grown { from_bytes: found.size_bytes, to_bytes });
        assert!(to_bytes > found.size_bytes + 500 * MIB, "{to_bytes}");
        assert_eq!(devices.grow_partition(&found).unwrap(), PartitionGrowth::Unchanged);
        volume.grow_volume().unwrap();
        assert!(node.free_bytes() > before + 450 * MIB, "{before} became {}", node.free_bytes());
        assert_eq!(top.read("kept").unwrap(), b"kept");
        drop(top);
        volume.unmount().unwrap();

        let verified = node.verify_table();
        assert!(verified.contains("No problems found"), "{verified}");
        node.reread_table();
        let again = node.find_data(&devices).unwrap();
        assert_eq!((again.size_bytes, again.table_copies), (to_bytes, TableCopies::Both));
        assert_eq!(volume.mount_existing().unwrap().read("kept").unwrap(), b"kept");
        volume.unmount().unwrap();
    });
}

#[test]
#[ignore = "soak: needs kernel with a disk of 1 GiB"]
fn the_partition_of_an_encrypted_volume_grows_with_its_disk() {
    in_child_process(the_partition_of_an_encrypted_volume_grows_with_its_disk, || {
        let node = NodeDisk::new(GuestDisk::acquire().unwrap());
        let devices = BlockDevices::of_host().unwrap();
        node.partition_half();
        let found = node.find_data(&devices).unwrap();
        let volume = node.luks_volume(&found.device_path, VolumeEncryption::Encrypted);
        let top = volume.mount_new(ErasePolicy::Nothing).unwrap();
        let before = node.free_bytes();
        assert!(matches!(devices.grow_partition(&found).unwrap(), PartitionGrowth::Grown { .. }));
        volume.grow_volume(&UnlockSecret::Node).unwrap();
        assert!(node.free_bytes() > before + 450 * MIB, "{before} became {}", node.free_bytes());
        drop(top);
        volume.unmount().unwrap();
        drop(volume.mount_existing_with(&UnlockSecret::Node).unwrap());
        volume.unmount().unwrap();
    });
}

/// A growth whose last write was cut off: the kernel does not accept the table, and the partitions are gone.
#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn an_interrupted_growth_is_resumed_where_the_kernel_rejects_the_table() {
    in_child_process(an_interrupted_growth_is_resumed_where_the_kernel_rejects_the_table, || {
        let node = NodeDisk::new(GuestDisk::acquire().unwrap());
        let devices = BlockDevices::of_host().unwrap();
        node.partition_half();
        let found = node.find_data(&devices).unwrap();
        let disk = File::options().read(true).write(true).open(node.disk_path()).unwrap();
        let mut header = vec![0; 512];
        disk.read_exact_at(&mut header, 512).unwrap();
        devices.grow_partition(&found).unwrap();
        disk.write_all_at(&header, 512).unwrap();
        disk.sync_all().unwrap();
        drop(disk);
        node.reread_table();
        let interrupted = node.find_data(&devices).unwrap_err();
        assert!(matches!(interrupted, PartitionError::InterruptedGrowth { .. }), "{interrupted:?}");
        for _ in 0..2 {
            devices.resume_growth(Some(node.disk_path())).unwrap();
        }
        let resumed = node.find_data(&devices).unwrap();
        assert!(resumed.size_bytes > found.size_bytes + 500 * MIB, "{resumed:?}");
        assert!(node.verify_table().contains("No problems found"));
    });
}

#[test]
#[ignore = "sampled: needs kernel with a 4Kn disk of 1 GiB"]
fn a_volume_on_a_disk_with_large_blocks_keeps_the_volume_contract() {
    in_child_process(a_volume_on_a_disk_with_large_blocks_keeps_the_volume_contract, || {
        let node = NodeDisk::new(GuestDisk::acquire_4kn().unwrap());
        let name = node.disk_path().file_name().unwrap().to_str().unwrap().to_owned();
        let blocks = fs::read_to_string(format!("/sys/block/{name}/queue/logical_block_size")).unwrap();
        assert_eq!(blocks, "4096\n");
        volume_conformance(&node.plain_volume(node.disk_path()));
        // Its file system is not ours to erase.
        let occupied = node.luks_volume(node.disk_path(), VolumeEncryption::Encrypted);
        assert!(matches!(occupied.mount_new(ErasePolicy::Nothing), Err(VolumeError::Occupied { .. })));
    });
}

#[test]
#[ignore = "sampled: needs kernel with a 4Kn disk of 1 GiB"]
fn encrypted_volumes_on_a_partition_with_large_blocks_are_created_and_opened() {
    in_child_process(encrypted_volumes_on_a_partition_with_large_blocks_are_created_and_opened, || {
        let node = NodeDisk::new(GuestDisk::acquire_4kn().unwrap());
        let devices = BlockDevices::of_host().unwrap();
        let modes = [VolumeEncryption::EncryptedAndAuthenticated, VolumeEncryption::Encrypted];
        for encryption in modes.into_iter().take(if runs_whole_counts() { 2 } else { 1 }) {
            node.wipe();
            node.partition_disk();
            let found = node.find_data(&devices).unwrap();
            assert_eq!(devices.find_esp(node.disk_path()).unwrap().size_bytes, 64 * MIB);
            assert_eq!(devices.grow_partition(&found).unwrap(), PartitionGrowth::Unchanged);
            let volume = node.luks_volume(&found.device_path, encryption).without_wipe();
            let top = volume.mount_new(ErasePolicy::Nothing).unwrap();
            top.write("kept", b"kept", FileMode::PRIVATE_FILE).unwrap();
            drop(top);
            volume.unmount().unwrap();
            let top = volume.mount_existing().unwrap();
            assert_eq!(top.read("kept").unwrap(), b"kept");
            drop(top);
            volume.unmount().unwrap();
        }
    });
}

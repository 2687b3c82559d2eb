use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::image::{TableImage, encode_entry};
use super::*;

const MIB: u64 = 1 << 20;
const EFI: PartitionType = PartitionType::EFI_SYSTEM;
const DATA: PartitionType = PartitionType::NODEKEEL_DATA;

/// A sysfs with the disks of a host, whose devices are images.
struct Host(TempDir);

impl Host {
    fn new() -> Host {
        let host = Host(tempfile::tempdir().unwrap());
        for name in ["sys/block", "sys/devices", "dev"] {
            fs::create_dir_all(host.path(name)).unwrap();
        }
        host
    }

    fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.path().join(name)
    }

    fn devices(&self) -> BlockDevices {
        BlockDevices::new(Dir::open(self.path("sys")).unwrap(), self.path("dev"))
    }

    /// A disk of 8 MiB with partitions of 1 MiB, which the kernel knows, too. The device directory of each partition is
    /// within that of its disk.
    fn add_disk(
        &self,
        name: &str,
        block_bytes: u64,
        partitions: &[(PartitionType, &str, &str)],
    ) -> TableImage {
        let geometry = DiskGeometry { block_bytes, blocks: 8 * MIB / block_bytes };
        let mib = MIB / block_bytes;
        let ranges = (1..).map(|start| (start * mib, (start + 1) * mib - 1));
        let entries: Vec<_> = ranges
            .zip(partitions)
            .map(|(range, (kind, label, _))| encode_entry(*kind, range, label))
            .collect();
        let image = TableImage::new(geometry, &entries);
        self.add_image(name, &image);
        for (number, (_, _, device)) in (1..).zip(partitions) {
            let directory = format!("devices/{name}/{device}");
            self.set(&directory, "partition", number);
            self.set(&directory, "start", number * MIB / 512);
            self.set(&directory, "size", MIB / 512);
            fs::write(self.path("sys").join(&directory).join("dev"), format!("8:{number}\n")).unwrap();
        }
        image
    }

    fn add_image(&self, name: &str, image: &TableImage) {
        let directory = format!("devices/{name}");
        self.set(&directory, "size", image.bytes.len() as u64 / 512);
        self.set(&directory, "queue/logical_block_size", image.geometry.block_bytes);
        fs::write(self.path("sys").join(&directory).join("dev"), "8:0\n").unwrap();
        fs::write(self.path("dev").join(name), &image.bytes).unwrap();
        let _ = symlink(format!("../{directory}"), self.path("sys/block").join(name));
    }

    fn set(&self, directory: &str, attribute: &str, value: u64) {
        let path = self.path("sys").join(directory).join(attribute);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{value}\n")).unwrap();
    }

    fn query(&self, disk: Option<&str>) -> PartitionQuery {
        PartitionQuery {
            partition_type: DATA,
            label: Some("data".into()),
            disk: disk.map(|disk| self.path("dev").join(disk)),
        }
    }
}

#[test]
fn a_partition_belongs_to_the_disk_that_sysfs_says_and_not_to_the_one_its_name_suggests() {
    for block_bytes in [512, 4096] {
        let host = Host::new();
        host.add_disk("sda", block_bytes, &[(EFI, "", "sda1")]);
        host.add_disk("sdaa", block_bytes, &[(EFI, "", "sdaa2"), (DATA, "data", "sdaa1")]);
        let found = host.devices().find_partition(&host.query(None)).unwrap();
        assert_eq!((found.device_path, found.number), (host.path("dev/sdaa1"), 2));
        assert_eq!((&found.disk_path, found.size_bytes), (&host.path("dev/sdaa"), MIB));
        assert_eq!(found.table_copies, TableCopies::Both);
        let esp = host.devices().find_esp(&found.disk_path).unwrap();
        assert_eq!((esp.device_path, esp.number), (host.path("dev/sdaa2"), 1));
        let missing = host.devices().find_partition(&host.query(Some("sda"))).unwrap_err();
        assert!(matches!(missing, PartitionError::NotFound { .. }), "{missing:?}");
    }
}

#[test]
fn of_two_matching_partitions_the_named_disk_decides() {
    let host = Host::new();
    host.add_disk("sda", 512, &[(DATA, "data", "sda1")]);
    host.add_disk("nvme0n1", 4096, &[(EFI, "", "nvme0n1p1"), (DATA, "data", "nvme0n1p2")]);
    symlink("nvme0n1", host.path("dev/by-name")).unwrap();
    let both = host.devices().find_partition(&host.query(None)).unwrap_err();
    assert!(matches!(both, PartitionError::Ambiguous { .. }), "{both:?}");
    for name in ["nvme0n1", "by-name"] {
        let found = host.devices().find_partition(&host.query(Some(name))).unwrap();
        assert_eq!(found.device_path, host.path("dev/nvme0n1p2"));
    }
    fs::write(host.path("dev/other"), "").unwrap();
    let unknown = host.devices().find_partition(&host.query(Some("other"))).unwrap_err();
    assert!(matches!(unknown, PartitionError::UnknownDisk { .. }), "{unknown:?}");
    let absent = host.devices().find_partition(&host.query(Some("absent"))).unwrap_err();
    assert!(matches!(absent, PartitionError::Device { step: "find", .. }), "{absent:?}");
}

#[test]
fn drives_without_a_medium_hidden_paths_and_removed_devices_are_left_out() {
    let host = Host::new();
    host.add_disk("sda", 512, &[(DATA, "data", "sda1")]);
    host.add_disk("sdb", 512, &[(DATA, "data", "sdb1")]);
    host.set("devices/sdb", "size", 0);
    host.add_disk("nvme0c0n1", 512, &[(DATA, "data", "nvme0c0n1p1")]);
    host.set("devices/nvme0c0n1", "hidden", 1);
    symlink("../devices/gone", host.path("sys/block/gone")).unwrap();
    assert_eq!(host.devices().find_partition(&host.query(None)).unwrap().device_path, host.path("dev/sda1"));
    symlink("../../etc", host.path("sys/block/outside")).unwrap();
    assert!(matches!(host.devices().find_partition(&host.query(None)), Err(PartitionError::Sysfs(_))));
}

#[test]
fn the_last_partition_grows_with_its_disk_and_an_interrupted_growth_is_resumed() {
    for cut in 0..6 {
        let host = Host::new();
        let image = host.add_disk("sda", 512, &[(EFI, "", "sda1"), (DATA, "data", "sda2")]);
        let unchanged = host.devices().find_partition(&host.query(None)).unwrap();
        assert_eq!(host.devices().grow_partition(&unchanged).unwrap(), PartitionGrowth::Unchanged);

        let mut grown = image.grown_by(16 * MIB / 512);
        let plan = grown.plan_growth(2).unwrap();
        grown.apply(&plan.writes[..cut.min(5)]);
        host.add_image("sda", &grown);
        host.devices().resume_growth(None).unwrap();
        let found = host.devices().find_partition(&host.query(None)).unwrap();
        let esp = host.devices().find_esp(&found.disk_path).unwrap();
        let refused = host.devices().grow_partition(&esp).unwrap_err();
        assert!(matches!(refused, PartitionError::Growth { number: 1, .. }), "{refused:?}");
        let growable = host.devices().growable_bytes(&found).unwrap();
        assert_eq!(growable, plan.size_bytes - MIB, "nothing is written");
        let growth = host.devices().grow_partition(&found).unwrap();
        // The kernel of this host never learns of it.
        assert_eq!(growth, PartitionGrowth::Grown { from_bytes: MIB, to_bytes: plan.size_bytes });
        grown.bytes = fs::read(host.path("dev/sda")).unwrap();
        let table = grown.read_table().unwrap();
        assert_eq!((table.copies.clone(), table.header.alternate), (TableCopies::Both, 24 * MIB / 512 - 1));
        assert_eq!(host.devices().find_partition(&host.query(None)).unwrap().table_copies, TableCopies::Both);
    }
}

#[test]
fn a_partition_that_the_table_or_the_kernel_knows_otherwise_by_now_does_not_grow() {
    let host = Host::new();
    let grow = |label: &str, found: &Partition| {
        let grown = host.add_disk("sda", 512, &[(EFI, "", "sda1"), (DATA, label, "sda2")]).grown_by(32768);
        host.add_image("sda", &grown);
        let refused = host.devices().grow_partition(found).unwrap_err();
        assert!(fs::read(host.path("dev/sda")).unwrap() == grown.bytes, "the disk has changed");
        let PartitionError::Growth { source, .. } = refused else { panic!("{refused:?}") };
        source
    };
    host.add_disk("sda", 512, &[(EFI, "", "sda1"), (DATA, "data", "sda2")]);
    let found = host.devices().find_partition(&host.query(None)).unwrap();
    // Another disk has its name now.
    assert_eq!(grow("other", &found), GrowthRefusal::Absent);
    // The table has lost a partition that is in use.
    let directory = "devices/sda/sda3";
    for (attribute, value) in [("partition", 3), ("start", 6 * MIB / 512), ("size", MIB / 512)] {
        host.set(directory, attribute, value);
    }
    fs::write(host.path("sys").join(directory).join("dev"), "8:3\n").unwrap();
    assert_eq!(grow("data", &found), GrowthRefusal::NotLast { last: 3 });
}

#[test]
fn without_a_resumption_an_interrupted_growth_is_an_error_that_names_the_disk() {
    let host = Host::new();
    let mut grown = host.add_disk("sda", 512, &[(DATA, "data", "sda1")]).grown_by(16 * MIB / 512);
    let plan = grown.plan_growth(1).unwrap();
    grown.apply(&plan.writes[..3]);
    host.add_image("sda", &grown);
    let error = host.devices().find_partition(&host.query(None)).unwrap_err();
    assert!(matches!(&error, PartitionError::InterruptedGrowth { disk } if *disk == host.path("dev/sda")));
}

#[test]
fn a_damaged_copy_is_reported_and_two_damaged_ones_are_an_error() {
    let host = Host::new();
    let mut image = host.add_disk("sda", 512, &[(DATA, "data", "sda1")]);
    image.bytes[512] = 0;
    host.add_image("sda", &image);
    let found = host.devices().find_partition(&host.query(None)).unwrap();
    assert_eq!(found.table_copies, TableCopies::Backup { primary: CopyFault::Absent });
    let last = image.bytes.len() - 512;
    image.bytes[last + 60] ^= 1;
    host.add_image("sda", &image);
    let error = host.devices().find_partition(&host.query(None)).unwrap_err();
    assert!(matches!(error, PartitionError::Table { source: TableError::Damaged { .. }, .. }), "{error:?}");
}

use std::io;

use super::super::error::PartitionError;
use super::super::gpt::DiskGeometry;
use super::super::image::{TableImage, encode_entry};
use super::super::sysfs::{DeviceName, DeviceNumber};
use super::*;

const WANTED: Wanted<'_> = Wanted { partition_type: PartitionType::NODEKEEL_DATA, label: Some("data") };

/// A disk with partitions of these types and labels, of 64 blocks each.
fn disk(name: &str, partitions: &[(PartitionType, &str)]) -> ScannedDisk {
    let geometry = DiskGeometry { block_bytes: 512, blocks: 2048 };
    let range = |index: usize| (64 * (index as u64 + 1), 64 * (index as u64 + 2) - 1);
    let entries: Vec<_> = partitions
        .iter()
        .enumerate()
        .map(|(index, (kind, label))| encode_entry(*kind, range(index), label))
        .collect();
    let known = (0..partitions.len()).map(|index| KernelPartition {
        name: DeviceName(format!("{name}{}", index + 1)),
        number: DeviceNumber { major: 8, minor: index as u32 + 1 },
        index: index as u32 + 1,
        start_bytes: range(index).0 * 512,
        size_bytes: 64 * 512,
    });
    let disk = KernelDisk {
        name: DeviceName(name.into()),
        number: DeviceNumber { major: 8, minor: 0 },
        size_bytes: 2048 * 512,
        block_bytes: 512,
        partitions: known.collect(),
    };
    let table = TableImage::new(geometry, &entries).read_table().map_err(TableProblem::Invalid);
    ScannedDisk { disk, table }
}

fn with_problem(scanned: ScannedDisk, problem: TableProblem) -> ScannedDisk {
    ScannedDisk { table: Err(problem), ..scanned }
}

/// The same with another GUID.
fn another(mut scanned: ScannedDisk) -> ScannedDisk {
    if let Ok(table) = &mut scanned.table {
        table.header.disk.0[0] ^= 1;
    }
    scanned
}

fn select(disks: Vec<ScannedDisk>) -> Result<Partition, PartitionError> {
    select_partition(disks, WANTED, Path::new("/dev"))
}

#[test]
fn the_one_partition_with_the_type_and_the_label_is_found() {
    let disks = vec![
        disk("sda", &[(PartitionType::EFI_SYSTEM, "data"), (PartitionType::NODEKEEL_DATA, "old")]),
        disk("cciss!c0d0", &[(PartitionType::EFI_SYSTEM, "EFI"), (PartitionType::NODEKEEL_DATA, "data")]),
    ];
    let found = select(disks).unwrap();
    assert_eq!(found.device_path, Path::new("/dev/cciss/c0d02"));
    assert_eq!((found.disk_path.to_str(), found.number), (Some("/dev/cciss/c0d0"), 2));
    assert_eq!((found.label.as_str(), found.size_bytes), ("data", 64 * 512));
    // Without a label, any will do.
    let any = Wanted { label: None, ..WANTED };
    let disks = vec![disk("sda", &[(PartitionType::NODEKEEL_DATA, "")])];
    assert_eq!(select_partition(disks, any, Path::new("/dev")).unwrap().number, 1);
}

#[test]
fn two_partitions_on_one_disk_or_on_two_are_both_named() {
    let data = (PartitionType::NODEKEEL_DATA, "data");
    for (disks, second) in [
        (vec![disk("sda", &[data]), another(disk("sdaa", &[data]))], "/dev/sdaa1"),
        (vec![disk("sda", &[data, data])], "/dev/sda2"),
    ] {
        let error = select(disks).unwrap_err();
        let PartitionError::Ambiguous { partitions, .. } = &error else { panic!("{error:?}") };
        assert_eq!(partitions, &[PathBuf::from("/dev/sda1"), second.into()]);
        assert!(error.to_string().contains(&format!("/dev/sda1 and {second} have it")), "{error}");
    }
}

#[test]
fn one_disk_by_two_paths_is_not_two_partitions() {
    let data = (PartitionType::NODEKEEL_DATA, "data");
    let error = select(vec![disk("sda", &[data]), disk("sdb", &[data])]).unwrap_err();
    assert!(matches!(error, PartitionError::SameDisk { .. }), "{error:?}");
    assert!(error.to_string().contains("/dev/sda1 and /dev/sdb1 are one partition of one disk"), "{error}");
}

#[test]
fn nothing_found_lists_what_the_host_has() {
    let bare = with_problem(disk("sdb", &[]), TableProblem::Invalid(TableError::Absent));
    let broken = with_problem(disk("sdc", &[]), TableProblem::Unreadable(io::Error::other("no medium")));
    let disks = vec![disk("sda", &[(PartitionType::EFI_SYSTEM, "EFI")]), bare, broken, disk("sdd", &[])];
    let text = select(disks).unwrap_err().to_string();
    let expected = "can't find a partition with type 50f0da07-f692-49a7-8a4c-25a207fd3f25 and label \"data\": found \
                    /dev/sda1 (type c12a7328-f81f-11d2-ba4b-00a0c93ec93b, label \"EFI\"), /dev/sdb (no GPT), \
                    /dev/sdc (can't be read: no medium), /dev/sdd (a GPT without partitions)";
    assert_eq!(text, expected);
    assert!(select(Vec::new()).unwrap_err().to_string().ends_with("the host has no disk"));
    let many = (0..40).map(|number| disk(&format!("sd{number}"), &[])).collect();
    assert!(select(many).unwrap_err().to_string().ends_with(", 8 more"));
}

#[test]
fn a_disk_whose_table_can_not_be_judged_makes_the_answer_uncertain() {
    let data = || disk("sda", &[(PartitionType::NODEKEEL_DATA, "data")]);
    let damaged = || TableError::Damaged { primary: CopyFault::Absent, backup: CopyFault::HeaderChecksum };
    let differing = TableError::Disagreement { what: "entries" };
    for error in [damaged(), differing] {
        let other = with_problem(disk("sdb", &[]), TableProblem::Invalid(error));
        let uncertain = select(vec![data(), other]).unwrap_err();
        assert!(
            matches!(&uncertain, PartitionError::Table { disk, .. } if disk == "/dev/sdb"),
            "{uncertain:?}"
        );
    }
    let unreadable = || TableProblem::Unreadable(io::Error::from_raw_os_error(5));
    let other = with_problem(disk("sdb", &[(PartitionType::EFI_SYSTEM, "")]), unreadable());
    let uncertain = select(vec![data(), other]).unwrap_err();
    assert!(matches!(uncertain, PartitionError::Device { .. }), "{uncertain:?}");
    // A drive without partitions can't have it.
    select(vec![data(), with_problem(disk("sdb", &[]), unreadable())]).unwrap();
}

#[test]
fn the_kernel_and_the_table_have_to_agree_about_the_partition() {
    let data = || disk("sda", &[(PartitionType::NODEKEEL_DATA, "data")]);
    // The kernel has not noticed a growth yet.
    let mut growing = data();
    growing.disk.partitions[0].size_bytes -= 512;
    assert_eq!(select(vec![growing]).unwrap().size_bytes, 63 * 512);
    let changes: [fn(&mut KernelDisk); 3] = [
        |disk| disk.partitions.clear(),
        |disk| disk.partitions[0].start_bytes += 512,
        |disk| disk.partitions[0].size_bytes += 512,
    ];
    for change in changes {
        let mut other = data();
        change(&mut other.disk);
        let error = select(vec![other]).unwrap_err();
        assert!(matches!(error, PartitionError::KernelView { number: 1, .. }), "{error:?}");
    }
}

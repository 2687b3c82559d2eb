use proptest::prelude::*;

use super::super::image::{TableImage, check_growth, encode_entry};
use super::super::judgement::CopyFault;
use super::super::partition_type::PartitionType;
use super::*;

const MIB: u64 = 1 << 20;

/// A disk of 4 MiB with an ESP of 1 MiB, and the rest but for a few blocks as data, which has the first number.
fn image(block_bytes: u64) -> TableImage {
    let geometry = DiskGeometry { block_bytes, blocks: 4 * MIB / block_bytes };
    let mib = MIB / block_bytes;
    let data = encode_entry(PartitionType::NODEKEEL_DATA, (2 * mib, 3 * mib - 1), "data");
    let esp = encode_entry(PartitionType::EFI_SYSTEM, (mib, 2 * mib - 1), "EFI");
    TableImage::new(geometry, &[data, esp])
}

#[test]
fn the_last_partition_grows_to_whole_mebibytes_and_the_old_backup_is_erased() {
    for block_bytes in [512, 4096] {
        let mut grown = image(block_bytes).grown_by(6 * MIB / block_bytes);
        let old_backup = (4 * MIB - block_bytes) as usize;
        assert_eq!(&grown.bytes[old_backup..][..8], b"EFI PART");
        let plan = grown.plan_growth(1).unwrap();
        assert_eq!((plan.writes.len(), plan.size_bytes), (5, 7 * MIB));
        grown.apply(&plan.writes);
        let table = grown.read_table().unwrap();
        assert_eq!(table.copies, TableCopies::Both);
        let data = table.partitions().next().unwrap();
        assert_eq!((data.last_block + 1) * block_bytes, 9 * MIB);
        assert!(
            grown.bytes[MIB as usize..10 * MIB as usize - 40 * 512 - 5 * 4096].iter().all(|byte| *byte == 0)
        );
        // It has all of the disk.
        let complete = grown.plan_growth(1).unwrap();
        assert_eq!((complete.writes.len(), complete.size_bytes), (0, 7 * MIB));
    }
}

#[test]
fn a_disk_that_has_not_grown_or_hardly_has_the_same_table() {
    for blocks in [0, 1, 20, 32] {
        let plan = image(512).grown_by(blocks).plan_growth(1).unwrap();
        assert_eq!((plan.writes.len(), plan.size_bytes), (0, MIB), "{blocks} blocks");
    }
}

#[test]
fn what_is_not_plain_is_refused_by_name() {
    let grown = || image(512).grown_by(8192);
    assert_eq!(grown().plan_growth(2), Err(GrowthRefusal::NotLast { last: 1 }));
    assert_eq!(grown().plan_growth(3), Err(GrowthRefusal::Absent));

    let mut hybrid = grown();
    hybrid.bytes[446 + 16 + 4] = 0x0c;
    assert_eq!(hybrid.plan_growth(1), Err(GrowthRefusal::HybridMbr));
    hybrid.bytes[..512].fill(0);
    assert_eq!(hybrid.plan_growth(1), Err(GrowthRefusal::HybridMbr));

    let mut damaged = grown();
    damaged.bytes[4 * MIB as usize - 512] = 0;
    let copies = TableCopies::Primary { backup: CopyFault::Absent };
    assert_eq!(damaged.plan_growth(1), Err(GrowthRefusal::Copies(copies)));

    let foreign = grown();
    let beside = DiskSurroundings { table_at_end: Some(Uuid([7; 16])), ..foreign.surroundings() };
    let table = foreign.read_table().unwrap();
    assert_eq!(plan_growth(&table, &beside, 1), Err(GrowthRefusal::ForeignBackup));
    // The copy of an earlier attempt is no other table.
    let own = DiskSurroundings { table_at_end: Some(table.header.disk), ..beside };
    assert_eq!(plan_growth(&table, &own, 1).unwrap().writes.len(), 5);

    let geometry = image(512).geometry;
    for range in [(2000, 5000), (5000, 4000), (0, 3000), (3000, 90_000)] {
        let overlap = [
            encode_entry(PartitionType::EFI_SYSTEM, (1000, 2999), "EFI"),
            encode_entry(PartitionType::NODEKEEL_DATA, range, "data"),
        ];
        let refused = TableImage::new(geometry, &overlap).grown_by(8192).plan_growth(2);
        assert!(matches!(refused, Err(GrowthRefusal::Overlap { .. })), "{range:?}: {refused:?}");
    }
}

/// A member of a mirror has its table, and the array's metadata behind what looks like the end of a smaller disk.
#[test]
fn data_at_the_end_of_the_disk_are_not_overwritten() {
    for block_bytes in [512, 4096] {
        let grown = image(block_bytes).grown_by(8 * MIB / block_bytes);
        for from_end in [1, 512, 8 << 10, 64 << 10, MIB] {
            let mut member = grown.clone();
            let offset = 12 * MIB - from_end;
            member.bytes[offset as usize] = 1;
            assert_eq!(member.plan_growth(1), Err(GrowthRefusal::DataAtEnd { offset }), "{from_end}");
        }
        // The old backup copy is none, and neither is what an interrupted growth has written.
        let mut hardly = image(block_bytes).grown_by(MIB / 2 / block_bytes);
        let plan = hardly.plan_growth(1).unwrap();
        assert_eq!(plan.writes.len(), 5);
        hardly.write_at(plan.writes[0].offset, &plan.writes[0].bytes[..4096]);
        assert_eq!(hardly.plan_growth(1).unwrap(), plan);
    }
}

#[test]
fn an_interrupted_growth_is_known_and_nothing_else_is_taken_for_it() {
    let grown = image(512).grown_by(8192);
    let plan = grown.plan_growth(1).unwrap();
    let mut cut = grown.clone();
    cut.apply(&plan.writes[..3]);
    let table = cut.read_table().unwrap();
    assert_eq!(table.copies, TableCopies::Backup { primary: CopyFault::InterruptedGrowth });
    assert_eq!(plan_resumption(&table), plan.writes[3..]);
    // Where the old backup copy was, something else is by now.
    let mut used = cut.clone();
    used.write_at(4 * MIB - 512, &[7; 512]);
    assert_eq!(plan_resumption(&used.read_table().unwrap()), plan.writes[3..4]);
    // Another entry of the primary copy is wrong.
    cut.bytes[2 * 512 + 128 + 56] ^= 1;
    let table = cut.read_table().unwrap();
    assert_eq!(table.copies, TableCopies::Backup { primary: CopyFault::EntryChecksum });
    assert_eq!(plan_resumption(&table), []);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Cut off anywhere, a growth leaves a readable table with all partitions, and is completed by a repetition.
    #[test]
    fn a_growth_cut_off_at_any_write_keeps_all_partitions_and_resumes(
        is_large: bool,
        lengths in prop::collection::vec((1..600_u64, 0..100_u64), 1..5),
        number in 1..6_u32,
        more in 0..10_000_u64,
    ) {
        let block_bytes = if is_large { 4096 } else { 512 };
        let mut free_from = 40;
        let entries: Vec<_> = lengths.iter().map(|(length, gap)| {
            let first = free_from + gap;
            free_from = first + length;
            encode_entry(PartitionType::NODEKEEL_DATA, (first, free_from - 1), "data")
        }).collect();
        let geometry = DiskGeometry { block_bytes, blocks: free_from + 40 };
        let grown = TableImage::new(geometry, &entries).grown_by(if is_large { more / 8 } else { more });
        let has_grown = check_growth(&grown, number);
        prop_assert!(!has_grown || number as usize == entries.len());
    }
}

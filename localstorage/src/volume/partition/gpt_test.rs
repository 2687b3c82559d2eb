use proptest::prelude::*;

use super::super::image::{TableImage, encode_entry};
use super::*;

const KINDS: [u64; 2] = [512, 4096];

fn image(block_bytes: u64) -> TableImage {
    let geometry = DiskGeometry { block_bytes, blocks: 512 };
    let esp = encode_entry(PartitionType::EFI_SYSTEM, (64, 127), "EFI");
    let data = encode_entry(PartitionType::NODEKEEL_DATA, (128, 255), "date\u{e9}\u{1f4be}");
    TableImage::new(geometry, &[esp, [0; ENTRY_BYTES], data])
}

fn labels(table: &PartitionTable) -> Vec<(u32, String)> {
    table.partitions().map(|partition| (partition.number, partition.label)).collect()
}

fn flip(image: &mut TableImage, block: u64, byte: usize) {
    image.bytes[(block * image.geometry.block_bytes) as usize + byte] ^= 1;
}

/// Puts the right checksum over the header in this block.
fn seal(image: &mut TableImage, block: u64) {
    let at = (block * image.geometry.block_bytes) as usize;
    let checksum = header_checksum(&image.bytes[at..], MIN_HEADER_BYTES);
    image.bytes[at + 16..at + 20].copy_from_slice(&checksum.to_le_bytes());
}

#[test]
fn both_copies_are_read_on_disks_with_small_and_large_blocks() {
    for block_bytes in KINDS {
        let table = image(block_bytes).read_table().unwrap();
        assert_eq!(table.copies, TableCopies::Both);
        assert_eq!(labels(&table), [(1, "EFI".into()), (3, "date\u{e9}\u{1f4be}".into())]);
        let data = table.partitions().nth(1).unwrap();
        assert_eq!(
            (data.partition_type, data.first_block, data.last_block),
            (PartitionType::NODEKEEL_DATA, 128, 255)
        );
    }
}

#[test]
fn the_valid_copy_is_used_and_the_fault_of_the_other_one_is_named() {
    for block_bytes in KINDS {
        let last = 511;
        for (byte, is_sealed, fault) in [
            (0, false, CopyFault::Absent),
            (60, false, CopyFault::HeaderChecksum),
            (88, true, CopyFault::EntryChecksum),
            (24, true, CopyFault::Field("place")),
            (84, true, CopyFault::Field("size of entries")),
            (10, true, CopyFault::Field("revision")),
        ] {
            for (block, expected) in
                [(1, TableCopies::Backup { primary: fault }), (last, TableCopies::Primary { backup: fault })]
            {
                let mut image = image(block_bytes);
                flip(&mut image, block, byte);
                is_sealed.then(|| seal(&mut image, block));
                let table = image.read_table().unwrap();
                assert_eq!((labels(&table).len(), &table.copies), (2, &expected));
                assert!(table.copies.to_string().ends_with("repair it with gdisk"), "{}", table.copies);
            }
        }
    }
}

#[test]
fn two_damaged_copies_and_two_different_ones_are_errors() {
    let mut both = image(512);
    flip(&mut both, 1, 60);
    flip(&mut both, 511, 0);
    let (primary, backup) = (CopyFault::HeaderChecksum, CopyFault::Absent);
    assert_eq!(both.read_table(), Err(TableError::Damaged { primary, backup }));

    for (byte, what) in [(56, "disk GUIDs"), (40, "usable blocks"), (33, "places of the primary copy")] {
        let mut other = image(512);
        flip(&mut other, 511, byte);
        seal(&mut other, 511);
        assert_eq!(other.read_table(), Err(TableError::Disagreement { what }));
    }
    // Both copies have a right checksum over different labels.
    let mut other = image(512);
    let geometry = other.geometry;
    let entry = encode_entry(PartitionType::EFI_SYSTEM, (64, 127), "other");
    let backup = TableImage::new(geometry, &[entry]);
    let end = 400 * 512;
    other.write_at(end as u64, &backup.bytes[end..]);
    assert_eq!(other.read_table(), Err(TableError::Disagreement { what: "entries" }));
}

#[test]
fn a_disk_without_a_table_and_one_of_other_blocks_are_distinguished() {
    for (table, disk) in [(512, 4096), (4096, 512)] {
        let mut other = image(table);
        other.geometry = DiskGeometry { block_bytes: disk, blocks: other.bytes.len() as u64 / disk };
        assert_eq!(other.read_table(), Err(TableError::BlockSize { table, disk }));
        other.bytes.fill(0);
        assert_eq!(other.read_table(), Err(TableError::Absent));
    }
}

#[test]
fn the_backup_copy_of_a_disk_that_has_grown_is_found_and_of_one_that_has_shrunk_is_not() {
    let table = image(512).grown_by(100).read_table().unwrap();
    assert_eq!((table.copies.clone(), labels(&table).len()), (TableCopies::Both, 2));
    let mut shrunk = image(512);
    shrunk.geometry.blocks -= 40;
    let error = shrunk.read_table().unwrap_err();
    assert!(matches!(error, TableError::Damaged { primary: CopyFault::Field(_), .. }), "{error:?}");
    assert!(error.to_string().contains("beyond the end of the disk"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_changed_bit_in_one_copy_changes_nothing_that_is_read(
        is_large: bool,
        is_backup: bool,
        place in 0.0..1.0_f64,
        bit in 0..8_u32,
    ) {
        let original = image(KINDS[usize::from(is_large)]);
        let geometry = original.geometry;
        // The header, and the array of entries.
        let array = 128 * ENTRY_BYTES;
        let last = geometry.last_block() * geometry.block_bytes;
        let header = if is_backup { last } else { geometry.block_bytes } as usize;
        let entries = if is_backup { last as usize - array } else { 2 * geometry.block_bytes as usize };
        let offset = ((MIN_HEADER_BYTES + array) as f64 * place) as usize;
        let at = if offset < MIN_HEADER_BYTES { header + offset } else { entries + offset - MIN_HEADER_BYTES };
        let mut changed = original.clone();
        changed.bytes[at] ^= 1 << bit;
        let (before, after) = (original.read_table().unwrap(), changed.read_table().unwrap());
        prop_assert_ne!(&after.copies, &TableCopies::Both);
        prop_assert!(before.partitions().eq(after.partitions()));
    }

    #[test]
    fn arbitrary_tables_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..2048)) {
        fuzz_partition_table(&bytes);
    }
}

//! The growth of the last partition with its disk: which blocks of the partition table are written, in which order.
//!
//! ```text
//!  write                            a power cut after it leaves
//!  1 entries of the new backup      the old table, both copies: the new backup is not referred to yet
//!  2 header of the new backup       the same
//!  3 the block of the grown entry   a primary copy with a wrong checksum, known as an interrupted growth
//!  4 header of the primary copy     the new table, both copies
//!  5 zeros over the old backup      the same
//! ```
//!
//! Writes 3 and 4 are one block each, which a disk writes completely or not at all.

use super::super::uuid::Uuid;
use super::error::GrowthRefusal;
use super::gpt::{
    DiskGeometry, ENTRY_BYTES, HeaderChange, PRIMARY_BLOCK, PartitionTable, TableEntry, TableHeader,
};
use super::judgement::TableCopies;

/// A partition ends at a multiple of this many bytes from its start, as tools place them; each file system and each
/// encryption has whole blocks then.
const ALIGNMENT: u64 = 1 << 20;

/// The bytes at the end of a disk that have to be free.
pub(super) const TAIL_BYTES: u64 = 1 << 20;

/// The number of writes that make the new backup copy.
const NEW_BACKUP_WRITES: usize = 2;

/// The offset of the last block number within an entry.
const LAST_BLOCK_AT: usize = 40;

/// Blocks to write and to sync before the next one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TableWrite {
    pub(super) offset: u64,
    pub(super) bytes: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GrowthPlan {
    /// The writes, in their order; none if the table has the partition's final size.
    pub(super) writes: Vec<TableWrite>,
    /// The size of the partition in the table after them, in bytes.
    pub(super) size_bytes: u64,
}

/// The surroundings of the table on the disk.
#[derive(Clone, Debug)]
pub(super) struct DiskSurroundings {
    pub(super) first_sector: Vec<u8>,
    /// The GUID of the table that has a copy in the last block of the disk.
    pub(super) table_at_end: Option<Uuid>,
    /// The last MiB of the disk, or all of a smaller one.
    pub(super) tail: Vec<u8>,
}

/// Plans the growth of a partition, which has to be the last one.
pub(super) fn plan_growth(
    table: &PartitionTable,
    surroundings: &DiskSurroundings,
    number: u32,
) -> Result<GrowthPlan, GrowthRefusal> {
    let geometry = table.geometry;
    let size_of = |first: u64, last: u64| (last - first + 1) * geometry.block_bytes;
    let grown = check_layout(table, number)?;
    let size_bytes = size_of(grown.first_block, grown.last_block);
    // The new backup copy is complete, so the size is decided: only the last writes are missing.
    if table.outdated.is_some() {
        return Ok(GrowthPlan { writes: plan_resumption(table), size_bytes });
    }
    let unchanged = GrowthPlan { writes: Vec::new(), size_bytes };
    let TableCopies::Both = table.copies else { return Err(GrowthRefusal::Copies(table.copies.clone())) };
    let array_blocks = geometry.entry_blocks(table.header.entry_count);
    let backup_entries = geometry.last_block() - array_blocks;
    // The new backup copy must not overwrite the old one, which is needed until the primary copy refers to the new one.
    if backup_entries <= table.header.alternate {
        return Ok(unchanged);
    }
    let last_usable = backup_entries - 1;
    let room = last_usable + 1 - grown.first_block;
    let aligned = room * geometry.block_bytes / ALIGNMENT * ALIGNMENT / geometry.block_bytes;
    let last_block = (grown.first_block + aligned).saturating_sub(1);
    if last_block <= grown.last_block {
        return Ok(unchanged);
    }
    // A hybrid MBR lists partitions itself, and would contradict the grown GPT.
    if !is_protective_mbr(&surroundings.first_sector) {
        return Err(GrowthRefusal::HybridMbr);
    }
    // Another table has a copy at the place of the new backup copy.
    if surroundings.table_at_end.is_some_and(|disk| disk != table.header.disk) {
        return Err(GrowthRefusal::ForeignBackup);
    }
    let end = NewEnd { last_usable, last_block, backup_entries };
    let writes = table_writes(table, &grown, end);
    match find_data_at_end(table, surroundings, &writes[..NEW_BACKUP_WRITES]) {
        Some(offset) => Err(GrowthRefusal::DataAtEnd { offset }),
        None => Ok(GrowthPlan { writes, size_bytes: size_of(grown.first_block, last_block) }),
    }
}

/// The first byte after the old backup copy, in the last MiB, that is neither zero nor one that an interrupted growth
/// has written. Arrays of disks keep their metadata there, and a member of one looks like a disk that has grown.
fn find_data_at_end(
    table: &PartitionTable,
    surroundings: &DiskSurroundings,
    backup: &[TableWrite],
) -> Option<u64> {
    let DiskGeometry { block_bytes, blocks } = table.geometry;
    let start = blocks * block_bytes - surroundings.tail.len() as u64;
    let mut tail = surroundings.tail.clone();
    let is_ours = surroundings.table_at_end == Some(table.header.disk);
    for write in backup {
        let place = &mut tail[(write.offset - start) as usize..][..write.bytes.len()];
        for (byte, written) in place.iter_mut().zip(&write.bytes) {
            // A killed call has written its copy here: completely if the header is ours, or else a part of these bytes.
            if is_ours || *byte == *written {
                *byte = 0;
            }
        }
    }
    let behind = ((table.header.alternate + 1) * block_bytes).saturating_sub(start) as usize;
    let data = tail[behind..].iter().position(|byte| *byte != 0)?;
    Some(start + (behind + data) as u64)
}

/// The last writes of an interrupted growth; none if no growth was interrupted.
pub(super) fn plan_resumption(table: &PartitionTable) -> Vec<TableWrite> {
    let Some(outdated) = &table.outdated else { return Vec::new() };
    let change = HeaderChange {
        place: PRIMARY_BLOCK,
        alternate: table.geometry.last_block(),
        last_usable: table.header.last_usable,
        entries_block: outdated.entries_block,
    };
    let offset = PRIMARY_BLOCK * table.geometry.block_bytes;
    let header = TableWrite { offset, bytes: outdated.rewrite(&change, &table.entries) };
    // Nothing else is erased: the partition may have data there by now.
    let is_apart = table.has_old_backup && outdated.alternate < table.header.entries_block;
    [Some(header), is_apart.then(|| erasure_of_backup(outdated, table.geometry))]
        .into_iter()
        .flatten()
        .collect()
}

/// The ends of the table and of its last partition.
#[derive(Clone, Copy, Debug)]
struct NewEnd {
    last_usable: u64,
    last_block: u64,
    backup_entries: u64,
}

fn table_writes(table: &PartitionTable, grown: &TableEntry, end: NewEnd) -> Vec<TableWrite> {
    let (geometry, header) = (table.geometry, &table.header);
    let at = |block: u64| block * geometry.block_bytes;
    let mut entries = table.entries.clone();
    let entry = (grown.number as usize - 1) * ENTRY_BYTES;
    entries[entry + LAST_BLOCK_AT..][..8].copy_from_slice(&end.last_block.to_le_bytes());
    let mut array = entries.clone();
    array.resize(at(geometry.entry_blocks(header.entry_count)) as usize, 0);

    let backup_block = geometry.last_block();
    let backup = HeaderChange {
        place: backup_block,
        alternate: PRIMARY_BLOCK,
        last_usable: end.last_usable,
        entries_block: end.backup_entries,
    };
    let primary = HeaderChange {
        place: PRIMARY_BLOCK,
        alternate: backup_block,
        last_usable: end.last_usable,
        entries_block: header.entries_block,
    };
    // One block alone is written, and so completely or not at all.
    let entry_block = entry / geometry.block_bytes as usize;
    let changed =
        array[entry_block * geometry.block_bytes as usize..][..geometry.block_bytes as usize].to_vec();
    vec![
        TableWrite { offset: at(end.backup_entries), bytes: array },
        TableWrite { offset: at(backup_block), bytes: header.rewrite(&backup, &entries) },
        TableWrite { offset: at(header.entries_block + entry_block as u64), bytes: changed },
        TableWrite { offset: at(PRIMARY_BLOCK), bytes: header.rewrite(&primary, &entries) },
        erasure_of_backup(header, geometry),
    ]
}

/// Zeros over the backup copy to which a header refers: it is within the grown partition, which may have to be blank.
/// Blocks that a partition could use are left alone.
fn erasure_of_backup(header: &TableHeader, geometry: DiskGeometry) -> TableWrite {
    let entries = header.alternate.saturating_sub(geometry.entry_blocks(header.entry_count));
    let first = entries.max(header.last_usable + 1).min(header.alternate);
    let length = (header.alternate + 1 - first) * geometry.block_bytes;
    TableWrite { offset: first * geometry.block_bytes, bytes: vec![0; length as usize] }
}

/// Checks that the partitions are in order, and that this one is the last.
fn check_layout(table: &PartitionTable, number: u32) -> Result<TableEntry, GrowthRefusal> {
    let header = &table.header;
    let mut partitions: Vec<_> = table.partitions().collect();
    partitions.sort_by_key(|partition| partition.first_block);
    let mut free_from = header.first_usable;
    for partition in &partitions {
        let is_in_order = partition.first_block >= free_from
            && partition.first_block <= partition.last_block
            && partition.last_block <= header.last_usable;
        if !is_in_order {
            return Err(GrowthRefusal::Overlap { number: partition.number });
        }
        free_from = partition.last_block + 1;
    }
    if partitions.iter().all(|partition| partition.number != number) {
        return Err(GrowthRefusal::Absent);
    }
    match partitions.pop() {
        Some(last) if last.number == number => Ok(last),
        last => Err(GrowthRefusal::NotLast { last: last.map_or(number, |last| last.number) }),
    }
}

/// Returns whether a sector has one partition of type 0xEE, and no other. *Source:* UEFI specification 2.10, 5.2.3.
fn is_protective_mbr(sector: &[u8]) -> bool {
    const TABLE_AT: usize = 446;
    const RECORD_BYTES: usize = 16;
    const TYPE_AT: usize = 4;
    let Some(records) = sector.get(TABLE_AT..TABLE_AT + 4 * RECORD_BYTES) else { return false };
    let types: Vec<u8> = records.chunks_exact(RECORD_BYTES).map(|record| record[TYPE_AT]).collect();
    let used: Vec<u8> = types.into_iter().filter(|kind| *kind != 0).collect();
    used == [0xee] && sector.get(510..512) == Some(b"\x55\xaa")
}

#[cfg(test)]
#[path = "growth_test.rs"]
mod tests;

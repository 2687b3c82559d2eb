//! The partition table of a disk: both copies are read, checked, and compared.
//!
//! *Source:* UEFI specification 2.10, 5.3; Linux `block/partitions/efi.c`, whose checks of a copy these are.

use std::io;

use super::super::uuid::Uuid;
use super::judgement::{CopyFault, TableCopies, TableError};
use super::partition_type::{PartitionType, guid_from_gpt_bytes};

const SIGNATURE: &[u8] = b"EFI PART";
const REVISION_1: u32 = 0x0001_0000;
const MIN_HEADER_BYTES: usize = 92;
/// The size of an entry. The kernel accepts no other.
pub(super) const ENTRY_BYTES: usize = 128;
/// Tools make 128 entries; a table of more is not read into memory.
const MAX_ENTRIES: u32 = 4096;
const LABEL_UNITS: usize = 36;
pub(super) const PRIMARY_BLOCK: u64 = 1;

/// The units in which a disk is addressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DiskGeometry {
    /// The size of a logical block, in bytes: 512, or 4096 on a 4Kn disk.
    pub(super) block_bytes: u64,
    /// The number of blocks.
    pub(super) blocks: u64,
}

impl DiskGeometry {
    /// None for a disk without room for a table, or with blocks of another size.
    pub(super) fn try_new(size_bytes: u64, block_bytes: u64) -> Option<DiskGeometry> {
        let is_known = block_bytes.is_power_of_two() && (512..=65_536).contains(&block_bytes);
        let blocks = if is_known { size_bytes / block_bytes } else { 0 };
        (blocks > 8).then_some(DiskGeometry { block_bytes, blocks })
    }

    pub(super) fn last_block(self) -> u64 {
        self.blocks - 1
    }

    /// The number of blocks that hold this many entries.
    pub(super) fn entry_blocks(self, entry_count: u32) -> u64 {
        (u64::from(entry_count) * ENTRY_BYTES as u64).div_ceil(self.block_bytes)
    }
}

/// Reads bytes of a disk: from this offset, that many.
pub(super) type ReadDisk<'a> = &'a dyn Fn(u64, usize) -> io::Result<Vec<u8>>;

/// One partition, as an entry of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TableEntry {
    /// The number, from 1.
    pub(super) number: u32,
    pub(super) partition_type: PartitionType,
    pub(super) first_block: u64,
    /// Part of the partition.
    pub(super) last_block: u64,
    pub(super) label: String,
}

/// A header whose own fields are correct.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TableHeader {
    /// The whole block, which a growth writes again with other values.
    pub(super) block: Vec<u8>,
    pub(super) alternate: u64,
    pub(super) first_usable: u64,
    pub(super) last_usable: u64,
    pub(super) disk: Uuid,
    pub(super) entries_block: u64,
    pub(super) entry_count: u32,
    entries_checksum: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PartitionTable {
    pub(super) geometry: DiskGeometry,
    pub(super) copies: TableCopies,
    /// The header of the primary copy; of the backup copy if that alone is correct.
    pub(super) header: TableHeader,
    /// The bytes of all entries.
    pub(super) entries: Vec<u8>,
    /// The primary header of before an interrupted growth, whose other writes are complete.
    pub(super) outdated: Option<TableHeader>,
    /// True if the backup copy to which that header refers is still there.
    pub(super) has_old_backup: bool,
}

impl PartitionTable {
    /// Reads and judges both copies. On a disk that has grown, the primary copy names the block of the backup copy.
    pub(super) fn read(
        geometry: DiskGeometry,
        read: ReadDisk<'_>,
    ) -> io::Result<Result<PartitionTable, TableError>> {
        let primary = TableCopy::read(geometry, PRIMARY_BLOCK, read)?;
        let backup_block = primary.correct_header().map_or(geometry.last_block(), |header| header.alternate);
        let backup = TableCopy::read(geometry, backup_block, read)?;
        if primary.fault == Some(CopyFault::Absent) && backup.fault == Some(CopyFault::Absent) {
            return find_other_block_size(geometry, read).map(Err);
        }
        let mut judged = judge_copies(geometry, primary, backup);
        if let Ok(table) = &mut judged
            && let Some(outdated) = &table.outdated
        {
            // A resumed growth erases the old backup copy only if it is still there.
            let old = TableCopy::read(geometry, outdated.alternate, read)?;
            table.has_old_backup = old.correct_header().is_some_and(|header| header.disk == outdated.disk);
        }
        Ok(judged)
    }

    /// All partitions, in the order of their numbers.
    pub(super) fn partitions(&self) -> impl Iterator<Item = TableEntry> + '_ {
        (1..)
            .zip(self.entries.chunks_exact(ENTRY_BYTES))
            .filter_map(|(number, bytes)| parse_entry(number, bytes))
    }
}

fn judge_copies(
    geometry: DiskGeometry,
    primary: TableCopy,
    backup: TableCopy,
) -> Result<PartitionTable, TableError> {
    let outdated = primary.header_before_growth_to(&backup);
    let fault = if outdated.is_some() { Some(CopyFault::InterruptedGrowth) } else { primary.fault };
    let (copies, copy) = match (fault, backup.fault) {
        (None, None) => {
            if let Some(what) = primary.difference(&backup) {
                // Both copies are valid: no rule tells which one is right.
                return Err(TableError::Disagreement { what });
            }
            (TableCopies::Both, primary)
        }
        (None, Some(backup)) => (TableCopies::Primary { backup }, primary),
        (Some(primary), None) => (TableCopies::Backup { primary }, backup),
        (Some(primary), Some(backup)) => return Err(TableError::Damaged { primary, backup }),
    };
    let TableCopy { header: Some(header), entries, .. } = copy else {
        unreachable!("a copy without fault has a header");
    };
    Ok(PartitionTable { geometry, copies, header, entries, outdated, has_old_backup: false })
}

/// A table of 4Kn disks on one with small blocks, or the reverse.
fn find_other_block_size(geometry: DiskGeometry, read: ReadDisk<'_>) -> io::Result<TableError> {
    let disk = geometry.block_bytes;
    for table in [512, 4096] {
        if table != disk && read(table, SIGNATURE.len())? == SIGNATURE {
            return Ok(TableError::BlockSize { table, disk });
        }
    }
    Ok(TableError::Absent)
}

/// One copy, as found at its place.
#[derive(Debug)]
struct TableCopy {
    /// None if it is not correct in itself.
    header: Option<TableHeader>,
    entries: Vec<u8>,
    fault: Option<CopyFault>,
}

impl TableCopy {
    fn read(geometry: DiskGeometry, at: u64, read: ReadDisk<'_>) -> io::Result<TableCopy> {
        let unusable = |fault| TableCopy { header: None, entries: Vec::new(), fault: Some(fault) };
        // The primary copy names this place, which may be any number.
        if at >= geometry.blocks {
            return Ok(unusable(CopyFault::Field("place beyond the end of the disk")));
        }
        let block = read(at * geometry.block_bytes, geometry.block_bytes as usize)?;
        let header = match TableHeader::parse(block, at, geometry) {
            Ok(header) => header,
            Err(fault) => return Ok(unusable(fault)),
        };
        let entries_bytes = header.entry_count as usize * ENTRY_BYTES;
        let entries = read(header.entries_block * geometry.block_bytes, entries_bytes)?;
        let is_correct = crc32fast::hash(&entries) == header.entries_checksum;
        let fault = (!is_correct).then_some(CopyFault::EntryChecksum);
        Ok(TableCopy { header: Some(header), entries, fault })
    }

    fn correct_header(&self) -> Option<&TableHeader> {
        self.header.as_ref().filter(|_| self.fault.is_none())
    }

    fn difference(&self, other: &TableCopy) -> Option<&'static str> {
        let (Some(header), Some(other_header)) = (&self.header, &other.header) else { return None };
        let usable = |header: &TableHeader| (header.first_usable, header.last_usable);
        let cases = [
            (header.disk != other_header.disk, "disk GUIDs"),
            (self.entries != other.entries, "entries"),
            (usable(header) != usable(other_header), "usable blocks"),
            (other_header.alternate != PRIMARY_BLOCK, "places of the primary copy"),
        ];
        cases.into_iter().find_map(|(differs, what)| differs.then_some(what))
    }

    /// The header of this primary copy, if a growth was interrupted right before it wrote the new one: the entries are
    /// those of the new backup copy already, and nothing else is wrong.
    fn header_before_growth_to(&self, backup: &TableCopy) -> Option<TableHeader> {
        let header = self.header.as_ref().filter(|_| self.fault == Some(CopyFault::EntryChecksum))?;
        let grown = backup.correct_header()?;
        let is_grown = header.disk == grown.disk
            && header.last_usable < grown.last_usable
            && header.first_usable == grown.first_usable
            && self.entries == backup.entries;
        is_grown.then(|| header.clone())
    }
}

impl TableHeader {
    /// Parses the block with the header, which is at block `at`.
    pub(super) fn parse(block: Vec<u8>, at: u64, geometry: DiskGeometry) -> Result<TableHeader, CopyFault> {
        let short = |offset: usize| u32::from_le_bytes(array_at(&block, offset));
        let long = |offset: usize| u64::from_le_bytes(array_at(&block, offset));
        if !block.starts_with(SIGNATURE) {
            return Err(CopyFault::Absent);
        }
        let length = short(12) as usize;
        if !(MIN_HEADER_BYTES..=block.len()).contains(&length) {
            return Err(CopyFault::Field("header size"));
        }
        // Before the other fields: those of a damaged header mean nothing.
        if header_checksum(&block, length) != short(16) {
            return Err(CopyFault::HeaderChecksum);
        }
        let header = TableHeader {
            alternate: long(32),
            first_usable: long(40),
            last_usable: long(48),
            disk: guid_from_gpt_bytes(array_at(&block, 56)),
            entries_block: long(72),
            entry_count: short(80),
            entries_checksum: short(88),
            block: Vec::new(),
        };
        let entries_end = header.entries_block.checked_add(geometry.entry_blocks(header.entry_count));
        // As the kernel: the partitions of a table that it rejects have no devices.
        let checks = [
            (short(8) == REVISION_1, "revision"),
            (long(24) == at, "place"),
            (short(84) as usize == ENTRY_BYTES, "size of entries"),
            ((1..=MAX_ENTRIES).contains(&header.entry_count), "number of entries"),
            (
                header.entries_block > 1 && entries_end.is_some_and(|end| end <= geometry.blocks),
                "place of entries",
            ),
            (header.first_usable <= header.last_usable, "range of usable blocks"),
            (header.last_usable < geometry.blocks, "last usable block, beyond the end of the disk"),
        ];
        match checks.into_iter().find(|(is_valid, _)| !is_valid) {
            Some((_, field)) => Err(CopyFault::Field(field)),
            None => Ok(TableHeader { block, ..header }),
        }
    }

    /// The block of this header with other values.
    pub(super) fn rewrite(&self, change: &HeaderChange, entries: &[u8]) -> Vec<u8> {
        let mut block = self.block.clone();
        block[24..32].copy_from_slice(&change.place.to_le_bytes());
        block[32..40].copy_from_slice(&change.alternate.to_le_bytes());
        block[48..56].copy_from_slice(&change.last_usable.to_le_bytes());
        block[72..80].copy_from_slice(&change.entries_block.to_le_bytes());
        block[88..92].copy_from_slice(&crc32fast::hash(entries).to_le_bytes());
        // Last, since this checksum covers all other fields, also the checksum of the entries.
        let length = u32::from_le_bytes(array_at(&block, 12)) as usize;
        let checksum = header_checksum(&block, length);
        block[16..20].copy_from_slice(&checksum.to_le_bytes());
        block
    }
}

/// The changes of a growth in a header.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeaderChange {
    pub(super) place: u64,
    pub(super) alternate: u64,
    pub(super) last_usable: u64,
    pub(super) entries_block: u64,
}

/// The checksum of a header, whose own field counts as zero.
pub(super) fn header_checksum(block: &[u8], length: usize) -> u32 {
    let mut header = block[..length].to_vec();
    header[16..20].fill(0);
    crc32fast::hash(&header)
}

/// None for a free entry.
fn parse_entry(number: u32, bytes: &[u8]) -> Option<TableEntry> {
    let partition_type = PartitionType::from_gpt_bytes(array_at(bytes, 0));
    let units =
        bytes[56..].chunks_exact(2).take(LABEL_UNITS).map(|unit| u16::from_le_bytes([unit[0], unit[1]]));
    let label = char::decode_utf16(units.take_while(|unit| *unit != 0));
    (!partition_type.is_unused()).then(|| TableEntry {
        number,
        partition_type,
        first_block: u64::from_le_bytes(array_at(bytes, 32)),
        last_block: u64::from_le_bytes(array_at(bytes, 40)),
        label: label.map(|unit| unit.unwrap_or(char::REPLACEMENT_CHARACTER)).collect(),
    })
}

/// Bytes within a block or an entry, which are longer.
fn array_at<const LENGTH: usize>(bytes: &[u8], offset: usize) -> [u8; LENGTH] {
    let mut array = [0; LENGTH];
    array.copy_from_slice(&bytes[offset..offset + LENGTH]);
    array
}

/// Checks that no table makes a parser panic, and that a disk that has grown keeps all partitions but the last one:
/// with arbitrary bytes as a disk, and as the entries of a correct table.
///
/// # Panics
/// If the check fails.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_partition_table(bytes: &[u8]) {
    super::image::fuzz_growth(bytes);
}

#[cfg(test)]
#[path = "gpt_test.rs"]
mod tests;

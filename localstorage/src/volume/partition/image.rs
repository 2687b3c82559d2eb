//! Disk images with a partition table, for tests and the fuzzer.

use super::error::GrowthRefusal;
use super::gpt::{DiskGeometry, ENTRY_BYTES, PRIMARY_BLOCK, PartitionTable, header_checksum};
use super::growth::{DiskSurroundings, GrowthPlan, TAIL_BYTES, TableWrite, plan_growth, plan_resumption};
use super::judgement::TableError;
#[cfg(test)]
use super::partition_type::PartitionType;

const ENTRY_COUNT: u32 = 128;
const DISK_GUID: [u8; 16] = *b"a disk's GUID   ";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TableImage {
    pub(super) geometry: DiskGeometry,
    pub(super) bytes: Vec<u8>,
}

impl TableImage {
    /// A disk of zeros with both copies of a table that has these entries.
    pub(super) fn new(geometry: DiskGeometry, entries: &[[u8; ENTRY_BYTES]]) -> TableImage {
        let bytes = vec![0; (geometry.blocks * geometry.block_bytes) as usize];
        let mut image = TableImage { geometry, bytes };
        // A protective MBR: one partition of type 0xEE, and the boot signature.
        image.bytes[446 + 4] = 0xee;
        image.bytes[510..512].copy_from_slice(b"\x55\xaa");
        let mut array = entries.concat();
        array.resize(ENTRY_COUNT as usize * ENTRY_BYTES, 0);
        let last = geometry.last_block();
        let blocks = geometry.entry_blocks(ENTRY_COUNT);
        image.write_copy(&array, [PRIMARY_BLOCK, last, 2]);
        image.write_copy(&array, [last, PRIMARY_BLOCK, last - blocks]);
        image
    }

    fn write_copy(&mut self, array: &[u8], [place, alternate, entries_block]: [u64; 3]) {
        let blocks = self.geometry.entry_blocks(ENTRY_COUNT);
        let (first_usable, last_usable) = (2 + blocks, self.geometry.last_block() - blocks - 1);
        let mut header = vec![0; self.geometry.block_bytes as usize];
        let fields: [&[u8]; 13] = [
            b"EFI PART",
            &0x0001_0000_u32.to_le_bytes(),
            &92_u32.to_le_bytes(),
            &[0; 8],
            &place.to_le_bytes(),
            &alternate.to_le_bytes(),
            &first_usable.to_le_bytes(),
            &last_usable.to_le_bytes(),
            &DISK_GUID,
            &entries_block.to_le_bytes(),
            &ENTRY_COUNT.to_le_bytes(),
            &(ENTRY_BYTES as u32).to_le_bytes(),
            &crc32fast::hash(array).to_le_bytes(),
        ];
        let fields = fields.concat();
        header[..fields.len()].copy_from_slice(&fields);
        let checksum = header_checksum(&header, fields.len());
        header[16..20].copy_from_slice(&checksum.to_le_bytes());
        self.write_at(place * self.geometry.block_bytes, &header);
        self.write_at(entries_block * self.geometry.block_bytes, array);
    }

    pub(super) fn write_at(&mut self, offset: u64, bytes: &[u8]) {
        self.bytes[offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    pub(super) fn read_table(&self) -> Result<PartitionTable, TableError> {
        let read = |offset: u64, length: usize| Ok(self.bytes[offset as usize..][..length].to_vec());
        PartitionTable::read(self.geometry, &read).expect("an image is readable")
    }

    /// The same disk with more blocks.
    pub(super) fn grown_by(&self, blocks: u64) -> TableImage {
        let mut image = self.clone();
        image.geometry.blocks += blocks;
        image.bytes.resize((image.geometry.blocks * image.geometry.block_bytes) as usize, 0);
        image
    }

    pub(super) fn plan_growth(&self, number: u32) -> Result<GrowthPlan, GrowthRefusal> {
        plan_growth(&self.read_table().expect("the table is valid"), &self.surroundings(), number)
    }

    pub(super) fn surroundings(&self) -> DiskSurroundings {
        let tail = self.bytes.len().saturating_sub(TAIL_BYTES as usize);
        DiskSurroundings {
            first_sector: self.bytes[..512].to_vec(),
            table_at_end: None,
            tail: self.bytes[tail..].to_vec(),
        }
    }

    pub(super) fn apply(&mut self, writes: &[TableWrite]) {
        writes.iter().for_each(|write| self.write_at(write.offset, &write.bytes));
    }

    /// Applies the first half of the blocks of a write.
    fn apply_half(&mut self, write: &TableWrite) {
        let block_bytes = self.geometry.block_bytes as usize;
        let half = write.bytes.len() / block_bytes / 2 * block_bytes;
        self.write_at(write.offset, &write.bytes[..half]);
    }
}

/// An entry with a type, the first and the last block, and a label.
#[cfg(test)]
pub(super) fn encode_entry(
    partition_type: PartitionType,
    (first_block, last_block): (u64, u64),
    label: &str,
) -> [u8; ENTRY_BYTES] {
    let mut entry = [0; ENTRY_BYTES];
    entry[..16].copy_from_slice(&partition_type.to_gpt_bytes());
    entry[16] = 1;
    entry[32..40].copy_from_slice(&first_block.to_le_bytes());
    entry[40..48].copy_from_slice(&last_block.to_le_bytes());
    for (unit, place) in label.encode_utf16().zip(entry[56..].chunks_exact_mut(2)) {
        place.copy_from_slice(&unit.to_le_bytes());
    }
    entry
}

/// Checks the growth of a partition of a disk that has grown, cut off before each write, and in the middle of those of
/// several blocks: the table is always readable, no other partition changes, and a repetition completes it. Returns
/// whether it has grown.
pub(super) fn check_growth(image: &TableImage, number: u32) -> bool {
    let before: Vec<_> = image.read_table().expect("the table is valid").partitions().collect();
    let Ok(plan) = image.plan_growth(number) else { return false };
    let mut complete = image.clone();
    complete.apply(&plan.writes);
    let after = complete.read_table().expect("the table is valid");
    for cut in 0..=plan.writes.len() {
        for is_torn in [false, true] {
            let mut found = image.clone();
            found.apply(&plan.writes[..cut]);
            plan.writes.get(cut).filter(|_| is_torn).into_iter().for_each(|write| found.apply_half(write));
            let table = found.read_table().expect("the table is readable after a cut");
            for (old, new) in before.iter().zip(table.partitions()) {
                let is_grown = old.number == number && new.last_block >= old.last_block;
                assert!(*old == new || is_grown, "{old:?} became {new:?} after {cut} writes");
            }
            found.apply(&plan_resumption(&table));
            let repeated = found.plan_growth(number).expect("a repetition is not rejected");
            found.apply(&repeated.writes);
            assert_eq!(found.read_table().as_ref(), Ok(&after), "{cut} writes, and a repetition");
        }
    }
    !plan.writes.is_empty()
}

/// See `fuzz_partition_table`.
pub(super) fn fuzz_growth(bytes: &[u8]) {
    for block_bytes in [512, 4096] {
        let mut raw = bytes.to_vec();
        raw.resize(bytes.len().next_multiple_of(block_bytes as usize).max(16 * block_bytes as usize), 0);
        let geometry = DiskGeometry::try_new(raw.len() as u64, block_bytes).expect("a disk has 16 blocks");
        let _ = TableImage { geometry, bytes: raw }.read_table();

        let mut entries = Vec::new();
        for chunk in bytes.chunks(ENTRY_BYTES).take(ENTRY_COUNT as usize) {
            let mut entry = [0; ENTRY_BYTES];
            entry[..chunk.len()].copy_from_slice(chunk);
            entries.push(entry);
        }
        let geometry = DiskGeometry { block_bytes, blocks: (1 << 20) / block_bytes };
        let grown = TableImage::new(geometry, &entries).grown_by((2 << 20) / block_bytes);
        for number in 1..=4 {
            check_growth(&grown, number);
        }
    }
}

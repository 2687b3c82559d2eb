//! The decision which partition is meant, without IO.

use std::path::{Path, PathBuf};

use super::error::PartitionError;
use super::gpt::{PartitionTable, TableEntry};
use super::judgement::{CopyFault, TableCopies, TableError};
use super::sysfs::{KernelDisk, KernelPartition};
use super::{Partition, PartitionType};

/// The number of disks and partitions that an error lists.
const MAX_LISTED: usize = 32;

#[derive(Debug)]
pub(super) struct ScannedDisk {
    pub(super) disk: KernelDisk,
    pub(super) table: Result<PartitionTable, TableProblem>,
}

/// The reason why a disk's table is not known.
#[derive(Debug)]
pub(super) enum TableProblem {
    Invalid(TableError),
    /// The disk can't be read.
    Unreadable(std::io::Error),
}

/// The type and the label of the wanted partition.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted<'a> {
    pub(super) partition_type: PartitionType,
    pub(super) label: Option<&'a str>,
}

impl Wanted<'_> {
    fn is_met_by(&self, entry: &TableEntry) -> bool {
        entry.partition_type == self.partition_type && self.label.is_none_or(|label| label == entry.label)
    }

    fn describe(&self) -> String {
        let label = self.label.map(|label| format!(" and label {label:?}")).unwrap_or_default();
        format!("type {}{label}", self.partition_type)
    }
}

/// Selects the one partition that is wanted, among these disks.
///
/// A disk whose table can't be judged may have it, too: unless the caller has named the disk to use, such a disk makes
/// the answer uncertain if it has partitions, or had a table.
pub(super) fn select_partition(
    disks: Vec<ScannedDisk>,
    wanted: Wanted<'_>,
    dev: &Path,
) -> Result<Partition, PartitionError> {
    let matches: Vec<(&ScannedDisk, &PartitionTable, TableEntry)> =
        disks.iter().flat_map(|scanned| find_entries(scanned, wanted)).collect();
    // The order of disks may differ at each boot: the first match would be a guess.
    if matches.len() > 1 {
        let partitions = matches.iter().map(|(scanned, _, entry)| partition_path(scanned, entry, dev));
        let (wanted, partitions) = (wanted.describe(), partitions.collect());
        return Err(if is_one_disk(&matches) {
            PartitionError::SameDisk { wanted, partitions }
        } else {
            PartitionError::Ambiguous { wanted, partitions }
        });
    }
    let found = match matches.first() {
        Some((scanned, table, entry)) => Some(check_kernel_view(scanned, table, entry, dev)?),
        None => None,
    };
    let seen = found.is_none().then(|| list_seen(&disks, dev));
    // A single match is certain only if no other disk may have the partition as well.
    for ScannedDisk { disk, table } in disks {
        let path = disk.name.device_path(dev);
        match table {
            Err(TableProblem::Invalid(source)) if source != TableError::Absent => {
                return Err(PartitionError::Table { disk: path, source });
            }
            Err(TableProblem::Unreadable(source)) if !disk.partitions.is_empty() => {
                return Err(PartitionError::Device { step: "read the partition table of", path, source });
            }
            _ => {}
        }
    }
    found
        .ok_or_else(|| PartitionError::NotFound { wanted: wanted.describe(), seen: seen.unwrap_or_default() })
}

/// Returns whether the kernel has one disk by several names: each table has the same GUID and entry.
fn is_one_disk(matches: &[(&ScannedDisk, &PartitionTable, TableEntry)]) -> bool {
    matches.windows(2).all(|pair| {
        let [(disk, table, entry), (other_disk, other_table, other_entry)] = pair else { return false };
        disk.disk.name != other_disk.disk.name
            && table.header.disk == other_table.header.disk
            && entry == other_entry
    })
}

fn find_entries<'a>(
    scanned: &'a ScannedDisk,
    wanted: Wanted<'_>,
) -> Vec<(&'a ScannedDisk, &'a PartitionTable, TableEntry)> {
    let Ok(table) = &scanned.table else { return Vec::new() };
    let entries = table.partitions().filter(|entry| wanted.is_met_by(entry));
    entries.map(|entry| (scanned, table, entry)).collect()
}

/// The kernel's partition must be that of the table. It is smaller while a growth waits for the kernel.
fn check_kernel_view(
    scanned: &ScannedDisk,
    table: &PartitionTable,
    entry: &TableEntry,
    dev: &Path,
) -> Result<Partition, PartitionError> {
    let disk_path = scanned.disk.name.device_path(dev);
    if matches!(table.copies, TableCopies::Backup { primary: CopyFault::InterruptedGrowth }) {
        return Err(PartitionError::InterruptedGrowth { disk: disk_path });
    }
    let known = kernel_partition(&scanned.disk, entry.number);
    let is_same = |known: &&KernelPartition| {
        let block_bytes = table.geometry.block_bytes;
        // A correct checksum does not make the numbers of an entry plausible: they may overflow.
        let blocks = entry.last_block.checked_sub(entry.first_block).and_then(|blocks| blocks.checked_add(1));
        Some(known.start_bytes) == entry.first_block.checked_mul(block_bytes)
            && blocks
                .and_then(|blocks| blocks.checked_mul(block_bytes))
                .is_some_and(|size| known.size_bytes <= size)
    };
    match known.filter(is_same) {
        Some(known) => Ok(Partition {
            device_path: known.name.device_path(dev),
            disk_path,
            number: entry.number,
            partition_type: entry.partition_type,
            label: entry.label.clone(),
            size_bytes: known.size_bytes,
            table_copies: table.copies.clone(),
        }),
        None => Err(PartitionError::KernelView {
            disk: disk_path,
            number: entry.number,
            copies: table.copies.clone(),
        }),
    }
}

pub(super) fn kernel_partition(disk: &KernelDisk, number: u32) -> Option<&KernelPartition> {
    disk.partitions.iter().find(|partition| partition.index == number)
}

/// The path of a partition; of its number on the disk if the kernel does not know it.
fn partition_path(scanned: &ScannedDisk, entry: &TableEntry, dev: &Path) -> PathBuf {
    match kernel_partition(&scanned.disk, entry.number) {
        Some(known) => known.name.device_path(dev),
        None => format!("{} (entry {})", scanned.disk.name.device_path(dev).display(), entry.number).into(),
    }
}

/// Describes the tables that were found, for the error that the wanted partition is not among them.
fn list_seen(disks: &[ScannedDisk], dev: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    for scanned in disks {
        let path = scanned.disk.name.device_path(dev);
        match &scanned.table {
            Ok(table) => {
                let before = lines.len();
                lines.extend(table.partitions().map(|entry| {
                    let path = partition_path(scanned, &entry, dev);
                    format!("{} (type {}, label {:?})", path.display(), entry.partition_type, entry.label)
                }));
                if lines.len() == before {
                    lines.push(format!("{} (a GPT without partitions)", path.display()));
                }
            }
            Err(TableProblem::Invalid(error)) => lines.push(format!("{} ({error})", path.display())),
            Err(TableProblem::Unreadable(error)) => {
                lines.push(format!("{} (can't be read: {error})", path.display()));
            }
        }
    }
    let more = lines.len().saturating_sub(MAX_LISTED);
    lines.truncate(MAX_LISTED);
    lines.extend((more > 0).then(|| format!("{more} more")));
    lines
}

#[cfg(test)]
#[path = "select_test.rs"]
mod tests;

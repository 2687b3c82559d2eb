//! Partitions: found by their type and label, and grown with their disk.
//!
//! ```text
//!  sysfs   which disks the kernel has, and which partitions each of them ─┐
//!  GPT     both copies on each disk, judged ──────────────────────────────┼─ select: one partition, or why not
//!  query   type, label, disk ─────────────────────────────────────────────┘
//! ```
//!
//! Reading and deciding are separate: `gpt`, `select` and `growth` are pure, and here they meet the disks.

mod error;
mod gpt;
mod growth;
#[cfg(any(test, feature = "testing"))]
mod image;
mod judgement;
mod partition_type;
mod select;
mod sysfs;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use super::disk::{Disk, DiskAccess};
use crate::dir::Dir;
use crate::sys;
use gpt::{DiskGeometry, PartitionTable, TableEntry, TableHeader};
use growth::{DiskSurroundings, GrowthPlan, TAIL_BYTES, TableWrite, plan_growth, plan_resumption};
use select::{ScannedDisk, TableProblem, Wanted, kernel_partition, select_partition};
use sysfs::{DeviceNumber, KernelDisk, KernelPartition, read_disks};

pub use error::{GrowthRefusal, PartitionError};
#[cfg(any(test, feature = "testing"))]
pub use gpt::fuzz_partition_table;
pub use judgement::{CopyFault, TableCopies, TableError};
pub use partition_type::{InvalidPartitionType, PartitionType};
#[cfg(any(test, feature = "testing"))]
pub use sysfs::fuzz_sysfs_attributes;

const FIRST_SECTOR_BYTES: usize = 512;

/// The wanted partition.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "the caller fills all fields: a new one is a decision")]
pub struct PartitionQuery {
    /// The type.
    pub partition_type: PartitionType,
    /// The label in the partition table; any if absent.
    pub label: Option<String>,
    /// The disk that has it, as a path that may be a link; any disk of the host if absent.
    pub disk: Option<PathBuf>,
}

/// A partition of a GPT disk, which the kernel knows too.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Partition {
    /// The device.
    pub device_path: PathBuf,
    /// The device of the disk that has it.
    pub disk_path: PathBuf,
    /// The number in the partition table, from 1.
    pub number: u32,
    /// The type.
    pub partition_type: PartitionType,
    /// The label, empty if it has none.
    pub label: String,
    /// The size that the kernel knows, in bytes.
    pub size_bytes: u64,
    /// The copies of the partition table that are correct. Report it unless it is [`TableCopies::Both`].
    pub table_copies: TableCopies,
}

impl Partition {
    /// Returns whether an entry of a table is the one of this partition.
    fn is_at(&self, entry: &TableEntry) -> bool {
        let (number, label) = (self.number, self.label.as_str());
        (entry.number, entry.partition_type, entry.label.as_str()) == (number, self.partition_type, label)
    }
}

/// The result of [`BlockDevices::grow_partition`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "it grows, or it does not")]
pub enum PartitionGrowth {
    /// The partition has all of the disk that it can have.
    Unchanged,
    /// The partition has grown.
    Grown {
        /// The former size, in bytes.
        from_bytes: u64,
        /// The size, in bytes.
        to_bytes: u64,
    },
}

/// The disks of a host.
///
/// ```no_run
/// use nodekeel_localstorage::volume::{BlockDevices, PartitionQuery, PartitionType};
///
/// let devices = BlockDevices::of_host()?;
/// let query =
///     PartitionQuery { partition_type: PartitionType::NODEKEEL_DATA, label: Some("data".into()), disk: None };
/// devices.resume_growth(query.disk.as_deref())?;
/// let data = devices.find_partition(&query)?;
/// let esp = devices.find_esp(&data.disk_path)?;
/// println!("data on {}, ESP on {}", data.device_path.display(), esp.device_path.display());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct BlockDevices {
    sys: Dir,
    dev: PathBuf,
}

impl BlockDevices {
    /// Those of this host, by `/sys` and `/dev`.
    ///
    /// # Errors
    /// [`PartitionError::Sysfs`].
    pub fn of_host() -> Result<BlockDevices, PartitionError> {
        Ok(BlockDevices::new(Dir::open("/sys").map_err(PartitionError::Sysfs)?, "/dev"))
    }

    /// Those of the root of a sysfs, with their devices below `dev`.
    pub fn new(sys: Dir, dev: impl Into<PathBuf>) -> BlockDevices {
        BlockDevices { sys, dev: dev.into() }
    }

    /// Finds the one partition that the query means. The kernel reports which disk it is on, so the names of devices
    /// may change; its type and label are those of both copies of the partition table. It writes nothing.
    ///
    /// # Errors
    /// [`PartitionError`]: also if several partitions are meant, or a disk on which the partition may be as well has a
    /// table that can't be used.
    pub fn find_partition(&self, query: &PartitionQuery) -> Result<Partition, PartitionError> {
        let wanted = Wanted { partition_type: query.partition_type, label: query.label.as_deref() };
        select_partition(self.scan_disks(query.disk.as_deref())?, wanted, &self.dev)
    }

    /// Finds the EFI system partition of a disk.
    ///
    /// # Errors
    /// Those of [`find_partition`](Self::find_partition).
    pub fn find_esp(&self, disk: &Path) -> Result<Partition, PartitionError> {
        self.find_partition(&PartitionQuery {
            partition_type: PartitionType::EFI_SYSTEM,
            label: None,
            disk: Some(disk.to_owned()),
        })
    }

    /// Grows the last partition of a disk to the end of the disk, in the table and in the kernel, also while it is in
    /// use. Its contents stay as they are: a volume on it is grown after this. It may be killed at any point, and
    /// repeated.
    ///
    /// A blank partition is grown before a volume is created on it, and one with a volume after that was opened: an
    /// interrupted creation is not found any more at another size.
    ///
    /// # Errors
    /// [`PartitionError::Growth`], with nothing changed, unless the partition is the last one and the table is as tools
    /// write it; [`PartitionError::Device`].
    pub fn grow_partition(&self, partition: &Partition) -> Result<PartitionGrowth, PartitionError> {
        let path = &partition.disk_path;
        let disk = self.open_disk(path, DiskAccess::Write)?;
        let (plan, known) = self.plan_growth(&disk, partition)?;
        write_in_order(&disk, &plan.writes).map_err(device_error("write the partition table of", path))?;
        // Compared with the kernel, and not with the table: a killed call may have written the table alone.
        if known.size_bytes >= plan.size_bytes {
            return Ok(PartitionGrowth::Unchanged);
        }
        if !disk.is_image() {
            // Rereading the table fails with EBUSY while a partition is in use; this call resizes a mounted one, too.
            let range = (known.start_bytes, plan.size_bytes);
            sys::resize_partition(disk.file(), partition.number, range)
                .map_err(|errno| device_error("resize a partition in the kernel on", path)(errno.into()))?;
        }
        Ok(PartitionGrowth::Grown { from_bytes: known.size_bytes, to_bytes: plan.size_bytes })
    }

    /// By how many bytes [`grow_partition`](Self::grow_partition) would grow a partition now. Writes nothing.
    ///
    /// # Errors
    /// Those of [`grow_partition`](Self::grow_partition).
    pub fn growable_bytes(&self, partition: &Partition) -> Result<u64, PartitionError> {
        let disk = self.open_disk(&partition.disk_path, DiskAccess::Read)?;
        let (plan, known) = self.plan_growth(&disk, partition)?;
        Ok(plan.size_bytes.saturating_sub(known.size_bytes))
    }

    /// Plans the growth of a partition, and returns how the kernel knows it.
    fn plan_growth(
        &self,
        disk: &Disk,
        partition: &Partition,
    ) -> Result<(GrowthPlan, KernelPartition), PartitionError> {
        let path = &partition.disk_path;
        let scanned = self.read_named_disk(path)?;
        let table = self.read_table(&scanned).map_err(|problem| table_error(path, problem))?;
        let refused =
            |source| PartitionError::Growth { disk: path.clone(), number: partition.number, source };
        // The table may be another one since the partition was found.
        let Some(entry) = table.partitions().find(|entry| partition.is_at(entry)) else {
            return Err(refused(GrowthRefusal::Absent));
        };
        let start = entry.first_block.checked_mul(table.geometry.block_bytes);
        let known = kernel_partition(&scanned, partition.number);
        let Some(known) = known.filter(|known| Some(known.start_bytes) == start) else {
            let (disk, number) = (path.clone(), partition.number);
            return Err(PartitionError::KernelView { disk, number, copies: table.copies });
        };
        // One that is in use may have been removed from the table alone.
        let mut others = scanned.partitions.iter();
        if let Some(behind) = others.find(|other| other.start_bytes > known.start_bytes) {
            return Err(refused(GrowthRefusal::NotLast { last: behind.index }));
        }
        let surroundings = read_surroundings(disk, table.geometry).map_err(device_error("read", path))?;
        let plan = plan_growth(&table, &surroundings, partition.number).map_err(refused)?;
        Ok((plan, known.clone()))
    }

    /// Completes the growths that were interrupted right before their last write, on the named disk or on all. The
    /// kernel reads the tables again. It writes nothing else, and nothing if no growth was interrupted.
    ///
    /// # Errors
    /// [`PartitionError::Device`]; those of listing the disks.
    pub fn resume_growth(&self, disk: Option<&Path>) -> Result<(), PartitionError> {
        for scanned in self.scan_disks(disk)? {
            let Ok(table) = &scanned.table else { continue };
            if table.outdated.is_none() {
                continue;
            }
            let path = scanned.disk.name.device_path(&self.dev);
            let disk = self.open_disk(&path, DiskAccess::Write)?;
            // Another program may have been at work, without the lock that this one has now.
            let Ok(table) = self.read_table(&scanned.disk) else { continue };
            write_in_order(&disk, &plan_resumption(&table))
                .map_err(device_error("write the partition table of", &path))?;
            // A kernel that was started after the growth has not accepted the table.
            if !disk.is_image() && scanned.disk.partitions.is_empty() {
                sys::reread_partitions(disk.file())
                    .map_err(|errno| device_error("reread the partition table of", &path)(errno.into()))?;
            }
        }
        Ok(())
    }

    fn open_disk(&self, path: &Path, access: DiskAccess) -> Result<Disk, PartitionError> {
        Disk::try_open(path, access).map_err(|(step, source)| PartitionError::Device {
            step,
            path: path.to_owned(),
            source,
        })
    }

    /// Reads the tables of the named disk, or of all.
    fn scan_disks(&self, named: Option<&Path>) -> Result<Vec<ScannedDisk>, PartitionError> {
        let disks = match named {
            Some(path) => vec![self.read_named_disk(path)?],
            None => self.read_disks()?,
        };
        let scan = |disk: KernelDisk| ScannedDisk { table: self.read_table(&disk), disk };
        Ok(disks.into_iter().map(scan).collect())
    }

    fn read_disks(&self) -> Result<Vec<KernelDisk>, PartitionError> {
        read_disks(&self.sys).map_err(PartitionError::Sysfs)
    }

    /// The disk behind a path, which may be a link.
    fn read_named_disk(&self, path: &Path) -> Result<KernelDisk, PartitionError> {
        let unknown = || PartitionError::UnknownDisk { path: path.to_owned() };
        let real = fs::canonicalize(path).map_err(device_error("find", path))?;
        let number = device_number(&real).map_err(device_error("inspect", path))?;
        let is_it = |disk: &KernelDisk| match number {
            Some(number) => disk.number == number,
            // An image has no device number.
            None => fs::canonicalize(disk.name.device_path(&self.dev)).is_ok_and(|device| device == real),
        };
        self.read_disks()?.into_iter().find(is_it).ok_or_else(unknown)
    }

    fn read_table(&self, disk: &KernelDisk) -> Result<PartitionTable, TableProblem> {
        let Some(geometry) = DiskGeometry::try_new(disk.size_bytes, disk.block_bytes) else {
            return Err(TableProblem::Invalid(TableError::Absent));
        };
        let path = disk.name.device_path(&self.dev);
        let read = || {
            // Another disk may have the name by now.
            if device_number(&path)?.is_some_and(|number| number != disk.number) {
                return Err(io::Error::other("another device has its name now"));
            }
            let file = File::open(&path)?;
            PartitionTable::read(geometry, &|offset, length| {
                let mut bytes = vec![0; length];
                file.read_exact_at(&mut bytes, offset)?;
                Ok(bytes)
            })
        };
        read().map_err(TableProblem::Unreadable)?.map_err(TableProblem::Invalid)
    }
}

/// Writes blocks in their order, each durable before the next one.
fn write_in_order(disk: &Disk, writes: &[TableWrite]) -> io::Result<()> {
    writes.iter().try_for_each(|write| disk.write_durably(write.offset, &write.bytes))
}

fn read_surroundings(disk: &Disk, geometry: DiskGeometry) -> io::Result<DiskSurroundings> {
    let mut first_sector = vec![0; FIRST_SECTOR_BYTES];
    disk.file().read_exact_at(&mut first_sector, 0)?;
    let end = geometry.blocks * geometry.block_bytes;
    let tail_bytes = TAIL_BYTES.min(end);
    let mut tail = vec![0; tail_bytes as usize];
    disk.file().read_exact_at(&mut tail, end - tail_bytes)?;
    let last_block = tail[tail.len() - geometry.block_bytes as usize..].to_vec();
    // The primary copy need not refer to this one: a killed growth may have written it.
    let header = TableHeader::parse(last_block, geometry.last_block(), geometry);
    Ok(DiskSurroundings { first_sector, table_at_end: header.ok().map(|header| header.disk), tail })
}

/// None for an image.
fn device_number(path: &Path) -> io::Result<Option<DeviceNumber>> {
    let metadata = fs::metadata(path)?;
    let number = metadata.rdev();
    let number = DeviceNumber { major: rustix::fs::major(number), minor: rustix::fs::minor(number) };
    Ok(metadata.file_type().is_block_device().then_some(number))
}

fn table_error(disk: &Path, problem: TableProblem) -> PartitionError {
    match problem {
        TableProblem::Invalid(source) => PartitionError::Table { disk: disk.to_owned(), source },
        TableProblem::Unreadable(source) => device_error("read the partition table of", disk)(source),
    }
}

fn device_error(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> PartitionError {
    move |source| PartitionError::Device { step, path: path.to_owned(), source }
}

#[cfg(test)]
#[path = "partition_test.rs"]
mod tests;

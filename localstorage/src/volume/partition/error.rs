//! Errors of finding and growing partitions.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::judgement::{TableCopies, TableError};
use crate::error::Error;

/// A failure to find or grow a partition. Nothing was changed, unless a growth failed to write: it can be
/// repeated.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PartitionError {
    /// No partition has the type and the label. Create it, attach its disk, or correct the configuration.
    #[error("can't find a partition with {wanted}: {}", list(.seen))]
    NotFound {
        /// The type and the label.
        wanted: String,
        /// All disks and partitions instead.
        seen: Vec<String>,
    },
    /// Several partitions have the type and the label: give one another label, detach its disk, or name the disk.
    #[error(
        "can't choose a partition with {wanted}: {} have it; give one of them another label, or name the disk",
        paths(.partitions)
    )]
    Ambiguous {
        /// The type and the label.
        wanted: String,
        /// All of them.
        partitions: Vec<PathBuf>,
    },
    /// One disk is seen by several paths, or was copied with its table: name the disk, or detach the copy.
    #[error(
        "can't choose a partition with {wanted}: {} are one partition of one disk, by several paths, or copies of it; name the \
         disk by its multipath device or one of its paths, or detach the copy",
        paths(.partitions)
    )]
    SameDisk {
        /// The type and the label.
        wanted: String,
        /// All of its names.
        partitions: Vec<PathBuf>,
    },
    /// The partition table of a disk can't be used, so the partition may be on it, too: repair the table, detach the
    /// disk, or name the disk with the partition.
    #[error(
        "can't use the partition table of {}: repair it with gdisk, detach the disk, or name the node's disk",
        .disk.display()
    )]
    Table {
        /// The disk.
        disk: PathBuf,
        /// The problem.
        #[source]
        source: TableError,
    },
    /// A growth of the disk's last partition was interrupted:
    /// [`resume_growth`](super::BlockDevices::resume_growth) completes it.
    #[error("can't use the partition table of {}: its growth was interrupted, and a start of the node completes it", .disk.display())]
    InterruptedGrowth {
        /// The disk.
        disk: PathBuf,
    },
    /// The kernel does not know the partition, or knows another one by its number: restart the host, or have the kernel
    /// read the table again with `blockdev --rereadpt`. It does not read a table whose primary copy is damaged.
    #[error(
        "can't use partition {number} of {}: the kernel has another one, or none ({copies}); run blockdev \
         --rereadpt, or restart the host",
        .disk.display()
    )]
    KernelView {
        /// The disk.
        disk: PathBuf,
        /// The number of the partition.
        number: u32,
        /// The copies of the table that are correct.
        copies: TableCopies,
    },
    /// The named device is not a disk of this host. Name a whole disk.
    #[error("can't use {} as a disk: the kernel has no disk of that name; name a whole disk", .path.display())]
    UnknownDisk {
        /// The path.
        path: PathBuf,
    },
    /// The partition can't grow, and stays as it is.
    #[error("can't grow partition {number} of {}", .disk.display())]
    Growth {
        /// The disk.
        disk: PathBuf,
        /// The number of the partition.
        number: u32,
        /// The cause.
        #[source]
        source: GrowthRefusal,
    },
    /// A disk could not be read, written, or used by the kernel. A retry may help.
    #[error("can't {step} disk {}", .path.display())]
    Device {
        /// The failed step.
        step: &'static str,
        /// The disk.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The disks of the host can't be listed: mount sysfs.
    #[error("can't list the disks of this host")]
    Sysfs(#[source] Error),
}

/// The reason why the partition table of a grown disk stays as it is.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GrowthRefusal {
    /// The table has no such partition any more.
    #[error("the partition is no longer in the table")]
    Absent,
    /// Other partitions follow it on the disk.
    #[error("partition {last} follows it on the disk")]
    NotLast {
        /// The number of one.
        last: u32,
    },
    /// One copy of the table is not correct.
    #[error("{0}")]
    Copies(TableCopies),
    /// Two partitions overlap, or one is outside the usable blocks. Repair the table with gdisk.
    #[error(
        "partition {number} overlaps another one, or exceeds the usable blocks: repair the table with gdisk"
    )]
    Overlap {
        /// The number of one.
        number: u32,
    },
    /// The first sector of the disk is not the protective MBR of a GPT: another program sees other partitions.
    #[error("the first sector is not a plain protective MBR: remove the hybrid MBR with gdisk")]
    HybridMbr,
    /// The end of the disk has the backup copy of another table: the disk may not have grown, but been overwritten.
    #[error(
        "another partition table has a copy at the end of the disk: erase that copy with wipefs if it is old"
    )]
    ForeignBackup,
    /// The end of the disk has other data, such as the metadata of an array.
    #[error(
        "the end of the disk has other data, from byte {offset} on: it may be part of an array, which has to be used \
         instead; if they are not needed, zero them with dd"
    )]
    DataAtEnd {
        /// The first byte.
        offset: u64,
    },
}

fn list(seen: &[String]) -> String {
    if seen.is_empty() { "the host has no disk".to_owned() } else { format!("found {}", seen.join(", ")) }
}

fn paths(paths: &[PathBuf]) -> String {
    let paths: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
    paths.join(" and ")
}

//! The verdict on a partition table and its two copies.

use std::fmt;

use thiserror::Error;

/// The copies of a partition table that are correct, and agree.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TableCopies {
    /// Both.
    Both,
    /// The one at the start of the disk.
    Primary {
        /// The fault of the other one.
        backup: CopyFault,
    },
    /// The one at the end of the disk.
    Backup {
        /// The fault of the other one.
        primary: CopyFault,
    },
}

impl fmt::Display for TableCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TableCopies::Both => f.write_str("both copies of the partition table agree"),
            TableCopies::Primary { backup } => {
                write!(f, "the backup copy of the partition table {backup}: repair it with gdisk")
            }
            TableCopies::Backup { primary } => {
                write!(f, "the primary copy of the partition table {primary}: repair it with gdisk")
            }
        }
    }
}

/// A fault of one copy of a partition table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CopyFault {
    /// The block has no signature.
    Absent,
    /// The checksum of the header is wrong.
    HeaderChecksum,
    /// The checksum of the entries is wrong.
    EntryChecksum,
    /// The header has a field that the kernel rejects, too.
    Field(&'static str),
    /// A growth of the last partition was interrupted before its last write.
    InterruptedGrowth,
}

impl fmt::Display for CopyFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CopyFault::Absent => f.write_str("is absent"),
            CopyFault::HeaderChecksum => f.write_str("has a header with a wrong checksum"),
            CopyFault::EntryChecksum => f.write_str("has entries with a wrong checksum"),
            CopyFault::Field(field) => write!(f, "has an invalid {field}"),
            CopyFault::InterruptedGrowth => f.write_str("has not been completed by an interrupted growth"),
        }
    }
}

/// A fault of the partition table of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TableError {
    /// The disk has no GPT.
    #[error("no GPT")]
    Absent,
    /// The table was written for logical blocks of another size, and the kernel does not see its partitions either: the
    /// disk was copied from one with other blocks. Create the table again.
    #[error("its GPT is for blocks of {table} bytes, and the disk has blocks of {disk} bytes")]
    BlockSize {
        /// The size for which it was written, in bytes.
        table: u64,
        /// The size of the disk's blocks, in bytes.
        disk: u64,
    },
    /// Neither copy is correct. Restore one with gdisk.
    #[error("the primary copy of its GPT {primary}, and the backup copy {backup}")]
    Damaged {
        /// The fault of the copy at the start.
        primary: CopyFault,
        /// The fault of the copy at the end.
        backup: CopyFault,
    },
    /// Both copies are correct, and have different contents. Choose one with gdisk.
    #[error("both copies of its GPT are valid, but have different {what}")]
    Disagreement {
        /// The difference.
        what: &'static str,
    },
}

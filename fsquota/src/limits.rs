//! What a directory tree may take, what it takes, and how that is changed.

use std::fmt;
use std::num::NonZeroU32;

use thiserror::Error;

use crate::{Bytes, Inodes};

/// The number by which the file system keeps account of a directory tree; never 0, which is what carries no project.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProjectId(NonZeroU32);

impl ProjectId {
    /// The project with this number; `None` for 0, and for 2³² − 1, which the kernel takes for "no project".
    pub const fn new(number: u32) -> Option<Self> {
        match NonZeroU32::new(number) {
            Some(number) if number.get() != u32::MAX => Some(Self(number)),
            _ => None,
        }
    }

    /// Its number.
    pub const fn get(self) -> u32 {
        self.0.get()
    }
}

impl fmt::Display for ProjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What a directory tree may take; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Limits {
    /// Bytes of blocks, in whole KiB.
    pub bytes: Option<Bytes>,
    /// Inodes, the directory's own among them.
    pub inodes: Option<Inodes>,
}

/// What a directory tree takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Usage {
    /// Bytes of blocks: holes take nothing, and a byte takes a block.
    pub bytes: Bytes,
    /// Inodes, the directory's own among them.
    pub inodes: Inodes,
}

/// The account of one directory tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Status {
    /// The project that the tree belongs to.
    pub project: ProjectId,
    /// What it may take.
    pub limits: Limits,
    /// What it takes.
    pub usage: Usage,
}

impl Status {
    /// Whether the tree takes more than it may, as it does when a limit was set below what was there already: that
    /// stays, and nothing can be added.
    pub fn over_limit(&self) -> bool {
        self.limits.bytes.is_some_and(|limit| self.usage.bytes > limit)
            || self.limits.inodes.is_some_and(|limit| self.usage.inodes > limit)
    }

    /// What can still be added by the limits, 0 beyond them; `None` without a limit. The file system may have less.
    pub fn available(&self) -> Limits {
        let Self { limits, usage, .. } = self;
        Limits {
            bytes: limits.bytes.map(|limit| Bytes(limit.0.saturating_sub(usage.bytes.0))),
            inodes: limits.inodes.map(|limit| Inodes(limit.0.saturating_sub(usage.inodes.0))),
        }
    }
}

/// What becomes of one limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums, reason = "a limit is kept, lifted or set; there is no fourth")]
pub enum Limit<T> {
    /// It stays as it is; a directory that had none has none.
    #[default]
    Keep,
    /// There is none from now on.
    Unlimited,
    /// It is this from now on; 0 is refused, because the kernel takes it for "unlimited".
    At(T),
}

impl<T> From<Option<T>> for Limit<T> {
    /// `None` is unlimited.
    fn from(limit: Option<T>) -> Self {
        limit.map_or(Self::Unlimited, Self::At)
    }
}

/// What becomes of both limits; by default they stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Change {
    /// The limit of bytes, rounded up to whole KiB, by XFS to its blocks.
    pub bytes: Limit<Bytes>,
    /// The limit of inodes.
    pub inodes: Limit<Inodes>,
}

impl From<Limits> for Change {
    /// Both limits become these.
    fn from(limits: Limits) -> Self {
        Self { bytes: limits.bytes.into(), inodes: limits.inodes.into() }
    }
}

/// Why a limit can't be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LimitError {
    /// The kernel takes 0 for "unlimited"; a directory alone takes an inode, so nothing could live by it anyway.
    #[error("a limit of 0 can't be set; leave it unlimited, or give at least 1")]
    Zero,
    /// Beyond what file systems can keep account of.
    #[error("{asked} is above {largest}, the largest limit")]
    #[non_exhaustive]
    TooLarge {
        /// What was asked for.
        asked: u64,
        /// What would be possible.
        largest: u64,
    },
}

/// The kernel counts in signed 64 bits, and XFS rounds up to blocks of up to 64 KiB.
const LARGEST_BYTES: u64 = i64::MAX as u64 / 65_536 * 65_536;
const LARGEST_INODES: u64 = i64::MAX as u64;

/// The unit of the kernel's limits of blocks. *Source:* linux/quota.h, `QIF_DQBLKSIZE`.
pub(crate) const KIB: u64 = 1024;

/// A change in the kernel's units: `None` is kept, 0 is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KernelChange {
    pub(crate) kib: Option<u64>,
    pub(crate) inodes: Option<u64>,
}

impl KernelChange {
    pub(crate) const UNLIMITED: Self = Self { kib: Some(0), inodes: Some(0) };

    /// For a directory that has no limits: what is kept is that there is none.
    pub(crate) fn of_new(self) -> Self {
        Self { kib: Some(self.kib.unwrap_or(0)), inodes: Some(self.inodes.unwrap_or(0)) }
    }

    pub(crate) fn is_nothing(self) -> bool {
        self == Self::default()
    }
}

impl TryFrom<Change> for KernelChange {
    type Error = LimitError;

    fn try_from(change: Change) -> Result<Self, LimitError> {
        let kib = match change.bytes {
            Limit::At(Bytes(bytes)) => Some(checked(bytes, LARGEST_BYTES)?.div_ceil(KIB)),
            Limit::Unlimited => Some(0),
            Limit::Keep => None,
        };
        let inodes = match change.inodes {
            Limit::At(Inodes(inodes)) => Some(checked(inodes, LARGEST_INODES)?),
            Limit::Unlimited => Some(0),
            Limit::Keep => None,
        };
        Ok(Self { kib, inodes })
    }
}

fn checked(asked: u64, largest: u64) -> Result<u64, LimitError> {
    match asked {
        0 => Err(LimitError::Zero),
        _ if asked <= largest => Ok(asked),
        _ => Err(LimitError::TooLarge { asked, largest }),
    }
}

//! Limits and usage of a directory tree, and changes of its limits.

use std::fmt;
use std::num::NonZeroU32;

use thiserror::Error;

use crate::{Bytes, Inodes};

/// The number under which the file system accounts for a directory tree; never 0, the number of inodes
/// without a project.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProjectId(NonZeroU32);

impl ProjectId {
    /// The project with this number; `None` for 0, and for 2³² − 1, which means "no project" to the kernel.
    pub const fn new(number: u32) -> Option<Self> {
        match NonZeroU32::new(number) {
            Some(number) if number.get() != u32::MAX => Some(Self(number)),
            _ => None,
        }
    }

    /// The project number.
    pub const fn get(self) -> u32 {
        self.0.get()
    }
}

impl fmt::Display for ProjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The limits of a directory tree; `None` is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct QuotaLimits {
    /// Bytes of blocks, in whole KiB.
    pub bytes: Option<Bytes>,
    /// Inodes, including the directory itself.
    pub inodes: Option<Inodes>,
}

/// The usage of a directory tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct QuotaUsage {
    /// Bytes of blocks: holes use nothing, and a single byte uses a block.
    pub bytes: Bytes,
    /// Inodes, including the directory itself.
    pub inodes: Inodes,
}

/// Project, limits and usage of one directory tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuotaStatus {
    /// The project that the tree belongs to.
    pub project: ProjectId,
    /// The limits of the tree.
    pub limits: QuotaLimits,
    /// The usage of the tree.
    pub usage: QuotaUsage,
}

impl QuotaStatus {
    /// Returns whether the usage exceeds a limit. This happens when a limit is set below the usage: existing data
    /// stays, and nothing can be added.
    pub fn is_over_limit(&self) -> bool {
        self.limits.bytes.is_some_and(|limit| self.usage.bytes > limit)
            || self.limits.inodes.is_some_and(|limit| self.usage.inodes > limit)
    }

    /// The quantity that the limits still allow, 0 if they are exceeded; `None` without a limit. The file system may
    /// have less free space.
    pub fn remaining_quota(&self) -> QuotaLimits {
        let Self { limits, usage, .. } = self;
        QuotaLimits {
            bytes: limits.bytes.map(|limit| Bytes(limit.0.saturating_sub(usage.bytes.0))),
            inodes: limits.inodes.map(|limit| Inodes(limit.0.saturating_sub(usage.inodes.0))),
        }
    }
}

/// The change of one limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums, reason = "a limit is kept, lifted or set; a fourth change does not exist")]
pub enum LimitChange<T> {
    /// Keep the limit; a directory without one stays unlimited.
    #[default]
    Keep,
    /// Lift the limit.
    Unlimited,
    /// Set the limit to this; 0 is rejected, because it means "unlimited" to the kernel.
    Set(T),
}

impl<T> From<Option<T>> for LimitChange<T> {
    /// `None` lifts the limit.
    fn from(limit: Option<T>) -> Self {
        limit.map_or(Self::Unlimited, Self::Set)
    }
}

/// The change of both limits; the default keeps them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct QuotaChange {
    /// The limit of bytes, rounded up to whole KiB, by XFS to its blocks.
    pub bytes: LimitChange<Bytes>,
    /// The limit of inodes.
    pub inodes: LimitChange<Inodes>,
}

impl From<QuotaLimits> for QuotaChange {
    /// Sets both limits; `None` lifts one.
    fn from(limits: QuotaLimits) -> Self {
        Self { bytes: limits.bytes.into(), inodes: limits.inodes.into() }
    }
}

/// A limit is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LimitError {
    /// 0 means "unlimited" to the kernel. The directory itself needs an inode, so no directory could satisfy
    /// it anyway.
    #[error("a quota limit of 0 can't be set: remove the limit, or set at least 1")]
    Zero,
    /// More than file systems can account for.
    #[error("quota limit {requested} exceeds the largest possible limit {maximum}: set a lower one")]
    #[non_exhaustive]
    TooLarge {
        /// The requested limit.
        requested: u64,
        /// The largest possible limit.
        maximum: u64,
    },
}

/// The kernel counts in signed 64 bits, and XFS rounds up to blocks of up to 64 KiB.
const LARGEST_BYTES: u64 = i64::MAX as u64 / 65_536 * 65_536;
const LARGEST_INODES: u64 = i64::MAX as u64;

/// The unit of the kernel's limits of blocks. *Source:* linux/quota.h, `QIF_DQBLKSIZE`.
pub(crate) const KIB: u64 = 1024;

/// A change in the kernel's units: `None` is kept, 0 is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KernelLimitChange {
    pub(crate) kib: Option<u64>,
    pub(crate) inodes: Option<u64>,
}

impl KernelLimitChange {
    pub(crate) const UNLIMITED: Self = Self { kib: Some(0), inodes: Some(0) };

    /// For a project without limits: a limit that is kept is unlimited.
    pub(crate) fn for_new_project(self) -> Self {
        Self { kib: Some(self.kib.unwrap_or(0)), inodes: Some(self.inodes.unwrap_or(0)) }
    }

    pub(crate) fn is_noop(self) -> bool {
        self == Self::default()
    }
}

impl TryFrom<QuotaChange> for KernelLimitChange {
    type Error = LimitError;

    fn try_from(change: QuotaChange) -> Result<Self, LimitError> {
        let kib = match change.bytes {
            // Rounded up, so that a directory never gets less than it was promised.
            LimitChange::Set(Bytes(bytes)) => Some(check_limit(bytes, LARGEST_BYTES)?.div_ceil(KIB)),
            LimitChange::Unlimited => Some(0),
            LimitChange::Keep => None,
        };
        let inodes = match change.inodes {
            LimitChange::Set(Inodes(inodes)) => Some(check_limit(inodes, LARGEST_INODES)?),
            LimitChange::Unlimited => Some(0),
            LimitChange::Keep => None,
        };
        Ok(Self { kib, inodes })
    }
}

fn check_limit(requested: u64, maximum: u64) -> Result<u64, LimitError> {
    match requested {
        0 => Err(LimitError::Zero),
        _ if requested <= maximum => Ok(requested),
        _ => Err(LimitError::TooLarge { requested, maximum }),
    }
}

//! The part of a store that may be promised to volumes.

use std::fmt;

use nodekeel_fsquota::Bytes;

/// Parts of a ratio: it is kept in thousandths, so that equal settings compare as equal.
const RATIO_PARTS: u64 = 1000;

const MAX_RATIO: f64 = 1000.0;

/// The part of a store that may be promised: the sum of the byte limits of all its volumes.
///
/// The default promises each byte once, and reserves nothing beyond what other data occupy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CapacityPolicy {
    /// In thousandths.
    ratio: u64,
    reserve: Bytes,
}

/// The ratio is not a number from 0.001 to 1000.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("invalid capacity ratio {ratio}: use a number from 0.001 to 1000, such as 1.0")]
pub struct InvalidRatio {
    /// The given ratio.
    pub ratio: f64,
}

impl Default for CapacityPolicy {
    fn default() -> Self {
        Self { ratio: RATIO_PARTS, reserve: Bytes(0) }
    }
}

impl CapacityPolicy {
    /// Promises each byte `ratio` times, and keeps `reserve` bytes of the file system for other data. A ratio
    /// above 1 promises more than there is: volumes can then be full before their limits.
    ///
    /// # Errors
    /// [`InvalidRatio`].
    pub fn try_new(ratio: f64, reserve: Bytes) -> Result<Self, InvalidRatio> {
        // Both bounds are checked, so that the rounded number fits; NaN is in no range.
        let thousandths = (ratio * RATIO_PARTS as f64).round();
        if (1.0..=MAX_RATIO * RATIO_PARTS as f64).contains(&thousandths) {
            Ok(Self { ratio: thousandths as u64, reserve })
        } else {
            Err(InvalidRatio { ratio })
        }
    }

    /// The bytes that are kept for other data, which occupy `other`.
    pub(crate) fn reserved(&self, other: Bytes) -> Bytes {
        self.reserve.max(other)
    }

    /// The capacity of a file system with this space, on which data other than volumes occupy `other` bytes, while
    /// `promised` bytes are promised.
    pub fn store_capacity(&self, space: DiskSpace, other: Bytes, promised: Bytes) -> StoreCapacity {
        let DiskSpace { total, free } = space;
        // The reserve is configured apart from the disk, and may be larger.
        let reserved = self.reserved(other).min(total);
        // In 128 bits: in thousandths, the product exceeds 64 bits from 16 PiB on.
        let usable = u128::from(total.0 - reserved.0) * u128::from(self.ratio) / u128::from(RATIO_PARTS);
        let ceiling = Bytes(u64::try_from(usable).unwrap_or(u64::MAX));
        StoreCapacity { total, free, reserved, promised, ceiling }
    }
}

/// The space of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "complete by nature")]
pub struct DiskSpace {
    /// The size.
    pub total: Bytes,
    /// The bytes that are free now, for processes without privileges.
    pub free: Bytes,
}

/// The space of a store, and what is promised of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreCapacity {
    /// The size of the file system.
    pub total: Bytes,
    /// The bytes that are free on it now, for processes without privileges.
    pub free: Bytes,
    /// The bytes that are kept for data other than volumes.
    pub reserved: Bytes,
    /// The sum of the byte limits of all volumes, and of what removed volumes still occupy. It may exceed
    /// `ceiling`, where that was lowered.
    pub promised: Bytes,
    /// The largest sum that a new promise may reach.
    pub ceiling: Bytes,
}

impl StoreCapacity {
    /// The size of the largest new volume.
    pub fn available(&self) -> Bytes {
        Bytes(self.ceiling.0.saturating_sub(self.promised.0))
    }

    /// Checks a change of a volume's byte limit from `old`, which is 0 for a new volume, to `new`. A limit that is
    /// not larger always fits: existing volumes are served even above the ceiling.
    ///
    /// # Errors
    /// [`CapacityShortage`].
    pub fn check_limit(&self, old: Bytes, new: Bytes) -> Result<(), CapacityShortage> {
        let growth = Bytes(new.0.saturating_sub(old.0));
        let Self { total, reserved, promised, ceiling, .. } = *self;
        match growth.0 {
            0 => Ok(()),
            // Checked first: no removal of other volumes would make room for this one.
            _ if new > ceiling => Err(CapacityShortage::TooLarge { size: new, ceiling, total, reserved }),
            _ if growth > self.available() => {
                let available = self.available();
                Err(CapacityShortage::Full { growth, available, promised, ceiling })
            }
            _ => Ok(()),
        }
    }
}

/// The reason why a limit is not promised. The message is part of the claim's event and status, so it has no number
/// that changes with each write of a pod, such as the free bytes of the disk: each would be another event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CapacityShortage {
    /// The volume would fit if others were removed.
    #[error(
        "{} can't be promised: of the {} that this node promises to volumes {} are promised and {} are left; delete \
         volumes, enlarge the disk, or raise capacity.ratio",
        BinarySize(*growth), BinarySize(*ceiling), BinarySize(*promised), BinarySize(*available)
    )]
    Full {
        /// The new volume's size, or by how much a volume should grow.
        growth: Bytes,
        /// The largest growth that fits.
        available: Bytes,
        /// The sum of all limits.
        promised: Bytes,
        /// The largest sum.
        ceiling: Bytes,
    },
    /// Does not fit on this node, even if it were the only volume.
    #[error(
        "{} never fits on this node, which promises {} at most ({} less {} for other data); request less, or \
         enlarge the disk",
        BinarySize(*size), BinarySize(*ceiling), BinarySize(*total), BinarySize(*reserved)
    )]
    TooLarge {
        /// The volume's size.
        size: Bytes,
        /// The largest sum of all limits.
        ceiling: Bytes,
        /// The size of the file system.
        total: Bytes,
        /// The bytes that are kept for other data.
        reserved: Bytes,
    },
}

/// Formats bytes with one digit after the point, such as `7.6Gi`; exactly where that is shorter.
pub(crate) struct BinarySize(pub(crate) Bytes);

impl fmt::Display for BinarySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (exact, bytes) = (self.0.to_string(), self.0.0);
        let unit = bytes.checked_ilog2().unwrap_or_default() / 10;
        match ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"].get(unit as usize) {
            Some(suffix) if exact.len() > 6 => {
                write!(f, "{:.1}{suffix}", bytes as f64 / f64::from(1 << 10).powi(unit.cast_signed()))
            }
            _ => f.write_str(&exact),
        }
    }
}

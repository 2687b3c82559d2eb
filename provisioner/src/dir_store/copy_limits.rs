//! The limits of snapshots and copies.

use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits, QuotaStatus, QuotaUsage};

use crate::dir_store::DirStoreError;
use crate::snapshot::StoredId;
use crate::store::larger_limit;

/// How much more than its limits a copy may use while it is made.
const MARGIN: QuotaUsage = QuotaUsage { bytes: Bytes(1 << 20), inodes: Inodes(64) };

/// The limits of the volume, so that it can be restored with them, and never less than what it uses.
pub(super) fn snapshot_limits(status: &QuotaStatus) -> QuotaLimits {
    QuotaLimits {
        bytes: larger_limit(status.limits.bytes, Some(status.usage.bytes)),
        inodes: larger_limit(status.limits.inodes, Some(status.usage.inodes)),
    }
}

/// The limits of a copy while it is made: its source may be full, and the copy's directories may lie differently on the
/// disk.
pub(super) fn with_margin(limits: QuotaLimits) -> QuotaLimits {
    QuotaLimits {
        bytes: limits.bytes.map(|bytes| Bytes(bytes.0.saturating_add(MARGIN.bytes.0))),
        inodes: limits.inodes.map(|inodes| Inodes(inodes.0.saturating_add(MARGIN.inodes.0))),
    }
}

/// Checks that what a source uses fits into the limits: the kernel's error would not say so. The snapshot of a full
/// volume may use a little more than the volume's limit.
pub(super) fn check_fit(
    from: &StoredId,
    status: &QuotaStatus,
    limits: QuotaLimits,
) -> Result<(), DirStoreError> {
    let (bytes, inodes) = (status.usage.bytes, status.usage.inodes);
    let too_large = |used: String, limit: String| {
        Err(DirStoreError::SourceTooLarge { source_id: from.clone(), used, limit })
    };
    match limits {
        QuotaLimits { bytes: Some(Bytes(limit)), .. } if bytes.0 > limit.saturating_add(MARGIN.bytes.0) => {
            too_large(format!("{} bytes", bytes.0), format!("{limit} bytes"))
        }
        QuotaLimits { inodes: Some(Inodes(limit)), .. } if inodes.0 > limit => {
            too_large(format!("{} inodes", inodes.0), format!("{limit} inodes"))
        }
        _ => Ok(()),
    }
}

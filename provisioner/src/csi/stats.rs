//! Usage of a volume, as CSI reports it.

use std::io;
use std::os::fd::BorrowedFd;

use super::proto::csi::{VolumeUsage as Row, volume_usage::Unit};
use crate::store::VolumeUsage;

/// The total and free space of a file system, for users other than root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FilesystemSpace {
    bytes: AvailableSpace,
    inodes: AvailableSpace,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct AvailableSpace {
    total: u64,
    free: u64,
}

impl FilesystemSpace {
    /// The space of the file system that contains a directory.
    pub(super) fn from_fd(dir: BorrowedFd<'_>) -> io::Result<Self> {
        let stat = rustix::fs::fstatvfs(dir)?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(Self {
            bytes: AvailableSpace { total: bytes(stat.f_blocks), free: bytes(stat.f_bavail) },
            inodes: AvailableSpace { total: stat.f_files, free: stat.f_favail },
        })
    }
}

/// The usage that the kubelet shows. A volume without a limit can use the whole file system; and no volume
/// can use more than the file system's free space, whatever its limit: limits are not reservations.
pub(super) fn usage_rows(volume: &VolumeUsage, space: &FilesystemSpace) -> Vec<Row> {
    let (limits, usage) = (volume.limits, volume.usage);
    vec![
        usage_row(Unit::Bytes, limits.bytes.map(|bytes| bytes.0), usage.bytes.0, space.bytes),
        usage_row(Unit::Inodes, limits.inodes.map(|inodes| inodes.0), usage.inodes.0, space.inodes),
    ]
}

fn usage_row(unit: Unit, limit: Option<u64>, used: u64, space_left: AvailableSpace) -> Row {
    let total = limit.unwrap_or(space_left.total);
    let available = total.saturating_sub(used).min(space_left.free);
    let signed = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    Row { unit: unit.into(), total: signed(total), used: signed(used), available: signed(available) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits, QuotaUsage};
    use proptest::prelude::*;

    fn volume(limit: Option<u64>, used: u64) -> VolumeUsage {
        VolumeUsage {
            limits: QuotaLimits { bytes: limit.map(Bytes), inodes: limit.map(Inodes) },
            usage: QuotaUsage { bytes: Bytes(used), inodes: Inodes(used) },
        }
    }

    fn space(total: u64, free: u64) -> FilesystemSpace {
        let space_left = AvailableSpace { total, free };
        FilesystemSpace { bytes: space_left, inodes: space_left }
    }

    fn byte_usage(volume: &VolumeUsage, space: &FilesystemSpace) -> (i64, i64, i64) {
        let rows = usage_rows(volume, space);
        assert_eq!([rows[0].unit(), rows[1].unit()], [Unit::Bytes, Unit::Inodes]);
        (rows[0].total, rows[0].used, rows[0].available)
    }

    #[test]
    fn the_limit_is_the_total_and_overuse_leaves_nothing_available() {
        assert_eq!(byte_usage(&volume(Some(100), 30), &space(1000, 500)), (100, 30, 70));
        assert_eq!(byte_usage(&volume(Some(100), 130), &space(1000, 500)), (100, 130, 0));
        assert_eq!(byte_usage(&volume(Some(100), 30), &space(1000, 20)), (100, 30, 20));
        assert_eq!(byte_usage(&volume(None, 30), &space(1000, 500)), (1000, 30, 500));
        assert_eq!(
            byte_usage(&volume(Some(u64::MAX), 1), &space(u64::MAX, u64::MAX)),
            (i64::MAX, 1, i64::MAX)
        );
    }

    proptest! {
        #[test]
        fn no_number_is_negative(limit: Option<u64>, used: u64, total: u64, free: u64) {
            let (total, used, available) = byte_usage(&volume(limit, used), &space(total, free));
            prop_assert!(total >= 0 && used >= 0 && (0..=total).contains(&available));
        }
    }
}

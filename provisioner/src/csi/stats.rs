//! How full a volume is, in the words of the CSI.

use std::io;
use std::os::fd::BorrowedFd;

use super::proto::csi::{VolumeUsage as Row, volume_usage::Unit};
use crate::store::VolumeUsage;

/// What a file system holds and has left, for whoever isn't root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Space {
    bytes: Left,
    inodes: Left,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Left {
    total: u64,
    free: u64,
}

impl Space {
    /// The space of the file system that a directory is on.
    pub(super) fn of(dir: BorrowedFd<'_>) -> io::Result<Self> {
        let stat = rustix::fs::fstatvfs(dir)?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(Self {
            bytes: Left { total: bytes(stat.f_blocks), free: bytes(stat.f_bavail) },
            inodes: Left { total: stat.f_files, free: stat.f_favail },
        })
    }
}

/// The rows that the kubelet shows. A volume without a limit may have the whole file system; and none can have more
/// than the file system has left, whatever its limit: limits are promises, not reservations.
pub(super) fn rows(volume: &VolumeUsage, space: &Space) -> Vec<Row> {
    let (limits, usage) = (volume.limits, volume.usage);
    vec![
        row(Unit::Bytes, limits.bytes.map(|bytes| bytes.0), usage.bytes.0, space.bytes),
        row(Unit::Inodes, limits.inodes.map(|inodes| inodes.0), usage.inodes.0, space.inodes),
    ]
}

fn row(unit: Unit, limit: Option<u64>, used: u64, left: Left) -> Row {
    let total = limit.unwrap_or(left.total);
    let available = total.saturating_sub(used).min(left.free);
    let signed = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    Row { unit: unit.into(), total: signed(total), used: signed(used), available: signed(available) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodekeel_fsquota::{Bytes, Inodes, Limits, Usage};
    use proptest::prelude::*;

    fn volume(limit: Option<u64>, used: u64) -> VolumeUsage {
        VolumeUsage {
            limits: Limits { bytes: limit.map(Bytes), inodes: limit.map(Inodes) },
            usage: Usage { bytes: Bytes(used), inodes: Inodes(used) },
        }
    }

    fn space(total: u64, free: u64) -> Space {
        let left = Left { total, free };
        Space { bytes: left, inodes: left }
    }

    fn numbers(volume: &VolumeUsage, space: &Space) -> (i64, i64, i64) {
        let rows = rows(volume, space);
        assert_eq!([rows[0].unit(), rows[1].unit()], [Unit::Bytes, Unit::Inodes]);
        (rows[0].total, rows[0].used, rows[0].available)
    }

    #[test]
    fn a_limit_is_the_size_and_what_is_over_it_leaves_nothing() {
        assert_eq!(numbers(&volume(Some(100), 30), &space(1000, 500)), (100, 30, 70));
        assert_eq!(numbers(&volume(Some(100), 130), &space(1000, 500)), (100, 130, 0));
        assert_eq!(numbers(&volume(Some(100), 30), &space(1000, 20)), (100, 30, 20));
        assert_eq!(numbers(&volume(None, 30), &space(1000, 500)), (1000, 30, 500));
        assert_eq!(numbers(&volume(Some(u64::MAX), 1), &space(u64::MAX, u64::MAX)), (i64::MAX, 1, i64::MAX));
    }

    proptest! {
        #[test]
        fn no_number_is_negative(limit: Option<u64>, used: u64, total: u64, free: u64) {
            let (total, used, available) = numbers(&volume(limit, used), &space(total, free));
            prop_assert!(total >= 0 && used >= 0 && (0..=total).contains(&available));
        }
    }
}

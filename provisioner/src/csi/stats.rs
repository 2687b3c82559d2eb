//! Usage of a volume, as CSI reports it.

use std::io;
use std::os::fd::BorrowedFd;

use super::proto::csi::{VolumeUsage as Row, volume_usage::Unit};
use crate::store::VolumeUsage;

/// Where a published volume has its space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PublishedSpace {
    /// A directory: below its limits, on the file system of all volumes.
    Limited(FilesystemSpace),
    /// A file system that is the volume's alone.
    Separate(FilesystemSpace),
    /// A block device, of which only the size is known.
    Device,
}

/// The total, used and free space of a file system; what is free is so for users other than root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FilesystemSpace {
    bytes: AvailableSpace,
    inodes: AvailableSpace,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct AvailableSpace {
    total: u64,
    used: u64,
    free: u64,
}

impl FilesystemSpace {
    /// The space of the file system that contains a directory.
    pub(super) fn from_fd(dir: BorrowedFd<'_>) -> io::Result<Self> {
        let stat = rustix::fs::fstatvfs(dir)?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        let used = |total: u64, free: u64| total.saturating_sub(free);
        // As df(1): the blocks reserved for root are neither used nor available.
        Ok(Self {
            bytes: AvailableSpace {
                total: bytes(stat.f_blocks),
                used: bytes(used(stat.f_blocks, stat.f_bfree)),
                free: bytes(stat.f_bavail),
            },
            inodes: AvailableSpace {
                total: stat.f_files,
                used: used(stat.f_files, stat.f_ffree),
                free: stat.f_favail,
            },
        })
    }
}

/// The usage that the kubelet shows. A directory without a limit can use the whole file system; and none
/// can use more than the file system's free space, also below its limit: limits are not reservations.
pub(super) fn usage_rows(volume: &VolumeUsage, space: &PublishedSpace) -> Vec<Row> {
    let (limits, usage) = (volume.limits, volume.usage);
    match space {
        PublishedSpace::Limited(space) => vec![
            limited_row(Unit::Bytes, limits.bytes.map(|bytes| bytes.0), usage.bytes.0, space.bytes),
            limited_row(Unit::Inodes, limits.inodes.map(|inodes| inodes.0), usage.inodes.0, space.inodes),
        ],
        PublishedSpace::Separate(space) => {
            vec![separate_row(Unit::Bytes, space.bytes), separate_row(Unit::Inodes, space.inodes)]
        }
        PublishedSpace::Device => {
            // The kernel does not know which blocks of a raw device hold data.
            let size = limits.bytes.map_or(0, |bytes| bytes.0);
            vec![Row { unit: Unit::Bytes.into(), total: signed(size), used: 0, available: 0 }]
        }
    }
}

fn limited_row(unit: Unit, limit: Option<u64>, used: u64, space_left: AvailableSpace) -> Row {
    let total = limit.unwrap_or(space_left.total);
    let free = total.saturating_sub(used).min(space_left.free);
    separate_row(unit, AvailableSpace { total, used, free })
}

fn separate_row(unit: Unit, space: AvailableSpace) -> Row {
    let AvailableSpace { total, used, free } = space;
    Row { unit: unit.into(), total: signed(total), used: signed(used), available: signed(free) }
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
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
        let space_left = AvailableSpace { total, used: total.saturating_sub(free), free };
        FilesystemSpace { bytes: space_left, inodes: space_left }
    }

    fn byte_usage(volume: &VolumeUsage, space: &FilesystemSpace) -> (i64, i64, i64) {
        let rows = usage_rows(volume, &PublishedSpace::Limited(*space));
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

    #[test]
    fn a_separate_file_system_shows_its_usage_and_a_device_its_size() {
        let rows = usage_rows(&volume(Some(100), 30), &PublishedSpace::Separate(space(90, 50)));
        assert_eq!(
            rows.iter().map(|row| (row.total, row.used, row.available)).collect::<Vec<_>>(),
            [(90, 40, 50); 2]
        );
        let rows = usage_rows(&volume(Some(100), 30), &PublishedSpace::Device);
        assert_eq!(rows, [Row { unit: Unit::Bytes.into(), total: 100, used: 0, available: 0 }]);
    }

    proptest! {
        #[test]
        fn no_number_is_negative(limit: Option<u64>, used: u64, total: u64, free: u64) {
            let (total, used, available) = byte_usage(&volume(limit, used), &space(total, free));
            prop_assert!(total >= 0 && used >= 0 && (0..=total).contains(&available));
        }
    }
}

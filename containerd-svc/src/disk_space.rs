//! Free space on the disk of an image store.

use std::ops::Add;

use crate::store::ImageStoreError;

/// The space that stays free on the disk of an image store: other programs on it, like etcd, stop when it is full.
///
/// Default: 5 % of the disk or 1 GiB, whichever is larger, but at most 20 % of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskReserve(Option<u64>);

/// Space on a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskUsage {
    /// Bytes.
    pub bytes: u64,
    /// Inodes: files, directories and links.
    pub inodes: u64,
}

/// The space of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskSpace {
    /// What may be used. A disk without a limit of inodes has [`u64::MAX`].
    pub available: DiskUsage,
    /// What stays free.
    pub reserve: DiskUsage,
}

/// Content does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{needed} {unit} are needed, but {available} are free above the reserve of {reserve} {unit}, which stays \
     free"
)]
struct SpaceError {
    unit: &'static str,
    needed: u64,
    available: u64,
    reserve: u64,
}

/// What an unpacked layer takes besides its files: the directories and the record of a snapshot.
pub(crate) const UNPACKED_USAGE: DiskUsage = DiskUsage { bytes: 64 << 10, inodes: 8 };

/// The unit in which most file systems allocate space to a file.
const BLOCK_BYTES: u64 = 4096;

impl DiskUsage {
    /// What a file of this size takes.
    pub(crate) fn of_file(size: u64) -> Self {
        Self { bytes: size.checked_next_multiple_of(BLOCK_BYTES).unwrap_or(size), inodes: 1 }
    }

    /// Returns whether neither exceeds the room.
    pub(crate) fn fits_into(self, room: Self) -> bool {
        self.bytes <= room.bytes && self.inodes <= room.inodes
    }
}

impl Add for DiskUsage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            inodes: self.inodes.saturating_add(other.inodes),
        }
    }
}

impl DiskReserve {
    /// This many bytes on a disk of any size; 0 for no reserve.
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(Some(bytes))
    }

    /// The reserve of a disk of this size, in bytes.
    pub fn bytes_on(self, disk_bytes: u64) -> u64 {
        const GIBIBYTE: u64 = 1 << 30;
        // On a small disk, 1 GiB could be most of it: hence the upper bound.
        self.0.unwrap_or_else(|| (disk_bytes / 20).max(GIBIBYTE).min(disk_bytes / 5))
    }
}

impl DiskSpace {
    /// The space of a disk that may be used. `free` includes what the file system keeps for root, which counts as a part of
    /// the reserve; `bytes_for_users` does not. The reserve has the same share of the inodes as of the bytes; a disk that
    /// counts none has 0 in all.
    pub fn above_reserve(
        reserve: DiskReserve,
        all: DiskUsage,
        free: DiskUsage,
        bytes_for_users: u64,
    ) -> Self {
        let bytes = reserve.bytes_on(all.bytes);
        let share = u128::from(all.inodes) * u128::from(bytes) / u128::from(all.bytes.max(1));
        let reserve = DiskUsage { bytes, inodes: u64::try_from(share).unwrap_or(u64::MAX) };
        let inodes = if all.inodes == 0 { u64::MAX } else { free.inodes.saturating_sub(reserve.inodes) };
        let bytes = free.bytes.saturating_sub(bytes).min(bytes_for_users);
        Self { available: DiskUsage { bytes, inodes }, reserve }
    }

    /// The space of it that may be used in a directory in which less is available, because of a separate limit.
    #[must_use]
    pub fn limited_to(self, bytes: u64) -> Self {
        let available = DiskUsage { bytes: self.available.bytes.min(bytes), ..self.available };
        Self { available, ..self }
    }

    /// The space of it that others have not claimed.
    pub(crate) fn without(self, claimed: DiskUsage) -> Self {
        let available = DiskUsage {
            bytes: self.available.bytes.saturating_sub(claimed.bytes),
            // A disk without a limit of them has no less.
            inodes: match self.available.inodes {
                u64::MAX => u64::MAX,
                inodes => inodes.saturating_sub(claimed.inodes),
            },
        };
        Self { available, ..self }
    }

    /// Checks that something fits.
    pub(crate) fn check_fits(self, needed: DiskUsage, what: &str) -> Result<(), ImageStoreError> {
        let Self { available, reserve } = self;
        let (unit, of): (_, fn(DiskUsage) -> u64) = match needed {
            _ if needed.bytes > available.bytes => ("bytes", |usage| usage.bytes),
            _ if needed.inodes > available.inodes => ("inodes", |usage| usage.inodes),
            _ => return Ok(()),
        };
        let source = SpaceError { unit, needed: of(needed), available: of(available), reserve: of(reserve) };
        Err(ImageStoreError::NoSpace { what: what.to_owned(), source: source.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_default_reserve_is_the_larger_of_5_percent_and_1_gib_and_at_most_20_percent() {
        let cases =
            [(0, 0), (1000, 200), (GIB, GIB / 5), (5 * GIB, GIB), (20 * GIB, GIB), (100 * GIB, 5 * GIB)];
        for (disk, reserve) in cases {
            assert_eq!(DiskReserve::default().bytes_on(disk), reserve, "{disk}");
        }
        assert_eq!(DiskReserve::from_bytes(7).bytes_on(100 * GIB), 7);
    }

    fn usage(bytes: u64, inodes: u64) -> DiskUsage {
        DiskUsage { bytes, inodes }
    }

    #[test]
    fn what_the_file_system_keeps_for_root_counts_as_reserve_and_is_never_used() {
        let space = |free, users| {
            let reserve = DiskReserve::from_bytes(100);
            DiskSpace::above_reserve(reserve, usage(1000, 0), usage(free, 0), users).available.bytes
        };
        assert_eq!([space(500, 450), space(500, 300), space(100, 50), space(90, 40)], [400, 300, 0, 0]);
    }

    #[test]
    fn the_same_share_of_the_inodes_stays_free_on_a_disk_that_counts_them() {
        let inodes = |all, free| {
            let reserve = DiskReserve::from_bytes(100);
            DiskSpace::above_reserve(reserve, usage(1000, all), usage(500, free), 500).available.inodes
        };
        assert_eq!([inodes(50, 30), inodes(50, 4), inodes(0, 0)], [25, 0, u64::MAX]);
    }

    #[test]
    fn a_limit_of_the_directory_and_the_reserve_of_the_disk_both_bind() {
        let disk = DiskSpace { available: usage(300, 1), reserve: usage(7, 0) };
        assert_eq!([200, 400].map(|left| disk.limited_to(left).available.bytes), [200, 300]);
    }

    #[test]
    fn what_does_not_fit_is_an_error_with_all_numbers() {
        let space = DiskSpace { available: usage(10, 5), reserve: usage(7, 2) };
        assert!(space.check_fits(usage(10, 5), "x").is_ok());
        for (needed, parts) in [
            (usage(11, 9), ["the archive", "11 bytes", "10 are free", "reserve of 7 bytes"]),
            (usage(10, 6), ["the archive", "6 inodes", "5 are free", "reserve of 2 inodes"]),
        ] {
            let error = crate::import::error_chain(&space.check_fits(needed, "the archive").unwrap_err());
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }
}

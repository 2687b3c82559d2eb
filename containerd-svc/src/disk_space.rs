//! Free space on the disk of an image store.

use crate::store::{ErrorSource, ImageStoreError};

/// The space that stays free on the disk of an image store: other programs on it, like etcd, stop when it is full.
///
/// Default: 5 % of the disk or 1 GiB, whichever is larger, but at most 20 % of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskReserve(Option<u64>);

/// The space of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskSpace {
    /// Bytes that may be written.
    pub available: u64,
    /// Bytes that stay free.
    pub reserve: u64,
}

/// Content does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{needed} bytes are needed, but {available} are free above the reserve of {reserve} bytes, which stays \
     free"
)]
struct SpaceError {
    needed: u64,
    available: u64,
    reserve: u64,
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
    /// The bytes of a disk that may be written. `free` includes what the file system keeps for root, which counts as a
    /// part of the reserve; `available_to_users` does not.
    pub fn above_reserve(reserve: DiskReserve, disk_bytes: u64, free: u64, available_to_users: u64) -> Self {
        let reserve = reserve.bytes_on(disk_bytes);
        Self { available: free.saturating_sub(reserve).min(available_to_users), reserve }
    }

    /// The bytes of it that may be written in a directory in which less is available, because of a separate limit.
    #[must_use]
    pub fn limited_to(self, available: u64) -> Self {
        Self { available: self.available.min(available), ..self }
    }

    /// Checks that something fits.
    pub(crate) fn check_fits(self, needed: u64, what: &str) -> Result<(), ImageStoreError> {
        let Self { available, reserve } = self;
        if needed <= available {
            return Ok(());
        }
        let source: ErrorSource = SpaceError { needed, available, reserve }.into();
        Err(ImageStoreError::NoSpace { what: what.to_owned(), source })
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

    #[test]
    fn what_the_file_system_keeps_for_root_counts_as_reserve_and_is_never_used() {
        let space =
            |free, users| DiskSpace::above_reserve(DiskReserve::from_bytes(100), 1000, free, users).available;
        assert_eq!([space(500, 450), space(500, 300), space(100, 50), space(90, 40)], [400, 300, 0, 0]);
    }

    #[test]
    fn a_limit_of_the_directory_and_the_reserve_of_the_disk_both_bind() {
        let disk = DiskSpace { available: 300, reserve: 7 };
        assert_eq!([200, 400].map(|left| disk.limited_to(left).available), [200, 300]);
    }

    #[test]
    fn what_does_not_fit_is_an_error_with_all_numbers() {
        let space = DiskSpace { available: 10, reserve: 7 };
        assert!(space.check_fits(10, "x").is_ok());
        let error = crate::import::error_chain(&space.check_fits(11, "the archive").unwrap_err());
        for part in ["the archive", "11 bytes", "10 are free", "reserve of 7"] {
            assert!(error.contains(part), "{error}");
        }
    }
}

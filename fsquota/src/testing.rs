//! An implementation in memory, the suite that every implementation passes, and checks over arbitrary input: property
//! tests run those on what proptest makes up, fuzz targets on what the fuzzer finds.

mod bare;
mod checks;
mod conformance;
pub(crate) mod memory;

use std::io;
use std::os::fd::BorrowedFd;

pub use bare::Bare;
pub use checks::{check_fdinfo, check_mountinfo, check_quantity};
pub use conformance::conformance;

use crate::engine::{Contents, Engine};
use crate::error::Call;
use crate::{Change, Error, ProjectId, ProjectRange, QuotaSetter, Status};
use memory::Memory;

/// Quotas that are kept in memory and bind nobody: for tests of what uses a [`QuotaSetter`], as any user, on any file
/// system.
///
/// It is [`ProjectQuota`](crate::ProjectQuota) over a map instead of a kernel: allocation, order of the calls and
/// errors are the same code. Usage is what is really there, counted by looking; whatever is in a limited directory
/// belongs to it, as if it had been made after the limits. It holds one descriptor for each limited directory.
#[derive(Debug)]
pub struct MemQuota(Engine<Memory>);

impl MemQuota {
    /// With the default range.
    pub fn new() -> Self {
        Self::with_range(ProjectRange::default())
    }

    /// With a range of its own, such as a small one that can be exhausted.
    pub fn with_range(range: ProjectRange) -> Self {
        Self(Engine::new(Memory::default(), range))
    }

    /// Every project, by number.
    pub fn list(&self) -> Vec<Status> {
        self.0.kernel.without_failures(|| self.0.list(ProjectRange::all())).unwrap_or_default()
    }

    /// Makes the next call of this kind fail; of several, in turn.
    pub fn fail(&self, call: Call, error: io::ErrorKind) {
        self.0.kernel.fail(call, error);
    }
}

impl Default for MemQuota {
    fn default() -> Self {
        Self::new()
    }
}

impl QuotaSetter for MemQuota {
    fn set(&self, dir: BorrowedFd<'_>, change: Change) -> Result<Status, Error> {
        self.0.set(dir, change, Contents::Refused)
    }

    fn status(&self, dir: BorrowedFd<'_>) -> Result<Option<Status>, Error> {
        self.0.status(dir)
    }

    fn clear(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        self.0.clear(dir)
    }

    fn release(&self, project: ProjectId) -> Result<(), Error> {
        self.0.release(project)
    }

    fn release_unused(&self, kept: &[ProjectId]) -> Result<Vec<ProjectId>, Error> {
        self.0.release_all_unused(kept)
    }
}

/// [`ProjectQuota`](crate::ProjectQuota) that names the device to the kernel, as it does before Linux 5.14.
///
/// # Errors
/// As [`ProjectQuota::open`](crate::ProjectQuota::open).
pub fn by_device(path: &std::path::Path) -> Result<crate::ProjectQuota, crate::OpenError> {
    crate::ProjectQuota::open_by(path, ProjectRange::default(), crate::file_system::Way::Device)
}

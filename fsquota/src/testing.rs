//! An implementation in memory, the conformance suite for every implementation, and checks over arbitrary
//! input, which property tests and fuzz targets share.

mod checks;
mod conformance;
pub(crate) mod memory;
mod raw_calls;
mod same_calls;

use std::io;
use std::os::fd::BorrowedFd;

pub use checks::{fuzz_owner_mark, fuzz_quantity};
pub use conformance::conformance;
pub use raw_calls::RawQuotaCalls;

use crate::engine::{NonEmptyPolicy, QuotaEngine};
use crate::error::KernelOperation;
use crate::{Error, ProjectId, ProjectRange, QuotaChange, QuotaSetter, QuotaStatus, TreeSummary};
use memory::MemoryKernel;

/// Quotas in memory that are not enforced: for tests of code that uses a [`QuotaSetter`], as any user, on any
/// file system.
///
/// It is [`ProjectQuota`](crate::ProjectQuota) over a map instead of a kernel: allocation, order of the calls
/// and errors are the same code. Usage is counted by walking the directory tree; every entry of a limited
/// directory belongs to its project, as if it had been created after the limits. It holds one descriptor for
/// each limited directory.
#[derive(Debug)]
pub struct MemQuota(QuotaEngine<MemoryKernel>);

impl MemQuota {
    /// Creates quotas with the default range.
    pub fn new() -> Self {
        Self::with_range(ProjectRange::default())
    }

    /// Creates quotas with another range, such as a small one that can be exhausted.
    pub fn with_range(range: ProjectRange) -> Self {
        Self(QuotaEngine::new(MemoryKernel::default(), range))
    }

    /// Every project, by number.
    pub fn list_projects(&self) -> Vec<QuotaStatus> {
        self.0
            .kernel
            .without_failures(|| self.0.list_projects(ProjectRange::full_range()))
            .unwrap_or_default()
    }

    /// Makes the next call of this kind fail. Repeated calls queue several failures.
    pub fn fail_next_kernel_call(&self, call: KernelOperation, error: io::ErrorKind) {
        self.0.kernel.fail_next_call(call, error);
    }
}

impl Default for MemQuota {
    fn default() -> Self {
        Self::new()
    }
}

impl QuotaSetter for MemQuota {
    fn set_limits(&self, dir: BorrowedFd<'_>, change: QuotaChange) -> Result<QuotaStatus, Error> {
        self.0.set_limits(dir, change, NonEmptyPolicy::Reject)
    }

    fn read_status(&self, dir: BorrowedFd<'_>) -> Result<Option<QuotaStatus>, Error> {
        self.0.read_status(dir)
    }

    fn find_project(&self, dir: BorrowedFd<'_>) -> Result<Option<ProjectId>, Error> {
        self.0.find_project(dir)
    }

    fn clear_limits(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        self.0.clear_limits(dir)
    }

    fn limit_tree(
        &self,
        dir: BorrowedFd<'_>,
        change: QuotaChange,
    ) -> Result<(QuotaStatus, TreeSummary), Error> {
        // Its usage is that of the tree, whatever was there before.
        Ok((self.0.set_limits(dir, change, NonEmptyPolicy::Accept)?, TreeSummary::default()))
    }

    fn release_project(&self, project: ProjectId) -> Result<(), Error> {
        self.0.release_project(project)
    }

    fn release_unused_projects(&self, kept: &[ProjectId]) -> Result<Vec<ProjectId>, Error> {
        self.0.release_unused_projects(kept)
    }
}

/// Opens a [`ProjectQuota`](crate::ProjectQuota) that names the device to the kernel, as before Linux 5.14.
///
/// # Errors
/// As [`ProjectQuota::open`](crate::ProjectQuota::open).
pub fn open_by_device(path: &std::path::Path) -> Result<crate::ProjectQuota, crate::OpenError> {
    crate::ProjectQuota::open_with_mode(
        path,
        ProjectRange::default(),
        (crate::file_system::OpenMode::Change, crate::file_system::QuotactlMode::ByDevice),
    )
}

//! An implementation in memory, the conformance suite for every implementation, and checks over arbitrary
//! input, which property tests and fuzz targets share.

mod conformance;
pub(crate) mod memory;
mod raw_calls;
mod same_calls;

use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

pub use conformance::conformance;
pub use raw_calls::RawQuotaCalls;

use crate::engine::{NonEmptyPolicy, QuotaEngine};
use crate::error::KernelOperation;
use crate::file_system::{OpenMode, QuotactlMode};
use crate::owner::OwnerRecord;
use crate::{
    Bytes, Error, Inodes, OpenError, ProjectId, ProjectQuota, ProjectRange, QuotaChange, QuotaSetter,
    QuotaStatus, TreeSummary,
};
use memory::MemoryKernel;

/// Quotas in memory that are not enforced: for tests of code that uses a [`QuotaSetter`], as any user, on any
/// file system.
///
/// This is [`ProjectQuota`] over a map instead of a kernel: allocation, order of the calls
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

    fn owns_project(&self, dir: BorrowedFd<'_>) -> Result<bool, Error> {
        self.0.owns_project(dir)
    }

    fn clear_limits(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        self.0.clear_limits(dir)
    }

    fn limit_tree(
        &self,
        dir: BorrowedFd<'_>,
        change: QuotaChange,
    ) -> Result<(QuotaStatus, TreeSummary), Error> {
        // Its usage is that of the tree, with the entries that were there before.
        let status = self.0.set_limits(dir, change, NonEmptyPolicy::Accept)?;
        self.0.forget_previous_project(dir)?;
        Ok((status, TreeSummary::default()))
    }

    fn release_project(&self, project: ProjectId) -> Result<(), Error> {
        self.0.release_project(project)
    }

    fn release_unused_projects(&self, kept: &[ProjectId]) -> Result<Vec<ProjectId>, Error> {
        self.0.release_unused_projects(kept)
    }
}

/// Opens a [`ProjectQuota`] that names the device to the kernel, as before Linux 5.14.
///
/// # Errors
/// As [`ProjectQuota::open`].
pub fn open_by_device(path: &Path) -> Result<ProjectQuota, OpenError> {
    ProjectQuota::open_with_mode(path, ProjectRange::default(), OpenMode::Change, QuotactlMode::ByDevice)
}

/// Any text parses as a quantity or is rejected. A quantity parses back from its `Display`, and is not less
/// than its digits.
pub fn fuzz_quantity(text: &[u8]) {
    let text = String::from_utf8_lossy(text);
    if let Ok(bytes) = text.parse::<Bytes>() {
        assert_eq!(bytes.to_string().parse(), Ok(bytes), "{text:?}");
        let digits = text.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
        assert!(digits.parse().is_ok_and(|digits: u64| bytes.0 >= digits), "{text:?} became {bytes}");
    }
    if let Ok(inodes) = text.parse::<Inodes>() {
        assert_eq!(inodes.to_string().parse(), Ok(inodes), "{text:?}");
        assert_eq!(text.parse(), Ok(Bytes(inodes.0)), "both parse alike");
    }
}

/// Any value of the owner's attribute is a mark or damaged. A mark parses back from its text.
pub fn fuzz_owner_mark(value: &[u8]) {
    if let Some(record) = OwnerRecord::parse(value) {
        assert_eq!(OwnerRecord::parse(record.to_string().as_bytes()), Some(record));
    }
}

//! Single kernel calls, to measure the parts of the larger operations.

use std::os::fd::BorrowedFd;

use crate::kernel::{ProjectTag, QuotaKernel as _};
use crate::limits::KernelLimitChange;
use crate::{Error, ProjectId, ProjectQuota, ProjectRange, error::KernelOperation};

/// The single calls of a [`ProjectQuota`], without its safeguards: two callers can use the same number.
#[derive(Clone, Copy, Debug)]
pub struct RawQuotaCalls<'a>(pub &'a ProjectQuota);

impl RawQuotaCalls<'_> {
    /// Sets the limits of a project, whether or not it has inodes.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn write_limits(self, project: ProjectId, kib: u64, inodes: u64) -> Result<(), Error> {
        let change = KernelLimitChange { kib: Some(kib), inodes: Some(inodes) };
        self.0
            .engine()
            .kernel
            .set_limits(project.get(), change)
            .map_err(KernelOperation::WriteLimits.into_error())
    }

    /// Queries the kernel once whether a project is allocated.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn is_allocated(self, project: ProjectId) -> Result<bool, Error> {
        let record = self
            .0
            .engine()
            .kernel
            .quota_record(project.get())
            .map_err(KernelOperation::ReadLimits.into_error())?;
        Ok(record != crate::kernel::QuotaRecord::default())
    }

    /// Assigns a directory to a project.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn tag_directory(self, dir: BorrowedFd<'_>, project: ProjectId) -> Result<(), Error> {
        let tag = ProjectTag { project: project.get(), inherit: true };
        self.0.engine().kernel.set_project_tag(dir, tag).map_err(KernelOperation::WriteProject.into_error())
    }

    /// Removes an entry from its project, as its owner can.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn leave_project(self, file: BorrowedFd<'_>) -> Result<(), Error> {
        let left = self.0.engine().kernel.set_project_tag(file, ProjectTag::default());
        left.map_err(KernelOperation::WriteProject.into_error())
    }

    /// Turns the enforcement of limits off, as `xfs_quota -x -c 'disable -p'` and `quotaoff -P` do.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn turn_enforcement_off(self) -> Result<(), Error> {
        let target = self.0.engine().kernel.quota_target();
        crate::sys::turn_enforcement_off(target).map_err(KernelOperation::WriteLimits.into_error())
    }

    /// Finds a free number as [`set_limits`](crate::QuotaSetter::set_limits) does, including the lock,
    /// without using it.
    ///
    /// # Errors
    /// As [`set_limits`](crate::QuotaSetter::set_limits).
    pub fn find_free_project(self) -> Result<ProjectId, Error> {
        self.0.engine().find_free_project()
    }

    /// The range that numbers are allocated from.
    pub fn project_range(self) -> ProjectRange {
        self.0.engine().project_range()
    }
}

//! Single kernel calls, to measure the parts of the larger operations.

use std::os::fd::BorrowedFd;

use crate::kernel::{ProjectTag, QuotaKernel as _, QuotaRecord};
use crate::limits::KernelLimitChange;
use crate::linux::LinuxKernel;
use crate::{Error, ProjectId, ProjectQuota, ProjectRange, error::KernelOperation};

/// The single calls of a [`ProjectQuota`], without its safeguards: two callers can use the same number.
#[derive(Clone, Copy, Debug)]
pub struct RawQuotaCalls<'a>(pub &'a ProjectQuota);

impl RawQuotaCalls<'_> {
    fn kernel(&self) -> &LinuxKernel {
        &self.0.engine().kernel
    }

    /// Sets the limits of a project, whether or not it has inodes.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn write_limits(self, project: ProjectId, kib: u64, inodes: u64) -> Result<(), Error> {
        let change = KernelLimitChange { kib: Some(kib), inodes: Some(inodes) };
        self.kernel().set_limits(project.get(), change).map_err(KernelOperation::WriteLimits.into_error())
    }

    /// Queries the kernel once whether a project is allocated.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn is_allocated(self, project: ProjectId) -> Result<bool, Error> {
        let record = self.kernel().quota_record(project.get());
        Ok(record.map_err(KernelOperation::ReadLimits.into_error())? != QuotaRecord::default())
    }

    /// Assigns a directory to a project.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn tag_directory(self, dir: BorrowedFd<'_>, project: ProjectId) -> Result<(), Error> {
        let tag = ProjectTag { project: project.get(), inherit: true };
        self.kernel().set_project_tag(dir, tag).map_err(KernelOperation::WriteProject.into_error())
    }

    /// Removes an entry from its project, as its owner can.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn leave_project(self, file: BorrowedFd<'_>) -> Result<(), Error> {
        let left = self.kernel().set_project_tag(file, ProjectTag::default());
        left.map_err(KernelOperation::WriteProject.into_error())
    }

    /// Turns the enforcement of limits off, as `xfs_quota -x -c 'disable -p'` and `quotaoff -P` do.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn turn_enforcement_off(self) -> Result<(), Error> {
        let target = self.kernel().quota_target();
        crate::sys::turn_enforcement_off(target).map_err(KernelOperation::WriteLimits.into_error())
    }

    /// Calls `work` with the search for a free number, as [`set_limits`](crate::QuotaSetter::set_limits) does it under
    /// the lock, without using the numbers.
    ///
    /// # Errors
    /// As [`set_limits`](crate::QuotaSetter::set_limits).
    pub fn search_free_projects<T>(
        self,
        work: impl FnOnce(&mut dyn FnMut() -> Result<ProjectId, Error>) -> T,
    ) -> Result<T, Error> {
        self.0.engine().search_free_projects(work)
    }

    /// The range that numbers are allocated from.
    pub fn project_range(self) -> ProjectRange {
        self.0.engine().project_range()
    }

    /// Holds a lease on a file that is open for writing, as its owner can: until it is given back, opening it fails
    /// with EAGAIN where it would not block. The process gets SIGURG then.
    ///
    /// # Errors
    /// That of the kernel.
    pub fn hold_write_lease(file: BorrowedFd<'_>) -> std::io::Result<()> {
        crate::sys::hold_write_lease(file)
    }

    /// Gives the lease on a file back.
    ///
    /// # Errors
    /// That of the kernel.
    pub fn release_lease(file: BorrowedFd<'_>) -> std::io::Result<()> {
        crate::sys::release_lease(file)
    }
}

//! Single calls, to measure what the others are made of.

use std::os::fd::BorrowedFd;

use crate::kernel::{Kernel as _, Tag};
use crate::limits::KernelChange;
use crate::{Error, ProjectId, ProjectQuota, ProjectRange, error::Call};

/// The calls of a [`ProjectQuota`], one by one and without its care: nothing keeps two from the same number.
#[derive(Clone, Copy, Debug)]
pub struct Bare<'a>(pub &'a ProjectQuota);

impl Bare<'_> {
    /// Sets limits for a number, whether or not anything belongs to it.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn limit(self, project: ProjectId, kib: u64, inodes: u64) -> Result<(), Error> {
        let change = KernelChange { kib: Some(kib), inodes: Some(inodes) };
        self.0.engine().kernel.set_limits(project.get(), change).map_err(Call::WriteLimits.failed())
    }

    /// Asks once whether a number is taken.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn is_taken(self, project: ProjectId) -> Result<bool, Error> {
        let record = self.0.engine().kernel.record(project.get()).map_err(Call::ReadLimits.failed())?;
        Ok(record != crate::kernel::Record::default())
    }

    /// Gives a directory a number.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn tag(self, dir: BorrowedFd<'_>, project: ProjectId) -> Result<(), Error> {
        let tag = Tag { project: project.get(), inherit: true };
        self.0.engine().kernel.set_tag(dir, tag).map_err(Call::WriteProject.failed())
    }

    /// Finds a free number as [`set`](crate::QuotaSetter::set) does, lock included, and gives it to nobody.
    ///
    /// # Errors
    /// As [`set`](crate::QuotaSetter::set).
    pub fn find_free(self) -> Result<ProjectId, Error> {
        self.0.engine().find_free()
    }

    /// The range that numbers are given from.
    pub fn range(self) -> ProjectRange {
        self.0.engine().range()
    }
}

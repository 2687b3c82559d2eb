//! Allocates a project to a directory, while no other caller does.

use std::os::fd::BorrowedFd;
use std::sync::{MutexGuard, PoisonError};
use std::time::Instant;

use super::QuotaEngine;
use crate::error::{KernelOperation, LOCK_TIMEOUT};
use crate::kernel::{KernelProjects, ProjectTag, QuotaKernel};
use crate::limits::KernelLimitChange;
use crate::owner::OwnerMark;
use crate::range::find_free_project;
use crate::{Error, ProjectId};

/// How often an allocation restarts because a program without our lock allocated the same number.
const ALLOCATION_ATTEMPTS: u32 = 16;

/// Held while the inodes or limits of a project are read and changed, so that no other caller allocates,
/// releases or changes it meanwhile.
pub(super) struct AllocationGuard<'a, K: QuotaKernel> {
    engine: &'a QuotaEngine<K>,
    cursor: MutexGuard<'a, ProjectId>,
}

impl<K: QuotaKernel> AllocationGuard<'_, K> {
    pub(super) fn next_free_project(&mut self) -> Result<ProjectId, Error> {
        let QuotaEngine { kernel, project_range: range, .. } = self.engine;
        let found = find_free_project(&KernelProjects(kernel), *range, *self.cursor)
            .map_err(KernelOperation::ReadLimits.into_error())?;
        let project =
            found.ok_or(Error::RangeExhausted { first: range.first_id(), last: range.last_id() })?;
        *self.cursor = range.next_after(project);
        Ok(project)
    }
}

impl<K: QuotaKernel> Drop for AllocationGuard<'_, K> {
    fn drop(&mut self) {
        self.engine.kernel.unlock_allocation();
    }
}

impl<K: QuotaKernel> QuotaEngine<K> {
    /// Gives a directory a project with limits. The limits come first, so nothing is ever created in it
    /// without them; the mark comes before the project, so no owner is without it.
    pub(super) fn allocate_project(
        &self,
        allocation: &mut AllocationGuard<'_, K>,
        dir: BorrowedFd<'_>,
        (change, previous): (KernelLimitChange, Option<u32>),
    ) -> Result<ProjectId, Error> {
        let before = self.project_tag(dir)?;
        for _ in 0..ALLOCATION_ATTEMPTS {
            let project = allocation.next_free_project()?;
            self.write_limits(project, change.for_new_project())?;
            let mark = OwnerMark { project: project.get(), previous };
            let tag = ProjectTag { project: project.get(), inherit: true };
            let tagged = self.set_owner_mark(dir, Some(mark)).and_then(|()| self.set_project_tag(dir, tag));
            if tagged.is_err() {
                // The caller gets the error of the directory; `release_unused_projects` finds limits that
                // stay, and a mark without its project says nothing.
                let _ = self.write_limits(project, KernelLimitChange::UNLIMITED);
                let _ = self.set_owner_mark(dir, None);
            }
            tagged?;
            // A program without our lock may have allocated the same number between our lookup and our tag.
            if !self.is_shared(dir, project)? {
                return Ok(project);
            }
            // The limits may belong to the other program by now, so they stay.
            self.set_project_tag(dir, before)?;
            self.set_owner_mark(dir, None)?;
        }
        Err(Error::AllocationContended)
    }

    pub(super) fn lock_allocation(&self) -> Result<AllocationGuard<'_, K>, Error> {
        // Counted from before the mutex: threads that wait for the same process give up together.
        let deadline = Instant::now() + LOCK_TIMEOUT;
        let cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        self.kernel.lock_allocation(deadline)?;
        Ok(AllocationGuard { engine: self, cursor })
    }
}

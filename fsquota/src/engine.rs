//! The order of the kernel calls: what is read before what is written, and what is undone when a call fails.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::FileType;
use rustix::io::Errno;

use crate::error::KernelOperation;
use crate::kernel::{KernelProjects, ProjectTag, QuotaKernel, QuotaRecord};
use crate::limits::KernelLimitChange;
use crate::range::{ProjectRange, find_free_project};
use crate::{Error, ProjectId, QuotaChange, QuotaStatus, QuotaUsage};

/// How often an allocation restarts because a program without our lock allocated the same number.
const ALLOCATION_ATTEMPTS: u32 = 16;

/// [`QuotaSetter`](crate::QuotaSetter) over the calls of a kernel.
#[derive(Debug)]
pub(crate) struct QuotaEngine<K> {
    pub(crate) kernel: K,
    project_range: ProjectRange,
    /// The next number to try; its lock is held while anything is changed.
    cursor: Mutex<ProjectId>,
    /// The only file system whose directories are accepted; `None` accepts all.
    device: Option<u64>,
}

/// What happens to a directory without a project that is not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NonEmptyPolicy {
    Reject,
    Accept,
}

impl<K: QuotaKernel> QuotaEngine<K> {
    pub(crate) fn new(kernel: K, project_range: ProjectRange) -> Self {
        Self { kernel, project_range, cursor: Mutex::new(project_range.first_id()), device: None }
    }

    /// Rejects directories of other file systems.
    pub(crate) fn restrict_to_device(self, device: u64) -> Self {
        Self { device: Some(device), ..self }
    }

    /// Starts the search for free numbers at `cursor`.
    pub(crate) fn with_cursor(self, cursor: ProjectId) -> Self {
        Self { cursor: Mutex::new(cursor), ..self }
    }

    pub(crate) fn set_limits(
        &self,
        dir: BorrowedFd<'_>,
        change: QuotaChange,
        contents: NonEmptyPolicy,
    ) -> Result<QuotaStatus, Error> {
        let change = KernelLimitChange::try_from(change).map_err(Error::InvalidLimit)?;
        if self.inspect_directory(dir)?.is_removed {
            return Err(Error::Removed);
        }
        let mut allocation = self.lock_allocation()?;
        let tag = self.project_tag(dir)?;
        let project = ProjectId::new(tag.project);
        // False also if clearing it was started and not finished: its entries may have lost the project
        // already.
        let is_counted = project.is_some() && tag.inherit;
        if !is_counted && contents == NonEmptyPolicy::Reject && !is_empty_directory(dir)? {
            return Err(Error::NotEmpty);
        }
        let project = match project {
            Some(project) => self.change_limits(dir, project, change)?,
            None => self.allocate_project(&mut allocation, dir, change)?,
        };
        drop(allocation);
        self.project_status(project)
    }

    pub(crate) fn read_status(&self, dir: BorrowedFd<'_>) -> Result<Option<QuotaStatus>, Error> {
        self.inspect_directory(dir)?;
        ProjectId::new(self.project_tag(dir)?.project).map(|project| self.project_status(project)).transpose()
    }

    pub(crate) fn clear_limits(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        let is_removed = self.inspect_directory(dir)?.is_removed;
        let _allocation = self.lock_allocation()?;
        let Some(project) = ProjectId::new(self.project_tag(dir)?.project) else { return Ok(()) };
        if !is_removed {
            // Checked first: that the project is inherited says more than that the directory is not empty.
            self.reject_inherited(dir)?;
            if !is_empty_directory(dir)? {
                return Err(Error::NotEmpty);
            }
        }
        let is_shared = self.is_shared(dir, project)?;
        self.detach_project(dir, (!is_shared).then_some(project))
    }

    /// Stops new entries of the directory from inheriting its project; the limits stay until clearing is
    /// finished.
    pub(crate) fn start_clearing(&self, dir: BorrowedFd<'_>) -> Result<Option<ProjectId>, Error> {
        self.inspect_directory(dir)?;
        let _allocation = self.lock_allocation()?;
        let tag = self.project_tag(dir)?;
        let Some(project) = ProjectId::new(tag.project) else { return Ok(None) };
        self.reject_inherited(dir)?;
        self.set_project_tag(dir, ProjectTag { inherit: false, ..tag })?;
        Ok(Some(project))
    }

    /// Completes clearing, once no entry of the directory has its project.
    pub(crate) fn finish_clearing(&self, dir: BorrowedFd<'_>, project: ProjectId) -> Result<(), Error> {
        let _allocation = self.lock_allocation()?;
        if self.project_tag(dir)? != (ProjectTag { project: project.get(), inherit: false }) {
            // Another caller has set limits again meanwhile.
            return Ok(());
        }
        let has_more = self.has_several_inodes(project)?;
        self.detach_project(dir, (!has_more).then_some(project))
    }

    /// Lifts the limits of the project, then removes the project from the directory: if the process is killed
    /// in between, the directory still names the project.
    fn detach_project(&self, dir: BorrowedFd<'_>, unlimited: Option<ProjectId>) -> Result<(), Error> {
        if let Some(project) = unlimited {
            self.write_limits(project, KernelLimitChange::UNLIMITED)?;
        }
        self.set_project_tag(dir, ProjectTag::default())
    }

    #[cfg(feature = "testing")]
    pub(crate) fn project_range(&self) -> ProjectRange {
        self.project_range
    }

    /// Finds the number that the next directory would get, and skips it.
    #[cfg(feature = "testing")]
    pub(crate) fn find_free_project(&self) -> Result<ProjectId, Error> {
        self.lock_allocation()?.next_free_project()
    }

    /// Lifts the limits of a project without inodes.
    pub(crate) fn release_project(&self, project: ProjectId) -> Result<(), Error> {
        if self.quota_record(project)?.is_used() {
            // Without the lock: the duration depends on everything else that was removed on the file system.
            self.flush_removed_inodes()?;
        }
        if self.lift_limits_if_unused(project)? { Ok(()) } else { Err(Error::ProjectInUse { project }) }
    }

    /// Releases every project of the range without inodes, except those in `kept`, and returns them.
    pub(crate) fn release_unused_projects(&self, kept: &[ProjectId]) -> Result<Vec<ProjectId>, Error> {
        self.flush_removed_inodes()?;
        let mut released = Vec::new();
        for status in self.list_projects(self.project_range)? {
            let is_unused = status.usage == QuotaUsage::default() && !kept.contains(&status.project);
            if is_unused && self.lift_limits_if_unused(status.project)? {
                released.push(status.project);
            }
        }
        Ok(released)
    }

    /// Checks under the lock, so that no other caller is about to tag a directory with the project.
    fn lift_limits_if_unused(&self, project: ProjectId) -> Result<bool, Error> {
        let _allocation = self.lock_allocation()?;
        if self.quota_record(project)?.is_used() {
            return Ok(false);
        }
        self.write_limits(project, KernelLimitChange::UNLIMITED)?;
        Ok(true)
    }

    /// The projects of a range that have limits or usage, by number.
    pub(crate) fn list_projects(&self, range: ProjectRange) -> Result<Vec<QuotaStatus>, Error> {
        let mut found = Vec::new();
        let mut from = range.first_id().get();
        while let Some((number, record)) =
            self.kernel.next_record(from).map_err(KernelOperation::ReadLimits.into_error())?
        {
            let Some(project) = ProjectId::new(number).filter(|project| range.contains(*project)) else {
                break;
            };
            if record != QuotaRecord::default() {
                found.push(record.status(project));
            }
            from = number + 1;
        }
        Ok(found)
    }

    /// Changes the limits of a directory that has a project.
    fn change_limits(
        &self,
        dir: BorrowedFd<'_>,
        project: ProjectId,
        change: KernelLimitChange,
    ) -> Result<ProjectId, Error> {
        self.reject_inherited(dir)?;
        if self.is_shared(dir, project)? {
            return Err(Error::SharedProject { project });
        }
        if !change.is_noop() {
            self.write_limits(project, change)?;
        }
        let tag = ProjectTag { project: project.get(), inherit: true };
        if self.project_tag(dir)? != tag {
            self.set_project_tag(dir, tag)?;
        }
        Ok(project)
    }

    /// Gives a directory a project with limits. The limits come first, so nothing is ever created in it
    /// without them.
    fn allocate_project(
        &self,
        allocation: &mut AllocationGuard<'_, K>,
        dir: BorrowedFd<'_>,
        change: KernelLimitChange,
    ) -> Result<ProjectId, Error> {
        for _ in 0..ALLOCATION_ATTEMPTS {
            let project = allocation.next_free_project()?;
            self.write_limits(project, change.for_new_project())?;
            let tagged = self.set_project_tag(dir, ProjectTag { project: project.get(), inherit: true });
            if tagged.is_err() {
                // The caller gets the error of the directory; `release_unused_projects` finds limits that
                // stay.
                let _ = self.write_limits(project, KernelLimitChange::UNLIMITED);
            }
            tagged?;
            // A program without our lock may have allocated the same number between our lookup and our tag.
            if !self.is_shared(dir, project)? {
                return Ok(project);
            }
            // The limits may belong to the other program by now, so they stay.
            self.set_project_tag(dir, ProjectTag::default())?;
        }
        Err(Error::AllocationContended)
    }

    /// Whether the project of an empty directory has inodes elsewhere. For a directory that is not empty,
    /// that would require counting its tree, so the project counts as not shared.
    fn is_shared(&self, dir: BorrowedFd<'_>, project: ProjectId) -> Result<bool, Error> {
        Ok(self.quota_record(project)?.inodes > 1
            && is_empty_directory(dir)?
            && self.has_several_inodes(project)?)
    }

    /// Whether more than one inode belongs to the project.
    fn has_several_inodes(&self, project: ProjectId) -> Result<bool, Error> {
        if self.quota_record(project)?.inodes <= 1 {
            return Ok(false);
        }
        self.flush_removed_inodes()?;
        Ok(self.quota_record(project)?.inodes > 1)
    }

    fn reject_inherited(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        let parent = match self.kernel.parent_dir(dir) {
            // A caller without access to the parent has to trust the directory's tag.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(()),
            parent => parent.map_err(KernelOperation::InspectDirectory.into_error())?,
        };
        let identity = |fd: BorrowedFd<'_>| {
            let stat = rustix::fs::fstat(fd)
                .map_err(|error| KernelOperation::InspectDirectory.into_error()(error.into()))?;
            Ok((stat.st_dev, stat.st_ino))
        };
        let (child_id, parent_id) = (identity(dir)?, identity(parent.as_fd())?);
        // The root of the file system, or of a mount.
        if child_id == parent_id || child_id.0 != parent_id.0 {
            return Ok(());
        }
        let (tag, parent_tag) = (self.project_tag(dir)?, self.project_tag(parent.as_fd())?);
        match ProjectId::new(tag.project) {
            Some(project) if parent_tag == (ProjectTag { inherit: true, ..tag }) => {
                Err(Error::InheritedProject { project })
            }
            _ => Ok(()),
        }
    }

    fn inspect_directory(&self, dir: BorrowedFd<'_>) -> Result<DirectoryState, Error> {
        let stat = rustix::fs::fstat(dir)
            .map_err(|error| KernelOperation::InspectDirectory.into_error()(error.into()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            return Err(Error::NotADirectory);
        }
        if self.device.is_some_and(|device| device != stat.st_dev) {
            return Err(Error::OtherFileSystem);
        }
        Ok(DirectoryState { is_removed: stat.st_nlink == 0 })
    }

    fn project_tag(&self, dir: BorrowedFd<'_>) -> Result<ProjectTag, Error> {
        self.kernel.project_tag(dir).map_err(KernelOperation::ReadProject.into_error())
    }

    fn set_project_tag(&self, dir: BorrowedFd<'_>, tag: ProjectTag) -> Result<(), Error> {
        self.kernel.set_project_tag(dir, tag).map_err(KernelOperation::WriteProject.into_error())
    }

    fn flush_removed_inodes(&self) -> Result<(), Error> {
        self.kernel.flush_removed_inodes().map_err(KernelOperation::FlushRemoved.into_error())
    }

    fn write_limits(&self, project: ProjectId, change: KernelLimitChange) -> Result<(), Error> {
        self.kernel.set_limits(project.get(), change).map_err(KernelOperation::WriteLimits.into_error())
    }

    fn project_status(&self, project: ProjectId) -> Result<QuotaStatus, Error> {
        Ok(self.quota_record(project)?.status(project))
    }

    fn quota_record(&self, project: ProjectId) -> Result<QuotaRecord, Error> {
        self.kernel.quota_record(project.get()).map_err(KernelOperation::ReadLimits.into_error())
    }

    fn lock_allocation(&self) -> Result<AllocationGuard<'_, K>, Error> {
        let cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        self.kernel.lock_allocation().map_err(KernelOperation::LockAllocation.into_error())?;
        Ok(AllocationGuard { engine: self, cursor })
    }
}

struct DirectoryState {
    is_removed: bool,
}

/// Held while the inodes or limits of a project are read and changed, so that no other caller allocates,
/// releases or changes it meanwhile.
struct AllocationGuard<'a, K: QuotaKernel> {
    engine: &'a QuotaEngine<K>,
    cursor: MutexGuard<'a, ProjectId>,
}

impl<K: QuotaKernel> AllocationGuard<'_, K> {
    fn next_free_project(&mut self) -> Result<ProjectId, Error> {
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

/// Whether the directory has no entries.
fn is_empty_directory(dir: BorrowedFd<'_>) -> Result<bool, Error> {
    let failed = |error: Errno| KernelOperation::InspectDirectory.into_error()(error.into());
    let mut entries = rustix::fs::Dir::read_from(dir).map_err(failed)?;
    loop {
        let entry = match entries.read() {
            // A removed directory returns ENOENT.
            None | Some(Err(Errno::NOENT)) => return Ok(true),
            Some(entry) => entry.map_err(failed)?,
        };
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
}

#[cfg(all(test, feature = "testing"))]
#[path = "engine_test.rs"]
mod tests;

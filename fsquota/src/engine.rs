//! The order of the kernel calls: what is read before what is written, and what is undone when a call fails.

mod allocation;
mod claim;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Mutex;

use rustix::fs::FileType;
use rustix::io::Errno;

use crate::error::KernelOperation;
use crate::kernel::{ProjectTag, QuotaKernel, QuotaRecord, next_project};
use crate::limits::KernelLimitChange;
use crate::owner::OwnerMark;
use crate::range::ProjectRange;
use crate::{Error, ProjectId, QuotaChange, QuotaLimits, QuotaStatus, QuotaUsage};

use claim::{ChangeDecision, ProjectClaim, decide_change};

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

/// What happens to a directory that is not empty and has no separate limits.
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
        let mut counted = None;
        let project = loop {
            let mut allocation = self.lock_allocation()?;
            self.require_enforcement()?;
            let claim = self.project_claim(dir)?;
            if let ProjectClaim::Unmarked { project, .. } = claim
                && counted.is_none_or(|(of, _)| of != project)
            {
                // Others don't wait while the tree is counted.
                drop(allocation);
                counted = Some((project, self.has_whole_project(dir, project)?));
                continue;
            }
            let decision = decide_change(claim, counted.is_some_and(|(_, is_whole)| is_whole));
            if contents == NonEmptyPolicy::Reject && !self.is_empty(dir)? {
                decision.require_complete()?;
            }
            break match decision {
                ChangeDecision::Change { project, .. } => self.change_limits(dir, project, change)?,
                ChangeDecision::Allocate { carried } => {
                    // Recorded until the tree is complete: a set that is killed is not complete.
                    let has_entries = contents == NonEmptyPolicy::Accept && !self.is_empty(dir)?;
                    let previous = has_entries.then(|| carried.map_or(0, ProjectId::get));
                    self.allocate_project(&mut allocation, dir, (change, previous))?
                }
            };
        };
        self.project_status(project)
    }

    pub(crate) fn read_status(&self, dir: BorrowedFd<'_>) -> Result<Option<QuotaStatus>, Error> {
        let Some(project) = self.find_project(dir)? else { return Ok(None) };
        self.require_enforcement()?;
        self.project_status(project).map(Some)
    }

    pub(crate) fn find_project(&self, dir: BorrowedFd<'_>) -> Result<Option<ProjectId>, Error> {
        self.inspect_directory(dir)?;
        Ok(ProjectId::new(self.project_tag(dir)?.project))
    }

    /// The project, or 0, that entries of the tree still have, because giving the tree its own project was started and
    /// not finished.
    pub(crate) fn previous_project(&self, dir: BorrowedFd<'_>) -> Result<Option<u32>, Error> {
        Ok(self.owner_mark(dir)?.and_then(|mark| mark.previous))
    }

    /// Keeps other callers from setting and clearing limits until the result is dropped.
    pub(crate) fn hold_allocation(&self) -> Result<impl Sized + '_, Error> {
        self.lock_allocation()
    }

    /// Whether the project has limits.
    pub(crate) fn is_limited(&self, project: u32) -> Result<bool, Error> {
        let Some(project) = ProjectId::new(project) else { return Ok(false) };
        Ok(self.project_status(project)?.limits != QuotaLimits::default())
    }

    /// Completes giving a tree its own project, once no entry has the previous one.
    pub(crate) fn forget_previous_project(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        let _allocation = self.lock_allocation()?;
        let Some(mark) = self.owner_mark(dir)? else { return Ok(()) };
        self.set_owner_mark(dir, Some(OwnerMark { previous: None, ..mark }))
    }

    pub(crate) fn clear_limits(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        let is_removed = self.inspect_directory(dir)?.is_removed;
        let _allocation = self.lock_allocation()?;
        let Some(project) = ProjectId::new(self.project_tag(dir)?.project) else { return Ok(()) };
        if !is_removed {
            // Checked first: that the project is inherited says more than that the directory is not empty.
            self.project_claim(dir)?;
            if !self.is_empty(dir)? {
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
        self.project_claim(dir)?;
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

    /// Removes the mark, lifts the limits, then removes the project: a directory that can't be changed
    /// (`chattr +i`) keeps its limits, and one whose clearing is killed still names the project.
    fn detach_project(&self, dir: BorrowedFd<'_>, unlimited: Option<ProjectId>) -> Result<(), Error> {
        self.set_owner_mark(dir, None)?;
        if let Some(project) = unlimited {
            self.write_limits(project, KernelLimitChange::UNLIMITED)?;
        }
        self.set_project_tag(dir, ProjectTag::default())
    }

    #[cfg(feature = "testing")]
    pub(crate) fn project_range(&self) -> ProjectRange {
        self.project_range
    }

    /// Searches for the numbers that the next directories would get, and skips them, under the lock.
    #[cfg(feature = "testing")]
    pub(crate) fn search_free_projects<T>(
        &self,
        work: impl FnOnce(&mut dyn FnMut() -> Result<ProjectId, Error>) -> T,
    ) -> Result<T, Error> {
        let mut allocation = self.lock_allocation()?;
        Ok(work(&mut || allocation.next_free_project()))
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
        let (mut found, mut from) = (Vec::new(), range.first_id().get());
        while let Some((project, record)) =
            next_project(&self.kernel, from).map_err(KernelOperation::ReadLimits.into_error())?
            && range.contains(project)
        {
            found.push(record.status(project));
            from = project.get() + 1;
        }
        Ok(found)
    }

    /// Changes the limits of a directory that owns its project, and marks it if it has no mark: an earlier
    /// release wrote none.
    fn change_limits(
        &self,
        dir: BorrowedFd<'_>,
        project: ProjectId,
        change: KernelLimitChange,
    ) -> Result<ProjectId, Error> {
        if !change.is_noop() {
            self.write_limits(project, change)?;
        }
        let tag = ProjectTag { project: project.get(), inherit: true };
        if self.project_tag(dir)? != tag {
            self.set_project_tag(dir, tag)?;
        }
        if self.owner_mark(dir)?.is_none_or(|mark| mark.project != project.get()) {
            self.set_owner_mark(dir, Some(OwnerMark { project: project.get(), previous: None }))?;
        }
        Ok(project)
    }

    pub(crate) fn inspect_directory(&self, dir: BorrowedFd<'_>) -> Result<DirectoryState, Error> {
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
        let set = self.kernel.set_project_tag(dir, tag);
        set.map_err(|error| self.attribute_error(dir, KernelOperation::WriteProject, error))
    }

    fn owner_mark(&self, dir: BorrowedFd<'_>) -> Result<Option<OwnerMark>, Error> {
        self.kernel.owner_mark(dir).map_err(KernelOperation::ReadOwner.into_error())
    }

    fn set_owner_mark(&self, dir: BorrowedFd<'_>, mark: Option<OwnerMark>) -> Result<(), Error> {
        let set = self.kernel.set_owner_mark(dir, mark);
        set.map_err(|error| self.attribute_error(dir, KernelOperation::WriteOwner, error))
    }

    /// The error of a change of the directory's attributes.
    fn attribute_error(&self, dir: BorrowedFd<'_>, step: KernelOperation, error: io::Error) -> Error {
        let is_denied = error.kind() == io::ErrorKind::PermissionDenied;
        match is_denied && self.kernel.is_immutable(dir).unwrap_or(false) {
            true => Error::Immutable,
            false => step.into_error()(error),
        }
    }

    fn is_empty(&self, dir: BorrowedFd<'_>) -> Result<bool, Error> {
        is_empty_directory(dir, self.kernel.lock_inode(dir))
    }

    fn require_enforcement(&self) -> Result<(), Error> {
        let is_enforced = self.kernel.is_enforced().map_err(KernelOperation::ReadEnforcement.into_error())?;
        if is_enforced { Ok(()) } else { Err(Error::EnforcementOff) }
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
}

pub(crate) struct DirectoryState {
    is_removed: bool,
}

/// Whether the directory has no entries, except the inode that is `skipped`.
fn is_empty_directory(dir: BorrowedFd<'_>, skipped: Option<u64>) -> Result<bool, Error> {
    let failed = |error: Errno| KernelOperation::InspectDirectory.into_error()(error.into());
    let mut entries = rustix::fs::Dir::read_from(dir).map_err(failed)?;
    loop {
        let entry = match entries.read() {
            // A removed directory returns ENOENT.
            None | Some(Err(Errno::NOENT)) => return Ok(true),
            Some(entry) => entry.map_err(failed)?,
        };
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") && Some(entry.ino()) != skipped {
            return Ok(false);
        }
    }
}

#[cfg(all(test, feature = "testing"))]
#[path = "engine_test.rs"]
mod tests;

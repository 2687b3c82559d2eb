//! The order of the kernel calls: what is read before what is written, and what is undone when a call fails.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::FileType;
use rustix::io::Errno;

use crate::error::{KernelOperation, LOCK_TIMEOUT};
use crate::kernel::{KernelProjects, ProjectTag, QuotaKernel, QuotaRecord, next_project};
use crate::limits::KernelLimitChange;
use crate::owner::OwnerMark;
use crate::range::{ProjectRange, find_free_project};
use crate::{Error, ProjectId, QuotaChange, QuotaLimits, QuotaStatus, QuotaUsage};

/// Number of times that an allocation restarts because a program without our lock allocated the same number.
const ALLOCATION_ATTEMPTS: u32 = 16;

/// Number of times that a tree is counted: its files may be created and removed at the same time.
const COUNT_ATTEMPTS: u32 = 2;

/// The kernel's file times are up to one tick behind its clock: 10 ms with HZ=100.
const FILE_TIME_UNIT: Duration = Duration::from_millis(20);

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

/// The handling of a directory that is not empty and has no separate limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NonEmptyPolicy {
    Reject,
    Accept,
}

/// The project of a directory, and the proof that it is its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProjectClaim {
    /// The directory has no project.
    Missing,
    /// The mark of the directory names the project.
    Marked {
        project: ProjectId,
        /// True if all its entries have the project.
        is_complete: bool,
    },
    /// The directory was given the project by another program or an earlier release, or it is a copy of its owner, or
    /// was moved out of it.
    Unmarked { project: ProjectId, is_complete: bool },
}

/// The effect of a change of limits on the project of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChangeDecision {
    /// Changes the limits of the project.
    Change { project: ProjectId, is_complete: bool },
    /// Allocates a project. The directory carries that of another one, if any.
    Allocate { carried: Option<ProjectId> },
}

/// Changes limits only for the owner of a project: the directory with the mark, or without a mark the one
/// whose tree has all inodes of the project.
fn decide_change(claim: ProjectClaim, has_whole_project: bool) -> ChangeDecision {
    match claim {
        ProjectClaim::Missing => ChangeDecision::Allocate { carried: None },
        ProjectClaim::Unmarked { project, .. } if !has_whole_project => {
            ChangeDecision::Allocate { carried: Some(project) }
        }
        ProjectClaim::Marked { project, is_complete } | ProjectClaim::Unmarked { project, is_complete } => {
            ChangeDecision::Change { project, is_complete }
        }
    }
}

impl ChangeDecision {
    /// Fails if entries of the directory would not be counted.
    fn require_complete(self) -> Result<(), Error> {
        match self {
            Self::Change { is_complete: true, .. } => Ok(()),
            Self::Change { .. } | Self::Allocate { carried: None } => Err(Error::NotEmpty),
            Self::Allocate { carried: Some(project) } => Err(Error::SharedProject { project }),
        }
    }
}

/// Held while the inodes or limits of a project are read and changed, so that no other caller allocates,
/// releases or changes it at the same time.
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
            // Under the lock, so that the claim still holds when it is acted on.
            let decision = decide_change(claim, counted.is_some_and(|(_, is_whole)| is_whole));
            if contents == NonEmptyPolicy::Reject && !self.is_empty(dir)? {
                decision.require_complete()?;
            }
            break match decision {
                ChangeDecision::Change { project, .. } => self.change_limits(dir, project, change)?,
                ChangeDecision::Allocate { carried } => {
                    // Recorded until the tree is complete: a set that is killed is not complete.
                    let has_entries = contents == NonEmptyPolicy::Accept && !self.is_empty(dir)?;
                    // The mark still names the project that the directory alone has lost: its entries have it.
                    let marked = self.owner_mark(dir)?.map_or(0, |mark| mark.project);
                    let previous = has_entries.then(|| carried.map_or(marked, ProjectId::get));
                    self.allocate_project(&mut allocation, dir, change, previous)?
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

    /// Returns whether the mark of a directory names its project, and giving that to the whole tree was finished.
    pub(crate) fn owns_project(&self, dir: BorrowedFd<'_>) -> Result<bool, Error> {
        self.inspect_directory(dir)?;
        Ok(matches!(self.project_claim(dir)?, ProjectClaim::Marked { is_complete: true, .. }))
    }

    /// The projects that a directory and its mark name.
    pub(crate) fn named_projects(&self, dir: BorrowedFd<'_>) -> Result<impl Iterator<Item = u32>, Error> {
        let marked = self.owner_mark(dir)?.map(|mark| mark.project);
        Ok([self.project_tag(dir)?.project].into_iter().chain(marked))
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
            // Checked first: that the project is inherited is the better reason.
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
            // Another caller has set limits again since.
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

    /// Gives a directory a project with limits. The limits come first, so nothing is ever created in it
    /// without them; the mark comes before the project, so no owner is without it.
    fn allocate_project(
        &self,
        allocation: &mut AllocationGuard<'_, K>,
        dir: BorrowedFd<'_>,
        change: KernelLimitChange,
        previous: Option<u32>,
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
                // stay, and a mark without its project is ignored.
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

    fn lock_allocation(&self) -> Result<AllocationGuard<'_, K>, Error> {
        // Counted from before the mutex: threads that wait for the same process give up together.
        let deadline = Instant::now() + LOCK_TIMEOUT;
        let cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        self.kernel.lock_allocation(deadline)?;
        Ok(AllocationGuard { engine: self, cursor })
    }

    /// Finds the owner of the directory's project.
    fn project_claim(&self, dir: BorrowedFd<'_>) -> Result<ProjectClaim, Error> {
        let tag = self.project_tag(dir)?;
        let Some(project) = ProjectId::new(tag.project) else { return Ok(ProjectClaim::Missing) };
        match self.owner_mark(dir)? {
            Some(mark) if mark.project == project.get() => {
                Ok(ProjectClaim::Marked { project, is_complete: tag.inherit && mark.previous.is_none() })
            }
            _ => {
                self.reject_inherited(dir)?;
                Ok(ProjectClaim::Unmarked { project, is_complete: tag.inherit })
            }
        }
    }

    /// Returns whether all inodes of the project are in the tree of the directory: then no other directory can have the
    /// project. In doubt, they are not: links and special files, whose project can't be read, and what is
    /// created or removed during the count.
    #[expect(clippy::disallowed_methods, reason = "file times have no finer unit to wait for")]
    fn has_whole_project(&self, dir: BorrowedFd<'_>, project: ProjectId) -> Result<bool, Error> {
        for attempt in 0..COUNT_ATTEMPTS {
            if attempt > 0 {
                self.flush_removed_inodes()?;
                std::thread::sleep(FILE_TIME_UNIT);
            }
            // Of what the kernel counts, only what existed before is looked for: what is created during the
            // walk would make up for inodes elsewhere.
            let before = SystemTime::now() - FILE_TIME_UNIT;
            let counted = self.quota_record(project)?.inodes;
            if counted <= self.kernel.count_tree(dir, project.get(), before)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns whether the project of an empty directory has inodes elsewhere. For a directory that is not empty,
    /// that would require counting its tree, so the project counts as not shared.
    fn is_shared(&self, dir: BorrowedFd<'_>, project: ProjectId) -> Result<bool, Error> {
        Ok(self.quota_record(project)?.inodes > 1
            && self.is_empty(dir)?
            && self.has_several_inodes(project)?)
    }

    /// Returns whether more than one inode belongs to the project.
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
        if is_denied && self.kernel.is_immutable(dir).unwrap_or(false) {
            return Error::Immutable;
        }
        step.into_error()(error)
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

/// Returns whether the directory has no entries, except the inode that is `skipped`.
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

//! The order of the calls: what is read before what is written, and what is taken back when a call fails.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::FileType;
use rustix::io::Errno;

use crate::error::Call;
use crate::kernel::{Kernel, Projects, Record, Tag};
use crate::limits::KernelChange;
use crate::range::{ProjectRange, find_free};
use crate::{Change, Error, ProjectId, Status, Usage};

/// How often an allocation begins anew because somebody without our lock took the same number.
const ATTEMPTS: u32 = 16;

/// [`QuotaSetter`](crate::QuotaSetter) over the calls of a kernel.
#[derive(Debug)]
pub(crate) struct Engine<K> {
    pub(crate) kernel: K,
    range: ProjectRange,
    /// The next number to try; its lock is held while anything is changed.
    cursor: Mutex<ProjectId>,
    /// The only file system that has these quotas; any where they are kept elsewhere.
    device: Option<u64>,
}

/// Whether what is in a new directory matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contents {
    Refused,
    Accepted,
}

impl<K: Kernel> Engine<K> {
    pub(crate) fn new(kernel: K, range: ProjectRange) -> Self {
        Self { kernel, range, cursor: Mutex::new(range.first()), device: None }
    }

    /// Refuses directories of other file systems.
    pub(crate) fn only_on(self, device: u64) -> Self {
        Self { device: Some(device), ..self }
    }

    /// Begins to look for free numbers here.
    pub(crate) fn starting_at(self, cursor: ProjectId) -> Self {
        Self { cursor: Mutex::new(cursor), ..self }
    }

    pub(crate) fn set(
        &self,
        dir: BorrowedFd<'_>,
        change: Change,
        contents: Contents,
    ) -> Result<Status, Error> {
        let change = KernelChange::try_from(change).map_err(Error::Limit)?;
        if self.look(dir)?.is_removed {
            return Err(Error::Removed);
        }
        let mut allocation = self.allocation()?;
        let tag = self.tag(dir)?;
        let project = ProjectId::new(tag.project);
        // Also where clearing it was begun and not finished: what is in it may have lost the project already.
        let is_counted = project.is_some() && tag.inherit;
        if !is_counted && contents == Contents::Refused && !is_empty(dir)? {
            return Err(Error::NotEmpty);
        }
        let project = match project {
            Some(project) => self.change(dir, project, change)?,
            None => self.begin(&mut allocation, dir, change)?,
        };
        drop(allocation);
        self.read(project)
    }

    pub(crate) fn status(&self, dir: BorrowedFd<'_>) -> Result<Option<Status>, Error> {
        self.look(dir)?;
        ProjectId::new(self.tag(dir)?.project).map(|project| self.read(project)).transpose()
    }

    pub(crate) fn clear(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        let is_removed = self.look(dir)?.is_removed;
        let _allocation = self.allocation()?;
        let Some(project) = ProjectId::new(self.tag(dir)?.project) else { return Ok(()) };
        if !is_removed {
            // Whose it is says more than that it is not empty.
            self.refuse_inherited(dir)?;
            if !is_empty(dir)? {
                return Err(Error::NotEmpty);
            }
        }
        let is_shared = self.is_shared(dir, project)?;
        self.let_go(dir, (!is_shared).then_some(project))
    }

    /// From now on what is made in the directory does not get its project; it stays limited until the end of it.
    pub(crate) fn begin_clearing(&self, dir: BorrowedFd<'_>) -> Result<Option<ProjectId>, Error> {
        self.look(dir)?;
        let _allocation = self.allocation()?;
        let tag = self.tag(dir)?;
        let Some(project) = ProjectId::new(tag.project) else { return Ok(None) };
        self.refuse_inherited(dir)?;
        self.set_tag(dir, Tag { inherit: false, ..tag })?;
        Ok(Some(project))
    }

    /// When nothing in the directory has its project any more.
    pub(crate) fn finish_clearing(&self, dir: BorrowedFd<'_>, project: ProjectId) -> Result<(), Error> {
        let _allocation = self.allocation()?;
        if self.tag(dir)? != (Tag { project: project.get(), inherit: false }) {
            // Somebody has given it limits again meanwhile.
            return Ok(());
        }
        let has_more = self.has_more(project)?;
        self.let_go(dir, (!has_more).then_some(project))
    }

    /// Takes the project from the directory, and first the limits from the project: killed after that, the directory
    /// still says whose limits have to be lifted.
    fn let_go(&self, dir: BorrowedFd<'_>, unlimited: Option<ProjectId>) -> Result<(), Error> {
        if let Some(project) = unlimited {
            self.limit(project, KernelChange::UNLIMITED)?;
        }
        self.set_tag(dir, Tag::default())
    }

    #[cfg(feature = "testing")]
    pub(crate) fn range(&self) -> ProjectRange {
        self.range
    }

    /// The number that the next directory would get, were it not for this.
    #[cfg(feature = "testing")]
    pub(crate) fn find_free(&self) -> Result<ProjectId, Error> {
        self.allocation()?.next()
    }

    /// Lifts the limits of a project that nothing belongs to.
    pub(crate) fn release(&self, project: ProjectId) -> Result<(), Error> {
        if self.record(project)?.is_used() {
            // Without the lock: it takes as long as whatever else was removed on the file system.
            self.settle()?;
        }
        if self.lift_if_unused(project)? { Ok(()) } else { Err(Error::InUse { project }) }
    }

    /// Releases every project of the range that nothing belongs to, but for those that are kept, and names them.
    pub(crate) fn release_all_unused(&self, kept: &[ProjectId]) -> Result<Vec<ProjectId>, Error> {
        self.settle()?;
        let mut released = Vec::new();
        for status in self.list(self.range)? {
            let is_meant = status.usage == Usage::default() && !kept.contains(&status.project);
            if is_meant && self.lift_if_unused(status.project)? {
                released.push(status.project);
            }
        }
        Ok(released)
    }

    /// Only with the lock is it known that nobody is about to tag a directory with it.
    fn lift_if_unused(&self, project: ProjectId) -> Result<bool, Error> {
        let _allocation = self.allocation()?;
        if self.record(project)?.is_used() {
            return Ok(false);
        }
        self.limit(project, KernelChange::UNLIMITED)?;
        Ok(true)
    }

    /// The accounts of a range, by number; those without limits and usage are none.
    pub(crate) fn list(&self, range: ProjectRange) -> Result<Vec<Status>, Error> {
        let mut found = Vec::new();
        let mut from = range.first().get();
        while let Some((number, record)) = self.kernel.next(from).map_err(Call::ReadLimits.failed())? {
            let Some(project) = ProjectId::new(number).filter(|project| range.contains(*project)) else {
                break;
            };
            if record != Record::default() {
                found.push(record.status(project));
            }
            from = number + 1;
        }
        Ok(found)
    }

    /// Changes the limits of a directory that has a project.
    fn change(
        &self,
        dir: BorrowedFd<'_>,
        project: ProjectId,
        change: KernelChange,
    ) -> Result<ProjectId, Error> {
        self.refuse_inherited(dir)?;
        if self.is_shared(dir, project)? {
            return Err(Error::Shared { project });
        }
        if !change.is_nothing() {
            self.limit(project, change)?;
        }
        let tag = Tag { project: project.get(), inherit: true };
        if self.tag(dir)? != tag {
            self.set_tag(dir, tag)?;
        }
        Ok(project)
    }

    /// Gives a directory a project and its limits: the limits first, so that nothing is ever made in it without them.
    fn begin(
        &self,
        allocation: &mut Allocation<'_, K>,
        dir: BorrowedFd<'_>,
        change: KernelChange,
    ) -> Result<ProjectId, Error> {
        for _ in 0..ATTEMPTS {
            let project = allocation.next()?;
            self.limit(project, change.of_new())?;
            let tagged = self.set_tag(dir, Tag { project: project.get(), inherit: true });
            if tagged.is_err() {
                // The directory's failure is what is told; limits that stay are found by `release_all_unused`.
                let _ = self.limit(project, KernelChange::UNLIMITED);
            }
            tagged?;
            // Who does not know our lock may have given the same number away between our look and our tag.
            if !self.is_shared(dir, project)? {
                return Ok(project);
            }
            // The limits may be somebody else's by now, so they stay.
            self.set_tag(dir, Tag::default())?;
        }
        Err(Error::Contended)
    }

    /// Whether an empty directory's project has more than it, somewhere else. Of one that is not empty that would have
    /// to be counted, so it is taken for the only one.
    fn is_shared(&self, dir: BorrowedFd<'_>, project: ProjectId) -> Result<bool, Error> {
        Ok(self.record(project)?.inodes > 1 && is_empty(dir)? && self.has_more(project)?)
    }

    /// Whether more than one inode belongs to the project.
    fn has_more(&self, project: ProjectId) -> Result<bool, Error> {
        if self.record(project)?.inodes <= 1 {
            return Ok(false);
        }
        self.settle()?;
        Ok(self.record(project)?.inodes > 1)
    }

    fn refuse_inherited(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        let above = match self.kernel.above(dir) {
            // Whoever may not look there has to take the directory's word.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(()),
            above => above.map_err(Call::Look.failed())?,
        };
        let identity = |fd: BorrowedFd<'_>| {
            let stat = rustix::fs::fstat(fd).map_err(|error| Call::Look.failed()(error.into()))?;
            Ok((stat.st_dev, stat.st_ino))
        };
        let (here, there) = (identity(dir)?, identity(above.as_fd())?);
        if here == there || here.0 != there.0 {
            return Ok(());
        }
        let (here, above) = (self.tag(dir)?, self.tag(above.as_fd())?);
        match ProjectId::new(here.project) {
            Some(project) if above == (Tag { inherit: true, ..here }) => Err(Error::Inherited { project }),
            _ => Ok(()),
        }
    }

    fn look(&self, dir: BorrowedFd<'_>) -> Result<Look, Error> {
        let stat = rustix::fs::fstat(dir).map_err(|error| Call::Look.failed()(error.into()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
            return Err(Error::NotADirectory);
        }
        if self.device.is_some_and(|device| device != stat.st_dev) {
            return Err(Error::OtherFileSystem);
        }
        Ok(Look { is_removed: stat.st_nlink == 0 })
    }

    fn tag(&self, dir: BorrowedFd<'_>) -> Result<Tag, Error> {
        self.kernel.tag(dir).map_err(Call::ReadProject.failed())
    }

    fn set_tag(&self, dir: BorrowedFd<'_>, tag: Tag) -> Result<(), Error> {
        self.kernel.set_tag(dir, tag).map_err(Call::WriteProject.failed())
    }

    fn settle(&self) -> Result<(), Error> {
        self.kernel.settle().map_err(Call::Settle.failed())
    }

    fn limit(&self, project: ProjectId, change: KernelChange) -> Result<(), Error> {
        self.kernel.set_limits(project.get(), change).map_err(Call::WriteLimits.failed())
    }

    fn read(&self, project: ProjectId) -> Result<Status, Error> {
        Ok(self.record(project)?.status(project))
    }

    fn record(&self, project: ProjectId) -> Result<Record, Error> {
        self.kernel.record(project.get()).map_err(Call::ReadLimits.failed())
    }

    fn allocation(&self) -> Result<Allocation<'_, K>, Error> {
        let cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        self.kernel.lock().map_err(Call::Lock.failed())?;
        Ok(Allocation { engine: self, cursor })
    }
}

struct Look {
    is_removed: bool,
}

/// Held while what belongs to a number, or its limits, are looked at and changed: so nobody else gives it away, takes it
/// back or changes it meanwhile.
struct Allocation<'a, K: Kernel> {
    engine: &'a Engine<K>,
    cursor: MutexGuard<'a, ProjectId>,
}

impl<K: Kernel> Allocation<'_, K> {
    fn next(&mut self) -> Result<ProjectId, Error> {
        let Engine { kernel, range, .. } = self.engine;
        let found = find_free(&Projects(kernel), *range, *self.cursor).map_err(Call::ReadLimits.failed())?;
        let project = found.ok_or(Error::Exhausted { first: range.first(), last: range.last() })?;
        *self.cursor = range.after(project);
        Ok(project)
    }
}

impl<K: Kernel> Drop for Allocation<'_, K> {
    fn drop(&mut self) {
        self.engine.kernel.unlock();
    }
}

/// Whether nothing is in the directory.
fn is_empty(dir: BorrowedFd<'_>) -> Result<bool, Error> {
    let failed = |error: Errno| Call::Look.failed()(error.into());
    let mut entries = rustix::fs::Dir::read_from(dir).map_err(failed)?;
    loop {
        let entry = match entries.read() {
            // A directory that has been removed says that it is none.
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

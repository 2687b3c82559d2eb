//! The order of the calls: what is read before what is written, and what is taken back when a call fails.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{FileType, Mode, OFlags};

use crate::error::Call;
use crate::kernel::{Kernel, Projects, Tag};
use crate::limits::KernelChange;
use crate::range::{ProjectRange, find_free};
use crate::{Change, Error, ProjectId, Status};

/// How often an allocation begins anew because somebody without our lock took the same number.
const ATTEMPTS: u32 = 16;

/// [`QuotaSetter`](crate::QuotaSetter) over the calls of a kernel.
#[derive(Debug)]
pub(crate) struct Engine<K> {
    pub(crate) kernel: K,
    range: ProjectRange,
    /// The next number to try; its lock is held while a directory gets a number.
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
        let tag = self.tag(dir)?;
        let project = match ProjectId::new(tag.project) {
            Some(project) => self.change(dir, project, tag, change)?,
            None if contents == Contents::Refused && !is_empty(dir)? => return Err(Error::NotEmpty),
            None => self.begin(dir, change)?,
        };
        self.read(project)
    }

    pub(crate) fn status(&self, dir: BorrowedFd<'_>) -> Result<Option<Status>, Error> {
        self.look(dir)?;
        ProjectId::new(self.tag(dir)?.project).map(|project| self.read(project)).transpose()
    }

    pub(crate) fn clear(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        let is_removed = self.look(dir)?.is_removed;
        let has_project = self.tag(dir)?.project != 0;
        if has_project && !is_removed && !is_empty(dir)? {
            // Whose it is says more than that it is not empty.
            self.refuse_inherited(dir)?;
            return Err(Error::NotEmpty);
        }
        match self.begin_clearing(dir)? {
            Some(_) if !is_removed => self.finish_clearing(dir),
            _ => Ok(()),
        }
    }

    /// Lifts the limits first: killed after that, the directory still says whose limits have to be lifted.
    pub(crate) fn begin_clearing(&self, dir: BorrowedFd<'_>) -> Result<Option<ProjectId>, Error> {
        let is_removed = self.look(dir)?.is_removed;
        let tag = self.tag(dir)?;
        let Some(project) = ProjectId::new(tag.project) else { return Ok(None) };
        if !is_removed {
            self.refuse_inherited(dir)?;
        }
        self.limit(project, KernelChange::UNLIMITED)?;
        if !is_removed {
            let tag = Tag { inherit: false, ..tag };
            self.kernel.set_tag(dir, tag).map_err(Call::WriteProject.failed())?;
        }
        Ok(Some(project))
    }

    pub(crate) fn finish_clearing(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        self.kernel.set_tag(dir, Tag::default()).map_err(Call::WriteProject.failed())
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
        let _allocation = self.allocation()?;
        self.release_unused(project)
    }

    fn release_unused(&self, project: ProjectId) -> Result<(), Error> {
        let record = || self.kernel.record(project.get()).map_err(Call::ReadLimits.failed());
        if record()?.is_used() {
            self.kernel.settle().map_err(Call::Settle.failed())?;
            if record()?.is_used() {
                return Err(Error::InUse { project });
            }
        }
        self.limit(project, KernelChange::UNLIMITED)
    }

    /// Releases every project of the range that nothing belongs to, and names them.
    pub(crate) fn release_all_unused(&self) -> Result<Vec<ProjectId>, Error> {
        let _allocation = self.allocation()?;
        self.kernel.settle().map_err(Call::Settle.failed())?;
        let mut released = Vec::new();
        for status in self.list(self.range)? {
            let is_used = status.usage != crate::Usage::default();
            if !is_used {
                self.limit(status.project, KernelChange::UNLIMITED)?;
                released.push(status.project);
            }
        }
        Ok(released)
    }

    /// The accounts of a range, by number; those without limits and usage are none.
    pub(crate) fn list(&self, range: ProjectRange) -> Result<Vec<Status>, Error> {
        let mut found = Vec::new();
        let mut from = range.first().get();
        while let Some((number, record)) = self.kernel.next(from).map_err(Call::ReadLimits.failed())? {
            let Some(project) = ProjectId::new(number).filter(|project| range.contains(*project)) else {
                break;
            };
            if record != crate::kernel::Record::default() {
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
        tag: Tag,
        change: KernelChange,
    ) -> Result<ProjectId, Error> {
        self.refuse_inherited(dir)?;
        if !change.is_nothing() {
            self.limit(project, change)?;
        }
        if !tag.inherit {
            let tag = Tag { inherit: true, ..tag };
            self.kernel.set_tag(dir, tag).map_err(Call::WriteProject.failed())?;
        }
        Ok(project)
    }

    /// Gives a directory a project and its limits: the limits first, so that nothing is ever made in it without them.
    fn begin(&self, dir: BorrowedFd<'_>, change: KernelChange) -> Result<ProjectId, Error> {
        let mut allocation = self.allocation()?;
        for _ in 0..ATTEMPTS {
            // Another process may have given it a project while this one waited.
            let tag = self.tag(dir)?;
            if let Some(project) = ProjectId::new(tag.project) {
                return self.change(dir, project, tag, change);
            }
            let project = allocation.next()?;
            self.limit(project, change.of_new())?;
            let tag = Tag { project: project.get(), inherit: true };
            if let Err(source) = self.kernel.set_tag(dir, tag) {
                // The directory's failure is what is told; limits that stay are found by `release_unused`.
                let _ = self.limit(project, KernelChange::UNLIMITED);
                return Err(Call::WriteProject.failed()(source));
            }
            if self.is_alone(dir, project)? {
                return Ok(project);
            }
            // The limits may be somebody else's by now, so they stay.
            self.kernel.set_tag(dir, Tag::default()).map_err(Call::WriteProject.failed())?;
        }
        Err(Error::Contended)
    }

    /// Whether nothing but this directory belongs to its new project. Who does not know our lock may have given the
    /// same number to another directory between our look and our tag.
    fn is_alone(&self, dir: BorrowedFd<'_>, project: ProjectId) -> Result<bool, Error> {
        let record = self.kernel.record(project.get()).map_err(Call::ReadLimits.failed())?;
        // What has been made in the directory meanwhile is counted, too.
        Ok(record.inodes <= 1 || !is_empty(dir)?)
    }

    fn refuse_inherited(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let Ok(above) = rustix::fs::openat(dir, "..", flags, Mode::empty()) else {
            // Whoever may not look there has to take the directory's word.
            return Ok(());
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

    fn limit(&self, project: ProjectId, change: KernelChange) -> Result<(), Error> {
        self.kernel.set_limits(project.get(), change).map_err(Call::WriteLimits.failed())
    }

    fn read(&self, project: ProjectId) -> Result<Status, Error> {
        let record = self.kernel.record(project.get()).map_err(Call::ReadLimits.failed())?;
        Ok(record.status(project))
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

/// Held while a number is chosen and until it is seen to be taken.
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
    let failed = |error: rustix::io::Errno| Call::Look.failed()(error.into());
    let mut entries = rustix::fs::Dir::read_from(dir).map_err(failed)?;
    while let Some(entry) = entries.read() {
        if !matches!(entry.map_err(failed)?.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(all(test, feature = "testing"))]
#[path = "engine_test.rs"]
mod tests;

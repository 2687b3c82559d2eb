//! Quotas of a real file system.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use crate::engine::{Contents, Engine};
use crate::file_system::{self, FileSystem, OpenError, Warning, Way};
use crate::linux::Linux;
use crate::tree::{self, Changed};
use crate::{Change, Error, ProjectId, ProjectRange, QuotaSetter, Status};

/// The project quotas of one mounted XFS or ext4 file system.
///
/// Directories are numbered out of a [`ProjectRange`], each with a number of its own: what belongs to a number or has
/// limits is never given away again. Finding a free number takes one question to the kernel, however many are taken;
/// the first one of a process takes 2 log₂ n. Nothing is written to find it again: the accounts themselves are the
/// register. Threads are kept apart by a mutex, processes by `flock` on the directory where the file system is
/// mounted, which the kernel lifts from whoever is killed.
#[derive(Debug)]
pub struct ProjectQuota {
    engine: Engine<Linux>,
    file_system: FileSystem,
}

impl ProjectQuota {
    /// Opens the file system that `path`, a directory, is on, and finds out whether limits bind there.
    ///
    /// # Errors
    /// [`OpenError`] names what is missing and what to do about it.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        Self::open_with(path, ProjectRange::default())
    }

    /// As [`open`](Self::open), with project numbers from another range.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(path: &Path, range: ProjectRange) -> Result<Self, OpenError> {
        Self::open_by(path, range, Way::Best)
    }

    pub(crate) fn open_by(path: &Path, range: ProjectRange, way: Way) -> Result<Self, OpenError> {
        let (linux, file_system) = file_system::open(path, way)?;
        let source = |error: rustix::io::Errno| OpenError::Open { path: path.into(), source: error.into() };
        let stat = rustix::fs::fstat(&linux.root).map_err(source)?;
        let is_whole = file_system.root == Path::new("/");
        // Who has mounted another part of it does not see our lock: each begins in a part of the range of its own.
        let start = if is_whole { range.first() } else { range.part(stat.st_ino) };
        let engine = Engine::new(linux, range).only_on(stat.st_dev).starting_at(start);
        Ok(Self { engine, file_system })
    }

    /// What was opened.
    pub fn file_system(&self) -> &FileSystem {
        &self.file_system
    }

    /// What the limits do not protect from.
    pub fn warnings(&self) -> Vec<Warning> {
        file_system::warnings(&self.file_system, self.root())
    }

    /// Every project of the file system that anything belongs to or that has limits, by number; also those that others
    /// have made.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn list(&self) -> Result<Vec<Status>, Error> {
        self.engine.list(ProjectRange::all())
    }

    /// As [`set`](QuotaSetter::set), for a directory that is not empty: all that is in it and has no project gets the
    /// directory's. What has another project, symbolic links, special files and other file systems are passed over,
    /// and counted.
    ///
    /// It follows no symbolic link. Who is killed on the way, or adds files meanwhile in directories not yet reached,
    /// repeats it.
    ///
    /// # Errors
    /// As [`set`](QuotaSetter::set), and [`Error::Tree`]; the limits then hold for what was reached.
    pub fn set_tree(&self, dir: BorrowedFd<'_>, change: Change) -> Result<(Status, Changed), Error> {
        let status = self.engine.set(dir, change, Contents::Accepted)?;
        let changed = tree::change(dir, 0, status.project.get())?;
        Ok((self.engine.status(dir)?.unwrap_or(status), changed))
    }

    /// As [`clear`](QuotaSetter::clear), for a directory that is not empty: all that is in it and has the directory's
    /// project loses it. Symbolic links and special files keep it, so the number and its limits stay until they are removed
    /// and [`release_unused`](QuotaSetter::release_unused) comes, as they do where something outside of the tree has them, too. The
    /// limits hold until the end of it.
    ///
    /// # Errors
    /// As [`clear`](QuotaSetter::clear), and [`Error::Tree`]; clearing again goes on.
    pub fn clear_tree(&self, dir: BorrowedFd<'_>) -> Result<Changed, Error> {
        let Some(project) = self.engine.begin_clearing(dir)? else { return Ok(Changed::default()) };
        let changed = tree::change(dir, project.get(), 0)?;
        self.engine.finish_clearing(dir, project)?;
        Ok(changed)
    }

    #[cfg(feature = "testing")]
    pub(crate) fn engine(&self) -> &Engine<Linux> {
        &self.engine
    }

    /// The directory where the file system is mounted.
    pub fn root(&self) -> BorrowedFd<'_> {
        self.engine.kernel.root.as_fd()
    }
}

impl QuotaSetter for ProjectQuota {
    fn set(&self, dir: BorrowedFd<'_>, change: Change) -> Result<Status, Error> {
        self.engine.set(dir, change, Contents::Refused)
    }

    fn status(&self, dir: BorrowedFd<'_>) -> Result<Option<Status>, Error> {
        self.engine.status(dir)
    }

    fn clear(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        self.engine.clear(dir)
    }

    fn release(&self, project: ProjectId) -> Result<(), Error> {
        self.engine.release(project)
    }

    fn release_unused(&self, kept: &[ProjectId]) -> Result<Vec<ProjectId>, Error> {
        self.engine.release_all_unused(kept)
    }
}

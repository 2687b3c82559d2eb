//! Quotas of a mounted file system.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use crate::engine::{NonEmptyPolicy, QuotaEngine};
use crate::file_system::{self, EnforcementGap, FileSystem, OpenError, QuotactlMode};
use crate::linux::LinuxKernel;
use crate::tree::{self, TreeSummary};
use crate::{Error, ProjectId, ProjectRange, QuotaChange, QuotaSetter, QuotaStatus};

/// The project quotas of one mounted XFS or ext4 file system.
///
/// Each directory gets its number from a [`ProjectRange`], and no two directories share one: a number with
/// inodes or limits is never allocated again. Finding a free number takes one query to the kernel, however
/// many are allocated; the first search of a process takes 2 log₂ n queries. No register is written: the
/// kernel's quota records are the register. A mutex excludes other threads, `flock` on the directory where
/// the file system is mounted excludes other processes; the kernel releases it when its holder is killed.
#[derive(Debug)]
pub struct ProjectQuota {
    engine: QuotaEngine<LinuxKernel>,
    file_system: FileSystem,
}

impl ProjectQuota {
    /// Opens the file system that `path`, a directory, is on, and checks that it enforces project quotas.
    ///
    /// # Errors
    /// [`OpenError`] names what is missing and how to fix it.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        Self::open_with_range(path, ProjectRange::default())
    }

    /// As [`open`](Self::open), with project numbers from another range.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with_range(path: &Path, range: ProjectRange) -> Result<Self, OpenError> {
        Self::open_with_mode(path, range, QuotactlMode::Auto)
    }

    pub(crate) fn open_with_mode(
        path: &Path,
        range: ProjectRange,
        way: QuotactlMode,
    ) -> Result<Self, OpenError> {
        let (linux, file_system) = file_system::open_file_system(path, way)?;
        let source = |error: rustix::io::Errno| OpenError::Open { path: path.into(), source: error.into() };
        let stat = rustix::fs::fstat(&linux.root).map_err(source)?;
        let is_whole = file_system.root == Path::new("/");
        // Processes that use another mount of this file system don't see our lock: each starts in its part of
        // the range.
        let start = if is_whole { range.first_id() } else { range.start_of_part(stat.st_ino) };
        let engine = QuotaEngine::new(linux, range).restrict_to_device(stat.st_dev).with_cursor(start);
        Ok(Self { engine, file_system })
    }

    /// The file system that was opened.
    pub fn file_system(&self) -> &FileSystem {
        &self.file_system
    }

    /// The ways around the limits that apply to this file system.
    pub fn enforcement_gaps(&self) -> Vec<EnforcementGap> {
        file_system::enforcement_gaps(&self.file_system, self.mount_dir())
    }

    /// Every project of the file system that has inodes or limits, by number; also those that other programs
    /// created.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn list_projects(&self) -> Result<Vec<QuotaStatus>, Error> {
        self.engine.list_projects(ProjectRange::full_range())
    }

    /// As [`set_limits`](QuotaSetter::set_limits), for a directory that is not empty: every entry without a
    /// project gets the directory's. Entries of other projects, symbolic links, special files and other file
    /// systems are skipped and counted.
    ///
    /// It follows no symbolic link. Repeat the call if it was killed, or if files were added meanwhile to
    /// directories that it had not reached.
    ///
    /// # Errors
    /// As [`set_limits`](QuotaSetter::set_limits), and [`Error::ChangeTree`]; the limits then apply to the
    /// entries that were reached.
    pub fn set_limits_recursive(
        &self,
        dir: BorrowedFd<'_>,
        change: QuotaChange,
    ) -> Result<(QuotaStatus, TreeSummary), Error> {
        let status = self.engine.set_limits(dir, change, NonEmptyPolicy::Accept)?;
        let changed = tree::retag_tree(dir, 0, status.project.get())?;
        Ok((self.engine.read_status(dir)?.unwrap_or(status), changed))
    }

    /// As [`clear_limits`](QuotaSetter::clear_limits), for a directory that is not empty: every entry with
    /// the directory's project loses it. Symbolic links and special files keep it, so the project and its
    /// limits stay until those are removed and
    /// [`release_unused_projects`](QuotaSetter::release_unused_projects) runs. They also stay if an inode
    /// outside of the tree has the project. The limits stay in force until the call completes.
    ///
    /// # Errors
    /// As [`clear_limits`](QuotaSetter::clear_limits), and [`Error::ChangeTree`]; repeat the call to resume.
    pub fn clear_limits_recursive(&self, dir: BorrowedFd<'_>) -> Result<TreeSummary, Error> {
        let Some(project) = self.engine.start_clearing(dir)? else { return Ok(TreeSummary::default()) };
        let changed = tree::retag_tree(dir, project.get(), 0)?;
        self.engine.finish_clearing(dir, project)?;
        Ok(changed)
    }

    #[cfg(feature = "testing")]
    pub(crate) fn engine(&self) -> &QuotaEngine<LinuxKernel> {
        &self.engine
    }

    /// The directory where the file system is mounted.
    pub fn mount_dir(&self) -> BorrowedFd<'_> {
        self.engine.kernel.root.as_fd()
    }
}

impl QuotaSetter for ProjectQuota {
    fn set_limits(&self, dir: BorrowedFd<'_>, change: QuotaChange) -> Result<QuotaStatus, Error> {
        self.engine.set_limits(dir, change, NonEmptyPolicy::Reject)
    }

    fn read_status(&self, dir: BorrowedFd<'_>) -> Result<Option<QuotaStatus>, Error> {
        self.engine.read_status(dir)
    }

    fn clear_limits(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        self.engine.clear_limits(dir)
    }

    fn release_project(&self, project: ProjectId) -> Result<(), Error> {
        self.engine.release_project(project)
    }

    fn release_unused_projects(&self, kept: &[ProjectId]) -> Result<Vec<ProjectId>, Error> {
        self.engine.release_unused_projects(kept)
    }
}

//! Quotas of a mounted file system.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use crate::engine::{NonEmptyPolicy, QuotaEngine};
use crate::file_system::{self, EnforcementGap, FileSystem, OpenError, OpenMode, QuotactlMode};
use crate::linux::LinuxKernel;
use crate::tree::{self, TreeSummary};
use crate::{
    AuditOptions, AuditReport, Error, ProjectDirectories, ProjectId, ProjectRange, QuotaChange, QuotaSetter,
    QuotaStatus, audit, verify,
};

/// The project quotas of one mounted XFS or ext4 file system.
///
/// Each directory gets its number from a [`ProjectRange`], and no two directories share one: a number with
/// inodes or limits is never allocated again. Finding a free number takes one query to the kernel, however
/// many are allocated; the first search of a process takes 2 log₂ n queries. No register is written: the
/// kernel's quota records are the register. A mutex excludes other threads, `flock` on the file
/// `.nodekeel-quota.lock`, in the directory where the file system is mounted, excludes other processes; only
/// root can open it, and the kernel releases it when its holder is killed. A change waits for it at most ten
/// seconds ([`Error::LockTimeout`]).
///
/// The directory that was given a project is marked as its owner, in the extended attribute
/// `trusted.nodekeel.project`, with its inode: only its limits change with it. A directory without the mark,
/// which was limited by another program or an earlier release, counts as the owner if all inodes of its
/// project are in its tree, and is marked then. Other directories with a project were moved out of a limited
/// one, or copied with all attributes: they get another project.
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
        Self::open_with_mode(path, range, OpenMode::Change, QuotactlMode::Auto)
    }

    /// As [`open`](Self::open), also on a read-only XFS, to read limits: changes fail there with
    /// [`Error::ReadOnly`]. On a read-only ext4 the kernel has no quotas.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`OpenError::ReadOnly`] only for ext4.
    pub fn open_for_reading(path: &Path) -> Result<Self, OpenError> {
        Self::open_with_mode(path, ProjectRange::default(), OpenMode::Read, QuotactlMode::Auto)
    }

    pub(crate) fn open_with_mode(
        path: &Path,
        range: ProjectRange,
        mode: OpenMode,
        way: QuotactlMode,
    ) -> Result<Self, OpenError> {
        let (linux, file_system) = file_system::open_file_system(path, mode, way)?;
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
        file_system::enforcement_gaps(&self.file_system)
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
    /// project gets the directory's. If the directory has the project of another one, it gets its own, and so
    /// do its entries with that project. Entries of other projects, directories that own theirs, symbolic
    /// links, special files, mounts and, on ext4, immutable entries are skipped and counted.
    ///
    /// The call follows no symbolic link. Repeat the call if it was killed, or if files were added during it to
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
        // Entries may have the project that another program has given to the directory, or the one that it had before.
        let had = self.engine.named_projects(dir)?;
        // The directory first: its new entries inherit the project, and the walk changes the old ones.
        let status = self.engine.set_limits(dir, change, NonEmptyPolicy::Accept)?;
        let previous = self.engine.previous_project(dir)?;
        let from: Vec<u32> = [0].into_iter().chain(previous).chain(had).collect();
        let changed = tree::retag_tree(dir, &from, status.project.get())?;
        // Last: after a kill before it, a repeated call reads from the mark which project the entries may
        // still have.
        if previous.is_some() {
            self.engine.forget_previous_project(dir)?;
        }
        Ok((self.engine.read_status(dir)?.unwrap_or(status), changed))
    }

    /// As [`clear_limits`](QuotaSetter::clear_limits), for a directory that is not empty: every entry with
    /// the directory's project loses it. Symbolic links, special files and, on ext4, immutable entries keep
    /// it, so the project and its limits stay until those are removed and
    /// [`release_unused_projects`](QuotaSetter::release_unused_projects) runs. They also stay if an inode
    /// outside of the tree has the project. The limits stay in force until the call completes. It waits for a repair
    /// ([`audit_tree`](Self::audit_tree)) of another caller, and the reverse, at most ten seconds.
    ///
    /// # Errors
    /// As [`clear_limits`](QuotaSetter::clear_limits), and [`Error::ChangeTree`]; repeat the call to resume.
    pub fn clear_limits_recursive(&self, dir: BorrowedFd<'_>) -> Result<TreeSummary, Error> {
        // A repair at the same time would give the entries their project back.
        let _trees = self.engine.kernel.lock_trees()?;
        // New entries of the directory inherit nothing from here on; the walk does the same for those below.
        let Some(project) = self.engine.start_clearing(dir)? else { return Ok(TreeSummary::default()) };
        let changed = tree::retag_tree(dir, &[project.get()], 0)?;
        self.engine.finish_clearing(dir, project)?;
        Ok(changed)
    }

    /// Audits a tree for entries that left the limits of their directory, and for those that count for a directory
    /// elsewhere; and repairs them, if that is asked for. Outside of limited directories, what has a project without a
    /// known owner is reported and never changed; inside, a directory whose project has limits, with all entries in it:
    /// audit the directory of the mount to find all owners.
    ///
    /// The call blocks, follows no symbolic link and enters nothing that is mounted. Each entry is judged once, by the
    /// directory that it is in then; repeat the call if it was killed, or if entries were moved during it. Concurrent
    /// changes do not abort the audit: what could not be inspected is counted
    /// ([`AuditSummary::unread`](crate::AuditSummary::unread)). No tree is cleared
    /// ([`clear_limits_recursive`](Self::clear_limits_recursive)) while another caller repairs, and the reverse.
    ///
    /// # Errors
    /// [`Error::AuditTree`], [`Error::Kernel`], for a repair [`Error::LockTimeout`], and those that
    /// [`set_limits`](QuotaSetter::set_limits) has for what is not a directory of this file system.
    pub fn audit_tree(&self, dir: BorrowedFd<'_>, options: AuditOptions) -> Result<AuditReport, Error> {
        self.engine.inspect_directory(dir)?;
        audit::audit_tree(&self.engine, dir, options, &|| false)
    }

    /// Finds the directory of a project in a tree, such as that of the mount. The kernel keeps no register of that, so
    /// every directory of the tree is read. It blocks.
    ///
    /// # Errors
    /// As [`audit_tree`](Self::audit_tree).
    pub fn find_directories(
        &self,
        dir: BorrowedFd<'_>,
        project: ProjectId,
    ) -> Result<ProjectDirectories, Error> {
        self.engine.inspect_directory(dir)?;
        audit::find_directories(dir, project)
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

    fn find_project(&self, dir: BorrowedFd<'_>) -> Result<Option<ProjectId>, Error> {
        self.engine.find_project(dir)
    }

    fn owns_project(&self, dir: BorrowedFd<'_>) -> Result<bool, Error> {
        self.engine.owns_project(dir)
    }

    fn clear_limits(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        self.engine.clear_limits(dir)
    }

    fn limit_tree(
        &self,
        dir: BorrowedFd<'_>,
        change: QuotaChange,
    ) -> Result<(QuotaStatus, TreeSummary), Error> {
        self.set_limits_recursive(dir, change)
    }

    fn release_project(&self, project: ProjectId) -> Result<(), Error> {
        self.engine.release_project(project)
    }

    fn release_unused_projects(&self, kept: &[ProjectId]) -> Result<Vec<ProjectId>, Error> {
        self.engine.release_unused_projects(kept)
    }

    fn verify_limit(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        let status = self.engine.read_status(dir)?;
        let limit = status.and_then(|status| status.limits.bytes);
        limit.map_or(Ok(()), |limit| verify::verify_limit(dir, limit))
    }

    fn audit_usage(
        &self,
        dir: BorrowedFd<'_>,
        options: AuditOptions,
        is_canceled: &dyn Fn() -> bool,
    ) -> Result<Option<AuditReport>, Error> {
        self.engine.inspect_directory(dir)?;
        let options = AuditOptions { repair: false, ..options };
        audit::audit_tree(&self.engine, dir, options, is_canceled).map(Some)
    }
}

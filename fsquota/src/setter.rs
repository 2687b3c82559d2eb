//! The trait for implementations of directory quotas.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;

use crate::{AuditOptions, AuditReport, Error, ProjectId, QuotaChange, QuotaStatus, TreeSummary};

/// Sets, reads and clears the limits of directories.
///
/// # Contract
/// - `dir` is open for reading and is a directory; anything else is [`Error::NotADirectory`].
/// - [`set_limits`](Self::set_limits): an unlimited directory gets a project that no other directory has, and
///   its limits are in force before the first file can be created in it. It has to be empty
///   ([`Error::NotEmpty`]), because existing entries would not be counted. Setting again changes only the
///   limits, each separately, and is idempotent. A failure leaves the directory unchanged or limited; never
///   with a project and without the limits.
/// - A limit of bytes is rounded up to whole KiB, by XFS to its blocks, and the status has the rounded value.
///   0, more than 2⁶³ − 64 Ki bytes and more than 2⁶³ − 1 inodes are [`Error::InvalidLimit`]. A limit below
///   the usage is accepted; [`QuotaStatus::is_over_limit`] is then true.
/// - [`read_status`](Self::read_status) is `None` for a directory without a project. For a directory inside a
///   limited one, it is the status of the outer one, whose limits apply; [`set_limits`](Self::set_limits) and
///   [`clear_limits`](Self::clear_limits) reject it ([`Error::InheritedProject`]).
/// - [`clear_limits`](Self::clear_limits) leaves the directory without limits and without a project, also if
///   it had none. The directory has to be empty. For a removed directory, it changes nothing or removes the
///   project; the limits end with [`release_project`](Self::release_project).
/// - The limits of other directories stay. A directory that has the project of another one, because it is a
///   copy with all attributes or was moved out of it, gets a separate project; it has to be empty
///   ([`Error::SharedProject`]), because its entries would stay in the other one.
///   [`clear_limits`](Self::clear_limits) only removes the project from it.
/// - Limits that are no longer enforced are neither set nor reported ([`Error::EnforcementOff`]).
/// - Limits are as durable as data written to the file system: they survive a crash if the file system was
///   synced since.
/// - All methods may be called from many threads at once, and repeated after a kill at any point.
pub trait QuotaSetter: Send + Sync + Debug {
    /// Changes the limits of a directory and gives it a project if it has none.
    ///
    /// # Errors
    /// Those of the contract, and [`Error::Kernel`]. [`Error::is_retryable`] is true if a retry helps.
    fn set_limits(&self, dir: BorrowedFd<'_>, change: QuotaChange) -> Result<QuotaStatus, Error>;

    /// Reads the limits and the usage that apply to a directory.
    ///
    /// # Errors
    /// Those of the contract, and [`Error::Kernel`].
    fn read_status(&self, dir: BorrowedFd<'_>) -> Result<Option<QuotaStatus>, Error>;

    /// The project of a directory, also while limits are not enforced: what is needed to remove it.
    ///
    /// # Errors
    /// As [`read_status`](Self::read_status), which the default calls.
    fn find_project(&self, dir: BorrowedFd<'_>) -> Result<Option<ProjectId>, Error> {
        Ok(self.read_status(dir)?.map(|status| status.project))
    }

    /// Returns whether the project of a directory was given to it, and all its entries got it: a directory that was copied
    /// or moved may have that of another one, or none. What is not so is set right by [`limit_tree`](Self::limit_tree).
    ///
    /// # Errors
    /// As [`read_status`](Self::read_status). The default asks whether it has a project.
    fn owns_project(&self, dir: BorrowedFd<'_>) -> Result<bool, Error> {
        Ok(self.find_project(dir)?.is_some())
    }

    /// Returns whether limits that are set can be read again: the default. An implementation that sets none keeps none.
    fn keeps_limits(&self) -> bool {
        true
    }

    /// Removes the limits and the project from an empty directory.
    ///
    /// # Errors
    /// Those of the contract, and [`Error::Kernel`]: the directory is then limited, or unlimited with its
    /// project. Repeat the call to resume.
    fn clear_limits(&self, dir: BorrowedFd<'_>) -> Result<(), Error>;

    /// As [`set_limits`](Self::set_limits), for a directory that may have entries: they count from then on. The
    /// summary counts those that could not be changed. Repeat the call if it was killed.
    ///
    /// The default is [`set_limits`](Self::set_limits), which suits implementations that count all entries
    /// in a directory.
    ///
    /// # Errors
    /// As [`set_limits`](Self::set_limits), and [`Error::ChangeTree`]; the limits then apply to the entries
    /// that were reached.
    fn limit_tree(
        &self,
        dir: BorrowedFd<'_>,
        change: QuotaChange,
    ) -> Result<(QuotaStatus, TreeSummary), Error> {
        Ok((self.set_limits(dir, change)?, TreeSummary::default()))
    }

    /// Releases the limits of a project whose directory has been removed, also if it has none.
    ///
    /// The default does nothing, which suits implementations that store nothing outside of the directory.
    ///
    /// # Errors
    /// [`Error::ProjectInUse`] while any inode belongs to the project.
    fn release_project(&self, project: ProjectId) -> Result<(), Error> {
        let _ = project;
        Ok(())
    }

    /// Releases the limits of every project without inodes, and returns those projects. They remain if a
    /// process is killed after it set limits and before it tagged the directory, or after it removed a
    /// directory and before [`release_project`](Self::release_project). The projects in `kept` stay: their
    /// owners will release them, and would otherwise find them allocated again. The duration grows with the
    /// number of projects.
    ///
    /// The default does nothing, which suits implementations that store nothing outside of the directories.
    ///
    /// # Errors
    /// [`Error::Kernel`]; repeat the call to resume.
    fn release_unused_projects(&self, kept: &[ProjectId]) -> Result<Vec<ProjectId>, Error> {
        let _ = kept;
        Ok(Vec::new())
    }

    /// Shows that the limit of bytes of a directory binds: writes past it, into a file that is gone afterwards, also after
    /// a kill. So the limit should be small. It succeeds also if the file system is full, which shows nothing, and if the
    /// directory has no limit.
    ///
    /// The default does nothing, which suits implementations that enforce nothing, or can't tell.
    ///
    /// # Errors
    /// [`Error::LimitNotBinding`], [`Error::ReadOnly`], [`Error::EnforcementOff`] and [`Error::Kernel`].
    fn verify_limit(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        let _ = dir;
        Ok(())
    }

    /// Audits the tree of a directory, and changes nothing: entries that escaped from limits, or that count for
    /// a directory elsewhere. It blocks, and ends early once `is_canceled` returns true.
    ///
    /// `None`, the default: limits of this implementation can't be escaped from, or it can't tell.
    ///
    /// # Errors
    /// [`Error::AuditTree`], [`Error::Kernel`], [`Error::Canceled`]; a retry may help.
    fn audit_usage(
        &self,
        dir: BorrowedFd<'_>,
        options: AuditOptions,
        is_canceled: &dyn Fn() -> bool,
    ) -> Result<Option<AuditReport>, Error> {
        let _ = (dir, options, is_canceled);
        Ok(None)
    }
}

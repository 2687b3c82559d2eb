//! The seam.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;

use crate::{Change, Error, ProjectId, Status};

/// Gives directories limits of their own.
///
/// # Contract
/// - `dir` is open for reading and is a directory; anything else is [`Error::NotADirectory`].
/// - [`set`](Self::set): an unlimited directory gets a project of its own, that no other directory has, and its limits
///   bind before the first file can be made in it. It has to be empty ([`Error::NotEmpty`]), because what is in it
///   already would not be counted. Setting again changes the limits alone, each by itself, and is idempotent. A failure
///   leaves the directory as it was, or limited; never with a project and without the limits.
/// - A limit of bytes is rounded up to whole KiB, by XFS to its blocks, and the status says to what. 0, more than
///   2⁶³ − 64 Ki bytes and more than 2⁶³ − 1 inodes are [`Error::Limit`]. A limit below the usage is accepted; [`Status::over_limit`] tells.
/// - [`status`](Self::status) is `None` for a directory without a project. Of a directory inside a limited one, it is
///   that one's, because that one counts; [`set`](Self::set) and [`clear`](Self::clear) refuse it ([`Error::Inherited`]).
/// - [`clear`](Self::clear): the directory is without limits and without a project, also when it was before. It has to
///   be empty. One that has been removed is let be, or let go of; its limits end with [`release`](Self::release).
/// - The limits of another directory stay: an empty directory whose project something else has, too, as a copy with all
///   its attributes, is refused by [`set`](Self::set) ([`Error::Shared`]) and loses the project by [`clear`](Self::clear).
/// - Limits are as durable as what is written to the file system: they are there after a crash if the file system was
///   synced since.
/// - All of it may be called from many threads at once, and be repeated after it was killed at any point.
pub trait QuotaSetter: Send + Sync + Debug {
    /// Changes the limits of a directory and gives it a project if it has none.
    ///
    /// # Errors
    /// As the contract says, and [`Error::Kernel`]. [`Error::is_retryable`] tells whether a retry helps.
    fn set(&self, dir: BorrowedFd<'_>, change: Change) -> Result<Status, Error>;

    /// The limits and the usage that count for a directory.
    ///
    /// # Errors
    /// As the contract says, and [`Error::Kernel`].
    fn status(&self, dir: BorrowedFd<'_>) -> Result<Option<Status>, Error>;

    /// Takes the limits and the project from an empty directory.
    ///
    /// # Errors
    /// As the contract says, and [`Error::Kernel`]: the directory is then limited, or unlimited with its project, and
    /// clearing it again goes on.
    fn clear(&self, dir: BorrowedFd<'_>) -> Result<(), Error>;

    /// Lets go of what is kept for a project whose directory has been removed, also when nothing is.
    ///
    /// What keeps nothing beside the directory itself has nothing to do here, and by default nothing is done.
    ///
    /// # Errors
    /// [`Error::InUse`] while anything belongs to the project.
    fn release(&self, project: ProjectId) -> Result<(), Error> {
        let _ = project;
        Ok(())
    }

    /// Lets go of what is kept for every project that nothing belongs to, and names them: what was left by who was killed
    /// between limits and directory, or between a directory's end and [`release`](Self::release). Those of `kept` stay:
    /// numbers that somebody will release by himself, who would else find them given away. The more projects there are,
    /// the longer it takes.
    ///
    /// What keeps nothing beside the directories has nothing to do here, and by default nothing is done.
    ///
    /// # Errors
    /// [`Error::Kernel`]; calling it again goes on.
    fn release_unused(&self, kept: &[ProjectId]) -> Result<Vec<ProjectId>, Error> {
        let _ = kept;
        Ok(Vec::new())
    }
}

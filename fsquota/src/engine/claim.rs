//! Whose project a directory has, and what a change of limits does with it.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::{Duration, SystemTime};

use super::QuotaEngine;
use crate::error::KernelOperation;
use crate::kernel::{ProjectTag, QuotaKernel};
use crate::{Error, ProjectId};

/// How often a tree is counted: its files may be created and removed meanwhile.
const COUNT_ATTEMPTS: u32 = 2;

/// The kernel's file times are up to one tick behind its clock: 10 ms with HZ=100.
const FILE_TIME_UNIT: Duration = Duration::from_millis(20);

/// The project of a directory, and what proves that it is its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProjectClaim {
    /// It has none.
    Missing,
    /// Its mark names the project.
    Marked {
        project: ProjectId,
        /// Whether all its entries have the project.
        is_complete: bool,
    },
    /// It was given the project by another program or an earlier release, or it is a copy of its owner, or
    /// was moved out of it.
    Unmarked { project: ProjectId, is_complete: bool },
}

/// What a change of limits does with the project of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChangeDecision {
    /// Changes the limits of the project.
    Change { project: ProjectId, is_complete: bool },
    /// Allocates a project. The directory carries that of another one, if any.
    Allocate { carried: Option<ProjectId> },
}

/// Changes limits only for the owner of a project: the directory with the mark, or without a mark the one
/// whose tree has all inodes of the project.
pub(super) fn decide_change(claim: ProjectClaim, has_whole_project: bool) -> ChangeDecision {
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
    pub(super) fn require_complete(self) -> Result<(), Error> {
        match self {
            Self::Change { is_complete: true, .. } => Ok(()),
            Self::Change { .. } | Self::Allocate { carried: None } => Err(Error::NotEmpty),
            Self::Allocate { carried: Some(project) } => Err(Error::SharedProject { project }),
        }
    }
}

impl<K: QuotaKernel> QuotaEngine<K> {
    /// Whose project the directory has.
    pub(super) fn project_claim(&self, dir: BorrowedFd<'_>) -> Result<ProjectClaim, Error> {
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

    /// Whether all inodes of the project are in the tree of the directory: then no other directory can have the
    /// project. In doubt, they are not: links and special files, whose project can't be read, and what is
    /// created or removed meanwhile.
    #[expect(clippy::disallowed_methods, reason = "file times have no finer unit to wait for")]
    pub(super) fn has_whole_project(&self, dir: BorrowedFd<'_>, project: ProjectId) -> Result<bool, Error> {
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

    /// Whether the project of an empty directory has inodes elsewhere. For a directory that is not empty,
    /// that would require counting its tree, so the project counts as not shared.
    pub(super) fn is_shared(&self, dir: BorrowedFd<'_>, project: ProjectId) -> Result<bool, Error> {
        Ok(self.quota_record(project)?.inodes > 1
            && self.is_empty(dir)?
            && self.has_several_inodes(project)?)
    }

    /// Whether more than one inode belongs to the project.
    pub(super) fn has_several_inodes(&self, project: ProjectId) -> Result<bool, Error> {
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
}

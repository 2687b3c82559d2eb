//! The interface to the kernel, or to its replacement in memory.

use std::fmt::Debug;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Instant, SystemTime};

use rustix::fs::{Mode, OFlags};

use crate::limits::{KIB, KernelLimitChange};
use crate::owner::OwnerMark;
use crate::range::ProjectLookup;
use crate::{Bytes, Error, Inodes, ProjectId, QuotaLimits, QuotaStatus, QuotaUsage};

/// The attributes of an inode that assign it to a project.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProjectTag {
    /// 0: not in a project.
    pub(crate) project: u32,
    /// True if new entries of the directory inherit the tag.
    pub(crate) inherit: bool,
}

/// Limits and usage of a project; a limit of 0 is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QuotaRecord {
    pub(crate) kib_limit: u64,
    pub(crate) bytes: u64,
    pub(crate) inode_limit: u64,
    pub(crate) inodes: u64,
}

impl QuotaRecord {
    /// Returns whether any inode belongs to the project.
    pub(crate) fn is_used(self) -> bool {
        self.bytes != 0 || self.inodes != 0
    }

    pub(crate) fn status(self, project: ProjectId) -> QuotaStatus {
        let limit = |value: u64| (value != 0).then_some(value);
        QuotaStatus {
            project,
            limits: QuotaLimits {
                bytes: limit(self.kib_limit).map(|kib| Bytes(kib.saturating_mul(KIB))),
                inodes: limit(self.inode_limit).map(Inodes),
            },
            usage: QuotaUsage { bytes: Bytes(self.bytes), inodes: Inodes(self.inodes) },
        }
    }
}

/// The single calls; [`QuotaEngine`](crate::engine::QuotaEngine) combines them.
pub(crate) trait QuotaKernel: Debug + Send + Sync {
    fn project_tag(&self, file: BorrowedFd<'_>) -> io::Result<ProjectTag>;
    /// Changes the tag and no other attribute of the inode.
    fn set_project_tag(&self, file: BorrowedFd<'_>, tag: ProjectTag) -> io::Result<()>;
    /// The mark of the directory; `None` also for the mark of another inode.
    fn owner_mark(&self, dir: BorrowedFd<'_>) -> io::Result<Option<OwnerMark>>;
    /// Writes the mark of the directory, or removes it.
    fn set_owner_mark(&self, dir: BorrowedFd<'_>, mark: Option<OwnerMark>) -> io::Result<()>;
    /// Returns whether the attributes of the directory can't be changed.
    fn is_immutable(&self, dir: BorrowedFd<'_>) -> io::Result<bool> {
        let _ = dir;
        Ok(false)
    }
    /// Counts the inodes of the project in the tree of the directory, with the directory itself, that were
    /// created before a time; except those of a directory that is marked as the project's owner, and those
    /// whose project or age can't be read.
    fn count_tree(&self, dir: BorrowedFd<'_>, project: u32, before: SystemTime) -> Result<u64, Error>;
    /// Returns whether the limits of projects are enforced at present.
    fn is_enforced(&self) -> io::Result<bool>;
    /// All 0 for a project without a record.
    fn quota_record(&self, project: u32) -> io::Result<QuotaRecord>;
    fn set_limits(&self, project: u32, change: KernelLimitChange) -> io::Result<()>;
    /// The first project that is not below this number and has a record. The number is below 2³² − 1, which
    /// the kernel rejects.
    fn next_record(&self, from: u32) -> io::Result<Option<(u32, QuotaRecord)>>;
    /// Excludes other allocators, also in other processes, until
    /// [`unlock_allocation`](Self::unlock_allocation). Fails at the deadline, after one attempt at least.
    fn lock_allocation(&self, deadline: Instant) -> Result<(), Error>;
    fn unlock_allocation(&self);
    /// The inode number of the entry that `lock_allocation` has made in this directory.
    fn lock_inode(&self, dir: BorrowedFd<'_>) -> Option<u64> {
        let _ = dir;
        None
    }
    fn parent_dir(&self, dir: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        open_parent_dir(dir)
    }
    /// Returns when the records no longer count files that were removed before.
    fn flush_removed_inodes(&self) -> io::Result<()>;
}

/// The directory that `..` refers to.
pub(crate) fn open_parent_dir(dir: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, "..", flags, Mode::empty())?)
}

/// Looks up projects in the kernel, to find a free one.
pub(crate) struct KernelProjects<'a, K>(pub(crate) &'a K);

impl<K: QuotaKernel> ProjectLookup for KernelProjects<'_, K> {
    fn is_allocated(&self, project: u32) -> io::Result<bool> {
        self.0.quota_record(project).map(|record| record != QuotaRecord::default())
    }

    fn next_allocated(&self, from: u32) -> io::Result<Option<u32>> {
        Ok(next_project(self.0, from)?.map(|(project, _)| project.get()))
    }
}

/// The first project that is not below this number and has limits or usage.
pub(crate) fn next_project(
    kernel: &impl QuotaKernel,
    mut from: u32,
) -> io::Result<Option<(ProjectId, QuotaRecord)>> {
    // No project has the largest number, and the kernel rejects it.
    while from < u32::MAX
        && let Some((number, record)) = kernel.next_record(from)?
    {
        // A released project may keep an empty record, and inodes without a project count for number 0: neither is
        // listed.
        if let Some(project) = ProjectId::new(number)
            && record != QuotaRecord::default()
        {
            return Ok(Some((project, record)));
        }
        from = number.saturating_add(1);
    }
    Ok(None)
}

//! The interface to the kernel, or to its replacement in memory.

use std::fmt::Debug;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

use crate::limits::{KIB, KernelLimitChange};
use crate::range::ProjectLookup;
use crate::{Bytes, Inodes, ProjectId, QuotaLimits, QuotaStatus, QuotaUsage};

/// The attributes of an inode that assign it to a project.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProjectTag {
    /// 0: not in a project.
    pub(crate) project: u32,
    /// Whether new entries of the directory inherit the tag.
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
    /// Whether any inode belongs to the project.
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
    /// All 0 for a project without a record.
    fn quota_record(&self, project: u32) -> io::Result<QuotaRecord>;
    fn set_limits(&self, project: u32, change: KernelLimitChange) -> io::Result<()>;
    /// The first project that is not below this number and has a record.
    fn next_record(&self, from: u32) -> io::Result<Option<(u32, QuotaRecord)>>;
    /// Excludes other allocators, also in other processes, until
    /// [`unlock_allocation`](Self::unlock_allocation).
    fn lock_allocation(&self) -> io::Result<()>;
    fn unlock_allocation(&self);
    /// The parent of the directory.
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

    fn next_allocated(&self, mut from: u32) -> io::Result<Option<u32>> {
        while let Some((project, record)) = self.0.next_record(from)? {
            if record != QuotaRecord::default() {
                return Ok(Some(project));
            }
            match project.checked_add(1) {
                Some(next) => from = next,
                None => break,
            }
        }
        Ok(None)
    }
}

//! What is asked of the kernel, or of what stands in for it.

use std::fmt::Debug;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

use crate::limits::{KIB, KernelChange};
use crate::range::Taken;
use crate::{Bytes, Inodes, Limits, ProjectId, Status, Usage};

/// What says in an inode which project it belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tag {
    /// 0 is none.
    pub(crate) project: u32,
    /// Whether what is made in the directory gets the same tag.
    pub(crate) inherit: bool,
}

/// The account of a project; a limit of 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) kib_limit: u64,
    pub(crate) bytes: u64,
    pub(crate) inode_limit: u64,
    pub(crate) inodes: u64,
}

impl Record {
    /// Whether anything belongs to the project.
    pub(crate) fn is_used(self) -> bool {
        self.bytes != 0 || self.inodes != 0
    }

    pub(crate) fn status(self, project: ProjectId) -> Status {
        let limit = |value: u64| (value != 0).then_some(value);
        Status {
            project,
            limits: Limits {
                bytes: limit(self.kib_limit).map(|kib| Bytes(kib.saturating_mul(KIB))),
                inodes: limit(self.inode_limit).map(Inodes),
            },
            usage: Usage { bytes: Bytes(self.bytes), inodes: Inodes(self.inodes) },
        }
    }
}

/// The calls, one by one; what they add up to is [`Engine`](crate::engine::Engine)'s.
pub(crate) trait Kernel: Debug + Send + Sync {
    fn tag(&self, file: BorrowedFd<'_>) -> io::Result<Tag>;
    /// Changes the tag and nothing else of the inode.
    fn set_tag(&self, file: BorrowedFd<'_>, tag: Tag) -> io::Result<()>;
    /// All 0 for a project that there is not.
    fn record(&self, project: u32) -> io::Result<Record>;
    fn set_limits(&self, project: u32, change: KernelChange) -> io::Result<()>;
    /// The first project that is not below this number and has an account.
    fn next(&self, from: u32) -> io::Result<Option<(u32, Record)>>;
    /// Holds off whoever else allocates, in other processes too, until [`unlock`](Self::unlock).
    fn lock(&self) -> io::Result<()>;
    fn unlock(&self);
    /// The directory that this one is in.
    fn above(&self, dir: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        above(dir)
    }
    /// Returns when files removed before are no longer in the accounts.
    fn settle(&self) -> io::Result<()>;
}

/// What `..` leads to.
pub(crate) fn above(dir: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, "..", flags, Mode::empty())?)
}

/// The projects of a kernel, for finding a free one.
pub(crate) struct Projects<'a, K>(pub(crate) &'a K);

impl<K: Kernel> Taken for Projects<'_, K> {
    fn is_taken(&self, project: u32) -> io::Result<bool> {
        self.0.record(project).map(|record| record != Record::default())
    }

    fn next_taken(&self, mut from: u32) -> io::Result<Option<u32>> {
        while let Some((project, record)) = self.0.next(from)? {
            if record != Record::default() {
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

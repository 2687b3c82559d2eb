//! The kernel itself.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::fs::FlockOperation;

use crate::file_system::Kind;
use crate::kernel::{Kernel, Record, Tag, above};
use crate::limits::KernelChange;
use crate::sys::{self, Account, Target};

/// A file system, by its open root.
///
/// Its lock is `flock` on the root directory: it needs no file, so nothing is left behind and nothing can be stale; the
/// kernel lifts it with the last descriptor, also of a killed process; and it is seen across containers and mount
/// namespaces, because it belongs to the inode.
#[derive(Debug)]
pub(crate) struct Linux {
    pub(crate) root: OwnedFd,
    /// Where the kernel takes no descriptors.
    pub(crate) device: Option<CString>,
    pub(crate) kind: Kind,
}

impl Linux {
    pub(crate) fn target(&self) -> Target<'_> {
        match &self.device {
            Some(device) => Target::Device(device),
            None => Target::Open(self.root.as_fd()),
        }
    }
}

impl From<Account> for Record {
    fn from(account: Account) -> Self {
        Self {
            kib_limit: account.hard_blocks,
            bytes: account.bytes,
            inode_limit: account.hard_inodes,
            inodes: account.inodes,
        }
    }
}

/// `None` where there is no such account. *Source:* fs/quota/quota.c: XFS says ENOENT, the others ESRCH.
fn found(account: io::Result<Account>) -> io::Result<Option<Account>> {
    match account {
        Ok(account) => Ok(Some(account)),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Kernel for Linux {
    fn tag(&self, file: BorrowedFd<'_>) -> io::Result<Tag> {
        tag(file)
    }

    fn set_tag(&self, file: BorrowedFd<'_>, tag: Tag) -> io::Result<()> {
        set_tag(file, tag)
    }

    fn record(&self, project: u32) -> io::Result<Record> {
        match found(sys::account(self.target(), project))? {
            Some(account) => Ok(account.into()),
            // Of quotas that have been turned off there are no accounts either; to take them for empty would give
            // numbers away twice.
            None => sys::probe(self.target()).map(|()| Record::default()),
        }
    }

    /// The soft limit is the hard one: there is no grace in which the limit would be another.
    fn set_limits(&self, project: u32, change: KernelChange) -> io::Result<()> {
        let mut account = Account::default();
        if let Some(kib) = change.kib {
            (account.hard_blocks, account.soft_blocks) = (kib, kib);
            account.valid |= sys::BLOCK_LIMITS;
        }
        if let Some(inodes) = change.inodes {
            (account.hard_inodes, account.soft_inodes) = (inodes, inodes);
            account.valid |= sys::INODE_LIMITS;
        }
        sys::set_account(self.target(), project, account)
    }

    fn next(&self, from: u32) -> io::Result<Option<(u32, Record)>> {
        let next = found(sys::next_account(self.target(), from))?;
        Ok(next.map(|account| (account.project, account.into())))
    }

    fn lock(&self) -> io::Result<()> {
        let lock = || rustix::fs::flock(&self.root, FlockOperation::LockExclusive);
        Ok(rustix::io::retry_on_intr(lock)?)
    }

    fn unlock(&self) {
        // It can't fail for a descriptor that is open and was locked.
        let _ = rustix::fs::flock(&self.root, FlockOperation::Unlock);
    }

    /// A container may see the directory as a mount of its own, above which there is something else.
    fn above(&self, dir: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let own = sys::reopen(self.root.as_fd(), dir);
        own.and_then(|own| above(own.as_fd())).or_else(|_| above(dir))
    }

    fn settle(&self) -> io::Result<()> {
        // XFS does away with removed inodes in the background, and counts them until then.
        match self.kind {
            Kind::Xfs => sys::flush_removed(self.root.as_fd(), NOBODYS),
            Kind::Ext4 => Ok(()),
        }
    }
}

/// A project that no range of ours has, and that nothing is likely to belong to: the largest.
const NOBODYS: u32 = u32::MAX - 1;

pub(crate) fn tag(file: BorrowedFd<'_>) -> io::Result<Tag> {
    let attributes = sys::attributes(file)?;
    Ok(Tag { project: attributes.project, inherit: attributes.flags & sys::INHERIT != 0 })
}

pub(crate) fn set_tag(file: BorrowedFd<'_>, tag: Tag) -> io::Result<()> {
    let mut attributes = sys::attributes(file)?;
    attributes.project = tag.project;
    attributes.flags = (attributes.flags & !sys::INHERIT) | if tag.inherit { sys::INHERIT } else { 0 };
    sys::set_attributes(file, &attributes)
}

#[cfg(test)]
#[path = "linux_test.rs"]
mod tests;

//! Quota calls to the Linux kernel.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::fs::FlockOperation;

use crate::file_system::FileSystemKind;
use crate::kernel::{ProjectTag, QuotaKernel, QuotaRecord, open_parent_dir};
use crate::limits::KernelLimitChange;
use crate::sys::{self, DiskQuotaBlock, QuotaTarget};

/// A file system, by its open root.
///
/// Its lock is `flock` on the root directory. It needs no lock file, so nothing is left behind or stale. The
/// kernel releases it with the last descriptor, also when the process is killed. It belongs to the inode, so
/// it works across containers and mount namespaces.
#[derive(Debug)]
pub(crate) struct LinuxKernel {
    pub(crate) root: OwnedFd,
    /// Set where the kernel does not accept descriptors.
    pub(crate) device: Option<CString>,
    pub(crate) kind: FileSystemKind,
}

impl LinuxKernel {
    pub(crate) fn quota_target(&self) -> QuotaTarget<'_> {
        match &self.device {
            Some(device) => QuotaTarget::Device(device),
            None => QuotaTarget::Descriptor(self.root.as_fd()),
        }
    }
}

impl From<DiskQuotaBlock> for QuotaRecord {
    fn from(account: DiskQuotaBlock) -> Self {
        Self {
            kib_limit: account.hard_blocks,
            bytes: account.bytes,
            inode_limit: account.hard_inodes,
            inodes: account.inodes,
        }
    }
}

/// `None` if the kernel has no such record. *Source:* fs/quota/quota.c: XFS returns ENOENT, the others ESRCH.
fn existing_quota(account: io::Result<DiskQuotaBlock>) -> io::Result<Option<DiskQuotaBlock>> {
    match account {
        Ok(account) => Ok(Some(account)),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => Ok(None),
        Err(error) => Err(error),
    }
}

impl QuotaKernel for LinuxKernel {
    fn project_tag(&self, file: BorrowedFd<'_>) -> io::Result<ProjectTag> {
        read_project_tag(file)
    }

    fn set_project_tag(&self, file: BorrowedFd<'_>, tag: ProjectTag) -> io::Result<()> {
        write_project_tag(file, tag)
    }

    fn quota_record(&self, project: u32) -> io::Result<QuotaRecord> {
        match existing_quota(sys::read_quota(self.quota_target(), project))? {
            Some(account) => Ok(account.into()),
            // With quotas turned off, records are missing too. Treating those projects as free would allocate
            // their numbers twice.
            None => sys::probe_accounting(self.quota_target()).map(|()| QuotaRecord::default()),
        }
    }

    /// Soft and hard limit are equal, so no grace period applies.
    fn set_limits(&self, project: u32, change: KernelLimitChange) -> io::Result<()> {
        let mut account = DiskQuotaBlock::default();
        if let Some(kib) = change.kib {
            (account.hard_blocks, account.soft_blocks) = (kib, kib);
            account.valid |= sys::BLOCK_LIMITS;
        }
        if let Some(inodes) = change.inodes {
            (account.hard_inodes, account.soft_inodes) = (inodes, inodes);
            account.valid |= sys::INODE_LIMITS;
        }
        sys::write_quota(self.quota_target(), project, account)
    }

    fn next_record(&self, from: u32) -> io::Result<Option<(u32, QuotaRecord)>> {
        let next = existing_quota(sys::read_next_quota(self.quota_target(), from))?;
        Ok(next.map(|account| (account.project, account.into())))
    }

    fn lock_allocation(&self) -> io::Result<()> {
        let lock = || rustix::fs::flock(&self.root, FlockOperation::LockExclusive);
        Ok(rustix::io::retry_on_intr(lock)?)
    }

    fn unlock_allocation(&self) {
        // It can't fail for a descriptor that is open and was locked.
        let _ = rustix::fs::flock(&self.root, FlockOperation::Unlock);
    }

    /// A container may see the directory as a separate mount, whose `..` is not the directory's parent.
    fn parent_dir(&self, dir: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let own = sys::reopen_by_handle(self.root.as_fd(), dir);
        own.and_then(|own| open_parent_dir(own.as_fd())).or_else(|_| open_parent_dir(dir))
    }

    fn flush_removed_inodes(&self) -> io::Result<()> {
        // XFS frees removed inodes in the background and counts them until then.
        match self.kind {
            FileSystemKind::Xfs => sys::flush_removed_inodes(self.root.as_fd(), UNUSED_PROJECT),
            FileSystemKind::Ext4 => Ok(()),
        }
    }
}

/// A project outside of the default range that inodes are unlikely to belong to: the largest.
const UNUSED_PROJECT: u32 = u32::MAX - 1;

pub(crate) fn read_project_tag(file: BorrowedFd<'_>) -> io::Result<ProjectTag> {
    let attributes = sys::read_attributes(file)?;
    Ok(ProjectTag { project: attributes.project, inherit: attributes.flags & sys::INHERIT_PROJECT != 0 })
}

pub(crate) fn write_project_tag(file: BorrowedFd<'_>, tag: ProjectTag) -> io::Result<()> {
    let mut attributes = sys::read_attributes(file)?;
    attributes.project = tag.project;
    attributes.flags =
        (attributes.flags & !sys::INHERIT_PROJECT) | if tag.inherit { sys::INHERIT_PROJECT } else { 0 };
    sys::write_attributes(file, &attributes)
}

#[cfg(test)]
#[path = "linux_test.rs"]
mod tests;

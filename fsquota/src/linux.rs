//! Quota calls to the Linux kernel.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, XattrFlags};
use rustix::io::Errno;

use crate::Error;
use crate::error::{KernelOperation, LOCK_TIMEOUT};
use crate::file_system::FileSystemKind;
use crate::kernel::{ProjectTag, QuotaKernel, QuotaRecord, open_parent_dir};
use crate::limits::{KIB, KernelLimitChange};
use crate::owner::{InodeId, OWNER_ATTRIBUTE, OwnerMark, OwnerRecord};
use crate::sys::{self, DISK_QUOTA_UNIT, DiskQuotaBlock, QuotaTarget};
use crate::tree;

/// A file system, by its open root.
///
/// The lock is `flock` on a file in the root directory that only root can open: on a directory, every process
/// that can read it could hold the lock. The kernel releases it with the last descriptor, also when the
/// process is killed. It belongs to the inode, so it works across containers and mount namespaces.
#[derive(Debug)]
pub(crate) struct LinuxKernel {
    pub(crate) root: OwnedFd,
    /// Set where the kernel does not accept descriptors.
    pub(crate) device: Option<CString>,
    pub(crate) kind: FileSystemKind,
    pub(crate) mount_point: PathBuf,
    /// The lock file while it is locked.
    lock: Mutex<Option<OwnedFd>>,
}

/// Held while a tree is cleared or repaired.
#[derive(Debug)]
pub(crate) struct TreeLock(OwnedFd);

impl Drop for TreeLock {
    fn drop(&mut self) {
        // As for the lock of the allocation, closing it would not be enough, and it can't fail.
        let _ = sys::lock_description(self.0.as_fd(), false);
    }
}

/// The name of the lock file, in the directory where the file system is mounted.
pub(crate) const LOCK_FILE: &str = ".nodekeel-quota.lock";

/// The time between two attempts to lock, doubled from the shortest to the longest: `flock` has no deadline.
const LOCK_PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(32)];

impl LinuxKernel {
    pub(crate) fn new(
        root: OwnedFd,
        device: Option<CString>,
        kind: FileSystemKind,
        mount_point: PathBuf,
    ) -> Self {
        Self { root, device, kind, mount_point, lock: Mutex::new(None) }
    }

    pub(crate) fn quota_target(&self) -> QuotaTarget<'_> {
        match &self.device {
            Some(device) => QuotaTarget::Device(device),
            None => QuotaTarget::Descriptor(self.root.as_fd()),
        }
    }

    fn lock_path(&self) -> PathBuf {
        self.mount_point.join(LOCK_FILE)
    }

    /// Opens the lock file, and creates it first if it doesn't exist.
    fn open_lock(&self) -> Result<OwnedFd, Error> {
        // A file of another kind under this name is rejected, and neither followed nor waited for.
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let failed = |error: Errno| match error {
            Errno::LOOP | Errno::ISDIR | Errno::NXIO => Error::UnsafeLock { path: self.lock_path() },
            error => KernelOperation::LockAllocation.into_error()(error.into()),
        };
        let lock =
            rustix::fs::openat(&self.root, LOCK_FILE, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        let stat = rustix::fs::fstat(&lock).map_err(failed)?;
        // Another user who can open the file could hold its lock forever.
        let is_private = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && stat.st_uid == rustix::process::geteuid().as_raw()
            && Mode::from_raw_mode(stat.st_mode) & (Mode::RWXG | Mode::RWXO) == Mode::empty();
        if !is_private {
            return Err(Error::UnsafeLock { path: self.lock_path() });
        }
        // In a mount of a limited directory it has inherited the project, and would keep it in use.
        let failed = KernelOperation::LockAllocation;
        if read_project_tag(lock.as_fd()).map_err(failed.into_error())? != ProjectTag::default() {
            write_project_tag(lock.as_fd(), ProjectTag::default()).map_err(failed.into_error())?;
        }
        Ok(lock)
    }

    /// Keeps others from clearing or repairing a tree until the result is dropped. Limits are set, read and allocated
    /// all the same.
    pub(crate) fn lock_trees(&self) -> Result<TreeLock, Error> {
        let lock = self
            .wait_for_lock(Instant::now() + LOCK_TIMEOUT, |lock| sys::lock_description(lock.as_fd(), true))?;
        Ok(TreeLock(lock))
    }

    /// Opens the lock file, and locks it as soon as no other process, or thread, holds that lock.
    #[expect(clippy::disallowed_methods, reason = "file locks have no deadline")]
    fn wait_for_lock(
        &self,
        deadline: Instant,
        try_lock: impl Fn(&OwnedFd) -> io::Result<()>,
    ) -> Result<OwnedFd, Error> {
        let failed = |error: io::Error| KernelOperation::LockAllocation.into_error()(error);
        let is_held = |error: &io::Error| {
            matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES | libc::EINTR))
        };
        let [mut pause, longest] = LOCK_PAUSES;
        loop {
            // Opened anew in each turn: an administrator may have removed the file, and another process
            // created it again.
            let lock = self.open_lock()?;
            match try_lock(&lock) {
                Ok(()) if self.is_current(&lock).map_err(failed)? => return Ok(lock),
                // The lock of a file without a name excludes no other process: open the one that has the name
                // now.
                Ok(()) => {}
                Err(error) if is_held(&error) => {}
                Err(error) => return Err(failed(error)),
            }
            if Instant::now() >= deadline {
                return Err(Error::LockTimeout { path: self.lock_path() });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(longest);
        }
    }

    /// Returns whether the open lock file is still the one that other processes would open.
    fn is_current(&self, lock: &OwnedFd) -> io::Result<bool> {
        let opened = rustix::fs::fstat(lock)?;
        match rustix::fs::statat(&self.root, LOCK_FILE, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(named) => Ok((named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

impl From<DiskQuotaBlock> for QuotaRecord {
    fn from(account: DiskQuotaBlock) -> Self {
        Self {
            kib_limit: account.hard_blocks.div_ceil(KIB / DISK_QUOTA_UNIT),
            bytes: account.blocks.saturating_mul(DISK_QUOTA_UNIT),
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

    fn is_immutable(&self, dir: BorrowedFd<'_>) -> io::Result<bool> {
        is_immutable(dir)
    }

    fn owner_mark(&self, dir: BorrowedFd<'_>) -> io::Result<Option<OwnerMark>> {
        read_owner_mark(dir)
    }

    fn set_owner_mark(&self, dir: BorrowedFd<'_>, mark: Option<OwnerMark>) -> io::Result<()> {
        write_owner_mark(dir, mark)
    }

    fn count_tree(&self, dir: BorrowedFd<'_>, project: u32, before: SystemTime) -> Result<u64, Error> {
        tree::count_tree(dir, project, before)
    }

    fn is_enforced(&self) -> io::Result<bool> {
        sys::is_enforcement_on(self.quota_target())
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
        // `fields` names the limits to change; the kernel keeps the others.
        let mut account = DiskQuotaBlock::default();
        if let Some(kib) = change.kib {
            let blocks = kib * (KIB / DISK_QUOTA_UNIT);
            (account.hard_blocks, account.soft_blocks) = (blocks, blocks);
            account.fields |= sys::BLOCK_LIMITS;
        }
        if let Some(inodes) = change.inodes {
            (account.hard_inodes, account.soft_inodes) = (inodes, inodes);
            account.fields |= sys::INODE_LIMITS;
        }
        sys::write_limits(self.quota_target(), project, account)
    }

    fn next_record(&self, from: u32) -> io::Result<Option<(u32, QuotaRecord)>> {
        let next = existing_quota(sys::read_next_quota(self.quota_target(), from))?;
        Ok(next.map(|account| (account.project, account.into())))
    }

    fn lock_allocation(&self, deadline: Instant) -> Result<(), Error> {
        let lock = self.wait_for_lock(deadline, |lock| {
            Ok(rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive)?)
        })?;
        *self.lock.lock().unwrap_or_else(PoisonError::into_inner) = Some(lock);
        Ok(())
    }

    fn unlock_allocation(&self) {
        if let Some(lock) = self.lock.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // Closing it would not be enough: a child that another thread is starting keeps a copy of the
            // descriptor until it executes its program. It can't fail for a descriptor that was locked.
            let _ = rustix::fs::flock(&lock, FlockOperation::Unlock);
        }
    }

    fn lock_inode(&self, dir: BorrowedFd<'_>) -> Option<u64> {
        let identity = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
        let (dir, root) = (rustix::fs::fstat(dir).ok()?, rustix::fs::fstat(&self.root).ok()?);
        let stat = rustix::fs::statat(&self.root, LOCK_FILE, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        (identity(dir) == identity(root)).then_some(stat.st_ino)
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
    // The call writes all attributes of the inode, so the others are read first and written back.
    let mut attributes = sys::read_attributes(file)?;
    attributes.project = tag.project;
    attributes.flags =
        (attributes.flags & !sys::INHERIT_PROJECT) | if tag.inherit { sys::INHERIT_PROJECT } else { 0 };
    sys::write_attributes(file, &attributes)
}

/// The tag of a symbolic link, a socket, a FIFO or a device node, which can't be opened; `None` if the kernel does not
/// tell it, or the entry has just been removed.
pub(crate) fn read_special_tag(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<Option<ProjectTag>> {
    match sys::read_attributes_at(dir, name) {
        Ok(attributes) => Ok(Some(ProjectTag { project: attributes.project, inherit: false })),
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::ENOSYS | libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOENT)
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Changes the tag of such an entry.
pub(crate) fn write_special_tag(dir: BorrowedFd<'_>, name: &CStr, tag: ProjectTag) -> io::Result<()> {
    let mut attributes = sys::read_attributes_at(dir, name)?;
    attributes.project = tag.project;
    sys::write_attributes_at(dir, name, attributes)
}

/// Returns whether the attributes of such an entry can't be changed.
pub(crate) fn is_special_immutable(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<bool> {
    Ok(sys::read_attributes_at(dir, name)?.flags & u64::from(sys::IMMUTABLE) != 0)
}

/// Returns whether the attributes of the inode can't be changed.
pub(crate) fn is_immutable(file: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(sys::read_attributes(file)?.flags & sys::IMMUTABLE != 0)
}

/// Longer than every mark of this release.
const MAX_MARK_BYTES: usize = 256;

/// The attribute that marks the owner of a project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OwnerAttribute {
    /// The directory has none.
    Missing,
    /// The mark names the directory.
    Own(OwnerMark),
    /// The mark names another inode, or is damaged.
    Foreign,
}

pub(crate) fn read_owner_mark(dir: BorrowedFd<'_>) -> io::Result<Option<OwnerMark>> {
    Ok(match read_owner_attribute(dir)? {
        OwnerAttribute::Own(mark) => Some(mark),
        OwnerAttribute::Missing | OwnerAttribute::Foreign => None,
    })
}

pub(crate) fn read_owner_attribute(dir: BorrowedFd<'_>) -> io::Result<OwnerAttribute> {
    let mut value = [0; MAX_MARK_BYTES];
    let record = match rustix::fs::fgetxattr(dir, OWNER_ATTRIBUTE, &mut value) {
        Ok(length) => OwnerRecord::parse(&value[..length]),
        Err(Errno::NODATA) => return Ok(OwnerAttribute::Missing),
        Err(Errno::RANGE) => None,
        Err(error) => return Err(error.into()),
    };
    match record {
        // A copy of the directory with its attributes has the mark, and another inode.
        Some(record) if record.inode == inode_id(dir)? => Ok(OwnerAttribute::Own(record.mark)),
        _ => Ok(OwnerAttribute::Foreign),
    }
}

fn write_owner_mark(dir: BorrowedFd<'_>, mark: Option<OwnerMark>) -> io::Result<()> {
    let Some(mark) = mark else {
        return match rustix::fs::fremovexattr(dir, OWNER_ATTRIBUTE) {
            Ok(()) | Err(Errno::NODATA) => Ok(()),
            Err(error) => Err(error.into()),
        };
    };
    let record = OwnerRecord { mark, inode: inode_id(dir)? };
    Ok(rustix::fs::fsetxattr(dir, OWNER_ATTRIBUTE, record.to_string().as_bytes(), XattrFlags::empty())?)
}

fn inode_id(dir: BorrowedFd<'_>) -> io::Result<InodeId> {
    // File systems use the number of a removed inode again; the generation tells the two apart.
    Ok(InodeId { inode: rustix::fs::fstat(dir)?.st_ino, generation: sys::read_generation(dir)? })
}

#[cfg(test)]
#[path = "linux_test.rs"]
mod tests;

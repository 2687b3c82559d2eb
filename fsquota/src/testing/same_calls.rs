//! The system calls of one operation without the decisions between them, to measure what the library itself costs.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};

use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags, XattrFlags, flock, fstat, openat, statat};

use super::RawQuotaCalls;
use crate::kernel::{ProjectTag, QuotaKernel as _};
use crate::limits::KernelLimitChange;
use crate::linux::{LOCK_FILE, LinuxKernel, write_project_tag};
use crate::owner::OWNER_ATTRIBUTE;
use crate::{ProjectId, sys};

impl RawQuotaCalls<'_> {
    /// Makes the system calls of [`set_limits`](crate::QuotaSetter::set_limits) of an empty directory without limits,
    /// and of [`read_status`](crate::QuotaSetter::read_status) of it, with a free project that the caller knows.
    ///
    /// They are, in their order:
    /// - the directory and the lock: fstat; openat, fstat, FS_IOC_FSGETXATTR; flock; fstat, fstatat;
    /// - whether limits are enforced, and the directory is free and empty: Q_XGETQSTATV; FS_IOC_FSGETXATTR; fstat, fstat,
    ///   fstatat; fcntl, openat, getdents64 twice, close;
    /// - the number, its limits, the mark and the project: FS_IOC_FSGETXATTR; Q_XGETQUOTA, Q_GETINFO; Q_XSETQLIM; fstat,
    ///   FS_IOC_GETVERSION, fsetxattr; FS_IOC_FSGETXATTR, FS_IOC_FSSETXATTR; Q_XGETQUOTA;
    /// - the end of the lock, and the status: flock, close; Q_XGETQUOTA;
    /// - reading: fstat, FS_IOC_FSGETXATTR, Q_XGETQSTATV, Q_XGETQUOTA.
    ///
    /// # Errors
    /// That of the kernel.
    pub fn repeat_system_calls(
        self,
        dir: BorrowedFd<'_>,
        project: ProjectId,
        kib: u64,
        inodes: u64,
    ) -> io::Result<()> {
        let (kernel, project) = (&self.0.engine().kernel, project.get());
        fstat(dir)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let lock = openat(&kernel.root, LOCK_FILE, flags, Mode::RUSR | Mode::WUSR)?;
        fstat(&lock)?;
        sys::read_attributes(lock.as_fd())?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        fstat(&lock)?;
        statat(&kernel.root, LOCK_FILE, AtFlags::SYMLINK_NOFOLLOW)?;

        kernel.is_enforced()?;
        sys::read_attributes(dir)?;
        read_entries(kernel, dir)?;

        sys::read_attributes(dir)?;
        kernel.quota_record(project)?;
        kernel.set_limits(project, KernelLimitChange { kib: Some(kib), inodes: Some(inodes) })?;
        let (inode, generation) = (fstat(dir)?.st_ino, sys::read_generation(dir)?);
        let mark = format!("project={project} inode={inode} generation={generation}");
        rustix::fs::fsetxattr(dir, OWNER_ATTRIBUTE, mark.as_bytes(), XattrFlags::empty())?;
        write_project_tag(dir, ProjectTag { project, inherit: true })?;
        kernel.quota_record(project)?;

        flock(&lock, FlockOperation::Unlock)?;
        drop(lock);
        kernel.quota_record(project)?;

        fstat(dir)?;
        sys::read_attributes(dir)?;
        kernel.is_enforced()?;
        kernel.quota_record(project).map(drop)
    }
}

/// As the check that the directory is empty.
fn read_entries(kernel: &LinuxKernel, dir: BorrowedFd<'_>) -> io::Result<()> {
    fstat(dir)?;
    fstat(&kernel.root)?;
    statat(&kernel.root, LOCK_FILE, AtFlags::SYMLINK_NOFOLLOW)?;
    let mut entries = Dir::read_from(dir)?;
    while let Some(entry) = entries.read() {
        entry?;
    }
    Ok(())
}

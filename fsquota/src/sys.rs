//! All unsafe code of the crate: system calls that no library wraps, and the layouts they read and write.
#![allow(unsafe_code, reason = "quotactl and the attribute ioctls take pointers to structures")]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr;

use libc::{c_int, c_long, c_ulong};

/// Attributes of an inode. *Source:* linux/fs.h, `struct fsxattr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InodeAttributes {
    pub(crate) flags: u32,
    extent_size: u32,
    extents: u32,
    pub(crate) project: u32,
    cow_extent_size: u32,
    padding: [u8; 8],
}
const _: () = assert!(size_of::<InodeAttributes>() == 28);

/// New entries of the directory inherit its project. *Source:* linux/fs.h, `FS_XFLAG_PROJINHERIT`.
pub(crate) const INHERIT_PROJECT: u32 = 0x200;

/// Nothing of the inode may be changed. *Source:* linux/fs.h, `FS_XFLAG_IMMUTABLE`.
pub(crate) const IMMUTABLE: u32 = 0x8;

/// `_IOR` (2) and `_IOW` (1) of asm-generic/ioctl.h.
const fn ioctl_number(direction: c_ulong, number: c_ulong, size: usize) -> c_ulong {
    (direction << 30) | ((size as c_ulong) << 16) | ((b'X' as c_ulong) << 8) | number
}

/// *Source:* linux/fs.h, `FS_IOC_FSGETXATTR` and `FS_IOC_FSSETXATTR`.
const GET_ATTRIBUTES: c_ulong = ioctl_number(2, 31, size_of::<InodeAttributes>());
const SET_ATTRIBUTES: c_ulong = ioctl_number(1, 32, size_of::<InodeAttributes>());
const _: () = assert!(GET_ATTRIBUTES == 0x801C_581F && SET_ATTRIBUTES == 0x401C_5820);

/// *Source:* linux/fs.h, `FS_IOC_GETVERSION`.
const GET_GENERATION: c_ulong = (2 << 30) | ((size_of::<c_long>() as c_ulong) << 16) | 0x7601;

/// Reads the number that distinguishes an inode from an earlier one with the same inode number.
pub(crate) fn read_generation(file: BorrowedFd<'_>) -> io::Result<u32> {
    // The kernel writes an `int`, although the call's number encodes `long`.
    let mut generation: [c_int; 2] = [0; 2];
    // SAFETY: the kernel writes at most one `c_long`, and the descriptor is borrowed.
    syscall_result(unsafe { libc::ioctl(file.as_raw_fd(), GET_GENERATION as _, &mut generation) }.into())?;
    Ok(generation[0] as u32)
}

/// Which preallocated blocks to free. *Source:* xfsprogs, xfs/xfs_fs.h, `struct xfs_fs_eofblocks`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct EofBlocksFilter {
    version: u32,
    flags: u32,
    user: u32,
    group: u32,
    project: u32,
    padding: u32,
    least_size: u64,
    reserved: [u64; 12],
}
const _: () = assert!(size_of::<EofBlocksFilter>() == 128);

/// *Source:* xfsprogs, xfs/xfs_fs.h, `XFS_IOC_FREE_EOFBLOCKS`, `XFS_EOFBLOCKS_VERSION`, `XFS_EOF_FLAGS_PRID`.
const FREE_EOF_BLOCKS: c_ulong = ioctl_number(2, 58, size_of::<EofBlocksFilter>());
const _: () = assert!(FREE_EOF_BLOCKS == 0x8080_583A);
const EOF_BLOCKS_VERSION: u32 = 1;
const FILTER_BY_PROJECT: u32 = 1 << 3;

/// The quota record of a project. *Source:* linux/dqblk_xfs.h, `struct fs_disk_quota`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DiskQuotaBlock {
    version: i8,
    flags: u8,
    pub(crate) fields: u16,
    pub(crate) project: u32,
    /// In units of [`DISK_QUOTA_UNIT`], as `blocks`.
    pub(crate) hard_blocks: u64,
    pub(crate) soft_blocks: u64,
    pub(crate) hard_inodes: u64,
    pub(crate) soft_inodes: u64,
    pub(crate) blocks: u64,
    pub(crate) inodes: u64,
    /// Timers and warnings.
    times: [u32; 4],
    realtime_blocks: [u64; 3],
    realtime_times: [u32; 2],
    padding: [u8; 8],
}
const _: () = assert!(size_of::<DiskQuotaBlock>() == 112);

/// *Source:* linux/dqblk_xfs.h, "basic blocks".
pub(crate) const DISK_QUOTA_UNIT: u64 = 512;

/// *Source:* linux/dqblk_xfs.h, `FS_DQUOT_VERSION` and `FS_PROJ_QUOTA`.
const DISK_QUOTA_VERSION: i8 = 1;
const PROJECT_QUOTA: u8 = 1 << 1;

/// *Source:* linux/dqblk_xfs.h, `FS_DQ_ISOFT`, `FS_DQ_IHARD`, `FS_DQ_BSOFT`, `FS_DQ_BHARD`.
pub(crate) const INODE_LIMITS: u16 = 1 | 1 << 1;
pub(crate) const BLOCK_LIMITS: u16 = 1 << 2 | 1 << 3;

/// Settings of one quota type. *Source:* linux/quota.h, `struct if_dqinfo`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct QuotaInfo {
    block_time: u64,
    inode_time: u64,
    flags: u32,
    valid: u32,
}
const _: () = assert!(size_of::<QuotaInfo>() == 24);

/// *Source:* linux/dqblk_xfs.h, `struct fs_qfilestatv`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct QuotaFile {
    inode: u64,
    blocks: u64,
    extents: u32,
    padding: u32,
}
const _: () = assert!(size_of::<QuotaFile>() == 24);

/// Which quotas are counted and enforced. *Source:* linux/dqblk_xfs.h, `struct fs_quota_statv`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct QuotaState {
    version: i8,
    padding: u8,
    flags: u16,
    in_core: u32,
    files: [QuotaFile; 3],
    time_limits: [i32; 3],
    warnings: [u16; 3],
    reserved: [u16; 3],
    reserved_tail: [u64; 7],
}
const _: () = assert!(size_of::<QuotaState>() == 160);

/// *Source:* linux/dqblk_xfs.h, `FS_QSTATV_VERSION1` and `FS_QUOTA_PDQ_ENFD`.
const QUOTA_STATE_VERSION: i8 = 1;
const PROJECTS_ENFORCED: u16 = 1 << 5;

/// *Source:* linux/quota.h, `QCMD` and `PRJQUOTA`.
const fn project_command(number: u32) -> u32 {
    (number << 8) | 2
}

/// *Source:* linux/quota.h, `Q_GETINFO`.
const GET_INFO: u32 = project_command(0x80_0005);
/// These work on XFS and ext4. Reading with them needs no write access to the mount, unlike with `Q_GETQUOTA`.
/// *Source:* linux/dqblk_xfs.h, `Q_XGETQUOTA`, `Q_XSETQLIM`, `Q_XGETQSTATV`, `Q_XGETNEXTQUOTA`;
/// fs/quota/quota.c, `quotactl_cmd_write`.
const GET_QUOTA: u32 = project_command(0x5803);
const SET_LIMITS: u32 = project_command(0x5804);
const GET_STATE: u32 = project_command(0x5808);
const GET_NEXT_QUOTA: u32 = project_command(0x5809);
/// *Source:* linux/dqblk_xfs.h, `Q_XQUOTAOFF`.
#[cfg(feature = "testing")]
const QUOTA_OFF: u32 = project_command(0x5802);
const _: () = assert!(GET_INFO == 0x8000_0502 && GET_NEXT_QUOTA == 0x58_0902);

/// The same on every architecture, since Linux 5.14. *Source:* asm-generic/unistd.h.
const QUOTACTL_FD: c_long = 443;

/// A file system's persistent identifier of an inode. *Source:* linux/fcntl.h, `struct file_handle`;
/// linux/exportfs.h, `MAX_HANDLE_SZ`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct FileHandle {
    length: u32,
    kind: i32,
    bytes: [u8; 128],
}
const _: () = assert!(size_of::<FileHandle>() == 136);

/// Opens the directory again relative to the root of the file system, so that `..` is its parent even if
/// `dir` was opened through a mount of that directory alone. Needs CAP_DAC_READ_SEARCH.
pub(crate) fn reopen_by_handle(root: BorrowedFd<'_>, dir: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut handle = FileHandle { length: 128, kind: 0, bytes: [0; 128] };
    let mut mount: c_int = 0;
    // SAFETY: the kernel writes a handle of at most `length` bytes, and one `c_int`; the name ends with a
    // NUL.
    syscall_result(unsafe {
        let flags = libc::AT_EMPTY_PATH;
        libc::syscall(
            libc::SYS_name_to_handle_at,
            dir.as_raw_fd(),
            c"".as_ptr(),
            &mut handle,
            &mut mount,
            flags,
        )
    })?;
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: the kernel reads a handle of the length that it has written.
    let fd = unsafe { libc::syscall(libc::SYS_open_by_handle_at, root.as_raw_fd(), &mut handle, flags) };
    syscall_result(fd)?;
    // SAFETY: the descriptor has just been opened and has no other owner; it fits, because the kernel's are
    // `int`s.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) })
}

/// Reads the attributes of an open file.
pub(crate) fn read_attributes(file: BorrowedFd<'_>) -> io::Result<InodeAttributes> {
    let mut attributes = InodeAttributes::default();
    // SAFETY: the kernel writes one `InodeAttributes`, whose size is part of the number, and the descriptor
    // is borrowed.
    syscall_result(unsafe { libc::ioctl(file.as_raw_fd(), GET_ATTRIBUTES as _, &mut attributes) }.into())?;
    Ok(attributes)
}

/// Writes all attributes.
pub(crate) fn write_attributes(file: BorrowedFd<'_>, attributes: &InodeAttributes) -> io::Result<()> {
    // SAFETY: the kernel reads one `InodeAttributes`, whose size is part of the number, and the descriptor is
    // borrowed.
    syscall_result(
        unsafe { libc::ioctl(file.as_raw_fd(), SET_ATTRIBUTES as _, ptr::from_ref(attributes)) }.into(),
    )
}

/// Attributes of an inode that is not opened. *Source:* linux/fs.h, `struct file_attr`, of the size
/// `FILE_ATTR_SIZE_VER0`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FileAttributes {
    pub(crate) flags: u64,
    extent_size: u32,
    extents: u32,
    pub(crate) project: u32,
    cow_extent_size: u32,
}
const _: () = assert!(size_of::<FileAttributes>() == 24);

/// The same on every architecture, since Linux 6.17. *Source:* asm-generic/unistd.h.
const FILE_GETATTR: c_long = 468;
const FILE_SETATTR: c_long = 469;

/// Reads the attributes of an entry of a directory, not of what a symbolic link refers to. Fails with ENOSYS before
/// Linux 6.17.
pub(crate) fn read_attributes_at(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<FileAttributes> {
    let mut attributes = FileAttributes::default();
    let size = size_of::<FileAttributes>();
    // SAFETY: the kernel writes at most `size` bytes, the name ends with a NUL, and the descriptor is borrowed.
    syscall_result(unsafe {
        let flags = libc::AT_SYMLINK_NOFOLLOW;
        libc::syscall(FILE_GETATTR, dir.as_raw_fd(), name.as_ptr(), &mut attributes, size, flags)
    })?;
    Ok(attributes)
}

/// Writes all of them.
pub(crate) fn write_attributes_at(
    dir: BorrowedFd<'_>,
    name: &CStr,
    attributes: FileAttributes,
) -> io::Result<()> {
    let size = size_of::<FileAttributes>();
    // SAFETY: the kernel reads `size` bytes, the name ends with a NUL, and the descriptor is borrowed.
    syscall_result(unsafe {
        let flags = libc::AT_SYMLINK_NOFOLLOW;
        libc::syscall(FILE_SETATTR, dir.as_raw_fd(), name.as_ptr(), &attributes, size, flags)
    })
}

/// Returns when XFS has freed all inodes that were removed before. Frees no preallocated blocks itself,
/// because the filter matches no project.
pub(crate) fn flush_removed_inodes(root: BorrowedFd<'_>, unused_project: u32) -> io::Result<()> {
    let which = EofBlocksFilter {
        version: EOF_BLOCKS_VERSION,
        flags: FILTER_BY_PROJECT,
        project: unused_project,
        ..EofBlocksFilter::default()
    };
    // SAFETY: the kernel reads one `EofBlocksFilter`, whose size is part of the number, and the descriptor is
    // borrowed.
    syscall_result(
        unsafe { libc::ioctl(root.as_raw_fd(), FREE_EOF_BLOCKS as _, ptr::from_ref(&which)) }.into(),
    )
}

/// The name of a file system for quotactl.
#[derive(Clone, Copy, Debug)]
pub(crate) enum QuotaTarget<'a> {
    /// By a descriptor of any file on it.
    Descriptor(BorrowedFd<'a>),
    /// By its device, as before Linux 5.14.
    Device(&'a CStr),
}

/// Returns whether this kernel supports quotactl by descriptor. The check uses no file system, because one without
/// quotas also returns ENOSYS.
pub(crate) fn supports_quotactl_fd() -> bool {
    // SAFETY: descriptor -1 is invalid, so the kernel never reads the pointer.
    let answer = unsafe { libc::syscall(QUOTACTL_FD, -1, GET_INFO, 0, ptr::null_mut::<QuotaInfo>()) };
    syscall_result(answer).is_err_and(|error| error.raw_os_error() == Some(libc::EBADF))
}

/// Fails with ESRCH if projects are not counted, with ENOSYS if the kernel or file system can't count them.
pub(crate) fn probe_accounting(target: QuotaTarget<'_>) -> io::Result<()> {
    // SAFETY: `GET_INFO` writes one `QuotaInfo`.
    unsafe { quotactl(target, GET_INFO, 0, &mut QuotaInfo::default()) }
}

/// Returns whether the limits of projects are enforced.
pub(crate) fn is_enforcement_on(target: QuotaTarget<'_>) -> io::Result<bool> {
    let mut state = QuotaState { version: QUOTA_STATE_VERSION, ..QuotaState::default() };
    // SAFETY: `GET_STATE` writes one `QuotaState` of the version that is in it.
    unsafe { quotactl(target, GET_STATE, 0, &mut state) }?;
    Ok(state.flags & PROJECTS_ENFORCED != 0)
}

/// Turns the enforcement of the limits of projects off; they are still counted.
#[cfg(feature = "testing")]
pub(crate) fn turn_enforcement_off(target: QuotaTarget<'_>) -> io::Result<()> {
    let mut flags = u32::from(PROJECTS_ENFORCED);
    // SAFETY: `QUOTA_OFF` reads one `u32`.
    unsafe { quotactl(target, QUOTA_OFF, 0, &mut flags) }
}

/// Reads the quota record of a project.
pub(crate) fn read_quota(target: QuotaTarget<'_>, project: u32) -> io::Result<DiskQuotaBlock> {
    let mut account = DiskQuotaBlock::default();
    // SAFETY: `GET_QUOTA` writes one `DiskQuotaBlock`.
    unsafe { quotactl(target, GET_QUOTA, project, &mut account) }?;
    Ok(account)
}

/// Reads the first quota record whose project is not below `project`.
pub(crate) fn read_next_quota(target: QuotaTarget<'_>, project: u32) -> io::Result<DiskQuotaBlock> {
    let mut account = DiskQuotaBlock::default();
    // SAFETY: `GET_NEXT_QUOTA` writes one `DiskQuotaBlock`.
    unsafe { quotactl(target, GET_NEXT_QUOTA, project, &mut account) }?;
    Ok(account)
}

/// Writes the limits of the quota record that `fields` selects.
pub(crate) fn write_limits(target: QuotaTarget<'_>, project: u32, account: DiskQuotaBlock) -> io::Result<()> {
    let mut account =
        DiskQuotaBlock { version: DISK_QUOTA_VERSION, flags: PROJECT_QUOTA, project, ..account };
    // SAFETY: `SET_LIMITS` reads one `DiskQuotaBlock`.
    unsafe { quotactl(target, SET_LIMITS, project, &mut account) }
}

/// # Safety
/// `T` is what the command reads or writes.
unsafe fn quotactl<T>(target: QuotaTarget<'_>, command: u32, project: u32, about: &mut T) -> io::Result<()> {
    let about = ptr::from_mut(about);
    syscall_result(match target {
        QuotaTarget::Descriptor(fd) => {
            // SAFETY: the caller has chosen `T` by the command, and the descriptor is borrowed.
            unsafe { libc::syscall(QUOTACTL_FD, fd.as_raw_fd(), command, project, about) }
        }
        QuotaTarget::Device(path) => {
            // SAFETY: the caller has chosen `T` by the command, and the path ends with a NUL.
            unsafe { libc::syscall(libc::SYS_quotactl, command, path.as_ptr(), project, about) }
        }
    })
}

/// Locks, or unlocks, all of a file for this open file description, independently of `flock`. Fails with EAGAIN or
/// EACCES if another one holds it. *Source:* fcntl(2), "Open file description locks".
pub(crate) fn lock_description(file: BorrowedFd<'_>, is_locked: bool) -> io::Result<()> {
    let kind = if is_locked { libc::F_WRLCK } else { libc::F_UNLCK };
    let lock =
        libc::flock { l_type: kind as _, l_whence: libc::SEEK_SET as _, l_start: 0, l_len: 0, l_pid: 0 };
    // SAFETY: the kernel reads one `flock`, and the descriptor is borrowed.
    syscall_result(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, ptr::from_ref(&lock)) }.into())
}

/// Holds a lease on a file, so that opening it fails with EAGAIN. When that happens, the process gets a signal that it
/// ignores.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn hold_write_lease(file: BorrowedFd<'_>) -> io::Result<()> {
    /// *Source:* asm-generic/fcntl.h, `F_SETSIG`.
    const SET_SIGNAL: c_int = 10;
    // SAFETY: these commands take an `int`, and the descriptor is borrowed.
    syscall_result(unsafe { libc::fcntl(file.as_raw_fd(), SET_SIGNAL, libc::SIGURG) }.into())?;
    // SAFETY: as above.
    syscall_result(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) }.into())
}

/// Gives the lease on a file back.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn release_lease(file: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the command takes an `int`, and the descriptor is borrowed.
    syscall_result(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) }.into())
}

fn syscall_result(answer: c_long) -> io::Result<()> {
    if answer == c_long::from(-1 as c_int) { Err(io::Error::last_os_error()) } else { Ok(()) }
}

//! Every file system call of this crate. Each passes a failpoint first, so that tests can kill the process,
//! or make the call fail, at any of them.

use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    self, AtFlags, FallocateFlags, FlockOperation, Gid, IFlags, Mode, OFlags, RenameFlags, ResolveFlags,
    Stat, StatVfsMountFlags, Uid,
};
use rustix::io::{self, Result, retry_on_intr};

use crate::failpoints;
use crate::metadata::FileOwner;

pub(crate) mod clone;

/// The resolution of every relative path: beneath the descriptor, through no link of any kind.
const BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// Opens a path as the process sees it.
pub(crate) fn open(path: &Path, flags: OFlags) -> Result<OwnedFd> {
    failpoints::check_failpoint("open")?;
    retry_on_intr(|| fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()))
}

/// Opens a path beneath `dir` that contains no symbolic link.
pub(crate) fn open_beneath(dir: impl AsFd, path: &Path, flags: OFlags) -> Result<OwnedFd> {
    failpoints::check_failpoint("openat2")?;
    let (dir, mut flags) = (dir.as_fd(), flags | OFlags::CLOEXEC);
    // With O_PATH this opens a link itself. Otherwise it would hide that the path contains a link.
    if flags.contains(OFlags::PATH) {
        flags |= OFlags::NOFOLLOW;
    }
    retry_on_intr(|| fs::openat2(dir, path, flags, Mode::empty(), BENEATH))
}

/// Like [`open_beneath`], on the same mount only.
pub(crate) fn open_on_same_mount(dir: impl AsFd, name: &OsStr, flags: OFlags) -> Result<OwnedFd> {
    failpoints::check_failpoint("openat2")?;
    let (dir, flags) = (dir.as_fd(), flags | OFlags::CLOEXEC);
    retry_on_intr(|| fs::openat2(dir, name, flags, Mode::empty(), BENEATH | ResolveFlags::NO_XDEV))
}

/// Opens the current parent directory: the caller compares it with the expected one.
pub(crate) fn open_parent(dir: impl AsFd) -> Result<OwnedFd> {
    failpoints::check_failpoint("openat")?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // Not openat2(2): RESOLVE_BENEATH refuses a `..` that leaves the directory.
    retry_on_intr(|| fs::openat(dir.as_fd(), "..", flags, Mode::empty()))
}

/// Opens the current parent directory to inspect it, which needs no permission to read it.
pub(crate) fn open_parent_to_inspect(dir: impl AsFd) -> Result<OwnedFd> {
    failpoints::check_failpoint("openat")?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    retry_on_intr(|| fs::openat(dir.as_fd(), "..", flags, Mode::empty()))
}

/// Creates a file that only its owner can open yet. Fails if the name exists.
pub(crate) fn create_new_file(dir: impl AsFd, name: &OsStr) -> Result<OwnedFd> {
    failpoints::check_failpoint("creat")?;
    let flags = OFlags::RDWR | OFlags::EXCL | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    retry_on_intr(|| fs::openat2(dir.as_fd(), name, flags, Mode::RUSR | Mode::WUSR, BENEATH))
}

/// Opens a file to read and write, and creates it if it is missing; only its owner can open a new one yet.
pub(crate) fn open_or_create_file(dir: impl AsFd, name: &OsStr) -> Result<OwnedFd> {
    failpoints::check_failpoint("openat2")?;
    // A pipe does not block the caller, and a terminal does not become its controlling terminal.
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    retry_on_intr(|| fs::openat2(dir.as_fd(), name, flags, Mode::RUSR | Mode::WUSR, BENEATH))
}

pub(crate) fn make_dir(dir: impl AsFd, name: &OsStr, mode: Mode) -> Result<()> {
    failpoints::check_failpoint("mkdirat")?;
    fs::mkdirat(dir, name, mode)
}

pub(crate) fn set_mode(file: impl AsFd, mode: Mode) -> Result<()> {
    failpoints::check_failpoint("fchmod")?;
    fs::fchmod(file, mode)
}

/// Changes the owner of a file that may be open with `O_PATH` only.
pub(crate) fn set_owner(file: impl AsFd, owner: FileOwner) -> Result<()> {
    failpoints::check_failpoint("fchownat")?;
    let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
    fs::chownat(file, c"", Some(uid), Some(gid), AtFlags::EMPTY_PATH)
}

pub(crate) fn stat(file: impl AsFd) -> Result<Stat> {
    failpoints::check_failpoint("fstat")?;
    fs::fstat(file)
}

pub(crate) fn stat_at(dir: impl AsFd, name: &OsStr) -> Result<Stat> {
    failpoints::check_failpoint("fstatat")?;
    fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)
}

/// Opens a file that is open with `O_PATH` only.
pub(crate) fn reopen(file: impl AsFd, flags: OFlags) -> Result<OwnedFd> {
    // The name may be that of another file by now; the magic link leads to the inode that is open.
    open(&proc_path(file), flags)
}

/// The path of an open file in this process, and in a program that inherits it: no link and no rename changes where it
/// leads.
pub(crate) fn proc_path(file: impl AsFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()).into()
}

/// The path to which a symbolic link leads.
pub(crate) fn read_link(dir: impl AsFd, name: &OsStr) -> Result<CString> {
    failpoints::check_failpoint("readlinkat")?;
    fs::readlinkat(dir, name, Vec::new())
}

/// Changes the mode of a file that is open with `O_PATH` only.
pub(crate) fn set_mode_by_proc_path(file: impl AsFd, mode: Mode) -> Result<()> {
    failpoints::check_failpoint("chmod")?;
    // fchmod(2) fails with EBADF on an O_PATH descriptor; the magic link leads to the same inode.
    fs::chmod(proc_path(file), mode)
}

/// The entries of a directory. The kernel returns many at once; each passes a failpoint.
#[derive(Debug)]
pub(crate) struct DirListing(fs::Dir);

impl DirListing {
    /// Lists a directory by a descriptor whose offset nothing else uses.
    pub(crate) fn new(dir: OwnedFd) -> Result<Self> {
        fs::Dir::new(dir).map(Self)
    }

    /// Opens the directory again, so that two listings have separate offsets.
    pub(crate) fn reopen(dir: impl AsFd) -> Result<Self> {
        failpoints::check_failpoint("openat")?;
        fs::Dir::read_from(dir).map(Self)
    }
}

impl Iterator for DirListing {
    type Item = Result<fs::DirEntry>;

    fn next(&mut self) -> Option<Self::Item> {
        match failpoints::check_failpoint("getdents64") {
            Ok(()) => self.0.read(),
            Err(source) => Some(Err(source)),
        }
    }
}

pub(crate) fn read(file: impl AsFd, buffer: &mut [u8]) -> Result<usize> {
    failpoints::check_failpoint("read")?;
    let file = file.as_fd();
    retry_on_intr(|| io::read(file, &mut *buffer))
}

pub(crate) fn write_at(file: impl AsFd, bytes: &[u8], offset: u64) -> Result<()> {
    let (file, mut written) = (file.as_fd(), 0);
    while written < bytes.len() {
        let length = failpoints::check_write_failpoint(bytes.len() - written)?;
        let part = &bytes[written..written + length];
        match retry_on_intr(|| io::pwrite(file, part, offset + written as u64))? {
            // Without progress and without an error, the loop would never end.
            0 => return Err(io::Errno::IO),
            n => written += n,
        }
    }
    Ok(())
}

/// Extends the file to this size, with blocks. A file system that can't reserve blocks (NFS) does nothing.
pub(crate) fn allocate(file: impl AsFd, size: u64) -> Result<()> {
    failpoints::check_failpoint("fallocate")?;
    match retry_on_intr(|| fs::fallocate(file.as_fd(), FallocateFlags::empty(), 0, size)) {
        Err(io::Errno::OPNOTSUPP) => Ok(()),
        allocated => allocated,
    }
}

pub(crate) fn sync(file: impl AsFd) -> Result<()> {
    failpoints::check_failpoint("fsync")?;
    retry_on_intr(|| fs::fsync(file.as_fd()))
}

/// Returns whether the file is on a FAT file system.
///
/// *Source:* Linux `include/uapi/linux/magic.h`, `MSDOS_SUPER_MAGIC`.
pub(crate) fn is_on_fat(file: impl AsFd) -> Result<bool> {
    const MSDOS_SUPER_MAGIC: u64 = 0x4d44;
    failpoints::check_failpoint("fstatfs")?;
    Ok(retry_on_intr(|| fs::fstatfs(file.as_fd()))?.f_type as u64 == MSDOS_SUPER_MAGIC)
}

/// Returns whether the mount by which the file was opened is read-only.
pub(crate) fn is_mounted_read_only(file: impl AsFd) -> Result<bool> {
    failpoints::check_failpoint("fstatvfs")?;
    let flags = retry_on_intr(|| fs::fstatvfs(file.as_fd()))?.f_flag;
    Ok(flags.contains(StatVfsMountFlags::RDONLY))
}

/// Acquires the lock, and waits for it.
pub(crate) fn lock(file: impl AsFd) -> Result<()> {
    failpoints::check_failpoint("flock")?;
    retry_on_intr(|| fs::flock(file.as_fd(), FlockOperation::LockExclusive))
}

/// Releases the lock, if it is held. On failure, closing the file releases it.
pub(crate) fn unlock(file: impl AsFd) {
    let _ = fs::flock(file.as_fd(), FlockOperation::Unlock);
}

/// Acquires the lock if it is free; returns whether it was.
pub(crate) fn try_lock(file: impl AsFd) -> Result<bool> {
    failpoints::check_failpoint("flock")?;
    match retry_on_intr(|| fs::flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive)) {
        Ok(()) => Ok(true),
        Err(io::Errno::WOULDBLOCK) => Ok(false),
        Err(source) => Err(source),
    }
}

/// A directory and the name of an entry in it, which need not exist.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EntryAt<'a> {
    pub(crate) dir: BorrowedFd<'a>,
    pub(crate) name: &'a OsStr,
}

pub(crate) fn rename(from: EntryAt<'_>, to: EntryAt<'_>, flags: RenameFlags) -> Result<()> {
    failpoints::check_failpoint("renameat2")?;
    // The call without flags where it suffices: not every file system supports the other one.
    if flags.is_empty() {
        return fs::renameat(from.dir, from.name, to.dir, to.name);
    }
    fs::renameat_with(from.dir, from.name, to.dir, to.name, flags)
}

pub(crate) fn unlink(dir: impl AsFd, name: &OsStr) -> Result<()> {
    failpoints::check_failpoint("unlinkat")?;
    fs::unlinkat(dir, name, AtFlags::empty())
}

pub(crate) fn remove_dir(dir: impl AsFd, name: &OsStr) -> Result<()> {
    failpoints::check_failpoint("unlinkat")?;
    fs::unlinkat(dir, name, AtFlags::REMOVEDIR)
}

pub(crate) fn inode_flags(file: impl AsFd) -> Result<IFlags> {
    failpoints::check_failpoint("FS_IOC_GETFLAGS")?;
    fs::ioctl_getflags(file)
}

pub(crate) fn set_inode_flags(file: impl AsFd, flags: IFlags) -> Result<()> {
    failpoints::check_failpoint("FS_IOC_SETFLAGS")?;
    fs::ioctl_setflags(file, flags)
}

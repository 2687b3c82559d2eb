//! Every system call on files that this crate makes. Each asks the failpoints first, so that tests can kill, or fail,
//! at any of them.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{self, AtFlags, FlockOperation, IFlags, Mode, OFlags, RenameFlags, ResolveFlags, Stat};
use rustix::io::{self, Result, retry_on_intr};

use crate::faults;

/// How every relative path is resolved: below the descriptor, through no link of any kind.
const BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// Opens the path as the process sees it.
pub(crate) fn open(path: &Path, flags: OFlags) -> Result<OwnedFd> {
    faults::before("open")?;
    retry_on_intr(|| fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()))
}

/// Opens what lies beneath `dir`, where no symbolic link is on the way.
pub(crate) fn open_beneath(dir: impl AsFd, path: &Path, flags: OFlags) -> Result<OwnedFd> {
    faults::before("openat2")?;
    let (dir, mut flags) = (dir.as_fd(), flags | OFlags::CLOEXEC);
    // With a path alone this opens a link itself. Else it would hide that a link is what is in the way.
    if flags.contains(OFlags::PATH) {
        flags |= OFlags::NOFOLLOW;
    }
    retry_on_intr(|| fs::openat2(dir, path, flags, Mode::empty(), BENEATH))
}

/// As [`open_beneath`], and on the same mount.
pub(crate) fn open_same_mount(dir: impl AsFd, name: &OsStr, flags: OFlags) -> Result<OwnedFd> {
    faults::before("openat2")?;
    let (dir, flags) = (dir.as_fd(), flags | OFlags::CLOEXEC);
    retry_on_intr(|| fs::openat2(dir, name, flags, Mode::empty(), BENEATH | ResolveFlags::NO_XDEV))
}

/// The directory above, as the kernel knows it now: the caller compares it with the one that it expects.
pub(crate) fn open_above(dir: impl AsFd) -> Result<OwnedFd> {
    faults::before("openat")?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    retry_on_intr(|| fs::openat(dir.as_fd(), "..", flags, Mode::empty()))
}

/// Creates a file of the caller's own, which nobody else may open yet. Fails where the name is taken.
pub(crate) fn create_new(dir: impl AsFd, name: &OsStr) -> Result<OwnedFd> {
    faults::before("creat")?;
    let flags = OFlags::RDWR | OFlags::EXCL | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    retry_on_intr(|| fs::openat2(dir.as_fd(), name, flags, Mode::RUSR | Mode::WUSR, BENEATH))
}

pub(crate) fn make_dir(dir: impl AsFd, name: &OsStr, mode: Mode) -> Result<()> {
    faults::before("mkdirat")?;
    fs::mkdirat(dir, name, mode)
}

pub(crate) fn set_mode(file: impl AsFd, mode: Mode) -> Result<()> {
    faults::before("fchmod")?;
    fs::fchmod(file, mode)
}

pub(crate) fn stat(file: impl AsFd) -> Result<Stat> {
    faults::before("fstat")?;
    fs::fstat(file)
}

pub(crate) fn stat_at(dir: impl AsFd, name: &OsStr) -> Result<Stat> {
    faults::before("fstatat")?;
    fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)
}

/// Gives a file that is held open as nothing but a path another mode: for directories that shut out their owner.
pub(crate) fn set_mode_of_path(file: impl AsFd, mode: Mode) -> Result<()> {
    faults::before("chmod")?;
    fs::chmod(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()), mode)
}

/// The entries of a directory. The kernel gives many at once; the failpoints are asked before each.
#[derive(Debug)]
pub(crate) struct Listing(fs::Dir);

impl Listing {
    /// Of a directory that was opened for nothing else.
    pub(crate) fn new(dir: OwnedFd) -> Result<Self> {
        fs::Dir::new(dir).map(Self)
    }

    /// Opens the directory anew, so that two listings don't move each other.
    pub(crate) fn of(dir: impl AsFd) -> Result<Self> {
        faults::before("openat")?;
        fs::Dir::read_from(dir).map(Self)
    }

    pub(crate) fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.0.fd()
    }

    pub(crate) fn rewind(&mut self) {
        self.0.rewind();
    }
}

impl Iterator for Listing {
    type Item = Result<fs::DirEntry>;

    fn next(&mut self) -> Option<Self::Item> {
        match faults::before("getdents64") {
            Ok(()) => self.0.read(),
            Err(source) => Some(Err(source)),
        }
    }
}

pub(crate) fn read(file: impl AsFd, buffer: &mut [u8]) -> Result<usize> {
    faults::before("read")?;
    let file = file.as_fd();
    retry_on_intr(|| io::read(file, &mut *buffer))
}

pub(crate) fn write_at(file: impl AsFd, bytes: &[u8], offset: u64) -> Result<()> {
    let (file, mut written) = (file.as_fd(), 0);
    while written < bytes.len() {
        let length = faults::before_write(bytes.len() - written)?;
        let part = &bytes[written..written + length];
        match retry_on_intr(|| io::pwrite(file, part, offset + written as u64))? {
            0 => return Err(io::Errno::IO),
            n => written += n,
        }
    }
    Ok(())
}

pub(crate) fn sync(file: impl AsFd) -> Result<()> {
    faults::before("fsync")?;
    retry_on_intr(|| fs::fsync(file.as_fd()))
}

/// Waits for the lock.
pub(crate) fn lock(file: impl AsFd) -> Result<()> {
    faults::before("flock")?;
    retry_on_intr(|| fs::flock(file.as_fd(), FlockOperation::LockExclusive))
}

/// Lets go of the lock, if it is held; closing the file does the rest.
pub(crate) fn unlock(file: impl AsFd) {
    let _ = fs::flock(file.as_fd(), FlockOperation::Unlock);
}

/// Whether the lock was free and is ours now.
pub(crate) fn try_lock(file: impl AsFd) -> Result<bool> {
    faults::before("flock")?;
    match retry_on_intr(|| fs::flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive)) {
        Ok(()) => Ok(true),
        Err(io::Errno::WOULDBLOCK) => Ok(false),
        Err(source) => Err(source),
    }
}

/// Where something is, or is to be: a directory, and a name in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Location<'a> {
    pub(crate) dir: BorrowedFd<'a>,
    pub(crate) name: &'a OsStr,
}

pub(crate) fn rename(from: Location<'_>, to: Location<'_>, flags: RenameFlags) -> Result<()> {
    faults::before("renameat2")?;
    // The plain call where it does: not every file system knows the one with flags.
    if flags.is_empty() {
        return fs::renameat(from.dir, from.name, to.dir, to.name);
    }
    fs::renameat_with(from.dir, from.name, to.dir, to.name, flags)
}

pub(crate) fn unlink(dir: impl AsFd, name: &OsStr) -> Result<()> {
    faults::before("unlinkat")?;
    fs::unlinkat(dir, name, AtFlags::empty())
}

pub(crate) fn remove_dir(dir: impl AsFd, name: &OsStr) -> Result<()> {
    faults::before("unlinkat")?;
    fs::unlinkat(dir, name, AtFlags::REMOVEDIR)
}

pub(crate) fn inode_flags(file: impl AsFd) -> Result<IFlags> {
    faults::before("FS_IOC_GETFLAGS")?;
    fs::ioctl_getflags(file)
}

pub(crate) fn set_inode_flags(file: impl AsFd, flags: IFlags) -> Result<()> {
    faults::before("FS_IOC_SETFLAGS")?;
    fs::ioctl_setflags(file, flags)
}

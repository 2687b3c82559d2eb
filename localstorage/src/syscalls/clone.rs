//! The calls that only clones of trees make.

use std::ffi::{CStr, OsStr};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    self, AtFlags, Dev, FileType, Gid, Mode, OFlags, SeekFrom, Stat, StatxFlags, Timespec, Timestamps, Uid,
    XattrFlags,
};
use rustix::io::{self, Errno, Result, retry_on_intr};

use super::EntryAt;
use crate::failpoints;
use crate::metadata::FileOwner;

/// Makes `to` share all blocks of `from`.
pub(crate) fn share_blocks(from: impl AsFd, to: impl AsFd) -> Result<()> {
    failpoints::check_failpoint("FICLONE")?;
    let (from, to) = (from.as_fd(), to.as_fd());
    retry_on_intr(|| fs::ioctl_ficlone(to, from))
}

/// Creates a file without a name, which is gone when it is closed.
pub(crate) fn create_unnamed_file(dir: impl AsFd) -> Result<OwnedFd> {
    failpoints::check_failpoint("openat")?;
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    retry_on_intr(|| fs::openat(dir.as_fd(), c".", flags, Mode::RUSR | Mode::WUSR))
}

/// The inode number and the time of birth in nanoseconds, which no later file has; without a time of birth, the
/// inode number alone.
pub(crate) fn inode_and_birth(file: impl AsFd) -> Result<(u64, i128)> {
    failpoints::check_failpoint("statx")?;
    let stat = fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::INO | StatxFlags::BTIME)?;
    let birth = i128::from(stat.stx_btime.tv_sec) * 1_000_000_000 + i128::from(stat.stx_btime.tv_nsec);
    let is_kept = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
    Ok((stat.stx_ino, if is_kept { birth } else { 0 }))
}

/// Gives a file that is open below `top` another name.
pub(crate) fn link(top: impl AsFd, path: &Path, to: EntryAt<'_>) -> Result<()> {
    failpoints::check_failpoint("linkat")?;
    fs::linkat(top, path, to.dir, to.name, AtFlags::empty())
}

pub(crate) fn create_symlink(target: &CStr, at: EntryAt<'_>) -> Result<()> {
    failpoints::check_failpoint("symlinkat")?;
    fs::symlinkat(target, at.dir, at.name)
}

/// Creates a FIFO, a socket or a whiteout. The umask applies to its mode.
pub(crate) fn create_node(at: EntryAt<'_>, kind: FileType, device: Dev) -> Result<()> {
    failpoints::check_failpoint("mknodat")?;
    fs::mknodat(at.dir, at.name, kind, Mode::RUSR | Mode::WUSR, device)
}

/// Changes the owner of an entry; of a link itself.
pub(crate) fn set_owner_at(at: EntryAt<'_>, owner: FileOwner) -> Result<()> {
    failpoints::check_failpoint("fchownat")?;
    let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
    fs::chownat(at.dir, at.name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
}

/// The times of the last access and of the last change of the content.
pub(crate) fn times_of(stat: &Stat) -> Timestamps {
    let time = |seconds, nanoseconds: u64| Timespec {
        tv_sec: seconds,
        tv_nsec: i64::try_from(nanoseconds).unwrap_or_default(),
    };
    Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
    }
}

pub(crate) fn set_times(file: impl AsFd, times: &Timestamps) -> Result<()> {
    failpoints::check_failpoint("utimensat")?;
    fs::futimens(file, times)
}

/// Changes the times of an entry; of a link itself.
pub(crate) fn set_times_at(at: EntryAt<'_>, times: &Timestamps) -> Result<()> {
    failpoints::check_failpoint("utimensat")?;
    fs::utimensat(at.dir, at.name, times, AtFlags::SYMLINK_NOFOLLOW)
}

/// Reads the names of the extended attributes, each with a NUL byte, and returns their length.
pub(crate) fn list_attributes(file: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<usize> {
    failpoints::check_failpoint("flistxattr")?;
    fs::flistxattr(file, buffer)
}

/// Reads an extended attribute, and returns its length.
pub(crate) fn read_attribute(file: BorrowedFd<'_>, name: &CStr, buffer: &mut [u8]) -> Result<usize> {
    failpoints::check_failpoint("fgetxattr")?;
    fs::fgetxattr(file, name, buffer)
}

pub(crate) fn write_attribute(file: BorrowedFd<'_>, name: &CStr, value: &[u8]) -> Result<()> {
    failpoints::check_failpoint("fsetxattr")?;
    fs::fsetxattr(file, name, value, XattrFlags::empty())
}

/// The next range of data in a file from this offset on; none if only a hole follows. File systems without holes report one
/// range. *Source:* lseek(2), `SEEK_DATA`.
pub(crate) fn next_data(file: impl AsFd, at: u64) -> Result<Option<Range<u64>>> {
    failpoints::check_failpoint("lseek")?;
    match fs::seek(&file, SeekFrom::Data(at)) {
        Err(Errno::NXIO) => Ok(None),
        start => {
            let start = start?;
            Ok(Some(start..fs::seek(&file, SeekFrom::Hole(start))?))
        }
    }
}

pub(crate) fn read_at(file: impl AsFd, buffer: &mut [u8], at: u64) -> Result<usize> {
    failpoints::check_failpoint("pread64")?;
    retry_on_intr(|| io::pread(file.as_fd(), &mut *buffer, at))
}

/// Sets the size of a file, without blocks.
pub(crate) fn set_size(file: impl AsFd, size: u64) -> Result<()> {
    failpoints::check_failpoint("ftruncate")?;
    retry_on_intr(|| fs::ftruncate(file.as_fd(), size))
}

pub(crate) fn entry_at<'a>(dir: BorrowedFd<'a>, name: &'a OsStr) -> EntryAt<'a> {
    EntryAt { dir, name }
}

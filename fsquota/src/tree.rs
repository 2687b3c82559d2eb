//! Changing the project of everything in a directory.

use std::ffi::{CStr, OsStr};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::Error;
use crate::kernel::Tag;
use crate::linux;

/// What became of what is in a directory; the directory itself is not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Changed {
    /// Directories and files whose project was changed.
    pub changed: u64,
    /// What already was as it should be.
    pub unchanged: u64,
    /// Symbolic links, sockets, FIFOs and device nodes: they can't be opened to be changed.
    pub special: u64,
    /// What has another project, and directories on which another file system is mounted.
    pub foreign: u64,
}

/// Gives what has the project `from` the project `to`, in all of `dir` but `dir` itself.
pub(crate) fn change(dir: BorrowedFd<'_>, from: u32, to: u32) -> Result<Changed, Error> {
    let here = PathBuf::from(".");
    let stat = rustix::fs::fstat(dir).map_err(|error| failed(&here, error.into()))?;
    let mut walk = Walk { device: stat.st_dev, from, to, changed: Changed::default() };
    walk.visit(dir, &here)?;
    Ok(walk.changed)
}

struct Walk {
    device: u64,
    from: u32,
    to: u32,
    changed: Changed,
}

fn failed(path: &Path, source: io::Error) -> Error {
    Error::Tree { path: path.strip_prefix(".").unwrap_or(path).into(), source }
}

impl Walk {
    fn visit(&mut self, dir: BorrowedFd<'_>, path: &Path) -> Result<(), Error> {
        let mut entries = Dir::read_from(dir).map_err(|error| failed(path, error.into()))?;
        while let Some(entry) = entries.read() {
            let entry = entry.map_err(|error| failed(path, error.into()))?;
            let name = entry.file_name();
            if !matches!(name.to_bytes(), b"." | b"..") {
                self.entry(dir, name, &path.join(OsStr::from_bytes(name.to_bytes())))?;
            }
        }
        Ok(())
    }

    fn entry(&mut self, dir: BorrowedFd<'_>, name: &CStr, path: &Path) -> Result<(), Error> {
        let opened = self.open(dir, name).map_err(|error| failed(path, error.into()))?;
        let Some((file, stat)) = opened else { return Ok(()) };
        let is_directory = is(&stat, FileType::Directory);
        let tag = linux::tag(file.as_fd()).map_err(|error| failed(path, error))?;
        let wanted = Tag { project: self.to, inherit: is_directory && self.to != 0 };
        if tag == wanted {
            self.changed.unchanged += 1;
        } else if tag.project == self.from || tag.project == self.to {
            // A directory before what is in it: what is made there meanwhile is as it should be.
            linux::set_tag(file.as_fd(), wanted).map_err(|error| failed(path, error))?;
            self.changed.changed += 1;
        } else {
            self.changed.foreign += 1;
            return Ok(());
        }
        if is_directory { self.visit(file.as_fd(), path) } else { Ok(()) }
    }

    /// `None` for what is passed over, or has just been removed.
    fn open(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> Result<Option<(OwnedFd, Stat)>, Errno> {
        let stat = match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(None),
            stat => stat?,
        };
        if !is(&stat, FileType::Directory) && !is(&stat, FileType::RegularFile) {
            self.changed.special += 1;
            return Ok(None);
        }
        // Neither a link nor a FIFO put in its place meanwhile leads anywhere, or holds us up.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(dir, name, flags, Mode::empty()) {
            Err(Errno::NOENT | Errno::LOOP) => return Ok(None),
            file => file?,
        };
        let stat = rustix::fs::fstat(&file)?;
        if stat.st_dev != self.device {
            self.changed.foreign += 1;
            return Ok(None);
        }
        Ok(Some((file, stat)))
    }
}

fn is(stat: &Stat, kind: FileType) -> bool {
    FileType::from_raw_mode(stat.st_mode) == kind
}

//! Changing the project of everything in a directory.

use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
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
///
/// Two descriptors and no stack, however deep it is: of the directories above, it keeps what is still to be entered, and
/// goes back to them by `..`, comparing what that leads to with what was there on the way down.
pub(crate) fn change(dir: BorrowedFd<'_>, from: u32, to: u32) -> Result<Changed, Error> {
    let mut walk = Walk { from, to, changed: Changed::default(), levels: Vec::new() };
    match walk.run(dir) {
        Ok(()) => Ok(walk.changed),
        Err((name, source)) => {
            let names = walk.levels.iter().skip(1).map(|level| &level.name).chain(&name);
            let path = names.map(|name| OsStr::from_bytes(name.to_bytes())).collect();
            Err(Error::Tree { path, source })
        }
    }
}

/// A directory on the way down.
struct Level {
    /// In the one above.
    name: CString,
    device: u64,
    inode: u64,
    /// The directories in it that are still to be entered.
    below: Vec<CString>,
}

struct Walk {
    from: u32,
    to: u32,
    changed: Changed,
    levels: Vec<Level>,
}

/// What failed, and on what in the lowest directory, if not on itself.
type Failure = (Option<CString>, io::Error);

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl Walk {
    fn run(&mut self, dir: BorrowedFd<'_>) -> Result<(), Failure> {
        let here = |error: Errno| (None, error.into());
        let mut at = rustix::fs::openat(dir, ".", DIRECTORY, Mode::empty()).map_err(here)?;
        self.enter(CString::default(), &at)?;
        while let Some(level) = self.levels.last_mut() {
            if let Some(name) = level.below.pop() {
                let opened = self.open_below(at.as_fd(), &name);
                if let Some(below) = opened.map_err(|error| (Some(name.clone()), error))? {
                    at = below;
                    self.enter(name, &at)?;
                }
            } else {
                self.levels.pop();
                at = self.leave(at).map_err(here)?;
            }
        }
        Ok(())
    }

    /// Changes the files of a directory that has been changed itself, and sees which directories are in it.
    fn enter(&mut self, name: CString, at: &OwnedFd) -> Result<(), Failure> {
        let here = |error: Errno| (None, error.into());
        let stat = rustix::fs::fstat(at).map_err(here)?;
        self.levels.push(Level { name, device: stat.st_dev, inode: stat.st_ino, below: Vec::new() });
        let mut entries = Dir::read_from(at).map_err(here)?;
        let mut below = Vec::new();
        while let Some(entry) = entries.read() {
            let entry = entry.map_err(here)?;
            let name = entry.file_name();
            if !matches!(name.to_bytes(), b"." | b"..") {
                let is_directory = self.file(at.as_fd(), name);
                if is_directory.map_err(|error| (Some(name.to_owned()), error))? {
                    below.push(name.to_owned());
                }
            }
        }
        if let Some(level) = self.levels.last_mut() {
            level.below = below;
        }
        Ok(())
    }

    /// The directory above the one that was left, if there is one to go back to.
    fn leave(&self, from: OwnedFd) -> Result<OwnedFd, Errno> {
        let Some(level) = self.levels.last() else { return Ok(from) };
        let above = rustix::fs::openat(&from, "..", DIRECTORY, Mode::empty())?;
        let stat = rustix::fs::fstat(&above)?;
        // Moved meanwhile: whoever repeats it goes on.
        if (stat.st_dev, stat.st_ino) == (level.device, level.inode) { Ok(above) } else { Err(Errno::AGAIN) }
    }

    /// Changes what is no directory; whether it is one.
    fn file(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> io::Result<bool> {
        let stat = match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(false),
            stat => stat?,
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => return Ok(true),
            FileType::RegularFile => {}
            _ => {
                self.changed.special += 1;
                return Ok(false);
            }
        }
        // Neither a link nor a FIFO put in its place meanwhile leads anywhere, or holds us up.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        if let Some(file) = self.open(dir, name, flags)? {
            self.change(file.as_fd(), false)?;
        }
        Ok(false)
    }

    /// Changes a directory; `None` where it is passed over.
    fn open_below(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> io::Result<Option<OwnedFd>> {
        let Some(below) = self.open(dir, name, DIRECTORY)? else { return Ok(None) };
        // Before what is in it: what is made there meanwhile is as it should be.
        Ok(self.change(below.as_fd(), true)?.then_some(below))
    }

    /// `None` for what has just been removed, or is on another file system.
    fn open(&mut self, dir: BorrowedFd<'_>, name: &CStr, flags: OFlags) -> io::Result<Option<OwnedFd>> {
        let file = match rustix::fs::openat(dir, name, flags, Mode::empty()) {
            Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => return Ok(None),
            file => file?,
        };
        let device = rustix::fs::fstat(&file)?.st_dev;
        if self.levels.first().is_some_and(|top| top.device != device) {
            self.changed.foreign += 1;
            return Ok(None);
        }
        Ok(Some(file))
    }

    /// Whether it belongs to the project now.
    fn change(&mut self, file: BorrowedFd<'_>, is_directory: bool) -> io::Result<bool> {
        let tag = linux::tag(file)?;
        let wanted = Tag { project: self.to, inherit: is_directory && self.to != 0 };
        if tag == wanted {
            self.changed.unchanged += 1;
        } else if tag.project == self.from || tag.project == self.to {
            linux::set_tag(file, wanted)?;
            self.changed.changed += 1;
        } else {
            self.changed.foreign += 1;
            return Ok(false);
        }
        Ok(true)
    }
}

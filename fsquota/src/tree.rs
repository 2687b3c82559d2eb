//! Changes the project of everything in a directory.

use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::Error;
use crate::kernel::ProjectTag;
use crate::linux;

/// How many entries of a tree were changed or skipped; the directory itself is not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct TreeSummary {
    /// Directories and files whose project was changed.
    pub changed: u64,
    /// Entries that already had the right project.
    pub unchanged: u64,
    /// Symbolic links, sockets, FIFOs and device nodes, which can't be opened to change them.
    pub special: u64,
    /// Entries with another project, and directories on which another file system is mounted.
    pub foreign: u64,
}

/// Changes the project of every entry below `dir` from `from` to `to`, but not of `dir` itself.
///
/// It needs two descriptors and no recursion at any depth: for each directory above, it keeps the names still
/// to be entered. It returns by `..`, and checks that this is the directory it came from.
pub(crate) fn retag_tree(dir: BorrowedFd<'_>, from: u32, to: u32) -> Result<TreeSummary, Error> {
    let mut walk = TreeWalk { from, to, summary: TreeSummary::default(), levels: Vec::new() };
    match walk.run(dir) {
        Ok(()) => Ok(walk.summary),
        Err((name, source)) => {
            let names = walk.levels.iter().skip(1).map(|level| &level.name).chain(&name);
            let path = names.map(|name| OsStr::from_bytes(name.to_bytes())).collect();
            Err(Error::ChangeTree { path, source })
        }
    }
}

/// A directory on the way down.
struct DirectoryLevel {
    /// Its name in the directory above.
    name: CString,
    device: u64,
    inode: u64,
    /// Its subdirectories that are still to be entered.
    pending: Vec<CString>,
}

struct TreeWalk {
    from: u32,
    to: u32,
    summary: TreeSummary,
    levels: Vec<DirectoryLevel>,
}

/// The entry of the deepest directory that failed, `None` for that directory itself, and the error.
type WalkFailure = (Option<CString>, io::Error);

const OPEN_DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl TreeWalk {
    fn run(&mut self, dir: BorrowedFd<'_>) -> Result<(), WalkFailure> {
        let here = |error: Errno| (None, error.into());
        let mut at = rustix::fs::openat(dir, ".", OPEN_DIRECTORY, Mode::empty()).map_err(here)?;
        self.enter_directory(CString::default(), &at)?;
        while let Some(level) = self.levels.last_mut() {
            if let Some(name) = level.pending.pop() {
                let opened = self.open_subdirectory(at.as_fd(), &name);
                if let Some(below) = opened.map_err(|error| (Some(name.clone()), error))? {
                    at = below;
                    self.enter_directory(name, &at)?;
                }
            } else {
                self.levels.pop();
                at = self.leave_directory(at).map_err(here)?;
            }
        }
        Ok(())
    }

    /// Changes the files of a directory, which itself is already changed, and collects its subdirectories.
    fn enter_directory(&mut self, name: CString, at: &OwnedFd) -> Result<(), WalkFailure> {
        let here = |error: Errno| (None, error.into());
        let stat = rustix::fs::fstat(at).map_err(here)?;
        self.levels.push(DirectoryLevel {
            name,
            device: stat.st_dev,
            inode: stat.st_ino,
            pending: Vec::new(),
        });
        let mut entries = Dir::read_from(at).map_err(here)?;
        let mut below = Vec::new();
        while let Some(entry) = entries.read() {
            let entry = entry.map_err(here)?;
            let name = entry.file_name();
            if !matches!(name.to_bytes(), b"." | b"..") {
                let is_directory = self.visit_entry(at.as_fd(), name);
                if is_directory.map_err(|error| (Some(name.to_owned()), error))? {
                    below.push(name.to_owned());
                }
            }
        }
        if let Some(level) = self.levels.last_mut() {
            level.pending = below;
        }
        Ok(())
    }

    /// Returns to the directory above `from`, or `from` itself at the top.
    fn leave_directory(&self, from: OwnedFd) -> Result<OwnedFd, Errno> {
        let Some(level) = self.levels.last() else { return Ok(from) };
        let above = rustix::fs::openat(&from, "..", OPEN_DIRECTORY, Mode::empty())?;
        let stat = rustix::fs::fstat(&above)?;
        // The directory was moved meanwhile: repeating the call resumes.
        if (stat.st_dev, stat.st_ino) == (level.device, level.inode) { Ok(above) } else { Err(Errno::AGAIN) }
    }

    /// Changes an entry that is not a directory; returns whether it is a directory.
    fn visit_entry(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> io::Result<bool> {
        let stat = match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(false),
            stat => stat?,
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => return Ok(true),
            FileType::RegularFile => {}
            _ => {
                self.summary.special += 1;
                return Ok(false);
            }
        }
        // If a link or a FIFO has replaced the file meanwhile, the link is not followed and the FIFO does not
        // block.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        if let Some(file) = self.open_entry(dir, name, flags)? {
            self.retag(file.as_fd(), false)?;
        }
        Ok(false)
    }

    /// Changes a directory; `None` if it is skipped.
    fn open_subdirectory(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> io::Result<Option<OwnedFd>> {
        let Some(below) = self.open_entry(dir, name, OPEN_DIRECTORY)? else { return Ok(None) };
        // Before its entries: those created meanwhile inherit the right project.
        Ok(self.retag(below.as_fd(), true)?.then_some(below))
    }

    /// `None` if the entry has just been removed, or is on another file system.
    fn open_entry(&mut self, dir: BorrowedFd<'_>, name: &CStr, flags: OFlags) -> io::Result<Option<OwnedFd>> {
        let file = match rustix::fs::openat(dir, name, flags, Mode::empty()) {
            Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => return Ok(None),
            file => file?,
        };
        let device = rustix::fs::fstat(&file)?.st_dev;
        if self.levels.first().is_some_and(|top| top.device != device) {
            self.summary.foreign += 1;
            return Ok(None);
        }
        Ok(Some(file))
    }

    /// Changes one inode; returns whether it has the right project now.
    fn retag(&mut self, file: BorrowedFd<'_>, is_directory: bool) -> io::Result<bool> {
        let tag = linux::read_project_tag(file)?;
        let wanted = ProjectTag { project: self.to, inherit: is_directory && self.to != 0 };
        if tag == wanted {
            self.summary.unchanged += 1;
        } else if tag.project == self.from || tag.project == self.to {
            linux::write_project_tag(file, wanted)?;
            self.summary.changed += 1;
        } else {
            self.summary.foreign += 1;
            return Ok(false);
        }
        Ok(true)
    }
}

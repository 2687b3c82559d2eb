//! Visits every entry of a tree that others change meanwhile.

use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// A directory or a file of a tree, opened for reading.
#[derive(Clone, Copy)]
pub(crate) struct OpenEntry<'a> {
    pub(crate) file: BorrowedFd<'a>,
    pub(crate) is_directory: bool,
    /// Its path, relative to the directory where the walk started.
    pub(crate) path: &'a dyn Fn() -> PathBuf,
}

/// An entry of a directory that is not opened.
#[derive(Clone, Copy)]
pub(crate) struct NamedEntry<'a> {
    pub(crate) dir: BorrowedFd<'a>,
    pub(crate) name: &'a CStr,
    /// Its path, relative to the directory where the walk started.
    pub(crate) path: &'a dyn Fn() -> PathBuf,
}

impl<'a> OpenEntry<'a> {
    /// The directory where a walk starts, which the walk itself does not visit.
    pub(crate) fn top(dir: BorrowedFd<'a>) -> Self {
        Self { file: dir, is_directory: true, path: &PathBuf::new }
    }
}

/// What is done with the entries of a tree. The files of a directory are visited directly after it.
pub(crate) trait TreeVisitor {
    /// Visits a directory or a file; returns whether the directory is entered.
    fn visit_inode(&mut self, entry: OpenEntry<'_>) -> io::Result<bool>;
    /// Visits a symbolic link, a socket, a FIFO or a device node.
    fn visit_special(&mut self, entry: NamedEntry<'_>) -> io::Result<()> {
        let _ = entry;
        Ok(())
    }
    /// Visits a file that can't be opened now, because a process holds a lease on it.
    fn visit_leased(&mut self, entry: NamedEntry<'_>) -> io::Result<()> {
        let _ = entry;
        Err(Errno::AGAIN.into())
    }
    /// An entry was not visited, or a directory only in part: it was moved away while the walk was in it, or a visit
    /// failed. The walk goes on unless this returns an error, as it does by default.
    fn visit_failed(&mut self, path: PathBuf, error: io::Error) -> io::Result<()> {
        let _ = path;
        Err(error)
    }
    /// Visits an entry on which something is mounted.
    fn visit_mount(&mut self) {}
    /// Whether files are visited, and not directories alone.
    fn visits_files(&self) -> bool {
        true
    }
    /// All entries of the directory that was entered last, and not left yet, have been visited; that in which the walk
    /// started is left last.
    fn leave_directory(&mut self) {}
}

/// Visits every entry below `dir`. Nothing that is mounted in the tree is entered, not even another directory
/// of the same file system.
///
/// It needs two descriptors and no recursion at any depth: for each directory above, it keeps the names still
/// to be entered. It returns by `..`, and checks that this is the directory it came from. If it was moved out of it
/// meanwhile, it goes on in the deepest directory above that is where it was.
pub(crate) fn walk_tree(
    dir: BorrowedFd<'_>,
    visitor: &mut dyn TreeVisitor,
) -> Result<(), (PathBuf, io::Error)> {
    let mut walk = TreeWalk { top: dir, visitor, levels: Vec::new() };
    let walked = walk.run();
    walked.map_err(|(name, source)| (entry_path(&walk.levels, name.as_deref()), source))
}

/// A directory on the way down.
struct DirectoryLevel {
    /// Its name in the directory above.
    name: CString,
    /// Its device and inode number.
    identity: (u64, u64),
    /// Its subdirectories that are still to be entered.
    pending: Vec<CString>,
}

struct TreeWalk<'a> {
    top: BorrowedFd<'a>,
    visitor: &'a mut dyn TreeVisitor,
    levels: Vec<DirectoryLevel>,
}

/// The entry of the deepest directory that failed, `None` for that directory itself, and the error.
type WalkFailure = (Option<CString>, io::Error);

const OPEN_DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl TreeWalk<'_> {
    fn run(&mut self) -> Result<(), WalkFailure> {
        let here = |error: Errno| (None, error.into());
        let mut at = self.open_top().map_err(here)?;
        self.enter_directory(CString::default(), &at)?;
        while let Some(level) = self.levels.last_mut() {
            if let Some(name) = level.pending.pop() {
                match self.open_subdirectory(at.as_fd(), &name) {
                    Ok(Some(below)) => {
                        at = below;
                        self.enter_directory(name, &at)?;
                    }
                    Ok(None) => {}
                    Err(error) => self.report_failure(Some(&name), error)?,
                }
            } else {
                self.levels.pop();
                self.visitor.leave_directory();
                at = self.return_from(at)?;
            }
        }
        Ok(())
    }

    /// Visits the files of a directory, which itself has been visited, and collects its subdirectories.
    fn enter_directory(&mut self, name: CString, at: &OwnedFd) -> Result<(), WalkFailure> {
        let identity = file_identity(at).map_err(|error| (None, error.into()))?;
        self.levels.push(DirectoryLevel { name, identity, pending: Vec::new() });
        let mut below = Vec::new();
        if let Err(error) = self.visit_files(at, &mut below)? {
            self.report_failure(None, error.into())?;
        }
        if let Some(level) = self.levels.last_mut() {
            level.pending = below;
        }
        Ok(())
    }

    /// Visits the files of a directory, and adds its subdirectories. The inner error is that of the directory.
    fn visit_files(
        &mut self,
        at: &OwnedFd,
        below: &mut Vec<CString>,
    ) -> Result<Result<(), Errno>, WalkFailure> {
        let mut entries = match Dir::read_from(at) {
            Ok(entries) => entries,
            // It has been removed.
            Err(Errno::NOENT) => return Ok(Ok(())),
            Err(error) => return Ok(Err(error)),
        };
        while let Some(entry) = entries.read() {
            let entry = match entry {
                Ok(entry) => entry,
                Err(Errno::NOENT) => break,
                Err(error) => return Ok(Err(error)),
            };
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let is_file = !matches!(entry.file_type(), FileType::Directory | FileType::Unknown);
            if is_file && !self.visitor.visits_files() {
                continue;
            }
            match self.visit_entry(at.as_fd(), name) {
                Ok(true) => below.push(name.to_owned()),
                Ok(false) => {}
                Err(error) => self.report_failure(Some(name), error)?,
            }
        }
        Ok(Ok(()))
    }

    fn report_failure(&mut self, name: Option<&CStr>, error: io::Error) -> Result<(), WalkFailure> {
        let path = entry_path(&self.levels, name);
        self.visitor.visit_failed(path, error).map_err(|error| (name.map(CStr::to_owned), error))
    }

    /// Returns to the directory above `from`, or `from` itself at the top.
    fn return_from(&mut self, from: OwnedFd) -> Result<OwnedFd, WalkFailure> {
        let Some(level) = self.levels.last() else { return Ok(from) };
        let above = rustix::fs::openat(&from, "..", OPEN_DIRECTORY, Mode::empty());
        match above {
            Ok(above) if file_identity(&above).ok() == Some(level.identity) => Ok(above),
            _ => self.descend_again(),
        }
    }

    /// Descends from the top, as far as the directories are where they were; the others were moved away or removed, and
    /// are left.
    fn descend_again(&mut self) -> Result<OwnedFd, WalkFailure> {
        let mut at = self.open_top().map_err(|error| (None, error.into()))?;
        let mut depth = 1;
        for level in self.levels.iter().skip(1) {
            let flags = ResolveFlags::NO_XDEV;
            let below = rustix::fs::openat2(&at, level.name.as_c_str(), OPEN_DIRECTORY, Mode::empty(), flags);
            match below {
                Ok(below) if file_identity(&below).ok() == Some(level.identity) => at = below,
                _ => break,
            }
            depth += 1;
        }
        while self.levels.len() > depth {
            if self.levels.len() == depth + 1 {
                self.report_failure(None, Errno::AGAIN.into())?;
            }
            self.levels.pop();
            self.visitor.leave_directory();
        }
        Ok(at)
    }

    fn open_top(&self) -> Result<OwnedFd, Errno> {
        rustix::fs::openat(self.top, ".", OPEN_DIRECTORY, Mode::empty())
    }

    /// Visits an entry that is not a directory; returns whether it is a directory.
    fn visit_entry(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> io::Result<bool> {
        let stat = match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(false),
            stat => stat?,
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => return Ok(true),
            _ if !self.visitor.visits_files() => {}
            FileType::RegularFile => self.visit_file(dir, name)?,
            _ => {
                // Opened for nothing else than to know whether another one is mounted on it.
                let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                if self.open_entry(dir, name, flags)?.is_some() {
                    let path = || entry_path(&self.levels, Some(name));
                    self.visitor.visit_special(NamedEntry { dir, name, path: &path })?;
                }
            }
        }
        Ok(false)
    }

    fn visit_file(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        // A link may have replaced the file meanwhile, or a device, which does something when it is opened.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Some(found) = self.open_entry(dir, name, flags)? else { return Ok(()) };
        if FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) != FileType::RegularFile {
            return Ok(());
        }
        // A lease does not block.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = rustix::fs::open(format!("/proc/self/fd/{}", found.as_raw_fd()), flags, Mode::empty());
        let path = || entry_path(&self.levels, Some(name));
        match opened {
            Ok(file) => {
                let entry = OpenEntry { file: file.as_fd(), is_directory: false, path: &path };
                self.visitor.visit_inode(entry).map(drop)
            }
            Err(Errno::AGAIN) => self.visitor.visit_leased(NamedEntry { dir, name, path: &path }),
            Err(error) => Err(error.into()),
        }
    }

    /// Visits a directory; `None` if it is not entered.
    fn open_subdirectory(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> io::Result<Option<OwnedFd>> {
        let Some(below) = self.open_entry(dir, name, OPEN_DIRECTORY)? else { return Ok(None) };
        let path = || entry_path(&self.levels, Some(name));
        // Before its entries: those created meanwhile inherit the right project.
        let entry = OpenEntry { file: below.as_fd(), is_directory: true, path: &path };
        Ok(self.visitor.visit_inode(entry)?.then_some(below))
    }

    /// `None` if the entry has just been removed, or something is mounted on it.
    fn open_entry(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &CStr,
        flags: OFlags,
    ) -> Result<Option<OwnedFd>, Errno> {
        match rustix::fs::openat2(dir, name, flags, Mode::empty(), ResolveFlags::NO_XDEV) {
            Ok(file) => Ok(Some(file)),
            Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => Ok(None),
            Err(Errno::XDEV) => {
                self.visitor.visit_mount();
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// The device and the inode number of an open file.
fn file_identity(file: &OwnedFd) -> Result<(u64, u64), Errno> {
    let stat = rustix::fs::fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// The path of an entry of the deepest directory, `None` for that directory itself.
fn entry_path(levels: &[DirectoryLevel], name: Option<&CStr>) -> PathBuf {
    let names = levels.iter().skip(1).map(|level| level.name.as_c_str()).chain(name);
    names.map(|name| OsStr::from_bytes(name.to_bytes())).collect()
}

#[cfg(test)]
#[path = "walk_test.rs"]
mod tests;

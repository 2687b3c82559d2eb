//! Changes, or counts, the projects of everything in a directory.

use std::collections::HashSet;
use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;

use crate::kernel::ProjectTag;
use crate::{Error, linux};

/// How many paths of immutable entries are kept.
const MAX_IMMUTABLE_PATHS: usize = 10;

/// How many entries of a tree were changed or skipped; the directory itself is not counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct TreeSummary {
    /// Directories and files whose project was changed.
    pub changed: u64,
    /// Entries that already had the right project.
    pub unchanged: u64,
    /// Symbolic links, sockets, FIFOs and device nodes, which can't be opened to change them.
    pub special: u64,
    /// Entries with another project, directories with their own limits, and entries on which a file system or
    /// a directory is mounted.
    pub foreign: u64,
    /// Immutable entries (`chattr +i`), whose project ext4 does not change.
    pub immutable: u64,
    /// The first ten of them, relative to the directory.
    pub immutable_paths: Vec<PathBuf>,
}

/// Changes the project of every entry below `dir` from one of `from` to `to`, but not of `dir` itself.
pub(crate) fn retag_tree(dir: BorrowedFd<'_>, from: &[u32], to: u32) -> Result<TreeSummary, Error> {
    let mut retag = Retag { from, to, summary: TreeSummary::default() };
    walk_tree(dir, &mut retag).map_err(|(path, source)| Error::ChangeTree { path, source })?;
    Ok(retag.summary)
}

/// Counts the inodes of the project in the tree of `dir`, with `dir` itself, that were created before a time;
/// except those of a directory that is marked as the project's owner. Whatever is created, removed and renamed
/// meanwhile, no inode counts that the tree did not have then.
pub(crate) fn count_tree(dir: BorrowedFd<'_>, project: u32, before: SystemTime) -> Result<u64, Error> {
    let mut count = Count { project, before, inodes: HashSet::new() };
    let counted = count.visit_inode(dir, true, &PathBuf::new).map_err(|source| (PathBuf::new(), source));
    counted
        .and_then(|_| walk_tree(dir, &mut count))
        .map_err(|(path, source)| Error::CountTree { path, source })?;
    Ok(count.inodes.len() as u64)
}

/// What is done with the entries of a tree. The files of a directory are visited directly after it.
pub(crate) trait TreeVisitor {
    /// Visits a directory or a file; returns whether the directory is entered.
    fn visit_inode(
        &mut self,
        file: BorrowedFd<'_>,
        is_directory: bool,
        path: &dyn Fn() -> PathBuf,
    ) -> io::Result<bool>;
    /// Visits a symbolic link, a socket, a FIFO or a device node, an entry of a directory.
    fn visit_special(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &CStr,
        path: &dyn Fn() -> PathBuf,
    ) -> io::Result<()> {
        let _ = (dir, name, path);
        Ok(())
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

struct Retag<'a> {
    from: &'a [u32],
    to: u32,
    summary: TreeSummary,
}

/// Whether the directory was given the project itself, and merely lies in the tree.
fn is_owner(dir: BorrowedFd<'_>, project: u32) -> io::Result<bool> {
    Ok(project != 0 && linux::read_owner_mark(dir)?.is_some_and(|mark| mark.project == project))
}

impl TreeVisitor for Retag<'_> {
    fn visit_inode(
        &mut self,
        file: BorrowedFd<'_>,
        is_directory: bool,
        path: &dyn Fn() -> PathBuf,
    ) -> io::Result<bool> {
        let tag = linux::read_project_tag(file)?;
        let wanted = ProjectTag { project: self.to, inherit: is_directory && self.to != 0 };
        if tag == wanted {
            self.summary.unchanged += 1;
            return Ok(true);
        }
        let is_ours = tag.project == self.to || self.from.contains(&tag.project);
        if !is_ours || is_directory && is_owner(file, tag.project)? {
            self.summary.foreign += 1;
            return Ok(false);
        }
        match linux::write_project_tag(file, wanted) {
            Ok(()) => self.summary.changed += 1,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && linux::is_immutable(file)? => {
                self.summary.immutable += 1;
                if self.summary.immutable_paths.len() < MAX_IMMUTABLE_PATHS {
                    self.summary.immutable_paths.push(path());
                }
            }
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    fn visit_special(&mut self, _: BorrowedFd<'_>, _: &CStr, _: &dyn Fn() -> PathBuf) -> io::Result<()> {
        self.summary.special += 1;
        Ok(())
    }

    fn visit_mount(&mut self) {
        self.summary.foreign += 1;
    }
}

struct Count {
    project: u32,
    before: SystemTime,
    /// Their numbers: an inode may have several names, or be visited again where it was moved.
    inodes: HashSet<u64>,
}

impl TreeVisitor for Count {
    fn visit_inode(
        &mut self,
        file: BorrowedFd<'_>,
        is_directory: bool,
        _: &dyn Fn() -> PathBuf,
    ) -> io::Result<bool> {
        if linux::read_project_tag(file)?.project == self.project {
            if is_directory && is_owner(file, self.project)? {
                return Ok(false);
            }
            let (inode, created) = inode_and_birth(file)?;
            if created.is_some_and(|created| created < self.before) {
                self.inodes.insert(inode);
            }
        }
        Ok(true)
    }
}

/// The number of an inode, and when it was created, if the file system keeps that.
fn inode_and_birth(file: BorrowedFd<'_>) -> io::Result<(u64, Option<SystemTime>)> {
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::INO | StatxFlags::BTIME)?;
    let is_kept = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
    let seconds = u64::try_from(stat.stx_btime.tv_sec).ok().filter(|_| is_kept);
    let created = seconds.map(|seconds| Duration::new(seconds, stat.stx_btime.tv_nsec));
    Ok((stat.stx_ino, created.map(|created| SystemTime::UNIX_EPOCH + created)))
}

/// Visits every entry below `dir`. Nothing that is mounted in the tree is entered, not even another directory
/// of the same file system.
///
/// It needs two descriptors and no recursion at any depth: for each directory above, it keeps the names still
/// to be entered. It returns by `..`, and checks that this is the directory it came from.
pub(crate) fn walk_tree(
    dir: BorrowedFd<'_>,
    visitor: &mut dyn TreeVisitor,
) -> Result<(), (PathBuf, io::Error)> {
    let mut walk = TreeWalk { visitor, levels: Vec::new() };
    let walked = walk.run(dir);
    walked.map_err(|(name, source)| (entry_path(&walk.levels, name.as_deref()), source))
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

struct TreeWalk<'a> {
    visitor: &'a mut dyn TreeVisitor,
    levels: Vec<DirectoryLevel>,
}

/// The entry of the deepest directory that failed, `None` for that directory itself, and the error.
type WalkFailure = (Option<CString>, io::Error);

const OPEN_DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl TreeWalk<'_> {
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
                self.visitor.leave_directory();
                at = self.leave_directory(at).map_err(here)?;
            }
        }
        Ok(())
    }

    /// Visits the files of a directory, which itself has been visited, and collects its subdirectories.
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

    /// Visits an entry that is not a directory; returns whether it is a directory.
    fn visit_entry(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> io::Result<bool> {
        let stat = match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(false),
            stat => stat?,
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => return Ok(true),
            _ if !self.visitor.visits_files() => return Ok(false),
            FileType::RegularFile => {}
            _ => {
                // Opened for nothing else than to know whether another one is mounted on it.
                let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                if self.open_entry(dir, name, flags)?.is_some() {
                    let path = || entry_path(&self.levels, Some(name));
                    self.visitor.visit_special(dir, name, &path)?;
                }
                return Ok(false);
            }
        }
        // If a link or a FIFO has replaced the file meanwhile, the link is not followed and the FIFO does not
        // block.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        if let Some(file) = self.open_entry(dir, name, flags)? {
            let path = || entry_path(&self.levels, Some(name));
            self.visitor.visit_inode(file.as_fd(), false, &path)?;
        }
        Ok(false)
    }

    /// Visits a directory; `None` if it is not entered.
    fn open_subdirectory(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> io::Result<Option<OwnedFd>> {
        let Some(below) = self.open_entry(dir, name, OPEN_DIRECTORY)? else { return Ok(None) };
        let path = || entry_path(&self.levels, Some(name));
        // Before its entries: those created meanwhile inherit the right project.
        Ok(self.visitor.visit_inode(below.as_fd(), true, &path)?.then_some(below))
    }

    /// `None` if the entry has just been removed, or something is mounted on it.
    fn open_entry(&mut self, dir: BorrowedFd<'_>, name: &CStr, flags: OFlags) -> io::Result<Option<OwnedFd>> {
        match rustix::fs::openat2(dir, name, flags, Mode::empty(), ResolveFlags::NO_XDEV) {
            Ok(file) => Ok(Some(file)),
            Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => Ok(None),
            Err(Errno::XDEV) => {
                self.visitor.visit_mount();
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// The path of an entry of the deepest directory, `None` for that directory itself.
fn entry_path(levels: &[DirectoryLevel], name: Option<&CStr>) -> PathBuf {
    let names = levels.iter().skip(1).map(|level| level.name.as_c_str()).chain(name);
    names.map(|name| OsStr::from_bytes(name.to_bytes())).collect()
}

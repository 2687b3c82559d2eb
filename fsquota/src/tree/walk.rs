//! Visits every entry of a tree that others may change at the same time.

use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use nodekeel_localstorage::{OpenOutcome, TreeWalk, WalkEvent};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

/// A directory or a file of a tree, opened for reading.
#[derive(Clone, Copy)]
pub(crate) struct OpenEntry<'a> {
    pub(crate) file: BorrowedFd<'a>,
    pub(crate) is_directory: bool,
    /// Path relative to the directory where the walk started.
    pub(crate) path: &'a dyn Fn() -> PathBuf,
}

/// An entry of a directory that is not opened.
#[derive(Clone, Copy)]
pub(crate) struct NamedEntry<'a> {
    pub(crate) dir: BorrowedFd<'a>,
    pub(crate) name: &'a CStr,
    /// Path relative to the directory where the walk started.
    pub(crate) path: &'a dyn Fn() -> PathBuf,
}

impl<'a> OpenEntry<'a> {
    /// The directory where a walk starts, which the walk itself does not visit.
    pub(crate) fn top(dir: BorrowedFd<'a>) -> Self {
        Self { file: dir, is_directory: true, path: &PathBuf::new }
    }
}

/// Visits the entries of a tree. Of a directory, files are visited before its subdirectories; one with very many
/// subdirectories is visited in parts.
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
    /// Returns whether files are visited, and not directories alone.
    fn visits_files(&self) -> bool {
        true
    }
    /// All entries of the directory that was entered last, and not left yet, have been visited; that in which the walk
    /// started is left last.
    fn leave_directory(&mut self) {}
}

/// Visits every entry below `dir`, as a [`TreeWalk`] meets them. If a directory was moved away while the walk was in
/// it, the walk goes on in the deepest directory above that is where it was.
pub(crate) fn walk_tree(
    dir: BorrowedFd<'_>,
    visitor: &mut dyn TreeVisitor,
) -> Result<(), (PathBuf, io::Error)> {
    let mut walk = TreeWalk::open(dir).map_err(|error| (PathBuf::new(), error))?;
    loop {
        let (path, error) = match walk.next_event() {
            Ok(None) => return Ok(()),
            Ok(Some(event)) => match visit_event(&mut walk, visitor, event) {
                Ok(()) => continue,
                Err(failed) => failed,
            },
            Err(error) => (walk.path(None), error),
        };
        visitor.visit_failed(path.clone(), error).map_err(|error| (path, error))?;
    }
}

fn visit_event(
    walk: &mut TreeWalk,
    visitor: &mut dyn TreeVisitor,
    event: WalkEvent,
) -> Result<(), (PathBuf, io::Error)> {
    let (visited, name) = match event {
        WalkEvent::Entry { name, .. } if visitor.visits_files() => (visit_entry(walk, visitor, &name), name),
        WalkEvent::Entry { .. } => return Ok(()),
        WalkEvent::Directory { name } => (visit_directory(walk, visitor, &name), name),
        WalkEvent::Leave { .. } => {
            visitor.leave_directory();
            return Ok(());
        }
        WalkEvent::Moved { name, levels } => {
            // The walk has left so many directories at once: the visitor keeps track of its path by these calls.
            (0..levels).for_each(|_| visitor.leave_directory());
            (Err(Errno::AGAIN.into()), name)
        }
    };
    visited.map_err(|error| (walk.path(Some(&name)), error))
}

/// Visits an entry that was not a directory when it was listed.
fn visit_entry(walk: &TreeWalk, visitor: &mut dyn TreeVisitor, name: &OsStr) -> io::Result<()> {
    // Another entry may have replaced it since: a link, or a device, which does something when it is opened.
    let Some(found) = opened(walk.open_path(name)?, visitor) else { return Ok(()) };
    let path = || walk.path(Some(name));
    let text = CString::new(name.as_bytes())?;
    let named = NamedEntry { dir: walk.dir(), name: &text, path: &path };
    match FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) {
        FileType::Directory => return Ok(()),
        FileType::RegularFile => {}
        _ => return visitor.visit_special(named),
    }
    // A lease does not block.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    // By the descriptor of the inode that was inspected: the name may be that of another one by now.
    let opened = rustix::fs::open(format!("/proc/self/fd/{}", found.as_raw_fd()), flags, Mode::empty());
    match opened {
        Ok(file) => {
            let entry = OpenEntry { file: file.as_fd(), is_directory: false, path: &path };
            visitor.visit_inode(entry).map(drop)
        }
        Err(Errno::AGAIN) => visitor.visit_leased(named),
        Err(error) => Err(error.into()),
    }
}

/// Visits a directory, and enters it if the visitor wants to.
fn visit_directory(walk: &mut TreeWalk, visitor: &mut dyn TreeVisitor, name: &OsStr) -> io::Result<()> {
    let Some(dir) = opened(walk.open_dir(name)?, visitor) else { return Ok(()) };
    let path = || walk.path(Some(name));
    // Before its entries: those created from now on inherit the right project.
    let entry = OpenEntry { file: dir.as_fd(), is_directory: true, path: &path };
    if visitor.visit_inode(entry)? {
        walk.enter(name, dir).inspect_err(|_| visitor.leave_directory())?;
    }
    Ok(())
}

/// The open entry; none if it has just been removed, or something is mounted on it.
fn opened(outcome: OpenOutcome, visitor: &mut dyn TreeVisitor) -> Option<OwnedFd> {
    match outcome {
        OpenOutcome::Opened(file) => return Some(file),
        OpenOutcome::MountPoint => visitor.visit_mount(),
        OpenOutcome::Vanished => {}
    }
    None
}

#[cfg(test)]
#[path = "walk_test.rs"]
mod tests;

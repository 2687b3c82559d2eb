//! Removal of directory trees of any depth with bounded stack and descriptors.

use std::ffi::{OsStr, OsString};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, IFlags, Mode as RawMode, OFlags};
use rustix::io::Errno;

use super::walk::{TreeWalk, WalkEvent};
use super::{Dir, OPEN_DIR_FLAGS};
use crate::error::{Error, FileOperation, RejectReason, resolve_error};
use crate::metadata::FileKind;
use crate::syscalls;

/// The number of times that an emptied directory may turn out not to be empty.
const MAX_ATTEMPTS: u32 = 100;

/// The progress of a removal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RemovalProgress {
    /// Files, links and directories removed so far.
    pub entries: u64,
}

impl Dir {
    /// Removes a file, or a directory with everything below it. Returns whether it existed.
    ///
    /// The removal follows no symbolic link and stops at a mount point. Nothing in the tree prevents its
    /// removal: it clears the immutable and append-only flags of files and directories, and gives directories
    /// the permissions that their owner needs. It takes a bounded number of descriptors and no stack, however
    /// deep the tree is. It can be killed at any point and repeated, and is durable when it returns.
    ///
    /// # Errors
    /// [`FileOperation::Remove`]; removed entries stay removed, and a call with the same path resumes.
    /// [`is_mount_point`](Error::is_mount_point): the error names the path to unmount first.
    pub fn remove_tree(&self, path: impl AsRef<Path>) -> Result<bool, Error> {
        self.remove_tree_with(path, &mut |_| ControlFlow::Continue(()))
    }

    /// Like [`remove_tree`](Self::remove_tree), with a hook that runs after each removed entry and can stop
    /// the removal.
    ///
    /// # Errors
    /// Those of [`remove_tree`](Self::remove_tree); [`is_stopped`](Error::is_stopped) if the hook stopped the
    /// removal.
    pub fn remove_tree_with(
        &self,
        path: impl AsRef<Path>,
        hook: &mut dyn FnMut(RemovalProgress) -> ControlFlow<()>,
    ) -> Result<bool, Error> {
        let path = path.as_ref();
        let (parent, name) = match self.open_parent(path, FileOperation::Remove) {
            Err(error) if error.is_not_found() => return Ok(false),
            parent => parent?,
        };
        let to_error = |source: io::Error| Error::new(FileOperation::Remove, self.full_path(path), source);
        // The walk starts in the parent, so that the top of the tree is removed like every other directory.
        let walk = TreeWalk::open_entry(&parent, name).map_err(to_error)?;
        let (attempts, progress) = (Vec::new(), RemovalProgress::default());
        let mut removal = TreeRemoval { walk, attempts, failed: None, progress, hook };
        let existed = removal.remove_all().map_err(|source| {
            let entry = removal.failed.as_deref().filter(|_| removal.walk.depth() > 1);
            let path = removal.walk.display_path((&self.full_path(path), 2), entry);
            Error::new(FileOperation::Remove, path, source)
        })?;
        // One sync suffices: nothing below is left. It is made also if nothing existed, since a killed call may
        // have removed the tree without it.
        syscalls::sync(&parent).map_err(|source| to_error(source.into()))?;
        Ok(existed)
    }
}

struct TreeRemoval<'a> {
    /// From the parent of the tree.
    walk: TreeWalk,
    /// The number of times that each directory on the way down was emptied before.
    attempts: Vec<u32>,
    /// The entry that could not be removed.
    failed: Option<OsString>,
    progress: RemovalProgress,
    hook: &'a mut dyn FnMut(RemovalProgress) -> ControlFlow<()>,
}

impl TreeRemoval<'_> {
    /// Removes what is to be walked. Returns whether it existed.
    fn remove_all(&mut self) -> io::Result<bool> {
        let mut existed = false;
        while let Some(event) = self.walk.next_event()? {
            match event {
                WalkEvent::Entry { name, kind } => self.remove_or_enter(name, kind, 0).map(drop)?,
                WalkEvent::Directory { name } => existed |= self.remove_or_enter(name, FileKind::Dir, 0)?,
                // The parent of the tree.
                WalkEvent::Leave { .. } if self.walk.depth() == 0 => {}
                WalkEvent::Leave { name, .. } => self.remove_emptied(name)?,
                // Another process has moved or removed these directories: their counts go with them.
                WalkEvent::Moved { levels, .. } => {
                    self.attempts.truncate(self.attempts.len().saturating_sub(levels));
                }
            }
        }
        Ok(existed)
    }

    /// Removes an entry, or enters it if it is a directory, which was emptied so often before. Returns whether it
    /// existed.
    fn remove_or_enter(&mut self, name: OsString, kind: FileKind, attempts: u32) -> io::Result<bool> {
        let outcome =
            remove_or_open(self.holder(), &name, kind).inspect_err(|_| self.failed = Some(name.clone()));
        match outcome? {
            EntryOutcome::Absent => return Ok(false),
            EntryOutcome::Removed => self.count_removed()?,
            EntryOutcome::Opened(dir) => {
                self.walk.enter(&name, dir)?;
                self.attempts.push(attempts);
            }
        }
        Ok(true)
    }

    /// Removes a directory that has been emptied, or empties it again.
    fn remove_emptied(&mut self, name: OsString) -> io::Result<()> {
        let attempts = self.attempts.pop().unwrap_or_default() + 1;
        let holder = self.holder();
        match remove_forced(holder, &name, || syscalls::remove_dir(holder.dir, &name)) {
            Ok(()) => self.count_removed(),
            Err(Errno::NOENT) => Ok(()),
            // Another process has added entries since the directory was listed.
            Err(Errno::NOTEMPTY | Errno::EXIST) if attempts < MAX_ATTEMPTS => {
                self.remove_or_enter(name, FileKind::Dir, attempts).map(drop)
            }
            failed => {
                self.failed = Some(name);
                failed.map_err(removal_error)
            }
        }
    }

    /// The directory in which the walk is.
    fn holder(&self) -> EntryParent<'_> {
        EntryParent { dir: self.walk.dir(), is_inside: self.walk.depth() > 1 }
    }

    fn count_removed(&mut self) -> io::Result<()> {
        self.progress.entries += 1;
        match (self.hook)(self.progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(RejectReason::Stopped.into()),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct EntryParent<'a> {
    dir: BorrowedFd<'a>,
    /// True if it belongs to the tree. The parent of the tree keeps its flags and permissions.
    is_inside: bool,
}

#[derive(Debug)]
enum EntryOutcome {
    /// Another process has removed it.
    Absent,
    Removed,
    /// A directory, which must be emptied first.
    Opened(OwnedFd),
}

/// Removes the entry, or opens it if it is a directory. Its kind may have changed since it was listed.
fn remove_or_open(holder: EntryParent<'_>, name: &OsStr, kind: FileKind) -> io::Result<EntryOutcome> {
    if kind != FileKind::Dir {
        match remove_forced(holder, name, || syscalls::unlink(holder.dir, name)) {
            Ok(()) => return Ok(EntryOutcome::Removed),
            Err(Errno::NOENT) => return Ok(EntryOutcome::Absent),
            // A directory has replaced the entry since it was listed.
            // *Source:* unlink(2): Linux returns EISDIR, not EPERM.
            Err(Errno::ISDIR) => {}
            Err(source) => return Err(removal_error(source)),
        }
    }
    let open = || syscalls::open_on_same_mount(holder.dir, name, OPEN_DIR_FLAGS);
    let opened = match open() {
        // Permissions of the tree must not prevent its removal. With CAP_DAC_OVERRIDE there is no such error.
        Err(Errno::ACCESS) => grant_entry_access(holder, name).and_then(|()| open()),
        opened => opened,
    };
    match opened {
        Ok(dir) => Ok(EntryOutcome::Opened(dir)),
        Err(Errno::NOENT) => Ok(EntryOutcome::Absent),
        // Any kind but a directory. This recurses at most once.
        Err(Errno::NOTDIR | Errno::LOOP) if kind == FileKind::Dir => {
            remove_or_open(holder, name, FileKind::File)
        }
        Err(source) => Err(removal_error(source)),
    }
}

fn removal_error(errno: Errno) -> io::Error {
    match errno {
        Errno::XDEV | Errno::BUSY => RejectReason::MountPoint.into(),
        Errno::NOTEMPTY | Errno::EXIST => RejectReason::Changing.into(),
        errno => resolve_error(errno),
    }
}

/// Removes the entry. If that is not permitted, clears the flags of the entry and of its directory, and tries
/// once more.
fn remove_forced(
    holder: EntryParent<'_>,
    name: &OsStr,
    remove: impl Fn() -> rustix::io::Result<()>,
) -> rustix::io::Result<()> {
    // Flags and modes are looked at only after a failure: few entries have them, and each look costs system calls.
    let forbidden = match remove() {
        Err(forbidden @ (Errno::PERM | Errno::ACCESS)) => forbidden,
        result => return result,
    };
    if holder.is_inside {
        clear_inode_flags(holder.dir);
        grant_owner_access(holder.dir);
    }
    // Only files and directories, which can be opened without side effects: devices and pipes have no such flags.
    let kind = syscalls::stat_at(holder.dir, name).map(|stat| FileType::from_raw_mode(stat.st_mode));
    if forbidden == Errno::PERM && matches!(kind, Ok(FileType::RegularFile | FileType::Directory)) {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        if let Ok(file) = syscalls::open_on_same_mount(holder.dir, name, flags) {
            clear_inode_flags(file.as_fd());
        }
    }
    remove()
}

/// Clears the immutable and append-only flags. The second attempt of the removal shows whether that was
/// permitted.
fn clear_inode_flags(file: BorrowedFd<'_>) {
    let blocking = IFlags::IMMUTABLE | IFlags::APPEND;
    if let Ok(flags) = syscalls::inode_flags(file)
        && flags.intersects(blocking)
    {
        let _ = syscalls::set_inode_flags(file, flags.difference(blocking));
    }
}

/// Gives the owner of a directory permission to remove its entries. The second attempt shows whether that
/// succeeded.
fn grant_owner_access(dir: BorrowedFd<'_>) {
    if let Ok(stat) = syscalls::stat(dir)
        && !RawMode::from_raw_mode(stat.st_mode).contains(RawMode::RWXU)
    {
        let _ = syscalls::set_mode(dir, RawMode::from_raw_mode(stat.st_mode) | RawMode::RWXU);
    }
}

/// Gives the owner permission to open a directory, and permission to access its parent.
fn grant_entry_access(holder: EntryParent<'_>, name: &OsStr) -> rustix::io::Result<()> {
    if holder.is_inside {
        grant_owner_access(holder.dir);
    }
    // O_PATH needs permission to search the parent, but none on the directory itself.
    let locked = syscalls::open_on_same_mount(holder.dir, name, OFlags::PATH | OFlags::DIRECTORY)?;
    let mode = RawMode::from_raw_mode(syscalls::stat(&locked)?.st_mode);
    syscalls::set_mode_by_proc_path(&locked, mode | RawMode::RWXU)
}

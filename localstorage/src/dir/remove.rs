//! Removal of directory trees of any depth with bounded stack and descriptors.

use std::ffi::{OsStr, OsString};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, IFlags, Mode as RawMode, OFlags};
use rustix::io::Errno;

use super::{Dir, OPEN_DIR_FLAGS};
use crate::error::{Error, FileOperation, RejectReason, resolve_error};
use crate::metadata::Metadata;
use crate::syscalls::{self, DirListing};

/// How many levels of the tree stay open. The removal returns to levels above through `..`, and compares that
/// directory with the one from the way down.
const MAX_OPEN_LEVELS: usize = 32;

/// How often an emptied directory may turn out not to be empty.
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
        let mut removal = TreeRemoval { levels: Vec::new(), progress: RemovalProgress::default(), hook };
        let existed = removal.remove_all(parent.as_fd(), name).map_err(|source| {
            Error::new(FileOperation::Remove, removal.display_path(&self.full_path(path)), source)
        })?;
        syscalls::sync(&parent)
            .map_err(|source| Error::new(FileOperation::Remove, self.full_path(path), source))?;
        Ok(existed)
    }
}

/// A directory of the tree whose entries are being removed.
#[derive(Debug)]
struct OpenLevel {
    /// Its name in its parent.
    name: OsString,
    identity: Metadata,
    /// None while too many levels below it are open.
    listing: Option<DirListing>,
    attempts: u32,
}

impl OpenLevel {
    fn new(name: OsString, fd: OwnedFd) -> io::Result<Self> {
        let identity = Metadata::from_stat(&syscalls::stat(&fd)?);
        Ok(Self { name, identity, listing: Some(DirListing::new(fd)?), attempts: 0 })
    }

    /// The next entry, or none at the end.
    fn next_entry(&mut self) -> io::Result<Option<(OsString, FileType)>> {
        let listing = self.listing.as_mut().expect("the lowest level is open");
        loop {
            match listing.next().transpose()? {
                None => return Ok(None),
                Some(entry) if matches!(entry.file_name().to_bytes(), b"." | b"..") => {}
                Some(entry) => {
                    let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
                    return Ok(Some((name, entry.file_type())));
                }
            }
        }
    }

    fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        Ok(self.listing.as_ref().expect("the lowest level is open").fd()?)
    }
}

struct TreeRemoval<'a> {
    levels: Vec<OpenLevel>,
    progress: RemovalProgress,
    hook: &'a mut dyn FnMut(RemovalProgress) -> ControlFlow<()>,
}

impl TreeRemoval<'_> {
    /// Removes the entry with this name. Returns whether it existed.
    fn remove_all(&mut self, parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<bool> {
        let outcome = remove_or_open(EntryParent::outside(parent), name.to_owned(), FileType::Unknown)?;
        let existed = !matches!(outcome, EntryOutcome::Absent);
        self.handle_outcome(outcome)?;
        while let Some(level) = self.levels.last_mut() {
            match level.next_entry()? {
                Some((name, kind)) => {
                    let outcome = remove_or_open(EntryParent::inside(level.fd()?), name, kind)?;
                    self.handle_outcome(outcome)?;
                }
                None => self.remove_emptied_level(parent)?,
            }
        }
        Ok(existed)
    }

    fn handle_outcome(&mut self, outcome: EntryOutcome) -> io::Result<()> {
        match outcome {
            EntryOutcome::Absent => Ok(()),
            EntryOutcome::Removed => self.count_removed(),
            EntryOutcome::Opened(level) => {
                self.push_level(level);
                Ok(())
            }
        }
    }

    fn push_level(&mut self, level: OpenLevel) {
        self.levels.push(level);
        if let Some(closed) = self.levels.len().checked_sub(MAX_OPEN_LEVELS + 1) {
            self.levels[closed].listing = None;
        }
    }

    /// Removes the lowest directory, which has no entries left.
    fn remove_emptied_level(&mut self, top: BorrowedFd<'_>) -> io::Result<()> {
        let above = self.reopen_parent()?;
        let holder =
            above.as_ref().map_or(EntryParent::outside(top), |above| EntryParent::inside(above.as_fd()));
        let Some(level) = self.levels.last_mut() else { return Ok(()) };
        match remove_forced(holder, &level.name, || syscalls::remove_dir(holder.dir, &level.name)) {
            Ok(()) => {
                self.levels.pop();
                self.count_removed()
            }
            Err(Errno::NOENT) => {
                self.levels.pop();
                Ok(())
            }
            Err(Errno::NOTEMPTY | Errno::EXIST) => {
                level.attempts += 1;
                if level.attempts == MAX_ATTEMPTS {
                    return Err(RejectReason::Changing.into());
                }
                if let Some(listing) = &mut level.listing {
                    listing.rewind();
                }
                Ok(())
            }
            Err(source) => Err(removal_error(source)),
        }
    }

    /// The parent of the lowest directory, reopened if it was closed.
    fn reopen_parent(&mut self) -> io::Result<Option<OwnedFd>> {
        let [.., above, lowest] = self.levels.as_mut_slice() else { return Ok(None) };
        if above.listing.is_none() {
            let fd = syscalls::open_parent(lowest.fd()?)?;
            // Another process has moved the lowest directory. Entries outside the tree must stay.
            if !Metadata::from_stat(&syscalls::stat(&fd)?).is_same_file(&above.identity) {
                return Err(RejectReason::Changing.into());
            }
            above.listing = Some(DirListing::new(fd)?);
        }
        Ok(Some(above.fd()?.try_clone_to_owned()?))
    }

    fn count_removed(&mut self) -> io::Result<()> {
        self.progress.entries += 1;
        match (self.hook)(self.progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(RejectReason::Stopped.into()),
        }
    }

    /// The path of the lowest directory; a long one without its middle.
    fn display_path(&self, top: &Path) -> PathBuf {
        let mut path = top.to_owned();
        let below = self.levels.get(1..).unwrap_or_default();
        if below.len() > 8 {
            path.push("…");
        }
        path.extend(below[below.len().saturating_sub(8)..].iter().map(|level| &level.name));
        path
    }
}

/// The directory that contains an entry.
#[derive(Clone, Copy, Debug)]
struct EntryParent<'a> {
    dir: BorrowedFd<'a>,
    /// Whether it belongs to the tree. The parent of the tree keeps its flags and permissions.
    is_inside: bool,
}

impl<'a> EntryParent<'a> {
    fn outside(dir: BorrowedFd<'a>) -> Self {
        Self { dir, is_inside: false }
    }

    fn inside(dir: BorrowedFd<'a>) -> Self {
        Self { dir, is_inside: true }
    }
}

/// The result of handling an entry.
#[derive(Debug)]
enum EntryOutcome {
    /// Another process has removed it.
    Absent,
    Removed,
    /// It is a directory, which must be emptied first.
    Opened(OpenLevel),
}

/// Removes the entry, or opens it if it is a directory. A listing may not report the kind, and the kind may
/// have changed since.
fn remove_or_open(holder: EntryParent<'_>, name: OsString, kind: FileType) -> io::Result<EntryOutcome> {
    if kind != FileType::Directory && kind != FileType::Unknown {
        match remove_forced(holder, &name, || syscalls::unlink(holder.dir, &name)) {
            Ok(()) => return Ok(EntryOutcome::Removed),
            Err(Errno::NOENT) => return Ok(EntryOutcome::Absent),
            Err(Errno::ISDIR) => {}
            Err(source) => return Err(removal_error(source)),
        }
    }
    let open = || syscalls::open_on_same_mount(holder.dir, &name, OPEN_DIR_FLAGS);
    let opened = match open() {
        Err(Errno::ACCESS) => grant_entry_access(holder, &name).and_then(|()| open()),
        opened => opened,
    };
    match opened {
        Ok(fd) => Ok(EntryOutcome::Opened(OpenLevel::new(name, fd)?)),
        Err(Errno::NOENT) => Ok(EntryOutcome::Absent),
        // Any kind but a directory. This recurses at most once.
        Err(Errno::NOTDIR | Errno::LOOP) if kind != FileType::RegularFile => {
            remove_or_open(holder, name, FileType::RegularFile)
        }
        Err(source) => Err(removal_error(source)),
    }
}

/// Translates the error number of a removal.
fn removal_error(errno: Errno) -> io::Error {
    match errno {
        Errno::XDEV | Errno::BUSY => RejectReason::MountPoint.into(),
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
    let forbidden = match remove() {
        Err(forbidden @ (Errno::PERM | Errno::ACCESS)) => forbidden,
        result => return result,
    };
    if holder.is_inside {
        clear_inode_flags(holder.dir);
        grant_owner_access(holder.dir);
    }
    // Only files and directories, which can be opened without side effects: devices and pipes have no such
    // flags.
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
    let locked = syscalls::open_on_same_mount(holder.dir, name, OFlags::PATH | OFlags::DIRECTORY)?;
    let mode = RawMode::from_raw_mode(syscalls::stat(&locked)?.st_mode);
    syscalls::set_mode_by_proc_path(&locked, mode | RawMode::RWXU)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deep_path_is_shown_without_its_middle() {
        let temporary = tempfile::tempdir().unwrap();
        let level = |index: usize| {
            let fd = syscalls::open(temporary.path(), OPEN_DIR_FLAGS).unwrap();
            OpenLevel::new(format!("l{index}").into(), fd).unwrap()
        };
        let hook = &mut |_| ControlFlow::Continue(());
        let mut removal = TreeRemoval { levels: vec![level(0)], progress: RemovalProgress::default(), hook };
        assert_eq!(removal.display_path(Path::new("/t")), Path::new("/t"));
        removal.levels.extend((1..20).map(level));
        assert_eq!(removal.display_path(Path::new("/t")), Path::new("/t/…/l12/l13/l14/l15/l16/l17/l18/l19"));
    }
}

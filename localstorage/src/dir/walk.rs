//! The walk over a tree that other processes change at the same time.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::OPEN_DIR_FLAGS;
use super::entries::entry_kind;
use crate::error::resolve_error;
use crate::metadata::{FileKind, Metadata};
use crate::syscalls::{self, DirListing};

/// The number of subdirectories of a directory that are known at once. A walk keeps a descriptor of each larger
/// directory on its way down: a tree in which a thousand of these are below each other has 65 million directories.
const MAX_PENDING: usize = if cfg!(test) { 3 } else { 1 << 16 };

/// The number of directories of the path in an error.
const SHOWN_LEVELS: usize = 8;

/// A walk over everything in a directory, by descriptors alone, while other processes may change it.
///
/// A walk yields the entries of a directory that are not directories, then its subdirectories, each of which the
/// caller enters or passes over, and at the end the directory itself. A directory with more than 65,536
/// subdirectories is listed in parts. An entry that is created, removed or renamed during the walk may be missing, or
/// be there under both names; anything else is there once.
///
/// No symbolic link is followed, and nothing is opened that is mounted in the tree, not even another directory of the
/// same file system. A walk takes four descriptors and no stack, however deep the tree is: of each directory on the
/// way down it keeps the names of at most 65,536 subdirectories, and a descriptor if there are more. It returns by
/// `..`. If that is not the directory from the way down, since another one was moved or removed, it goes on in the
/// deepest directory above that is where it was.
///
/// ```
/// use nodekeel_localstorage::{OpenOutcome, TreeWalk, WalkEvent};
///
/// # let temporary = tempfile::tempdir()?;
/// # std::fs::create_dir(temporary.path().join("below"))?;
/// # std::fs::write(temporary.path().join("below/file"), "")?;
/// let mut walk = TreeWalk::open(std::fs::File::open(temporary.path())?)?;
/// let mut files = Vec::new();
/// while let Some(event) = walk.next_event()? {
///     match event {
///         WalkEvent::Entry { name, .. } => files.push(walk.path(Some(&name))),
///         WalkEvent::Directory { name } => {
///             if let OpenOutcome::Opened(dir) = walk.open_dir(&name)? {
///                 walk.enter(&name, dir)?;
///             }
///         }
///         WalkEvent::Leave { .. } | WalkEvent::Moved { .. } => {}
///     }
/// }
/// assert_eq!(files, [std::path::Path::new("below/file")]);
/// # Ok::<(), anyhow::Error>(())
/// ```
///
/// *Source:* openat2(2), `RESOLVE_NO_XDEV`; getdents(2).
#[derive(Debug)]
pub struct TreeWalk {
    top: OwnedFd,
    /// The directory in which the walk is.
    at: OwnedFd,
    /// The directories on the way down, from the top, which has no name.
    levels: Vec<WalkLevel>,
    /// The reason why a directory could not be left by `..`.
    failure: Option<io::Error>,
}

/// A step of a [`TreeWalk`].
#[derive(Debug)]
#[allow(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum WalkEvent {
    /// An entry of the directory in which the walk is. It was not a directory when it was listed.
    Entry {
        /// The name.
        name: OsString,
        /// The kind.
        kind: FileKind,
    },
    /// A subdirectory of the directory in which the walk is. It is passed over, unless the caller
    /// [enters](TreeWalk::enter) it.
    Directory {
        /// The name.
        name: OsString,
    },
    /// Everything in a directory has been visited. The walk is in the one above.
    Leave {
        /// The name; the top, which is left last, has none.
        name: OsString,
        /// The directory.
        dir: OwnedFd,
    },
    /// A directory was moved away or removed before everything in it was visited. The walk is in the one above.
    Moved {
        /// The name.
        name: OsString,
        /// The number of directories that are left with this event: this one, and those that were entered in it.
        levels: usize,
    },
}

/// The result of opening an entry of a tree.
#[derive(Debug)]
#[allow(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum OpenOutcome {
    /// The directory is open.
    Opened(OwnedFd),
    /// The directory was removed, or an entry of another kind has replaced it.
    Vanished,
    /// Something is mounted on it.
    MountPoint,
}

/// A directory on the way down.
#[derive(Debug)]
struct WalkLevel {
    name: OsString,
    /// To recognize it.
    metadata: Metadata,
    /// None after its end.
    listing: Option<DirListing>,
    /// The listed subdirectories that are still to be visited.
    pending: Vec<OsString>,
}

impl WalkLevel {
    fn new(name: &OsStr, dir: &OwnedFd) -> io::Result<Self> {
        let metadata = Metadata::from_stat(&syscalls::stat(dir)?);
        let listing = Some(DirListing::new(dir.try_clone()?)?);
        Ok(Self { name: name.to_owned(), metadata, listing, pending: Vec::new() })
    }

    /// The next entry that is not a directory; none while enough directories are known, and at the end.
    fn next_entry(&mut self, dir: &OwnedFd) -> io::Result<Option<WalkEvent>> {
        // With so many names in memory, the listing pauses until their directories are visited.
        while self.pending.len() < MAX_PENDING
            && let Some(listing) = &mut self.listing
        {
            let Some(entry) = listing.next().transpose()? else {
                // Closes its descriptor: only a paused listing keeps one on the way down.
                self.listing = None;
                break;
            };
            if matches!(entry.file_name().to_bytes(), b"." | b"..") {
                continue;
            }
            let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
            match entry_kind(dir, &name, entry.file_type())? {
                // The entry was removed after it was listed.
                None => {}
                Some(FileKind::Dir) => self.pending.push(name),
                Some(kind) => return Ok(Some(WalkEvent::Entry { name, kind })),
            }
        }
        Ok(None)
    }

    /// Opens this directory as the parent of another one; none if it is not.
    fn open_from(&self, below: &OwnedFd) -> io::Result<Option<OwnedFd>> {
        let above = match syscalls::open_parent(below) {
            // It was removed, or its mode forbids that.
            Err(Errno::NOENT | Errno::ACCESS) => return Ok(None),
            above => above?,
        };
        // The kernel resolves `..` to the present parent, which is another one after a move.
        Ok(self.is_at(&above)?.then_some(above))
    }

    fn is_at(&self, dir: &OwnedFd) -> rustix::io::Result<bool> {
        Ok(Metadata::from_stat(&syscalls::stat(dir)?).is_same_file(&self.metadata))
    }
}

impl TreeWalk {
    /// A walk over everything in a directory.
    ///
    /// # Errors
    /// The kernel's, of opening the directory.
    pub fn open(dir: impl AsFd) -> io::Result<Self> {
        let top = syscalls::open_beneath(dir, Path::new("."), OPEN_DIR_FLAGS).map_err(resolve_error)?;
        Self::new(top)
    }

    /// A walk over one entry of a directory, which is yielded as a directory even if it is none. It is at depth 2.
    pub(super) fn open_entry(dir: impl AsFd, name: &OsStr) -> io::Result<Self> {
        let mut walk = Self::new(dir.as_fd().try_clone_to_owned()?)?;
        for level in &mut walk.levels {
            // The parent is not listed: this entry is all that is visited in it.
            (level.listing, level.pending) = (None, vec![name.to_owned()]);
        }
        Ok(walk)
    }

    fn new(top: OwnedFd) -> io::Result<Self> {
        let level = WalkLevel::new(OsStr::new(""), &top)?;
        Ok(Self { at: top.try_clone()?, top, levels: vec![level], failure: None })
    }

    /// The next event; none at the end.
    ///
    /// # Errors
    /// The kernel's, of listing the directory in which the walk is, or of leaving one. After an error the walk can go
    /// on with what it has listed.
    pub fn next_event(&mut self) -> io::Result<Option<WalkEvent>> {
        // The caller has received the event of leaving first, and so knows in which directory the walk is.
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        let Some(level) = self.levels.last_mut() else { return Ok(None) };
        if let Some(entry) = level.next_entry(&self.at)? {
            return Ok(Some(entry));
        }
        match level.pending.pop() {
            Some(name) => Ok(Some(WalkEvent::Directory { name })),
            None => self.leave().map(Some),
        }
    }

    /// Opens a subdirectory of the directory in which the walk is, for reading.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open_dir(&self, name: &OsStr) -> io::Result<OpenOutcome> {
        self.open_with(name, OPEN_DIR_FLAGS)
    }

    /// Opens an entry of the directory in which the walk is, of any kind, with `O_PATH`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open_path(&self, name: &OsStr) -> io::Result<OpenOutcome> {
        self.open_with(name, OFlags::PATH | OFlags::NOFOLLOW)
    }

    fn open_with(&self, name: &OsStr, flags: OFlags) -> io::Result<OpenOutcome> {
        match syscalls::open_on_same_mount(&self.at, name, flags) {
            Ok(file) => Ok(OpenOutcome::Opened(file)),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(OpenOutcome::Vanished),
            Err(Errno::XDEV) => Ok(OpenOutcome::MountPoint),
            Err(errno) => Err(resolve_error(errno)),
        }
    }

    /// Enters a subdirectory of the directory in which the walk is, also one that was visited already.
    ///
    /// # Errors
    /// The kernel's; the directory is not entered then.
    pub fn enter(&mut self, name: &OsStr, dir: OwnedFd) -> io::Result<()> {
        self.levels.push(WalkLevel::new(name, &dir)?);
        self.at = dir;
        Ok(())
    }

    /// The directory in which the walk is.
    pub fn dir(&self) -> BorrowedFd<'_> {
        self.at.as_fd()
    }

    /// The number of directories that were entered and not left, with the top; 0 at the end.
    pub fn depth(&self) -> usize {
        self.levels.len()
    }

    /// The path of an entry of the directory in which the walk is, or of that directory itself, relative to the top.
    pub fn path(&self, entry: Option<&OsStr>) -> PathBuf {
        self.levels.iter().skip(1).map(|level| level.name.as_os_str()).chain(entry).collect()
    }

    /// The same path for an error, below `top`, which is the path at this depth; a long one without its middle.
    pub(super) fn display_path(&self, (top, depth): (&Path, usize), entry: Option<&OsStr>) -> PathBuf {
        let below = self.levels.get(depth..).unwrap_or_default();
        let mut path = top.to_owned();
        if below.len() > SHOWN_LEVELS {
            path.push("…");
        }
        path.extend(below[below.len().saturating_sub(SHOWN_LEVELS)..].iter().map(|level| &level.name));
        path.extend(entry);
        path
    }

    fn leave(&mut self) -> io::Result<WalkEvent> {
        let above = match self.levels.as_slice() {
            [.., above, _] => above.open_from(&self.at),
            _ => Ok(None),
        };
        match above {
            Ok(Some(above)) => Ok(self.return_to(above, self.levels.len() - 1)),
            // The directory was moved or removed: the walk returns to the deepest one above that is still in place.
            Ok(None) => self.descend_again(),
            Err(error) => {
                self.failure = Some(error);
                self.descend_again()
            }
        }
    }

    /// Leaves the lowest directory, and those above it that are no longer where they were: descends from the top.
    fn descend_again(&mut self) -> io::Result<WalkEvent> {
        let above = self.levels.len().saturating_sub(1);
        // Without a descriptor there is no directory in which the walk could go on: it ends.
        let at = self.top.try_clone().inspect_err(|_| self.levels.clear());
        let (mut at, mut depth) = (at?, above.min(1));
        for level in self.levels.iter().take(above).skip(1) {
            // The inode is compared, too: another directory may have the name by now.
            match syscalls::open_on_same_mount(&at, &level.name, OPEN_DIR_FLAGS) {
                Ok(below) if level.is_at(&below) == Ok(true) => at = below,
                _ => break,
            }
            depth += 1;
        }
        Ok(self.return_to(at, depth))
    }

    /// Goes to a directory on the way down, which is at this depth.
    fn return_to(&mut self, at: OwnedFd, depth: usize) -> WalkEvent {
        let dir = std::mem::replace(&mut self.at, at);
        let levels = self.levels.len().saturating_sub(depth);
        let name = self.levels.drain(depth..).next().map(|level| level.name).unwrap_or_default();
        // The lowest level was complete when it was left; those above it were not.
        if levels > 1 { WalkEvent::Moved { name, levels } } else { WalkEvent::Leave { name, dir } }
    }
}

#[cfg(test)]
#[path = "walk_test.rs"]
mod tests;

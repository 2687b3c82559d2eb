//! A directory that is held open: everything below is reached through its descriptor.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;

use crate::calls::{self, Listing, Location};
use crate::error::{Error, Operation, Refusal, resolved};
use crate::metadata::{Entry, FileKind, Metadata, Mode};
use crate::name::{self, Name};

mod remove;
mod replace;

pub use remove::Removed;

/// What [`Dir::read`] reads at most: 64 MiB. A larger file than any that a node's configuration consists of, and a
/// smaller one than the memory of the smallest node.
pub const READ_LIMIT: u64 = 64 << 20;

const LISTABLE: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY);

/// What a [rename](Dir::rename) does where the new name is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rename {
    /// What has the name is replaced: a file by a file, an empty directory by a directory.
    Replace,
    /// The rename fails.
    Exclusive,
}

/// A directory that is held open.
///
/// Relative paths are one or more [names](Name) with a slash between them; anything else (`..`, an absolute path, an
/// empty component, a NUL byte) is refused before the kernel sees it. The kernel resolves them beneath the descriptor
/// and through no symbolic or magic link (`openat2` with `RESOLVE_BENEATH`, `NO_SYMLINKS` and `NO_MAGICLINKS`), so
/// nothing below an untrusted directory leads out of it, even while it changes. The empty path is the directory itself
/// where a directory is asked for.
///
/// What changes a directory returns after an `fsync` of it: what was reported as done survives a power cut. Every
/// change can be killed at any point and made again.
///
/// All calls block: from async code, make them on a thread that may.
///
/// ```
/// use nodekeel_localstorage::{Dir, Mode};
///
/// # let temporary = tempfile::tempdir()?;
/// let dir = Dir::open(temporary.path())?;
/// let node = dir.ensure_dir("node/credentials", Mode::PRIVATE_DIR)?;
/// node.write("key.pem", b"secret", Mode::PRIVATE_FILE)?;
/// assert_eq!(dir.read("node/credentials/key.pem")?, b"secret");
/// assert!(dir.read("../etc/passwd").unwrap_err().is_invalid_path());
/// # Ok::<(), anyhow::Error>(())
/// ```
///
/// *Source:* openat2(2), rename(2), fsync(2), `linux/openat2.h`.
pub struct Dir {
    fd: OwnedFd,
    path: PathBuf,
}

/// The directory that a relative path's last name is in.
#[derive(Debug)]
enum Parent<'a> {
    This(BorrowedFd<'a>),
    Below(OwnedFd),
}

impl AsFd for Parent<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::This(fd) => *fd,
            Self::Below(fd) => fd.as_fd(),
        }
    }
}

/// Reads through the failpoints.
struct Reading<'a>(BorrowedFd<'a>);

impl io::Read for Reading<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(calls::read(self.0, buffer)?)
    }
}

impl Dir {
    /// Opens a directory by a path of the caller's own. It is trusted: links in it are followed.
    ///
    /// # Errors
    /// [`Operation::Open`]; among others where there is none, or where it is no directory.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let fd = calls::open(path, LISTABLE).map_err(|source| Error::new(Operation::Open, path, source))?;
        Ok(Self { fd, path: path.to_owned() })
    }

    /// A directory that somebody else has opened, and how to call it in errors.
    pub fn from_fd(fd: OwnedFd, path: impl Into<PathBuf>) -> Self {
        Self { fd, path: path.into() }
    }

    /// What it was called when it was opened; for people, and for programs that take nothing but a path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The same directory, held open once more.
    ///
    /// # Errors
    /// [`Operation::Open`], where the process may open no more files.
    pub fn try_clone(&self) -> Result<Self, Error> {
        let fd = self.fd.try_clone().map_err(|source| Error::new(Operation::Open, &self.path, source))?;
        Ok(Self { fd, path: self.path.clone() })
    }

    /// Opens a directory below.
    ///
    /// # Errors
    /// [`Operation::Open`]; [`is_not_found`](Error::is_not_found), [`is_symlink`](Error::is_symlink) and
    /// [`is_not_a_directory`](Error::is_not_a_directory) tell what is there.
    pub fn open_dir(&self, path: impl AsRef<Path>) -> Result<Self, Error> {
        let fd = self.open_beneath(path.as_ref(), LISTABLE, Operation::Open)?;
        Ok(Self { fd, path: self.full(path.as_ref()) })
    }

    /// Opens a regular file below for reading.
    ///
    /// # Errors
    /// [`Operation::Open`]; also [`is_not_a_file`](Error::is_not_a_file).
    pub fn open_file(&self, path: impl AsRef<Path>) -> Result<File, Error> {
        self.open_regular(path.as_ref(), Operation::Open).map(|(fd, _)| fd.into())
    }

    /// Opens a directory below, and creates it where it is missing, with those above it.
    ///
    /// The directory has exactly that mode afterwards, also where it was there before; those above it only where they
    /// are created (by a call that is killed between the two, with what the umask leaves of it: place a tree to repair
    /// that). All of them are durable.
    ///
    /// # Errors
    /// [`Operation::CreateDir`]; [`is_not_a_directory`](Error::is_not_a_directory) and
    /// [`is_symlink`](Error::is_symlink) tell of something else in its place.
    pub fn ensure_dir(&self, path: impl AsRef<Path>, mode: Mode) -> Result<Self, Error> {
        let path = path.as_ref();
        let wrong = |source| Error::new(Operation::CreateDir, self.full(path), source);
        if path.as_os_str().is_empty() {
            self.set_mode(mode).map_err(wrong)?;
            return self.try_clone();
        }
        name::split(path).map_err(|invalid| wrong(invalid.into()))?;
        let mut dir = Self { fd: self.fd.try_clone().map_err(wrong)?, path: self.path.clone() };
        for name in path.as_os_str().as_bytes().split(|&byte| byte == b'/').map(OsStr::from_bytes) {
            dir = dir.ensure_level(name, mode).map_err(wrong)?;
        }
        dir.set_mode(mode).map_err(wrong)?;
        Ok(dir)
    }

    fn ensure_level(&self, name: &OsStr, mode: Mode) -> io::Result<Self> {
        let created = match calls::make_dir(self, name, mode.raw()) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(source) => return Err(source.into()),
        };
        let fd = match calls::open_beneath(self, Path::new(name), LISTABLE) {
            // The umask has shut out the owner.
            Err(Errno::ACCESS) if created => {
                let shut = calls::open_beneath(self, Path::new(name), OFlags::PATH | OFlags::DIRECTORY);
                calls::set_mode_of_path(shut.map_err(resolved)?, Mode::PRIVATE_DIR.raw())?;
                calls::open_beneath(self, Path::new(name), LISTABLE)
            }
            opened => opened,
        };
        let level = Self { fd: fd.map_err(resolved)?, path: self.path.join(name) };
        if created {
            level.set_mode(mode)?;
        }
        // Whoever created it may have been killed before this.
        calls::sync(self)?;
        Ok(level)
    }

    fn set_mode(&self, mode: Mode) -> io::Result<()> {
        // Not where it has the mode: the file system may be read-only.
        if Mode::of(calls::stat(self)?.st_mode) != mode {
            calls::set_mode(self, mode.raw())?;
            calls::sync(self)?;
        }
        Ok(())
    }

    /// Reads a regular file of at most [`READ_LIMIT`].
    ///
    /// # Errors
    /// As [`read_at_most`](Self::read_at_most).
    pub fn read(&self, path: impl AsRef<Path>) -> Result<Vec<u8>, Error> {
        self.read_at_most(path, READ_LIMIT)
    }

    /// Reads a regular file of at most so many bytes.
    ///
    /// # Errors
    /// [`Operation::Read`]; [`is_not_found`](Error::is_not_found), [`is_not_a_file`](Error::is_not_a_file),
    /// [`is_too_large`](Error::is_too_large).
    pub fn read_at_most(&self, path: impl AsRef<Path>, limit: u64) -> Result<Vec<u8>, Error> {
        let path = path.as_ref();
        let (fd, metadata) = self.open_regular(path, Operation::Read)?;
        let wrong = |source: io::Error| Error::new(Operation::Read, self.full(path), source);
        let mut content = Vec::new();
        if metadata.size <= limit {
            // A byte more than it should have, so that the end is seen without growing.
            content =
                Vec::with_capacity(usize::try_from(metadata.size).unwrap_or_default().saturating_add(1));
            Reading(fd.as_fd()).take(limit.saturating_add(1)).read_to_end(&mut content).map_err(wrong)?;
        }
        // It may have grown meanwhile; and the size of what is generated on reading is none.
        if metadata.size > limit || content.len() as u64 > limit {
            return Err(wrong(Refusal::TooLarge { limit }.into()));
        }
        Ok(content)
    }

    fn open_regular(&self, path: &Path, operation: Operation) -> Result<(OwnedFd, Metadata), Error> {
        // Neither a pipe without a writer nor a terminal shall hold up, or take over, who opens it.
        let fd = self.open_beneath(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY, operation)?;
        let wrong = |source: io::Error| Error::new(operation, self.full(path), source);
        let metadata = Metadata::of(&calls::stat(&fd).map_err(|source| wrong(source.into()))?);
        if metadata.kind != FileKind::File {
            return Err(wrong(Refusal::NotAFile.into()));
        }
        Ok((fd, metadata))
    }

    /// What is in the directory, sorted by name; without `.`, `..`, and files that are being written.
    ///
    /// # Errors
    /// [`Operation::List`].
    pub fn list(&self) -> Result<Vec<Entry>, Error> {
        self.entries().map_err(|source| Error::new(Operation::List, &self.path, source))
    }

    fn entries(&self) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for entry in Listing::of(self)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." || name::is_sibling(name.as_bytes()) {
                continue;
            }
            let kind = match FileKind::from(entry.file_type()) {
                FileKind::Unknown => match calls::stat_at(self, name) {
                    Ok(stat) => Metadata::of(&stat).kind,
                    Err(Errno::NOENT) => continue,
                    Err(source) => return Err(source.into()),
                },
                kind => kind,
            };
            entries.push(Entry::new(Name::try_new(name)?, kind, entry.ino()));
        }
        entries.sort_unstable();
        Ok(entries)
    }

    /// What is known about something below; about a symbolic link itself, where that is the last name.
    ///
    /// # Errors
    /// [`Operation::Inspect`].
    pub fn metadata(&self, path: impl AsRef<Path>) -> Result<Metadata, Error> {
        let path = path.as_ref();
        let fd = self.open_beneath(path, OFlags::PATH, Operation::Inspect)?;
        let stat =
            calls::stat(fd).map_err(|source| Error::new(Operation::Inspect, self.full(path), source))?;
        Ok(Metadata::of(&stat))
    }

    /// Whether there is something below of that name: also a symbolic link, wherever it points to.
    ///
    /// # Errors
    /// [`Operation::Inspect`], where that can't be told.
    pub fn exists(&self, path: impl AsRef<Path>) -> Result<bool, Error> {
        match self.metadata(path) {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Renames something below this directory to a name below the other one, on the same file system. Durable in both:
    /// in the new place first, so that it is never in none.
    ///
    /// # Errors
    /// [`Operation::Rename`]; [`is_already_exists`](Error::is_already_exists) with [`Rename::Exclusive`]. Where only a
    /// sync at the end fails, it has the new name and may have the old one after a power cut.
    pub fn rename(
        &self,
        from: impl AsRef<Path>,
        dir: &Self,
        to: impl AsRef<Path>,
        taken: Rename,
    ) -> Result<(), Error> {
        let (from, to) = (from.as_ref(), to.as_ref());
        let (old, old_name) = self.parent(from, Operation::Rename)?;
        let (new, new_name) = dir.parent(to, Operation::Rename)?;
        let wrong = |source: Errno| Error::new(Operation::Rename, self.full(from), source);
        let flags = match taken {
            Rename::Replace => RenameFlags::empty(),
            Rename::Exclusive => RenameFlags::NOREPLACE,
        };
        let (source, target) =
            (Location { dir: old.as_fd(), name: old_name }, Location { dir: new.as_fd(), name: new_name });
        calls::rename(source, target, flags).map_err(wrong)?;
        calls::sync(&new).map_err(wrong)?;
        calls::sync(&old).map_err(wrong)
    }

    /// Removes what is no directory: a file, a link itself, a pipe, a socket. Tells whether there was something.
    ///
    /// # Errors
    /// [`Operation::Remove`].
    pub fn remove_file(&self, path: impl AsRef<Path>) -> Result<bool, Error> {
        let path = path.as_ref();
        let (parent, name) = match self.parent(path, Operation::Remove) {
            Err(error) if error.is_not_found() => return Ok(false),
            parent => parent?,
        };
        let wrong = |source: Errno| Error::new(Operation::Remove, self.full(path), source);
        let was_there = match calls::unlink(&parent, name) {
            Ok(()) => true,
            Err(Errno::NOENT) => false,
            Err(source) => return Err(wrong(source)),
        };
        // Also where nothing was there: whoever removed it may have been killed before this.
        calls::sync(&parent).map_err(wrong)?;
        Ok(was_there)
    }

    /// Makes the names in this directory durable; not the contents of its files.
    ///
    /// # Errors
    /// [`Operation::Sync`].
    pub fn sync(&self) -> Result<(), Error> {
        calls::sync(self).map_err(|source| Error::new(Operation::Sync, &self.path, source))
    }

    /// The path to show for a relative one.
    fn full(&self, path: &Path) -> PathBuf {
        if path.as_os_str().is_empty() { self.path.clone() } else { self.path.join(path) }
    }

    fn open_beneath(&self, path: &Path, flags: OFlags, operation: Operation) -> Result<OwnedFd, Error> {
        let wrong = |source: io::Error| Error::new(operation, self.full(path), source);
        if path.as_os_str().is_empty() && flags.intersects(OFlags::DIRECTORY | OFlags::PATH) {
            return calls::open_beneath(self, Path::new("."), flags)
                .map_err(|source| wrong(resolved(source)));
        }
        name::split(path).map_err(|invalid| wrong(invalid.into()))?;
        calls::open_beneath(self, path, flags).map_err(|source| wrong(resolved(source)))
    }

    fn parent<'a>(&self, path: &'a Path, operation: Operation) -> Result<(Parent<'_>, &'a OsStr), Error> {
        let wrong = |source: io::Error| Error::new(operation, self.full(path), source);
        let (parent, name) = name::split(path).map_err(|invalid| wrong(invalid.into()))?;
        if parent.as_os_str().is_empty() {
            return Ok((Parent::This(self.as_fd()), name));
        }
        let fd = calls::open_beneath(self, parent, LISTABLE).map_err(|source| wrong(resolved(source)))?;
        Ok((Parent::Below(fd), name))
    }
}

impl AsFd for Dir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl fmt::Debug for Dir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Dir").field(&self.path).finish()
    }
}

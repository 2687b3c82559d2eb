//! An open directory: everything below is reached through its descriptor.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::error::{Error, FileOperation, RejectReason, resolve_error};
use crate::file_name;
use crate::metadata::{FileKind, Metadata};
use crate::syscalls;

mod clone;
mod create;
mod entries;
mod remove;
mod replace;
mod trust;
mod walk;

#[cfg(any(test, feature = "testing"))]
pub use clone::fuzz_tree_stream;
pub use clone::{CloneSummary, FileCloner, Reflink};
pub use entries::RenameMode;
pub use remove::RemovalProgress;
pub use replace::FileReplacement;
pub use trust::{TrustError, check_file_owner};
pub use walk::{OpenOutcome, TreeWalk, WalkEvent};

/// The largest file that [`Dir::read`] reads: 64 MiB, more than any configuration file of a node and less
/// than the memory of the smallest node.
pub const READ_LIMIT: u64 = 64 << 20;

const OPEN_DIR_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY);

/// An open directory.
///
/// A relative path is one or more [names](crate::FileName) separated by slashes. Anything else (`..`, an absolute
/// path, an empty component, a NUL byte) is rejected before the kernel sees it. The kernel resolves the path
/// beneath the descriptor and through no symbolic or magic link (`openat2` with `RESOLVE_BENEATH`,
/// `NO_SYMLINKS` and `NO_MAGICLINKS`), so no path below an untrusted directory leads outside, even while the
/// directory changes. The empty path is the directory itself in calls that take a directory.
///
/// A call that changes a directory returns after an `fsync` of it: a reported change survives a power cut.
/// Every change can be killed at any point and repeated.
///
/// All calls block: async code makes them on a blocking thread.
///
/// ```
/// use nodekeel_localstorage::{Dir, FileMode};
///
/// # let temporary = tempfile::tempdir()?;
/// let dir = Dir::open(temporary.path())?;
/// let node = dir.ensure_dir("node/credentials", FileMode::PRIVATE_DIR)?;
/// node.write("key.pem", b"secret", FileMode::PRIVATE_FILE)?;
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

/// The directory that contains the last component of a relative path.
#[derive(Debug)]
enum ParentDir<'a> {
    Same(BorrowedFd<'a>),
    Below(OwnedFd),
}

impl AsFd for ParentDir<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Same(fd) => *fd,
            Self::Below(fd) => fd.as_fd(),
        }
    }
}

/// Reads a descriptor through the failpoints.
struct FailpointReader<'a>(BorrowedFd<'a>);

impl io::Read for FailpointReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(syscalls::read(self.0, buffer)?)
    }
}

impl Dir {
    /// Opens a directory by a trusted path: links in it are followed.
    ///
    /// # Errors
    /// [`FileOperation::Open`]; among others if the path does not exist or is not a directory.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let fd = syscalls::open(path, OPEN_DIR_FLAGS)
            .map_err(|source| Error::new(FileOperation::Open, path, source))?;
        Ok(Self { fd, path: path.to_owned() })
    }

    /// Wraps an open directory; errors show `path`.
    pub fn from_fd(fd: OwnedFd, path: impl Into<PathBuf>) -> Self {
        Self { fd, path: path.into() }
    }

    /// The path at the time of opening, for display and for programs that need a path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Duplicates the descriptor.
    ///
    /// # Errors
    /// [`FileOperation::Open`] if the process has reached its limit of open files.
    pub fn try_clone(&self) -> Result<Self, Error> {
        let fd = self.fd.try_clone().map_err(|source| Error::new(FileOperation::Open, &self.path, source))?;
        Ok(Self { fd, path: self.path.clone() })
    }

    /// Opens a directory below this one.
    ///
    /// # Errors
    /// [`FileOperation::Open`]; [`is_not_found`](Error::is_not_found), [`is_symlink`](Error::is_symlink) and
    /// [`is_not_a_directory`](Error::is_not_a_directory) distinguish the causes.
    pub fn open_dir(&self, path: impl AsRef<Path>) -> Result<Self, Error> {
        let fd = self.open_beneath(path.as_ref(), OPEN_DIR_FLAGS, FileOperation::Open)?;
        Ok(Self { fd, path: self.full_path(path.as_ref()) })
    }

    /// Opens a regular file below this directory for reading.
    ///
    /// # Errors
    /// [`FileOperation::Open`]; also [`is_not_a_file`](Error::is_not_a_file).
    pub fn open_file(&self, path: impl AsRef<Path>) -> Result<File, Error> {
        self.open_regular_file(path.as_ref(), OFlags::RDONLY, FileOperation::Open).map(|(fd, _)| fd.into())
    }

    /// Opens an existing regular file below this directory to read and write. The caller's writes are not durable
    /// until they are synced. To create a missing file, use [`open_or_create_file`](Self::open_or_create_file).
    ///
    /// # Errors
    /// Those of [`open_file`](Self::open_file).
    pub fn open_file_to_write(&self, path: impl AsRef<Path>) -> Result<File, Error> {
        self.open_regular_file(path.as_ref(), OFlags::RDWR, FileOperation::Open).map(|(fd, _)| fd.into())
    }

    /// Reads a regular file of at most [`READ_LIMIT`] bytes.
    ///
    /// # Errors
    /// Those of [`read_at_most`](Self::read_at_most).
    pub fn read(&self, path: impl AsRef<Path>) -> Result<Vec<u8>, Error> {
        self.read_at_most(path, READ_LIMIT)
    }

    /// Reads a regular file of at most `limit` bytes.
    ///
    /// # Errors
    /// [`FileOperation::Read`]; [`is_not_found`](Error::is_not_found),
    /// [`is_not_a_file`](Error::is_not_a_file), [`is_too_large`](Error::is_too_large).
    pub fn read_at_most(&self, path: impl AsRef<Path>, limit: u64) -> Result<Vec<u8>, Error> {
        let path = path.as_ref();
        let (fd, metadata) = self.open_regular_file(path, OFlags::RDONLY, FileOperation::Read)?;
        let to_error = |source: io::Error| Error::new(FileOperation::Read, self.full_path(path), source);
        let mut content = Vec::new();
        // A file that is too large by its size is rejected before memory is reserved for it.
        if metadata.size <= limit {
            // One byte more than the size, so that the end is detected without growing the buffer.
            content =
                Vec::with_capacity(usize::try_from(metadata.size).unwrap_or_default().saturating_add(1));
            FailpointReader(fd.as_fd())
                .take(limit.saturating_add(1))
                .read_to_end(&mut content)
                .map_err(to_error)?;
        }
        // The file may have grown since, and files generated on read report size 0.
        if metadata.size > limit || content.len() as u64 > limit {
            return Err(to_error(RejectReason::TooLarge { limit }.into()));
        }
        Ok(content)
    }

    fn open_regular_file(
        &self,
        path: &Path,
        access: OFlags,
        operation: FileOperation,
    ) -> Result<(OwnedFd, Metadata), Error> {
        // A pipe without a writer must not block the caller, and a terminal must not become its controlling terminal.
        let fd = self.open_beneath(path, access | OFlags::NONBLOCK | OFlags::NOCTTY, operation)?;
        let to_error = |source: io::Error| Error::new(operation, self.full_path(path), source);
        // The kind is checked on the descriptor: a check by name could see another file than the one that was opened.
        let metadata = Metadata::from_stat(&syscalls::stat(&fd).map_err(|source| to_error(source.into()))?);
        if metadata.kind != FileKind::File {
            return Err(to_error(RejectReason::NotAFile.into()));
        }
        Ok((fd, metadata))
    }

    /// Makes the entries of this directory durable, but not the contents of its files.
    ///
    /// # Errors
    /// [`FileOperation::Sync`].
    pub fn sync(&self) -> Result<(), Error> {
        syscalls::sync(self).map_err(|source| Error::new(FileOperation::Sync, &self.path, source))
    }

    /// The full path to display for a relative one.
    fn full_path(&self, path: &Path) -> PathBuf {
        if path.as_os_str().is_empty() { self.path.clone() } else { self.path.join(path) }
    }

    fn open_beneath(&self, path: &Path, flags: OFlags, operation: FileOperation) -> Result<OwnedFd, Error> {
        let to_error = |source: io::Error| Error::new(operation, self.full_path(path), source);
        if path.as_os_str().is_empty() && flags.intersects(OFlags::DIRECTORY | OFlags::PATH) {
            // openat2(2) fails with ENOENT for the empty path, so "." stands for the directory itself.
            return syscalls::open_beneath(self, Path::new("."), flags)
                .map_err(|source| to_error(resolve_error(source)));
        }
        // RESOLVE_BENEATH alone would permit a `..` that stays beneath the directory.
        file_name::split_last(path).map_err(|invalid| to_error(invalid.into()))?;
        syscalls::open_beneath(self, path, flags).map_err(|source| to_error(resolve_error(source)))
    }

    fn open_parent<'a>(
        &self,
        path: &'a Path,
        operation: FileOperation,
    ) -> Result<(ParentDir<'_>, &'a OsStr), Error> {
        let to_error = |source: io::Error| Error::new(operation, self.full_path(path), source);
        let (parent, name) = file_name::split_last(path).map_err(|invalid| to_error(invalid.into()))?;
        if parent.as_os_str().is_empty() {
            return Ok((ParentDir::Same(self.as_fd()), name));
        }
        // The calls on the name use this descriptor, so a parent that is renamed in between stays the same directory.
        let fd = syscalls::open_beneath(self, parent, OPEN_DIR_FLAGS)
            .map_err(|source| to_error(resolve_error(source)))?;
        Ok((ParentDir::Below(fd), name))
    }

    /// Locks this directory against all other callers of this, in this process and in others; `None` if one of them
    /// has the lock. It changes nothing on disk, and does not wait.
    ///
    /// # Errors
    /// [`FileOperation::Lock`] if the file system has no locks, or the process has reached its limit of open files.
    ///
    /// *Source:* flock(2).
    pub fn try_lock(&self) -> Result<Option<DirLock>, Error> {
        // The lock belongs to the open file: duplicates of this descriptor would share it.
        let lock = || {
            let file = syscalls::open_beneath(self, Path::new("."), OPEN_DIR_FLAGS)?;
            Ok(syscalls::try_lock(&file)?.then_some(DirLock(file)))
        };
        lock().map_err(|source: rustix::io::Errno| Error::new(FileOperation::Lock, &self.path, source))
    }
}

/// The lock of a directory, until it is dropped or the process ends.
///
/// Dropping it releases the lock at once. Closing the descriptor would not: a child that another thread is starting
/// keeps a copy of it, and so the lock, until it executes its program.
#[derive(Debug)]
pub struct DirLock(OwnedFd);

impl Drop for DirLock {
    fn drop(&mut self) {
        syscalls::unlock(&self.0);
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

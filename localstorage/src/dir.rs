//! An open directory: everything below is reached through its descriptor.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;

use crate::error::{Error, FileOperation, RejectReason, resolve_error};
use crate::file_name::{self, FileName};
use crate::metadata::{DirEntry, FileKind, FileMode, Metadata};
use crate::syscalls::{self, DirListing, EntryAt};

mod remove;
mod replace;

pub use remove::RemovalProgress;

/// The largest file that [`Dir::read`] reads: 64 MiB, more than any configuration file of a node and less
/// than the memory of the smallest node.
pub const READ_LIMIT: u64 = 64 << 20;

const OPEN_DIR_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY);

/// What a [rename](Dir::rename) does if the new name exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RenameMode {
    /// It replaces the existing entry: a file by a file, an empty directory by a directory.
    Replace,
    /// It fails (`RENAME_NOREPLACE`).
    NoReplace,
}

/// An open directory.
///
/// A relative path is one or more [names](FileName) separated by slashes. Anything else (`..`, an absolute
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
        self.open_regular_file(path.as_ref(), FileOperation::Open).map(|(fd, _)| fd.into())
    }

    /// Opens a directory below this one, and creates it and its parents if they are missing.
    ///
    /// The directory has exactly this mode afterwards, also if it existed before. Parents get the mode only
    /// when they are created; a call killed between creating a parent and setting its mode leaves the mode
    /// reduced by the umask, which creating a layout repairs. All of them are durable.
    ///
    /// # Errors
    /// [`FileOperation::CreateDir`]; [`is_not_a_directory`](Error::is_not_a_directory) and
    /// [`is_symlink`](Error::is_symlink) if something else has the name.
    pub fn ensure_dir(&self, path: impl AsRef<Path>, mode: FileMode) -> Result<Self, Error> {
        let path = path.as_ref();
        let to_error = |source| Error::new(FileOperation::CreateDir, self.full_path(path), source);
        if path.as_os_str().is_empty() {
            self.set_mode(mode).map_err(to_error)?;
            return self.try_clone();
        }
        file_name::split_last(path).map_err(|invalid| to_error(invalid.into()))?;
        let mut dir = Self { fd: self.fd.try_clone().map_err(to_error)?, path: self.path.clone() };
        for name in path.as_os_str().as_bytes().split(|&byte| byte == b'/').map(OsStr::from_bytes) {
            dir = dir.ensure_child(name, mode).map_err(to_error)?;
        }
        dir.set_mode(mode).map_err(to_error)?;
        Ok(dir)
    }

    fn ensure_child(&self, name: &OsStr, mode: FileMode) -> io::Result<Self> {
        let created = match syscalls::make_dir(self, name, mode.to_rustix()) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(source) => return Err(source.into()),
        };
        let fd = match syscalls::open_beneath(self, Path::new(name), OPEN_DIR_FLAGS) {
            // The umask has removed the permissions of the owner.
            Err(Errno::ACCESS) if created => {
                let locked = syscalls::open_beneath(self, Path::new(name), OFlags::PATH | OFlags::DIRECTORY);
                syscalls::set_mode_by_proc_path(
                    locked.map_err(resolve_error)?,
                    FileMode::PRIVATE_DIR.to_rustix(),
                )?;
                syscalls::open_beneath(self, Path::new(name), OPEN_DIR_FLAGS)
            }
            opened => opened,
        };
        let level = Self { fd: fd.map_err(resolve_error)?, path: self.path.join(name) };
        if created {
            level.set_mode(mode)?;
        }
        // The process that created it may have been killed before this.
        syscalls::sync(self)?;
        Ok(level)
    }

    fn set_mode(&self, mode: FileMode) -> io::Result<()> {
        // Only if the mode differs: the file system may be read-only.
        if FileMode::from_st_mode(syscalls::stat(self)?.st_mode) != mode {
            syscalls::set_mode(self, mode.to_rustix())?;
            syscalls::sync(self)?;
        }
        Ok(())
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
        let (fd, metadata) = self.open_regular_file(path, FileOperation::Read)?;
        let to_error = |source: io::Error| Error::new(FileOperation::Read, self.full_path(path), source);
        let mut content = Vec::new();
        if metadata.size <= limit {
            // One byte more than the size, so that the end is detected without growing the buffer.
            content =
                Vec::with_capacity(usize::try_from(metadata.size).unwrap_or_default().saturating_add(1));
            FailpointReader(fd.as_fd())
                .take(limit.saturating_add(1))
                .read_to_end(&mut content)
                .map_err(to_error)?;
        }
        // The file may have grown meanwhile, and files generated on read report size 0.
        if metadata.size > limit || content.len() as u64 > limit {
            return Err(to_error(RejectReason::TooLarge { limit }.into()));
        }
        Ok(content)
    }

    fn open_regular_file(&self, path: &Path, operation: FileOperation) -> Result<(OwnedFd, Metadata), Error> {
        // A pipe without a writer must not block the caller, and a terminal must not become its controlling
        // terminal.
        let fd = self.open_beneath(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY, operation)?;
        let to_error = |source: io::Error| Error::new(operation, self.full_path(path), source);
        let metadata = Metadata::from_stat(&syscalls::stat(&fd).map_err(|source| to_error(source.into()))?);
        if metadata.kind != FileKind::File {
            return Err(to_error(RejectReason::NotAFile.into()));
        }
        Ok((fd, metadata))
    }

    /// Lists the directory, sorted by name, without `.`, `..` and files being written.
    ///
    /// # Errors
    /// [`FileOperation::List`].
    pub fn list(&self) -> Result<Vec<DirEntry>, Error> {
        self.read_entries().map_err(|source| Error::new(FileOperation::List, &self.path, source))
    }

    fn read_entries(&self) -> io::Result<Vec<DirEntry>> {
        let mut entries = Vec::new();
        for entry in DirListing::reopen(self)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." || file_name::is_temp_file_name(name.as_bytes()) {
                continue;
            }
            let kind = match FileKind::from(entry.file_type()) {
                FileKind::Unknown => match syscalls::stat_at(self, name) {
                    Ok(stat) => Metadata::from_stat(&stat).kind,
                    Err(Errno::NOENT) => continue,
                    Err(source) => return Err(source.into()),
                },
                kind => kind,
            };
            entries.push(DirEntry::new(FileName::try_new(name)?, kind, entry.ino()));
        }
        entries.sort_unstable();
        Ok(entries)
    }

    /// The metadata of an entry below this directory; of the link itself if the last component is a symbolic
    /// link.
    ///
    /// # Errors
    /// [`FileOperation::Inspect`].
    pub fn metadata(&self, path: impl AsRef<Path>) -> Result<Metadata, Error> {
        let path = path.as_ref();
        let fd = self.open_beneath(path, OFlags::PATH, FileOperation::Inspect)?;
        let stat = syscalls::stat(fd)
            .map_err(|source| Error::new(FileOperation::Inspect, self.full_path(path), source))?;
        Ok(Metadata::from_stat(&stat))
    }

    /// Whether an entry exists below this directory; a symbolic link exists wherever it points.
    ///
    /// # Errors
    /// [`FileOperation::Inspect`] if that cannot be determined.
    pub fn exists(&self, path: impl AsRef<Path>) -> Result<bool, Error> {
        match self.metadata(path) {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether a file system is mounted on an entry below this directory, also one that is mounted elsewhere too (a
    /// bind mount). An entry that does not exist is not a mount point.
    ///
    /// # Errors
    /// [`FileOperation::Inspect`] if that cannot be determined.
    pub fn is_mount_point(&self, path: impl AsRef<Path>) -> Result<bool, Error> {
        let path = path.as_ref();
        let to_error = |source| Error::new(FileOperation::Inspect, self.full_path(path), source);
        let (parent, name) = match self.open_parent(path, FileOperation::Inspect) {
            Err(error) if error.is_not_found() => return Ok(false),
            parent => parent?,
        };
        match syscalls::open_on_same_mount(&parent, name, OFlags::PATH | OFlags::NOFOLLOW) {
            Ok(_) | Err(Errno::NOENT | Errno::LOOP) => Ok(false),
            Err(Errno::XDEV) => Ok(true),
            Err(source) => Err(to_error(source)),
        }
    }

    /// Renames an entry below this directory to a name below `dir` on the same file system. Both directories
    /// are synced, the new one first, so that the entry is never lost.
    ///
    /// # Errors
    /// [`FileOperation::Rename`]; [`is_already_exists`](Error::is_already_exists) with
    /// [`RenameMode::NoReplace`]. If only a sync at the end fails, the entry has the new name, and may have
    /// the old one after a power cut.
    pub fn rename(
        &self,
        from: impl AsRef<Path>,
        dir: &Self,
        to: impl AsRef<Path>,
        mode: RenameMode,
    ) -> Result<(), Error> {
        let (from, to) = (from.as_ref(), to.as_ref());
        let (old, old_name) = self.open_parent(from, FileOperation::Rename)?;
        let (new, new_name) = dir.open_parent(to, FileOperation::Rename)?;
        let to_error = |source: Errno| Error::new(FileOperation::Rename, self.full_path(from), source);
        let flags = match mode {
            RenameMode::Replace => RenameFlags::empty(),
            RenameMode::NoReplace => RenameFlags::NOREPLACE,
        };
        let (source, target) =
            (EntryAt { dir: old.as_fd(), name: old_name }, EntryAt { dir: new.as_fd(), name: new_name });
        syscalls::rename(source, target, flags).map_err(to_error)?;
        syscalls::sync(&new).map_err(to_error)?;
        syscalls::sync(&old).map_err(to_error)
    }

    /// Removes a non-directory: a file, a link itself, a pipe, a socket. Returns whether it existed.
    ///
    /// # Errors
    /// [`FileOperation::Remove`].
    pub fn remove_file(&self, path: impl AsRef<Path>) -> Result<bool, Error> {
        let path = path.as_ref();
        let (parent, name) = match self.open_parent(path, FileOperation::Remove) {
            Err(error) if error.is_not_found() => return Ok(false),
            parent => parent?,
        };
        let to_error = |source: Errno| Error::new(FileOperation::Remove, self.full_path(path), source);
        let existed = match syscalls::unlink(&parent, name) {
            Ok(()) => true,
            Err(Errno::NOENT) => false,
            Err(source) => return Err(to_error(source)),
        };
        // Also if nothing existed: the process that removed it may have been killed before this.
        syscalls::sync(&parent).map_err(to_error)?;
        Ok(existed)
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
            return syscalls::open_beneath(self, Path::new("."), flags)
                .map_err(|source| to_error(resolve_error(source)));
        }
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
        let fd = syscalls::open_beneath(self, parent, OPEN_DIR_FLAGS)
            .map_err(|source| to_error(resolve_error(source)))?;
        Ok((ParentDir::Below(fd), name))
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

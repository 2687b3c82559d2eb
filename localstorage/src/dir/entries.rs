//! The entries of a directory: listed, inspected, renamed, removed.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::{FileType, OFlags, RenameFlags};
use rustix::io::Errno;

use super::{Dir, OPEN_DIR_FLAGS};
use crate::error::{Error, FileOperation, RejectReason};
use crate::file_name::{self, FileName};
use crate::metadata::{DirEntry, FileKind, FileMode, FileOwner, Metadata};
use crate::syscalls::{self, DirListing, EntryAt};

/// The effect of a [rename](Dir::rename) if the new name exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RenameMode {
    /// Replaces the existing entry: a file by a file, an empty directory by a directory.
    Replace,
    /// Fails (`RENAME_NOREPLACE`).
    NoReplace,
}

/// The kind of a listed entry, which not every file system lists; none if it has just been removed.
pub(super) fn entry_kind(
    dir: impl AsFd,
    name: &OsStr,
    listed: FileType,
) -> rustix::io::Result<Option<FileKind>> {
    match FileKind::from(listed) {
        // The file system lists DT_UNKNOWN. *Source:* getdents(2).
        FileKind::Unknown => match syscalls::stat_at(dir, name) {
            Ok(stat) => Ok(Some(Metadata::from_stat(&stat).kind)),
            Err(Errno::NOENT) => Ok(None),
            Err(source) => Err(source),
        },
        kind => Ok(Some(kind)),
    }
}

impl Dir {
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
            let Some(kind) = entry_kind(self, name, entry.file_type())? else { continue };
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

    /// Returns whether an entry exists below this directory; a symbolic link exists wherever it points.
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

    /// Returns whether a file system is mounted on an entry below this directory, also one that is mounted
    /// elsewhere too (a bind mount). An entry that does not exist is not a mount point.
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
        // RESOLVE_NO_XDEV also fails at a bind mount of the same file system, whose device number does not differ.
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
        self.unlink_with(path.as_ref(), |parent, name| syscalls::unlink(parent, name))
    }

    /// Removes an empty directory. Returns whether it existed.
    ///
    /// # Errors
    /// [`FileOperation::Remove`]; [`is_not_empty`](Error::is_not_empty),
    /// [`is_not_a_directory`](Error::is_not_a_directory), [`is_mount_point`](Error::is_mount_point).
    pub fn remove_empty_dir(&self, path: impl AsRef<Path>) -> Result<bool, Error> {
        self.unlink_with(path.as_ref(), |parent, name| match syscalls::remove_dir(parent, name) {
            // Some file systems report this.
            Err(Errno::EXIST) => Err(Errno::NOTEMPTY),
            removed => removed,
        })
    }

    fn unlink_with(
        &self,
        path: &Path,
        unlink: impl FnOnce(BorrowedFd<'_>, &OsStr) -> rustix::io::Result<()>,
    ) -> Result<bool, Error> {
        let (parent, name) = match self.open_parent(path, FileOperation::Remove) {
            Err(error) if error.is_not_found() => return Ok(false),
            parent => parent?,
        };
        let to_error = |source: io::Error| Error::new(FileOperation::Remove, self.full_path(path), source);
        let existed = match unlink(parent.as_fd(), name) {
            Ok(()) => true,
            Err(Errno::NOENT) => false,
            Err(Errno::BUSY) => return Err(to_error(RejectReason::MountPoint.into())),
            Err(source) => return Err(to_error(source.into())),
        };
        // Also if nothing existed: the process that removed it may have been killed before this.
        syscalls::sync(&parent).map_err(|source| to_error(source.into()))?;
        Ok(existed)
    }

    /// Gives an entry exactly this mode: a file, a directory, a socket or a pipe. That of a file or a directory is
    /// durable.
    ///
    /// # Errors
    /// [`FileOperation::SetMode`]; [`is_symlink`](Error::is_symlink): a link has no mode.
    pub fn set_mode(&self, path: impl AsRef<Path>, mode: FileMode) -> Result<(), Error> {
        // Only if the mode differs: the file system may be read-only.
        self.change_inode(
            (FileOperation::SetMode, path.as_ref()),
            |found| found.mode != mode,
            |entry| syscalls::set_mode_by_proc_path(entry, mode.to_rustix()),
        )
    }

    /// Gives an entry to a user and a group: a file, a directory, a socket or a pipe. That of a file or a directory
    /// is durable. The kernel may remove the set-user-ID and set-group-ID bits: set the mode afterwards.
    ///
    /// # Errors
    /// [`FileOperation::SetOwner`]; [`is_denied`](Error::is_denied) without `CAP_CHOWN`, and
    /// [`is_symlink`](Error::is_symlink).
    pub fn set_owner(&self, path: impl AsRef<Path>, owner: FileOwner) -> Result<(), Error> {
        self.change_inode(
            (FileOperation::SetOwner, path.as_ref()),
            |found| found.owner() != owner,
            |entry| syscalls::set_owner(entry, owner),
        )
    }

    /// Changes an entry that differs, and syncs it.
    fn change_inode(
        &self,
        (operation, path): (FileOperation, &Path),
        differs: impl FnOnce(&Metadata) -> bool,
        change: impl FnOnce(BorrowedFd<'_>) -> rustix::io::Result<()>,
    ) -> Result<(), Error> {
        let entry = self.open_beneath(path, OFlags::PATH, operation)?;
        let change_and_sync = || -> io::Result<()> {
            let found = Metadata::from_stat(&syscalls::stat(&entry)?);
            if found.kind == FileKind::Symlink {
                return Err(RejectReason::Symlink.into());
            }
            if !differs(&found) {
                return Ok(());
            }
            // A sync needs more than a path, and the change may deny that.
            let readable = match found.kind {
                FileKind::File => Some(syscalls::reopen(&entry, OFlags::RDONLY)?),
                FileKind::Dir => Some(syscalls::reopen(&entry, OPEN_DIR_FLAGS)?),
                _ => None,
            };
            change(entry.as_fd())?;
            readable.map_or(Ok(()), |readable| Ok(syscalls::sync(readable)?))
        };
        change_and_sync().map_err(|source| Error::new(operation, self.full_path(path), source))
    }

    /// Returns whether the directory has no entries at all, not even files being written.
    ///
    /// # Errors
    /// [`FileOperation::List`].
    pub fn is_empty(&self) -> Result<bool, Error> {
        let to_error = |source: Errno| Error::new(FileOperation::List, &self.path, source);
        for entry in DirListing::reopen(self).map_err(to_error)? {
            if !matches!(entry.map_err(to_error)?.file_name().to_bytes(), b"." | b"..") {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

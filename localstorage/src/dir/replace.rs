//! Durable replacement of the content of a file.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use super::{Dir, ParentDir};
use crate::error::{Error, FileOperation};
use crate::file_name;
use crate::metadata::FileMode;
use crate::syscalls::{self, DirListing, EntryAt};

/// A file being written, before it replaces another. Its writer holds a lock as long as the descriptor is
/// open: an unlocked temporary file has lost its writer.
#[derive(Debug)]
struct TempFile {
    file: OwnedFd,
    name: OsString,
}

impl Dir {
    /// Replaces the content of a file durably: a reader sees the complete old content or the complete new
    /// one, also after a power cut. If the path is a symbolic link, the link is replaced, and its target
    /// stays unchanged.
    ///
    /// The content is written to a temporary file in the same directory (`.nodekeel-<16 hex digits>.new`),
    /// which gets the mode before the content, is synced and renamed; then the directory is synced, and on vfat
    /// the file again, whose entry has moved.
    /// Concurrent writers of the same file do not disturb each other: the last one wins. A failed write
    /// removes its temporary file; a killed one leaves it to
    /// [`remove_stale_files`](Self::remove_stale_files).
    ///
    /// The file has a new inode and exactly this mode. A file system without modes (vfat) keeps none; there,
    /// a rename is not atomic either: use a [step journal](crate::step_journal).
    ///
    /// # Errors
    /// [`FileOperation::Write`]; [`is_full`](Error::is_full) on a full disk or quota. The file has its old
    /// content. If only the last sync failed, it has the new content, which a power cut may undo.
    ///
    /// *Source:* rename(2), fsync(2).
    pub fn write(&self, path: impl AsRef<Path>, content: &[u8], mode: FileMode) -> Result<(), Error> {
        let path = path.as_ref();
        let (parent, name) = self.open_parent(path, FileOperation::Write)?;
        replace_file(&parent, name, (content, mode))
            .map_err(|source| Error::new(FileOperation::Write, self.full_path(path), source))
    }

    /// Removes the temporary files of killed writers in this directory, but not below it; returns how many.
    /// Files being written stay, since their writers hold a lock. Files that the caller may not open stay
    /// too, such as those of another user.
    ///
    /// # Errors
    /// [`FileOperation::RemoveStale`].
    pub fn remove_stale_files(&self) -> Result<usize, Error> {
        self.remove_unlocked_files()
            .map_err(|source| Error::new(FileOperation::RemoveStale, &self.path, source))
    }

    fn remove_unlocked_files(&self) -> io::Result<usize> {
        let mut removed = 0;
        for entry in DirListing::reopen(self)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if file_name::is_temp_file_name(name.as_bytes()) && remove_if_unlocked(self, name)? {
                removed += 1;
            }
        }
        if removed > 0 {
            syscalls::sync(self)?;
        }
        Ok(removed)
    }
}

/// Removes a temporary file unless its writer holds the lock.
fn remove_if_unlocked(dir: &Dir, name: &OsStr) -> io::Result<bool> {
    // Opened only for its lock. An entry that cannot be opened as a file has no writer of this crate.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = match syscalls::open_beneath(dir, Path::new(name), flags) {
        Ok(file) => file,
        Err(Errno::NOENT | Errno::ACCESS | Errno::LOOP | Errno::NXIO) => return Ok(false),
        Err(source) => return Err(source.into()),
    };
    if !syscalls::try_lock(&file)? {
        return Ok(false);
    }
    match syscalls::unlink(dir, name) {
        Ok(()) => Ok(true),
        // Renamed to its final name before it was locked here, or not a file.
        Err(Errno::NOENT | Errno::ISDIR) => Ok(false),
        Err(source) => Err(source.into()),
    }
}

fn replace_file(parent: &ParentDir<'_>, name: &OsStr, (content, mode): (&[u8], FileMode)) -> io::Result<()> {
    let temp = TempFile::create(parent)?;
    let target = EntryAt { dir: parent.as_fd(), name };
    if let Err(source) = temp.write_and_rename(target, (content, mode)) {
        // If that fails too, a later call removes the stale file. The first error is the useful one.
        let _ = syscalls::unlink(parent, &temp.name);
        return Err(source.into());
    }
    // FAT keeps the size and the first cluster of a file in its directory entry, and writes them with the file.
    if syscalls::is_on_fat(&temp.file)? {
        syscalls::sync(&temp.file)?;
    }
    syscalls::sync(parent)?;
    Ok(())
}

impl TempFile {
    fn create(parent: &ParentDir<'_>) -> rustix::io::Result<Self> {
        loop {
            let name = file_name::temp_file_name(random_u64()?);
            match syscalls::create_new_file(parent, &name) {
                Ok(file) => {
                    let temp = Self { file, name };
                    if temp.lock_unless_removed(parent)? {
                        return Ok(temp);
                    }
                }
                Err(Errno::EXIST) => {}
                Err(source) => return Err(source),
            }
        }
    }

    /// Acquires the lock. False if another process removed the file as stale between its creation and this.
    fn lock_unless_removed(&self, parent: &ParentDir<'_>) -> rustix::io::Result<bool> {
        let locked = syscalls::lock(&self.file).and_then(|()| syscalls::stat(&self.file));
        if locked.is_err() {
            let _ = syscalls::unlink(parent, &self.name);
        }
        Ok(locked?.st_nlink > 0)
    }

    fn write_and_rename(&self, target: EntryAt<'_>, content: (&[u8], FileMode)) -> rustix::io::Result<()> {
        let (content, mode) = content;
        syscalls::set_mode(&self.file, mode.to_rustix())?;
        syscalls::write_at(&self.file, content, 0)?;
        syscalls::sync(&self.file)?;
        syscalls::rename(EntryAt { dir: target.dir, name: &self.name }, target, RenameFlags::empty())
    }
}

fn random_u64() -> rustix::io::Result<u64> {
    let mut bytes = [0; 8];
    // Names need not be secret, only unlikely to exist: early in a boot this does not wait for the generator.
    getrandom(&mut bytes, GetRandomFlags::INSECURE)?;
    Ok(u64::from_ne_bytes(bytes))
}

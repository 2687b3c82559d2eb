//! Durable replacement of the content of a file.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use super::{Dir, ParentDir};
use crate::error::{Error, FileOperation, RejectReason};
use crate::file_name;
use crate::metadata::{FileMode, FileOwner};
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
        let mut replacement = self.replace_file(path, mode)?;
        replacement.append(content).map_err(|source| replacement.to_error(source))?;
        replacement.commit()
    }

    /// Starts to replace the content of a file, for content that is not in memory: like [`write`](Self::write), but
    /// the caller writes the content piece by piece, and commits it.
    ///
    /// ```
    /// use std::io::Read as _;
    /// use nodekeel_localstorage::{Dir, FileMode};
    ///
    /// # let temporary = tempfile::tempdir()?;
    /// let dir = Dir::open(temporary.path())?;
    /// let mut image = dir.replace_file("image", FileMode::PRIVATE_FILE)?.with_limit(1 << 20);
    /// std::io::copy(&mut std::io::repeat(7).take(5000), &mut image)?;
    /// assert!(!dir.exists("image")?);
    /// image.commit()?;
    /// assert_eq!(dir.metadata("image")?.size, 5000);
    /// # Ok::<(), anyhow::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`FileOperation::Write`].
    pub fn replace_file(&self, path: impl AsRef<Path>, mode: FileMode) -> Result<FileReplacement<'_>, Error> {
        let path = path.as_ref();
        let (parent, name) = self.open_parent(path, FileOperation::Write)?;
        let (name, path) = (name.to_owned(), self.full_path(path));
        match TempFile::create(&parent, mode) {
            Err(source) => Err(Error::new(FileOperation::Write, path, source)),
            Ok(temp) => Ok(FileReplacement {
                temp,
                parent,
                name,
                path,
                written: 0,
                limit: u64::MAX,
                state: WriteState::Open,
            }),
        }
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
    // The writer is at work. The kernel releases its lock with its last descriptor, also when it is killed.
    if !syscalls::try_lock(&file)? {
        return Ok(false);
    }
    // Removed under the lock: a writer that has not locked its new file yet sees afterwards that it has no link.
    match syscalls::unlink(dir, name) {
        Ok(()) => Ok(true),
        // Renamed to its final name before it was locked here, or not a file.
        Err(Errno::NOENT | Errno::ISDIR) => Ok(false),
        Err(source) => Err(source.into()),
    }
}

/// The new content of a file, which replaces the old one when it is [committed](Self::commit); until then, a reader
/// sees the old content. Dropping it without a commit discards it.
///
/// Write it as an [`io::Write`]: nothing is buffered, so pieces should not be small.
#[derive(Debug)]
pub struct FileReplacement<'a> {
    temp: TempFile,
    parent: ParentDir<'a>,
    name: OsString,
    /// For errors.
    path: PathBuf,
    written: u64,
    limit: u64,
    state: WriteState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteState {
    Open,
    /// A write has failed: the content is incomplete.
    Failed,
    /// The temporary file has the final name.
    Renamed,
}

impl FileReplacement<'_> {
    /// Bounds the content to this many bytes: the write that would exceed them fails, and so does the commit.
    /// Default: no bound.
    #[must_use]
    pub fn with_limit(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }

    /// Gives the new content to a user and a group. The file never has the new content and another owner.
    ///
    /// # Errors
    /// [`FileOperation::SetOwner`]; [`is_denied`](Error::is_denied) without `CAP_CHOWN`.
    pub fn set_owner(&mut self, owner: FileOwner) -> Result<(), Error> {
        // The kernel removes set-user-ID bits of a file that changes its owner.
        let mode = |file| syscalls::stat(file).map(|stat| FileMode::from_st_mode(stat.st_mode));
        let set = mode(&self.temp.file).and_then(|mode| {
            syscalls::set_owner(&self.temp.file, owner)?;
            syscalls::set_mode(&self.temp.file, mode.to_rustix())
        });
        set.map_err(|source| Error::new(FileOperation::SetOwner, &self.path, source))
    }

    /// Replaces the content of the file durably.
    ///
    /// # Errors
    /// [`FileOperation::Write`], also if a write has failed. The file has its old content. If only the last sync
    /// failed, it has the new content, which a power cut may undo.
    pub fn commit(mut self) -> Result<(), Error> {
        self.rename_durably().map_err(|source| self.to_error(source))
    }

    fn rename_durably(&mut self) -> io::Result<()> {
        if self.state == WriteState::Failed {
            return Err(RejectReason::Incomplete.into());
        }
        let dir = self.parent.as_fd();
        // Before the rename: a power cut could otherwise leave an empty or partial file under the final name.
        syscalls::sync(&self.temp.file)?;
        let (from, to) = (EntryAt { dir, name: &self.temp.name }, EntryAt { dir, name: &self.name });
        syscalls::rename(from, to, RenameFlags::empty())?;
        // From here on, dropping this must not unlink anything, also if a sync fails.
        self.state = WriteState::Renamed;
        // FAT keeps the size and the first cluster of a file in its directory entry, and writes them with the file.
        if syscalls::is_on_fat(&self.temp.file)? {
            syscalls::sync(&self.temp.file)?;
        }
        Ok(syscalls::sync(&self.parent)?)
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let end = self.written.saturating_add(bytes.len() as u64);
        let written = match end > self.limit {
            true => Err(RejectReason::TooLarge { limit: self.limit }.into()),
            false => syscalls::write_at(&self.temp.file, bytes, self.written).map_err(io::Error::from),
        };
        match written {
            Ok(()) => self.written = end,
            // The temporary file may have a part of this piece: it must not replace the old content.
            Err(_) => self.state = WriteState::Failed,
        }
        written
    }

    fn to_error(&self, source: io::Error) -> Error {
        Error::new(FileOperation::Write, &self.path, source)
    }
}

impl io::Write for FileReplacement<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.append(bytes).map(|()| bytes.len())
    }

    /// Nothing is buffered, and only [`commit`](FileReplacement::commit) makes it durable.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for FileReplacement<'_> {
    fn drop(&mut self) {
        if self.state != WriteState::Renamed {
            // If that fails too, a later call removes the stale file. The first error is the useful one.
            let _ = syscalls::unlink(&self.parent, &self.temp.name);
        }
    }
}

impl TempFile {
    fn create(parent: &ParentDir<'_>, mode: FileMode) -> rustix::io::Result<Self> {
        loop {
            let name = file_name::temp_file_name(random_u64()?);
            match syscalls::create_new_file(parent, &name) {
                Ok(file) => {
                    let temp = Self { file, name };
                    if temp.lock_unless_removed(parent)? {
                        // Before the first byte: a secret is never in a file with a wider mode.
                        syscalls::set_mode(&temp.file, mode.to_rustix())
                            .inspect_err(|_| _ = syscalls::unlink(parent, &temp.name))?;
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
}

fn random_u64() -> rustix::io::Result<u64> {
    let mut bytes = [0; 8];
    // Names need not be secret, only unlikely to exist: early in a boot this does not wait for the generator.
    getrandom(&mut bytes, GetRandomFlags::INSECURE)?;
    Ok(u64::from_ne_bytes(bytes))
}

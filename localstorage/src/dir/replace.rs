//! Durable replacement of a file's content.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use super::{Dir, Parent};
use crate::calls::{self, Listing, Location};
use crate::error::{Error, Operation};
use crate::metadata::Mode;
use crate::name;

/// A file that is being written, before it takes another's place. It is locked for as long as its descriptor is open:
/// one that nobody has locked has lost its writer.
#[derive(Debug)]
struct Sibling {
    file: OwnedFd,
    name: OsString,
}

impl Dir {
    /// Puts a new content in the place of a file's, durably: whoever reads sees the whole old content or the whole new
    /// one, and so does whoever reads after a power cut. What is there may be a symbolic link: the link is replaced,
    /// and nothing happens to what it points to.
    ///
    /// The content is written to a sibling (`.nodekeel-<16 hex digits>.new`) that has the mode from its birth on, is
    /// synced, renamed, and followed by a sync of the directory. Writers of the same file don't disturb each other:
    /// the last one wins. A failed write removes its sibling; a killed one leaves it to [`sweep`](Self::sweep).
    ///
    /// The file has a new inode and exactly that mode. Where a file system keeps no modes (vfat), none is set; there,
    /// a rename is not atomic either: use a [journal](crate::journal).
    ///
    /// # Errors
    /// [`Operation::Write`]; [`is_full`](Error::is_full) tells of a full disk or quota. The old content is there, unless
    /// only the last sync has failed: then it's the new one, which a power cut may undo.
    ///
    /// *Source:* rename(2), fsync(2).
    pub fn write(&self, path: impl AsRef<Path>, content: &[u8], mode: Mode) -> Result<(), Error> {
        let path = path.as_ref();
        let (parent, name) = self.parent(path, Operation::Write)?;
        replace(&parent, name, (content, mode))
            .map_err(|source| Error::new(Operation::Write, self.full(path), source))
    }

    /// Removes what killed writers have left in this directory (not below it), and tells how many. What is being
    /// written now stays: its writer holds a lock. So does what the caller may not open to see that, as what another
    /// user has left.
    ///
    /// # Errors
    /// [`Operation::Sweep`].
    pub fn sweep(&self) -> Result<usize, Error> {
        self.sweep_stale().map_err(|source| Error::new(Operation::Sweep, &self.path, source))
    }

    fn sweep_stale(&self) -> io::Result<usize> {
        let mut swept = 0;
        for entry in Listing::of(self)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name::is_sibling(name.as_bytes()) && remove_stale(self, name)? {
                swept += 1;
            }
        }
        if swept > 0 {
            calls::sync(self)?;
        }
        Ok(swept)
    }
}

/// Removes a sibling unless somebody writes it.
fn remove_stale(dir: &Dir, name: &OsStr) -> io::Result<bool> {
    // Opened for nothing but its lock. What is no file that may be opened is nobody's that writes.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = match calls::open_beneath(dir, Path::new(name), flags) {
        Ok(file) => file,
        Err(Errno::NOENT | Errno::ACCESS | Errno::LOOP | Errno::NXIO) => return Ok(false),
        Err(source) => return Err(source.into()),
    };
    if !calls::try_lock(&file)? {
        return Ok(false);
    }
    match calls::unlink(dir, name) {
        Ok(()) => Ok(true),
        // Renamed into its place before it was locked here, or no file.
        Err(Errno::NOENT | Errno::ISDIR) => Ok(false),
        Err(source) => Err(source.into()),
    }
}

fn replace(parent: &Parent<'_>, name: &OsStr, (content, mode): (&[u8], Mode)) -> io::Result<()> {
    let sibling = Sibling::create(parent)?;
    let target = Location { dir: parent.as_fd(), name };
    if let Err(source) = sibling.take_place_of(target, (content, mode)) {
        // Where that fails too, it is swept later: the first error tells more.
        let _ = calls::unlink(parent, &sibling.name);
        return Err(source.into());
    }
    calls::sync(parent)?;
    Ok(())
}

impl Sibling {
    fn create(parent: &Parent<'_>) -> rustix::io::Result<Self> {
        loop {
            let name = name::sibling(random()?);
            match calls::create_new(parent, &name) {
                Ok(file) => {
                    let sibling = Self { file, name };
                    if sibling.is_locked(parent)? {
                        return Ok(sibling);
                    }
                }
                Err(Errno::EXIST) => {}
                Err(source) => return Err(source),
            }
        }
    }

    /// Locks it. False where a sweep came first, between its creation and its lock, and has removed it.
    fn is_locked(&self, parent: &Parent<'_>) -> rustix::io::Result<bool> {
        let locked = calls::lock(&self.file).and_then(|()| calls::stat(&self.file));
        if locked.is_err() {
            let _ = calls::unlink(parent, &self.name);
        }
        Ok(locked?.st_nlink > 0)
    }

    fn take_place_of(&self, target: Location<'_>, content: (&[u8], Mode)) -> rustix::io::Result<()> {
        let (content, mode) = content;
        calls::set_mode(&self.file, mode.raw())?;
        calls::write_at(&self.file, content, 0)?;
        calls::sync(&self.file)?;
        calls::rename(Location { dir: target.dir, name: &self.name }, target, RenameFlags::empty())
    }
}

fn random() -> rustix::io::Result<u64> {
    let mut bytes = [0; 8];
    // Names need be no secret, only unlikely to be taken: early in a boot this doesn't wait for the generator.
    getrandom(&mut bytes, GetRandomFlags::INSECURE)?;
    Ok(u64::from_ne_bytes(bytes))
}

//! A plain directory as a volume.

use super::lifecycle::Lifecycle;
use super::marker::{MARKER, Mark};
use super::{Contents, DataVolume, Erase, State, VolumeError};
use crate::dir::Dir;

/// A directory of a file system that is mounted already: for development, for containers, for systems that mount their
/// data themselves.
///
/// It is ours once it bears the mark that `mount_new` writes last. Nothing is mounted, and unmounting forgets it.
///
/// ```
/// use nodekeel_localstorage::Dir;
/// use nodekeel_localstorage::volume::{DataVolume as _, Directory, Erase};
///
/// # let temporary = tempfile::tempdir()?;
/// let volume = Directory::new(Dir::open(temporary.path())?);
/// assert!(volume.mount_existing().is_err());
/// let data = volume.mount_new(Erase::Nothing)?;
/// # assert!(data.list()?.len() == 1);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug)]
pub struct Directory {
    dir: Dir,
    lifecycle: Lifecycle,
}

impl Directory {
    /// The directory that the data lies in.
    pub fn new(dir: Dir) -> Directory {
        Directory { dir, lifecycle: Lifecycle::default() }
    }

    fn make(&self, erase: &Erase) -> Result<Dir, VolumeError> {
        match Mark::read(&self.dir).map_err(VolumeError::Finish)? {
            Mark::Unfinished => {}
            Mark::Erasing => self.clear()?,
            Mark::Complete | Mark::Foreign { .. } => {
                let found = self.contents()?;
                if *erase != Erase::Exactly(found.clone()) {
                    return Err(VolumeError::Occupied { path: self.dir.path().to_owned(), found });
                }
                Mark::write_erasing(&self.dir).map_err(VolumeError::Finish)?;
                self.clear()?;
            }
        }
        Mark::write(&self.dir).map_err(VolumeError::Finish)?;
        self.dir.try_clone().map_err(VolumeError::Finish)
    }

    fn open(&self) -> Result<Dir, VolumeError> {
        let path = || self.dir.path().to_owned();
        match Mark::read(&self.dir).map_err(VolumeError::Finish)? {
            Mark::Complete => self.dir.try_clone().map_err(VolumeError::Finish),
            Mark::Unfinished => Err(VolumeError::Absent { path: path() }),
            Mark::Erasing => Err(VolumeError::Unfinished { path: path() }),
            Mark::Foreign { entries } => {
                Err(VolumeError::NotOurs { path: path(), found: Contents::Files { entries } })
            }
        }
    }

    fn contents(&self) -> Result<Contents, VolumeError> {
        let entries = self.dir.list().map_err(VolumeError::Finish)?.len();
        Ok(Contents::Files { entries })
    }

    /// The mark stays, and says what is going on: what is half removed is neither a volume nor somebody's files.
    fn clear(&self) -> Result<(), VolumeError> {
        for entry in self.dir.list().map_err(VolumeError::Finish)? {
            if entry.name == MARKER {
                continue;
            }
            self.dir.remove_tree(&entry.name).map_err(VolumeError::Finish)?;
        }
        Ok(())
    }
}

impl DataVolume for Directory {
    fn mount_new(&self, erase: Erase) -> Result<Dir, VolumeError> {
        self.lifecycle.mount(|| self.make(&erase))
    }

    fn mount_existing(&self) -> Result<Dir, VolumeError> {
        self.lifecycle.mount(|| self.open())
    }

    fn unmount(&self) -> Result<(), VolumeError> {
        self.lifecycle.unmount(|| Ok(()))
    }

    fn state(&self) -> State {
        self.lifecycle.state()
    }
}

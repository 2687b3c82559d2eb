//! A directory as a volume.

use super::lifecycle::MountLifecycle;
use super::marker::{MARKER_NAME, VolumeMarker};
use super::{DataVolume, ErasePolicy, MountState, VolumeContents, VolumeError};
use crate::dir::Dir;

/// A directory of a mounted file system as a volume: for development, for containers, for systems that mount
/// their data themselves.
///
/// The directory is a volume once it contains the marker file that `mount_new` writes last. Nothing is
/// mounted, and unmounting only changes the state.
///
/// ```
/// use nodekeel_localstorage::Dir;
/// use nodekeel_localstorage::volume::{DataVolume as _, DirectoryVolume, ErasePolicy};
///
/// # let temporary = tempfile::tempdir()?;
/// let volume = DirectoryVolume::new(Dir::open(temporary.path())?);
/// assert!(volume.mount_existing().is_err());
/// let data = volume.mount_new(ErasePolicy::Nothing)?;
/// # assert!(data.list()?.len() == 1);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug)]
pub struct DirectoryVolume {
    dir: Dir,
    lifecycle: MountLifecycle,
}

impl DirectoryVolume {
    /// A volume in this directory.
    pub fn new(dir: Dir) -> DirectoryVolume {
        DirectoryVolume { dir, lifecycle: MountLifecycle::default() }
    }

    fn create_volume(&self, erase: &ErasePolicy) -> Result<Dir, VolumeError> {
        match VolumeMarker::read_from(&self.dir).map_err(VolumeError::Finish)? {
            VolumeMarker::Unfinished => {}
            // The caller of the interrupted call has agreed to this.
            VolumeMarker::Erasing => self.remove_entries()?,
            VolumeMarker::Complete | VolumeMarker::Foreign { .. } => {
                let found = self.read_contents()?;
                if *erase != ErasePolicy::Exactly(found.clone()) {
                    return Err(VolumeError::Occupied { path: self.dir.path().to_owned(), found });
                }
                // Durable before the first removal: a directory that is half erased must not look like one with data.
                VolumeMarker::write_erasing(&self.dir).map_err(VolumeError::Finish)?;
                self.remove_entries()?;
            }
        }
        VolumeMarker::write_complete(&self.dir).map_err(VolumeError::Finish)?;
        self.dir.try_clone().map_err(VolumeError::Finish)
    }

    fn open_volume(&self) -> Result<Dir, VolumeError> {
        let path = || self.dir.path().to_owned();
        match VolumeMarker::read_from(&self.dir).map_err(VolumeError::Finish)? {
            VolumeMarker::Complete => self.dir.try_clone().map_err(VolumeError::Finish),
            VolumeMarker::Unfinished => Err(VolumeError::Absent { path: path() }),
            VolumeMarker::Erasing => Err(VolumeError::Unfinished { path: path() }),
            VolumeMarker::Foreign { entries } => {
                Err(VolumeError::ForeignData { path: path(), found: VolumeContents::Files { entries } })
            }
        }
    }

    fn read_contents(&self) -> Result<VolumeContents, VolumeError> {
        let entries = self.dir.list().map_err(VolumeError::Finish)?.len();
        Ok(VolumeContents::Files { entries })
    }

    /// Removes all entries but the marker, which records the erasure: a half-erased directory is neither a
    /// volume nor foreign data.
    fn remove_entries(&self) -> Result<(), VolumeError> {
        for entry in self.dir.list().map_err(VolumeError::Finish)? {
            if entry.name == MARKER_NAME {
                continue;
            }
            self.dir.remove_tree(&entry.name).map_err(VolumeError::Finish)?;
        }
        Ok(())
    }
}

impl DataVolume for DirectoryVolume {
    fn mount_new(&self, erase: ErasePolicy) -> Result<Dir, VolumeError> {
        self.lifecycle.mount(|| self.create_volume(&erase))
    }

    fn mount_existing(&self) -> Result<Dir, VolumeError> {
        self.lifecycle.mount(|| self.open_volume())
    }

    fn unmount(&self) -> Result<(), VolumeError> {
        self.lifecycle.unmount(|| Ok(()))
    }

    fn state(&self) -> MountState {
        self.lifecycle.state()
    }
}

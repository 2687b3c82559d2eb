//! A custom data volume that keeps what it erases, and the conformance suite.
//!
//! `cargo run -p examples --example own_data_volume`
//!
//! This one is a directory, and an erased volume is renamed instead of removed. A real one would be a dataset with
//! snapshots, or a logical volume. A node takes any: `NodeHandle::builder(…).volume(…)`.

use std::sync::{Mutex, MutexGuard};

use nodekeel_localstorage::testing::volume_conformance;
use nodekeel_localstorage::volume::{DataVolume, DirectoryVolume, ErasePolicy, MountState, VolumeError};
use nodekeel_localstorage::{Dir, FileMode, RenameMode};

/// The directory `data`, next to those that it was before.
#[derive(Debug)]
struct ArchivingVolume {
    parent: Dir,
    current: Mutex<DirectoryVolume>,
}

impl ArchivingVolume {
    fn new(parent: Dir) -> Result<Self, VolumeError> {
        let current = Mutex::new(open_directory(&parent)?);
        Ok(Self { parent, current })
    }

    /// One call runs at a time, as the contract requires.
    fn current(&self) -> Result<MutexGuard<'_, DirectoryVolume>, VolumeError> {
        self.current.try_lock().map_err(|_| VolumeError::InvalidState { state: MountState::Mounting })
    }

    fn archive(&self) -> Result<(), VolumeError> {
        let number = self.parent.list().map_err(VolumeError::Finish)?.len();
        let renamed =
            self.parent.rename("data", &self.parent, format!("erased-{number}"), RenameMode::NoReplace);
        renamed.map_err(VolumeError::Finish)
    }
}

fn open_directory(parent: &Dir) -> Result<DirectoryVolume, VolumeError> {
    let directory = parent.ensure_dir("data", FileMode::PRIVATE_DIR).map_err(VolumeError::Finish)?;
    Ok(DirectoryVolume::new(directory))
}

impl DataVolume for ArchivingVolume {
    fn mount_new(&self, erase: ErasePolicy) -> Result<Dir, VolumeError> {
        let mut current = self.current()?;
        match current.mount_new(ErasePolicy::Nothing) {
            // The caller has seen exactly this. Killed behind the next line, the same call finds no volume, and
            // creates one.
            Err(VolumeError::Occupied { found, .. }) if erase == ErasePolicy::Exactly(found.clone()) => {
                self.archive()?;
            }
            other => return other,
        }
        *current = open_directory(&self.parent)?;
        current.mount_new(ErasePolicy::Nothing)
    }

    fn mount_existing(&self) -> Result<Dir, VolumeError> {
        self.current()?.mount_existing()
    }

    fn unmount(&self) -> Result<(), VolumeError> {
        self.current()?.unmount()
    }

    fn state(&self) -> MountState {
        self.current().map_or(MountState::Mounting, |current| current.state())
    }
}

fn main() -> anyhow::Result<()> {
    let scratch = tempfile::tempdir()?;
    let parent = Dir::open(scratch.path())?;
    volume_conformance(&ArchivingVolume::new(parent.ensure_dir("conformance", FileMode::PRIVATE_DIR)?)?);
    println!("conformance suite passed");

    let parent = parent.ensure_dir("node", FileMode::PRIVATE_DIR)?;
    let volume = ArchivingVolume::new(parent.try_clone()?)?;
    let data = volume.mount_new(ErasePolicy::Nothing)?;
    data.write("identity", b"node-7", FileMode::PRIVATE_FILE)?;
    volume.unmount()?;

    // Nothing is erased that the caller has not seen.
    let Err(VolumeError::Occupied { found, .. }) = volume.mount_new(ErasePolicy::Nothing) else {
        anyhow::bail!("a volume was created over another");
    };
    println!("not erased: {found}");
    let data = volume.mount_new(ErasePolicy::Exactly(found))?;
    println!("the new volume has the identity: {}", data.exists("identity")?);
    let kept = parent.read("erased-1/identity")?;
    println!("the erased one still has it: {}", String::from_utf8(kept)?);
    Ok(())
}

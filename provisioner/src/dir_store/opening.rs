//! Opens volumes for pods.

use std::os::fd::AsFd as _;

use nodekeel_localstorage::{Dir, Error as DirError, FileOperation};

use crate::dir_store::images::{open_image, read_image};
use crate::dir_store::{DirStore, DirStoreError, StoreInner};
use crate::id::VolumeId;
use crate::image::VolumeKind;
use crate::store::{OpenVolume, VolumeOpener, VolumeStoreError};

/// For what a volume is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OpenReason {
    /// A pod, which may write.
    Publish,
    /// A look at its mounts.
    Inspect,
}

impl StoreInner {
    /// Opens a volume, if it exists.
    fn open_volume(&self, id: &VolumeId, reason: OpenReason) -> Result<Option<OpenVolume>, DirStoreError> {
        self.require_identity()?;
        self.check_location()?;
        if reason == OpenReason::Publish {
            self.mark_published(id)?;
        }
        let Some(dir) = self.find_volume(id)? else { return Ok(None) };
        let format = match self.read_kind(&id.clone().into(), &dir)? {
            VolumeKind::Directory => return open_directory(&dir).map(Some),
            VolumeKind::Image(format) => format,
        };
        let file = match reason {
            OpenReason::Publish => open_image(&dir)?,
            OpenReason::Inspect => read_image(&dir)?,
        };
        Ok(Some(OpenVolume::Image { file: file.into(), format }))
    }
}

fn open_directory(dir: &Dir) -> Result<OpenVolume, DirStoreError> {
    let duplicated = dir.as_fd().try_clone_to_owned();
    let failed = |source| DirError::new(FileOperation::Open, dir.path(), source);
    duplicated.map(OpenVolume::Directory).map_err(|error| DirStoreError::Directory(failed(error)))
}

impl DirStore {
    fn open_for(&self, id: &VolumeId, reason: OpenReason) -> Result<OpenVolume, VolumeStoreError> {
        let opened = self.slot.inner().and_then(|inner| inner.open_volume(id, reason));
        let failed = |error| VolumeStoreError::Open { id: id.clone(), source: Box::new(error) };
        opened.map_err(failed)?.ok_or_else(|| VolumeStoreError::NotFound { id: id.clone() })
    }
}

impl VolumeOpener for DirStore {
    fn open(&self, id: &VolumeId) -> Result<OpenVolume, VolumeStoreError> {
        self.open_for(id, OpenReason::Publish)
    }

    fn inspect(&self, id: &VolumeId) -> Result<OpenVolume, VolumeStoreError> {
        self.open_for(id, OpenReason::Inspect)
    }
}

//! The directories of volumes and snapshots: finds, lists and syncs what is in them.

use std::str::FromStr;
use std::sync::OnceLock;

use nodekeel_localstorage::{Dir, DirEntry, FileKind, FileMode};

use crate::dir_store::error::DirStoreError;
use crate::id::VolumeId;
use crate::snapshot::{SnapshotId, StoredId};

/// Directory of volumes, by id.
pub(super) const VOLUMES_DIR: &str = "volumes";

/// Directory of snapshots, by id. It is created with the first one.
pub(super) const SNAPSHOTS_DIR: &str = "snapshots";

/// A directory of the base that is created with its first entry.
pub(super) struct OptionalDir {
    name: &'static str,
    open: OnceLock<Dir>,
}

impl OptionalDir {
    /// Opens the directory, if it exists.
    pub(super) fn find(base: &Dir, name: &'static str) -> Result<Self, DirStoreError> {
        let open = find_dir(base, name)?.map(OnceLock::from).unwrap_or_default();
        Ok(Self { name, open })
    }

    /// The open directory; `None` if nothing was ever created in it.
    pub(super) fn get(&self) -> Option<&Dir> {
        self.open.get()
    }

    /// The open directory, created before if it is missing.
    pub(super) fn ensure(&self, base: &Dir) -> Result<&Dir, DirStoreError> {
        if let Some(dir) = self.open.get() {
            return Ok(dir);
        }
        // Two threads may get here at the same time: the second one finds the directory of the first.
        let dir = base.ensure_dir(self.name, FileMode::PRIVATE_DIR).map_err(DirStoreError::Directory)?;
        Ok(self.open.get_or_init(|| dir))
    }
}

/// The directories that volumes and snapshots are renamed into once they are complete.
pub(super) struct StoredDirs {
    pub(super) base: Dir,
    pub(super) volumes: Dir,
    snapshots: OptionalDir,
}

impl StoredDirs {
    pub(super) fn open(base: Dir, volumes: Dir) -> Result<Self, DirStoreError> {
        let snapshots = OptionalDir::find(&base, SNAPSHOTS_DIR)?;
        Ok(Self { base, volumes, snapshots })
    }

    /// The directory for a volume or a snapshot; `None` if no snapshot was ever created.
    pub(super) fn parent(&self, id: &StoredId) -> Option<&Dir> {
        match id {
            StoredId::Volume(_) => Some(&self.volumes),
            StoredId::Snapshot(_) => self.snapshots.get(),
        }
    }

    /// The directory for a volume or a snapshot, created before if it is missing.
    pub(super) fn ensure_parent(&self, id: &StoredId) -> Result<&Dir, DirStoreError> {
        match id {
            StoredId::Volume(_) => Ok(&self.volumes),
            StoredId::Snapshot(_) => self.snapshots.ensure(&self.base),
        }
    }

    /// Opens a volume or a snapshot, if it exists.
    pub(super) fn find(&self, id: &StoredId) -> Result<Option<Dir>, DirStoreError> {
        self.parent(id).map_or(Ok(None), |parent| find_dir(parent, id.as_str()))
    }

    pub(super) fn find_volume(&self, id: &VolumeId) -> Result<Option<Dir>, DirStoreError> {
        find_dir(&self.volumes, id.as_str())
    }

    pub(super) fn list_volumes(&self) -> Result<Vec<VolumeId>, DirStoreError> {
        list_ids(&self.volumes)
    }

    pub(super) fn list_snapshots(&self) -> Result<Vec<SnapshotId>, DirStoreError> {
        self.snapshots.get().map_or_else(|| Ok(Vec::new()), list_ids)
    }

    /// Makes a rename or a removal durable that a killed process may not have synced.
    pub(super) fn sync(&self, id: &StoredId) -> Result<(), DirStoreError> {
        self.parent(id).map_or(Ok(()), |parent| parent.sync().map_err(DirStoreError::Directory))
    }
}

/// Opens a directory, if it exists.
pub(super) fn find_dir(parent: &Dir, name: &str) -> Result<Option<Dir>, DirStoreError> {
    match parent.open_dir(name) {
        Ok(dir) => Ok(Some(dir)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(DirStoreError::Directory(error)),
    }
}

/// The volumes or snapshots in a directory; other files are none.
pub(super) fn list_ids<T: FromStr>(parent: &Dir) -> Result<Vec<T>, DirStoreError> {
    let entries = parent.list().map_err(DirStoreError::Directory)?;
    Ok(entries.iter().filter(|entry| entry.kind == FileKind::Dir).filter_map(parse_name).collect())
}

/// The id in the name of an entry, if it is one.
pub(super) fn parse_name<T: FromStr>(entry: &DirEntry) -> Option<T> {
    entry.name.as_os_str().to_str()?.parse().ok()
}

//! What is in the directory of a store, for programs beside the one that serves it.

use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nodekeel_fsquota::QuotaSetter;
use nodekeel_localstorage::Dir;

use crate::dir_store::copies::{SNAPSHOTS_DIR, list_snapshot_ids};
use crate::dir_store::images::visible_limits;
use crate::dir_store::kinds::KindMarks;
use crate::dir_store::{DirStore, DirStoreError, VOLUMES_DIR, list_volume_ids};
use crate::id::VolumeId;
use crate::image::VolumeKind;
use crate::snapshot::SnapshotId;
use crate::store::VolumeUsage;

/// A volume in the directory of a store.
#[derive(Debug)]
#[non_exhaustive]
pub struct StoredVolume {
    /// Its id.
    pub id: VolumeId,
    /// Its directory, which is not kept open: there may be more volumes than files that a process may open.
    pub path: PathBuf,
    /// What it is; `None` if its mark can't be read.
    pub kind: Option<VolumeKind>,
    /// Its limits and its usage; `None` if it has no limits.
    pub usage: Option<VolumeUsage>,
    /// When an entry of its directory was last created or removed.
    pub modified: SystemTime,
}

impl DirStore {
    /// Lists the volumes in the directory of a store, sorted by id. Changes nothing and needs no lock: a volume that is
    /// created or removed meanwhile may be missing.
    ///
    /// # Errors
    /// [`DirStoreError::Directory`], [`DirStoreError::Quota`].
    pub fn list_stored(base: &Dir, quota: &dyn QuotaSetter) -> Result<Vec<StoredVolume>, DirStoreError> {
        let volumes = match base.open_dir(VOLUMES_DIR) {
            Ok(volumes) => volumes,
            // No store has been opened here yet.
            Err(error) if error.is_not_found() => return Ok(Vec::new()),
            Err(error) => return Err(DirStoreError::Directory(error)),
        };
        let (mut found, kinds) = (Vec::new(), KindMarks::open(base)?);
        for id in list_volume_ids(&volumes)? {
            match volumes.open_dir(id.as_str()) {
                Ok(dir) => found.push(read_volume(id, &dir, (quota, &kinds))?),
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(DirStoreError::Directory(error)),
            }
        }
        found.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(found)
    }
}

impl DirStore {
    /// Lists the snapshots in the directory of a store, sorted by id, as [`list_stored`](Self::list_stored) does volumes.
    ///
    /// # Errors
    /// [`DirStoreError::Directory`].
    pub fn list_stored_snapshots(base: &Dir) -> Result<Vec<SnapshotId>, DirStoreError> {
        match base.open_dir(SNAPSHOTS_DIR) {
            Ok(snapshots) => list_snapshot_ids(&snapshots),
            Err(error) if error.is_not_found() => Ok(Vec::new()),
            Err(error) => Err(DirStoreError::Directory(error)),
        }
    }
}

fn read_volume(
    id: VolumeId,
    dir: &Dir,
    (quota, kinds): (&dyn QuotaSetter, &KindMarks),
) -> Result<StoredVolume, DirStoreError> {
    let path = dir.path().to_owned();
    let kind = kinds.read_mark(id.as_str()).ok();
    let status = quota.read_status(dir.as_fd());
    let status = status.map_err(|source| DirStoreError::Quota { path: path.clone(), source })?;
    let usage = status.map(|status| {
        let limits = visible_limits(kind.unwrap_or_default(), dir, status.limits);
        // The file of an image may be lost: then the limits of its directory are all that is known.
        VolumeUsage { limits: limits.unwrap_or(status.limits), usage: status.usage }
    });
    let seconds = rustix::fs::fstat(dir.as_fd()).map_or(0, |stat| stat.st_mtime);
    let modified = UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or_default());
    Ok(StoredVolume { id, path, kind, usage, modified })
}

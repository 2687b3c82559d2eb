//! The content of the directory of a store, for other programs than the one that serves it.

use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nodekeel_fsquota::QuotaSetter;
use nodekeel_localstorage::Dir;

use crate::dir_store::DirStore;
use crate::dir_store::error::{DirStoreError, quota_error};
use crate::dir_store::image_file::visible_limits;
use crate::dir_store::kinds::{KINDS_DIR, read_mark};
use crate::dir_store::stored_dirs::{SNAPSHOTS_DIR, VOLUMES_DIR, find_dir, list_ids};
use crate::id::VolumeId;
use crate::image::VolumeKind;
use crate::snapshot::SnapshotId;
use crate::store::VolumeUsage;

/// A volume in the directory of a store.
#[derive(Debug)]
#[non_exhaustive]
pub struct StoredVolume {
    /// Id of the volume.
    pub id: VolumeId,
    /// The directory, which is not kept open: there may be more volumes than files that a process may open.
    pub path: PathBuf,
    /// The kind; `None` if the mark can't be read.
    pub kind: Option<VolumeKind>,
    /// Limits and usage; `None` if it has no limits.
    pub usage: Option<VolumeUsage>,
    /// When an entry of its directory was last created or removed.
    pub modified: SystemTime,
}

impl DirStore {
    /// Lists the volumes in the directory of a store, sorted by id. Changes nothing and needs no lock: a volume that is
    /// created or removed during the call may be missing.
    ///
    /// # Errors
    /// [`DirStoreError::Directory`], [`DirStoreError::Quota`].
    pub fn list_stored(base: &Dir, quota: &dyn QuotaSetter) -> Result<Vec<StoredVolume>, DirStoreError> {
        // Without the directory, no store has been opened yet.
        let Some(volumes) = find_dir(base, VOLUMES_DIR)? else { return Ok(Vec::new()) };
        let kinds = find_dir(base, KINDS_DIR)?;
        let mut found = Vec::new();
        for id in list_ids(&volumes)? {
            if let Some(dir) = find_dir(&volumes, VolumeId::as_str(&id))? {
                found.push(read_volume(id, &dir, quota, kinds.as_ref())?);
            }
        }
        found.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(found)
    }

    /// Lists the snapshots in the directory of a store, sorted by id, as [`list_stored`](Self::list_stored) does
    /// volumes.
    ///
    /// # Errors
    /// [`DirStoreError::Directory`].
    pub fn list_stored_snapshots(base: &Dir) -> Result<Vec<SnapshotId>, DirStoreError> {
        find_dir(base, SNAPSHOTS_DIR)?.map_or_else(|| Ok(Vec::new()), |snapshots| list_ids(&snapshots))
    }
}

fn read_volume(
    id: VolumeId,
    dir: &Dir,
    quota: &dyn QuotaSetter,
    kinds: Option<&Dir>,
) -> Result<StoredVolume, DirStoreError> {
    let kind = read_mark(kinds, id.as_str()).ok();
    let status = quota.read_status(dir.as_fd()).map_err(|error| quota_error(dir, error))?;
    let usage = status.map(|status| {
        let limits = visible_limits(kind.unwrap_or_default(), dir, status.limits);
        // The file of an image may be lost: then the limits of its directory are all that is known.
        VolumeUsage { limits: limits.unwrap_or(status.limits), usage: status.usage }
    });
    let seconds = rustix::fs::fstat(dir.as_fd()).map_or(0, |stat| stat.st_mtime);
    let modified = UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or_default());
    Ok(StoredVolume { id, path: dir.path().to_owned(), kind, usage, modified })
}

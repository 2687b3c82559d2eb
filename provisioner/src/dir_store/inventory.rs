//! The content of the directory of a store, for other programs than the one that serves it.

use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nodekeel_fsquota::QuotaSetter;
use nodekeel_localstorage::{Dir, DirEntry, FileKind};

use crate::dir_store::DirStore;
use crate::dir_store::error::{DirStoreError, quota_error};
use crate::dir_store::image_file::visible_limits;
use crate::dir_store::import::COPY_PREFIX;
use crate::dir_store::import::journal::IMPORT_DIR;
use crate::dir_store::kinds::{KINDS_DIR, read_mark};
use crate::dir_store::open_store::{OpenStore, STAGING_DIR, TRASH_DIR};
use crate::dir_store::options::DirStoreOptions;
use crate::dir_store::stored_dirs::{SNAPSHOTS_DIR, VOLUMES_DIR, find_dir, list_ids, parse_name};
use crate::dir_store::trash::{CONTENT_NAME as TRASH_CONTENT, TrashEntry};
use crate::id::VolumeId;
use crate::image::VolumeKind;
use crate::snapshot::{SnapshotId, StoredId};
use crate::step::StepHook;
use crate::store::VolumeUsage;

/// A volume, a snapshot or what is left of one, in the directory of a store.
#[derive(Debug)]
#[non_exhaustive]
pub struct StoredEntry {
    /// Id of the volume or the snapshot.
    pub id: StoredId,
    /// What it is.
    pub place: StoredPlace,
    /// The directory, which is not kept open: there may be more of them than files that a process may open.
    pub path: PathBuf,
    /// The kind; `None` if the mark can't be read, or if it is neither a volume nor a snapshot.
    pub kind: Option<VolumeKind>,
    /// Limits and usage; `None` if it has no limits.
    pub usage: Option<VolumeUsage>,
    /// When an entry of its directory was last created or removed.
    pub modified: SystemTime,
}

/// The place of a [`StoredEntry`], and so what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum StoredPlace {
    /// A volume.
    Volume,
    /// A snapshot.
    Snapshot,
    /// A volume or a snapshot that is being made, or whose creation was killed: the next start discards it.
    Staging,
    /// A directory that an import, or a move from another node, makes a volume; or a killed one has left.
    Import,
    /// What is left of a removed volume or snapshot: it is being erased, or could not be.
    Trash,
}

impl DirStore {
    /// Lists all that takes space in the directory of a store, sorted by place and id. Changes nothing and needs no lock:
    /// what is created, moved or removed during the call may be missing.
    ///
    /// # Errors
    /// [`DirStoreError::Directory`], [`DirStoreError::Quota`].
    pub fn list_stored(base: &Dir, quota: &dyn QuotaSetter) -> Result<Vec<StoredEntry>, DirStoreError> {
        let reader = EntryReader { quota, kinds: find_dir(base, KINDS_DIR)? };
        let mut found = Vec::new();
        for (place, name) in [
            (StoredPlace::Volume, VOLUMES_DIR),
            (StoredPlace::Snapshot, SNAPSHOTS_DIR),
            (StoredPlace::Staging, STAGING_DIR),
            (StoredPlace::Import, IMPORT_DIR),
            (StoredPlace::Trash, TRASH_DIR),
        ] {
            // Without the directory, nothing was ever put there.
            let Some(parent) = find_dir(base, name)? else { continue };
            for entry in parent.list().map_err(DirStoreError::Directory)? {
                let Some(id) = place.parse_id(&entry).filter(|_| entry.kind == FileKind::Dir) else {
                    continue;
                };
                if let Some(dir) =
                    entry.name.as_os_str().to_str().map(|name| find_dir(&parent, name)).transpose()?
                {
                    found.extend(dir.map(|dir| reader.read(id, place, &dir)).transpose()?);
                }
            }
        }
        found.sort_by(|a, b| (a.place, &a.id).cmp(&(b.place, &b.id)));
        Ok(found)
    }

    /// Lists the snapshots in the directory of a store, sorted by id, as [`list_stored`](Self::list_stored) does.
    ///
    /// # Errors
    /// [`DirStoreError::Directory`].
    pub fn list_stored_snapshots(base: &Dir) -> Result<Vec<SnapshotId>, DirStoreError> {
        find_dir(base, SNAPSHOTS_DIR)?.map_or_else(|| Ok(Vec::new()), |snapshots| list_ids(&snapshots))
    }

    /// Removes a snapshot with its data, also while a provisioner serves the store: an operator's action on one that belongs
    /// to no VolumeSnapshotContent. Success also if an earlier call did it. Blocks for as long as it takes to erase the data.
    /// The provisioner promises the space again after its next count.
    ///
    /// # Errors
    /// [`DirStoreError`]: repeat the call to resume.
    pub fn remove_stored_snapshot(
        base: Dir,
        quota: Arc<dyn QuotaSetter>,
        id: &SnapshotId,
        hook: Option<Arc<dyn StepHook>>,
    ) -> Result<(), DirStoreError> {
        let options = DirStoreOptions { hook, ..DirStoreOptions::default() };
        OpenStore::open_unlocked(base, quota, &options)?.remove_and_erase(id)
    }
}

impl StoredPlace {
    /// The id in the name of an entry at this place, if it is one of a store.
    fn parse_id(self, entry: &DirEntry) -> Option<StoredId> {
        match self {
            Self::Volume => parse_name::<VolumeId>(entry).map(StoredId::from),
            Self::Snapshot => parse_name::<SnapshotId>(entry).map(StoredId::from),
            Self::Staging => parse_name(entry),
            Self::Import => {
                let name = entry.name.as_os_str().to_str()?;
                name.strip_prefix(COPY_PREFIX).unwrap_or(name).parse().ok()
            }
            Self::Trash => parse_name::<TrashEntry>(entry).map(|entry| entry.id().clone()),
        }
    }
}

struct EntryReader<'a> {
    quota: &'a dyn QuotaSetter,
    kinds: Option<Dir>,
}

impl EntryReader<'_> {
    fn read(&self, id: StoredId, place: StoredPlace, dir: &Dir) -> Result<StoredEntry, DirStoreError> {
        let is_complete = matches!(place, StoredPlace::Volume | StoredPlace::Snapshot);
        let kind = if is_complete { read_mark(self.kinds.as_ref(), id.as_str()).ok() } else { None };
        // The data of a trash entry are in a directory within it, unless the disk was full.
        let content = if place == StoredPlace::Trash { find_dir(dir, TRASH_CONTENT)? } else { None };
        let limited = content.as_ref().unwrap_or(dir);
        let status = self.quota.read_status(limited.as_fd()).map_err(|error| quota_error(limited, error))?;
        let usage = status.map(|status| {
            let limits = visible_limits(kind.unwrap_or_default(), dir, status.limits);
            // The file of an image may be lost: then the limits of its directory are all that is known.
            VolumeUsage { limits: limits.unwrap_or(status.limits), usage: status.usage }
        });
        let seconds = rustix::fs::fstat(dir.as_fd()).map_or(0, |stat| stat.st_mtime);
        let modified = UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or_default());
        Ok(StoredEntry { id, place, path: dir.path().to_owned(), kind, usage, modified })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nodekeel_fsquota::testing::MemQuota;

    use super::*;

    #[test]
    fn all_that_takes_space_is_listed_with_its_place() {
        let base = tempfile::tempdir().expect("a directory");
        let uid = |number: u32| format!("9f0e5d3c-1b2a-4c5d-8e6f-{number:012}");
        for path in [
            format!("volumes/pvc-{}", uid(1)),
            format!("snapshots/snap-{}", uid(2)),
            format!(".new/snap-{}", uid(3)),
            ".new/.probe".to_owned(),
            format!(".import/copy-pvc-{}", uid(4)),
            format!(".import/pvc-{}", uid(5)),
            format!(".trash/bare-snap-{}.0.0", uid(6)),
            format!(".trash/pvc-{}.7.0/volume", uid(7)),
            "volumes/lost+found".to_owned(),
        ] {
            fs::create_dir_all(base.path().join(path)).expect("a directory");
        }
        fs::write(base.path().join(format!(".import/pvc-{}.source", uid(5))), "/srv").expect("a record");
        let dir = Dir::open(base.path()).expect("the base");
        let found = DirStore::list_stored(&dir, &MemQuota::new()).expect("a list");
        let found: Vec<_> = found.iter().map(|it| (it.place, it.id.as_str().to_owned())).collect();
        let expected = [
            (StoredPlace::Volume, "pvc", 1),
            (StoredPlace::Snapshot, "snap", 2),
            (StoredPlace::Staging, "snap", 3),
            (StoredPlace::Import, "pvc", 4),
            (StoredPlace::Import, "pvc", 5),
            (StoredPlace::Trash, "pvc", 7),
            (StoredPlace::Trash, "snap", 6),
        ];
        assert_eq!(found, expected.map(|(place, kind, number)| (place, format!("{kind}-{}", uid(number)))));
    }
}

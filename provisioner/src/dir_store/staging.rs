//! Directories that are not complete yet: a crash leaves them behind.

use std::os::fd::AsFd as _;

use nodekeel_localstorage::Dir;

use crate::dir_store::trash::TrashEntry;
use crate::dir_store::{DirStoreError, StoreInner};
use crate::error_chain::format_chain;
use crate::snapshot::StoredId;
use crate::step::VolumeStep;

impl StoreInner {
    /// Removes directories whose creation a crash interrupted. Returns whether one of them is in the trash now.
    pub(super) fn sweep_staging(&self) -> Result<bool, DirStoreError> {
        let mut has_moved = false;
        for entry in self.staging.list().map_err(DirStoreError::Directory)? {
            match entry.name.as_os_str().to_str().and_then(|name| name.parse().ok()) {
                // The caller lists the trash after this.
                Some(id) => has_moved |= self.discard_staged(&id)?.is_some(),
                None => tracing::warn!(
                    "{} is not a volume: skipped",
                    self.staging.path().join(entry.name.as_os_str()).display()
                ),
            }
        }
        Ok(has_moved)
    }

    /// Discards what a failed creation has left; what can't be removed now is removed at the next start.
    pub(super) fn discard_failed(&self, id: &StoredId) {
        self.discard_kind(id);
        match self.discard_staged(id) {
            Ok(Some(entry)) => self.erasures.enqueue_entry(entry, 0),
            Ok(None) => {}
            Err(error) => {
                let staging = self.staging.path().display();
                tracing::warn!(handle = id.as_str(), "remove {id} from {staging}: {}", format_chain(&error));
            }
        }
    }

    /// Removes a directory from staging: it was never published. One with data becomes a trash entry, which is
    /// returned.
    pub(super) fn discard_staged(&self, id: &StoredId) -> Result<Option<TrashEntry>, DirStoreError> {
        let name = id.as_str();
        if self.staging.exists(name).map_err(DirStoreError::Directory)? {
            match id {
                StoredId::Volume(id) => {
                    tracing::info!(handle = %id, claim_uid = id.claim_uid(), "removing an incomplete volume");
                }
                StoredId::Snapshot(id) => tracing::info!(handle = %id, "removing an incomplete snapshot"),
            }
        }
        match self.staging.open_dir(name) {
            Ok(dir) if !dir.is_empty().map_err(DirStoreError::Directory)? => {
                return self.discard_copy(id, &dir).map(Some);
            }
            Ok(dir) => self
                .quota
                .clear_limits(dir.as_fd())
                .map_err(|source| DirStoreError::Quota { path: dir.path().to_owned(), source })?,
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) if error.is_not_a_directory() => {}
            Err(error) => return Err(DirStoreError::Directory(error)),
        }
        self.staging.remove_tree(name).map(|_| None).map_err(DirStoreError::Directory)
    }

    /// Moves an incomplete copy to the trash: it may be large.
    fn discard_copy(&self, id: &StoredId, dir: &Dir) -> Result<TrashEntry, DirStoreError> {
        let project = self.find_project(dir)?;
        let create = || TrashEntry::create_entry(&self.trash, id, project);
        let entry =
            self.steps.run_step(VolumeStep::CreateTrashEntry, create).map_err(DirStoreError::Directory)?;
        let move_in = || entry.move_in(&self.staging, &self.trash);
        self.steps.run_step(VolumeStep::MoveToTrash, move_in).map_err(DirStoreError::Directory)?;
        Ok(entry)
    }
}

//! The record of an import: a file for each claim, until its PersistentVolume exists.

use nodekeel_localstorage::Dir;

use crate::dir_store::error::DirStoreError;
use crate::id::VolumeId;

/// Directory of directories that are becoming volumes, and of the records.
pub(in crate::dir_store) const IMPORT_DIR: &str = ".import";

/// Suffix of the file with the path of the directory that is imported for a claim.
pub(super) const JOURNAL_SUFFIX: &str = ".source";

pub(super) fn journal_name(id: &VolumeId) -> String {
    format!("{id}{JOURNAL_SUFFIX}")
}

/// Checks that an existing volume does not contain the data of an import that is not complete. An empty one may have
/// been created for a pod since the import started.
pub(crate) fn check_import_complete(base: &Dir, id: &VolumeId, dir: &Dir) -> Result<(), DirStoreError> {
    if has_record(base, id)? && !dir.is_empty().map_err(DirStoreError::Directory)? {
        return Err(DirStoreError::BeingImported { path: dir.path().to_owned() });
    }
    Ok(())
}

/// Returns whether an import of a volume, or its arrival from another node, has not ended.
pub(in crate::dir_store) fn has_record(base: &Dir, id: &VolumeId) -> Result<bool, DirStoreError> {
    base.exists(format!("{IMPORT_DIR}/{}", journal_name(id))).map_err(DirStoreError::Directory)
}

//! Removed volumes: trash entries.

use std::fmt;
use std::str::FromStr;

use nodekeel_fsquota::ProjectId;
use nodekeel_localstorage::{Dir, Error as DirError, FileMode, RenameMode};

use crate::dir_store::error::DirStoreError;
use crate::dir_store::stored_dirs::parse_name;
use crate::snapshot::StoredId;
use crate::step::{StepRunner, VolumeStep};

/// Name of the volume in its trash entry.
pub(super) const CONTENT_NAME: &str = "volume";

/// Prefix of the name of a trash entry that is the volume itself: the disk had no free space for a directory
/// around it.
const BARE_PREFIX: &str = "bare-";

/// An entry of the trash directory: `pvc-<uid>.<project>.<number>`, or `snap-<uid>…` of a snapshot, where project 0
/// means none and the number distinguishes successive volumes with the same id.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct TrashEntry {
    id: StoredId,
    project: Option<ProjectId>,
    number: u32,
    is_bare: bool,
}

impl TrashEntry {
    pub(super) fn id(&self) -> &StoredId {
        &self.id
    }

    /// The project to release, if the volume had one.
    pub(super) fn project(&self) -> Option<ProjectId> {
        self.project
    }

    /// The path of the data to erase.
    pub(super) fn content_path(&self) -> String {
        if self.is_bare { self.to_string() } else { format!("{self}/{CONTENT_NAME}") }
    }
}

pub(super) struct Trash {
    pub(super) dir: Dir,
    pub(super) steps: StepRunner,
}

impl Trash {
    pub(super) fn list(&self) -> Result<Vec<TrashEntry>, DirStoreError> {
        let entries = self.dir.list().map_err(DirStoreError::Directory)?;
        Ok(entries.iter().filter_map(parse_name).collect())
    }

    /// The data of an entry, while some are left.
    pub(super) fn open_content(&self, entry: &TrashEntry) -> Result<Dir, DirError> {
        self.dir.open_dir(entry.content_path())
    }

    /// Creates or finds an empty entry, whose name records the project to release. If the disk has no free space for a
    /// directory, returns the name of a bare one.
    pub(super) fn create_entry(
        &self,
        id: &StoredId,
        project: Option<ProjectId>,
    ) -> Result<TrashEntry, DirStoreError> {
        let create = || {
            let mut entry = TrashEntry { id: id.clone(), project, number: 0, is_bare: false };
            loop {
                match self.dir.ensure_dir(entry.to_string(), FileMode::PRIVATE_DIR) {
                    // New, or left by a removal that was killed before its rename.
                    Ok(dir) if !dir.exists(CONTENT_NAME)? => return Ok(entry),
                    // An earlier volume of this id is still being erased.
                    Ok(_) => entry.number += 1,
                    // Removals free a full disk, so they must work on one: the volume itself becomes the
                    // entry.
                    Err(error) if error.is_full() => return Ok(TrashEntry { is_bare: true, ..entry }),
                    Err(error) => return Err(error),
                }
            }
        };
        self.steps.run_step(VolumeStep::CreateTrashEntry, create).map_err(DirStoreError::Directory)
    }

    /// Renames the volume or snapshot of an entry into it, out of the directory `from`.
    pub(super) fn move_in(&self, entry: &TrashEntry, from: &Dir) -> Result<(), DirStoreError> {
        let name = entry.id.as_str();
        let rename = || from.rename(name, &self.dir, entry.content_path(), RenameMode::NoReplace);
        self.steps.run_step(VolumeStep::MoveToTrash, rename).map_err(DirStoreError::Directory)
    }
}

impl fmt::Display for TrashEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bare = if self.is_bare { BARE_PREFIX } else { "" };
        let project = self.project.map_or(0, ProjectId::get);
        write!(f, "{bare}{}.{project}.{}", self.id.as_str(), self.number)
    }
}

impl FromStr for TrashEntry {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        let (is_bare, rest) = match name.strip_prefix(BARE_PREFIX) {
            Some(rest) => (true, rest),
            None => (false, name),
        };
        let mut parts = rest.split('.');
        let mut next = || parts.next().ok_or(());
        let (id, project, number) = (next()?, next()?, next()?);
        let entry = Self {
            id: id.parse().map_err(|_| ())?,
            project: ProjectId::new(project.parse().map_err(|_| ())?),
            number: number.parse().map_err(|_| ())?,
            is_bare,
        };
        // Only canonical names are ours.
        if entry.to_string() == name { Ok(entry) } else { Err(()) }
    }
}

/// Parses and formats the name of a trash entry; `None` if it is not one.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn read_trash_name(name: &str) -> Option<String> {
    name.parse::<TrashEntry>().ok().map(|entry| entry.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_canonical_names_are_trash_entries() {
        let id = "pvc-9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f";
        let snapshot = id.replace("pvc-", "snap-");
        for good in
            [format!("{id}.7.0"), format!("{id}.0.12"), format!("bare-{id}.7.0"), format!("{snapshot}.7.0")]
        {
            assert_eq!(good.parse::<TrashEntry>().map(|entry| entry.to_string()), Ok(good));
        }
        let bad =
            [id.to_owned(), format!("{id}.7"), format!("{id}.07.0"), format!("{id}.7.0.1"), "..".to_owned()];
        for bad in bad {
            assert!(bad.parse::<TrashEntry>().is_err(), "{bad}");
        }
    }
}

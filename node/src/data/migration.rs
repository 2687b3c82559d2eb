//! Moves what an earlier release kept at the top of the data directory to where this one keeps it.
//!
//! ```text
//!  cluster/state ──▶ esp      cluster/volume ──▶ data/cluster      etcd ───────▶ data/etcd
//!  cluster/names ──▶ names    volumes ─────────▶ data/volumes      containerd ─▶ data/containerd
//! ```
//!
//! Each move is one rename: a migration that is killed between two of them resumes with the others.

use std::fmt;

use nodekeel_localstorage::volume::{DataVolume as _, DirectoryVolume, ErasePolicy, VolumeError};
use nodekeel_localstorage::{Dir, RenameMode};

use super::DataError;
use crate::layout::{VOLUME_DIR, VOLUME_MODE};

mod decision;

use decision::{FORMER_CLUSTER, FoundEntry, LayoutMove, MOVES, MoveConflict, plan_moves};

/// The moves of a data directory that are left to do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LayoutMigration {
    moves: Vec<LayoutMove>,
}

/// How the migration depends on the configuration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MigrationScope {
    /// The data volume is not the directory below the data directory.
    pub(crate) is_other_volume: bool,
    /// The former directory of volumes is configured, and so stays.
    pub(crate) keeps_volumes: bool,
}

impl LayoutMigration {
    /// Plans the moves of this data directory; changes nothing.
    ///
    /// # Errors
    /// Why the directory can't be moved, with what to do.
    pub(crate) fn plan(data: &Dir, scope: MigrationScope) -> Result<Self, DataError> {
        let former_etcd = data.path().join("etcd");
        if data.exists("etcd/member").unwrap_or_default() {
            return Err(DataError::FormerLayout {
                path: former_etcd.join("member"),
                to: former_etcd.join("data"),
            });
        }
        let is_cluster_mounted = data.is_mount_point(FORMER_CLUSTER)?;
        let mut found = Vec::new();
        for rule in MOVES.into_iter().filter(|rule| !(scope.keeps_volumes && rule.from == "volumes")) {
            let from = match find_entry(data, rule.from)? {
                FoundEntry::EmptyDir | FoundEntry::FullDir
                    if is_cluster_mounted && rule.is_from_cluster() =>
                {
                    FoundEntry::MountPoint
                }
                from => from,
            };
            found.push((rule, from, find_entry(data, rule.to)?));
        }
        let volume = find_entry(data, VOLUME_DIR)?;
        let moves = plan_moves(&found, volume, scope.is_other_volume).map_err(|error| error.at(data))?;
        if volume == FoundEntry::FullDir && moves.iter().any(|planned| planned.is_to_volume()) {
            match DirectoryVolume::new(data.open_dir(VOLUME_DIR)?).mount_existing() {
                Ok(_) | Err(VolumeError::Absent { .. }) => {}
                Err(error) => return Err(DataError::Volume(error)),
            }
        }
        Ok(Self { moves })
    }

    /// Moves the directories. The caller has the lock of the data directory.
    ///
    /// # Errors
    /// What can't be moved; a repeated migration resumes there.
    pub(crate) fn apply(&self, data: &Dir) -> Result<(), DataError> {
        if self.moves.iter().any(|planned| planned.is_to_volume()) {
            // Its mark comes first: data without it would be foreign.
            let volume = DirectoryVolume::new(data.ensure_dir(VOLUME_DIR, VOLUME_MODE)?);
            match volume.mount_existing() {
                Err(VolumeError::Absent { .. }) => volume.mount_new(ErasePolicy::Nothing),
                opened => opened,
            }
            .map_err(DataError::Volume)?;
        }
        for LayoutMove { from, to } in &self.moves {
            // The target does not exist, or is an empty directory.
            data.rename(from, data, to, RenameMode::Replace)?;
            tracing::info!(dn = "root.storage", "moved {from} to {to}, where this release keeps it");
        }
        match data.remove_empty_dir(FORMER_CLUSTER) {
            Ok(_) => Ok(()),
            // It is in use.
            Err(error) if error.is_not_empty() || error.is_not_a_directory() || error.is_mount_point() => {
                Ok(())
            }
            Err(error) => {
                let path = data.path().join(FORMER_CLUSTER);
                Err(DataError::RemoveFormer { path, source: error.into_cause() })
            }
        }
    }
}

/// The moves, in their order; nothing if there are none.
impl fmt::Display for LayoutMigration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, planned) in self.moves.iter().enumerate() {
            write!(f, "{}{planned}", if index == 0 { "; moves " } else { ", " })?;
        }
        Ok(())
    }
}

fn find_entry(data: &Dir, path: &str) -> Result<FoundEntry, DataError> {
    // A link or a file on the way is an error of this.
    let dir = match data.open_dir(path) {
        Ok(dir) => dir,
        Err(error) if error.is_not_found() => return Ok(FoundEntry::Absent),
        Err(error) => return Err(error.into()),
    };
    Ok(match data.is_mount_point(path)? {
        true => FoundEntry::MountPoint,
        false if dir.list()?.is_empty() => FoundEntry::EmptyDir,
        false => FoundEntry::FullDir,
    })
}

impl MoveConflict {
    fn at(self, data: &Dir) -> DataError {
        let paths = |rule: LayoutMove| (data.path().join(rule.from), data.path().join(rule.to));
        match self {
            Self::BothExist(rule) => {
                let (path, to) = paths(rule);
                DataError::MoveConflict { path, to }
            }
            Self::MountPoint(rule) => {
                let (path, to) = paths(rule);
                DataError::MoveMountPoint { path, to }
            }
            Self::OtherVolume(rule) => DataError::FormerData { path: paths(rule).0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::Path;

    use nodekeel_localstorage::testing::{SyscallAction, with_failpoint_hook};
    use nodekeel_localstorage::volume::VOLUME_MARK;

    use super::*;

    const SCOPE: MigrationScope = MigrationScope { is_other_volume: false, keeps_volumes: false };

    /// The data directory of an earlier release, a file in each directory.
    fn former_directory() -> tempfile::TempDir {
        let scratch = tempfile::tempdir().expect("a directory");
        for rule in MOVES {
            fs::create_dir_all(scratch.path().join(rule.from)).expect("created");
            fs::write(scratch.path().join(rule.from).join("file"), rule.from).expect("written");
        }
        fs::write(scratch.path().join("cluster/volume/.data-volume"), VOLUME_MARK).expect("written");
        fs::create_dir(scratch.path().join("run")).expect("created");
        scratch
    }

    fn migrate(data: &Path, scope: MigrationScope) -> Result<LayoutMigration, DataError> {
        let data = Dir::open(data)?;
        let migration = LayoutMigration::plan(&data, scope)?;
        migration.apply(&data)?;
        Ok(migration)
    }

    /// All files and their contents, and all directories.
    fn tree(data: &Path) -> BTreeMap<String, Option<String>> {
        let (mut found, mut left) = (BTreeMap::new(), vec![data.to_owned()]);
        while let Some(path) = left.pop() {
            for entry in fs::read_dir(path).expect("a directory") {
                let path = entry.expect("an entry").path();
                let name = path.strip_prefix(data).expect("below").display().to_string();
                found.insert(name, fs::read_to_string(&path).ok());
                left.extend(path.is_dir().then_some(path));
            }
        }
        found
    }

    fn assert_migrated(data: &Path) {
        let tree = tree(data);
        for rule in MOVES {
            assert_eq!(
                tree.get(&format!("{}/file", rule.to)),
                Some(&Some(rule.from.to_owned())),
                "{tree:#?}"
            );
            assert!(!tree.contains_key(rule.from), "{tree:#?}");
        }
        assert_eq!(tree.get("data/.data-volume"), Some(&Some(VOLUME_MARK.to_owned())));
        assert!(tree.contains_key("data/cluster/.data-volume") && !tree.contains_key("cluster"), "{tree:#?}");
    }

    #[test]
    fn a_former_directory_moves_and_a_move_that_is_cut_off_at_any_system_call_resumes() {
        for cut in 1.. {
            let scratch = former_directory();
            let mut calls = 0;
            let stop_at_cut = move |_call: &'static str| {
                calls += 1;
                if calls < cut { SyscallAction::Proceed } else { SyscallAction::Fail(5) }
            };
            let is_done = with_failpoint_hook(stop_at_cut, || migrate(scratch.path(), SCOPE)).is_ok();
            migrate(scratch.path(), SCOPE).expect("it resumes");
            assert_migrated(scratch.path());
            let again = migrate(scratch.path(), SCOPE).expect("nothing to do");
            assert_eq!(again, LayoutMigration::default());
            if is_done {
                assert!(cut > 2 * MOVES.len(), "{cut}");
                return;
            }
        }
    }

    #[test]
    fn a_ticket_at_the_former_place_moves_also_to_an_empty_directory() {
        let scratch = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(scratch.path().join("cluster/state")).expect("created");
        fs::write(scratch.path().join("cluster/state/enrolment.pb"), "ticket").expect("written");
        fs::create_dir(scratch.path().join("esp")).expect("created");
        let migration = migrate(scratch.path(), SCOPE).expect("moved");
        assert_eq!(migration.to_string(), "; moves cluster/state to esp");
        assert_eq!(fs::read_to_string(scratch.path().join("esp/enrolment.pb")).expect("there"), "ticket");
        assert!(!scratch.path().join("cluster").exists() && !scratch.path().join("data").exists());
    }

    #[test]
    fn what_can_not_be_moved_is_named_and_all_stays_as_it_is() {
        let other = MigrationScope { is_other_volume: true, ..SCOPE };
        type Make<'a> = &'a dyn Fn(&Path);
        let occupied = |data: &Path| {
            fs::create_dir_all(data.join("data/etcd/data")).expect("created");
            fs::write(data.join("data/.data-volume"), VOLUME_MARK).expect("written");
        };
        let foreign = |data: &Path| {
            fs::create_dir(data.join("data")).expect("created");
            fs::write(data.join("data/letter"), "dear").expect("written");
        };
        let cases: [(Make<'_>, MigrationScope, &str); 6] = [
            (&occupied, SCOPE, "/etcd to "),
            (&foreign, SCOPE, "can't use the directory of the data volume"),
            (
                &|_| {},
                other,
                "/cluster/volume has data of an earlier release, but this node keeps its data on another",
            ),
            (
                &|data| fs::create_dir(data.join("etcd/member")).expect("created"),
                SCOPE,
                "/etcd/member is etcd's data",
            ),
            (
                &|data| {
                    fs::remove_dir_all(data.join("volumes")).expect("removed");
                    fs::write(data.join("volumes"), "").expect("written");
                },
                SCOPE,
                "/volumes is not a directory: move it away",
            ),
            (
                &|data| {
                    fs::rename(data.join("containerd"), data.join("elsewhere")).expect("renamed");
                    std::os::unix::fs::symlink("elsewhere", data.join("containerd")).expect("linked");
                },
                SCOPE,
                "/containerd is a symbolic link",
            ),
        ];
        for (make, scope, says) in cases {
            let scratch = former_directory();
            make(scratch.path());
            let before = tree(scratch.path());
            let error = migrate(scratch.path(), scope).expect_err(says).to_string();
            assert!(error.contains(says), "{error}");
            assert_eq!(tree(scratch.path()), before, "{says}");
        }
    }

    #[test]
    fn a_configured_directory_of_volumes_stays() {
        let scratch = former_directory();
        migrate(scratch.path(), MigrationScope { keeps_volumes: true, ..SCOPE }).expect("moved");
        assert!(
            scratch.path().join("volumes/file").exists() && scratch.path().join("data/etcd/file").exists()
        );
    }
}

//! A directory becomes a volume, also while a provisioner has the store open.

use std::ffi::OsStr;
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_fsquota::{Bytes, Error as QuotaError, QuotaLimits, QuotaSetter, QuotaStatus, TreeSummary};
use nodekeel_localstorage::{Dir, DirLock, Error as DirError, FileMode, RenameMode};

use crate::capacity::policy::{CapacityPolicy, CapacityShortage};
use crate::dir_store::error::{DirStoreError, quota_error as store_quota_error};
use crate::dir_store::location;
use crate::dir_store::open_store::OpenStore;
use crate::dir_store::options::DirStoreOptions;
use crate::dir_store::stored_dirs::VOLUMES_DIR;
use crate::error_chain::format_chain;
use crate::id::VolumeId;
use crate::step::{StepHook, StepRunner, VolumeStep};
use crate::store_id::StoreId;

mod copier;
mod error;
mod header;
pub(super) mod journal;
mod resume;
mod source;
mod transfer;

pub use error::SourceError;
pub use header::MoveHeader;
#[cfg(any(test, feature = "testing"))]
pub use header::fuzz_move_header;

use copier::Copier;
use journal::{IMPORT_DIR, JOURNAL_SUFFIX, journal_name};
use resume::{ImportConflict, ImportPlaces, ImportStart, plan_start};
use source::SourceDir;

/// Prefix of an incomplete copy, which the next importer removes.
pub(super) const COPY_PREFIX: &str = "copy-";

/// Turns directories into volumes of a [`DirStore`](crate::DirStore), which another process may have open.
///
/// ```text
/// <base>/.import/pvc-<uid>.source      the path of SOURCE, until the PersistentVolume exists
///                                      or the move that has sent it from another node
///        .import/pvc-<uid>             SOURCE, moved: it has limits, or gets them
///        .import/copy-pvc-<uid>        or a copy of SOURCE, incomplete: created with its limits; or a volume that was
///                                      moved to another node, and is being removed
///        volumes/pvc-<uid>             the volume
/// ```
///
/// Directories change their places by renames that replace nothing. So the data are always complete in one
/// place, and a call can be killed at any point and repeated: it resumes where they are. To a store, the volume
/// appears complete and with its limits; for as long as the record exists, it gives its data to no other
/// PersistentVolume, which might not be retained.
#[derive(Debug)]
pub struct VolumeImporter {
    base: Dir,
    identity: StoreId,
    volumes: Dir,
    imports: Dir,
    quota: Arc<dyn QuotaSetter>,
    /// Ceiling of promises; `None` for any amount.
    ceiling: Option<CapacityPolicy>,
    steps: StepRunner,
    /// Keeps other importers out.
    _lock: DirLock,
}

/// The fate of the imported directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum ImportMode {
    /// The directory stays; files share their blocks with it where the file system can.
    Copy,
    /// The directory becomes the volume. It must be on the same mount as the store.
    Move,
}

/// The result of an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum ImportOutcome {
    /// The directory, or its copy, is the volume now.
    Imported {
        /// Entries that do not count against the limits: of a moved directory, links and special files, entries
        /// that belong to another project, and immutable entries. `dirquota audit` names them.
        uncounted: u64,
        /// Device nodes, which are not copied.
        devices: u64,
    },
    /// An earlier call has done it.
    AlreadyDone,
}

impl VolumeImporter {
    /// Opens the store in this directory for imports, and removes remains of killed ones that can't be resumed.
    ///
    /// # Errors
    /// [`SourceError::Store`]: the directory is not a store, or can't be used. [`SourceError::Busy`].
    pub fn open(
        base: Dir,
        quota: Arc<dyn QuotaSetter>,
        hook: Option<Arc<dyn StepHook>>,
    ) -> Result<Self, SourceError> {
        let no_identity = || DirStoreError::NoIdentity { path: base.path().to_owned() };
        let identity = location::read_identity(&base).and_then(|id| id.ok_or_else(no_identity));
        let identity = identity.map_err(SourceError::Store)?;
        let volumes = base.open_dir(VOLUMES_DIR).map_err(dir_error)?;
        let imports = base.ensure_dir(IMPORT_DIR, FileMode::PRIVATE_DIR).map_err(dir_error)?;
        let busy = || SourceError::Busy { path: imports.path().to_owned() };
        // Importers exclude each other, and no store: a provisioner may serve the volumes at the same time.
        let lock = imports.try_lock().map_err(dir_error)?.ok_or_else(busy)?;
        let this = Self {
            base,
            identity,
            volumes,
            imports,
            quota,
            ceiling: None,
            steps: StepRunner::new(hook),
            _lock: lock,
        };
        // Only with the lock: without it, these could be the files of an import in progress.
        this.imports.remove_stale_files().map_err(dir_error)?;
        this.remove_incomplete_copies()?;
        this.remove_stale_journals()?;
        Ok(this)
    }

    /// Rejects directories whose limits, with those of the volumes that are in the store, are more than may be
    /// promised. By default, none is rejected for that.
    #[must_use]
    pub fn with_ceiling(self, ceiling: CapacityPolicy) -> Self {
        Self { ceiling: Some(ceiling), ..self }
    }

    /// The identity of the store.
    pub fn identity(&self) -> &StoreId {
        &self.identity
    }

    /// Makes a directory a volume with these limits. Success also if an earlier call did it. Blocks for as long
    /// as it takes to copy, or to count, all entries of the directory. After the volume has its
    /// PersistentVolume, call [`finish`](Self::finish).
    ///
    /// # Errors
    /// [`SourceError`]: repeat the call to resume.
    pub fn import(
        &self,
        id: &VolumeId,
        limits: QuotaLimits,
        source: &Path,
        mode: ImportMode,
    ) -> Result<ImportOutcome, SourceError> {
        let journal = self.read_journal(id)?;
        if let Some(path) = journal.filter(|path| path != source) {
            return Err(SourceError::OtherImport { path });
        }
        match plan_start(self.find_places(id, source)?) {
            ImportStart::Start => {
                let used = SourceDir(source).check(self.base.path(), limits, mode)?;
                self.check_ceiling(
                    source,
                    limits,
                    if mode == ImportMode::Move { used.bytes } else { Bytes(0) },
                )?;
                // The record before the first change: a repeated call knows from it that data in the store are its own.
                let path = source.as_os_str().as_bytes();
                self.imports.write(journal_name(id), path, FileMode::PRIVATE_FILE).map_err(dir_error)?;
                match mode {
                    ImportMode::Move => {
                        self.steps.run_step(VolumeStep::MoveToImport, || self.take_directory(id, source))?;
                        self.commit_moved(id, limits)
                    }
                    ImportMode::Copy => {
                        self.commit_copy(id, limits, source).inspect_err(|_| self.discard_copy(id))
                    }
                }
            }
            ImportStart::Commit => self.commit_moved(id, limits),
            // The rename of a killed call may not be durable yet.
            ImportStart::Done => self.volumes.sync().map(|()| ImportOutcome::AlreadyDone).map_err(dir_error),
            ImportStart::Reject(conflict) => Err(self.conflict_error(&conflict, id, source)),
        }
    }

    /// Removes the record of an import that is complete: the volume has its PersistentVolume.
    ///
    /// # Errors
    /// [`SourceError::Store`]; a retry can help.
    pub fn finish(&self, id: &VolumeId) -> Result<(), SourceError> {
        self.imports.remove_file(journal_name(id)).map(drop).map_err(dir_error)
    }

    /// Checks that a new volume may be promised. A moved directory has counted as other data until now.
    fn check_ceiling(&self, source: &Path, limits: QuotaLimits, moved: Bytes) -> Result<(), SourceError> {
        let checked = self.find_shortage(limits, moved)?;
        checked.map_err(|shortage| SourceError::OverCeiling { path: source.to_owned(), source: shortage })
    }

    fn find_shortage(
        &self,
        limits: QuotaLimits,
        moved: Bytes,
    ) -> Result<Result<(), CapacityShortage>, SourceError> {
        let Some(ceiling) = self.ceiling else { return Ok(Ok(())) };
        let options = DirStoreOptions { capacity: ceiling, ..DirStoreOptions::default() };
        let base = self.base.try_clone().map_err(dir_error)?;
        // Without the lock of the store, which a provisioner may hold now.
        let store = OpenStore::open_unlocked(base, Arc::clone(&self.quota), &options);
        let capacity =
            store.and_then(|store| store.ledger.capacity_without(moved)).map_err(SourceError::Store)?;
        Ok(capacity.check_limit(Bytes(0), limits.bytes.unwrap_or_default()))
    }

    fn read_journal(&self, id: &VolumeId) -> Result<Option<PathBuf>, SourceError> {
        match self.imports.read(journal_name(id)) {
            Ok(path) => Ok(Some(OsStr::from_bytes(&path).into())),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(dir_error(error)),
        }
    }

    fn find_places(&self, id: &VolumeId, path: &Path) -> Result<ImportPlaces, SourceError> {
        let source = SourceDir(path).exists()?;
        let staged = self.imports.exists(id.as_str()).map_err(dir_error)?;
        let volume = match self.volumes.open_dir(id.as_str()) {
            Ok(dir) => Some(dir.is_empty().map_err(dir_error)?),
            Err(error) if error.is_not_found() => None,
            Err(error) => return Err(dir_error(error)),
        };
        // A volume that the provisioner has created for the claim is empty until a pod uses it.
        let has_data = match volume {
            Some(is_empty) => !is_empty || SourceDir(path).is_missing_or_empty()?,
            None => false,
        };
        let is_volume_ours = self.read_journal(id)?.is_some() && has_data;
        Ok(ImportPlaces { source, staged, volume: volume.is_some(), is_volume_ours })
    }

    fn conflict_error(&self, conflict: &ImportConflict, id: &VolumeId, source: &Path) -> SourceError {
        let (path, staged) = (source.to_owned(), self.imports.path().join(id.as_str()));
        match conflict {
            ImportConflict::Missing => SourceError::Missing { path },
            ImportConflict::Reappeared => SourceError::Reappeared { path, staged },
            ImportConflict::VolumeExists => {
                let path = if staged.exists() { staged } else { path };
                SourceError::VolumeExists { id: id.clone(), path }
            }
        }
    }

    fn take_directory(&self, id: &VolumeId, source: &Path) -> Result<(), SourceError> {
        let not_a_directory = || SourceError::NotADirectory { path: source.to_owned() };
        let (parent, name) = source.parent().zip(source.file_name()).ok_or_else(not_a_directory)?;
        let parent = Dir::open(parent).map_err(dir_error)?;
        // One rename: the data are in one place or the other, and a repeated call finds out in which.
        parent.rename(name, &self.imports, id.as_str(), RenameMode::NoReplace).map_err(dir_error)
    }

    /// Limits a moved directory, and makes it the volume.
    fn commit_moved(&self, id: &VolumeId, limits: QuotaLimits) -> Result<ImportOutcome, SourceError> {
        let dir = self.imports.open_dir(id.as_str()).map_err(dir_error)?;
        // Again after a kill: the tree may have its project only in part.
        let limit = || self.quota.limit_tree(dir.as_fd(), limits.into());
        let limited = self.steps.run_step(VolumeStep::LimitTree, limit);
        let (_, tree) = limited.map_err(|source| quota_error(&dir, source))?;
        self.commit(&dir, id.as_str(), id)?;
        let TreeSummary { special, foreign, immutable, .. } = tree;
        Ok(ImportOutcome::Imported { uncounted: special + foreign + immutable, devices: 0 })
    }

    /// Copies a directory into a limited one, and makes that the volume.
    fn commit_copy(
        &self,
        id: &VolumeId,
        limits: QuotaLimits,
        source: &Path,
    ) -> Result<ImportOutcome, SourceError> {
        let name = format!("{COPY_PREFIX}{id}");
        let from = Dir::open(source).map_err(dir_error)?;
        let create = || self.imports.ensure_dir(&name, FileMode::PRIVATE_DIR);
        let copy = self.steps.run_step(VolumeStep::CreateDirectory, create).map_err(dir_error)?;
        // Limits before the first file: the copy counts from its beginning, and can't fill the disk.
        let limit = || self.quota.set_limits(copy.as_fd(), limits.into());
        self.steps.run_step(VolumeStep::SetLimits, limit).map_err(|error| quota_error(&copy, error))?;
        let clone = || from.clone_tree(&copy, &Copier, &|| false);
        let cloned = self.steps.run_step(VolumeStep::CopyTree, clone).map_err(dir_error)?;
        // On ext4, root may exceed limits.
        let status = self.quota.read_status(copy.as_fd()).map_err(|error| quota_error(&copy, error))?;
        if let Some(status) = status.filter(QuotaStatus::is_over_limit) {
            return Err(SourceError::TooLarge { path: source.to_owned(), used: status.usage, limits });
        }
        if cloned.separate_files > 0 {
            let path = source.display();
            tracing::warn!(separate_files = cloned.separate_files, "made files of some hard links of {path}");
        }
        self.commit(&copy, &name, id)?;
        Ok(ImportOutcome::Imported { uncounted: 0, devices: cloned.devices })
    }

    /// Renames a complete directory into the directory of volumes, with all that it needs on the disk.
    fn commit(&self, dir: &Dir, name: &str, id: &VolumeId) -> Result<(), SourceError> {
        // The data first: after a power loss, a directory in the place of volumes would pass for a complete one.
        rustix::fs::syncfs(dir)
            .map_err(|errno| SourceError::Read { path: dir.path().to_owned(), source: errno.into() })?;
        let rename = || self.imports.rename(name, &self.volumes, id.as_str(), RenameMode::NoReplace);
        match self.steps.run_step(VolumeStep::RenameIntoPlace, rename) {
            Ok(()) => Ok(()),
            // A pod has used the claim since, so the provisioner created an empty volume.
            Err(error) if error.is_already_exists() => {
                Err(SourceError::VolumeExists { id: id.clone(), path: dir.path().to_owned() })
            }
            Err(error) => Err(dir_error(error)),
        }
    }

    /// Leaves nothing of a copy that failed: the caller may never repeat it.
    fn discard_copy(&self, id: &VolumeId) {
        if let Err(error) = self.remove_incomplete_copies().and_then(|()| self.finish(id)) {
            tracing::warn!(handle = %id, "remove an incomplete copy: {}", format_chain(&error));
        }
    }

    /// Removes the copies of killed calls: the lock keeps others out, so none is in progress.
    fn remove_incomplete_copies(&self) -> Result<(), SourceError> {
        for entry in self.imports.list().map_err(dir_error)? {
            let name = entry.name.as_os_str();
            if !name.as_bytes().starts_with(COPY_PREFIX.as_bytes()) {
                continue;
            }
            let dir = self.imports.open_dir(name).map_err(dir_error)?;
            let failed = |source| quota_error(&dir, source);
            // Before the tree is removed: nothing else has a record of its project.
            let project = self.quota.find_project(dir.as_fd()).map_err(failed)?;
            self.imports.remove_tree(name).map_err(dir_error)?;
            // A kill before this leaves a project without files, which the provisioner's next start releases. So does a
            // kernel that frees the files later, as XFS does.
            match project.map_or(Ok(()), |project| self.quota.release_project(project)) {
                Ok(()) | Err(QuotaError::ProjectInUse { .. }) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }

    /// Removes the records of imports that have not moved or committed anything.
    fn remove_stale_journals(&self) -> Result<(), SourceError> {
        for entry in self.imports.list().map_err(dir_error)? {
            let id = entry.name.as_os_str().to_str().and_then(|name| name.strip_suffix(JOURNAL_SUFFIX));
            let Some(id) = id.and_then(|id| id.parse::<VolumeId>().ok()) else { continue };
            let exists = |dir: &Dir| dir.exists(id.as_str()).map_err(dir_error);
            if !exists(&self.imports)? && !exists(&self.volumes)? {
                self.finish(&id)?;
            }
        }
        Ok(())
    }
}

fn dir_error(error: DirError) -> SourceError {
    SourceError::Store(DirStoreError::Directory(error))
}

fn quota_error(dir: &Dir, source: QuotaError) -> SourceError {
    SourceError::Store(store_quota_error(dir, source))
}

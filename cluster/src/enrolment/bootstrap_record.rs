//! The record that outlives the node's data: it was enrolled once, so a lost disk never makes a second cluster.

use std::path::{Path, PathBuf};

use nodekeel_localstorage::{Dir, FileMode};
use nodekeel_supervisor::Failure;

use super::cluster_node::{ClusterRequest, SharedState};
use super::failure::StepError;
use super::plan::BootstrapPermission;
use super::progress::{EnrolmentId, EnrolmentKind, EnrolmentProgress};

/// The record's name in the directory of the enrolment journal, where it is by default.
pub(super) const DEFAULT_NAME: &str = "bootstrapped";

/// A file that records that this host was enrolled once, and so has no permission to bootstrap any more: the
/// enrolment's id, which is also that of the cluster that it has bootstrapped, and a newline. Any other
/// content means the same.
///
/// The file belongs on another disk than the node's data: where the permission itself survives that disk. That disk
/// need not be mounted for a node that is in its cluster; where it is needed, its directory must exist.
#[derive(Clone, Debug)]
pub struct BootstrapRecord {
    path: PathBuf,
}

impl BootstrapRecord {
    /// The file at this absolute path.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The content, if the file exists. It blocks.
    pub(super) fn load(&self) -> Result<Option<Vec<u8>>, StepError> {
        // A missing directory is not a missing record: its disk may not be mounted.
        let dir = self.open_dir().map_err(|source| self.failed(source))?;
        match dir.read_at_most(self.name(), 4096) {
            Ok(content) => Ok(Some(content)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(source) => Err(self.failed(source)),
        }
    }

    /// Writes it durably. It blocks.
    pub(super) fn store(&self, enrolment: EnrolmentId) -> Result<(), StepError> {
        let content = Self::content(enrolment);
        let written = self.open_dir().and_then(|dir| dir.write(self.name(), &content, FileMode::new(0o400)));
        written.map_err(|source| self.failed(source))
    }

    /// Removes it, if it exists. It blocks.
    pub(super) fn remove(&self) -> Result<(), nodekeel_localstorage::Error> {
        self.open_dir()?.remove_file(self.name()).map(drop)
    }

    fn open_dir(&self) -> Result<Dir, nodekeel_localstorage::Error> {
        Dir::open(self.path.parent().unwrap_or(Path::new("/")))
    }

    fn name(&self) -> &Path {
        Path::new(self.path.file_name().unwrap_or_default())
    }

    pub(super) fn content(enrolment: EnrolmentId) -> Vec<u8> {
        format!("{}\n", enrolment.to_hex()).into_bytes()
    }

    fn failed(&self, source: nodekeel_localstorage::Error) -> StepError {
        StepError::BootstrapRecord { path: self.path.clone(), source }
    }
}

impl SharedState {
    /// The record that the permission to bootstrap is used up.
    pub(super) fn bootstrap_record(&self) -> BootstrapRecord {
        self.settings
            .bootstrap_record
            .clone()
            .unwrap_or_else(|| BootstrapRecord::new(self.deps.journal_dir.path().join(DEFAULT_NAME)))
    }

    /// Returns whether the node may bootstrap a cluster. It blocks.
    pub(super) fn bootstrap_permission(&self) -> Result<BootstrapPermission, StepError> {
        let record = self.bootstrap_record();
        let request = *self.cluster_request.borrow();
        Ok(match record.load()? {
            // Of the cluster that was on this host, or of another one: a restore makes no second one.
            _ if request == Some(ClusterRequest::Restore) => BootstrapPermission::Restore,
            // The record wins over the configuration and over an operator's request.
            Some(_) => BootstrapPermission::UsedUp(record.path().to_owned()),
            None if self.settings.bootstrap || request == Some(ClusterRequest::Bootstrap) => {
                BootstrapPermission::Granted
            }
            None => BootstrapPermission::NotGranted,
        })
    }

    /// Records that this enrolment uses up the permission to bootstrap, before it creates a cluster. An earlier
    /// release made no such record: a bootstrap that it has started gets one, and a node that it has enrolled keeps
    /// running without. It blocks.
    pub(super) fn record_enrolment(&self, progress: &EnrolmentProgress) -> Result<(), StepError> {
        let is_bootstrap = progress.enrolment_kind() == EnrolmentKind::Bootstrap;
        let makes_cluster = is_bootstrap || progress.enrolment_kind() == EnrolmentKind::Restore;
        // The record takes away a permission, so a node that joins without ever having had it needs none.
        let is_needed = self.settings.bootstrap || (makes_cluster && !progress.is_enrolled());
        if !is_needed {
            return Ok(());
        }
        let is_in_cluster = progress.cluster_id().is_some();
        let record = self.bootstrap_record();
        let stored = match record.load() {
            Ok(None) => record.store(progress.enrolment_id()),
            Ok(Some(content))
                // A bootstrap that is resumed finds its own record. Another one's means that two nodes share
                // the file.
                if is_bootstrap
                    && !is_in_cluster
                    && content != BootstrapRecord::content(progress.enrolment_id()) =>
            {
                Err(StepError::ForeignBootstrapRecord { path: record.path().to_owned() })
            }
            loaded => loaded.map(drop),
        };
        match stored {
            // The record matters only once the data is lost: without it, the node still returns to its cluster.
            Err(error) if is_in_cluster => {
                tracing::warn!("the bootstrap is not recorded: {}", Failure::new(error));
                Ok(())
            }
            stored => stored,
        }
    }
}

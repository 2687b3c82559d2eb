//! The data volume of the node.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::volume::{
    DataVolume, DirectoryVolume, ErasePolicy, VOLUME_MARK, VOLUME_MARK_FILE, VolumeError,
};
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use thiserror::Error;
use tokio::task::spawn_blocking;

use super::PartDeps;
use crate::config::{ConfigSection, NodedConfig};
use crate::data::{LayoutMigration, MigrationScope};
use crate::layout::{StorageLayout, VOLUME_DIR, VOLUME_MODE};
use crate::node::NodeState;
use crate::part::{NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable};
use crate::plan::{PartPlanner, error_chain};
use crate::volume::{CloseOnDrop, storage_stop_timeout};

/// Its DN.
pub(crate) const DN: &str = "root.storage";

/// The part that opens the data volume.
pub(super) struct StoragePart {
    provided: Option<Arc<dyn DataVolume>>,
}

impl StoragePart {
    pub(super) fn new(deps: &PartDeps) -> Self {
        Self { provided: deps.volume.clone() }
    }
}

impl Part for StoragePart {
    fn name(&self) -> &str {
        "storage"
    }

    fn sections(&self) -> Vec<ConfigSection> {
        vec![ConfigSection::field("storage")]
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let config = planner.config();
        let scope = MigrationScope {
            is_other_volume: self.provided.is_some(),
            keeps_volumes: keeps_former_volumes(config),
        };
        // A data directory that does not exist has nothing to move, and one that can't be opened is reported by itself.
        let migration = Dir::open(&config.node.data).map(|data| LayoutMigration::plan(&data, scope));
        let migration = migration.unwrap_or(Ok(LayoutMigration::default())).unwrap_or_else(|error| {
            planner.report(error_chain(&error));
            LayoutMigration::default()
        });
        let volume = match &self.provided {
            Some(volume) => VolumeSource::Provided(Arc::clone(volume)),
            None => VolumeSource::Directory(config.node.data.join(VOLUME_DIR)),
        };
        let plan = StoragePlan { volume, scope, migration };
        planner.add(PlannedService::new(DN, plan).node_layout::<StorageLayout>());
    }
}

/// Whether the operator has configured the directory where an earlier release kept the volumes.
fn keeps_former_volumes(config: &NodedConfig) -> bool {
    let configured = config.provisioner.as_ref().and_then(|provisioner| provisioner.directory.as_ref());
    configured.is_some_and(|directory| directory.starts_with(config.node.data.join("volumes")))
}

/// Where the data volume comes from.
#[derive(Debug, Clone)]
enum VolumeSource {
    /// This directory, or what is mounted on it.
    Directory(PathBuf),
    /// The program.
    Provided(Arc<dyn DataVolume>),
}

/// The data volume of the node.
#[derive(Debug)]
struct StoragePlan {
    volume: VolumeSource,
    scope: MigrationScope,
    migration: LayoutMigration,
}

impl fmt::Display for StoragePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.volume {
            VolumeSource::Directory(path) => write!(f, "the data volume, directory {}", path.display())?,
            VolumeSource::Provided(_) => f.write_str("the data volume that the program provides")?,
        }
        write!(f, "{}", self.migration)
    }
}

impl PlannedRunnable for StoragePlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        // Again, now that no other instance can change it.
        let data = Dir::open(node.data().path())?;
        LayoutMigration::plan(&data, self.scope)?.apply(&data)?;
        node.create_node_layout::<StorageLayout>()?;
        let volume = self.volume.clone();
        Ok(PreparedRunnable::new(StorageService { volume, state: Arc::clone(node.state) }))
    }
}

/// Opens the volume, and closes it when what lies on it has stopped.
struct StorageService {
    volume: VolumeSource,
    state: Arc<NodeState>,
}

impl Runnable for StorageService {
    fn run(&self, ctx: Context) -> RunFuture {
        Box::pin(run_storage(self.volume.clone(), Arc::clone(&self.state), ctx))
    }

    fn stop_timeout(&self) -> Option<Duration> {
        Some(storage_stop_timeout(&self.state))
    }
}

async fn run_storage(source: VolumeSource, state: Arc<NodeState>, ctx: Context) -> Result<(), Failure> {
    let (volume, dir) = spawn_blocking(move || source.open()).await??;
    tracing::info!("opened the data volume in {}", dir.path().display());
    state.volume.open(dir);
    let open = CloseOnDrop(&state);
    ctx.signal_ready()?;
    let canceled = ctx.canceled().await;
    open.close().await;
    spawn_blocking(move || volume.unmount()).await??;
    Err(canceled.into())
}

/// The data volume can't be opened.
#[derive(Debug, Error)]
enum StorageError {
    #[error("can't open the data volume")]
    Open(#[source] VolumeError),
    #[error(
        "can't open the data volume: {} has files, but not the file {VOLUME_MARK_FILE}, which marks a data volume; move \
         them away, or, if they are this node's, type: echo '{}' > {}",
        path.display(), VOLUME_MARK.trim_end(), path.join(VOLUME_MARK_FILE).display()
    )]
    Unmarked { path: PathBuf },
    #[error("can't open the directory of the data volume")]
    Directory(#[source] nodekeel_localstorage::Error),
}

impl VolumeSource {
    /// Opens the volume, and creates it if it is blank. It blocks.
    fn open(self) -> Result<(Arc<dyn DataVolume>, Dir), StorageError> {
        match self {
            Self::Provided(volume) => {
                let dir = open_or_create(&*volume).map_err(StorageError::Open)?;
                Ok((volume, dir))
            }
            Self::Directory(path) => {
                // Opened at each start: a file system may be mounted there meanwhile.
                let parent = path.parent().unwrap_or(&path);
                let dir = Dir::open(parent).and_then(|data| data.ensure_dir(VOLUME_DIR, VOLUME_MODE));
                let volume = DirectoryVolume::new(dir.map_err(StorageError::Directory)?);
                let dir = open_or_create(&volume).map_err(|error| match error {
                    VolumeError::ForeignData { path, .. } => StorageError::Unmarked { path },
                    error => StorageError::Open(error),
                })?;
                Ok((Arc::new(volume), dir))
            }
        }
    }
}

/// Opens a volume, and creates it if it is blank.
fn open_or_create(volume: &dyn DataVolume) -> Result<Dir, VolumeError> {
    // What a run has left that did not end in time.
    volume.unmount()?;
    match volume.mount_existing() {
        Err(VolumeError::Absent { .. } | VolumeError::Unfinished { .. }) => {
            volume.mount_new(ErasePolicy::Nothing)
        }
        opened => opened,
    }
}

//! The data volume of the node.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::tree::LayoutFile;
use nodekeel_localstorage::volume::{
    DataVolume, DirectoryVolume, ErasePolicy, MountState, VOLUME_MARK, VOLUME_MARK_FILE, VolumeError,
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

/// The content of the file that records that a file system was mounted on the directory of the volume.
const MOUNTED_RECORD: &[u8] = b"nodekeel mounted data volume, format 1\n";

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
    // Both may be named by way of links.
    let real_path = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let former = real_path(&config.node.data.join("volumes"));
    configured.is_some_and(|directory| real_path(directory).starts_with(former))
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
        let mounted = node.create_node_layout::<StorageLayout>()?.mounted;
        let opener = VolumeOpener { source: self.volume.clone(), mounted, mounted_at: Arc::default() };
        Ok(PreparedRunnable::new(StorageService { opener, state: Arc::clone(node.state) }))
    }
}

/// Opens the volume, and closes it when what lies on it has stopped.
struct StorageService {
    opener: VolumeOpener,
    state: Arc<NodeState>,
}

impl Runnable for StorageService {
    fn run(&self, ctx: Context) -> RunFuture {
        Box::pin(run_storage(self.opener.clone(), Arc::clone(&self.state), ctx))
    }

    fn stop_timeout(&self) -> Option<Duration> {
        Some(storage_stop_timeout(&self.state))
    }
}

async fn run_storage(opener: VolumeOpener, state: Arc<NodeState>, ctx: Context) -> Result<(), Failure> {
    let (volume, dir) = spawn_blocking(move || opener.open()).await??;
    tracing::info!("opened the data volume in {}", dir.path().display());
    state.volume.open(dir);
    let open = CloseOnDrop(&state);
    ctx.signal_ready()?;
    let canceled = ctx.canceled().await;
    open.close().await;
    if let Err(error) = spawn_blocking(move || volume.unmount()).await? {
        // Containers outlive containerd. The next incarnation uses it as it is mounted.
        tracing::warn!("the data volume stays mounted: {}", error_chain(&error));
    }
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
    #[error(
        "can't open the data volume: the file system that was mounted on {} is not mounted; mount it, or, if the node is \
         to keep its data in the directory itself, type: rm {}",
        path.display(), record.display()
    )]
    NotMounted { path: PathBuf, record: PathBuf },
    #[error("can't open the directory of the data volume")]
    Directory(#[source] nodekeel_localstorage::Error),
}

/// Opens the data volume, again and again.
#[derive(Clone)]
struct VolumeOpener {
    source: VolumeSource,
    /// Exists once a file system was mounted on the directory.
    mounted: LayoutFile,
    /// Where a provided volume was mounted last.
    mounted_at: Arc<Mutex<Option<PathBuf>>>,
}

impl VolumeOpener {
    /// Opens the volume, and creates it if it is blank. It blocks.
    fn open(&self) -> Result<(Arc<dyn DataVolume>, Dir), StorageError> {
        match &self.source {
            VolumeSource::Provided(volume) => {
                let mut mounted_at = self.mounted_at.lock().unwrap_or_else(PoisonError::into_inner);
                let dir = open_provided(&**volume, mounted_at.as_deref()).map_err(StorageError::Open)?;
                *mounted_at = Some(dir.path().to_owned());
                Ok((Arc::clone(volume), dir))
            }
            VolumeSource::Directory(path) => self.open_directory(path),
        }
    }

    /// At each start: a file system may be mounted there meanwhile.
    fn open_directory(&self, path: &Path) -> Result<(Arc<dyn DataVolume>, Dir), StorageError> {
        let data = Dir::open(path.parent().unwrap_or(path)).map_err(StorageError::Directory)?;
        let is_mounted = data.is_mount_point(VOLUME_DIR).map_err(StorageError::Directory)?;
        let was_mounted = self.mounted.exists().map_err(StorageError::Directory)?;
        if was_mounted && !is_mounted {
            let record = self.mounted.path().to_owned();
            return Err(StorageError::NotMounted { path: path.to_owned(), record });
        }
        let dir = data.ensure_dir(VOLUME_DIR, VOLUME_MODE).map_err(StorageError::Directory)?;
        let volume = DirectoryVolume::new(dir);
        let dir = open_or_create(&volume).map_err(|error| match error {
            VolumeError::ForeignData { path, .. } => StorageError::Unmarked { path },
            error => StorageError::Open(error),
        })?;
        if is_mounted && !was_mounted {
            self.mounted.write(MOUNTED_RECORD).map_err(StorageError::Directory)?;
        }
        Ok((Arc::new(volume), dir))
    }
}

/// Opens a volume that the last incarnation may have left mounted, because it did not end in time, or because something
/// uses the volume that noded does not stop.
fn open_provided(volume: &dyn DataVolume, mounted_at: Option<&Path>) -> Result<Dir, VolumeError> {
    match (volume.unmount(), mounted_at) {
        (Ok(()), _) => open_or_create(volume),
        (Err(_), Some(path)) if volume.state() == MountState::Mounted => {
            Dir::open(path).map_err(VolumeError::Finish)
        }
        (Err(error), _) => Err(error),
    }
}

/// Opens a volume, and creates it if it is blank.
fn open_or_create(volume: &dyn DataVolume) -> Result<Dir, VolumeError> {
    match volume.mount_existing() {
        Err(VolumeError::Absent { .. } | VolumeError::Unfinished { .. }) => {
            volume.mount_new(ErasePolicy::Nothing)
        }
        opened => opened,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_configured_directory_of_volumes_is_known_by_any_path() {
        let scratch = tempfile::tempdir().expect("a directory");
        let data = scratch.path().join("data");
        fs::create_dir_all(data.join("volumes/a")).expect("created");
        symlink("data", scratch.path().join("link")).expect("linked");
        let is_kept = |data: &Path, directory: &Path| {
            let text = format!("[provisioner]\nkubeconfig = \"/k\"\ndirectory = {directory:?}\n");
            let mut config = NodedConfig::parse_toml(Path::new("a.toml"), &text).expect("valid");
            config.node.data = data.to_owned();
            keeps_former_volumes(&config)
        };
        let link = scratch.path().join("link");
        for (data, directory) in [(&data, &data), (&data, &link), (&link, &data)] {
            assert!(is_kept(data, &directory.join("volumes")), "{directory:?}");
            assert!(is_kept(data, &directory.join("volumes/a")), "{directory:?}");
            assert!(!is_kept(data, &directory.join("volumes2")), "{directory:?}");
        }
    }
}

//! The cluster's directory on the data volume of the node.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_localstorage::Dir;
use nodekeel_localstorage::volume::{DataVolume, DirectoryVolume, ErasePolicy, MountState, VolumeError};
use nodekeel_supervisor::{Context, RunFuture, Runnable};

use super::backup::BackupService;
use crate::parts::storage::keys::{KeyService, VolumeKeys};

/// The volume of the cluster: its directory on the data volume of the node, while that is open.
#[derive(Debug, Default)]
pub(super) struct ClusterVolume(Mutex<Option<Arc<DirectoryVolume>>>);

impl ClusterVolume {
    /// Uses this directory from now on.
    pub(super) fn attach(&self, directory: Dir) {
        *self.lock() = Some(Arc::new(DirectoryVolume::new(directory)));
    }

    fn directory(&self) -> Result<Arc<DirectoryVolume>, VolumeError> {
        self.lock().clone().ok_or(VolumeError::InvalidState { state: MountState::Unmounted })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<DirectoryVolume>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DataVolume for ClusterVolume {
    fn mount_new(&self, erase: ErasePolicy) -> Result<Dir, VolumeError> {
        self.directory()?.mount_new(erase)
    }

    fn mount_existing(&self) -> Result<Dir, VolumeError> {
        self.directory()?.mount_existing()
    }

    fn unmount(&self) -> Result<(), VolumeError> {
        self.directory().map_or(Ok(()), |directory| directory.unmount())
    }

    fn state(&self) -> MountState {
        self.directory().map_or(MountState::Unmounted, |directory| directory.state())
    }
}

/// One incarnation of the cluster on the open volume. It keeps nothing of the volume open when it ends.
pub(super) struct ClusterOnVolume {
    pub(super) cluster: ClusterNode,
    pub(super) volume: Arc<ClusterVolume>,
    /// Of an encrypted data volume, half of whose key the cluster keeps.
    pub(super) keys: Option<Arc<VolumeKeys>>,
    /// Of a node with a schedule for backups.
    pub(super) backup: Option<BackupService>,
}

impl Runnable for ClusterOnVolume {
    fn run(&self, ctx: Context) -> RunFuture {
        // The guard is created before the future: a future that is dropped before its first poll releases the
        // volume, too.
        let (cluster, release) =
            (self.cluster.clone(), ReleaseOnDrop(self.cluster.clone(), Arc::clone(&self.volume)));
        let keys = self.keys.clone().map(|keys| KeyService::new(keys, self.cluster.clone()));
        let backup = self.backup.clone();
        Box::pin(async move {
            if let Some(backup) = backup {
                ctx.run_child("backup", backup)?;
            }
            if let Some(keys) = keys {
                // A child of the cluster: the service stops with the cluster, in whose store it keeps the keys.
                ctx.run_child("keys", keys)?;
            }
            let ended = cluster.run(ctx).await;
            // This use moves the guard into the future, which also releases the volume when it is dropped early.
            drop(release);
            ended
        })
    }
}

struct ReleaseOnDrop(ClusterNode, Arc<ClusterVolume>);

impl Drop for ReleaseOnDrop {
    fn drop(&mut self) {
        // The release unmounts through the slot, and so the slot is emptied afterwards.
        self.0.release_volume();
        *self.1.lock() = None;
    }
}

//! The CSI node service.

use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::Arc;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Semaphore;
use tokio::task::JoinError;
use tonic::{Code, Request, Response, Status};

use super::guard::InFlightCalls;
use super::mounter::{FileId, TargetConflict, TargetMountError, VolumeMounter};
use super::plugin::PluginDeps;
use super::proto::csi::node_server::Node;
use super::proto::csi::node_service_capability::{Rpc, Type, rpc};
use super::proto::csi::*;
use super::request::{PublishRequest, StatsRequest, UnpublishRequest};
use super::stats::{FilesystemSpace, PublishedSpace, usage_rows};
use super::target_path::TargetPath;
use crate::error_chain::format_chain;
use crate::id::VolumeId;
use crate::image::{ImageFormat, VolumeKind};
use crate::name::StoreName;
use crate::store::{OpenVolume, VolumeOpener, VolumeStore, VolumeStoreError};

/// The message of a volume without problems, which the kubelet reports.
const NORMAL_MESSAGE: &str = "the volume can be used";

/// A store of the node, and what opens its volumes.
#[derive(Debug, Clone)]
pub(super) struct PluginStore {
    pub(super) name: Option<StoreName>,
    pub(super) store: Arc<dyn VolumeStore>,
    pub(super) volumes: Arc<dyn VolumeOpener>,
    calls: Arc<Semaphore>,
}

/// How many calls wait for one disk at once: each one of a disk that hangs takes a thread for as long.
const CALLS_AT_ONCE: usize = 8;

impl PluginStore {
    pub(super) fn new(
        name: Option<StoreName>,
        store: Arc<dyn VolumeStore>,
        volumes: Arc<dyn VolumeOpener>,
    ) -> Self {
        Self { name, store, volumes, calls: Arc::new(Semaphore::new(CALLS_AT_ONCE)) }
    }

    /// Has the disk answer, in its turn. If the caller disconnects, what waits is dropped, and what has begun completes.
    async fn ask<T: Send + 'static>(
        &self,
        answer: impl Future<Output = Result<T, Status>> + Send + 'static,
    ) -> Result<T, Status> {
        let turn = Arc::clone(&self.calls).acquire_owned().await;
        // In a task: the turn ends with the work, and not with the call that gives it up.
        let done = tokio::spawn(async move {
            let _until_done = turn;
            answer.await
        });
        done.await.unwrap_or_else(|error| Err(call_incomplete(&error)))
    }
}

/// The node service, for targets below the kubelet's directory.
#[derive(Debug, Clone)]
pub(super) struct NodeService {
    pub(super) deps: Arc<PluginDeps>,
    /// At least one.
    pub(super) stores: Vec<PluginStore>,
    pub(super) kubelet_dir: PathBuf,
    pub(super) in_flight: InFlightCalls,
}

impl NodeService {
    /// The store that a PersistentVolume names.
    fn named_store(&self, wanted: &PublishRequest) -> Result<&PluginStore, Status> {
        let is_named = |store: &&PluginStore| store.name == wanted.store;
        self.stores.iter().find(is_named).ok_or_else(|| {
            let name = wanted.store.as_ref().map(StoreName::as_str).unwrap_or_default();
            Status::failed_precondition(format!(
                "volume {} is in store {name}, which this node does not have: add it to the stores in the configuration of \
                 the node",
                wanted.id
            ))
        })
    }

    /// The store of a volume, of which a call names only the id and the target: the one that has the volume that is mounted
    /// there, or else the one that has a volume of this id, or one that can't tell. All are asked at once: a disk that
    /// hangs does not hide the volumes of the others.
    async fn find_store(&self, id: &VolumeId, target: &TargetPath) -> Result<&PluginStore, Status> {
        let [first, _, ..] = &self.stores[..] else { return Ok(&self.stores[0]) };
        let (mounter, target) = (Arc::clone(&self.deps.mounter), target.clone());
        let mounted = run_blocking(move || Ok(mounter.find_mount(&target).ok().flatten())).await?;
        let mounted = mounted.map(|mounted| mounted.volume);
        let looks = self.stores.iter().map(|store| async move {
            let (volumes, id) = (Arc::clone(&store.volumes), id.clone());
            let look = move || Ok(volumes.inspect(&id).map(|volume| FileId::from_fd(volume.as_fd()).ok()));
            (store, store.ask(run_blocking(look)).await)
        });
        let mut looks: FuturesUnordered<_> = looks.collect();
        let (mut found, mut untold) = (None, None);
        while let Some((store, look)) = looks.next().await {
            match look? {
                Ok(file) if mounted.is_none() || file == mounted => return Ok(store),
                Ok(_) => found = Some(store),
                Err(VolumeStoreError::NotFound { .. }) => {}
                Err(_) => untold = Some(store),
            }
        }
        Ok(found.or(untold).unwrap_or(first))
    }

    /// Runs blocking work as the only call in flight for a volume. The work completes even if the caller
    /// disconnects.
    async fn run_exclusive<T: Send + 'static>(
        &self,
        store: &PluginStore,
        id: &VolumeId,
        act: impl FnOnce(&NodeVolumes) -> Result<T, Status> + Send + 'static,
    ) -> Result<T, Status> {
        let busy = || Status::aborted(format!("another call for volume {id} is in flight"));
        let in_flight = self.in_flight.try_acquire(id).ok_or_else(busy)?;
        let volumes = self.volumes_of(store);
        let act = run_blocking(move || {
            // The thread holds the mark, and not this future, which ends when the kubelet gives up the call.
            let _until_done = in_flight;
            act(&volumes)
        });
        store.ask(act).await
    }

    /// The usage of a published volume; if the store can't tell, because it or the volume is lost, only why the volume
    /// is abnormal. The kubelet must learn that the pod's volume is lost, and not that it was never there.
    async fn volume_stats(&self, wanted: StatsRequest) -> Result<NodeGetVolumeStatsResponse, Status> {
        let store = self.find_store(&wanted.id, &wanted.target).await?;
        let volumes = self.volumes_of(store);
        let (asked, id) = (Arc::clone(&store.store), wanted.id.clone());
        match store.ask(async move { Ok(asked.usage(&id).await) }).await? {
            Ok(volume) => {
                let space = store.ask(run_blocking(move || volumes.published_space(&wanted))).await?;
                let normal = VolumeCondition { abnormal: false, message: NORMAL_MESSAGE.to_owned() };
                let usage = usage_rows(&volume, &space);
                Ok(NodeGetVolumeStatsResponse { usage, volume_condition: Some(normal) })
            }
            Err(error) => {
                let is_missing = matches!(error, VolumeStoreError::NotFound { .. });
                let is_occupied = move || Ok(volumes.is_occupied(&wanted, is_missing));
                let is_published = store.ask(run_blocking(is_occupied)).await?;
                // A target without a mount is an error of the call, and not of the volume.
                if !is_published {
                    return Err(store_status(&error));
                }
                let message = match error {
                    VolumeStoreError::NotFound { id } => {
                        format!(
                            "volume {id} is missing in its store: restore it from a backup, or delete the claim"
                        )
                    }
                    error => format_chain(&error),
                };
                let abnormal = VolumeCondition { abnormal: true, message };
                Ok(NodeGetVolumeStatsResponse { usage: Vec::new(), volume_condition: Some(abnormal) })
            }
        }
    }

    pub(super) fn volumes_of(&self, store: &PluginStore) -> NodeVolumes {
        NodeVolumes { volumes: Arc::clone(&store.volumes), mounter: Arc::clone(&self.deps.mounter) }
    }
}

pub(super) async fn run_blocking<T: Send + 'static>(
    act: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    match tokio::task::spawn_blocking(act).await {
        Ok(result) => result,
        Err(error) => Err(call_incomplete(&error)),
    }
}

fn call_incomplete(error: &JoinError) -> Status {
    Status::internal(format!("the call did not complete: {error}"))
}

/// The volumes of a store, and the mounts of the node.
pub(super) struct NodeVolumes {
    volumes: Arc<dyn VolumeOpener>,
    pub(super) mounter: Arc<dyn VolumeMounter>,
}

impl NodeVolumes {
    /// Publishes a volume; returns whether it was published already.
    fn publish_volume(&self, wanted: &PublishRequest) -> Result<bool, Status> {
        let volume = self.volumes.open(&wanted.id).map_err(|error| store_status(&error))?;
        check_kind(wanted, volume.kind())?;
        let file = FileId::from_fd(volume.as_fd()).map_err(|error| Status::internal(error.to_string()))?;
        // The kubelet repeats a publish, also after its restart: a mount as requested is a success.
        if let Some(mounted) =
            self.mounter.find_mount(&wanted.target).map_err(|error| mount_status(&error))?
        {
            return match (mounted.volume == file, wanted.options.match_flags(mounted.flags)) {
                (true, true) => Ok(true),
                (true, false) => Err(already_exists(wanted, "already mounted with different options")),
                (false, _) => Err(already_exists(wanted, "occupied by another mount")),
            };
        }
        // No other call publishes the volume between this look and the mount: only one is in flight.
        if wanted.is_exclusive {
            let others = self.mounter.list_targets(&volume).map_err(|error| mount_status(&error))?;
            if let Some(other) = others.iter().find(|other| **other != wanted.target) {
                let text =
                    format!("volume {} is for a single pod, and already published at {other}", wanted.id);
                return Err(Status::failed_precondition(text));
            }
        }
        let result = self.mounter.mount(&volume, &wanted.target, wanted.options.mount_flags());
        result.map(|()| false).map_err(|error| mount_status(&error))
    }

    /// Unpublishes a volume, and releases the device of a block volume that is published nowhere else: also one that a
    /// killed process attached and did not mount.
    fn unpublish_volume(&self, wanted: &UnpublishRequest) -> Result<(), Status> {
        // `inspect` and not `open`, after which a volume counts as written by a pod.
        let volume = self.volumes.inspect(&wanted.id);
        let file = volume.as_ref().ok().and_then(|volume| FileId::from_fd(volume.as_fd()).ok());
        // A pod must terminate also if its volume is lost, but takes nothing with it that is not its volume.
        let other = self.mounter.shows_other(&wanted.target, &wanted.id, file);
        if other.map_err(|error| mount_status(&error))? {
            let (target, source) = (wanted.target.clone(), TargetConflict::OtherMount);
            return Err(mount_status(&TargetMountError::Occupied { target, source }));
        }
        self.mounter.unmount(&wanted.target).map_err(|error| mount_status(&error))?;
        match volume {
            Ok(volume) => self.mounter.release(&volume).map_err(|error| mount_status(&error)),
            Err(error) => {
                tracing::debug!(volume = %wanted.id, "unpublished a volume that is not in the store: {error}");
                Ok(())
            }
        }
    }

    pub(super) fn published_space(&self, wanted: &StatsRequest) -> Result<PublishedSpace, Status> {
        let volume = self.volumes.inspect(&wanted.id).map_err(|error| store_status(&error))?;
        let io_status = |error: std::io::Error| Status::internal(error.to_string());
        let file = FileId::from_fd(volume.as_fd()).map_err(io_status)?;
        let mounted = self.mounter.find_mount(&wanted.target).map_err(|error| mount_status(&error))?;
        let not_mounted = || Status::not_found(format!("volume {} is not mounted at volume_path", wanted.id));
        if mounted.is_none_or(|mounted| mounted.volume != file) {
            return Err(not_mounted());
        }
        match &volume {
            OpenVolume::Directory(dir) => {
                FilesystemSpace::from_fd(dir.as_fd()).map(PublishedSpace::Limited).map_err(io_status)
            }
            OpenVolume::Image { format: ImageFormat::Block, .. } => Ok(PublishedSpace::Device),
            // Only the mounted file system knows how much of its file is free.
            OpenVolume::Image { .. } => {
                let root = self.mounter.open_mount(&wanted.target).map_err(|error| mount_status(&error))?;
                let root = root.ok_or_else(not_mounted)?;
                FilesystemSpace::from_fd(root.as_fd()).map(PublishedSpace::Separate).map_err(io_status)
            }
        }
    }

    /// Releases the devices of volumes that are published nowhere: a killed process leaves them attached.
    pub(super) fn release_unused(&self, in_flight: &InFlightCalls) -> Result<(), TargetMountError> {
        for id in self.mounter.list_attached()? {
            // Before the mark: a disk that hangs here must not keep the volumes of others marked.
            let Ok(volume) = self.volumes.inspect(&id) else { continue };
            // A call in flight does it itself, if it must.
            let Some(_guard) = in_flight.try_acquire(&id) else { continue };
            self.mounter.release(&volume)?;
        }
        Ok(())
    }

    /// Returns whether the volume is mounted at the target, as far as the kernel tells of a disk that fails. A
    /// mount can't be compared with a missing directory: then the kubelet's path names the volume.
    fn is_occupied(&self, wanted: &StatsRequest, is_missing: bool) -> bool {
        let mut names = wanted.target.relative_path().iter();
        if is_missing && !names.any(|name| name == wanted.id.as_str()) {
            return false;
        }
        match self.mounter.find_mount(&wanted.target) {
            Ok(mounted) => mounted.is_some(),
            Err(TargetMountError::NotDirectory { .. }) => false,
            // The mount can't be inspected, as on a disk that fails: the pod must learn that.
            Err(_) => true,
        }
    }
}

/// Rejects a publish whose PersistentVolume has another kind than the volume.
fn check_kind(wanted: &PublishRequest, found: VolumeKind) -> Result<(), Status> {
    if wanted.kind == found {
        return Ok(());
    }
    Err(Status::failed_precondition(format!(
        "volume {} is of the kind {found}, and its PersistentVolume says {}: restore the volume's record in the \
         directory of volumes, or the PersistentVolume",
        wanted.id, wanted.kind
    )))
}

fn already_exists(wanted: &PublishRequest, what: &str) -> Status {
    Status::already_exists(format!("target {} for volume {} is {what}", wanted.target, wanted.id))
}

pub(super) fn store_status(error: &VolumeStoreError) -> Status {
    match error {
        VolumeStoreError::NotFound { .. } => Status::not_found(error.to_string()),
        _ => Status::internal(format_chain(error)),
    }
}

fn mount_status(error: &TargetMountError) -> Status {
    let text = format_chain(error);
    match error {
        TargetMountError::NotDirectory { .. } | TargetMountError::NotFile { .. } => {
            Status::invalid_argument(text)
        }
        TargetMountError::NoParent { .. }
        | TargetMountError::Occupied { .. }
        | TargetMountError::AccessConflict { .. } => Status::failed_precondition(text),
        TargetMountError::Busy { .. } => Status::unavailable(text),
        _ => Status::internal(text),
    }
}

const CAPABILITIES: [rpc::Type; 3] =
    [rpc::Type::GetVolumeStats, rpc::Type::VolumeCondition, rpc::Type::SingleNodeMultiWriter];

fn unimplemented_rpc<T>(what: &str) -> Result<Response<T>, Status> {
    Err(Status::unimplemented(format!("{what} is not supported")))
}

#[tonic::async_trait]
impl Node for NodeService {
    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let wanted = PublishRequest::parse(request.get_ref(), &self.kubelet_dir)?;
        let (id, target, store) = (wanted.id.clone(), wanted.target.clone(), self.named_store(&wanted));
        let publish = move |volumes: &NodeVolumes| {
            volumes.publish_volume(&wanted).inspect_err(|status| {
                // The other codes are about the request, the target, or the pods on the node.
                if status.code() == Code::Internal {
                    volumes.volumes.report_failure(&wanted.id);
                }
            })
        };
        let already_published = match store {
            Ok(store) => self.run_exclusive(store, &id, publish).await,
            Err(status) => Err(status),
        };
        let already_published = already_published.inspect_err(|status| {
            tracing::warn!(volume = %id, target_path = %target, "publish volume: {}", status.message());
        })?;
        tracing::info!(volume = %id, target_path = %target, already_published, "published volume");
        Ok(Response::new(NodePublishVolumeResponse {}))
    }

    /// Also unmounts unknown volumes: otherwise the pod could never terminate.
    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let wanted = UnpublishRequest::parse(request.get_ref(), &self.kubelet_dir)?;
        let (id, target) = (wanted.id.clone(), wanted.target.clone());
        let store = self.find_store(&id, &target).await?;
        let result = self.run_exclusive(store, &id, move |volumes| volumes.unpublish_volume(&wanted));
        result.await.inspect_err(|status| {
            tracing::warn!(volume = %id, target_path = %target, "unpublish volume: {}", status.message());
        })?;
        tracing::info!(volume = %id, target_path = %target, "unpublished volume");
        Ok(Response::new(NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let wanted = StatsRequest::parse(request.get_ref(), &self.kubelet_dir)?;
        self.volume_stats(wanted).await.map(Response::new)
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let rpc =
            |kind: rpc::Type| NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })) };
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities: CAPABILITIES.map(rpc).into() }))
    }

    /// The kubelet labels the node with this topology, which the node affinity of PersistentVolumes refers to.
    async fn node_get_info(
        &self,
        _: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        let node_id = self.deps.node.to_string();
        let segments = [(self.deps.driver.topology_key(), node_id.clone())].into();
        let accessible_topology = Some(Topology { segments });
        Ok(Response::new(NodeGetInfoResponse { node_id, accessible_topology, ..Default::default() }))
    }

    async fn node_stage_volume(
        &self,
        _: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        unimplemented_rpc("NodeStageVolume")
    }

    async fn node_unstage_volume(
        &self,
        _: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        unimplemented_rpc("NodeUnstageVolume")
    }

    async fn node_expand_volume(
        &self,
        _: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        unimplemented_rpc("NodeExpandVolume")
    }

    async fn node_get_volume_health(
        &self,
        _: Request<NodeGetVolumeHealthRequest>,
    ) -> Result<Response<NodeGetVolumeHealthResponse>, Status> {
        unimplemented_rpc("NodeGetVolumeHealth")
    }

    async fn node_get_storage_health(
        &self,
        _: Request<NodeGetStorageHealthRequest>,
    ) -> Result<Response<NodeGetStorageHealthResponse>, Status> {
        unimplemented_rpc("NodeGetStorageHealth")
    }
}

//! What the plugin does on its node.

use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::locks::Locks;
use super::mounts::{FileId, MountError, Mounts};
use super::plugin::PluginDeps;
use super::proto::csi::node_server::Node;
use super::proto::csi::node_service_capability::{Rpc, Type, rpc};
use super::proto::csi::*;
use super::request::{Publish, Stats, Unpublish};
use super::stats::{Space, rows};
use crate::chain::chain;
use crate::id::VolumeId;
use crate::store::{OpenVolume, StoreError};

/// The node service.
#[derive(Debug, Clone)]
pub(super) struct NodeService {
    deps: Arc<PluginDeps>,
    kubelet: PathBuf,
    locks: Locks,
}

impl NodeService {
    /// Volumes for targets below the kubelet's directory.
    pub(super) fn new(deps: Arc<PluginDeps>, kubelet: PathBuf, locks: Locks) -> Self {
        Self { deps, kubelet, locks }
    }

    /// Does what blocks, for a volume for which nothing else is done meanwhile. It ends what it has begun also where the
    /// caller goes away.
    async fn alone<T: Send + 'static>(
        &self,
        id: &VolumeId,
        act: impl FnOnce(&Disk) -> Result<T, Status> + Send + 'static,
    ) -> Result<T, Status> {
        let busy = || Status::aborted(format!("another call for volume {id} is under way"));
        let under_way = self.locks.take(id).ok_or_else(busy)?;
        let disk = self.disk();
        blocking(move || {
            let _until_done = under_way;
            act(&disk)
        })
        .await
    }

    fn disk(&self) -> Disk {
        Disk { volumes: Arc::clone(&self.deps.volumes), mounts: Arc::clone(&self.deps.mounts) }
    }
}

async fn blocking<T: Send + 'static>(
    act: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    match tokio::task::spawn_blocking(act).await {
        Ok(done) => done,
        Err(error) => Err(Status::internal(format!("the call was not ended: {error}"))),
    }
}

/// Volumes and mounts.
struct Disk {
    volumes: Arc<dyn OpenVolume>,
    mounts: Arc<dyn Mounts>,
}

impl Disk {
    /// Whether it was there already.
    fn publish(&self, wanted: &Publish) -> Result<bool, Status> {
        let volume = self.volumes.open(&wanted.id).map_err(|error| refuse_store(&error))?;
        let of = FileId::of(volume.as_fd()).map_err(|error| Status::internal(error.to_string()))?;
        if let Some(there) = self.mounts.mounted(&wanted.target).map_err(|error| refuse_mount(&error))? {
            return match (there.of == of, wanted.options.agree_with(there.flags)) {
                (true, true) => Ok(true),
                (true, false) => Err(already(wanted, "mounted with other options")),
                (false, _) => Err(already(wanted, "taken by something else")),
            };
        }
        if wanted.is_exclusive {
            let others = self.mounts.targets(volume.as_fd()).map_err(|error| refuse_mount(&error))?;
            if let Some(other) = others.iter().find(|other| **other != wanted.target) {
                let text = format!("volume {} is for one pod, and published at {other}", wanted.id);
                return Err(Status::failed_precondition(text));
            }
        }
        let done = self.mounts.mount(volume.as_fd(), &wanted.target, wanted.options.flags());
        done.map(|()| false).map_err(|error| refuse_mount(&error))
    }

    fn is_at(&self, wanted: &Stats) -> Result<Space, Status> {
        let volume = self.volumes.open(&wanted.id).map_err(|error| refuse_store(&error))?;
        let space = || Ok::<_, std::io::Error>((FileId::of(volume.as_fd())?, Space::of(volume.as_fd())?));
        let (of, space) = space().map_err(|error| Status::internal(error.to_string()))?;
        let there = self.mounts.mounted(&wanted.target).map_err(|error| refuse_mount(&error))?;
        match there.is_some_and(|there| there.of == of) {
            true => Ok(space),
            false => Err(Status::not_found(format!("volume {} is not at volume_path", wanted.id))),
        }
    }
}

fn already(wanted: &Publish, what: &str) -> Status {
    Status::already_exists(format!("target {} for volume {} is {what}", wanted.target, wanted.id))
}

fn refuse_store(error: &StoreError) -> Status {
    match error {
        StoreError::NotFound { .. } => Status::not_found(error.to_string()),
        _ => Status::internal(chain(error)),
    }
}

fn refuse_mount(error: &MountError) -> Status {
    let text = chain(error);
    match error {
        MountError::Link { .. } => Status::invalid_argument(text),
        MountError::NoParent { .. } | MountError::Occupied { .. } => Status::failed_precondition(text),
        MountError::Busy { .. } => Status::unavailable(text),
        _ => Status::internal(text),
    }
}

const CAPABILITIES: [rpc::Type; 2] = [rpc::Type::GetVolumeStats, rpc::Type::SingleNodeMultiWriter];

fn unimplemented<T>(what: &str) -> Result<Response<T>, Status> {
    Err(Status::unimplemented(format!("{what} is not offered")))
}

#[tonic::async_trait]
impl Node for NodeService {
    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let wanted = Publish::parse(request.get_ref(), &self.kubelet)?;
        let (id, target) = (wanted.id.clone(), wanted.target.clone());
        let is_old = self.alone(&id, move |disk| disk.publish(&wanted)).await;
        let is_old = is_old.inspect_err(|status| {
            tracing::warn!(volume = %id, target = %target, "not published: {}", status.message());
        })?;
        tracing::info!(volume = %id, target = %target, is_old, "published");
        Ok(Response::new(NodePublishVolumeResponse {}))
    }

    /// Also where the volume is unknown: what is mounted must go, or the pod could never end.
    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let Unpublish { id, target } = Unpublish::parse(request.get_ref(), &self.kubelet)?;
        let place = target.clone();
        let done =
            self.alone(&id, move |disk| disk.mounts.unmount(&place).map_err(|error| refuse_mount(&error)));
        done.await.inspect_err(|status| {
            tracing::warn!(volume = %id, target = %target, "not unpublished: {}", status.message());
        })?;
        tracing::info!(volume = %id, target = %target, "unpublished");
        Ok(Response::new(NodeUnpublishVolumeResponse {}))
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let wanted = Stats::parse(request.get_ref(), &self.kubelet)?;
        let volume = self.deps.store.usage(&wanted.id).await.map_err(|error| refuse_store(&error))?;
        let disk = self.disk();
        let space = blocking(move || disk.is_at(&wanted)).await?;
        Ok(Response::new(NodeGetVolumeStatsResponse { usage: rows(&volume, &space) }))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let rpc =
            |kind: rpc::Type| NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })) };
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities: CAPABILITIES.map(rpc).into() }))
    }

    /// No topology: the PersistentVolume names its node by the label `kubernetes.io/hostname`, which every node has.
    async fn node_get_info(
        &self,
        _: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        let node_id = self.deps.node.to_string();
        Ok(Response::new(NodeGetInfoResponse { node_id, ..Default::default() }))
    }

    async fn node_stage_volume(
        &self,
        _: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        unimplemented("NodeStageVolume")
    }

    async fn node_unstage_volume(
        &self,
        _: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        unimplemented("NodeUnstageVolume")
    }

    async fn node_expand_volume(
        &self,
        _: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        unimplemented("NodeExpandVolume")
    }

    async fn node_get_volume_health(
        &self,
        _: Request<NodeGetVolumeHealthRequest>,
    ) -> Result<Response<NodeGetVolumeHealthResponse>, Status> {
        unimplemented("NodeGetVolumeHealth")
    }

    async fn node_get_storage_health(
        &self,
        _: Request<NodeGetStorageHealthRequest>,
    ) -> Result<Response<NodeGetStorageHealthResponse>, Status> {
        unimplemented("NodeGetStorageHealth")
    }
}

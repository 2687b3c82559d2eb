//! A CSI controller that creates volumes and snapshots as the provisioner does. Only tests have one.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Arc, Mutex};

use nodekeel_fsquota::{Bytes, QuotaLimits};
use nodekeel_provisioner::csi::proto::csi::controller_server::Controller;
use nodekeel_provisioner::csi::proto::csi::controller_service_capability::{Rpc, Type, rpc};
use nodekeel_provisioner::csi::proto::csi::identity_server::Identity;
use nodekeel_provisioner::csi::proto::csi::volume_capability::AccessType;
use nodekeel_provisioner::csi::proto::csi::volume_content_source::{self, SnapshotSource, VolumeSource};
use nodekeel_provisioner::csi::proto::csi::*;
use nodekeel_provisioner::{
    DirStore, ImageFormat, KIND_ATTRIBUTE, SnapshotId, SnapshotStore as _, StoredId, VolumeId, VolumeKind,
    VolumeStore as _, VolumeStoreError,
};
use tonic::{Request, Response, Status};

const DEFAULT_BYTES: i64 = 1 << 30;

/// Creates volumes in a store.
#[derive(Debug, Clone)]
pub(super) struct TestController {
    store: Arc<DirStore>,
    known: Arc<Mutex<KnownObjects>>,
}

/// The created objects, by name.
#[derive(Debug, Default)]
struct KnownObjects {
    volumes: BTreeMap<String, (VolumeId, i64, VolumeKind)>,
    snapshots: BTreeMap<String, (SnapshotId, VolumeId)>,
}

impl TestController {
    pub(super) fn new(store: Arc<DirStore>) -> Self {
        Self { store, known: Arc::default() }
    }

    async fn create(
        &self,
        (id, bytes, kind): (&VolumeId, Bytes, VolumeKind),
        source: Option<&StoredId>,
    ) -> Result<(), VolumeStoreError> {
        let limits = QuotaLimits { bytes: Some(bytes), inodes: None };
        match (kind, source) {
            (VolumeKind::Directory, None) => self.store.create(id, limits).await,
            (VolumeKind::Directory, Some(source)) => self.store.create_volume_from(id, source, limits).await,
            (VolumeKind::Image(format), None) => self.store.create_image(id, format, bytes).await,
            (VolumeKind::Image(format), Some(source)) => {
                self.store.create_image_from(id, source, format, bytes).await
            }
        }
    }

    /// The source of a requested volume, if it exists.
    fn find_source(&self, source: &VolumeContentSource) -> Result<StoredId, Status> {
        let known = self.known.lock().expect("not poisoned");
        let found = match source.r#type.as_ref() {
            Some(volume_content_source::Type::Snapshot(SnapshotSource { snapshot_id })) => {
                let mut all = known.snapshots.values().map(|(id, _)| id);
                all.find(|id| id.as_str() == snapshot_id).cloned().map(StoredId::from)
            }
            Some(volume_content_source::Type::Volume(VolumeSource { volume_id })) => {
                let mut all = known.volumes.values().map(|(id, ..)| id);
                all.find(|id| id.as_str() == volume_id).cloned().map(StoredId::from)
            }
            None => None,
        };
        found.ok_or_else(|| Status::not_found("no such source"))
    }
}

/// A UUID for a name.
fn uid_for_name(name: &str) -> String {
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, name).hash(&mut hasher);
        hasher.finish()
    };
    let text = format!("{:016x}{:016x}", half(0), half(1));
    format!("{}-{}-{}-{}-{}", &text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..])
}

fn missing_field(field: &str) -> Status {
    Status::invalid_argument(format!("{field} is missing"))
}

fn internal(error: impl std::error::Error) -> Status {
    let cause = error.source().map(ToString::to_string).unwrap_or_default();
    Status::internal(format!("{error}: {cause}"))
}

fn unimplemented<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("not supported by the test's controller"))
}

fn requested_bytes(range: Option<&CapacityRange>) -> i64 {
    range.map_or(DEFAULT_BYTES, |range| range.required_bytes.max(range.limit_bytes))
}

fn to_bytes(bytes: i64) -> Bytes {
    Bytes(u64::try_from(bytes).unwrap_or_default())
}

#[tonic::async_trait]
impl Controller for TestController {
    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> Result<Response<CreateVolumeResponse>, Status> {
        let asked = request.into_inner();
        if asked.name.is_empty() || asked.volume_capabilities.is_empty() {
            return Err(missing_field("name or volume_capabilities"));
        }
        let bytes = requested_bytes(asked.capacity_range.as_ref());
        let is_block = |wanted: &VolumeCapability| matches!(wanted.access_type, Some(AccessType::Block(_)));
        let kind = if asked.volume_capabilities.iter().any(is_block) {
            VolumeKind::Image(ImageFormat::Block)
        } else {
            VolumeKind::Directory
        };
        let source = asked.volume_content_source.as_ref();
        let stored = source.map(|source| self.find_source(source)).transpose()?;
        let id = VolumeId::from_uid(&uid_for_name(&asked.name)).expect("a UUID");
        let known = self
            .known
            .lock()
            .expect("not poisoned")
            .volumes
            .entry(asked.name)
            .or_insert((id.clone(), bytes, kind))
            .1;
        if known != bytes {
            return Err(Status::already_exists("with another size"));
        }
        self.create((&id, to_bytes(bytes), kind), stored.as_ref()).await.map_err(internal)?;
        let volume = Volume {
            volume_id: id.to_string(),
            capacity_bytes: bytes,
            volume_context: [(KIND_ATTRIBUTE.to_owned(), kind.to_string())].into(),
            content_source: asked.volume_content_source,
            ..Default::default()
        };
        Ok(Response::new(CreateVolumeResponse { volume: Some(volume) }))
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> Result<Response<DeleteVolumeResponse>, Status> {
        let asked = request.into_inner().volume_id;
        if asked.is_empty() {
            return Err(missing_field("volume_id"));
        }
        if let Ok(id) = asked.parse::<VolumeId>() {
            self.known.lock().expect("not poisoned").volumes.retain(|_, (known, ..)| *known != id);
            self.store.remove(&id).await.map_err(internal)?;
        }
        Ok(Response::new(DeleteVolumeResponse {}))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<ValidateVolumeCapabilitiesResponse>, Status> {
        use validate_volume_capabilities_response::Confirmed;
        let asked = request.into_inner();
        if asked.volume_id.is_empty() || asked.volume_capabilities.is_empty() {
            return Err(missing_field("volume_id or volume_capabilities"));
        }
        let known = self.known.lock().expect("not poisoned");
        if !known.volumes.values().any(|(id, ..)| id.as_str() == asked.volume_id) {
            return Err(Status::not_found("no such volume"));
        }
        let confirmed = Confirmed { volume_capabilities: asked.volume_capabilities, ..Default::default() };
        let answer = ValidateVolumeCapabilitiesResponse { confirmed: Some(confirmed), ..Default::default() };
        Ok(Response::new(answer))
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<ControllerGetCapabilitiesResponse>, Status> {
        let rpc = |kind: rpc::Type| ControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
        };
        let capabilities = [
            rpc::Type::CreateDeleteVolume,
            rpc::Type::CreateDeleteSnapshot,
            rpc::Type::CloneVolume,
            rpc::Type::ExpandVolume,
            rpc::Type::SingleNodeMultiWriter,
        ];
        Ok(Response::new(ControllerGetCapabilitiesResponse { capabilities: capabilities.map(rpc).into() }))
    }

    async fn create_snapshot(
        &self,
        request: Request<CreateSnapshotRequest>,
    ) -> Result<Response<CreateSnapshotResponse>, Status> {
        let asked = request.into_inner();
        if asked.name.is_empty() || asked.source_volume_id.is_empty() {
            return Err(missing_field("name or source_volume_id"));
        }
        let volume: VolumeId =
            asked.source_volume_id.parse().map_err(|_| Status::not_found("no such volume"))?;
        let id = SnapshotId::from_uid(&uid_for_name(&asked.name)).expect("a UUID");
        let known = self
            .known
            .lock()
            .expect("not poisoned")
            .snapshots
            .entry(asked.name)
            .or_insert((id.clone(), volume.clone()))
            .1
            .clone();
        if known != volume {
            return Err(Status::already_exists("of another volume"));
        }
        self.store.create_snapshot(&id, &volume).await.map_err(internal)?;
        let snapshot = Snapshot {
            snapshot_id: id.to_string(),
            source_volume_id: volume.to_string(),
            creation_time: Some(std::time::SystemTime::now().into()),
            ready_to_use: true,
            ..Default::default()
        };
        Ok(Response::new(CreateSnapshotResponse { snapshot: Some(snapshot) }))
    }

    async fn delete_snapshot(
        &self,
        request: Request<DeleteSnapshotRequest>,
    ) -> Result<Response<DeleteSnapshotResponse>, Status> {
        let asked = request.into_inner().snapshot_id;
        if asked.is_empty() {
            return Err(missing_field("snapshot_id"));
        }
        if let Ok(id) = asked.parse::<SnapshotId>() {
            self.known.lock().expect("not poisoned").snapshots.retain(|_, (known, _)| *known != id);
            self.store.remove_snapshot(&id).await.map_err(internal)?;
        }
        Ok(Response::new(DeleteSnapshotResponse {}))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<ControllerExpandVolumeRequest>,
    ) -> Result<Response<ControllerExpandVolumeResponse>, Status> {
        let asked = request.into_inner();
        if asked.volume_id.is_empty() || asked.capacity_range.is_none() {
            return Err(missing_field("volume_id or capacity_range"));
        }
        let id: VolumeId = asked.volume_id.parse().map_err(|_| Status::not_found("no such volume"))?;
        let bytes = requested_bytes(asked.capacity_range.as_ref());
        let limits = QuotaLimits { bytes: Some(to_bytes(bytes)), inodes: None };
        self.store.resize(&id, limits).await.map_err(internal)?;
        let answer = ControllerExpandVolumeResponse { capacity_bytes: bytes, node_expansion_required: false };
        Ok(Response::new(answer))
    }

    async fn controller_publish_volume(
        &self,
        _: Request<ControllerPublishVolumeRequest>,
    ) -> Result<Response<ControllerPublishVolumeResponse>, Status> {
        unimplemented()
    }

    async fn controller_unpublish_volume(
        &self,
        _: Request<ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<ControllerUnpublishVolumeResponse>, Status> {
        unimplemented()
    }

    async fn list_volumes(
        &self,
        _: Request<ListVolumesRequest>,
    ) -> Result<Response<ListVolumesResponse>, Status> {
        unimplemented()
    }

    async fn controller_list_volume_health(
        &self,
        _: Request<ControllerListVolumeHealthRequest>,
    ) -> Result<Response<ControllerListVolumeHealthResponse>, Status> {
        unimplemented()
    }

    async fn controller_get_volume_health(
        &self,
        _: Request<ControllerGetVolumeHealthRequest>,
    ) -> Result<Response<ControllerGetVolumeHealthResponse>, Status> {
        unimplemented()
    }

    async fn get_capacity(
        &self,
        _: Request<GetCapacityRequest>,
    ) -> Result<Response<GetCapacityResponse>, Status> {
        unimplemented()
    }

    async fn list_snapshots(
        &self,
        _: Request<ListSnapshotsRequest>,
    ) -> Result<Response<ListSnapshotsResponse>, Status> {
        unimplemented()
    }

    async fn get_snapshot(
        &self,
        _: Request<GetSnapshotRequest>,
    ) -> Result<Response<GetSnapshotResponse>, Status> {
        unimplemented()
    }

    async fn controller_get_volume(
        &self,
        _: Request<ControllerGetVolumeRequest>,
    ) -> Result<Response<ControllerGetVolumeResponse>, Status> {
        unimplemented()
    }

    async fn controller_modify_volume(
        &self,
        _: Request<ControllerModifyVolumeRequest>,
    ) -> Result<Response<ControllerModifyVolumeResponse>, Status> {
        unimplemented()
    }
}

#[tonic::async_trait]
impl Identity for TestController {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        let (name, vendor_version) = ("controller.example.org".into(), "1".into());
        Ok(Response::new(GetPluginInfoResponse { name, vendor_version, ..Default::default() }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        use plugin_capability::{Service, Type, service};
        let service = Service { r#type: service::Type::ControllerService.into() };
        let capabilities = vec![PluginCapability { r#type: Some(Type::Service(service)) }];
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        Ok(Response::new(ProbeResponse { ready: Some(true) }))
    }
}

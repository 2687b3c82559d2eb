//! The CSI's own conformance tests, over real mounts.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use nodekeel_fsquota::{Bytes, Limits};
use nodekeel_provisioner::csi::OsMounts;
use nodekeel_provisioner::csi::proto::csi::controller_server::{Controller, ControllerServer};
use nodekeel_provisioner::csi::proto::csi::controller_service_capability::{Rpc, Type, rpc};
use nodekeel_provisioner::csi::proto::csi::identity_server::{Identity, IdentityServer};
use nodekeel_provisioner::csi::proto::csi::*;
use nodekeel_provisioner::testing::MemStore;
use nodekeel_provisioner::{VolumeId, VolumeStore};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::harness::{Running, Volumes};
use super::real_mounts::apart;

/// Makes volumes as the provisioner does, for whoever asks by the CSI. Only tests have such a controller.
#[derive(Debug, Clone)]
struct Thin {
    store: MemStore,
    volumes: Volumes,
    made: Arc<Mutex<BTreeMap<String, (VolumeId, i64)>>>,
}

const DEFAULT_BYTES: i64 = 1 << 30;

fn id_of(name: &str) -> VolumeId {
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, name).hash(&mut hasher);
        hasher.finish()
    };
    let text = format!("{:016x}{:016x}", half(0), half(1));
    let uid = format!("{}-{}-{}-{}-{}", &text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..]);
    VolumeId::from_uid(&uid).expect("a UUID")
}

fn missing(field: &str) -> Status {
    Status::invalid_argument(format!("{field} is missing"))
}

#[tonic::async_trait]
impl Controller for Thin {
    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> Result<Response<CreateVolumeResponse>, Status> {
        let asked = request.into_inner();
        if asked.name.is_empty() || asked.volume_capabilities.is_empty() {
            return Err(missing("name or volume_capabilities"));
        }
        let bytes =
            asked.capacity_range.map_or(DEFAULT_BYTES, |range| range.required_bytes.max(range.limit_bytes));
        let id = id_of(&asked.name);
        let known = self.made.lock().expect("unpoisoned").entry(asked.name).or_insert((id.clone(), bytes)).1;
        if known != bytes {
            return Err(Status::already_exists("with another size"));
        }
        fs::create_dir_all(self.volumes.path(&id)).map_err(|error| Status::internal(error.to_string()))?;
        let limits = Limits { bytes: u64::try_from(bytes).ok().map(Bytes), inodes: None };
        self.store.create(&id, limits).await.map_err(|error| Status::internal(error.to_string()))?;
        let volume = Volume { volume_id: id.to_string(), capacity_bytes: bytes, ..Default::default() };
        Ok(Response::new(CreateVolumeResponse { volume: Some(volume) }))
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> Result<Response<DeleteVolumeResponse>, Status> {
        let asked = request.into_inner().volume_id;
        if asked.is_empty() {
            return Err(missing("volume_id"));
        }
        if let Ok(id) = asked.parse::<VolumeId>() {
            self.made.lock().expect("unpoisoned").retain(|_, (known, _)| *known != id);
            // What isn't there is success.
            let _ = fs::remove_dir_all(self.volumes.path(&id));
            self.store.remove(&id).await.map_err(|error| Status::internal(error.to_string()))?;
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
            return Err(missing("volume_id or volume_capabilities"));
        }
        let made = self.made.lock().expect("unpoisoned");
        if !made.values().any(|(id, _)| id.as_str() == asked.volume_id) {
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
        let capabilities = vec![rpc(rpc::Type::CreateDeleteVolume), rpc(rpc::Type::SingleNodeMultiWriter)];
        Ok(Response::new(ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn controller_publish_volume(
        &self,
        _: Request<ControllerPublishVolumeRequest>,
    ) -> Result<Response<ControllerPublishVolumeResponse>, Status> {
        Err(Status::unimplemented("not by the test's controller"))
    }

    async fn controller_unpublish_volume(
        &self,
        _: Request<ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<ControllerUnpublishVolumeResponse>, Status> {
        Err(Status::unimplemented("not by the test's controller"))
    }

    async fn list_volumes(
        &self,
        _: Request<ListVolumesRequest>,
    ) -> Result<Response<ListVolumesResponse>, Status> {
        Err(Status::unimplemented("not by the test's controller"))
    }

    async fn controller_list_volume_health(
        &self,
        _: Request<ControllerListVolumeHealthRequest>,
    ) -> Result<Response<ControllerListVolumeHealthResponse>, Status> {
        Err(Status::unimplemented("not by the test's controller"))
    }

    async fn controller_get_volume_health(
        &self,
        _: Request<ControllerGetVolumeHealthRequest>,
    ) -> Result<Response<ControllerGetVolumeHealthResponse>, Status> {
        Err(Status::unimplemented("not by the test's controller"))
    }

    async fn get_capacity(
        &self,
        _: Request<GetCapacityRequest>,
    ) -> Result<Response<GetCapacityResponse>, Status> {
        Err(Status::unimplemented("not by the test's controller"))
    }

    async fn create_snapshot(
        &self,
        _: Request<CreateSnapshotRequest>,
    ) -> Result<Response<CreateSnapshotResponse>, Status> {
        Err(Status::unimplemented("not by the test's controller"))
    }

    async fn delete_snapshot(
        &self,
        _: Request<DeleteSnapshotRequest>,
    ) -> Result<Response<DeleteSnapshotResponse>, Status> {
        Err(Status::unimplemented("not by the test's controller"))
    }

    async fn list_snapshots(
        &self,
        _: Request<ListSnapshotsRequest>,
    ) -> Result<Response<ListSnapshotsResponse>, Status> {
        Err(Status::unimplemented("not by the test's controller"))
    }

    async fn get_snapshot(
        &self,
        _: Request<GetSnapshotRequest>,
    ) -> Result<Response<GetSnapshotResponse>, Status> {
        Err(Status::unimplemented("not by the test's controller"))
    }

    async fn controller_expand_volume(
        &self,
        _: Request<ControllerExpandVolumeRequest>,
    ) -> Result<Response<ControllerExpandVolumeResponse>, Status> {
        Err(Status::unimplemented("not by the test's controller"))
    }

    async fn controller_get_volume(
        &self,
        _: Request<ControllerGetVolumeRequest>,
    ) -> Result<Response<ControllerGetVolumeResponse>, Status> {
        Err(Status::unimplemented("not by the test's controller"))
    }

    async fn controller_modify_volume(
        &self,
        _: Request<ControllerModifyVolumeRequest>,
    ) -> Result<Response<ControllerModifyVolumeResponse>, Status> {
        Err(Status::unimplemented("not by the test's controller"))
    }
}

#[tonic::async_trait]
impl Identity for Thin {
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

#[test]
#[ignore = "needs root and csi-sanity"]
fn the_conformance_tests_of_the_csi_pass() {
    apart(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let running = Running::start(|kubelet: &Path| Arc::new(OsMounts::new(kubelet))).await;
            let controller = running.directory.path().join("controller.sock");
            let listener = tokio::net::UnixListener::bind(&controller).expect("bind");
            let thin =
                Thin { store: running.store.clone(), volumes: running.volumes.clone(), made: Arc::default() };
            let server = Server::builder()
                .add_service(IdentityServer::new(thin.clone()))
                .add_service(ControllerServer::new(thin));
            let serving = tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
            let output = tokio::task::spawn_blocking(command(&running, &controller)).await.expect("joined");
            serving.abort();
            let output = output.expect("csi-sanity runs");
            let text = String::from_utf8_lossy(&output.stdout);
            println!("{text}");
            assert!(output.status.success(), "csi-sanity: {}", output.status);
            let summary = text.lines().find(|line| line.contains("Passed")).expect("a summary");
            println!("csi-sanity: {summary}");
            let mounts = fs::read_to_string("/proc/thread-self/mountinfo").expect("procfs");
            let kubelet = running.kubelet().display().to_string();
            assert!(!mounts.contains(&kubelet), "nothing stays mounted");
            running.supervisor.shutdown().await;
        });
    });
}

fn command(
    running: &Running,
    controller: &Path,
) -> impl FnOnce() -> std::io::Result<std::process::Output> + Send + 'static + use<> {
    let program =
        testbed::gotool::CSI_SANITY.program("csi-sanity").expect("csi-sanity is built by the set-up");
    let mut command = Command::new(program);
    command.arg(format!("--csi.endpoint={}", running.socket.display()));
    command.arg(format!("--csi.controllerendpoint={}", controller.display()));
    let pods = running.kubelet().join("pods");
    command.arg(format!("--csi.mountdir={}", pods.join("mount").display()));
    command.arg(format!("--csi.stagingdir={}", pods.join("staging").display()));
    command.arg("--csi.testvolumesize=10485760").arg("--ginkgo.no-color");
    move || command.output()
}

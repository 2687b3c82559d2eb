//! csi-sanity, the CSI conformance tests, with real limits and real mounts.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

use nodekeel_fsquota::{Bytes, ProjectQuota, QuotaLimits};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::csi::proto::csi::controller_server::{Controller, ControllerServer};
use nodekeel_provisioner::csi::proto::csi::controller_service_capability::{Rpc, Type, rpc};
use nodekeel_provisioner::csi::proto::csi::identity_server::{Identity, IdentityServer};
use nodekeel_provisioner::csi::proto::csi::*;
use nodekeel_provisioner::csi::{BindMounter, PluginDeps};
use nodekeel_provisioner::{DirStore, DriverName, NodeName, VolumeId, VolumeStore as _};
use serde_json::Value;
use testbed::guest::disk::{FileSystem, GuestDisk};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::harness::{DRIVER, PluginServer};

/// A CSI controller that creates volumes as the provisioner does. Only tests have one.
#[derive(Debug, Clone)]
struct TestController {
    store: Arc<DirStore>,
    created: Arc<Mutex<BTreeMap<String, (VolumeId, i64)>>>,
}

const DEFAULT_BYTES: i64 = 1 << 30;

fn id_for_name(name: &str) -> VolumeId {
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, name).hash(&mut hasher);
        hasher.finish()
    };
    let text = format!("{:016x}{:016x}", half(0), half(1));
    let uid = format!("{}-{}-{}-{}-{}", &text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..]);
    VolumeId::from_uid(&uid).expect("a UUID")
}

fn missing_field(field: &str) -> Status {
    Status::invalid_argument(format!("{field} is missing"))
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
        let bytes =
            asked.capacity_range.map_or(DEFAULT_BYTES, |range| range.required_bytes.max(range.limit_bytes));
        let id = id_for_name(&asked.name);
        let known =
            self.created.lock().expect("not poisoned").entry(asked.name).or_insert((id.clone(), bytes)).1;
        if known != bytes {
            return Err(Status::already_exists("with another size"));
        }
        let limits = QuotaLimits { bytes: u64::try_from(bytes).ok().map(Bytes), inodes: None };
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
            return Err(missing_field("volume_id"));
        }
        if let Ok(id) = asked.parse::<VolumeId>() {
            self.created.lock().expect("not poisoned").retain(|_, (known, _)| *known != id);
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
            return Err(missing_field("volume_id or volume_capabilities"));
        }
        let created = self.created.lock().expect("not poisoned");
        if !created.values().any(|(id, _)| id.as_str() == asked.volume_id) {
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
        Err(Status::unimplemented("not supported by the test's controller"))
    }

    async fn controller_unpublish_volume(
        &self,
        _: Request<ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<ControllerUnpublishVolumeResponse>, Status> {
        Err(Status::unimplemented("not supported by the test's controller"))
    }

    async fn list_volumes(
        &self,
        _: Request<ListVolumesRequest>,
    ) -> Result<Response<ListVolumesResponse>, Status> {
        Err(Status::unimplemented("not supported by the test's controller"))
    }

    async fn controller_list_volume_health(
        &self,
        _: Request<ControllerListVolumeHealthRequest>,
    ) -> Result<Response<ControllerListVolumeHealthResponse>, Status> {
        Err(Status::unimplemented("not supported by the test's controller"))
    }

    async fn controller_get_volume_health(
        &self,
        _: Request<ControllerGetVolumeHealthRequest>,
    ) -> Result<Response<ControllerGetVolumeHealthResponse>, Status> {
        Err(Status::unimplemented("not supported by the test's controller"))
    }

    async fn get_capacity(
        &self,
        _: Request<GetCapacityRequest>,
    ) -> Result<Response<GetCapacityResponse>, Status> {
        Err(Status::unimplemented("not supported by the test's controller"))
    }

    async fn create_snapshot(
        &self,
        _: Request<CreateSnapshotRequest>,
    ) -> Result<Response<CreateSnapshotResponse>, Status> {
        Err(Status::unimplemented("not supported by the test's controller"))
    }

    async fn delete_snapshot(
        &self,
        _: Request<DeleteSnapshotRequest>,
    ) -> Result<Response<DeleteSnapshotResponse>, Status> {
        Err(Status::unimplemented("not supported by the test's controller"))
    }

    async fn list_snapshots(
        &self,
        _: Request<ListSnapshotsRequest>,
    ) -> Result<Response<ListSnapshotsResponse>, Status> {
        Err(Status::unimplemented("not supported by the test's controller"))
    }

    async fn get_snapshot(
        &self,
        _: Request<GetSnapshotRequest>,
    ) -> Result<Response<GetSnapshotResponse>, Status> {
        Err(Status::unimplemented("not supported by the test's controller"))
    }

    async fn controller_expand_volume(
        &self,
        _: Request<ControllerExpandVolumeRequest>,
    ) -> Result<Response<ControllerExpandVolumeResponse>, Status> {
        Err(Status::unimplemented("not supported by the test's controller"))
    }

    async fn controller_get_volume(
        &self,
        _: Request<ControllerGetVolumeRequest>,
    ) -> Result<Response<ControllerGetVolumeResponse>, Status> {
        Err(Status::unimplemented("not supported by the test's controller"))
    }

    async fn controller_modify_volume(
        &self,
        _: Request<ControllerModifyVolumeRequest>,
    ) -> Result<Response<ControllerModifyVolumeResponse>, Status> {
        Err(Status::unimplemented("not supported by the test's controller"))
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

#[test]
#[ignore = "needs kernel with a disk of 2 GiB and csi-sanity"]
fn the_conformance_tests_of_the_csi_pass() {
    let mounted = GuestDisk::acquire()
        .and_then(|disk| disk.format_and_mount(FileSystem::Xfs, "prjquota"))
        .expect("a disk");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    check_report(&runtime.block_on(run_suite(mounted.mount_point())));
}

/// Runs the suite with volumes in this directory, and returns its report.
async fn run_suite(base: &Path) -> Value {
    let directory = tempfile::tempdir().expect("a directory");
    let kubelet = directory.path().join("kubelet");
    fs::create_dir_all(kubelet.join("pods")).expect("create");
    let quota = ProjectQuota::open(base).expect("project quotas");
    let store = Arc::new(DirStore::new(Dir::open(base).expect("open"), Arc::new(quota)).expect("a store"));
    store.create_identity().await.expect("an identity");
    let deps = PluginDeps {
        driver: DriverName::try_new(DRIVER).expect("a name"),
        node: NodeName::try_new("node-a").expect("a name"),
        store: store.clone(),
        volumes: store.clone(),
        mounter: Arc::new(BindMounter::new(&kubelet)),
    };
    let served = PluginServer::start(deps, &kubelet).await;
    let controller = directory.path().join("controller.sock");
    let listener = tokio::net::UnixListener::bind(&controller).expect("bind");
    let thin = TestController { store: store.clone(), created: Arc::default() };
    let server = Server::builder()
        .add_service(IdentityServer::new(thin.clone()))
        .add_service(ControllerServer::new(thin));
    let serving = tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
    let report = directory.path().join("report.json");
    let mut suite = Command::new("csi-sanity");
    suite.arg(format!("--csi.endpoint={}", served.socket.display()));
    suite.arg(format!("--csi.controllerendpoint={}", controller.display()));
    suite.arg(format!("--csi.mountdir={}", kubelet.join("pods/mount").display()));
    suite.arg(format!("--csi.stagingdir={}", kubelet.join("pods/staging").display()));
    suite.arg("--csi.testvolumesize=10485760").arg("--ginkgo.no-color");
    suite.arg(format!("--ginkgo.json-report={}", report.display()));
    let output =
        tokio::task::spawn_blocking(move || suite.output()).await.expect("joined").expect("csi-sanity runs");
    serving.abort();
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "csi-sanity: {}", output.status);
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").expect("procfs");
    assert!(!mounts.contains(&kubelet.display().to_string()), "nothing stays mounted");
    served.supervisor.shutdown().await;
    store.wait_until_erased().await;
    assert_eq!(store.list().await.expect("list"), [], "no volume is left");
    serde_json::from_slice(&fs::read(report).expect("a report")).expect("JSON")
}

/// The number of tests in the suite that apply to the driver and the test's controller; fewer must not pass
/// unnoticed.
const APPLICABLE: usize = 31;

/// Prints which tests passed and which were skipped, with the suite's reason.
fn check_report(report: &Value) {
    let specs = report[0]["SpecReports"].as_array().expect("specs");
    let mut skipped: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut passed = 0;
    for spec in specs.iter().filter(|spec| spec["LeafNodeType"] == "It") {
        let above = spec["ContainerHierarchyTexts"].as_array().into_iter().flatten();
        let words = above.chain([&spec["LeafNodeText"]]).filter_map(Value::as_str);
        let name = words.collect::<Vec<_>>().join(" ");
        let reason = spec["Failure"]["Message"].as_str().unwrap_or_default();
        match spec["State"].as_str() {
            Some("passed") => passed += 1,
            Some("skipped") => skipped.entry(reason).or_default().push(name),
            Some("pending") => skipped.entry("pending in the suite").or_default().push(name),
            state => panic!("{name}: {state:?}: {reason}"),
        }
    }
    let mut text = format!("csi-sanity: {passed} passed\n");
    for (reason, specs) in &skipped {
        text += &format!("{} skipped: {reason}\n    {}\n", specs.len(), specs.join("\n    "));
    }
    // Not by `println!`, which is captured unless the test fails.
    std::io::stdout().write_all(text.as_bytes()).expect("write");
    assert!(passed >= APPLICABLE, "{passed} of {APPLICABLE} passed");
    assert!(!skipped.contains_key(""), "tests are skipped for no reason");
}

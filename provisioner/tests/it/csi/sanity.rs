//! csi-sanity, the CSI conformance tests, with real limits, real mounts and real devices.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use nodekeel_fsquota::ProjectQuota;
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::csi::proto::csi::controller_server::ControllerServer;
use nodekeel_provisioner::csi::proto::csi::identity_server::IdentityServer;
use nodekeel_provisioner::csi::{BindMounter, PluginDeps};
use nodekeel_provisioner::{DirStore, DriverName, NodeName, SnapshotStore as _, VolumeStore as _};
use serde_json::Value;
use testbed::guest::disk::{FileSystem, GuestDisk};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

use super::harness::{DRIVER, PluginServer};
use super::real_images::wait_detached;
use controller::TestController;

mod controller;

#[test]
#[ignore = "sampled: needs kernel with a disk of 2 GiB and csi-sanity"]
fn the_conformance_tests_of_the_csi_pass() {
    pass_suite("mount");
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 2 GiB and csi-sanity"]
fn the_conformance_tests_of_the_csi_pass_with_block_volumes() {
    pass_suite("block");
}

/// Runs the suite with volumes of this access type.
fn pass_suite(access_type: &str) {
    let mounted = GuestDisk::acquire()
        .and_then(|disk| disk.format_and_mount(FileSystem::Xfs, "prjquota"))
        .expect("a disk");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let report = runtime.block_on(run_suite(mounted.mount_point(), access_type));
    check_report(&report, access_type);
}

/// Runs the suite with volumes in this directory, and returns its report.
async fn run_suite(base: &Path, access_type: &str) -> Value {
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
    let thin = TestController::new(store.clone());
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
    suite.args(["--csi.testvolumesize=10485760", "--csi.testvolumeexpandsize=20971520", "--ginkgo.no-color"]);
    suite.arg(format!("--csi.testvolumeaccesstype={access_type}"));
    suite.arg(format!("--ginkgo.json-report={}", report.display()));
    let output =
        tokio::task::spawn_blocking(move || suite.output()).await.expect("joined").expect("csi-sanity runs");
    serving.abort();
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "csi-sanity: {}", output.status);
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").expect("procfs");
    assert!(!mounts.contains(&kubelet.display().to_string()), "nothing stays mounted");
    wait_detached(base);
    served.supervisor.shutdown().await;
    store.wait_until_erased().await;
    assert_eq!(store.list().await.expect("list"), [], "no volume is left");
    assert_eq!(store.list_snapshots().await.expect("list"), [], "no snapshot is left");
    serde_json::from_slice(&fs::read(report).expect("a report")).expect("JSON")
}

/// The number of tests in the suite that apply to the driver and the test's controller; fewer must not pass
/// unnoticed.
const APPLICABLE: usize = 46;

/// Prints which tests passed and which were skipped, with the suite's reason.
fn check_report(report: &Value, access_type: &str) {
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
    let mut text = format!("csi-sanity with access type {access_type}: {passed} passed\n");
    for (reason, specs) in &skipped {
        text += &format!("{} skipped: {reason}\n    {}\n", specs.len(), specs.join("\n    "));
    }
    // Not by `println!`, which is captured unless the test fails.
    std::io::stdout().write_all(text.as_bytes()).expect("write");
    assert!(passed >= APPLICABLE, "{passed} of {APPLICABLE} passed");
    assert!(!skipped.contains_key(""), "tests are skipped for no reason");
}

//! Snapshots with the cluster's own snapshot-controller.

use std::fs;
use std::process::Command;

use kube::Api;
use kube::api::{ApiResource, DynamicObject};
use nodekeel_provisioner::{VolumeSnapshot, VolumeSnapshotContent};
use serde_json::{Value, json};
use testbed::gotool::{SNAPSHOT_CONTROLLER, SNAPSHOT_CRDS};
use testbed::{Daemon, FakeNode, Kube, ScratchDir};

use super::harness::{TestCluster, TestNode, names, start_control_plane, test_runtime, wait_for_object};

const NAME: &str = "snapshots";

fn install_snapshot_api(kube: &Kube) -> Daemon {
    for manifest in SNAPSHOT_CRDS {
        kube.apply_manifests(manifest).expect("the kinds of the snapshot API");
    }
    for kind in ["volumesnapshotclasses", "volumesnapshotcontents", "volumesnapshots"] {
        let name = format!("{kind}.snapshot.storage.k8s.io");
        kube.wait_for_condition("customresourcedefinition", &name, "condition=Established")
            .expect("established");
    }
    let program = SNAPSHOT_CONTROLLER.program_path("snapshot-controller").expect("the snapshot-controller");
    let mut command = Command::new(program);
    let kubeconfig = kube.kubeconfig_file("admin").expect("a kubeconfig");
    command.arg(format!("--kubeconfig={}", kubeconfig.display()));
    command.args(["--enable-distributed-snapshotting=true", "--leader-election=false", "-v=3"]);
    Daemon::start(command, ScratchDir::new().expect("a directory"), || Ok(())).expect("it starts")
}

fn snapshots_api(cluster: &TestCluster) -> Api<DynamicObject> {
    let kind = ApiResource::erase::<VolumeSnapshot>(&());
    Api::namespaced_with(cluster.admin.clone(), NAME, &kind)
}

/// A claim like the others, with a data source.
fn copy_of(source: Value) -> Value {
    json!({ "spec": { "dataSource": source } })
}

async fn read_file(cluster: &TestCluster, node: &TestNode, claim: &str) -> String {
    let volume = cluster.wait_bound(claim).await.metadata.name.expect("a name");
    fs::read_to_string(node.base.path().join("volumes").join(volume).join("file")).expect("a file")
}

async fn write_file(cluster: &TestCluster, node: &TestNode, claim: &str, content: &str) {
    let volume = cluster.wait_bound(claim).await.metadata.name.expect("a name");
    fs::write(node.base.path().join("volumes").join(volume).join("file"), content).expect("a file");
}

#[test]
#[ignore = "needs kube"]
fn a_snapshot_is_taken_restored_and_deleted_by_the_stock_controller() {
    let (kube, runtime) = (start_control_plane(), test_runtime());
    let cluster = runtime.block_on(TestCluster::new(&kube, NAME));
    let fake = FakeNode::new(cluster.node_name("a")).with_driver(cluster.driver.as_str());
    kube.create_fake_node(&fake).expect("a node");
    // It runs before the API is installed, and takes snapshots when it is.
    let node = runtime.block_on(async {
        let node = cluster.start_provisioner("a").await;
        cluster.create_claim("data", json!({})).await;
        write_file(&cluster, &node, "data", "old").await;
        node
    });
    let controller = install_snapshot_api(&kube);
    let class = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotClass", "metadata": { "name": NAME },
        "driver": cluster.driver.as_str(), "deletionPolicy": "Delete",
    });
    kube.apply_manifests(&class.to_string()).expect("a class");
    runtime.block_on(async {
        let snapshot = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
            "metadata": { "name": "backup" },
            "spec": { "volumeSnapshotClassName": NAME, "source": { "persistentVolumeClaimName": "data" } },
        });
        let snapshots = snapshots_api(&cluster);
        cluster.create_object(snapshots.clone(), snapshot).await;
        let is_ready = |snapshot: Option<&DynamicObject>| {
            snapshot.is_some_and(|snapshot| snapshot.data["status"]["readyToUse"] == true)
        };
        let ready = wait_for_object(&snapshots, "backup", is_ready).await.expect("ready");
        assert_eq!(ready.data["status"]["restoreSize"], "1Mi", "{}", controller.read_log().expect("a log"));
        let content =
            ready.data["status"]["boundVolumeSnapshotContentName"].as_str().expect("a content").to_owned();

        write_file(&cluster, &node, "data", "new").await;
        let source =
            json!({ "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "backup" });
        cluster.create_claim("restored", copy_of(source.clone())).await;
        assert_eq!(read_file(&cluster, &node, "restored").await, "old");
        cluster
            .create_claim("cloned", copy_of(json!({ "kind": "PersistentVolumeClaim", "name": "data" })))
            .await;
        assert_eq!(read_file(&cluster, &node, "cloned").await, "new");

        // One that is selected for another node finds its data.
        let fake = FakeNode::new(cluster.node_name("b")).with_driver(cluster.driver.as_str());
        kube.create_fake_node(&fake).expect("a node");
        let other = cluster.start_provisioner("b").await;
        let mut moved = copy_of(source.clone());
        moved["metadata"] = json!({ "annotations": { nodekeel_provisioner::SELECTED_NODE: other.name } });
        cluster.create_claim("moved", moved).await;
        assert_eq!(read_file(&cluster, &node, "moved").await, "old");
        assert_eq!(other.volumes(), Vec::<String>::new());

        let mut small = copy_of(source);
        small["spec"]["resources"] = json!({ "requests": { "storage": "512Ki" } });
        cluster.create_claim("small", small).await;
        let (_, note) = cluster.wait_for_event("small", "ProvisioningFailed").await;
        assert!(note.contains("needs 1048576"), "{note}");
        // The snapshot-controller keeps a snapshot while a claim waits for it.
        cluster.delete_object(&cluster.claims(), "small").await;
        cluster.wait_deleted(&cluster.claims(), "small").await;

        cluster.delete_object(&snapshots, "backup").await;
        let contents: Api<VolumeSnapshotContent> = Api::all(cluster.admin.clone());
        cluster.wait_deleted(&contents, &content).await;
        assert_eq!(names(&node.base.path().join("snapshots")), Vec::<String>::new());
        assert_eq!(read_file(&cluster, &node, "restored").await, "old", "it survives its snapshot");
        for claim in ["data", "restored", "cloned", "moved"] {
            let volume = cluster.wait_bound(claim).await.metadata.name.expect("a name");
            cluster.delete_object(&cluster.claims(), claim).await;
            cluster.wait_deleted(&cluster.volumes(), &volume).await;
        }
        node.assert_empty().await;
        other.stop().await;
        node.stop().await;
    });
}

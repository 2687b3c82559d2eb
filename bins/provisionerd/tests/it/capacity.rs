//! Capacity on a real control plane, with its scheduler: a pod goes where its volume fits.

use std::os::unix::process::ExitStatusExt as _;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use kube::api::DeleteParams;
use kube::{Api, Client};
use serde_json::json;
use testbed::{FakeNode, KillPlace, KillTally, Kube, merge_patch};
use tokio::process::Child;

use crate::client_cluster::{
    self as cluster, DRIVER, TIMEOUT, TestDaemon, claim_manifest, create_claim, create_object, kill_rounds,
    wait_bound, wait_object, wait_objects,
};

const MIB: u64 = 1 << 20;

/// The node that the scheduler prefers, and the one with a pod that occupies most of its processors.
const PREFERRED: &str = "preferred";
const BUSY: &str = "busy";

pub(crate) const PUBLICATION_MOMENTS: [&str; 4] =
    ["Before PublishCapacity", "After PublishCapacity", "Before RemoveCapacity", "After RemoveCapacity"];

/// How long the pod may take: the scheduler alone needs a second for a volume.
const PLACED_WITHIN: Duration = Duration::from_secs(30);

/// A control plane with two nodes.
struct CapacityFixture {
    kube: Kube,
    client: Client,
}

impl CapacityFixture {
    async fn start() -> Self {
        let kube = tokio::task::spawn_blocking(|| {
            let kube = cluster::start_control_plane();
            kube.apply_manifests(include_str!("../../../../deploy/csidriver.yaml")).expect("the driver");
            for node in [PREFERRED, BUSY] {
                kube.create_fake_node(&FakeNode::new(node).with_driver(DRIVER)).expect("a node");
            }
            kube
        });
        let kube = kube.await.expect("no panic");
        let client = cluster::admin_client(&kube).await;
        let this = Self { kube, client };
        this.create_pod("ballast", json!({ "nodeName": BUSY }), "40").await;
        this
    }

    fn daemon(&self, node: &str) -> TestDaemon {
        TestDaemon::new(&cluster::account_kubeconfig(&self.kube), node.to_owned())
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), "default")
    }

    async fn create_pod(&self, name: &str, patch: serde_json::Value, processors: &str) {
        let mut pod = json!({
            "metadata": { "name": name },
            "spec": { "containers": [{
                "name": "main", "image": "none", "resources": { "requests": { "cpu": processors } },
            }] },
        });
        merge_patch(&mut pod["spec"], patch);
        create_object(&self.pods(), pod).await;
    }

    /// Waits until the capacity of both nodes is published for each class.
    async fn wait_published(&self, count: usize) {
        wait_objects(capacities(&self.client), "", |found| found.len() == count).await;
    }

    /// Creates a pod with a claim, and waits until both have their node. Returns it, and the time that took.
    async fn place_pod(&self, name: &str, size: &str) -> (String, Duration) {
        let sized = json!({ "spec": { "resources": { "requests": { "storage": size } } } });
        let start = Instant::now();
        create_claim(&self.client, claim_manifest(name, None, sized)).await;
        let volumes = json!([{ "name": "data", "persistentVolumeClaim": { "claimName": name } }]);
        self.create_pod(name, json!({ "volumes": volumes }), "100m").await;
        wait_bound(&self.client, name).await;
        let node = |pod: Option<&Pod>| pod.and_then(|pod| pod.spec.as_ref()?.node_name.clone());
        let pod = wait_object(&self.pods(), name, |pod| node(pod).is_some()).await;
        (node(pod.as_ref()).expect("a node"), start.elapsed())
    }
}

fn run(test: impl AsyncFnOnce(CapacityFixture)) {
    cluster::test_runtime().block_on(async { test(CapacityFixture::start().await).await });
}

#[test]
#[ignore = "needs kube"]
fn a_pod_goes_to_a_node_with_space_though_the_scheduler_prefers_a_full_one() {
    run(async |cluster| {
        let (full, free) = (cluster.daemon(PREFERRED), cluster.daemon(BUSY));
        let _running: [Child; 2] = [full.start_promising(MIB, &[]), free.start_promising(64 * MIB, &[])];
        // Two classes on two nodes.
        cluster.wait_published(4).await;
        let (node, took) = cluster.place_pod("large", "4Mi").await;
        println!("placed after {took:?}");
        assert_eq!(node, BUSY, "{}", full.log_text());
        assert!(took < PLACED_WITHIN, "{took:?}");
        let (node, _) = cluster.place_pod("small", "1Mi").await;
        assert_eq!(node, PREFERRED, "the scheduler prefers it where the volume fits");
    });
}

#[test]
#[ignore = "needs kube"]
fn a_pod_leaves_a_node_whose_disk_is_full_of_other_data() {
    run(async |cluster| {
        let (full, free) = (cluster.daemon(PREFERRED), cluster.daemon(BUSY));
        let max_bytes = MIB.to_string();
        // The node offers what its disk does not have.
        let running = full.start_promising(64 * MIB, &[("PROVISIONERD_ROOM", &max_bytes)]);
        let _running = [running, free.start_promising(64 * MIB, &[])];
        cluster.wait_published(4).await;
        let (node, took) = cluster.place_pod("large", "4Mi").await;
        println!("placed after {took:?}");
        assert_eq!(node, BUSY, "{}", full.log_text());
        assert!(took < PLACED_WITHIN, "{took:?}");
        assert!(full.log_text().contains("deselecting this node"), "it was tried: {}", full.log_text());
    });
}

fn capacities(client: &Client) -> Api<CSIStorageCapacity> {
    Api::namespaced(client.clone(), "nodekeel")
}

/// Waits until the objects of a node are of these classes, which are sorted.
async fn wait_classes(client: &Client, daemon: &TestDaemon, expected: &[&str]) {
    let own = format!("csi.storage.k8s.io/managed-by={}", daemon.node);
    wait_objects(capacities(client), &own, |found| {
        let mut classes: Vec<_> = found.iter().map(|object| object.storage_class_name.as_str()).collect();
        classes.sort_unstable();
        classes == expected
    })
    .await;
}

#[test]
#[ignore = "needs kube"]
fn a_daemon_killed_around_each_publication_leaves_one_object_for_each_class() {
    run(async |cluster| {
        let classes: Api<StorageClass> = Api::all(cluster.client.clone());
        let moments = PUBLICATION_MOMENTS.into_iter().cycle().take(PUBLICATION_MOMENTS.len() * kill_rounds());
        let mut tally = KillTally::default();
        for (number, moment) in moments.enumerate() {
            // Names after the others, so that the object of this class is published last.
            let class = format!("z-{number}");
            let temporary = json!({
                "metadata": { "name": class }, "provisioner": DRIVER, "volumeBindingMode": "WaitForFirstConsumer",
            });
            create_object(&classes, temporary).await;
            let daemon = cluster.daemon(if number % 2 == 0 { PREFERRED } else { BUSY });
            let mut child = daemon.start_promising(64 * MIB, &[("PROVISIONERD_KILL_AT", moment)]);
            if moment.ends_with("RemoveCapacity") {
                wait_classes(&cluster.client, &daemon, &["nodekeel", "nodekeel-retain", &class]).await;
                classes.delete(&class, &DeleteParams::default()).await.expect("the class is deleted");
            }
            let status =
                tokio::time::timeout(TIMEOUT, child.wait()).await.expect("it is killed").expect("a status");
            assert_eq!(status.signal(), Some(9), "{moment}: {}", daemon.log_text());
            tally.record(KillPlace::Host, moment);
            let _child = daemon.start_promising(64 * MIB, &[]);
            if moment.ends_with("PublishCapacity") {
                wait_classes(&cluster.client, &daemon, &["nodekeel", "nodekeel-retain", &class]).await;
                classes.delete(&class, &DeleteParams::default()).await.expect("the class is deleted");
            }
            wait_classes(&cluster.client, &daemon, &["nodekeel", "nodekeel-retain"]).await;
        }
        tally.print_lines();
    });
}

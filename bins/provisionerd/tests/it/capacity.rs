//! Capacity on a real control plane, with its scheduler: a pod goes where its volume fits.

use std::os::unix::process::ExitStatusExt as _;
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::{Value, json};
use testbed::{FakeNode, KillPlace, KillTally, Kube, wait_until};

use crate::cluster::{
    DRIVER, TIMEOUT, TestDaemon, claim_manifest, create, kill_rounds, moments_of, pod_manifest, sized,
    start_control_plane, wait_bound, wait_for, wait_logged,
};

const MIB: u64 = 1 << 20;

/// The node that the scheduler prefers, and the one with a pod that occupies most of its processors.
pub(crate) const PREFERRED: &str = "preferred";
pub(crate) const BUSY: &str = "busy";

/// The shipped classes.
pub(crate) const CLASSES: [&str; 2] = ["nodekeel", "nodekeel-retain"];

pub(crate) const PUBLICATION_STEPS: [&str; 2] = ["PublishCapacity", "RemoveCapacity"];

/// A control plane that schedules by capacity, with two nodes.
pub(crate) fn start_with_nodes() -> Kube {
    let kube = start_control_plane();
    kube.apply_manifests(include_str!("../../../../deploy/csidriver.yaml")).expect("the driver");
    for node in [PREFERRED, BUSY] {
        kube.create_fake_node(&FakeNode::new(node).with_driver(DRIVER)).expect("a node");
    }
    kube
}

/// Occupies most of the processors of one node.
pub(crate) fn occupy_busy_node(kube: &Kube) {
    let mut ballast = pod_manifest("ballast");
    ballast["spec"] = json!({
        "nodeName": BUSY,
        "containers": [{ "name": "main", "image": "none", "resources": { "requests": { "cpu": "40" } } }],
    });
    create(kube, &ballast);
}

/// Creates a claim of this size, and a pod with it that any node can have.
pub(crate) fn create_pod(kube: &Kube, name: &str, size: &str) {
    create_pod_with(kube, name, sized(size));
}

/// Creates a claim, changed by a patch, and a pod with it that any node can have.
pub(crate) fn create_pod_with(kube: &Kube, name: &str, claim: Value) {
    create(kube, &claim_manifest(name, None, claim));
    let mut pod = pod_manifest(name);
    pod["spec"]["containers"][0]["resources"] = json!({ "requests": { "cpu": "100m" } });
    create(kube, &pod);
}

/// Waits until the claim of a pod is bound and the pod has a node, and gives that.
pub(crate) fn wait_placed(kube: &Kube, name: &str) -> String {
    wait_bound(kube, name);
    let pod = wait_for(kube, "pod", name, |pod: &Value| pod["spec"]["nodeName"].is_string());
    pod["spec"]["nodeName"].as_str().expect("a node").to_owned()
}

/// Waits until a node has published so many bytes for these classes, which are sorted.
pub(crate) fn wait_published(kube: &Kube, node: &str, classes: &[&str], is_enough: impl Fn(u64) -> bool) {
    let published = wait_until(TIMEOUT, "capacities", || {
        let mut all = kube.list_objects("csistoragecapacities")?;
        all.retain(|object| object["metadata"]["labels"]["csi.storage.k8s.io/managed-by"] == node);
        all.sort_by_key(|object| object["storageClassName"].to_string());
        let found: Vec<_> = all.iter().map(|object| &object["storageClassName"]).collect();
        ensure!(found == classes, "{node} has published {found:?}");
        for object in &all {
            let bytes: nodekeel_fsquota::Bytes = object["capacity"].as_str().unwrap_or_default().parse()?;
            ensure!(is_enough(bytes.0), "{node} has published {bytes}");
        }
        Ok(())
    });
    published.unwrap();
}

/// Waits until a node has published so many bytes for one of its classes.
pub(crate) fn wait_offered(kube: &Kube, node: &str, class: &str, is_enough: impl Fn(u64) -> bool) {
    let offered = wait_until(TIMEOUT, "a capacity", || {
        let all = kube.list_objects("csistoragecapacities")?;
        let object = all.iter().find(|object| {
            object["metadata"]["labels"]["csi.storage.k8s.io/managed-by"] == node
                && object["storageClassName"] == class
        });
        let capacity = object.and_then(|object| object["capacity"].as_str()).unwrap_or_default();
        let bytes: nodekeel_fsquota::Bytes = capacity.parse()?;
        ensure!(is_enough(bytes.0), "{node} has published {bytes} for {class}");
        Ok(())
    });
    offered.unwrap();
}

#[test]
#[ignore = "sampled: needs kube"]
fn a_pod_goes_to_a_node_with_space_though_the_scheduler_prefers_one_that_is_promised_or_full() {
    let kube = start_with_nodes();
    occupy_busy_node(&kube);
    let place_pod = |name: &str, size: &str| {
        let start = Instant::now();
        create_pod(&kube, name, size);
        let node = wait_placed(&kube, name);
        // The scheduler alone needs a second for a volume.
        assert!(start.elapsed() < Duration::from_secs(30), "{name}: {:?}", start.elapsed());
        node
    };
    let [preferred, busy] = [PREFERRED, BUSY].map(|node| TestDaemon::new(&kube, node));
    let _busy = busy.start(&[&busy.reserve_all_but(64 * MIB)], &[]);
    wait_published(&kube, BUSY, &CLASSES, |bytes| bytes > 32 * MIB);

    let running = preferred.start(&[&preferred.reserve_all_but(MIB)], &[]);
    wait_published(&kube, PREFERRED, &CLASSES, |bytes| bytes < 4 * MIB);
    assert_eq!(place_pod("large", "4Mi"), BUSY, "the preferred node has promised its disk");
    assert_eq!(place_pod("small", "1Mi"), PREFERRED, "the scheduler prefers it where the volume fits");
    drop(running);

    // Other data fill the disk: the node offers what it does not have.
    let running =
        preferred.start(&[&preferred.reserve_all_but(64 * MIB)], &[("PROVISIONERD_ROOM", "1048576")]);
    wait_published(&kube, PREFERRED, &CLASSES, |bytes| bytes > 32 * MIB);
    assert_eq!(place_pod("refused", "4Mi"), BUSY);
    wait_logged(&running, "deselecting this node");
}

#[test]
#[ignore = "sampled: needs kube"]
fn a_daemon_killed_around_each_publication_leaves_one_object_for_each_class() {
    let kube = start_with_nodes();
    let mut tally = KillTally::default();
    for round in 0..kill_rounds() {
        for (number, moment) in moments_of(&PUBLICATION_STEPS).iter().enumerate() {
            // A name after the others, so that the object of this class is published last.
            let class = format!("z-{round}-{number}");
            let temporary = json!({
                "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": class },
                "provisioner": DRIVER, "volumeBindingMode": "WaitForFirstConsumer",
            });
            create(&kube, &temporary);
            let daemon = TestDaemon::new(&kube, [PREFERRED, BUSY][number % 2]);
            let promised = daemon.reserve_all_but(64 * MIB);
            let remove_class = || {
                let classes = ["nodekeel", "nodekeel-retain", &class];
                wait_published(&kube, &daemon.node, &classes, |_| true);
                kube.delete_object("storageclass", &class).expect("deleted");
            };
            let mut killed = daemon.start(&[&promised], &[("PROVISIONERD_KILL_AT", moment)]);
            if moment.ends_with("RemoveCapacity") {
                remove_class();
            }
            let status = killed.wait_for_exit(TIMEOUT).expect("a status").expect("it is killed");
            assert_eq!(status.signal(), Some(9), "{moment}: {status}");
            tally.record(KillPlace::Host, moment);
            let _again = daemon.start(&[&promised], &[]);
            if moment.ends_with("PublishCapacity") {
                remove_class();
            }
            wait_published(&kube, &daemon.node, &["nodekeel", "nodekeel-retain"], |_| true);
        }
    }
    tally.print_lines();
}

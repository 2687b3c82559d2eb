//! Provisioning: from a pod, from a selected node, and with the options of claims and classes.

use k8s_openapi::api::core::v1::{PersistentVolume, Pod};
use kube::Api;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use nodekeel_provisioner::VolumeStore as _;
use serde_json::{Value, json};
use testbed::FakeNode;

use super::harness::{TestCluster, id, run_test, shared_control_plane, test_runtime};

fn storage_request(size: &str) -> Value {
    json!({ "spec": { "resources": { "requests": { "storage": size } } } })
}

fn capacity(volume: &PersistentVolume) -> &str {
    &volume.spec.as_ref().expect("a spec").capacity.as_ref().expect("a capacity")["storage"].0
}

fn pod(cluster: &TestCluster, claim: &str) -> Value {
    json!({
        "metadata": { "name": "consumer" },
        "spec": {
            "nodeSelector": { "kubernetes.io/hostname": cluster.node_name("a") },
            "containers": [{ "name": "c", "image": "none", "volumeMounts": [{ "name": "data", "mountPath": "/data" }] }],
            "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": claim } }],
        },
    })
}

#[test]
#[ignore = "needs kube"]
fn a_claim_waits_for_its_pod_and_is_bound_on_the_node_that_the_scheduler_selects() {
    let (kube, runtime) = (shared_control_plane(), test_runtime());
    let cluster = runtime.block_on(TestCluster::new(&kube, "consumer"));
    kube.create_fake_node(&FakeNode::new(cluster.node_name("a")).with_driver(cluster.driver.as_str()))
        .expect("a node");
    runtime.block_on(async {
        let (a, b) = (cluster.start_provisioner("a").await, cluster.start_provisioner("b").await);
        let claim = cluster.create_claim("data", json!({ "metadata": { "annotations": null } })).await;
        let other = cluster.create_claim("selected", json!({})).await;
        cluster.wait_bound("selected").await;
        assert_eq!(a.volumes(), cluster.volume_ids(&[&other]), "the claim without a pod waits");

        let pods: Api<Pod> = Api::namespaced(cluster.admin.clone(), cluster.name);
        cluster.create_object(pods, pod(&cluster, "data")).await;
        let volume = cluster.wait_bound("data").await;
        assert_eq!(volume.metadata.name.as_deref(), Some(id(&claim).as_str()));
        // The scheduler has accepted this affinity: the node has the driver's label.
        let affinity = serde_json::to_value(volume.spec.expect("a spec").node_affinity).expect("JSON");
        let key = &affinity["required"]["nodeSelectorTerms"][0]["matchExpressions"][0]["key"];
        assert_eq!(*key, cluster.driver.topology_key());
        let (kind, note) = cluster.wait_for_event("data", "ProvisioningSucceeded").await;
        assert_eq!(
            (kind.as_str(), note),
            ("Normal", format!("Successfully provisioned volume {}", id(&claim)))
        );
        assert_eq!(a.volumes(), cluster.volume_ids(&[&claim, &other]));
        assert_eq!(b.volumes(), Vec::<String>::new());
        a.stop().await;
        b.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn a_volume_has_the_limits_that_its_claim_and_its_class_say() {
    run_test("limits", async |cluster| {
        let node = cluster.start_provisioner("a").await;
        cluster.create_class("limits-inodes", json!({ "parameters": { "inodes": "7k" } })).await;
        let of_class = json!({ "spec": { "storageClassName": "limits-inodes" } });
        // The request, the reported capacity, the limits in force.
        let cases = [
            ("plain", storage_request("10Mi"), "10Mi", 10 << 20, 5120),
            ("small", storage_request("1Mi"), "1Mi", 1 << 20, 1024),
            ("inodes", of_class, "1Mi", 1 << 20, 7000),
            ("fraction", storage_request("1.5Ki"), "1536", 1536, 1024),
            ("milli", storage_request("1500m"), "2", 2, 1024),
            ("half", storage_request("0.5"), "1", 1, 1024),
            ("decimal", storage_request("1G"), "1G", 1_000_000_000, 488_281),
            ("exponent", storage_request("1e6"), "1M", 1_000_000, 1024),
            ("large", storage_request("1Gi"), "1Gi", 1 << 30, 1 << 19),
        ];
        for (name, patch, _, bytes, inodes) in cases {
            let claim = cluster.create_claim(name, patch).await;
            let volume = cluster.wait_bound(name).await;
            let reported: Bytes = capacity(&volume).parse().expect("a quantity");
            assert_eq!(reported, Bytes(bytes), "{name}");
            let limits = node.store.usage(&id(&claim)).await.expect("usage").limits;
            // The quota counts in blocks of 1 KiB.
            let bytes = Bytes(bytes.next_multiple_of(1024));
            assert_eq!(limits, QuotaLimits { bytes: Some(bytes), inodes: Some(Inodes(inodes)) }, "{name}");
        }
        assert_eq!((node.volumes().len(), node.quota.list_projects().len()), (9, 9));
        node.stop().await;
    });
}

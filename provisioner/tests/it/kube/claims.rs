//! Provisioning: from a pod, from a selected node, and with the options of claims and classes.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::Api;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use nodekeel_provisioner::{SELECTED_NODE, VolumeStore as _};
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

#[test]
#[ignore = "needs kube"]
fn access_modes_of_one_node_are_copied_and_a_missing_volume_mode_is_a_directory() {
    run_test("modes", async |cluster| {
        let node = cluster.start_provisioner("a").await;
        // The mode that permits writing comes first: the kubelet passes only that one to the plugin.
        let cases = [
            ("rox", json!(["ReadOnlyMany"]), json!(["ReadOnlyMany"])),
            ("rwop", json!(["ReadWriteOncePod"]), json!(["ReadWriteOncePod"])),
            ("both", json!(["ReadOnlyMany", "ReadWriteOnce"]), json!(["ReadWriteOnce", "ReadOnlyMany"])),
        ];
        let mut claims = Vec::new();
        for (name, asked, given) in cases {
            claims.push(
                cluster
                    .create_claim(name, json!({ "spec": { "accessModes": asked, "volumeMode": null } }))
                    .await,
            );
            let spec = cluster.wait_bound(name).await.spec.expect("a spec");
            assert_eq!(json!(spec.access_modes), given);
            assert_eq!(spec.volume_mode.as_deref(), Some("Filesystem"));
            cluster.wait_for_event(name, "ProvisioningSucceeded").await;
            assert_eq!(cluster.event_reasons(name).await, ["ProvisioningSucceeded"]);
        }
        assert_eq!(node.volumes(), cluster.volume_ids(&claims.iter().collect::<Vec<_>>()));
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn a_claim_whose_class_is_deleted_early_gets_an_event_and_waits() {
    run_test("classless", async |cluster| {
        cluster.create_class("classless-going", json!({})).await;
        let claim =
            cluster.create_claim("data", json!({ "spec": { "storageClassName": "classless-going" } })).await;
        // No provisioner runs yet, but the claim already names this driver.
        let is_asked = |claim: Option<&PersistentVolumeClaim>| {
            let annotations = claim.and_then(|claim| claim.metadata.annotations.as_ref());
            annotations.is_some_and(|all| all.contains_key("volume.kubernetes.io/storage-provisioner"))
        };
        super::harness::wait_for_object(&cluster.claims(), "data", is_asked).await;
        cluster.delete_object(&cluster.classes(), "classless-going").await;

        let node = cluster.start_provisioner("a").await;
        let (kind, note) = cluster.wait_for_event("data", "ProvisioningFailed").await;
        assert_eq!(kind, "Warning");
        assert!(note.contains(r#""classless-going" does not exist"#), "{note}");
        assert_eq!(node.volumes(), Vec::<String>::new());
        assert!(cluster.driver_volumes().await.is_empty());

        cluster.create_class("classless-going", json!({})).await;
        cluster.wait_bound("data").await;
        assert_eq!(node.volumes(), cluster.volume_ids(&[&claim]));
        cluster.wait_for_event("data", "ProvisioningSucceeded").await;
        // Once the claim is bound, the class may be deleted for good.
        cluster.delete_object(&cluster.classes(), "classless-going").await;
        cluster.delete_object(&cluster.claims(), "data").await;
        cluster.wait_deleted(&cluster.volumes(), id(&claim).as_str()).await;
        node.assert_empty().await;
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn a_claim_without_a_class_is_skipped_until_it_names_our_driver() {
    run_test("none", async |cluster| {
        let node = cluster.start_provisioner("a").await;
        cluster.create_claim("untouched", json!({ "spec": { "storageClassName": null } })).await;
        cluster.create_claim("empty", json!({ "spec": { "storageClassName": "" } })).await;
        let said = json!({
            "metadata": { "annotations": { "volume.kubernetes.io/storage-provisioner": cluster.driver.as_str() } },
            "spec": { "storageClassName": null },
        });
        cluster.create_claim("said", said).await;
        let (kind, note) = cluster.wait_for_event("said", "ProvisioningFailed").await;
        assert_eq!((kind.as_str(), note.contains("has no storage class")), ("Warning", true), "{note}");
        // It continues, and by then it would have emitted events about the others.
        cluster.create_claim("good", json!({})).await;
        cluster.wait_bound("good").await;
        for name in ["untouched", "empty"] {
            assert_eq!(cluster.event_reasons(name).await, Vec::<String>::new(), "{name}");
            let claim = cluster.claims().get(name).await.expect("still exists");
            assert_eq!(super::harness::phase(&claim), "Pending");
            assert_eq!(claim.metadata.annotations.map(|all| all.contains_key(SELECTED_NODE)), Some(true));
        }
        assert_eq!(node.volumes().len(), 1);
        node.stop().await;
    });
}

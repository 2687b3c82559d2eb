//! Volumes that are deleted, retained, released, and those that only look like ours.

use std::fs;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use nodekeel_provisioner::testing::objects::sample_uid;
use nodekeel_provisioner::{PROVISIONED_BY, VolumeId, VolumeStep, VolumeStore as _};
use serde_json::{Value, json};

use super::harness::{TestCluster, TestNode, id, merge, names, run_test, wait_for_object};

const LIMITS: QuotaLimits = QuotaLimits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };

/// A bound claim whose volume holds a file.
async fn create_used_volume(
    cluster: &TestCluster,
    node: &TestNode,
    name: &str,
    patch: Value,
) -> (PersistentVolumeClaim, VolumeId) {
    let claim = cluster.create_claim(name, patch).await;
    cluster.wait_bound(name).await;
    let id = id(&claim);
    fs::write(node.base.path().join("volumes").join(id.as_str()).join("file"), "data").expect("a file");
    (claim, id)
}

/// Deletes the claim, and checks that its volume goes without a failure and leaves nothing.
async fn delete_claim_and_volume(cluster: &TestCluster, node: TestNode, claim: &str, id: &VolumeId) {
    cluster.delete_object(&cluster.claims(), claim).await;
    cluster.wait_deleted(&cluster.volumes(), id.as_str()).await;
    node.assert_empty().await;
    assert_eq!(cluster.event_reasons(id.as_str()).await, Vec::<String>::new(), "no failure event");
    node.stop().await;
}

fn read_data(node: &TestNode, id: &VolumeId) -> Option<String> {
    fs::read_to_string(node.base.path().join("volumes").join(id.as_str()).join("file")).ok()
}

#[test]
#[ignore = "needs kube"]
fn a_hundred_deletions_are_counted_once_each_with_one_delete_and_one_patch() {
    const CLAIMS: usize = 100;
    run_test("counted", async |cluster| {
        let node = cluster.start_provisioner("a").await;
        let mut ids = Vec::new();
        for number in 0..CLAIMS {
            ids.push(id(&cluster.create_claim(&format!("claim-{number}"), json!({})).await));
        }
        for number in 0..CLAIMS {
            cluster.wait_bound(&format!("claim-{number}")).await;
        }
        for number in 0..CLAIMS {
            cluster.delete_object(&cluster.claims(), &format!("claim-{number}")).await;
        }
        for id in &ids {
            cluster.wait_deleted(&cluster.volumes(), id.as_str()).await;
        }
        node.assert_empty().await;
        // Changes of the deleted objects that are still queued.
        tokio::time::sleep(std::time::Duration::from_secs(3)).await;
        assert_eq!(node.counts.get(), [CLAIMS, 0, CLAIMS, 0]);
        let requests = [VolumeStep::DeletePersistentVolume, VolumeStep::RemoveFinalizer];
        assert_eq!(requests.map(|step| node.step_count(step)), [CLAIMS; 2]);
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn a_rebound_volume_is_deleted_after_its_second_claim() {
    run_test("rebound", async |cluster| {
        let node = cluster.start_provisioner("a").await;
        cluster.create_class("rebound-kept", json!({ "reclaimPolicy": "Retain" })).await;
        let of_class = json!({ "spec": { "storageClassName": "rebound-kept" } });
        let (_, id) = create_used_volume(&cluster, &node, "first", of_class.clone()).await;
        cluster.delete_object(&cluster.claims(), "first").await;
        cluster.wait_released(id.as_str()).await;
        let patch = async |patch: Value| {
            let patch = kube::api::Patch::Merge(patch);
            cluster.volumes().patch(id.as_str(), &Default::default(), &patch).await.expect("a patch");
        };
        patch(json!({ "spec": { "claimRef": null } })).await;
        let mut second = of_class;
        merge(&mut second, json!({ "spec": { "volumeName": id.as_str() } }));
        let second = cluster.create_claim("second", second).await;
        cluster.wait_bound("second").await;
        assert_eq!(read_data(&node, &id).as_deref(), Some("data"), "it has the first claim's data");
        let annotation = cluster.driver.claim_annotation();
        let is_recorded = |volume: Option<&PersistentVolume>| {
            let annotations = volume.and_then(|volume| volume.metadata.annotations.as_ref());
            annotations.and_then(|all| all.get(&annotation)) == second.metadata.uid.as_ref()
        };
        wait_for_object(&cluster.volumes(), id.as_str(), is_recorded).await;
        patch(json!({ "spec": { "persistentVolumeReclaimPolicy": "Delete" } })).await;
        delete_claim_and_volume(&cluster, node, "second", &id).await;
    });
}

#[test]
#[ignore = "needs kube"]
fn a_volume_deleted_while_bound_stays_until_its_claim_goes() {
    run_test("early", async |cluster| {
        let node = cluster.start_provisioner("a").await;
        let (_, id) = create_used_volume(&cluster, &node, "data", json!({})).await;
        cluster.delete_object(&cluster.volumes(), id.as_str()).await;
        // Meanwhile, another claim is provisioned and deleted.
        let (_, other) = create_used_volume(&cluster, &node, "other", json!({})).await;
        cluster.delete_object(&cluster.claims(), "other").await;
        cluster.wait_deleted(&cluster.volumes(), other.as_str()).await;
        let volume = cluster.volumes().get(id.as_str()).await.expect("exists");
        assert!(volume.metadata.deletion_timestamp.is_some());
        assert_eq!(read_data(&node, &id).as_deref(), Some("data"), "its claim still uses it");
        let nothing = Vec::<String>::new();
        assert_eq!(
            cluster.event_reasons(id.as_str()).await,
            nothing,
            "waiting for its claim is not a failure"
        );

        cluster.delete_object(&cluster.claims(), "data").await;
        cluster.wait_deleted(&cluster.volumes(), id.as_str()).await;
        assert_eq!(cluster.event_reasons(id.as_str()).await, nothing);
        node.assert_empty().await;
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn a_volume_of_a_retain_class_is_kept_and_its_object_can_be_deleted() {
    run_test("retained", async |cluster| {
        let node = cluster.start_provisioner("a").await;
        cluster.create_class("retained-kept", json!({ "reclaimPolicy": "Retain" })).await;
        let of_class = json!({ "spec": { "storageClassName": "retained-kept" } });
        let (_, id) = create_used_volume(&cluster, &node, "data", of_class).await;
        cluster.delete_object(&cluster.claims(), "data").await;
        cluster.wait_released(id.as_str()).await;
        let (_, other) = create_used_volume(&cluster, &node, "other", json!({})).await;
        cluster.delete_object(&cluster.claims(), "other").await;
        cluster.wait_deleted(&cluster.volumes(), other.as_str()).await;
        assert_eq!(read_data(&node, &id).as_deref(), Some("data"));

        cluster.delete_object(&cluster.volumes(), id.as_str()).await;
        cluster.wait_deleted(&cluster.volumes(), id.as_str()).await;
        let (_, last) = create_used_volume(&cluster, &node, "last", json!({})).await;
        assert_eq!(read_data(&node, &id).as_deref(), Some("data"), "the data stay without the object");
        assert_eq!(node.volumes().len(), 2, "with {last}");
        node.stop().await;
    });
}

/// A forged volume that claims to be ours, changed by a patch.
fn forged_volume(cluster: &TestCluster, name: &str, patch: Value) -> Value {
    let hostname =
        json!({ "key": "kubernetes.io/hostname", "operator": "In", "values": [cluster.node_name("a")] });
    let mut volume = json!({
        "metadata": { "name": name, "annotations": { PROVISIONED_BY: cluster.driver.as_str() } },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": { "storage": "1Mi" },
            "claimRef": { "namespace": cluster.name, "name": "gone", "uid": sample_uid(99) },
            "csi": { "driver": cluster.driver.as_str(), "volumeHandle": name },
            "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [hostname] }] } },
            "persistentVolumeReclaimPolicy": "Delete",
        },
    });
    merge(&mut volume, patch);
    volume
}

#[test]
#[ignore = "needs kube"]
fn no_handle_reaches_anything_but_its_own_volume() {
    run_test("hostile", async |cluster| {
        let (node, outside) =
            (cluster.start_provisioner("a").await, tempfile::tempdir().expect("a directory"));
        let canary = outside.path().join("canary");
        fs::write(&canary, "alive").expect("a file");
        fs::create_dir(node.base.path().join("x")).expect("a directory");
        fs::write(node.base.path().join("x/canary"), "alive").expect("a file");
        let (_, neighbour) = create_used_volume(&cluster, &node, "neighbour", json!({})).await;
        let elsewhere = VolumeId::from_uid(&sample_uid(7)).expect("a UUID");
        let absolute = outside.path().display().to_string();
        let long = "x".repeat(4096);
        let nul = format!("{neighbour}\0");
        let slash = format!("{neighbour}/");
        let handles = [
            ".",
            "..",
            "../x",
            "../../x",
            "/",
            &absolute,
            &nul,
            &long,
            &slash,
            neighbour.as_str(),
            elsewhere.as_str(),
            "volumes",
            ".trash",
            "%2e%2e",
            "pvc-",
            "\u{202e}",
        ];
        for (number, handle) in handles.iter().enumerate() {
            let handle = json!({ "spec": { "csi": { "volumeHandle": handle } } });
            cluster
                .create_object(
                    cluster.volumes(),
                    forged_volume(&cluster, &format!("hostile-{number}"), handle),
                )
                .await;
        }
        // A volume with a valid name, whose handle does not match it.
        let named = format!("pvc-{}", sample_uid(99));
        let handle = json!({ "spec": { "csi": { "volumeHandle": ".." } } });
        cluster.create_object(cluster.volumes(), forged_volume(&cluster, &named, handle)).await;

        let all = (0..handles.len()).map(|number| format!("hostile-{number}")).chain([named]);
        for name in all {
            let (kind, note) = cluster.wait_for_event(&name, "VolumeFailedDelete").await;
            assert_eq!(kind, "Warning", "{name}");
            assert!(note.contains("nothing was deleted") && note.len() < 400, "{name}: {note}");
            cluster.wait_released(&name).await;
        }
        assert_eq!(fs::read_to_string(&canary).expect("exists"), "alive");
        assert_eq!(names(&node.base.path().join("x")), ["canary"]);
        assert_eq!(read_data(&node, &neighbour).as_deref(), Some("data"));
        let (_, next) = create_used_volume(&cluster, &node, "next", json!({})).await;
        assert_eq!(node.volumes().len(), 2, "it continues, with {next}");
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn volumes_that_differ_from_ours_in_one_field_are_skipped() {
    run_test("foreign", async |cluster| {
        let node = cluster.start_provisioner("a").await;
        let hostname = |operator: &str, values: Value| {
            let expression =
                json!({ "key": "kubernetes.io/hostname", "operator": operator, "values": values });
            json!({ "spec": { "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [expression] }] } } } })
        };
        let cases = [
            ("nowhere", json!({ "spec": { "nodeAffinity": null } })),
            ("elsewhere", hostname("In", json!([cluster.node_name("b")]))),
            ("both", hostname("In", json!([cluster.node_name("a"), cluster.node_name("b")]))),
            ("not-here", hostname("NotIn", json!([cluster.node_name("a")]))),
            ("driver", json!({ "spec": { "csi": { "driver": "other.example.com" } } })),
            ("kept", json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } })),
        ];
        let mut volumes = Vec::new();
        for (number, (name, patch)) in (1..).zip(&cases) {
            let id = VolumeId::from_uid(&sample_uid(1000 + number)).expect("a UUID");
            node.store.create(&id, LIMITS).await.expect("create");
            fs::write(node.base.path().join("volumes").join(id.as_str()).join("file"), *name)
                .expect("a file");
            let mut volume = forged_volume(
                &cluster,
                id.as_str(),
                json!({ "spec": { "claimRef": { "uid": id.claim_uid() } } }),
            );
            merge(&mut volume, patch.clone());
            cluster.create_object(cluster.volumes(), volume).await;
            cluster.wait_released(id.as_str()).await;
            volumes.push((name, id));
        }
        let (_, id) = create_used_volume(&cluster, &node, "data", json!({})).await;
        cluster.delete_object(&cluster.claims(), "data").await;
        cluster.wait_deleted(&cluster.volumes(), id.as_str()).await;
        for (name, id) in volumes {
            assert_eq!(read_data(&node, &id).as_deref(), Some(*name));
            assert_eq!(cluster.event_reasons(id.as_str()).await, Vec::<String>::new(), "{name}");
        }
        node.stop().await;
    });
}

//! Volumes out: deleted, kept, let go of, and those that only look like ours.

use std::fs;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use nodekeel_fsquota::{Bytes, Inodes, Limits};
use nodekeel_provisioner::testing::objects::uid;
use nodekeel_provisioner::{FINALIZER, PROVISIONED_BY, VolumeId, VolumeStore as _};
use serde_json::{Value, json};

use super::harness::{Node, Scene, id, merge, names, play, until};

const LIMITS: Limits = Limits { bytes: Some(Bytes(1 << 20)), inodes: Some(Inodes(1024)) };

/// A bound claim whose volume holds a file.
async fn used(scene: &Scene, node: &Node, name: &str, patch: Value) -> (PersistentVolumeClaim, VolumeId) {
    let claim = scene.claim(name, patch).await;
    scene.bound(name).await;
    let id = id(&claim);
    fs::write(node.base.path().join("volumes").join(id.as_str()).join("file"), "data").expect("a file");
    (claim, id)
}

fn data(node: &Node, id: &VolumeId) -> Option<String> {
    fs::read_to_string(node.base.path().join("volumes").join(id.as_str()).join("file")).ok()
}

#[test]
#[ignore = "needs kube"]
fn a_deleted_claim_takes_its_volume_its_directory_and_its_project_along() {
    play("deleted", async |scene| {
        let node = scene.provisioner("a").await;
        let (_, id) = used(&scene, &node, "data", json!({})).await;
        let volume = scene.volumes().get(id.as_str()).await.expect("a volume");
        assert!(volume.metadata.finalizers.expect("finalizers").contains(&FINALIZER.to_owned()));
        scene.delete(&scene.claims(), "data").await;
        scene.gone(&scene.volumes(), id.as_str()).await;
        node.is_bare().await;
        assert_eq!(scene.events(id.as_str()).await, Vec::<String>::new(), "nothing failed");
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn a_volume_deleted_while_bound_stays_until_its_claim_goes() {
    play("early", async |scene| {
        let node = scene.provisioner("a").await;
        let (_, id) = used(&scene, &node, "data", json!({})).await;
        scene.delete(&scene.volumes(), id.as_str()).await;
        // Another claim goes all the way meanwhile.
        let (_, other) = used(&scene, &node, "other", json!({})).await;
        scene.delete(&scene.claims(), "other").await;
        scene.gone(&scene.volumes(), other.as_str()).await;
        let volume = scene.volumes().get(id.as_str()).await.expect("it is there");
        assert!(volume.metadata.deletion_timestamp.is_some());
        assert_eq!(data(&node, &id).as_deref(), Some("data"), "its claim still uses it");
        let nothing = Vec::<String>::new();
        assert_eq!(scene.events(id.as_str()).await, nothing, "that it waits for its claim is no failure");

        scene.delete(&scene.claims(), "data").await;
        scene.gone(&scene.volumes(), id.as_str()).await;
        assert_eq!(scene.events(id.as_str()).await, nothing);
        node.is_bare().await;
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn without_the_finalizer_a_deleted_claim_leaves_nothing_and_a_volume_deleted_by_hand_its_data() {
    play("bare", async |scene| {
        let node = scene.provisioner_with(&scene.node("a"), None).await;
        let (_, id) = used(&scene, &node, "data", json!({})).await;
        let finalizers = scene.volumes().get(id.as_str()).await.expect("a volume").metadata.finalizers;
        assert!(!finalizers.unwrap_or_default().contains(&FINALIZER.to_owned()));
        scene.delete(&scene.claims(), "data").await;
        scene.gone(&scene.volumes(), id.as_str()).await;
        node.is_bare().await;

        // Nothing holds the object once its claim is gone: what data are then nobody's are left to people.
        let (_, id) = used(&scene, &node, "by-hand", json!({})).await;
        scene.delete(&scene.volumes(), id.as_str()).await;
        scene.delete(&scene.claims(), "by-hand").await;
        scene.gone(&scene.volumes(), id.as_str()).await;
        let (_, other) = used(&scene, &node, "other", json!({})).await;
        assert!(data(&node, &other).is_some());
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn a_finalizer_taken_off_by_somebody_is_put_on_again() {
    play("stripped", async |scene| {
        let node = scene.provisioner("a").await;
        let (_, id) = used(&scene, &node, "data", json!({})).await;
        let strip = kube::api::Patch::Merge(json!({ "metadata": { "finalizers": [] } }));
        scene.volumes().patch(id.as_str(), &Default::default(), &strip).await.expect("a patch");
        let has_it = |volume: Option<&PersistentVolume>| {
            volume.is_some_and(|volume| volume.metadata.finalizers.iter().flatten().any(|it| it == FINALIZER))
        };
        until(&scene.volumes(), id.as_str(), has_it).await;
        scene.delete(&scene.claims(), "data").await;
        scene.gone(&scene.volumes(), id.as_str()).await;
        node.is_bare().await;
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn a_volume_of_a_class_that_retains_is_kept_and_its_object_can_go() {
    play("retained", async |scene| {
        let node = scene.provisioner("a").await;
        scene.class("retained-kept", json!({ "reclaimPolicy": "Retain" })).await;
        let of_class = json!({ "spec": { "storageClassName": "retained-kept" } });
        let (_, id) = used(&scene, &node, "data", of_class).await;
        scene.delete(&scene.claims(), "data").await;
        scene.released(id.as_str()).await;
        let (_, other) = used(&scene, &node, "other", json!({})).await;
        scene.delete(&scene.claims(), "other").await;
        scene.gone(&scene.volumes(), other.as_str()).await;
        assert_eq!(data(&node, &id).as_deref(), Some("data"));

        scene.delete(&scene.volumes(), id.as_str()).await;
        scene.gone(&scene.volumes(), id.as_str()).await;
        let (_, last) = used(&scene, &node, "last", json!({})).await;
        assert_eq!(data(&node, &id).as_deref(), Some("data"), "the data stay without the object");
        assert_eq!(node.volumes().len(), 2, "with {last}");
        node.stop().await;
    });
}

/// A volume of nobody's making that says of itself that it is ours, changed by a patch.
fn fake(scene: &Scene, name: &str, patch: Value) -> Value {
    let hostname = json!({ "key": "kubernetes.io/hostname", "operator": "In", "values": [scene.node("a")] });
    let mut volume = json!({
        "metadata": { "name": name, "annotations": { PROVISIONED_BY: scene.driver.as_str() } },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": { "storage": "1Mi" },
            "claimRef": { "namespace": scene.name, "name": "gone", "uid": uid(99) },
            "csi": { "driver": scene.driver.as_str(), "volumeHandle": name },
            "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [hostname] }] } },
            "persistentVolumeReclaimPolicy": "Delete",
        },
    });
    merge(&mut volume, patch);
    volume
}

#[test]
#[ignore = "needs kube"]
fn a_volume_whose_claim_is_another_than_it_was_made_for_is_not_deleted() {
    play("swapped", async |scene| {
        let node = scene.provisioner("a").await;
        let id = VolumeId::from_uid(&uid(1)).expect("a UUID");
        node.store.create(&id, LIMITS).await.expect("create");
        scene.create(scene.volumes(), fake(&scene, id.as_str(), json!({}))).await;
        let (kind, note) = scene.told(id.as_str(), "VolumeFailedDelete").await;
        assert_eq!(kind, "Warning");
        assert!(note.contains("another claim") && note.contains("nothing was deleted"), "{note}");
        scene.released(id.as_str()).await;
        assert_eq!(node.volumes(), [id.to_string()]);
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn no_handle_reaches_anything_but_its_own_volume() {
    play("hostile", async |scene| {
        let (node, outside) = (scene.provisioner("a").await, tempfile::tempdir().expect("a directory"));
        let canary = outside.path().join("canary");
        fs::write(&canary, "alive").expect("a file");
        fs::create_dir(node.base.path().join("x")).expect("a directory");
        fs::write(node.base.path().join("x/canary"), "alive").expect("a file");
        let (_, neighbour) = used(&scene, &node, "neighbour", json!({})).await;
        let elsewhere = VolumeId::from_uid(&uid(7)).expect("a UUID");
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
            scene.create(scene.volumes(), fake(&scene, &format!("hostile-{number}"), handle)).await;
        }
        // One of the right name, whose handle leads away from it.
        let named = format!("pvc-{}", uid(99));
        let handle = json!({ "spec": { "csi": { "volumeHandle": ".." } } });
        scene.create(scene.volumes(), fake(&scene, &named, handle)).await;

        let all = (0..handles.len()).map(|number| format!("hostile-{number}")).chain([named]);
        for name in all {
            let (kind, note) = scene.told(&name, "VolumeFailedDelete").await;
            assert_eq!(kind, "Warning", "{name}");
            assert!(note.contains("nothing was deleted") && note.len() < 400, "{name}: {note}");
            scene.released(&name).await;
        }
        assert_eq!(fs::read_to_string(&canary).expect("it is there"), "alive");
        assert_eq!(names(&node.base.path().join("x")), ["canary"]);
        assert_eq!(data(&node, &neighbour).as_deref(), Some("data"));
        let (_, next) = used(&scene, &node, "next", json!({})).await;
        assert_eq!(node.volumes().len(), 2, "it goes on, with {next}");
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn volumes_that_are_not_ours_in_one_respect_are_left_alone() {
    play("foreign", async |scene| {
        let node = scene.provisioner("a").await;
        let hostname = |operator: &str, values: Value| {
            let expression =
                json!({ "key": "kubernetes.io/hostname", "operator": operator, "values": values });
            json!({ "spec": { "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [expression] }] } } } })
        };
        let cases = [
            ("nowhere", json!({ "spec": { "nodeAffinity": null } })),
            ("elsewhere", hostname("In", json!([scene.node("b")]))),
            ("both", hostname("In", json!([scene.node("a"), scene.node("b")]))),
            ("not-here", hostname("NotIn", json!([scene.node("a")]))),
            ("driver", json!({ "spec": { "csi": { "driver": "other.example.com" } } })),
            ("kept", json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } })),
        ];
        let mut volumes = Vec::new();
        for (number, (name, patch)) in (1..).zip(&cases) {
            let id = VolumeId::from_uid(&uid(1000 + number)).expect("a UUID");
            node.store.create(&id, LIMITS).await.expect("create");
            fs::write(node.base.path().join("volumes").join(id.as_str()).join("file"), *name)
                .expect("a file");
            let mut volume =
                fake(&scene, id.as_str(), json!({ "spec": { "claimRef": { "uid": id.claim_uid() } } }));
            merge(&mut volume, patch.clone());
            scene.create(scene.volumes(), volume).await;
            scene.released(id.as_str()).await;
            volumes.push((name, id));
        }
        let (_, id) = used(&scene, &node, "data", json!({})).await;
        scene.delete(&scene.claims(), "data").await;
        scene.gone(&scene.volumes(), id.as_str()).await;
        for (name, id) in volumes {
            assert_eq!(data(&node, &id).as_deref(), Some(*name));
            assert_eq!(scene.events(id.as_str()).await, Vec::<String>::new(), "{name}");
        }
        node.stop().await;
    });
}

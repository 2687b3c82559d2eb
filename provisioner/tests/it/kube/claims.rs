//! Claims in: from a pod, from a selected node, and with what a claim and its class may say.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::Api;
use nodekeel_fsquota::{Bytes, Inodes, Limits};
use nodekeel_provisioner::{SELECTED_NODE, VolumeStore as _};
use serde_json::{Value, json};
use testbed::FakeNode;

use super::harness::{Scene, id, play, runtime, shared};

fn storage(size: &str) -> Value {
    json!({ "spec": { "resources": { "requests": { "storage": size } } } })
}

fn capacity(volume: &PersistentVolume) -> &str {
    &volume.spec.as_ref().expect("a spec").capacity.as_ref().expect("a capacity")["storage"].0
}

fn pod(scene: &Scene, claim: &str) -> Value {
    json!({
        "metadata": { "name": "consumer" },
        "spec": {
            "nodeSelector": { "kubernetes.io/hostname": scene.node("a") },
            "containers": [{ "name": "c", "image": "none", "volumeMounts": [{ "name": "data", "mountPath": "/data" }] }],
            "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": claim } }],
        },
    })
}

#[test]
#[ignore = "needs kube"]
fn a_claim_waits_for_its_pod_and_is_bound_on_the_node_that_the_scheduler_selects() {
    let (kube, runtime) = (shared(), runtime());
    let scene = runtime.block_on(Scene::new(&kube, "consumer"));
    kube.fake_node(&FakeNode::new(scene.node("a")).driver(scene.driver.as_str())).expect("a node");
    runtime.block_on(async {
        let (a, b) = (scene.provisioner("a").await, scene.provisioner("b").await);
        let claim = scene.claim("data", json!({ "metadata": { "annotations": null } })).await;
        let other = scene.claim("selected", json!({})).await;
        scene.bound("selected").await;
        assert_eq!(a.volumes(), scene.ids(&[&other]), "the one without a pod waits");

        let pods: Api<Pod> = Api::namespaced(scene.admin.clone(), scene.name);
        scene.create(pods, pod(&scene, "data")).await;
        let volume = scene.bound("data").await;
        assert_eq!(volume.metadata.name.as_deref(), Some(id(&claim).as_str()));
        let (kind, note) = scene.told("data", "ProvisioningSucceeded").await;
        assert_eq!(
            (kind.as_str(), note),
            ("Normal", format!("Successfully provisioned volume {}", id(&claim)))
        );
        assert_eq!(a.volumes(), scene.ids(&[&claim, &other]));
        assert_eq!(b.volumes(), Vec::<String>::new());
        a.stop().await;
        b.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn a_volume_has_the_limits_that_its_claim_and_its_class_say() {
    play("limits", async |scene| {
        let node = scene.provisioner("a").await;
        scene.class("limits-inodes", json!({ "parameters": { "inodes": "7k" } })).await;
        let of_class = json!({ "spec": { "storageClassName": "limits-inodes" } });
        // What is asked for, the capacity that is told, the limits in force.
        let cases = [
            ("plain", storage("10Mi"), "10Mi", 10 << 20, 5120),
            ("small", storage("1Mi"), "1Mi", 1 << 20, 1024),
            ("inodes", of_class, "1Mi", 1 << 20, 7000),
            ("fraction", storage("1.5Ki"), "1536", 1536, 1024),
            ("milli", storage("1500m"), "2", 2, 1024),
            ("half", storage("0.5"), "1", 1, 1024),
            ("decimal", storage("1G"), "1G", 1_000_000_000, 488_281),
            ("exponent", storage("1e6"), "1M", 1_000_000, 1024),
            ("large", storage("7Ei"), "7Ei", 7 << 60, 7 << 49),
        ];
        for (name, patch, _, bytes, inodes) in cases {
            let claim = scene.claim(name, patch).await;
            let volume = scene.bound(name).await;
            let told: Bytes = capacity(&volume).parse().expect("a quantity");
            assert_eq!(told, Bytes(bytes), "{name}");
            let limits = node.store.usage(&id(&claim)).await.expect("usage").limits;
            // The quota counts in blocks of 1 KiB.
            let bytes = Bytes(bytes.next_multiple_of(1024));
            assert_eq!(limits, Limits { bytes: Some(bytes), inodes: Some(Inodes(inodes)) }, "{name}");
        }
        assert_eq!((node.volumes().len(), node.quota.list().len()), (9, 9));
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn access_modes_of_one_node_are_copied_and_a_missing_volume_mode_is_a_directory() {
    play("modes", async |scene| {
        let node = scene.provisioner("a").await;
        // The one that may write comes first: it is the one that the kubelet tells.
        let cases = [
            ("rox", json!(["ReadOnlyMany"]), json!(["ReadOnlyMany"])),
            ("rwop", json!(["ReadWriteOncePod"]), json!(["ReadWriteOncePod"])),
            ("both", json!(["ReadOnlyMany", "ReadWriteOnce"]), json!(["ReadWriteOnce", "ReadOnlyMany"])),
        ];
        let mut claims = Vec::new();
        for (name, asked, given) in cases {
            claims.push(
                scene.claim(name, json!({ "spec": { "accessModes": asked, "volumeMode": null } })).await,
            );
            let spec = scene.bound(name).await.spec.expect("a spec");
            assert_eq!(json!(spec.access_modes), given);
            assert_eq!(spec.volume_mode.as_deref(), Some("Filesystem"));
            scene.told(name, "ProvisioningSucceeded").await;
            assert_eq!(scene.events(name).await, ["ProvisioningSucceeded"]);
        }
        assert_eq!(node.volumes(), scene.ids(&claims.iter().collect::<Vec<_>>()));
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn a_class_that_goes_before_the_volume_is_made_is_told_and_waited_for() {
    play("classless", async |scene| {
        scene.class("classless-going", json!({})).await;
        let claim = scene.claim("data", json!({ "spec": { "storageClassName": "classless-going" } })).await;
        // Nobody provisions yet, but the claim is already known to be this driver's.
        let is_asked = |claim: Option<&PersistentVolumeClaim>| {
            let annotations = claim.and_then(|claim| claim.metadata.annotations.as_ref());
            annotations.is_some_and(|all| all.contains_key("volume.kubernetes.io/storage-provisioner"))
        };
        super::harness::until(&scene.claims(), "data", is_asked).await;
        scene.delete(&scene.classes(), "classless-going").await;

        let node = scene.provisioner("a").await;
        let (kind, note) = scene.told("data", "ProvisioningFailed").await;
        assert_eq!(kind, "Warning");
        assert!(note.contains(r#""classless-going" does not exist"#), "{note}");
        assert_eq!(node.volumes(), Vec::<String>::new());
        assert!(scene.own_volumes().await.is_empty());

        scene.class("classless-going", json!({})).await;
        scene.bound("data").await;
        assert_eq!(node.volumes(), scene.ids(&[&claim]));
        scene.told("data", "ProvisioningSucceeded").await;
        // Once it is bound, the class may go for good.
        scene.delete(&scene.classes(), "classless-going").await;
        scene.delete(&scene.claims(), "data").await;
        scene.gone(&scene.volumes(), id(&claim).as_str()).await;
        node.is_bare().await;
        node.stop().await;
    });
}

#[test]
#[ignore = "needs kube"]
fn a_claim_without_a_class_is_nobodys_until_it_is_said_to_be_ours() {
    play("none", async |scene| {
        let node = scene.provisioner("a").await;
        scene.claim("untouched", json!({ "spec": { "storageClassName": null } })).await;
        scene.claim("empty", json!({ "spec": { "storageClassName": "" } })).await;
        let said = json!({
            "metadata": { "annotations": { "volume.kubernetes.io/storage-provisioner": scene.driver.as_str() } },
            "spec": { "storageClassName": null },
        });
        scene.claim("said", said).await;
        let (kind, note) = scene.told("said", "ProvisioningFailed").await;
        assert_eq!((kind.as_str(), note.contains("names no storage class")), ("Warning", true), "{note}");
        // It goes on, and by then it would have said something about the others.
        scene.claim("good", json!({})).await;
        scene.bound("good").await;
        for name in ["untouched", "empty"] {
            assert_eq!(scene.events(name).await, Vec::<String>::new(), "{name}");
            let claim = scene.claims().get(name).await.expect("it is still there");
            assert_eq!(super::harness::phase(&claim), "Pending");
            assert_eq!(claim.metadata.annotations.map(|all| all.contains_key(SELECTED_NODE)), Some(true));
        }
        assert_eq!(node.volumes().len(), 1);
        node.stop().await;
    });
}

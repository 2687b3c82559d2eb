//! The admission policies of the agent in `deploy/policy`, enforced by the API server.

use std::sync::Arc;

use anyhow::Result;
use nodekeel_provisioner::{DriverName, FINALIZER, PROVISIONED_BY, SELECTED_NODE, STORAGE_PROVISIONER};
use serde_json::{Value, json};
use testbed::{FakeNode, Kube, KubeUser, SharedKube, command_output, merge_patch};

use crate::accounts::{self, kubectl_as, wait_until_rejected};
use crate::cluster::{DRIVER, claim_manifest};

const ACCOUNT: &str = "provisionerd-agent";
const VOLUME: &str = include_str!("../../../../provisioner/testdata/manifests/plain.json");
const POLICIES: [&str; 4] = [
    "provisionerd-agent-claims",
    "provisionerd-agent-volumes",
    "provisionerd-agent-nodes",
    "provisionerd-agent-capacity",
];

/// The control plane that these tests share.
fn control_plane() -> Arc<Kube> {
    static SHARED: SharedKube = SharedKube::new();
    SHARED.get_or_start(start_control_plane)
}

/// A control plane with the node `node-a`, and the agent's account and policies.
fn start_control_plane() -> Kube {
    let kube = Kube::builder().with_user(KubeUser::service_account("nodekeel", "provisionerd-agent"));
    let kube = kube.start().expect("a control plane");
    for manifests in [
        include_str!("../../../../deploy/namespace.yaml"),
        include_str!("../../../../deploy/agent/rbac.yaml"),
        include_str!("../../../../deploy/agent/remove-volumes.yaml"),
        include_str!("../../../../deploy/policy/agent-claims.yaml"),
        include_str!("../../../../deploy/policy/agent-volumes.yaml"),
        include_str!("../../../../deploy/policy/agent-capacity.yaml"),
    ] {
        kube.apply_manifests(manifests).expect("the manifests");
    }
    kube.create_fake_node(&FakeNode::new("node-a")).expect("a node");
    kube
}

fn patch(kube: &Kube, kind: &str, name: &str, patch: &Value) -> Result<String> {
    accounts::patch(kubectl_as(kube, ACCOUNT, ""), kind, name, "", patch)
}

fn delete(kube: &Kube, name: &str) -> Result<String> {
    accounts::delete_volume(kubectl_as(kube, ACCOUNT, ""), name)
}

fn assert_rejected(tried: Result<String>, policy: &str, what: &str) {
    let message = format!("{:#}", tried.expect_err(what));
    assert!(message.contains(policy), "{what}: {message}");
}

fn create_claim(kube: &Kube, name: &str, change: Value) {
    let annotations = json!({ STORAGE_PROVISIONER: DRIVER, "kept": "yes" });
    let unbound =
        json!({ "metadata": { "annotations": annotations }, "spec": { "storageClassName": "none" } });
    let mut claim = claim_manifest(name, Some("node-a"), unbound);
    merge_patch(&mut claim, change);
    kube.create_objects(&claim.to_string()).expect("a claim");
}

#[test]
#[ignore = "needs kube"]
fn the_agents_account_only_deselects_the_nodes_of_unbound_claims() {
    let policy = POLICIES[0];
    let kube = control_plane();
    create_claim(&kube, "ours", json!({}));
    create_claim(
        &kube,
        "foreign",
        json!({ "metadata": { "annotations": { STORAGE_PROVISIONER: "other.example" } } }),
    );
    create_claim(&kube, "taken", json!({ "spec": { "volumeName": "another" } }));
    let change = |name: &str, metadata: Value| patch(&kube, "pvc", name, &json!({ "metadata": metadata }));
    let select = |node: Option<&str>| json!({ "annotations": { SELECTED_NODE: node } });
    wait_until_rejected(|| change("ours", json!({ "labels": { "a": "b" } })), policy);

    let owner = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "name": "gone", "uid": "00000000-0000-4000-8000-00000000dead",
    });
    for metadata in [
        select(Some("node-b")),
        json!({ "ownerReferences": [owner] }),
        json!({ "finalizers": null }),
        json!({ "annotations": { "kept": "no", SELECTED_NODE: null } }),
        json!({ "annotations": { "kept": null, SELECTED_NODE: null } }),
        json!({ "annotations": { "other": "new", SELECTED_NODE: null } }),
        json!({ "labels": { "app": "other" }, "annotations": { SELECTED_NODE: null } }),
    ] {
        assert_rejected(change("ours", metadata.clone()), policy, &metadata.to_string());
    }
    let bound = json!({ "metadata": select(None), "spec": { "volumeName": "another" } });
    assert_rejected(patch(&kube, "pvc", "ours", &bound), policy, "its specification");
    for name in ["foreign", "taken"] {
        assert_rejected(change(name, select(None)), policy, name);
    }
    change("ours", select(None)).expect("what the agent is for");
}

/// A volume of this driver on a node, as the agent finds it: released, of a claim that is deleted.
fn create_volume(kube: &Kube, name: &str, node: &str, phase: &str, change: Value) {
    let mut volume: Value = serde_json::from_str(VOLUME).expect("JSON");
    volume["metadata"]["name"] = name.into();
    volume["metadata"]["finalizers"] = json!([FINALIZER]);
    volume["metadata"]["annotations"][PROVISIONED_BY] = DRIVER.into();
    volume["spec"]["csi"]["driver"] = DRIVER.into();
    volume["spec"]["persistentVolumeReclaimPolicy"] = "Delete".into();
    let label =
        &mut volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"][0];
    label["key"] = DriverName::try_new(DRIVER).expect("a driver name").topology_key().into();
    label["values"] = json!([node]);
    merge_patch(&mut volume, change);
    kube.create_objects(&volume.to_string()).expect("a volume");
    let is_reached = |volume: &Value| volume["status"]["phase"] == phase;
    kube.wait_for_object("pv", name, is_reached).expect("its phase");
}

#[test]
#[ignore = "needs kube"]
fn the_agents_account_removes_only_released_volumes_of_nodes_that_do_not_exist() {
    let kube = control_plane();
    let (volumes, nodes) = (POLICIES[1], POLICIES[2]);
    let released = |name: &str, node: &str, change: Value| {
        create_volume(&kube, name, node, "Released", change);
    };
    released("gone", "node-gone", json!({}));
    released("living", "node-a", json!({}));
    released("retained", "node-gone", json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } }));
    released("foreign", "node-gone", json!({ "spec": { "csi": { "driver": "other.example" } } }));
    // Without any provisioner, it would not stay released: the volume controller would try to delete it.
    let provisioner = json!({ "metadata": { "annotations": { PROVISIONED_BY: "other.example" } } });
    released("adopted", "node-gone", provisioner);
    create_volume(&kube, "free", "node-gone", "Available", json!({ "spec": { "claimRef": null } }));
    wait_until_rejected(|| delete(&kube, "retained"), volumes);
    wait_until_rejected(|| delete(&kube, "living"), nodes);

    let finalizers = json!({ "metadata": { "finalizers": null } });
    for name in ["retained", "foreign", "adopted", "free"] {
        assert_rejected(delete(&kube, name), volumes, name);
        assert_rejected(patch(&kube, "pv", name, &finalizers), volumes, name);
    }
    assert_rejected(delete(&kube, "living"), nodes, "its node exists");
    assert_rejected(patch(&kube, "pv", "gone", &finalizers), volumes, "it is not being deleted");

    delete(&kube, "gone").expect("what the agent is for");
    let is_free = |volume: &Value| volume["metadata"]["finalizers"] == json!([FINALIZER]);
    kube.wait_for_object("pv", "gone", is_free).expect("the volume controller's finalizer is removed");
    for metadata in [
        json!({ "labels": { "app": "other" }, "finalizers": null }),
        json!({ "annotations": { PROVISIONED_BY: "other.example" }, "finalizers": null }),
    ] {
        let tried = patch(&kube, "pv", "gone", &json!({ "metadata": metadata }));
        assert_rejected(tried, volumes, &metadata.to_string());
    }
    patch(&kube, "pv", "gone", &finalizers).expect("what the agent is for");
    kube.wait_until_gone("pv", "gone").expect("it is removed");
}

#[test]
#[ignore = "needs kube"]
fn the_agents_account_withdraws_only_capacity_of_the_driver() {
    let (kube, policy) = (control_plane(), POLICIES[3]);
    let key = DriverName::try_new(DRIVER).expect("a driver name").topology_key();
    for (name, key) in [("ours", key.as_str()), ("foreign", "topology.other.example/node")] {
        let capacity = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "CSIStorageCapacity",
            "metadata": { "name": name, "namespace": "nodekeel" },
            "storageClassName": "nodekeel", "nodeTopology": { "matchLabels": { key: "node-a" } }, "capacity": "1Gi",
        });
        kube.create_objects(&capacity.to_string()).expect("a capacity");
    }
    let try_delete = |name: &str, dry_run: &str| {
        let mut kubectl = kubectl_as(&kube, ACCOUNT, "");
        // It may not watch them, so kubectl can't wait.
        kubectl.args(["--namespace=nodekeel", "delete", "--wait=false", dry_run, "csistoragecapacity", name]);
        command_output(&mut kubectl)
    };
    // Before the policy is in force, a deletion would succeed.
    wait_until_rejected(|| try_delete("foreign", "--dry-run=server"), policy);
    let delete = |name| try_delete(name, "--dry-run=none");
    delete("ours").expect("what the agent is for");
    assert_rejected(delete("foreign"), policy, "of another driver");
}

#[test]
#[ignore = "needs kube"]
fn the_expressions_of_the_agents_policies_pass_type_checking() {
    accounts::assert_type_checked(&control_plane(), &POLICIES);
}

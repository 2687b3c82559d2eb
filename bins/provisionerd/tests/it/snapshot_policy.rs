//! The admission policy of `deploy/policy/own-snapshots.yaml`, enforced by the API server.

use anyhow::Result;
use serde_json::{Value, json};
use testbed::Kube;

use crate::accounts::{self, kubectl_as, wait_until_rejected};
use crate::cluster::{self, DRIVER};

const POLICY: &str = "provisionerd-own-snapshots";

/// kubectl reads the status before it patches it; provisionerd does not.
const STATUS_READER: &str = "
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: { name: status-reader }
rules:
  - { apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshotcontents/status], verbs: [get] }
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: { name: status-reader }
roleRef: { apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: status-reader }
subjects: [{ kind: ServiceAccount, name: provisionerd, namespace: nodekeel }]
";

/// Patches a VolumeSnapshotContent as provisionerd's account, with the token of a pod on this node.
fn patch_as(kube: &Kube, node: &str, name: &str, subresource: &str, patch: &Value) -> Result<String> {
    let kubectl = kubectl_as(kube, "provisionerd", node);
    accounts::patch(kubectl, "volumesnapshotcontent", name, subresource, patch)
}

fn assert_rejected(tried: Result<String>, why: &str) {
    accounts::assert_rejected(tried, POLICY, why);
}

fn content_manifest(name: &str, driver: &str, node: &str) -> Value {
    json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
        "metadata": {
            "name": name, "labels": { "snapshot.storage.kubernetes.io/managed-by": node },
            "finalizers": ["example.org/test", "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection"],
        },
        "spec": {
            "deletionPolicy": "Delete",
            "driver": driver,
            "source": { "volumeHandle": "pvc-9f0e5d3c-1b2a-4c5d-8e6f-000000000001" },
            "volumeSnapshotRef": { "name": name, "namespace": "default" },
        },
    })
}

#[test]
#[ignore = "needs kube"]
fn an_account_changes_only_the_snapshots_of_its_node() {
    const FOREIGN: &str = "not one of this driver on this node";
    let kube = cluster::start_control_plane();
    cluster::install_snapshot_api(&kube);
    kube.apply_manifests(include_str!("../../../../deploy/policy/own-snapshots.yaml")).expect("the policy");
    kube.apply_manifests(STATUS_READER).expect("kubectl reads what it patches");
    for (name, driver, node) in [
        ("of-node-a", DRIVER, "node-a"),
        ("of-node-b", DRIVER, "node-b"),
        ("foreign", "foreign.example", "node-a"),
    ] {
        kube.create_objects(&content_manifest(name, driver, node).to_string()).expect("a content");
    }
    let status = json!({ "status": { "readyToUse": false } });
    wait_until_rejected(|| patch_as(&kube, "node-a", "of-node-b", "status", &status), POLICY);

    let finalizers = json!({ "metadata": { "finalizers": ["example.org/test"] } });
    patch_as(&kube, "node-a", "of-node-a", "status", &status).expect("of its node");
    patch_as(&kube, "node-a", "of-node-a", "", &finalizers).expect("of its node");
    for name in ["of-node-b", "foreign"] {
        assert_rejected(patch_as(&kube, "node-a", name, "status", &status), FOREIGN);
        assert_rejected(patch_as(&kube, "node-a", name, "", &finalizers), FOREIGN);
    }
    assert_rejected(patch_as(&kube, "", "of-node-a", "status", &status), "names no node");
    const ONLY: &str = "only its status may be changed";
    let policy = json!({ "spec": { "deletionPolicy": "Retain" } });
    assert_rejected(patch_as(&kube, "node-a", "of-node-a", "", &policy), ONLY);
    let label =
        json!({ "metadata": { "labels": { "snapshot.storage.kubernetes.io/managed-by": "node-b" } } });
    assert_rejected(patch_as(&kube, "node-a", "of-node-a", "", &label), ONLY);
}

//! The admission policy of `deploy/policy`, enforced by the API server.

use std::fs;
use std::process::Command;
use std::sync::Arc;

use anyhow::Result;
use nodekeel_provisioner::DriverName;
use serde_json::{Value, json};
use testbed::{Kube, ScratchDir, SharedKube, command_output};

use crate::accounts::{self, kubectl_as, wait_until_rejected};
use crate::cluster::{self, DRIVER, claim_manifest};

const POLICY: &str = "provisionerd-own-node";
const SELECTION_POLICY: &str = "provisionerd-own-selection";
const CAPACITY_POLICY: &str = "provisionerd-own-capacity";
const LEASE_POLICY: &str = "provisionerd-own-lease";
const VOLUME: &str = include_str!("../../../../provisioner/testdata/manifests/plain.json");

/// kubectl reads what it patches; provisionerd does not.
const STATUS_READER: &str = r#"
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "status-reader"},
         "rules": [{"apiGroups": [""], "resources": ["persistentvolumeclaims/status"], "verbs": ["get"]}]}
---
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "status-reader"},
         "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "status-reader"},
         "subjects": [{"kind": "ServiceAccount", "name": "provisionerd", "namespace": "nodekeel"}]}"#;

struct PolicyFixture {
    kube: Arc<Kube>,
    scratch: ScratchDir,
}

fn start_with_policies() -> Kube {
    let kube = cluster::start_control_plane();
    for manifests in [
        include_str!("../../../../deploy/policy/own-node.yaml"),
        include_str!("../../../../deploy/policy/own-capacity.yaml"),
        include_str!("../../../../deploy/policy/own-lease.yaml"),
        STATUS_READER,
    ] {
        kube.apply_manifests(manifests).expect("the policies and a role");
    }
    kube
}

impl PolicyFixture {
    fn start() -> Self {
        static SHARED: SharedKube = SharedKube::new();
        let kube = SHARED.get_or_start(start_with_policies);
        let site = Self { kube, scratch: ScratchDir::new().expect("a directory") };
        let foreign = volume_manifest("probe", DRIVER, &["node-b"]);
        wait_until_rejected(|| site.create_with("node-a", &foreign, "--dry-run=server"), POLICY);
        let foreign = capacity_manifest("probe", "node-b");
        wait_until_rejected(|| site.create_with("node-a", &foreign, "--dry-run=server"), CAPACITY_POLICY);
        let foreign = lease_manifest("node-b", "node-b");
        wait_until_rejected(|| site.create_with("node-a", &foreign, "--dry-run=server"), LEASE_POLICY);
        let probe = claim_manifest("probe", None, json!({ "spec": { "storageClassName": "none" } }));
        site.kube.apply_manifests(&probe.to_string()).expect("a claim");
        let labels = json!({ "metadata": { "labels": { "app": "other" } } });
        let patch = || site.patch_as("node-a", "persistentvolumeclaim", "probe", &labels);
        wait_until_rejected(patch, SELECTION_POLICY);
        site
    }

    fn kubectl_as_node(&self, node: &str) -> Command {
        kubectl_as(&self.kube, "provisionerd", node)
    }

    fn create_as(&self, node: &str, object: &Value) -> Result<String> {
        self.create_with(node, object, "--output=name")
    }

    fn create_with(&self, node: &str, object: &Value, how: &str) -> Result<String> {
        let file = self.scratch.path().join("object.json");
        fs::write(&file, object.to_string())?;
        command_output(
            self.kubectl_as_node(node).args(["create", "--validate=false", how, "--filename"]).arg(file),
        )
    }

    fn patch_as(&self, node: &str, kind: &str, name: &str, patch: &Value) -> Result<String> {
        accounts::patch(self.kubectl_as_node(node), kind, name, "", patch)
    }

    fn select_as(&self, by: &str, claim: &str, node: Option<&str>) -> Result<String> {
        let patch = json!({ "metadata": { "annotations": { "volume.kubernetes.io/selected-node": node } } });
        self.patch_as(by, "persistentvolumeclaim", claim, &patch)
    }

    fn patch_status_as(&self, node: &str, claim: &str, patch: &Value) -> Result<String> {
        accounts::patch(self.kubectl_as_node(node), "persistentvolumeclaim", claim, "status", patch)
    }

    /// A claim that is bound to a new volume on `node-a`, or pending where that has no name.
    fn create_claim(&self, name: &str, volume: &str, annotations: Value) {
        let patch =
            json!({ "metadata": { "annotations": annotations }, "spec": { "storageClassName": "none" } });
        let mut claim = claim_manifest(name, None, patch);
        if !volume.is_empty() {
            claim["spec"]["volumeName"] = volume.into();
            let mut object = volume_manifest(volume, DRIVER, &["node-a"]);
            object["spec"]["claimRef"] = json!({ "namespace": "default", "name": name });
            object["spec"]["storageClassName"] = "none".into();
            self.kube.create_objects(&object.to_string()).expect("a volume");
        }
        self.kube.create_objects(&claim.to_string()).expect("a claim");
        if !volume.is_empty() {
            let is_bound = |claim: &Value| claim["status"]["phase"] == "Bound";
            self.kube.wait_for_object("pvc", &format!("default/{name}"), is_bound).expect("it is bound");
        }
    }

    fn delete_as(&self, node: &str, name: &str) -> Result<String> {
        accounts::delete_volume(self.kubectl_as_node(node), name)
    }
}

/// A volume of the provisioner, with this driver and these nodes.
fn volume_manifest(name: &str, driver: &str, nodes: &[&str]) -> Value {
    let mut volume: Value = serde_json::from_str(VOLUME).expect("JSON");
    volume["metadata"]["name"] = name.into();
    volume["metadata"]["annotations"]["pv.kubernetes.io/provisioned-by"] = driver.into();
    volume["spec"]["csi"]["driver"] = driver.into();
    volume["spec"]["csi"]["volumeHandle"] = name.into();
    volume["spec"]["claimRef"]["uid"] = name.trim_start_matches("pvc-").into();
    let terms = &mut volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"];
    let label = &mut terms[0]["matchExpressions"][0];
    label["key"] = DriverName::try_new(DRIVER).expect("a driver name").topology_key().into();
    label["values"] = nodes.into();
    volume
}

/// The capacity object of this node.
fn capacity_manifest(name: &str, node: &str) -> Value {
    json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "CSIStorageCapacity",
        "metadata": { "name": name, "namespace": "nodekeel", "labels": {
            "csi.storage.k8s.io/drivername": DRIVER, "csi.storage.k8s.io/managed-by": node,
        } },
        "storageClassName": "nodekeel",
        "nodeTopology": { "matchLabels": {
            DriverName::try_new(DRIVER).expect("a driver name").topology_key(): node,
        } },
        "capacity": "1Gi",
    })
}

/// The Lease of a node with this holder.
fn lease_manifest(node: &str, holder: &str) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": { "name": format!("{DRIVER}-{node}"), "namespace": "nodekeel" },
        "spec": { "holderIdentity": holder, "leaseDurationSeconds": 10 },
    })
}

fn assert_rejected(tried: Result<String>, why: &str) {
    accounts::assert_rejected(tried, "provisionerd-own-", why);
}

const FOREIGN: &str = "not one of this driver on this node alone";

#[test]
#[ignore = "needs kube"]
fn an_account_on_one_node_cannot_change_the_volumes_of_another() {
    let site = PolicyFixture::start();
    let released = json!({ "metadata": { "finalizers": ["kubernetes.io/pv-protection"] } });
    let [of_a, of_b, old_name] = [1, 2, 3].map(|it| format!("pvc-9f0e5d3c-1b2a-4c5d-8e6f-00000000000{it}"));
    for (node, name) in [("node-a", &of_a), ("node-b", &of_b)] {
        site.create_as(node, &volume_manifest(name, DRIVER, &[node])).expect("of its node");
    }
    let other = volume_manifest("other", DRIVER, &["node-a", "node-b"]);
    assert_rejected(site.create_as("node-a", &other), FOREIGN);
    // A volume of release 0.1.0.
    let mut old = volume_manifest(&old_name, DRIVER, &["node-a"]);
    let key = "/spec/nodeAffinity/required/nodeSelectorTerms/0/matchExpressions/0/key";
    *old.pointer_mut(key).expect("a key") = "kubernetes.io/hostname".into();
    assert_rejected(site.create_as("node-b", &old), FOREIGN);
    site.create_as("node-a", &old).expect("of its node");
    site.delete_as("node-a", &old_name).expect("of its node");
    *old.pointer_mut(key).expect("a key") = "topology.other.example/node".into();
    assert_rejected(site.create_as("node-a", &old), FOREIGN);
    let mut nowhere = other.clone();
    nowhere["spec"]["nodeAffinity"] = Value::Null;
    assert_rejected(site.create_as("node-a", &nowhere), FOREIGN);
    let driver = volume_manifest("other", "foreign.example", &["node-a"]);
    assert_rejected(site.create_as("node-a", &driver), FOREIGN);
    assert_rejected(site.create_as("", &volume_manifest("other", DRIVER, &["node-a"])), "names no node");

    assert_rejected(site.patch_as("node-a", "persistentvolume", &of_b, &released), FOREIGN);
    assert_rejected(site.delete_as("node-a", &of_b), FOREIGN);
    assert_rejected(site.delete_as("", &of_a), "names no node");
    site.patch_as("node-a", "persistentvolume", &of_a, &released).expect("of its node");
    site.delete_as("node-a", &of_a).expect("of its node");
    // The policy does not apply to other accounts.
    site.kube.create_objects(&other.to_string()).expect("the admin's");
    site.kube.delete_object("persistentvolume", &of_b).expect("the admin's");
}

#[test]
#[ignore = "needs kube"]
fn an_account_changes_only_its_own_nodes_selection_of_a_claim() {
    const ONLY_NODE: &str = "only its selected node may be changed";
    let site = PolicyFixture::start();
    let ours = json!({
        "metadata": { "annotations": { "volume.kubernetes.io/storage-provisioner": DRIVER } },
        "spec": { "storageClassName": null },
    });
    let claim = claim_manifest("claim", None, ours);
    site.kube.create_objects(&claim.to_string()).expect("a claim");
    let select = |by: &str, node: Option<&str>| site.select_as(by, "claim", node);
    assert_rejected(select("node-a", Some("node-b")), ONLY_NODE);
    select("node-a", Some("node-a")).expect("of its node");
    assert_rejected(select("node-a", Some("node-b")), ONLY_NODE);
    assert_rejected(select("node-b", None), ONLY_NODE);
    assert_rejected(select("node-b", Some("node-b")), ONLY_NODE);
    assert_rejected(select("", None), "names no node");
    select("node-a", None).expect("of its node");
    let mut foreign = claim.clone();
    foreign["metadata"]["name"] = "unselected".into();
    foreign["metadata"]["annotations"] =
        json!({ "volume.kubernetes.io/storage-provisioner": "other.example" });
    site.kube.create_objects(&foreign.to_string()).expect("a claim");
    assert_rejected(site.select_as("node-a", "unselected", Some("node-a")), "or of one of another driver");
    // A claim with a data source goes to the node of that.
    let mut copy = claim;
    copy["metadata"]["name"] = "copy".into();
    copy["spec"]["dataSource"] = json!({ "kind": "PersistentVolumeClaim", "name": "claim" });
    site.kube.create_objects(&copy.to_string()).expect("a claim");
    let hand = |by: &str, node: &str| site.select_as(by, "copy", Some(node));
    assert_rejected(hand("node-a", "node-b"), ONLY_NODE);
    hand("node-a", "node-a").expect("of its node");
    hand("node-a", "node-b").expect("it was selected before");
    assert_rejected(hand("node-a", "node-a"), ONLY_NODE);
    let bound = json!({ "spec": { "volumeName": "another" } });
    assert_rejected(site.patch_as("node-a", "persistentvolumeclaim", "claim", &bound), ONLY_NODE);
}

#[test]
#[ignore = "needs kube"]
fn an_account_changes_no_other_metadata_of_a_claim() {
    const KEPT: &str = "owners, finalizers, labels and other annotations of a claim may not be changed";
    let site = PolicyFixture::start();
    let annotations = json!({ "kept": "yes", "volume.kubernetes.io/storage-provisioner": DRIVER });
    let kept = json!({ "metadata": { "annotations": annotations }, "spec": { "storageClassName": null } });
    let claim = claim_manifest("annotated", None, kept);
    site.kube.create_objects(&claim.to_string()).expect("a claim");
    let owner = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "name": "gone", "uid": "00000000-0000-4000-8000-00000000dead",
    });
    let labels = json!({ "metadata": { "labels": { "app": "other" } } });
    wait_until_rejected(|| site.patch_status_as("node-b", "annotated", &labels), KEPT);
    for metadata in [
        // The garbage collector deletes what has no living owner.
        json!({ "ownerReferences": [owner] }),
        json!({ "finalizers": ["kubernetes.io/pvc-protection", "example.com/held"] }),
        json!({ "finalizers": null }),
        json!({ "labels": { "app": "other" } }),
        json!({ "annotations": { "other": "new" } }),
        json!({ "annotations": { "kept": "no" } }),
        json!({ "annotations": { "kept": null } }),
        json!({ "annotations": { "kept": null, "volume.kubernetes.io/selected-node": "node-b" } }),
    ] {
        let patch = json!({ "metadata": metadata });
        assert_rejected(site.patch_as("node-b", "persistentvolumeclaim", "annotated", &patch), KEPT);
        assert_rejected(site.patch_status_as("node-b", "annotated", &patch), KEPT);
    }
    site.select_as("node-b", "annotated", Some("node-b")).expect("of its node");
    site.select_as("node-b", "annotated", None).expect("of its node");
}

#[test]
#[ignore = "needs kube"]
fn an_account_publishes_only_the_capacity_of_its_own_node() {
    const FOREIGN: &str = "the capacity is not one of this driver on this node alone";
    let site = PolicyFixture::start();
    let in_namespace = |mut kubectl: Command, arguments: &[&str]| {
        command_output(kubectl.args(["--namespace=nodekeel"]).args(arguments))
    };
    let change = |by: &str, name: &str, patch: &Value| {
        let patch = format!("--patch={patch}");
        in_namespace(site.kubectl_as_node(by), &["patch", "csistoragecapacity", name, "--type=merge", &patch])
    };
    let delete = |by: &str, name: &str| {
        in_namespace(site.kubectl_as_node(by), &["delete", "csistoragecapacity", name])
    };
    for node in ["node-a", "node-b"] {
        let own = capacity_manifest(&format!("of-{node}"), node);
        site.create_as(node, &own).expect("of its node");
    }
    let other = |change: &dyn Fn(&mut Value)| {
        let mut object = capacity_manifest("other", "node-a");
        change(&mut object);
        site.create_as("node-a", &object)
    };
    assert_rejected(other(&|it| it["nodeTopology"] = json!({})), FOREIGN);
    assert_rejected(other(&|it| it["nodeTopology"] = Value::Null), FOREIGN);
    assert_rejected(other(&|it| it["nodeTopology"]["matchLabels"]["zone"] = "a".into()), FOREIGN);
    let key = "csi.storage.k8s.io/managed-by";
    assert_rejected(other(&|it| it["metadata"]["labels"][key] = "node-b".into()), FOREIGN);
    let size = json!({ "capacity": "2Gi", "maximumVolumeSize": "2Gi" });
    assert_rejected(change("node-a", "of-node-b", &size), FOREIGN);
    assert_rejected(delete("node-a", "of-node-b"), FOREIGN);
    assert_rejected(change("", "of-node-a", &size), "names no node");
    change("node-a", "of-node-a", &size).expect("of its node");
    delete("node-a", "of-node-a").expect("of its node");
}

#[test]
#[ignore = "needs kube"]
fn an_account_renews_only_the_lease_of_its_own_node() {
    const FOREIGN: &str = "the Lease is not that of this driver on this node";
    let site = PolicyFixture::start();
    let patch = |by: &str, name: &str, patch: &Value| {
        let patch = format!("--patch={patch}");
        let mut kubectl = site.kubectl_as_node(by);
        command_output(kubectl.args(["--namespace=nodekeel", "patch", "lease", name, "--type=merge", &patch]))
    };
    let renewed = json!({ "spec": { "renewTime": "2026-01-01T00:00:00.000000Z" } });
    for node in ["node-a", "node-b"] {
        site.create_as(node, &lease_manifest(node, node)).expect("of its node");
        patch(node, &format!("{DRIVER}-{node}"), &renewed).expect("of its node");
    }
    let (own, other) = (format!("{DRIVER}-node-a"), format!("{DRIVER}-node-b"));
    let later = json!({ "spec": { "renewTime": "2026-01-01T00:00:09.000000Z" } });
    assert_rejected(patch("node-a", &other, &later), FOREIGN);
    assert_rejected(patch("", &own, &later), "names no node");
    assert_rejected(patch("node-a", &own, &json!({ "spec": { "holderIdentity": "node-b" } })), FOREIGN);
    let held = json!({ "metadata": { "finalizers": ["example.com/held"] } });
    assert_rejected(patch("node-a", &own, &held), "finalizers and other owners");
    let mut of_agents = lease_manifest("node-a", "node-a");
    of_agents["metadata"]["name"] = "provisionerd-agent".into();
    assert_rejected(site.create_as("node-a", &of_agents), FOREIGN);
    let delete = |by: &str, name: &str| {
        command_output(site.kubectl_as_node(by).args(["--namespace=nodekeel", "delete", "lease", name]))
    };
    assert_rejected(delete("node-a", &other), FOREIGN);
    delete("node-a", &own).expect("of its node");
}

const ONLY_BOUND: &str = "only what resizes a bound volume";

/// A patch of a claim's status that resizes it.
fn resized(size: &str) -> Value {
    json!({ "status": { "capacity": { "storage": size } } })
}

#[test]
#[ignore = "needs kube"]
fn an_account_resizes_only_bound_claims_that_its_node_is_selected_for() {
    let site = PolicyFixture::start();
    let selected = json!({ "volume.kubernetes.io/selected-node": "node-a" });
    site.create_claim("ours", "pvc-ours", selected.clone());
    site.create_claim("pending", "", selected);
    site.create_claim("foreign", "disk-foreign", json!({}));
    let provisioners =
        ["volume.kubernetes.io/storage-provisioner", "volume.beta.kubernetes.io/storage-provisioner"];
    for (number, key) in provisioners.into_iter().enumerate() {
        let with = |driver: &str| json!({ key: driver, "volume.kubernetes.io/selected-node": "node-a" });
        site.create_claim(&format!("ours-{number}"), &format!("pvc-ours-{number}"), with(DRIVER));
        site.create_claim(
            &format!("foreign-{number}"),
            &format!("pvc-foreign-{number}"),
            with("other.example"),
        );
    }
    let larger = resized("2Mi");
    for number in 0..provisioners.len() {
        site.patch_status_as("node-a", &format!("ours-{number}"), &larger).expect("of its driver");
        let foreign = site.patch_status_as("node-a", &format!("foreign-{number}"), &larger);
        assert_rejected(foreign, ONLY_BOUND);
    }
    site.patch_status_as("node-a", "ours", &larger).expect("of its node");
    assert_rejected(site.patch_status_as("node-b", "ours", &larger), "only its selected node");
    assert_rejected(site.patch_status_as("", "ours", &larger), "names no node");
    assert_rejected(site.patch_status_as("node-a", "foreign", &larger), ONLY_BOUND);
    let bound = json!({ "status": { "phase": "Bound" } });
    assert_rejected(site.patch_status_as("node-a", "pending", &bound), ONLY_BOUND);
    let lost = json!({ "status": { "phase": "Lost" } });
    assert_rejected(site.patch_status_as("node-a", "ours", &lost), ONLY_BOUND);
    let modes = json!({ "status": { "accessModes": ["ReadWriteMany"] } });
    assert_rejected(site.patch_status_as("node-a", "ours", &modes), ONLY_BOUND);
}

#[test]
#[ignore = "needs kube"]
fn an_account_resizes_a_claim_that_was_bound_to_an_existing_volume_once_somebody_has_selected_its_node() {
    let site = PolicyFixture::start();
    site.create_claim("rebound", "pvc-rebound", json!({}));
    for node in ["node-a", "node-b"] {
        let resized = site.patch_status_as(node, "rebound", &resized("2Mi"));
        assert_rejected(
            resized,
            "annotate it with volume.kubernetes.io/selected-node and the node of its volume",
        );
        // A node that selected itself would pass for that of the volume.
        let selected = site.select_as(node, "rebound", Some(node));
        assert_rejected(selected, "the selected node of a bound claim");
    }
    let annotate = ["annotate", "pvc", "rebound", "volume.kubernetes.io/selected-node=node-a"];
    command_output(site.kube.kubectl_command().args(annotate)).expect("by an operator");
    site.patch_status_as("node-a", "rebound", &resized("3Mi")).expect("its node is selected");
    assert_rejected(site.patch_status_as("node-b", "rebound", &resized("4Mi")), "only its selected node");
}

#[test]
#[ignore = "needs kube"]
fn the_policys_expressions_pass_type_checking() {
    let site = PolicyFixture::start();
    accounts::assert_type_checked(&site.kube, &[POLICY, SELECTION_POLICY, CAPACITY_POLICY, LEASE_POLICY]);
}

//! Clones and snapshots while provisionerd is killed. The test does what the snapshot-controller does.

use anyhow::{Context as _, Result, ensure};
use nodekeel_provisioner::{BEING_DELETED, CONTENT_FINALIZER, DriverName, MANAGED_BY_LABEL, SELECTED_NODE};
use serde_json::{Value, json};
use testbed::gotool::SNAPSHOT_CRDS;

use super::daemon_runner::DaemonRunner;
use super::lifecycles::{LIMIT, assert_nothing_left};
use crate::deployment::{DRIVER, TIMEOUT, TestCluster, claim_manifest, delete_claim, wait_bound};
use crate::disk::VOLUMES;

const CONTENT: &str = "volumesnapshotcontent";

/// Installs the kinds of the snapshot API.
pub(super) fn install_snapshot_api(cluster: &TestCluster) -> Result<()> {
    SNAPSHOT_CRDS.iter().try_for_each(|manifest| cluster.kube.apply_manifests(manifest))?;
    let kind = "volumesnapshotcontents.snapshot.storage.k8s.io";
    cluster.kube.wait_for_condition("customresourcedefinition", kind, "condition=Established")
}

/// A claim with data, a clone of it, and a snapshot; all are deleted.
pub(super) fn check_copies(cluster: &TestCluster) -> Result<()> {
    let node = &cluster.node;
    let source = create_bound(cluster, claim_manifest("source", "immediate", LIMIT))?;
    node.run_shell(&format!("echo data >{VOLUMES}/volumes/{source}/file; sync"))?;
    let clone = create_bound(cluster, clone_manifest("clone", "immediate"))?;
    check_data(cluster, &format!("volumes/{clone}"))?;
    check_snapshot(cluster, &source)?;
    for (claim, volume) in [("clone", clone), ("source", source)] {
        delete_claim(&cluster.kube, claim, &volume)?;
    }
    assert_nothing_left(cluster)
}

/// A claim for a clone of `source`.
fn clone_manifest(name: &str, class: &str) -> Value {
    let mut claim = claim_manifest(name, class, LIMIT);
    claim["spec"]["dataSource"] = json!({ "kind": "PersistentVolumeClaim", "name": "source" });
    claim
}

/// Creates a claim, and returns the name of its volume.
fn create_bound(cluster: &TestCluster, claim: Value) -> Result<String> {
    cluster.kube.apply_manifests(&claim.to_string())?;
    wait_bound(&cluster.kube, claim["metadata"]["name"].as_str().context("it has a name")?)
}

fn check_data(cluster: &TestCluster, directory: &str) -> Result<()> {
    let found = cluster.node.run_shell(&format!("cat {VOLUMES}/{directory}/file"))?;
    ensure!(found == "data\n", "{directory} has {found:?}");
    Ok(())
}

/// A snapshot of the volume of `source` is taken and deleted.
fn check_snapshot(cluster: &TestCluster, volume: &str) -> Result<()> {
    let kube = &cluster.kube;
    let uid = volume.strip_prefix("pvc-").context("a volume has the UID of its claim")?;
    let content = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
        "metadata": {
            "name": "backup",
            "labels": { MANAGED_BY_LABEL: testbed::GUEST_NODE },
            "finalizers": [CONTENT_FINALIZER],
        },
        "spec": {
            "deletionPolicy": "Delete",
            "driver": DRIVER,
            "source": { "volumeHandle": volume },
            "volumeSnapshotRef": { "name": "backup", "namespace": "default", "uid": uid },
        },
    });
    kube.apply_manifests(&content.to_string())?;
    let is_ready = |content: &Value| content["status"]["readyToUse"] == true;
    kube.wait_for_object_within(TIMEOUT, CONTENT, "backup", is_ready)?;
    check_data(cluster, &format!("snapshots/snap-{uid}"))?;
    let deleted = json!({ "metadata": { "annotations": { BEING_DELETED: "yes" } } });
    kube.patch_object(CONTENT, "backup", &deleted)?;
    kube.delete_object(CONTENT, "backup")?;
    cluster.wait_gone(CONTENT, "backup")
}

/// A clone of a claim whose volume is on another node is handed over to that node, which does not exist.
pub(super) fn check_handed_over_clone(cluster: &TestCluster, program: &DaemonRunner) -> Result<()> {
    let kube = &cluster.kube;
    let mut source = claim_manifest("source", "nodekeel", LIMIT);
    source["spec"]["volumeName"] = json!("foreign");
    kube.apply_manifests(&format!("{}\n---\n{source}", foreign_volume(&source)?))?;
    wait_bound(kube, "source")?;
    let mut clone = clone_manifest("clone", "nodekeel");
    clone["metadata"]["annotations"] = json!({ SELECTED_NODE: testbed::GUEST_NODE });
    kube.apply_manifests(&clone.to_string())?;
    let is_handed_over = |claim: &Value| claim["metadata"]["annotations"][SELECTED_NODE] == "elsewhere";
    kube.wait_for_object_within(TIMEOUT, "pvc", "default/clone", is_handed_over)?;
    program.wait_killed(cluster, "HandOverClaim")?;
    for claim in ["default/clone", "default/source"] {
        kube.delete_object("pvc", claim)?;
    }
    cluster.wait_gone("pvc", "source")?;
    kube.delete_object("pv", "foreign")?;
    cluster.wait_gone("pv", "foreign")?;
    assert_nothing_left(cluster)
}

/// A volume of this driver on another node, for this claim.
fn foreign_volume(claim: &Value) -> Result<Value> {
    let is_elsewhere = json!({
        "key": DriverName::try_new(DRIVER)?.topology_key(), "operator": "In", "values": ["elsewhere"],
    });
    let (name, spec) = (&claim["metadata"]["name"], &claim["spec"]);
    Ok(json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": "foreign" },
        "spec": {
            "accessModes": spec["accessModes"],
            "capacity": spec["resources"]["requests"],
            "claimRef": { "namespace": "default", "name": name },
            "csi": { "driver": DRIVER, "volumeHandle": "foreign" },
            "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [is_elsewhere] }] } },
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": spec["storageClassName"],
        },
    }))
}

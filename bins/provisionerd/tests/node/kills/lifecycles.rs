//! Claims for directories, from their creation to their deletion, while provisionerd is killed.

use anyhow::{Context as _, Result, ensure};
use nodekeel_provisioner::{DriverName, FINALIZER};
use serde_json::{Value, json};

use super::daemon_runner::DaemonRunner;
use crate::deployment::{
    self as cluster, DRIVER, TIMEOUT, TestCluster, claim_manifest, delete_claim, delete_pod, pod_manifest,
    wait_running,
};
use crate::disk::{VOLUMES, volume_directories};

pub(super) const LIMIT: u64 = 8 << 20;

/// Counts in a file until a write fails.
const WRITER: &str =
    "number=0; while echo $number >>/data/numbers; do number=$((number + 1)); usleep 200000; done";

/// The manifest of a claim and a pod that writes to it.
fn claim_and_pod(name: &str) -> String {
    let claim = claim_manifest(name, "nodekeel", LIMIT);
    let mut pod = pod_manifest(name, name);
    pod["spec"]["containers"][0]["args"] = json!(["sh", "-c", WRITER]);
    format!("{claim}\n---\n{pod}")
}

/// The capacity of a class is published, and removed with the class.
pub(super) fn check_removed_class(cluster: &TestCluster) -> Result<()> {
    let class = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "temporary"},
        "provisioner": DRIVER, "volumeBindingMode": "WaitForFirstConsumer",
    });
    let is_published = || {
        let objects = cluster.kube.list_objects("csistoragecapacities")?;
        Ok(objects.iter().any(|object| object["storageClassName"] == "temporary"))
    };
    cluster.kube.apply_manifests(&class.to_string())?;
    cluster.wait_equal("the capacity to be published", &true, is_published)?;
    cluster.kube.delete_object("storageclass", "temporary")?;
    cluster.wait_equal("the capacity to be removed", &false, is_published)
}

/// With a full disk, the node is deselected for a claim, also when provisionerd is killed.
pub(super) fn check_claim_without_space(cluster: &TestCluster, program: &DaemonRunner) -> Result<()> {
    cluster.node.run_shell(&format!("cd {VOLUMES}; {FILL_DISK_SCRIPT}"))?;
    cluster.kube.apply_manifests(&claim_and_pod("late"))?;
    cluster.wait_equal("the node to be deselected", &false, || {
        Ok(program.pending().iter().any(|moment| moment.ends_with("DeselectNode")))
    })?;
    cluster.kube.delete_object("pod", "default/late")?;
    cluster.kube.delete_object("pvc", "default/late")?;
    cluster.wait_gone("pvc", "late")?;
    cluster.node.run_shell(&format!("cd {VOLUMES}; rm fill rest"))?;
    assert_nothing_left(cluster)
}

/// Fills most of the disk at once, then the rest, including the space reserved for root.
const FILL_DISK_SCRIPT: &str = "fallocate -l $((($(df -k . | awk 'END { print $4 }') - 65536) * 1024)) fill && \
                    for size in 1M 4k; do dd if=/dev/zero bs=$size >>rest; done; test -e rest";

/// A claim without a selected node gets one.
pub(super) fn check_claim_without_pod(cluster: &TestCluster) -> Result<()> {
    cluster.kube.apply_manifests(&claim_manifest("alone", "immediate", LIMIT).to_string())?;
    let volume = wait_bound(cluster, "alone")?;
    delete_claim(&cluster.kube, "alone", &volume)?;
    assert_nothing_left(cluster)
}

/// A volume is retained, given to a second claim, and deleted with that.
pub(super) fn check_rebound_volume(cluster: &TestCluster) -> Result<()> {
    let (kube, policy) = (&cluster.kube, |policy| json!({"spec": {"persistentVolumeReclaimPolicy": policy}}));
    kube.apply_manifests(&claim_manifest("first", "immediate", LIMIT).to_string())?;
    let volume = wait_bound(cluster, "first")?;
    kube.patch_object("pv", &volume, &policy("Retain"))?;
    kube.delete_object("pvc", "default/first")?;
    let is_released = |volume: &Value| volume["status"]["phase"] == "Released";
    kube.wait_for_object_within(TIMEOUT, "pv", &volume, is_released)?;
    kube.patch_object("pv", &volume, &json!({"spec": {"claimRef": null}}))?;
    let mut second = claim_manifest("second", "immediate", LIMIT);
    second["spec"]["volumeName"] = json!(volume);
    kube.apply_manifests(&second.to_string())?;
    wait_bound(cluster, "second")?;
    let annotation = format!("{DRIVER}/claim-uid");
    let is_recorded = |volume: &Value| volume["metadata"]["annotations"][&annotation].is_string();
    kube.wait_for_object_within(TIMEOUT, "pv", &volume, is_recorded)?;
    kube.patch_object("pv", &volume, &policy("Delete"))?;
    delete_claim(&cluster.kube, "second", &volume)?;
    assert_nothing_left(cluster)
}

/// The disk of a volume that is there was declared lost, and the volume reported as abnormal: the next start takes both
/// back.
pub(super) fn check_wrong_marks(cluster: &TestCluster, program: &DaemonRunner) -> Result<()> {
    let kube = &cluster.kube;
    kube.apply_manifests(&claim_manifest("declared", "immediate", LIMIT).to_string())?;
    let volume = wait_bound(cluster, "declared")?;
    let driver = DriverName::try_new(DRIVER)?;
    let store = cluster.node.run_shell(&format!("cat {VOLUMES}/store-id"))?;
    // One after the other: a kill at a step of the first could come between the second's patch and the moment after it.
    for (annotation, value, step) in [
        (driver.lost_annotation(), store.trim(), "MarkLost"),
        (driver.condition_annotation(), "abnormal", "MarkCondition"),
    ] {
        kube.patch_object("pv", &volume, &json!({"metadata": {"annotations": {&annotation: value}}}))?;
        program.restart(cluster)?;
        let is_taken_back = |volume: &Value| volume["metadata"]["annotations"][&annotation].is_null();
        kube.wait_for_object_within(TIMEOUT, "pv", &volume, is_taken_back)?;
        program.wait_killed(cluster, step)?;
    }
    delete_claim(&cluster.kube, "declared", &volume)?;
    assert_nothing_left(cluster)
}

/// A volume is created, mounted, written to, loses its finalizer for a moment, and is deleted.
pub(super) fn check_claim_with_pod(cluster: &TestCluster, name: &str) -> Result<()> {
    let (kube, node) = (&cluster.kube, &cluster.node);
    kube.apply_manifests(&claim_and_pod(name))?;
    let volume = wait_bound(cluster, name)?;
    wait_running(kube, name)?;
    cluster.exec(name, "echo data >/data/file")?;
    kube.patch_object("pv", &volume, &json!({"metadata": {"finalizers": []}}))?;
    let is_protected = |volume: &Value| {
        let mut all = volume["metadata"]["finalizers"].as_array().into_iter().flatten();
        all.any(|one| one == FINALIZER)
    };
    kube.wait_for_object_within(TIMEOUT, "pv", &volume, is_protected)?;
    expand_claim(cluster, name)?;
    ensure!(cluster.exec(name, "cat /data/file")? == "data\n", "the volume lost its data");
    delete_pod(kube, name)?;
    let mounts = format!("grep -c /{volume}/mount /proc/self/mountinfo || true");
    cluster
        .wait_equal("the mounts to go", &"0".to_owned(), || Ok(node.run_shell(&mounts)?.trim().to_owned()))?;
    delete_claim(&cluster.kube, name, &volume)?;
    assert_nothing_left(cluster)
}

/// A claim is expanded under its pod, which writes: once further than possible, and then to twice its size.
fn expand_claim(cluster: &TestCluster, name: &str) -> Result<()> {
    let (kube, claim) = (&cluster.kube, format!("default/{name}"));
    let request = |size: String| {
        kube.patch_object("pvc", &claim, &json!({"spec": {"resources": {"requests": {"storage": size}}}}))
    };
    request("100Ti".to_owned())?;
    let is_infeasible = |claim: &Value| {
        claim["status"]["allocatedResourceStatuses"]["storage"] == "ControllerResizeInfeasible"
    };
    kube.wait_for_object_within(TIMEOUT, "pvc", &claim, is_infeasible)?;
    request((2 * LIMIT).to_string())?;
    let is_expanded = |claim: &Value| {
        let status = &claim["status"];
        status["capacity"]["storage"] == "16Mi" && status["allocatedResourceStatuses"].is_null()
    };
    kube.wait_for_object_within(TIMEOUT, "pvc", &claim, is_expanded)?;
    let limits = cluster.file_system.kernel_limits(&cluster.node)?;
    ensure!(limits == [((2 * LIMIT) >> 10, 2 * LIMIT / 2048)], "the kernel has {limits:?}");
    let size = cluster.exec(name, "df -k /data | awk 'END { print $2 * 1024 }'")?;
    ensure!(size.trim() == (2 * LIMIT).to_string(), "the pod sees a size of {size}");
    check_writer(cluster, name)
}

/// Checks that no write of the pod has failed: it wrote number after number, and writes on.
fn check_writer(cluster: &TestCluster, name: &str) -> Result<()> {
    let numbers = || -> Result<Vec<usize>> {
        let text = cluster.exec(name, "cat /data/numbers")?;
        text.lines().map(|line| line.parse().with_context(|| format!("read {line:?}"))).collect()
    };
    let written = numbers()?;
    ensure!(written.iter().copied().eq(0..written.len()), "the pod has written {written:?}");
    cluster.wait_equal("the pod to write on", &true, || Ok(numbers()?.len() > written.len()))?;
    let pod = cluster.kube.get_object("pod", &format!("default/{name}"))?;
    let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
    ensure!(*restarts == 0, "the pod has restarted {restarts} times");
    Ok(())
}

/// Waits until a claim is bound to the only volume, and returns the name of the volume.
pub(super) fn wait_bound(cluster: &TestCluster, claim: &str) -> Result<String> {
    let volume = cluster::wait_bound(&cluster.kube, claim)?;
    let count = cluster.kube.list_objects("pv")?.len();
    ensure!(count == 1, "{count} PersistentVolumes were created");
    let there = volume_directories(&cluster.node)?;
    ensure!(there == [format!("volumes/{volume}")], "the directories are {there:?}");
    let limits = cluster.file_system.kernel_limits(&cluster.node)?;
    ensure!(limits == [(LIMIT >> 10, LIMIT / 2048)], "the kernel has {limits:?}");
    Ok(volume)
}

pub(super) fn assert_nothing_left(cluster: &TestCluster) -> Result<()> {
    cluster.wait_nothing_left()?;
    let volumes = cluster.kube.list_objects("pv")?;
    ensure!(volumes.is_empty(), "PersistentVolumes remain: {volumes:?}");
    Ok(())
}

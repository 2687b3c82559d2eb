//! Pods on several nodes: where a volume does not fit, or its node can't serve it, the pod runs on another node; a node
//! or a disk that is lost for a while loses nothing.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nodekeel_fsquota::Bytes;
use serde_json::json;
use testbed::GuestNode;

use crate::deployment::{TIMEOUT, claim_manifest, delete_claim, delete_pod, exec, wait_bound, wait_gone};
use crate::disk::{VOLUMES, volume_directories};

mod fixture;

use fixture::{DRIVERLESS, FIRST, GONE_AFTER, SECOND, ThreeNodes, prefer, require};

const MIB: u64 = 1 << 20;
/// Of a pod whose preferred node is full.
const PLACED_WITHIN: Duration = Duration::from_secs(10);
/// Of a pod whose selected node can't serve it.
const MOVED_WITHIN: Duration = Duration::from_secs(15);
const REPORTED_WITHIN: Duration = Duration::from_secs(5);

#[test]
#[ignore = "soak: three nodes, of which two are emulated at the same time"]
fn pods_run_on_a_node_that_can_serve_them_and_a_lost_node_or_disk_loses_nothing() {
    let mut nodes = ThreeNodes::start().unwrap_or_else(|error| panic!("{error:#}"));
    let steps: [fn(&mut ThreeNodes) -> Result<()>; 5] =
        [leave_full_node, leave_driverless_node, leave_cordoned_node, lose_disk, delete_node];
    for step in steps {
        if let Err(error) = step(&mut nodes) {
            panic!("{error:#}\n{}", nodes.diagnostics());
        }
    }
}

/// The preferred node has promised its disk: the pod runs on the other one, within its limit.
fn leave_full_node(nodes: &mut ThreeNodes) -> Result<()> {
    let free = free_capacity(nodes, FIRST)?;
    nodes.create_pod("filler", free - 4 * MIB, &require(FIRST))?;
    nodes.wait_running("filler")?;
    wait_capacity(nodes, FIRST, |bytes| bytes < 8 * MIB)?;
    nodes.times.log_step("the first node is full");
    let start = Instant::now();
    nodes.create_pod("overflow", 16 * MIB, &prefer(FIRST))?;
    ensure!(nodes.wait_running("overflow")? == SECOND, "the pod runs on the full node");
    nodes.check_duration("full node → Running on another", start, PLACED_WITHIN)?;
    let script = "dd if=/dev/zero of=/data/fill bs=64k 2>&1; stat -c %s /data/fill";
    let output = exec(&nodes.kube, "overflow", script)?;
    let written: u64 = output.lines().last().unwrap_or_default().parse().context("read a size")?;
    ensure!(output.contains("No space left") && written <= 16 * MIB, "the limit does not bind: {output}");
    for name in ["filler", "overflow"] {
        delete_pod_and_claim(nodes, name)?;
    }
    wait_capacity(nodes, FIRST, |bytes| bytes + MIB > free)
}

/// A claim that selects a node without the driver, as an administrator or an old scheduler may have written it.
fn leave_driverless_node(nodes: &mut ThreeNodes) -> Result<()> {
    let mut claim = claim_manifest("driverless", "nodekeel", 8 * MIB);
    claim["metadata"]["annotations"] = json!({"volume.kubernetes.io/selected-node": DRIVERLESS});
    let start = Instant::now();
    nodes.kube.create_objects(&claim.to_string())?;
    nodes.create_pod_of_claim("driverless", "driverless", &prefer(DRIVERLESS))?;
    let node = nodes.wait_running("driverless")?;
    ensure!([FIRST, SECOND].contains(&node.as_str()), "the pod runs on {node}");
    nodes.check_duration("driver-less node selected → Running on another", start, MOVED_WITHIN)?;
    delete_pod_and_claim(nodes, "driverless")
}

/// The selected node is cordoned before it has created the volume.
fn leave_cordoned_node(nodes: &mut ThreeNodes) -> Result<()> {
    signal_daemon(&nodes.first, "STOP")?;
    nodes.create_pod("cordoned", 8 * MIB, &prefer(FIRST))?;
    nodes.wait_selected("cordoned", FIRST)?;
    let start = Instant::now();
    nodes.kubectl(&["cordon", FIRST])?;
    ensure!(nodes.wait_running("cordoned")? == SECOND, "the pod runs on the cordoned node");
    nodes.check_duration("selected node cordoned → Running on another", start, MOVED_WITHIN)?;
    signal_daemon(&nodes.first, "CONT")?;
    nodes.kubectl(&["uncordon", FIRST])?;
    // Once the node serves this one, it has dealt with the other.
    nodes.create_pod("after", 8 * MIB, &require(FIRST))?;
    let after = wait_bound(&nodes.kube, "after")?;
    wait_only_volume(&nodes.first, &after)?;
    nodes.wait_running("after")?;
    delete_pod_and_claim(nodes, "after")?;
    delete_pod_and_claim(nodes, "cordoned")
}

/// The disk of a node is unmounted while pods use it: it is reported, nothing is deleted, and all is served again when it is
/// mounted.
fn lose_disk(nodes: &mut ThreeNodes) -> Result<()> {
    for name in ["kept", "doomed"] {
        nodes.create_pod(name, 8 * MIB, &require(SECOND))?;
        nodes.wait_running(name)?;
    }
    exec(&nodes.kube, "kept", "echo before >/data/file; sync")?;
    let [kept, doomed] = [wait_bound(&nodes.kube, "kept")?, wait_bound(&nodes.kube, "doomed")?];
    delete_pod(&nodes.kube, "doomed")?;
    nodes.times.log_step("two volumes on the second node");

    nodes.second.run_shell(&format!("umount -l {VOLUMES}"))?;
    let start = Instant::now();
    for about in ["default/kept", &kept] {
        nodes.kube.wait_for_event(about, "VolumeConditionAbnormal")?;
    }
    nodes.check_duration("disk lost → reported", start, REPORTED_WITHIN)?;
    nodes.kube.delete_object("pvc", "default/doomed")?;
    let is_released = |volume: &serde_json::Value| volume["status"]["phase"] == "Released";
    nodes.kube.wait_for_object_within(TIMEOUT, "pv", &doomed, is_released)?;
    nodes.create_pod("elsewhere", 8 * MIB, &prefer(SECOND))?;
    ensure!(nodes.wait_running("elsewhere")? == FIRST, "the pod runs on the node without its disk");
    ensure!(nodes.kube.find_object("pv", &doomed)?.is_some(), "a volume was deleted without its disk");

    let mount = format!("mount -o prjquota ${{NODEKEEL_GUEST_DISKS##*:}} {VOLUMES}");
    nodes.second.run_shell(&mount)?;
    let start = Instant::now();
    wait_gone(&nodes.kube, "pv", &doomed)?;
    nodes.kube.wait_for_event("default/kept", "VolumeConditionNormal")?;
    nodes.check_duration("disk mounted → pending deletion done", start, MOVED_WITHIN)?;
    delete_pod(&nodes.kube, "kept")?;
    nodes.create_pod_of_claim("kept", "kept", &json!({}))?;
    ensure!(nodes.wait_running("kept")? == SECOND, "the pod runs without its volume");
    ensure!(exec(&nodes.kube, "kept", "cat /data/file")? == "before\n", "the volume lost its data");
    delete_pod_and_claim(nodes, "kept")?;
    delete_pod_and_claim(nodes, "elsewhere")
}

/// The selected node is deleted before it has created the volume; its other volumes are reported, and served when it is
/// back.
fn delete_node(nodes: &mut ThreeNodes) -> Result<()> {
    nodes.create_pod("stays", 8 * MIB, &require(FIRST))?;
    nodes.wait_running("stays")?;
    exec(&nodes.kube, "stays", "echo before >/data/file; sync")?;
    let stays = wait_bound(&nodes.kube, "stays")?;
    signal_daemon(&nodes.first, "STOP")?;
    nodes.create_pod("deleted", 8 * MIB, &prefer(FIRST))?;
    nodes.wait_selected("deleted", FIRST)?;

    let start = Instant::now();
    nodes.kubectl(&["delete", "node", FIRST])?;
    ensure!(nodes.wait_running("deleted")? == SECOND, "the pod runs on a deleted node");
    nodes.check_duration("selected node deleted → Running on another", start, MOVED_WITHIN)?;
    nodes.kube.wait_for_event(&stays, "ReferencedNodeDeleted")?;
    nodes.check_duration("node deleted → its volumes reported", start, GONE_AFTER + MOVED_WITHIN)?;

    signal_daemon(&nodes.first, "CONT")?;
    let volume = nodes.kube.get_object("pv", &stays)?;
    ensure!(volume["metadata"]["deletionTimestamp"].is_null(), "a volume of the deleted node was removed");
    nodes.first.kill_kubelet()?;
    nodes.first.start_kubelet()?;
    nodes.first.wait_ready(&nodes.kube)?;
    nodes.times.log_step("the node is back");
    // Its pod was deleted with the node, or will be.
    nodes.kubectl(&["delete", "pod", "stays", "--ignore-not-found", "--force", "--grace-period=0"])?;
    nodes.create_pod_of_claim("stays", "stays", &json!({}))?;
    ensure!(nodes.wait_running("stays")? == FIRST, "the pod runs without its volume");
    ensure!(exec(&nodes.kube, "stays", "cat /data/file")? == "before\n", "the volume lost its data");
    wait_only_volume(&nodes.first, &stays)?;
    nodes.times.log_step("a pod uses its volume again");
    Ok(())
}

fn delete_pod_and_claim(nodes: &ThreeNodes, name: &str) -> Result<()> {
    let volume = wait_bound(&nodes.kube, name)?;
    delete_pod(&nodes.kube, name)?;
    delete_claim(&nodes.kube, name, &volume)?;
    nodes.times.log_step(&format!("{name} deleted"));
    Ok(())
}

/// Stops or continues provisionerd, before the kubelet notices that it does not answer.
fn signal_daemon(node: &GuestNode, signal: &str) -> Result<()> {
    node.run_shell(&format!("kill -{signal} $(pidof provisionerd)")).map(drop)
}

/// Waits until a node has the directory of this volume only, and nothing to erase.
fn wait_only_volume(node: &GuestNode, volume: &str) -> Result<()> {
    testbed::wait_until(TIMEOUT, "other volumes to be erased", || {
        let there = volume_directories(node)?;
        ensure!(there == [format!("volumes/{volume}")], "{} has {there:?}", node.name());
        Ok(())
    })
}

/// The capacity that a node offers to claims of the class.
fn free_capacity(nodes: &ThreeNodes, node: &str) -> Result<u64> {
    let objects = nodes.kube.list_objects("csistoragecapacities")?;
    let object = objects.iter().find(|object| {
        let label = &object["metadata"]["labels"]["csi.storage.k8s.io/managed-by"];
        object["storageClassName"] == "nodekeel" && label == node
    });
    let object = object.with_context(|| format!("{node} published no capacity"))?;
    Ok(object["capacity"].as_str().unwrap_or_default().parse::<Bytes>()?.0)
}

fn wait_capacity(nodes: &ThreeNodes, node: &str, is_so: impl Fn(u64) -> bool) -> Result<()> {
    testbed::wait_until(TIMEOUT, "the capacity to be published", || {
        let free = free_capacity(nodes, node)?;
        ensure!(is_so(free), "{node} offers {free} bytes");
        Ok(())
    })
}

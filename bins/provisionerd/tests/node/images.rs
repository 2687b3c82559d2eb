//! Block and strict volumes with a kubelet: they grow under their pod, are found again after restarts, and leave nothing.

use anyhow::{Context as _, Result, ensure};
use nodekeel_provisioner::ImageFormat;
use serde_json::{Value, json};

use crate::deployment::{
    DRIVER, TIMEOUT, TestCluster, claim_manifest, delete_claim, delete_pod, wait_bound, wait_running,
    with_cluster,
};
use crate::disk::VolumeFileSystem;

const MIB: u64 = 1 << 20;

const POD: &str = "images";

/// The loop devices over files; over a device, as the kubelet attaches one while a pod has it, they don't count.
const DEVICES: &str = "grep -h /image$ /sys/block/loop*/loop/backing_file 2>/dev/null | wc -l";

/// Fills the ext4 beyond its size, and prints how much of that it took.
const FILL: &str = "dd if=/dev/zero of=/ext4/fill bs=64k 2>&1; stat -c %s /ext4/fill; rm /ext4/fill";

/// The sizes of a volume before and after its expansion, in MiB.
fn sizes(format: ImageFormat) -> [u64; 2] {
    match format {
        ImageFormat::Block => [16, 32],
        ImageFormat::Xfs => [300, 400],
        _ => [32, 64],
    }
}

/// Its place in the pod.
fn path(format: ImageFormat) -> String {
    if format == ImageFormat::Block { "/dev/block".to_owned() } else { format!("/{format}") }
}

fn class_name(format: ImageFormat) -> String {
    if format == ImageFormat::Block { "nodekeel".to_owned() } else { format!("strict-{format}") }
}

fn write_script(format: ImageFormat) -> String {
    let path = path(format);
    match format {
        ImageFormat::Block => format!("echo data | dd of={path} conv=fsync"),
        _ => format!("grep -q ' {path} {format} ' /proc/mounts && echo data >{path}/file && sync"),
    }
}

fn read_script(format: ImageFormat) -> String {
    let path = path(format);
    match format {
        ImageFormat::Block => format!("dd if={path} bs=5 count=1 2>/dev/null"),
        _ => format!("cat {path}/file"),
    }
}

/// Prints its size in bytes, as the pod sees it.
fn size_script(format: ImageFormat) -> String {
    let path = path(format);
    match format {
        ImageFormat::Block => format!("blockdev --getsize64 {path}"),
        _ => format!("df -k {path} | awk 'END {{ print $2 * 1024 }}'"),
    }
}

/// A class for a format, unless each cluster has it, and a claim of the format's name.
fn claim_manifests(format: ImageFormat) -> Vec<Value> {
    let class = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": class_name(format) },
        "provisioner": DRIVER,
        "volumeBindingMode": "WaitForFirstConsumer",
        "allowVolumeExpansion": true,
        "parameters": { "strict": "true", "csi.storage.k8s.io/fstype": format.as_str() },
    });
    let is_block = format == ImageFormat::Block;
    let mut claim = claim_manifest(format.as_str(), &class_name(format), sizes(format)[0] * MIB);
    claim["spec"]["volumeMode"] = if is_block { "Block" } else { "Filesystem" }.into();
    if is_block { vec![claim] } else { vec![class, claim] }
}

/// A pod with a volume of each of these formats.
fn pod_manifest(formats: &[ImageFormat]) -> Value {
    let (block, strict): (Vec<_>, Vec<_>) =
        formats.iter().copied().partition(|format| *format == ImageFormat::Block);
    let place = |format: &ImageFormat, key: &str| json!({ "name": format.as_str(), key: path(*format) });
    let devices: Vec<_> = block.iter().map(|format| place(format, "devicePath")).collect();
    let mounts: Vec<_> = strict.iter().map(|format| place(format, "mountPath")).collect();
    let volumes: Vec<_> = formats
        .iter()
        .map(|format| {
            json!({ "name": format.as_str(), "persistentVolumeClaim": { "claimName": format.as_str() } })
        })
        .collect();
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": POD, "namespace": "default" },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "stay", "image": testbed::BUSYBOX_IMAGE, "imagePullPolicy": "Never",
                "volumeDevices": devices, "volumeMounts": mounts,
            }],
            "volumes": volumes,
        },
    })
}

/// Creates claims and a pod with their volumes, which writes into each of them.
pub(crate) fn start_pod(cluster: &TestCluster, formats: &[ImageFormat]) -> Result<()> {
    let claims = formats.iter().flat_map(|format| claim_manifests(*format));
    let manifests: Vec<_> =
        claims.chain([pod_manifest(formats)]).map(|manifest| manifest.to_string()).collect();
    cluster.kube.apply_manifests(&manifests.join("\n---\n"))?;
    wait_running(&cluster.kube, POD)?;
    for format in formats {
        cluster.exec(POD, &write_script(*format))?;
    }
    check_data(cluster, formats)?;
    check_devices(cluster, formats)
}

/// Waits for a kubelet that has just started.
fn check_data(cluster: &TestCluster, formats: &[ImageFormat]) -> Result<()> {
    for format in formats {
        cluster.wait_equal("the data", &"data\n".to_owned(), || cluster.exec(POD, &read_script(*format)))?;
    }
    Ok(())
}

/// Each volume has one loop device.
fn check_devices(cluster: &TestCluster, formats: &[ImageFormat]) -> Result<()> {
    let devices = count_devices(cluster)?;
    ensure!(devices == formats.len(), "{devices} loop devices for {formats:?}");
    Ok(())
}

fn count_devices(cluster: &TestCluster) -> Result<usize> {
    Ok(cluster.node.run_shell(DEVICES)?.trim().parse()?)
}

fn read_size(cluster: &TestCluster, format: ImageFormat) -> Result<u64> {
    let text = cluster.exec(POD, &size_script(format))?;
    text.trim().parse().with_context(|| format!("read {text:?}"))
}

/// Expands all claims under the pod.
pub(crate) fn expand_claims(cluster: &TestCluster, formats: &[ImageFormat]) -> Result<()> {
    for format in formats.iter().copied() {
        let ([old, new], before) = (sizes(format), read_size(cluster, format)?);
        let (claim, size) = (format!("default/{format}"), format!("{new}Mi"));
        let patch = json!({"spec": {"resources": {"requests": {"storage": size}}}});
        cluster.kube.patch_object("pvc", &claim, &patch)?;
        let is_expanded = |claim: &Value| {
            let status = &claim["status"];
            status["capacity"]["storage"] == size.as_str() && status["allocatedResourceStatuses"].is_null()
        };
        cluster.kube.wait_for_object_within(TIMEOUT, "pvc", &claim, is_expanded)?;
        let (after, more) = (read_size(cluster, format)?, (new - old) * MIB);
        ensure!(after >= before + more * 9 / 10, "{format}: {before} bytes became {after}, with {more} more");
    }
    check_data(cluster, formats)
}

/// Deletes the pod and the claims; nothing is left.
pub(crate) fn delete_all(cluster: &TestCluster, formats: &[ImageFormat]) -> Result<()> {
    delete_pod(&cluster.kube, POD)?;
    cluster.wait_equal("the loop devices to go", &0, || count_devices(cluster))?;
    for format in formats {
        let volume = wait_bound(&cluster.kube, format.as_str())?;
        delete_claim(&cluster.kube, format.as_str(), &volume)?;
    }
    cluster.wait_nothing_left()
}

#[test]
#[ignore = "soak: three volumes live on a real node"]
fn block_and_strict_volumes_grow_survive_restarts_and_leave_nothing() {
    with_cluster(VolumeFileSystem::Xfs, |cluster| {
        let formats = &ImageFormat::ALL;
        start_pod(cluster, formats)?;
        cluster.times.log_step("claims created → pod runs and has written");
        check_limits(cluster)?;
        cluster.times.log_step("filled");
        expand_claims(cluster, formats)?;
        cluster.times.log_step("expanded under the pod");
        restart_all(cluster, formats)?;
        cluster.times.log_step("provisionerd and kubelet killed → all as before");
        delete_all(cluster, formats)?;
        cluster.times.log_step("pod and claims deleted → nothing left");
        Ok(())
    });
}

/// No volume takes more than its file: a write beyond it fails.
fn check_limits(cluster: &TestCluster) -> Result<()> {
    let size = read_size(cluster, ImageFormat::Block)?;
    ensure!(size == sizes(ImageFormat::Block)[0] * MIB, "the device has {size} bytes");
    let filled = cluster.exec(POD, FILL)?;
    let bytes: u64 = filled.lines().last().unwrap_or_default().parse()?;
    let limit = sizes(ImageFormat::Ext4)[0] * MIB;
    ensure!(filled.contains("No space left on device") && bytes < limit, "{filled}");
    Ok(())
}

/// A restart of the kubelet and of provisionerd changes nothing.
fn restart_all(cluster: &mut TestCluster, formats: &[ImageFormat]) -> Result<()> {
    cluster.restart_daemon()?;
    cluster.node.kill_kubelet()?;
    cluster.node.start_kubelet()?;
    cluster.wait_driver_registered()?;
    check_data(cluster, formats)?;
    check_devices(cluster, formats)
}

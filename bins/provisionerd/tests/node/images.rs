//! Block and strict volumes with a kubelet: they grow under their pod, are found again after restarts, and leave nothing.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::cluster::{TIMEOUT, TestCluster, with_cluster};
use crate::disk::{VolumeFileSystem, volume_directories};

const MIB: u64 = 1 << 20;

/// A class for each file system, a claim for each kind, and a pod that has all of them.
const MANIFEST: &str = r#"
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: strict-ext4}
provisioner: volumes.nodekeel
volumeBindingMode: WaitForFirstConsumer
allowVolumeExpansion: true
parameters: {strict: "true"}
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: strict-xfs}
provisioner: volumes.nodekeel
volumeBindingMode: WaitForFirstConsumer
allowVolumeExpansion: true
parameters: {strict: "true", csi.storage.k8s.io/fstype: xfs}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: block, namespace: default}
spec:
  storageClassName: nodekeel
  accessModes: [ReadWriteOnce]
  volumeMode: Block
  resources: {requests: {storage: 16Mi}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: ext4, namespace: default}
spec:
  storageClassName: strict-ext4
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 32Mi}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: xfs, namespace: default}
spec:
  storageClassName: strict-xfs
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 300Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: images, namespace: default}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: stay
    image: localhost/busybox:1
    imagePullPolicy: Never
    volumeDevices:
    - {name: block, devicePath: /dev/block}
    volumeMounts:
    - {name: ext4, mountPath: /ext4}
    - {name: xfs, mountPath: /xfs}
  volumes:
  - {name: block, persistentVolumeClaim: {claimName: block}}
  - {name: ext4, persistentVolumeClaim: {claimName: ext4}}
  - {name: xfs, persistentVolumeClaim: {claimName: xfs}}
"#;

const CLAIMS: [&str; 3] = ["block", "ext4", "xfs"];

const WRITE: &str = "set -e; grep -q ' /ext4 ext4 ' /proc/mounts; grep -q ' /xfs xfs ' /proc/mounts; \
                     echo data >/ext4/file; echo data >/xfs/file; echo data | dd of=/dev/block conv=fsync; sync";

const READ: &str = "cat /ext4/file /xfs/file; dd if=/dev/block bs=5 count=1 2>/dev/null";

/// The sizes in bytes, as the pod sees them.
const SIZES: &str = "blockdev --getsize64 /dev/block; \
                     for at in /ext4 /xfs; do df -k $at | awk 'END { print $2 * 1024 }'; done";

/// The loop devices over files; over a device, as the kubelet attaches one while a pod has it, they don't count.
const DEVICES: &str = "grep -h /image$ /sys/block/loop*/loop/backing_file 2>/dev/null | wc -l";

#[test]
#[ignore = "soak: three volumes live on a real node"]
fn block_and_strict_volumes_grow_survive_restarts_and_leave_nothing() {
    with_cluster(VolumeFileSystem::Xfs, |cluster| {
        start_pod(cluster)?;
        expand_claims(cluster)?;
        restart_all(cluster)?;
        delete_all(cluster)
    });
}

fn start_pod(cluster: &mut TestCluster) -> Result<()> {
    cluster.times.log_step("until claims are created");
    cluster.kube.apply_manifests(MANIFEST)?;
    let is_ready = |pod: &Value| pod["status"]["containerStatuses"][0]["ready"] == true;
    cluster.kube.wait_for_object_within(TIMEOUT, "pod", "default/images", is_ready)?;
    cluster.times.log_step("claims created → pod runs");
    cluster.exec("images", WRITE)?;
    let devices = cluster.node.run_shell(DEVICES)?;
    ensure!(devices.trim() == "3", "{devices} loop devices");
    let sizes = sizes(cluster)?;
    ensure!(sizes[0] == 16 * MIB, "the device has {sizes:?} bytes");
    // Neither takes more than its file: a write beyond it fails.
    let filled = cluster
        .exec("images", "dd if=/dev/zero of=/ext4/fill bs=64k 2>&1; stat -c %s /ext4/fill; rm /ext4/fill")?;
    let bytes: u64 = filled.lines().last().unwrap_or_default().parse()?;
    ensure!(filled.contains("No space left on device") && bytes < 32 * MIB, "{filled}");
    cluster.times.log_step("written, and filled");
    Ok(())
}

fn sizes(cluster: &TestCluster) -> Result<Vec<u64>> {
    let text = cluster.exec("images", SIZES)?;
    text.lines().map(|line| Ok(line.trim().parse()?)).collect()
}

/// Expands all claims under the pod.
fn expand_claims(cluster: &mut TestCluster) -> Result<()> {
    let before = sizes(cluster)?;
    for (claim, size) in CLAIMS.into_iter().zip(["32Mi", "64Mi", "400Mi"]) {
        let patch = json!({"spec": {"resources": {"requests": {"storage": size}}}});
        cluster.kube.patch_object("pvc", &format!("default/{claim}"), &patch)?;
        let is_expanded = |claim: &Value| claim["status"]["capacity"]["storage"] == size;
        cluster.kube.wait_for_object_within(TIMEOUT, "pvc", &format!("default/{claim}"), is_expanded)?;
    }
    let after = sizes(cluster)?;
    for ((before, after), more) in before.iter().zip(&after).zip([16, 32, 100]) {
        ensure!(
            *after >= before + more * MIB * 9 / 10,
            "{before} bytes became {after}, with {more} MiB more"
        );
    }
    check_data(cluster)?;
    cluster.times.log_step("expanded under the pod");
    Ok(())
}

/// Waits for a kubelet that has just started.
fn check_data(cluster: &TestCluster) -> Result<()> {
    cluster.wait_equal("the data", &"data\ndata\ndata\n".to_owned(), || cluster.exec("images", READ))
}

/// A restart of the kubelet and of provisionerd changes nothing.
fn restart_all(cluster: &mut TestCluster) -> Result<()> {
    let pod = cluster.daemon_pod()?;
    cluster.node.run_shell("kill -KILL $(pidof provisionerd)")?;
    let is_back = |pod: &Value| {
        let status = &pod["status"]["containerStatuses"][0];
        status["restartCount"] == 1 && status["ready"] == true
    };
    cluster.kube.wait_for_object_within(TIMEOUT, "pod", &pod, is_back)?;
    cluster.node.kill_kubelet()?;
    cluster.node.start_kubelet()?;
    cluster.wait_driver_registered()?;
    check_data(cluster)?;
    let devices = cluster.node.run_shell(DEVICES)?;
    ensure!(devices.trim() == "3", "{devices} loop devices after the restarts");
    cluster.times.log_step("provisionerd and kubelet killed → all as before");
    Ok(())
}

fn delete_all(cluster: &mut TestCluster) -> Result<()> {
    cluster.kube.delete_object("pod", "default/images")?;
    cluster.wait_gone("pod", "images")?;
    let devices = || Ok(cluster.node.run_shell(DEVICES)?.trim().to_owned());
    cluster.wait_equal("the loop devices to go", &"0".to_owned(), devices)?;
    cluster.times.log_step("pod deleted → no loop device");
    for claim in CLAIMS {
        let name = format!("default/{claim}");
        let bound = cluster.kube.wait_for_object_within(TIMEOUT, "pvc", &name, |_| true)?;
        let volume = bound["spec"]["volumeName"].as_str().unwrap_or_default().to_owned();
        cluster.kube.delete_object("pvc", &name)?;
        cluster.wait_gone("pv", &volume)?;
    }
    cluster.wait_equal("the directories to go", &Vec::new(), || volume_directories(&cluster.node))?;
    cluster
        .wait_equal("the limits to go", &Vec::new(), || cluster.file_system.kernel_limits(&cluster.node))?;
    cluster.times.log_step("claims deleted → nothing left");
    Ok(())
}

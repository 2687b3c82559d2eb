//! Block and strict volumes with a kubelet: they grow under their pod, are found again after restarts, and leave nothing.

use std::convert::identity;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::cluster::{DRIVER, TestCluster, VolumeFileSystem, claim_manifest, with_cluster};

const MIB: u64 = 1 << 20;

/// A claim of this name, and its volume in the pod.
struct PodVolume {
    format: &'static str,
    class: &'static str,
    path: &'static str,
    /// Before and after its expansion, in MiB.
    sizes: [u64; 2],
    write: &'static str,
    read: &'static str,
    /// Prints its size in bytes, as the pod sees it.
    size: &'static str,
}

const VOLUMES: [PodVolume; 3] = [
    PodVolume {
        format: "block",
        class: "nodekeel",
        path: "/dev/block",
        sizes: [16, 32],
        write: "echo data | dd of=/dev/block conv=fsync",
        read: "dd if=/dev/block bs=5 count=1 2>/dev/null",
        size: "blockdev --getsize64 /dev/block",
    },
    PodVolume {
        format: "ext4",
        class: "strict-ext4",
        path: "/ext4",
        sizes: [32, 64],
        write: "grep -q ' /ext4 ext4 ' /proc/mounts && echo data >/ext4/file && sync",
        read: "cat /ext4/file",
        size: "df -k /ext4 | awk 'END { print $2 * 1024 }'",
    },
    PodVolume {
        format: "xfs",
        class: "strict-xfs",
        path: "/xfs",
        sizes: [300, 400],
        write: "grep -q ' /xfs xfs ' /proc/mounts && echo data >/xfs/file && sync",
        read: "cat /xfs/file",
        size: "df -k /xfs | awk 'END { print $2 * 1024 }'",
    },
];

#[test]
#[ignore = "soak: three volumes live on a real node"]
fn block_and_strict_volumes_grow_survive_restarts_and_leave_nothing() {
    let exec = |cluster: &TestCluster, script: &str| cluster.exec("images", "stay", script);
    let read_size = |cluster: &TestCluster, volume: &PodVolume| -> Result<u64> {
        exec(cluster, volume.size)?
            .trim()
            .parse()
            .with_context(|| format!("read the size of {}", volume.format))
    };
    // The loop devices over files; over a device, as the kubelet attaches one while a pod has it, they don't count.
    let count_devices = |cluster: &TestCluster| -> Result<usize> {
        let count = "grep -h /image$ /sys/block/loop*/loop/backing_file 2>/dev/null | wc -l";
        Ok(cluster.node.run_shell(count)?.trim().parse()?)
    };
    // Waits for a kubelet that has just started.
    let check_data = |cluster: &TestCluster| {
        VOLUMES.iter().try_for_each(|volume| {
            cluster.wait_equal("the data", &"data\n".to_owned(), || exec(cluster, volume.read))
        })
    };
    with_cluster(VolumeFileSystem::Xfs, identity, |cluster| {
        let (mut manifests, mut volumes, mut devices, mut mounts) = (vec![], vec![], vec![], vec![]);
        for PodVolume { format, class, path, sizes, .. } in &VOLUMES {
            let mut claim = claim_manifest(format, class, sizes[0] * MIB);
            if *format == "block" {
                claim["spec"]["volumeMode"] = "Block".into();
                devices.push(json!({ "name": format, "devicePath": path }));
            } else {
                mounts.push(json!({ "name": format, "mountPath": path }));
                manifests.push(json!({
                    "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": class },
                    "provisioner": DRIVER,
                    "volumeBindingMode": "WaitForFirstConsumer",
                    "allowVolumeExpansion": true,
                    "parameters": { "strict": "true", "csi.storage.k8s.io/fstype": format },
                }));
            }
            manifests.push(claim);
            volumes.push(json!({ "name": format, "persistentVolumeClaim": { "claimName": format } }));
        }
        manifests.push(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "images", "namespace": "default" },
            "spec": {
                "terminationGracePeriodSeconds": 1,
                "containers": [{
                    "name": "stay", "image": testbed::BUSYBOX_IMAGE, "imagePullPolicy": "Never",
                    "volumeDevices": devices, "volumeMounts": mounts,
                }],
                "volumes": volumes,
            },
        }));
        cluster.apply(&manifests)?;
        cluster.wait_running("images")?;
        for volume in &VOLUMES {
            exec(cluster, volume.write)?;
        }
        check_data(cluster)?;
        ensure!(count_devices(cluster)? == 3, "each volume has one loop device");

        // No volume takes more than its file: a write beyond it fails.
        let [block, ext4, _] = &VOLUMES;
        ensure!(read_size(cluster, block)? == block.sizes[0] * MIB, "the device has another size");
        let filled =
            exec(cluster, "dd if=/dev/zero of=/ext4/fill bs=64k 2>&1; stat -c %s /ext4/fill; rm /ext4/fill")?;
        let bytes: u64 = filled.lines().last().unwrap_or_default().parse()?;
        ensure!(filled.contains("No space left on device") && bytes < ext4.sizes[0] * MIB, "{filled}");

        for volume in &VOLUMES {
            let ([old, new], before) = (volume.sizes, read_size(cluster, volume)?);
            let size = format!("{new}Mi");
            let request = json!({ "spec": { "resources": { "requests": { "storage": size } } } });
            cluster.kube.patch_object("pvc", volume.format, &request)?;
            cluster.wait_for("pvc", volume.format, |claim: &Value| {
                let status = &claim["status"];
                status["capacity"]["storage"] == size.as_str()
                    && status["allocatedResourceStatuses"].is_null()
            })?;
            let (after, more) = (read_size(cluster, volume)?, (new - old) * MIB);
            ensure!(after >= before + more * 9 / 10, "{}: {before} bytes became {after}", volume.format);
        }
        check_data(cluster)?;

        cluster.restart_daemon()?;
        cluster.node.kill_kubelet()?;
        cluster.node.start_kubelet()?;
        cluster.wait_driver_registered()?;
        check_data(cluster)?;
        ensure!(count_devices(cluster)? == 3, "each volume has one loop device after restarts");

        cluster.delete("pod", "images")?;
        cluster.wait_equal("the loop devices to go", &0, || count_devices(cluster))?;
        for volume in &VOLUMES {
            let persistent = cluster.wait_bound(volume.format)?;
            cluster.kube.delete_object("pvc", volume.format)?;
            cluster.wait_gone("pv", &persistent)?;
        }
        cluster.wait_nothing_left()
    });
}

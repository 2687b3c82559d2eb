//! The lifecycle of a volume: created for a pod, filled to its limit, deleted completely.

use std::cell::Cell;
use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use testbed::command_output;

use crate::cluster::{DRIVER, TestCluster, delete_pod, wait_bound, wait_running, with_cluster};
use crate::disk::{VolumeFileSystem, count_mounts, volume_directories};

/// Of the claim `data`.
const LIMIT: u64 = 32 << 20;
/// Maximum distance of a file size to the limit: it is written in chunks, and needs metadata.
const SLACK: u64 = 128 << 10;
/// Of the class `few`.
const INODES: u64 = 100;

const METRICS: [&str; 4] = [
    "kubelet_volume_stats_capacity_bytes",
    "kubelet_volume_stats_inodes",
    "kubelet_volume_stats_inodes_used",
    "kubelet_volume_stats_used_bytes",
];

/// Two claims, and a pod that fills both in an init container; it does not run as root.
const WRITER: &str = r#"
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: few}
provisioner: volumes.nodekeel
volumeBindingMode: WaitForFirstConsumer
parameters: {inodes: "100"}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data, namespace: default}
spec:
  storageClassName: nodekeel
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 32Mi}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: few, namespace: default}
spec:
  storageClassName: few
  accessModes: [ReadWriteOncePod]
  resources: {requests: {storage: 16Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: writer, namespace: default}
spec:
  terminationGracePeriodSeconds: 1
  securityContext: {runAsUser: 1000, fsGroup: 2000}
  initContainers:
  - name: fill
    image: localhost/busybox:1
    imagePullPolicy: Never
    args:
    - sh
    - -c
    - |
      exec 2>&1
      dd if=/dev/zero of=/data/fill bs=64k
      echo "bytes=$(stat -c %s /data/fill)"
      echo "group=$(stat -c %g /data)"
      echo "size=$(df -k /data | awk 'END { print $2 * 1024 }')"
      echo "inodes=$(df -i /data | awk 'END { print $2 }')"
      made=0
      while touch /few/$made; do made=$((made + 1)); done
      echo "made=$made"
    volumeMounts: &mounts
    - {name: data, mountPath: /data}
    - {name: few, mountPath: /few}
  containers:
  - name: stay
    image: localhost/busybox:1
    imagePullPolicy: Never
    volumeMounts: *mounts
  volumes:
  - {name: data, persistentVolumeClaim: {claimName: data}}
  - {name: few, persistentVolumeClaim: {claimName: few}}
"#;

#[test]
#[ignore = "needs kube, a node and provisionerd's image"]
fn a_volume_on_xfs_survives_restarts_and_leaves_nothing() {
    with_cluster(VolumeFileSystem::Xfs, |cluster| {
        let volumes = fill_volumes(cluster)?;
        check_metrics(cluster)?;
        restart_kubelet(cluster, &volumes)?;
        restart_daemon(cluster, &volumes)?;
        delete_all(cluster, &volumes)
    });
}

#[test]
#[ignore = "soak: XFS is tested always, and ext4's limits in a guest without a kubelet"]
fn a_volume_on_ext4_enforces_its_limit_and_leaves_nothing() {
    with_cluster(VolumeFileSystem::Ext4, |cluster| {
        let volumes = fill_volumes(cluster)?;
        check_metrics(cluster)?;
        delete_all(cluster, &volumes)
    });
}

/// Creates the pod with its claims; returns the names of the volumes, `data` first.
fn fill_volumes(cluster: &mut TestCluster) -> Result<[String; 2]> {
    let kube = &cluster.kube;
    cluster.times.log_step("until claims are created");
    kube.apply_manifests(WRITER)?;
    let volumes = [wait_bound(kube, "data")?, wait_bound(kube, "few")?];
    cluster.times.log_step("claims created → Bound");
    wait_running(kube, "writer")?;
    cluster.times.log_step("Bound → pod filled its volumes and runs");
    kube.wait_for_event("default/data", "ProvisioningSucceeded")?;
    check_pod_output(cluster)?;
    let limits = cluster.file_system.kernel_limits(&cluster.node)?;
    ensure!(limits == [(16 << 10, INODES), (LIMIT >> 10, LIMIT / 2048)], "the kernel has {limits:?}");
    let mut there = volume_directories(&cluster.node)?;
    there.sort();
    let mut expected = volumes.clone().map(|volume| format!("volumes/{volume}"));
    expected.sort();
    ensure!(there == expected, "the directories are {there:?}");
    for volume in &volumes {
        let mounted = count_mounts(&cluster.node, volume)?;
        ensure!(mounted == [1, 1], "{volume} is mounted {mounted:?} times");
    }
    Ok(volumes)
}

/// Checks that the limits stopped the pod, with the right error.
fn check_pod_output(cluster: &TestCluster) -> Result<()> {
    let output_text =
        command_output(cluster.kube.kubectl_command().args(["logs", "writer", "--container=fill"]))?;
    println!("output of the pod:\n{output_text}");
    let numbers: BTreeMap<&str, u64> = output_text
        .lines()
        .filter_map(|line| line.split_once('='))
        .filter_map(|(name, number)| Some((name, number.parse().ok()?)))
        .collect();
    let number =
        |name: &str| numbers.get(name).copied().with_context(|| format!("the pod printed no {name}"));
    let bytes = number("bytes")?;
    ensure!(bytes <= LIMIT && bytes > LIMIT - SLACK, "{bytes} bytes were written below a limit of {LIMIT}");
    let errors = output_text.lines().filter(|line| line.contains(cluster.file_system.limit_error())).count();
    ensure!(errors == 2, "{errors} errors instead of one for bytes and one for files");
    ensure!(number("size")? == LIMIT && number("inodes")? == LIMIT / 2048, "df shows other limits");
    ensure!(number("group")? == 2000, "the volume does not belong to the fsGroup of the pod");
    // The directory of the volume counts as an inode.
    ensure!(number("made")? == INODES - 1, "{INODES} inodes were for {} files", number("made")?);
    Ok(())
}

/// Checks that the kubelet exports limits and usage, and that `provisionerd check` finds no problem.
fn check_metrics(cluster: &mut TestCluster) -> Result<()> {
    let used = Cell::new(0);
    let see = || {
        let [capacity, inodes, inodes_used, used_bytes] = read_metrics(cluster)?;
        used.set(used_bytes);
        Ok([capacity, inodes, inodes_used])
    };
    // The directory and the file.
    cluster.wait_equal("the kubelet's metrics of the volume", &[LIMIT, LIMIT / 2048, 2], see)?;
    let used = used.get();
    ensure!(used <= LIMIT && used > LIMIT - SLACK, "the kubelet exports {used} bytes");
    cluster.times.log_step("volume metrics exported");
    let (kubectl, pod) = (|| cluster.kube.kubectl_command(), cluster.daemon_pod()?);
    let pod = pod.trim_start_matches("nodekeel/");
    let check = command_output(kubectl().args([
        "exec",
        "--namespace=nodekeel",
        pod,
        "--",
        "/provisionerd",
        "check",
    ]))?;
    println!("provisionerd check:\n{check}");
    ensure!(check.contains("the API server grants all permissions needed"), "{check}");
    cluster.times.log_step("provisionerd check");
    Ok(())
}

/// The kubelet's metrics [`METRICS`] of the claim `data`, of one answer: an emulated kubelet takes seconds for each.
fn read_metrics(cluster: &TestCluster) -> Result<[u64; METRICS.len()]> {
    let path = format!("/api/v1/nodes/{}/proxy/metrics", cluster.node.name());
    let text = command_output(cluster.kube.kubectl_command().args(["get", "--raw", &path]))?;
    let mut numbers = [0; METRICS.len()];
    for (number, name) in numbers.iter_mut().zip(METRICS) {
        let is_it = |line: &&str| line.starts_with(&format!("{name}{{")) && line.contains("=\"data\"");
        let line = text.lines().find(is_it).with_context(|| format!("no {name} of the claim"))?;
        let value: f64 = line.rsplit(' ').next().unwrap_or_default().parse()?;
        // Prometheus writes counts as floating-point numbers.
        *number = value as u64;
    }
    Ok(numbers)
}

/// A restarted kubelet publishes mounted volumes again: each stays mounted once, and pods are not affected.
fn restart_kubelet(cluster: &mut TestCluster, volumes: &[String; 2]) -> Result<()> {
    cluster.node.kill_kubelet()?;
    cluster.node.start_kubelet()?;
    let again = |volume: &str| -> Result<bool> {
        let output_text = cluster.daemon_log()?;
        Ok(output_text
            .lines()
            .any(|line| line.contains(volume) && line.contains("\"already_published\":true")))
    };
    for volume in volumes {
        cluster.wait_equal("the kubelet to publish again", &true, || again(volume))?;
        let mounted = count_mounts(&cluster.node, volume)?;
        ensure!(mounted == [1, 1], "{volume} is mounted {mounted:?} times after the kubelet's restart");
    }
    cluster.times.log_step("kubelet killed → volumes published again");
    check_limit_enforced(cluster)
}

/// A restarted provisionerd registers with the kubelet again, and existing volumes stay mounted.
fn restart_daemon(cluster: &mut TestCluster, volumes: &[String; 2]) -> Result<()> {
    let back = cluster.restart_daemon()?;
    let exit_code = &back["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"];
    ensure!(*exit_code == 137, "provisionerd exited with {exit_code}");
    cluster.times.log_step("provisionerd killed → ready again");
    ensure!(cluster.daemon_log()?.contains(DRIVER), "its log doesn't name the driver");
    for volume in volumes {
        let mounted = count_mounts(&cluster.node, volume)?;
        ensure!(mounted == [1, 1], "{volume} is mounted {mounted:?} times after provisionerd's restart");
    }
    check_limit_enforced(cluster)
}

/// Checks that the pod can write, but not beyond its limit.
fn check_limit_enforced(cluster: &mut TestCluster) -> Result<()> {
    let limit_error = cluster.file_system.limit_error();
    let script =
        format!("dd if=/dev/zero of=/data/fill bs=64k 2>&1 | grep '{limit_error}' && stat -c %s /data/fill");
    let output_text = cluster.exec("writer", &script)?;
    let bytes: u64 =
        output_text.lines().last().unwrap_or_default().parse().with_context(|| output_text.clone())?;
    ensure!(bytes <= LIMIT && bytes > LIMIT - SLACK, "{bytes} bytes were written below a limit of {LIMIT}");
    cluster.times.log_step("filled again");
    Ok(())
}

/// Deletes the pod and its claims, and checks that nothing of them remains.
fn delete_all(cluster: &mut TestCluster, volumes: &[String; 2]) -> Result<()> {
    delete_pod(&cluster.kube, "writer")?;
    cluster.times.log_step("pod deleted");
    for volume in volumes {
        cluster.wait_equal("the mounts to go", &[0, 0], || count_mounts(&cluster.node, volume))?;
    }
    cluster.times.log_step("pod deleted → nothing mounted");
    for claim in ["default/data", "default/few"] {
        cluster.kube.delete_object("pvc", claim)?;
    }
    for volume in volumes {
        cluster.wait_gone("pv", volume)?;
    }
    cluster.times.log_step("claims deleted → volumes deleted");
    cluster.wait_nothing_left()?;
    cluster.times.log_step("directories and limits removed");
    Ok(())
}

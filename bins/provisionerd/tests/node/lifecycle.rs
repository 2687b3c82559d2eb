//! The lifecycle of a volume: created for a pod, filled to its limit, deleted completely.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::identity;

use anyhow::{Context as _, Result, ensure};

use crate::cluster::{DRIVER, TestCluster, VolumeFileSystem, with_cluster};

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

/// The number of pod mounts of a volume: in the node's mount namespace, and of mount points in provisionerd's. It sees
/// `/var/lib` as a whole, too, so each mount is there twice: once hidden by the kubelet's directory.
fn count_mounts(cluster: &TestCluster, volume: &str) -> Result<[usize; 2]> {
    let mount_points = |process: &str| -> Result<Vec<String>> {
        let text = cluster.node.run_shell(&format!("cat /proc/{process}/mountinfo"))?;
        let points = text.lines().filter_map(|line| line.split(' ').nth(4)).map(str::to_owned);
        Ok(points.filter(|point| point.ends_with(&format!("/{volume}/mount"))).collect())
    };
    let of_daemon: BTreeSet<_> = mount_points("$(pidof provisionerd)")?.into_iter().collect();
    Ok([mount_points("self")?.len(), of_daemon.len()])
}

#[test]
#[ignore = "sampled: needs kube, a node and provisionerd's image"]
fn a_volume_on_xfs_survives_restarts_and_leaves_nothing() {
    const PROFILE: &str = include_str!("../../../../deploy/seccomp/nodekeel-limits.json");
    /// Of the claim `data`.
    const LIMIT: u64 = 32 << 20;
    /// Maximum distance of a file size to the limit: it is written in chunks, and needs metadata.
    const SLACK: u64 = 128 << 10;
    /// Of the class `few`.
    const INODES: u64 = 100;
    with_cluster(VolumeFileSystem::Xfs, identity, |cluster| {
        // Of the component `seccomp`, which runs before provisionerd.
        let profile = cluster.node.run_shell("cat /var/lib/kubelet/seccomp/nodekeel-limits.json")?;
        ensure!(profile.trim() == PROFILE.trim(), "the node has another seccomp profile");

        cluster.check_and_use()?;
        cluster.wait_nothing_left()?;

        cluster.kube.apply_manifests(WRITER)?;
        let volumes = [cluster.wait_bound("data")?, cluster.wait_bound("few")?];
        cluster.wait_running("writer")?;
        cluster.kube.wait_for_event("default/data", "ProvisioningSucceeded")?;

        // The limits stopped the pod, with the right error.
        let output = cluster.kubectl(&["logs", "writer", "--container=fill"])?;
        let numbers: BTreeMap<&str, u64> = output
            .lines()
            .filter_map(|line| line.split_once('='))
            .filter_map(|(name, number)| Some((name, number.parse().ok()?)))
            .collect();
        let is_full = |bytes: u64| bytes <= LIMIT && bytes > LIMIT - SLACK;
        ensure!(numbers.get("bytes").copied().is_some_and(is_full), "not full to its limit: {output}");
        // One for bytes and one for files.
        ensure!(output.matches("No space left on device").count() == 2, "{output}");
        // The directory of the volume counts as an inode.
        for (name, number) in
            [("size", LIMIT), ("inodes", LIMIT / 2048), ("group", 2000), ("made", INODES - 1)]
        {
            ensure!(numbers.get(name) == Some(&number), "{name} is not {number}: {output}");
        }
        let limits = cluster.kernel_limits()?;
        ensure!(limits == [(16 << 10, INODES), (LIMIT >> 10, LIMIT / 2048)], "the kernel has {limits:?}");
        let there: BTreeSet<_> = cluster.volume_directories()?.into_iter().collect();
        let expected = volumes.clone().map(|volume| format!("volumes/{volume}"));
        ensure!(there == BTreeSet::from(expected), "the directories are {there:?}");
        let check_mounts = |cluster: &TestCluster| {
            volumes.iter().try_for_each(|volume| {
                let mounted = count_mounts(cluster, volume)?;
                ensure!(mounted == [1, 1], "{volume} is mounted {mounted:?} times");
                Ok(())
            })
        };
        check_mounts(cluster)?;

        // The kubelet exports limits and usage; the used inodes are those of the directory and the file.
        let path = format!("/api/v1/nodes/{}/proxy/metrics", cluster.node.name());
        let metrics = ["capacity_bytes", "inodes", "inodes_used", "used_bytes"];
        cluster.wait_equal(
            "the kubelet's metrics of the volume",
            &(vec![LIMIT, LIMIT / 2048, 2], true),
            || {
                let text = cluster.kubectl(&["get", "--raw", &path])?;
                let mut numbers = Vec::new();
                for metric in metrics {
                    let name = format!("kubelet_volume_stats_{metric}{{");
                    let mut lines = text.lines();
                    let line = lines.find(|line| line.starts_with(&name) && line.contains("=\"data\""));
                    let value =
                        line.and_then(|line| line.rsplit(' ').next()).context("no metric of the claim")?;
                    // Prometheus writes counts as floating-point numbers.
                    numbers.push(value.parse::<f64>()? as u64);
                }
                let used = numbers.pop().context("a number")?;
                Ok((numbers, is_full(used)))
            },
        )?;
        let check =
            ["exec", "--namespace=nodekeel", "daemonset/provisionerd", "--", "/provisionerd", "check"];
        let check = cluster.kubectl(&check)?;
        ensure!(check.contains("the API server grants all permissions needed"), "{check}");

        // The pod can write, but not beyond its limit.
        let check_limit = |cluster: &TestCluster| {
            const FILL: &str = "dd if=/dev/zero of=/data/fill bs=64k 2>&1; stat -c %s /data/fill";
            let output = cluster.exec("writer", "stay", FILL)?;
            let bytes: u64 = output.lines().last().unwrap_or_default().parse().context("read a size")?;
            ensure!(output.contains("No space left on device") && is_full(bytes), "{output}");
            Ok(())
        };
        // A restarted kubelet publishes mounted volumes again: each stays mounted once, and pods are not affected.
        cluster.node.kill_kubelet()?;
        cluster.node.start_kubelet()?;
        for volume in &volumes {
            cluster.wait_equal("the kubelet to publish again", &true, || {
                let log = cluster.daemon_log()?;
                let is_again = |line: &str| line.contains("\"already_published\":true");
                Ok(log.lines().any(|line| line.contains(volume) && is_again(line)))
            })?;
        }
        check_mounts(cluster)?;
        check_limit(cluster)?;
        // A restarted provisionerd registers with the kubelet again, and existing volumes stay mounted.
        cluster.restart_daemon()?;
        ensure!(cluster.daemon_log()?.contains(DRIVER), "its log doesn't name the driver");
        check_mounts(cluster)?;
        check_limit(cluster)?;

        cluster.delete("pod", "writer")?;
        for volume in &volumes {
            cluster.wait_equal("the mounts to go", &[0, 0], || count_mounts(cluster, volume))?;
        }
        for claim in ["data", "few"] {
            cluster.kube.delete_object("pvc", claim)?;
        }
        for volume in &volumes {
            cluster.wait_gone("pv", volume)?;
        }
        cluster.wait_nothing_left()
    });
}

//! The life of a volume: made for a pod, filled to its limit, deleted with everything.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use testbed::output;

use crate::cluster::{Cluster, DRIVER, WITHIN, with_cluster};
use crate::disk::{FileSystem, directories, mounts};

/// Of the claim `data`.
const LIMIT: u64 = 32 << 20;
/// What a file may lie below the limit: it is written in pieces, and needs some room besides.
const SLACK: u64 = 128 << 10;
/// Of the class `few`.
const INODES: u64 = 100;

/// Two claims, and a pod that fills both before it is up; it is no root.
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
fn a_volume_holds_on_xfs_whoever_dies_and_leaves_nothing() {
    with_cluster(FileSystem::Xfs, |cluster| {
        let volumes = fill(cluster)?;
        told(cluster)?;
        the_kubelet_dies(cluster, &volumes)?;
        provisionerd_dies(cluster, &volumes)?;
        delete(cluster, &volumes)
    });
}

#[test]
#[ignore = "needs kube, a node and provisionerd's image"]
fn a_volume_holds_on_ext4_and_leaves_nothing() {
    with_cluster(FileSystem::Ext4, |cluster| {
        let volumes = fill(cluster)?;
        told(cluster)?;
        delete(cluster, &volumes)
    });
}

/// Makes the pod with its claims; gives the volumes' names, `data` first.
fn fill(cluster: &mut Cluster) -> Result<[String; 2]> {
    let kube = &cluster.kube;
    cluster.times.took("until claims are made");
    kube.apply(WRITER)?;
    let is_bound = |claim: &Value| claim["status"]["phase"] == "Bound";
    let bound = |claim: &str| kube.until_within(WITHIN, "pvc", &format!("default/{claim}"), is_bound);
    let claims = [bound("data")?, bound("few")?];
    cluster.times.took("claims made → Bound");
    let is_ready = |pod: &Value| pod["status"]["containerStatuses"][0]["ready"] == true;
    kube.until_within(WITHIN, "pod", "default/writer", is_ready)?;
    cluster.times.took("Bound → pod filled its volumes and runs");
    kube.until_event("default/data", "ProvisioningSucceeded")?;
    let volumes = claims.map(|claim| claim["spec"]["volumeName"].as_str().unwrap_or_default().to_owned());
    filled(cluster)?;
    let limits = cluster.file_system.limits(&cluster.node)?;
    ensure!(limits == [(16 << 10, INODES), (LIMIT >> 10, LIMIT / 2048)], "the kernel has {limits:?}");
    let mut there = directories(&cluster.node)?;
    there.sort();
    let mut expected = volumes.clone().map(|volume| format!("volumes/{volume}"));
    expected.sort();
    ensure!(there == expected, "the directories are {there:?}");
    for volume in &volumes {
        let mounted = mounts(&cluster.node, volume)?;
        ensure!(mounted == [1, 1], "{volume} is mounted {mounted:?} times");
    }
    Ok(volumes)
}

/// The limits stopped the pod, which heard why.
fn filled(cluster: &Cluster) -> Result<()> {
    let said = output(cluster.kube.kubectl().args(["logs", "writer", "--container=fill"]))?;
    println!("the pod says:\n{said}");
    let numbers: BTreeMap<&str, u64> = said
        .lines()
        .filter_map(|line| line.split_once('='))
        .filter_map(|(name, number)| Some((name, number.parse().ok()?)))
        .collect();
    let number =
        |name: &str| numbers.get(name).copied().with_context(|| format!("the pod has not told {name}"));
    let bytes = number("bytes")?;
    ensure!(bytes <= LIMIT && bytes > LIMIT - SLACK, "{bytes} bytes were written below a limit of {LIMIT}");
    let refusals = said.lines().filter(|line| line.contains(cluster.file_system.refusal())).count();
    ensure!(refusals == 2, "{refusals} refusals instead of one for bytes and one for files");
    ensure!(number("size")? == LIMIT && number("inodes")? == LIMIT / 2048, "df shows other limits");
    ensure!(number("group")? == 2000, "the volume isn't the pod's fsGroup's");
    // The volume's directory counts.
    ensure!(number("made")? == INODES - 1, "{INODES} inodes were for {} files", number("made")?);
    Ok(())
}

/// The kubelet tells the limits and the use; provisionerd finds nothing missing.
fn told(cluster: &mut Cluster) -> Result<()> {
    let metric = |name: &str| -> Result<u64> {
        let path = format!("/api/v1/nodes/{}/proxy/metrics", cluster.node.name());
        let text = output(cluster.kube.kubectl().args(["get", "--raw", &path]))?;
        let is_it = |line: &&str| line.starts_with(&format!("{name}{{")) && line.contains("=\"data\"");
        let line = text.lines().find(is_it).with_context(|| format!("no {name} of the claim"))?;
        let number: f64 = line.rsplit(' ').next().unwrap_or_default().parse()?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it counts bytes or inodes"
        )]
        Ok(number as u64)
    };
    let see = |name: &str, wanted: u64| cluster.eventually(name, &wanted, || metric(name));
    see("kubelet_volume_stats_capacity_bytes", LIMIT)?;
    see("kubelet_volume_stats_inodes", LIMIT / 2048)?;
    // The directory and the file.
    see("kubelet_volume_stats_inodes_used", 2)?;
    let used = metric("kubelet_volume_stats_used_bytes")?;
    ensure!(used <= LIMIT && used > LIMIT - SLACK, "the kubelet tells of {used} bytes");
    cluster.times.took("the kubelet tells what volumes hold");
    let (kubectl, pod) = (|| cluster.kube.kubectl(), cluster.pod()?);
    let pod = pod.trim_start_matches("nodekeel/");
    let check =
        output(kubectl().args(["exec", "--namespace=nodekeel", pod, "--", "/provisionerd", "check"]))?;
    println!("provisionerd check:\n{check}");
    ensure!(check.contains("the API server allows what is needed"), "{check}");
    cluster.times.took("provisionerd check");
    Ok(())
}

/// A new kubelet publishes again what is mounted: it stays mounted once, and pods don't notice.
fn the_kubelet_dies(cluster: &mut Cluster, volumes: &[String; 2]) -> Result<()> {
    cluster.node.kill_kubelet()?;
    cluster.node.start_kubelet()?;
    let again = |volume: &str| -> Result<bool> {
        let said = cluster.said()?;
        Ok(said.lines().any(|line| line.contains(volume) && line.contains("\"is_old\":true")))
    };
    for volume in volumes {
        cluster.eventually("the kubelet to publish again", &true, || again(volume))?;
        let mounted = mounts(&cluster.node, volume)?;
        ensure!(mounted == [1, 1], "{volume} is mounted {mounted:?} times after the kubelet's restart");
    }
    cluster.times.took("kubelet killed → volumes published again");
    works(cluster)
}

/// A new provisionerd is known to the kubelet again; volumes that it didn't make go on, and new ones come.
fn provisionerd_dies(cluster: &mut Cluster, volumes: &[String; 2]) -> Result<()> {
    let pod = cluster.pod()?;
    cluster.node.shell("kill -KILL $(pidof provisionerd)")?;
    let is_back = |pod: &Value| {
        let status = &pod["status"]["containerStatuses"][0];
        status["restartCount"] == 1 && status["ready"] == true
    };
    let back = cluster.kube.until_within(WITHIN, "pod", &pod, is_back)?;
    let ended = &back["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"];
    ensure!(*ended == 137, "it ended with {ended}");
    cluster.times.took("provisionerd killed → ready again");
    ensure!(cluster.said()?.contains(DRIVER), "its log doesn't name the driver");
    for volume in volumes {
        let mounted = mounts(&cluster.node, volume)?;
        ensure!(mounted == [1, 1], "{volume} is mounted {mounted:?} times after provisionerd's restart");
    }
    works(cluster)
}

/// The pod can write, and not beyond its limit.
fn works(cluster: &mut Cluster) -> Result<()> {
    let refusal = cluster.file_system.refusal();
    let script =
        format!("dd if=/dev/zero of=/data/fill bs=64k 2>&1 | grep '{refusal}' && stat -c %s /data/fill");
    let said = cluster.exec("writer", &script)?;
    let bytes: u64 = said.lines().last().unwrap_or_default().parse().with_context(|| said.clone())?;
    ensure!(bytes <= LIMIT && bytes > LIMIT - SLACK, "{bytes} bytes were written below a limit of {LIMIT}");
    cluster.times.took("filled again");
    Ok(())
}

/// Deletes the pod and its claims; nothing of them is left.
fn delete(cluster: &mut Cluster, volumes: &[String; 2]) -> Result<()> {
    cluster.kube.delete("pod", "default/writer")?;
    cluster.gone("pod", "writer")?;
    cluster.times.took("pod deleted");
    for volume in volumes {
        cluster.eventually("the mounts to go", &[0, 0], || mounts(&cluster.node, volume))?;
    }
    cluster.times.took("pod gone → nothing mounted");
    for claim in ["default/data", "default/few"] {
        cluster.kube.delete("pvc", claim)?;
    }
    for volume in volumes {
        cluster.gone("pv", volume)?;
    }
    cluster.times.took("claims deleted → volumes gone");
    cluster.eventually("the directories to go", &Vec::new(), || directories(&cluster.node))?;
    cluster.eventually("the limits to go", &Vec::new(), || cluster.file_system.limits(&cluster.node))?;
    cluster.times.took("directories and limits gone");
    Ok(())
}

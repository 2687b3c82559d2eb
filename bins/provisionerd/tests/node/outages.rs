//! A disk and a node that are lost for a while under a kubelet.

use std::convert::identity;

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::cluster::{TestCluster, VOLUMES, VolumeFileSystem, claim_manifest, pod_manifest, with_cluster};

#[test]
#[ignore = "soak: a real node, whose disk and object are lost and come back"]
fn a_pods_volume_is_served_again_after_its_disk_or_its_node_was_lost_for_a_while() {
    let assert_data = |cluster: &TestCluster| -> Result<()> {
        cluster.wait_running("kept")?;
        ensure!(cluster.exec("kept", "stay", "cat /data/file")? == "before\n", "the volume lost its data");
        Ok(())
    };
    with_cluster(VolumeFileSystem::Xfs, identity, |cluster| {
        for name in ["kept", "doomed"] {
            cluster.apply(&[claim_manifest(name, "nodekeel", 8 << 20), pod_manifest(name)])?;
            cluster.wait_running(name)?;
        }
        cluster.exec("kept", "stay", "echo before >/data/file; sync")?;
        let [kept, doomed] = [cluster.wait_bound("kept")?, cluster.wait_bound("doomed")?];
        cluster.delete("pod", "doomed")?;

        // Unmounted while a pod uses it: nothing is deleted.
        cluster.node.run_shell(&format!("umount -l {VOLUMES}"))?;
        cluster.kube.wait_for_event(&kept, "VolumeConditionAbnormal")?;
        cluster.kube.delete_object("pvc", "doomed")?;
        cluster.wait_for("pv", &doomed, |volume: &Value| volume["status"]["phase"] == "Released")?;
        cluster.mount_volumes()?;
        cluster.wait_gone("pv", &doomed)?;
        cluster.kube.wait_for_event(&kept, "VolumeConditionNormal")?;
        cluster.delete("pod", "kept")?;
        cluster.apply(&[pod_manifest("kept")])?;
        assert_data(cluster)?;

        // Its node's object is deleted; the next kubelet creates it again.
        let node = cluster.node.name().to_owned();
        cluster.kube.delete_object("node", &node)?;
        cluster.wait_gone("node", &node)?;
        cluster.node.kill_kubelet()?;
        cluster.node.start_kubelet()?;
        cluster.node.wait_ready(&cluster.kube)?;
        cluster.wait_driver_registered()?;
        // Its pod was deleted with the node, or will be.
        cluster.kubectl(&["delete", "pod", "kept", "--ignore-not-found", "--force", "--grace-period=0"])?;
        cluster.apply(&[pod_manifest("kept")])?;
        assert_data(cluster)?;
        let there = cluster.volume_directories()?;
        ensure!(there == [format!("volumes/{kept}")], "the directories are {there:?}");
        Ok(())
    });
}

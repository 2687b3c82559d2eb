//! The local-path-provisioner of k3s beside ours.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result};
use futures_util::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client};
use serde_json::json;
use testbed::bench::{BenchRow, InterleavedSamples, median};
use testbed::gotool::LOCAL_PATH_PROVISIONER;
use testbed::{Daemon, ScratchDir};

use crate::bench_cluster::BenchCluster;
use crate::contender::Contender;

/// How many claims at once, and how often; it sends five requests a second.
const BURST: (usize, usize) = (20, 2);
/// How many claims ours has to bind in the time in which it binds one.
const GOAL_RATIO: f64 = 2.0;
/// The namespace of its pods, and their account.
const ACCOUNT: [&str; 2] = ["nodekeel", "provisionerd"];
const HELPER_POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: helper-pod}
spec:
  containers: [{name: helper-pod, image: busybox}]
";

pub(crate) async fn measure(cluster: &mut BenchCluster) -> Result<Vec<BenchRow>> {
    let _provisioner = start(cluster)?;
    let kubelet = tokio::spawn(finish_pods(cluster.client()));
    let (claims, rounds) = BURST;
    let mut bound = InterleavedSamples::default();
    for run_number in 0..rounds {
        for contender in [Contender::LocalPath, Contender::Ours] {
            let label = format!("peer-{}-{run_number}", contender.name());
            let (_, took) = cluster.bind_claims(contender, &label, claims).await?;
            let samples = if contender == Contender::Ours { &mut bound.ours } else { &mut bound.peer };
            samples.push(claims as f64 / took * 1e3);
        }
    }
    kubelet.abort();
    let work = format!("{claims} claims at once, from the first POST to the last Bound; median of {rounds}");
    let (ours, peer) = (median(&bound.ours), median(&bound.peer));
    let row = BenchRow::new("burst_local_path", work, "claims/s", ours);
    let version = LOCAL_PATH_PROVISIONER.version;
    Ok(vec![row.peer("local-path-provisioner", version, peer).goal_at_least(GOAL_RATIO * peer)])
}

fn start(cluster: &BenchCluster) -> Result<Daemon> {
    let me = Contender::LocalPath;
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": me.node()}});
    cluster.kube.apply_manifests(&node.to_string())?;
    let scratch = ScratchDir::new()?;
    let write = |name: &str, text: &str| {
        let file = scratch.path().join(name);
        fs::write(&file, text).with_context(|| format!("write {}", file.display()))?;
        Ok::<_, anyhow::Error>(file)
    };
    let config = json!({
        "nodePathMap": [{"node": "DEFAULT_PATH_FOR_NON_LISTED_NODES", "paths": ["/srv/local-path"]}],
        "setupCommand": "/bin/true", "teardownCommand": "/bin/true",
    });
    let mut command = Command::new(LOCAL_PATH_PROVISIONER.program_path("local-path-provisioner")?);
    command.env_clear().arg("start").arg("--config").arg(write("config.json", &config.to_string())?);
    command.arg("--helper-pod-file").arg(write("pod.yaml", HELPER_POD)?);
    command.arg("--kubeconfig").arg(cluster.kube.kubeconfig_file("admin")?);
    command.args(["--provisioner-name", &me.driver(), "--namespace", ACCOUNT[0]]);
    command.args(["--service-account-name", ACCOUNT[1]]);
    // It needs no time that counts, and prints no line when it has its lists.
    Daemon::start(command, scratch, || Ok(()))
}

/// A kubelet whose pods end as soon as they are there.
async fn finish_pods(client: Client) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(client, ACCOUNT[0]);
    let ours = watcher::Config::default().fields(&format!("spec.nodeName={}", Contender::LocalPath.node()));
    let mut seen = watcher(pods.clone(), ours).applied_objects().boxed();
    while let Some(pod) = seen.try_next().await? {
        let phase = pod.status.and_then(|status| status.phase);
        if phase.as_deref() == Some("Pending") && pod.metadata.deletion_timestamp.is_none() {
            let name = pod.metadata.name.context("a pod has a name")?;
            let ended = json!({"status": {"phase": "Succeeded"}});
            pods.patch_status(&name, &PatchParams::default(), &Patch::Merge(ended)).await?;
        }
    }
    Ok(())
}

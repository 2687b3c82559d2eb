//! Two guests with provisionerd, and a third node without it.

use std::panic;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testbed::{FakeNode, GuestNode, Kube, KubeUser, command_output};

use crate::deployment::{
    DEPLOY, DRIVER, IMAGE_AT, TIMEOUT, claim_manifest, image_file, import_image, pod_manifest,
    wait_driver_registered, wait_running,
};
use crate::disk::VolumeFileSystem;
use crate::timings::StepTimer;

/// The node that pods prefer.
pub(crate) const FIRST: &str = "first";
pub(crate) const SECOND: &str = "second";
/// A node without the driver, which exists as an object only.
pub(crate) const DRIVERLESS: &str = "driverless";
/// The agent reports the volumes of a deleted node after this time.
pub(crate) const GONE_AFTER: Duration = Duration::from_secs(5);

/// How much longer than promised a step may take on a busy machine with emulated processors.
const SLACK: u32 = 5;

/// A control plane with its nodes, as `deploy/` sets them up.
#[derive(Debug)]
pub(crate) struct ThreeNodes {
    pub(crate) kube: Kube,
    pub(crate) first: GuestNode,
    pub(crate) second: GuestNode,
    pub(crate) times: StepTimer,
}

impl ThreeNodes {
    pub(crate) fn start() -> Result<Self> {
        let times = StepTimer::start();
        let users = [FIRST, SECOND].map(KubeUser::for_node);
        let builder = users
            .into_iter()
            .fold(Kube::builder().with_service_accounts(), |builder, user| builder.with_user(user));
        let kube = builder.start().context("start a control plane")?;
        times.log_step("control plane");
        let (first, second) = thread::scope(|scope| {
            let second = scope.spawn(|| join_node(&kube, SECOND));
            (join_node(&kube, FIRST), second.join().unwrap_or_else(|error| panic::resume_unwind(error)))
        });
        let this = Self { kube, first: first?, second: second?, times };
        this.times.log_step("two nodes ready");
        this.deploy()?;
        Ok(this)
    }

    fn deploy(&self) -> Result<()> {
        command_output(self.kube.kubectl_command().args(["apply", "--kustomize", DEPLOY]))?;
        // One agent, which outlives the first node, and reports early.
        let patch = json!({"spec": {"replicas": 1, "template": {"spec": {
            "nodeSelector": {"kubernetes.io/hostname": SECOND},
            "containers": [{"name": "agent", "args": [
                "agent", format!("--driver={DRIVER}"), "--listen=0.0.0.0:9811",
                format!("--node-gone-after={}s", GONE_AFTER.as_secs()),
            ]}],
        }}}});
        let agent = ["--namespace=nodekeel", "patch", "deployment", "provisionerd-agent", "--patch"];
        command_output(self.kube.kubectl_command().args(agent).arg(patch.to_string()))?;
        self.kube.create_fake_node(&FakeNode::new(DRIVERLESS))?;
        let are_ready = |set: &Value| set["status"]["numberReady"] == 2;
        self.kube.wait_for_object_within(TIMEOUT, "daemonset", "nodekeel/provisionerd", are_ready)?;
        for node in [FIRST, SECOND] {
            wait_driver_registered(&self.kube, node)?;
        }
        let is_up = |agent: &Value| agent["status"]["readyReplicas"] == 1;
        self.kube.wait_for_object_within(TIMEOUT, "deployment", "nodekeel/provisionerd-agent", is_up)?;
        self.times.log_step("provisionerd and its agent ready");
        Ok(())
    }

    /// Creates a claim, and a pod that uses it with these fields in its `spec`.
    pub(crate) fn create_pod(&self, name: &str, bytes: u64, scheduling: &Value) -> Result<()> {
        self.kube.create_objects(&claim_manifest(name, "nodekeel", bytes).to_string())?;
        self.create_pod_of_claim(name, name, scheduling)
    }

    /// Creates a pod that uses a claim.
    pub(crate) fn create_pod_of_claim(&self, name: &str, claim: &str, scheduling: &Value) -> Result<()> {
        let mut pod = pod_manifest(name, claim);
        for (field, value) in scheduling.as_object().into_iter().flatten() {
            pod["spec"][field] = value.clone();
        }
        self.kube.create_objects(&pod.to_string()).map(drop)
    }

    /// Waits until a pod is running, and gives its node.
    pub(crate) fn wait_running(&self, name: &str) -> Result<String> {
        let pod = wait_running(&self.kube, name)?;
        Ok(pod["spec"]["nodeName"].as_str().unwrap_or_default().to_owned())
    }

    /// Waits until the scheduler has selected a node for a claim.
    pub(crate) fn wait_selected(&self, claim: &str, node: &str) -> Result<()> {
        let selected =
            |claim: &Value| claim["metadata"]["annotations"]["volume.kubernetes.io/selected-node"] == node;
        let claim = format!("default/{claim}");
        self.kube.wait_for_object_within(TIMEOUT, "pvc", &claim, selected).map(drop)
    }

    /// Runs kubectl.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        command_output(self.kube.kubectl_command().args(arguments))
    }

    /// Prints how long something took, and fails where that is far more than promised.
    pub(crate) fn check_duration(&self, what: &str, since: Instant, promised: Duration) -> Result<()> {
        let took = since.elapsed();
        self.times.log_duration(&format!("{what} (promised: {promised:?})"), took);
        ensure!(took < promised * SLACK, "{what} took {took:?}: more than {SLACK} times {promised:?}");
        Ok(())
    }

    pub(crate) fn diagnostics(&self) -> String {
        let kubectl =
            |arguments: &[&str]| self.kubectl(arguments).unwrap_or_else(|error| format!("{error:#}"));
        let selector = "--selector=app.kubernetes.io/part-of=nodekeel";
        [
            kubectl(&["get", "pods,pvc,pv,nodes,csistoragecapacities", "--all-namespaces", "--output=wide"]),
            kubectl(&["get", "events", "--all-namespaces"]),
            kubectl(&["logs", "--namespace=nodekeel", selector, "--prefix", "--tail=60"]),
        ]
        .join("\n==\n")
    }
}

/// Boots a node, mounts its disk of volumes, and imports the image.
fn join_node(kube: &Kube, name: &str) -> Result<GuestNode> {
    let image = image_file()?;
    let node = GuestNode::builder()
        .with_name(name)
        .configure_guest(|guest| Ok(guest.with_disk(8 << 30).add_file(IMAGE_AT, image)))?
        .join(kube)
        .with_context(|| format!("join the node {name}"))?;
    VolumeFileSystem::Xfs.mount(&node)?;
    import_image(&node)?;
    Ok(node)
}

/// The fields of a pod that prefers a node to others.
pub(crate) fn prefer(node: &str) -> Value {
    let term = json!({"key": "kubernetes.io/hostname", "operator": "In", "values": [node]});
    let preferred = json!([{"weight": 100, "preference": {"matchExpressions": [term]}}]);
    json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}})
}

/// The fields of a pod that runs on a node only.
pub(crate) fn require(node: &str) -> Value {
    json!({"nodeSelector": {"kubernetes.io/hostname": node}})
}

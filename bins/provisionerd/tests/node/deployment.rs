//! A control plane, a node in a guest, and provisionerd on it.

use std::fmt::Display;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testbed::guest::GuestBuilder;
use testbed::{BUSYBOX_IMAGE, GuestNode, Kube, KubeBuilder, ScratchDir, command_output, wait_until};

use crate::disk::{VolumeFileSystem, volume_directories};
use crate::timings::StepTimer;

pub(crate) const DRIVER: &str = "volumes.nodekeel";
/// Timeout of a single step: the guest's processors are emulated, on a machine that may be busy.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(240);

const IMAGE: &str = "NODEKEEL_PROVISIONERD_IMAGE";
/// The image's file in the guest.
pub(crate) const IMAGE_AT: &str = "/usr/lib/provisionerd.tar";
pub(crate) const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy");

const PROFILE: &str = include_str!("../../../../deploy/seccomp/nodekeel-limits.json");

/// Two nodes at a time would be more than twice as slow.
static EXCLUSIVE: Mutex<()> = Mutex::new(());

/// A control plane and a node, which are removed when this is dropped.
#[derive(Debug)]
pub(crate) struct TestCluster {
    pub(crate) node: GuestNode,
    pub(crate) kube: Kube,
    pub(crate) file_system: VolumeFileSystem,
    pub(crate) times: StepTimer,
    _turn: MutexGuard<'static, ()>,
}

/// Runs a test on a cluster where provisionerd is ready; a failure prints the last logs of all parts.
pub(crate) fn with_cluster(file_system: VolumeFileSystem, test: impl FnOnce(&mut TestCluster) -> Result<()>) {
    with_cluster_and(file_system, |guest, _| Ok(guest), test);
}

/// Like [`with_cluster`], on a node with what `furnish` adds; the directory exists until the test ends.
pub(crate) fn with_cluster_and(
    file_system: VolumeFileSystem,
    furnish: impl FnOnce(GuestBuilder, &ScratchDir) -> Result<GuestBuilder>,
    test: impl FnOnce(&mut TestCluster) -> Result<()>,
) {
    let scratch = ScratchDir::new().unwrap_or_else(|error| panic!("{error:#}"));
    let furnish =
        |_: &Kube, guest: GuestBuilder| Ok(furnish(guest, &scratch)?.add_file(IMAGE_AT, image_file()?));
    let kube = Kube::builder().with_service_accounts();
    with_node(file_system, kube, furnish, |cluster| cluster.deploy().and_then(|()| test(cluster)));
}

/// Runs a test on a cluster with a node that has additional files and a mounted disk for volumes. `furnish` adds the files.
pub(crate) fn with_node(
    file_system: VolumeFileSystem,
    kube: KubeBuilder,
    furnish: impl FnOnce(&Kube, GuestBuilder) -> Result<GuestBuilder>,
    test: impl FnOnce(&mut TestCluster) -> Result<()>,
) {
    let cluster = TestCluster::start(file_system, kube, furnish);
    let mut cluster = cluster.unwrap_or_else(|error| panic!("{error:#}"));
    if let Err(error) = test(&mut cluster) {
        panic!("{error:#}\n{}", cluster.diagnostics());
    }
}

/// The file of the image.
pub(crate) fn image_file() -> Result<PathBuf> {
    let path = std::env::var_os(IMAGE).map(PathBuf::from);
    let image = path.with_context(|| {
        format!("create the image (cargo xtask oci provisionerd) and set {IMAGE} to its path")
    })?;
    ensure!(image.is_file(), "{IMAGE} is {}, which does not exist", image.display());
    Ok(image)
}

/// Waits until the kubelet of a node has registered the driver.
pub(crate) fn wait_driver_registered(kube: &Kube, node: &str) -> Result<()> {
    let is_known = |csi_node: &Value| {
        let mut drivers = csi_node["spec"]["drivers"].as_array().into_iter().flatten();
        drivers.any(|driver| driver["name"] == DRIVER && driver["nodeID"] == node)
    };
    kube.wait_for_object_within(TIMEOUT, "csinode", node, is_known).map(drop)
}

/// A claim of a class.
pub(crate) fn claim_manifest(name: &str, class: &str, bytes: u64) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "storageClassName": class,
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": bytes.to_string() } },
        },
    })
}

/// A pod whose container `stay` has the volume of a claim at `/data`.
pub(crate) fn pod_manifest(name: &str, claim: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "stay", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never",
                "volumeMounts": [{ "name": "data", "mountPath": "/data" }],
            }],
            "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": claim } }],
        },
    })
}

/// Waits until a claim is bound, and gives the name of its volume.
pub(crate) fn wait_bound(kube: &Kube, claim: &str) -> Result<String> {
    let is_bound = |claim: &Value| claim["status"]["phase"] == "Bound";
    let claim = kube.wait_for_object_within(TIMEOUT, "pvc", &format!("default/{claim}"), is_bound)?;
    claim["spec"]["volumeName"].as_str().map(str::to_owned).context("a bound claim has a volume")
}

/// Waits until the first container of a pod is ready.
pub(crate) fn wait_running(kube: &Kube, pod: &str) -> Result<Value> {
    let is_ready = |pod: &Value| pod["status"]["containerStatuses"][0]["ready"] == true;
    kube.wait_for_object_within(TIMEOUT, "pod", &format!("default/{pod}"), is_ready)
}

/// Waits until an object of the namespace `default`, or of none, is deleted.
pub(crate) fn wait_gone(kube: &Kube, kind: &str, name: &str) -> Result<()> {
    let timeout = format!("--timeout={}s", TIMEOUT.as_secs());
    command_output(kube.kubectl_command().args(["wait", kind, name, "--for=delete", &timeout])).map(drop)
}

pub(crate) fn delete_pod(kube: &Kube, name: &str) -> Result<()> {
    kube.delete_object("pod", &format!("default/{name}"))?;
    wait_gone(kube, "pod", name)
}

/// Deletes a claim, and waits until its volume is deleted.
pub(crate) fn delete_claim(kube: &Kube, name: &str, volume: &str) -> Result<()> {
    kube.delete_object("pvc", &format!("default/{name}"))?;
    wait_gone(kube, "pv", volume)
}

/// Runs a script in a container of the namespace `default`.
pub(crate) fn exec(kube: &Kube, pod: &str, script: &str) -> Result<String> {
    command_output(kube.kubectl_command().args(["exec", pod, "--", "sh", "-c", script]))
}

/// Imports the image of provisionerd on a node.
pub(crate) fn import_image(node: &GuestNode) -> Result<()> {
    let import = ["--namespace", "k8s.io", "images", "import", IMAGE_AT];
    node.guest().command_output(Command::new("ctr").args(import), TIMEOUT).map(drop)
}

impl TestCluster {
    fn start(
        file_system: VolumeFileSystem,
        kube: KubeBuilder,
        furnish: impl FnOnce(&Kube, GuestBuilder) -> Result<GuestBuilder>,
    ) -> Result<Self> {
        let _turn = EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner);
        println!("provisionerd on {file_system:?}");
        let times = StepTimer::start();
        let kube = kube.start().context("start a control plane")?;
        times.log_step("control plane");
        let node = GuestNode::builder()
            // The kubelet collects volume statistics frequently, not every minute.
            .with_kubelet_setting("volumeStatsAggPeriod", "2s")
            .configure_guest(|guest| furnish(&kube, guest.with_disk(8 << 30)))?
            .join(&kube)
            .context("join a node")?;
        times.log_step("node ready");
        file_system.mount(&node)?;
        times.log_step("file system");
        Ok(Self { node, kube, file_system, times, _turn })
    }

    /// Follows the README of `deploy/`.
    fn deploy(&mut self) -> Result<()> {
        import_image(&self.node)?;
        self.times.log_step("image imported");
        command_output(self.kube.kubectl_command().args(["apply", "--kustomize", DEPLOY]))?;
        // It has separate tests, and an emulated processor is slow.
        let agent = ["--namespace=nodekeel", "deployment/provisionerd-agent", "--replicas=0"];
        command_output(self.kube.kubectl_command().arg("scale").args(agent))?;
        let is_ready = |set: &Value| set["status"]["numberReady"] == 1;
        self.kube.wait_for_object_within(TIMEOUT, "daemonset", "nodekeel/provisionerd", is_ready)?;
        self.wait_driver_registered()?;
        // Of the component `seccomp`, which runs before provisionerd.
        let profile = self.node.run_shell("cat /var/lib/kubelet/seccomp/nodekeel-limits.json")?;
        ensure!(profile.trim() == PROFILE.trim(), "the node has another seccomp profile");
        self.times.log_step("provisionerd ready");
        Ok(())
    }

    /// Waits until the kubelet has registered the driver.
    pub(crate) fn wait_driver_registered(&self) -> Result<()> {
        wait_driver_registered(&self.kube, self.node.name())
    }

    /// provisionerd's pod, as `NAMESPACE/NAME`.
    pub(crate) fn daemon_pod(&self) -> Result<String> {
        let pods = self.kube.list_objects("pod")?;
        let ours =
            pods.iter().find(|pod| pod["metadata"]["labels"]["app.kubernetes.io/name"] == "provisionerd");
        let name = ours.and_then(|pod| pod["metadata"]["name"].as_str());
        Ok(format!("nodekeel/{}", name.context("provisionerd has no pod")?))
    }

    /// The log of provisionerd since its last start.
    pub(crate) fn daemon_log(&self) -> Result<String> {
        command_output(self.kube.kubectl_command().args([
            "logs",
            "--namespace=nodekeel",
            "daemonset/provisionerd",
        ]))
    }

    /// Runs a script in a container of the namespace `default`.
    pub(crate) fn exec(&self, pod: &str, script: &str) -> Result<String> {
        exec(&self.kube, pod, script)
    }

    /// Waits until an object is deleted.
    pub(crate) fn wait_gone(&self, kind: &str, name: &str) -> Result<()> {
        wait_gone(&self.kube, kind, name)
    }

    /// Kills provisionerd, and waits until the kubelet has started it again; gives its pod.
    pub(crate) fn restart_daemon(&self) -> Result<Value> {
        let pod = self.daemon_pod()?;
        self.node.run_shell("kill -KILL $(pidof provisionerd)")?;
        let is_back = |pod: &Value| {
            let status = &pod["status"]["containerStatuses"][0];
            status["restartCount"] == 1 && status["ready"] == true
        };
        self.kube.wait_for_object_within(TIMEOUT, "pod", &pod, is_back)
    }

    /// Waits until no directory and no limit of a volume is left.
    pub(crate) fn wait_nothing_left(&self) -> Result<()> {
        self.wait_equal("the directories to go", &Vec::new(), || volume_directories(&self.node))?;
        self.wait_equal("the limits to go", &Vec::new(), || self.file_system.kernel_limits(&self.node))
    }

    /// Polls for a value that has no event: in the guest or in a log.
    pub(crate) fn wait_equal<T: PartialEq + std::fmt::Debug>(
        &self,
        what: &str,
        wanted: &T,
        look: impl Fn() -> Result<T>,
    ) -> Result<()> {
        wait_until(TIMEOUT, what, || {
            let seen = look()?;
            ensure!(seen == *wanted, "{seen:?} instead of {wanted:?}");
            Ok(())
        })
    }

    fn diagnostics(&self) -> String {
        fn text(what: &str, said: Result<impl Display>) -> String {
            said.map_or_else(|error| format!("== {what}: {error:#}\n"), |text| format!("== {what}\n{text}\n"))
        }
        let kubectl = |arguments: &[&str]| command_output(self.kube.kubectl_command().args(arguments));
        [
            text("provisionerd", self.daemon_log()),
            text("metrics", self.node.run_shell("wget -qO- http://127.0.0.1:9810/metrics | grep -v '^#'")),
            text("connections", self.node.run_shell("netstat -tn")),
            text("pods", kubectl(&["describe", "pods", "--all-namespaces"])),
            text("claims", kubectl(&["get", "pvc,pv,csinodes", "--all-namespaces", "--output=wide"])),
            text("kubelet", self.node.tail_log("kubelet")),
        ]
        .concat()
    }
}

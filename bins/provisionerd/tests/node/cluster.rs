//! A control plane, a node in a guest, and provisionerd on it.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use testbed::guest::GuestBuilder;
use testbed::{BUSYBOX_IMAGE, GuestNode, Kube, KubeBuilder, command_output, wait_until};

use crate::quickstart::readme_command;

pub(crate) const DRIVER: &str = "volumes.nodekeel";
/// Timeout of a single step: the guest's processors are emulated, on a machine that may be busy.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(480);
/// Where the disk for volumes is mounted.
pub(crate) const VOLUMES: &str = "/var/lib/nodekeel";

const IMAGE: &str = "NODEKEEL_PROVISIONERD_IMAGE";
/// The image's file in the guest.
const IMAGE_AT: &str = "/usr/lib/provisionerd.tar";
/// The second disk of the guest; the first one holds the rest of `/var/lib`.
const DEVICE: &str = "${NODEKEEL_GUEST_DISKS##*:}";
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Two nodes at a time would be more than twice as slow.
static EXCLUSIVE: Mutex<()> = Mutex::new(());

/// The file system of the volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VolumeFileSystem {
    Xfs,
    Ext4,
}

/// A control plane and a node, which are removed when this is dropped.
#[derive(Debug)]
pub(crate) struct TestCluster {
    pub(crate) node: GuestNode,
    pub(crate) kube: Kube,
    file_system: VolumeFileSystem,
    _turn: MutexGuard<'static, ()>,
}

/// Runs a test on a node with what `furnish` adds, where provisionerd is deployed as the README of `deploy/` says.
pub(crate) fn with_cluster(
    file_system: VolumeFileSystem,
    furnish: impl FnOnce(GuestBuilder) -> GuestBuilder,
    test: impl FnOnce(&mut TestCluster) -> Result<()>,
) {
    let furnish = |_: &Kube, guest: GuestBuilder| Ok(furnish(guest).add_file(IMAGE_AT, image_file()?));
    with_node(file_system, Kube::builder().with_service_accounts(), furnish, |cluster| {
        let import = readme_command("Image", "ctr ")?.replace("provisionerd.tar", IMAGE_AT);
        cluster.node.guest().command_output(Command::new("sh").args(["-c", &import]), TIMEOUT)?;
        cluster.readme_kubectl("Objects", "kubectl apply", &[])?;
        // It has separate tests, and an emulated processor is slow.
        cluster.kubectl(&[
            "scale",
            "--namespace=nodekeel",
            "deployment/provisionerd-agent",
            "--replicas=0",
        ])?;
        cluster.wait_for("daemonset", "nodekeel/provisionerd", |set| set["status"]["numberReady"] == 1)?;
        cluster.wait_driver_registered()?;
        test(cluster)
    });
}

/// Runs a test on a node with what `furnish` adds and a mounted disk for volumes; a failure shows what all parts report.
pub(crate) fn with_node(
    file_system: VolumeFileSystem,
    kube: KubeBuilder,
    furnish: impl FnOnce(&Kube, GuestBuilder) -> Result<GuestBuilder>,
    test: impl FnOnce(&mut TestCluster) -> Result<()>,
) {
    let mut cluster = TestCluster::start(file_system, kube, furnish).unwrap();
    if let Err(error) = test(&mut cluster) {
        let reports = [
            cluster.daemon_log(),
            cluster.kubectl(&["describe", "pods", "--all-namespaces"]),
            cluster.kubectl(&["get", "pvc,pv,csinodes,events", "--all-namespaces", "--output=wide"]),
            cluster.node.tail_log("kubelet"),
        ];
        let reports = reports.map(|report| report.unwrap_or_else(|error| format!("{error:#}")));
        panic!("{file_system:?}: {error:#}\n{}", reports.join("\n==\n"));
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

/// A pod whose container `stay` has the volume of the claim of its name at `/data`.
pub(crate) fn pod_manifest(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "stay", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never",
                "volumeMounts": [{ "name": "data", "mountPath": "/data" }],
            }],
            "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": name } }],
        },
    })
}

impl TestCluster {
    fn start(
        file_system: VolumeFileSystem,
        kube: KubeBuilder,
        furnish: impl FnOnce(&Kube, GuestBuilder) -> Result<GuestBuilder>,
    ) -> Result<Self> {
        let _turn = EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner);
        let kube = kube.start().context("start a control plane")?;
        let node = GuestNode::builder()
            // The kubelet collects volume statistics frequently, not every minute.
            .with_kubelet_setting("volumeStatsAggPeriod", "2s")
            .configure_guest(|guest| furnish(&kube, guest.with_disk(8 << 30)))?
            .join(&kube)
            .context("join a node")?;
        let program = match file_system {
            VolumeFileSystem::Xfs => "mkfs.xfs",
            VolumeFileSystem::Ext4 => "mkfs.ext4",
        };
        let make = readme_command("File system", program)?.replace("DEVICE", DEVICE);
        node.run_shell(&format!("set -e; modprobe loop; {make}; mkdir {VOLUMES}"))
            .with_context(|| format!("make {file_system:?}"))?;
        let cluster = Self { node, kube, file_system, _turn };
        cluster.mount_volumes()?;
        cluster.node.run_shell(&readme_command("File system", "chmod")?)?;
        Ok(cluster)
    }

    /// Mounts the disk for volumes.
    pub(crate) fn mount_volumes(&self) -> Result<()> {
        let mount = readme_command("File system", "mount ")?.replace("DEVICE", DEVICE);
        self.node.run_shell(&mount).map(drop)
    }

    /// Runs `ctr images` on the node.
    pub(crate) fn run_ctr(&self, arguments: &[&str]) -> Result<()> {
        let mut command = Command::new("ctr");
        command.args(["--namespace", "k8s.io", "images"]).args(arguments);
        self.node.guest().command_output(&command, TIMEOUT).map(drop)
    }

    pub(crate) fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        command_output(self.kube.kubectl_command().args(arguments).current_dir(ROOT))
    }

    pub(crate) fn apply(&self, manifests: &[Value]) -> Result<()> {
        let manifests: Vec<_> = manifests.iter().map(Value::to_string).collect();
        self.kube.apply_manifests(&manifests.join("\n---\n"))
    }

    pub(crate) fn wait_for(
        &self,
        kind: &str,
        name: &str,
        is_so: impl FnMut(&Value) -> bool,
    ) -> Result<Value> {
        self.kube.wait_for_object_within(TIMEOUT, kind, name, is_so)
    }

    /// Waits until the kubelet has registered the driver.
    pub(crate) fn wait_driver_registered(&self) -> Result<()> {
        let node = self.node.name();
        let is_known = |csi_node: &Value| {
            let mut drivers = csi_node["spec"]["drivers"].as_array().into_iter().flatten();
            drivers.any(|driver| driver["name"] == DRIVER && driver["nodeID"] == node)
        };
        self.wait_for("csinode", node, is_known).map(drop)
    }

    /// Waits until a claim is bound, and gives the name of its volume.
    pub(crate) fn wait_bound(&self, claim: &str) -> Result<String> {
        let claim = self.wait_for("pvc", claim, |claim| claim["status"]["phase"] == "Bound")?;
        claim["spec"]["volumeName"].as_str().map(str::to_owned).context("a bound claim has a volume")
    }

    /// Waits until all containers of a pod are ready.
    pub(crate) fn wait_running(&self, pod: &str) -> Result<()> {
        let are_ready = |pod: &Value| {
            let statuses = pod["status"]["containerStatuses"].as_array();
            statuses.is_some_and(|all| !all.is_empty() && all.iter().all(|one| one["ready"] == true))
        };
        self.wait_for("pod", pod, are_ready).map(drop)
    }

    /// Waits until an object of the namespace `default`, or of none, is deleted.
    pub(crate) fn wait_gone(&self, kind: &str, name: &str) -> Result<()> {
        let timeout = format!("--timeout={}s", TIMEOUT.as_secs());
        self.kubectl(&["wait", kind, name, "--for=delete", &timeout]).map(drop)
    }

    /// Deletes an object, and waits until it is gone.
    pub(crate) fn delete(&self, kind: &str, name: &str) -> Result<()> {
        self.kube.delete_object(kind, name)?;
        self.wait_gone(kind, name)
    }

    /// Runs a script in a container of a pod of the namespace `default`.
    pub(crate) fn exec(&self, pod: &str, container: &str, script: &str) -> Result<String> {
        let output = self.kubectl(&["exec", pod, "--container", container, "--", "sh", "-c", script]);
        output.with_context(|| format!("run {script:?} in {pod}/{container}"))
    }

    /// The log of provisionerd since its last start.
    pub(crate) fn daemon_log(&self) -> Result<String> {
        self.kubectl(&["logs", "--namespace=nodekeel", "daemonset/provisionerd"])
    }

    /// Kills provisionerd, and waits until the kubelet has started it again.
    pub(crate) fn restart_daemon(&self) -> Result<()> {
        self.node.run_shell("kill -KILL $(pidof provisionerd)")?;
        let ours = "--selector=app.kubernetes.io/name=provisionerd";
        let pod = self.kubectl(&["get", "pods", "--namespace=nodekeel", ours, "--output=name"])?;
        let is_back = |pod: &Value| {
            let status = &pod["status"]["containerStatuses"][0];
            status["lastState"]["terminated"]["exitCode"] == 137 && status["ready"] == true
        };
        self.wait_for("pod", &pod.trim().replace("pod/", "nodekeel/"), is_back).map(drop)
    }

    /// The hard limits in the kernel, in KiB and in files.
    pub(crate) fn kernel_limits(&self) -> Result<Vec<(u64, u64)>> {
        let foreign = if self.file_system == VolumeFileSystem::Ext4 { "-f" } else { "" };
        let report = format!("xfs_quota {foreign} -x -c 'report -p -n -N -b -i' {VOLUMES}");
        let mut limits = Vec::new();
        for line in self.node.run_shell(&report)?.lines().filter(|line| line.starts_with('#')) {
            // `#ID`, and twice `used soft hard warnings [grace]`.
            let fields: Vec<_> = line.split_whitespace().collect();
            let [_, _, _, kib, _, _, _, _, files, ..] = fields[..] else { bail!("read {line:?}") };
            limits.push((kib.parse()?, files.parse()?));
        }
        limits.retain(|limits| *limits != (0, 0));
        limits.sort_unstable();
        Ok(limits)
    }

    /// The directories of volumes and snapshots, in use, being created, and being erased, and their marks.
    pub(crate) fn volume_directories(&self) -> Result<Vec<String>> {
        const PLACES: &str = "volumes/* snapshots/* kinds/* .unpublished/* .new/* .trash/*";
        let text = self.node.run_shell(&format!("cd {VOLUMES}; ls -d {PLACES} 2>/dev/null; true"))?;
        Ok(text.lines().map(String::from).collect())
    }

    /// Waits until no directory and no limit of a volume is left.
    pub(crate) fn wait_nothing_left(&self) -> Result<()> {
        self.wait_equal("the directories to go", &Vec::new(), || self.volume_directories())?;
        self.wait_equal("the limits to go", &Vec::new(), || self.kernel_limits())
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
}

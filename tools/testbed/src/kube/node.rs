//! A real node, in a guest.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::access::SEEN_FROM_GUEST;
use super::image::{self, BUSYBOX_IMAGE, ContainerImage};
use super::{Kube, KubeUser};
use crate::guest::{self, GuestTask};
use crate::{Guest, ReservedPort, ScratchDir, gotool, reserve_port, tools};

/// The name of a node unless it is [given another](GuestNodeBuilder::with_name), and the node that every control plane
/// authorizes: others need their [`KubeUser::for_node`].
pub const GUEST_NODE: &str = "guest";

const STEP_WITHIN: Duration = Duration::from_secs(60);
/// An emulated processor is five to ten times slower than the machine's, which may be busy.
const READY_WITHIN: Duration = Duration::from_secs(180);
/// The guest's address in user networking.
const ADDRESS: &str = "10.0.2.15";
const IMAGES: &str = "/usr/lib/nodekeel/images";
const CNI_PLUGINS: [&str; 3] = ["bridge", "host-local", "loopback"];
const CNI_DIRECTORY: &str = "/usr/lib/cni";
const PREPARE: &str = include_str!("node/prepare.sh");
const PREPARE_AT: &str = "/usr/lib/nodekeel/prepare";
const IMPORT_AT: &str = "/usr/lib/nodekeel/import";
const IMPORT: &str = include_str!("node/import.sh");
const CONTAINERD_CONFIG: &str = include_str!("node/containerd.toml");
const NETWORK: &str = include_str!("node/network.json");

/// The parts of a node; ends with [`join`](Self::join) or [`boot`](Self::boot).
#[derive(Clone, Debug)]
#[must_use = "a node exists once it has booted"]
pub struct GuestNodeBuilder {
    name: String,
    disk_bytes: u64,
    images: Vec<PathBuf>,
    settings: Value,
    guest_builder: guest::GuestBuilder,
}

/// A node whose kubelet and containerd run in a guest with a private kernel.
///
/// All below `/var/lib` is on an XFS that enforces project quotas. Pods on the node's network and on a bridge
/// reach the API at its service address, 10.0.0.1. It has the images of its builder and [`BUSYBOX_IMAGE`];
/// pods must not pull (`imagePullPolicy: Never`).
#[derive(Debug)]
pub struct GuestNode {
    name: String,
    kubelet: Option<GuestTask>,
    containerd: Option<GuestTask>,
    guest: Guest,
    /// The kubelet's port, in the guest and at this machine's loopback interface.
    port: ReservedPort,
    _images: ScratchDir,
}

impl GuestNode {
    /// A node named [`GUEST_NODE`] with 1.5 GiB of memory and a disk of 8 GiB.
    pub fn builder() -> GuestNodeBuilder {
        GuestNodeBuilder {
            name: GUEST_NODE.to_owned(),
            disk_bytes: 8 << 30,
            images: Vec::new(),
            settings: json!({}),
            guest_builder: Guest::builder().with_memory(1536 << 20),
        }
    }

    /// Its name, and its host name's label.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The guest.
    pub fn guest(&self) -> &Guest {
        &self.guest
    }

    /// The kubelet's command line, in the guest of the node [`GUEST_NODE`].
    pub fn kubelet_command() -> Vec<String> {
        Self::kubelet_command_of(GUEST_NODE)
    }

    fn kubelet_command_of(name: &str) -> Vec<String> {
        let fixed = [
            "/usr/bin/kubelet",
            "--config=/etc/kubernetes/kubelet.json",
            "--kubeconfig=/etc/kubernetes/kubeconfig",
        ];
        let own = [format!("--hostname-override={name}"), format!("--node-ip={ADDRESS}")];
        fixed.map(String::from).into_iter().chain(own).collect()
    }

    /// Runs a shell script in the guest to its end and gives its output.
    ///
    /// # Errors
    /// It fails, or takes longer than a minute.
    pub fn run_shell(&self, script: &str) -> Result<String> {
        self.guest.command_output(Command::new("sh").args(["-c", script]), STEP_WITHIN)
    }

    /// The last lines of a log: `kubelet` or `containerd`.
    ///
    /// # Errors
    /// The guest does not answer.
    pub fn tail_log(&self, daemon: &str) -> Result<String> {
        self.run_shell(&format!("tail -n 30 /var/log/{daemon}.log"))
    }

    /// Waits until the API server has this node as ready.
    ///
    /// # Errors
    /// It isn't in time; with the last lines of the kubelet that [`start_kubelet`](Self::start_kubelet) has started.
    pub fn wait_ready(&self, kube: &Kube) -> Result<()> {
        kube.wait_for_object_within(READY_WITHIN, "node", &self.name, is_ready)
            .with_context(|| self.last_words("kubelet"))
            .map(drop)
    }

    /// Kills the kubelet (SIGKILL); pods keep running. Does nothing where it doesn't run.
    ///
    /// # Errors
    /// The guest does not answer.
    pub fn kill_kubelet(&mut self) -> Result<()> {
        let Some(kubelet) = self.kubelet.take() else { return Ok(()) };
        kubelet.send_signal("KILL")?;
        kubelet.wait_for_exit(STEP_WITHIN, |_| {}).map(drop)
    }

    /// Starts the kubelet, and waits until it answers; it finds its pods a moment later.
    ///
    /// # Errors
    /// It does not answer; with the last lines of its log.
    pub fn start_kubelet(&mut self) -> Result<()> {
        let port = self.port.number();
        let command = Self::kubelet_command_of(&self.name).join(" ");
        self.kubelet = Some(self.start_script(&format!("exec {command} >>/var/log/kubelet.log 2>&1"))?);
        let probe = format!("until nc {ADDRESS} {port} </dev/null >/dev/null 2>&1; do usleep 50000; done");
        self.guest
            .command_output(Command::new("sh").args(["-c", &probe]), READY_WITHIN)
            .with_context(|| self.last_words("kubelet"))?;
        Ok(())
    }

    fn start_containerd(&mut self) -> Result<()> {
        self.containerd = Some(self.start_script("exec containerd >/var/log/containerd.log 2>&1")?);
        // It creates the socket when it listens.
        self.run_shell("until [ -S /run/containerd/containerd.sock ]; do usleep 20000; done")
            .with_context(|| self.last_words("containerd"))?;
        Ok(())
    }

    fn start_script(&self, script: &str) -> Result<GuestTask> {
        self.guest.start_command(Command::new("sh").args(["-c", script]))
    }

    fn last_words(&self, daemon: &str) -> String {
        let log = self.tail_log(daemon).unwrap_or_else(|error| format!("{error:#}"));
        format!("the last lines of {daemon}:\n{log}")
    }
}

impl GuestNodeBuilder {
    /// Sets its name; the control plane needs the user [`KubeUser::for_node`] of it.
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Adds an image: a tar, or a directory with an OCI layout.
    pub fn with_image(mut self, image: impl Into<PathBuf>) -> Self {
        self.images.push(image.into());
        self
    }

    /// Sets the size in bytes of the disk of `/var/lib`.
    pub fn with_disk(mut self, bytes: u64) -> Self {
        self.disk_bytes = bytes;
        self
    }

    /// Sets a field of the kubelet's configuration (`kubelet.config.k8s.io/v1beta1`).
    pub fn with_kubelet_setting(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.settings[field] = value.into();
        self
    }

    /// Changes the guest: memory, disks, files.
    ///
    /// # Errors
    /// Those of `change`.
    pub fn configure_guest(
        mut self,
        change: impl FnOnce(guest::GuestBuilder) -> Result<guest::GuestBuilder>,
    ) -> Result<Self> {
        self.guest_builder = change(self.guest_builder)?;
        Ok(self)
    }

    /// Boots it, joins it to the control plane, and waits until it is ready and has its images.
    ///
    /// # Errors
    /// A tool is missing on this machine, or a step failed in the guest; with the last lines of its output.
    pub fn join(self, kube: &Kube) -> Result<GuestNode> {
        let mut node = self.boot(kube)?;
        node.start_containerd()?;
        let import = node.start_script(IMPORT_AT)?;
        node.start_kubelet()?;
        let mut said = String::new();
        let code =
            import.wait_for_exit(READY_WITHIN, |line| said.extend([line, "\n"])).context("import images")?;
        ensure!(code == 0, "import images: {said}");
        node.wait_ready(kube)?;
        Ok(node)
    }

    /// Boots it and starts no daemon, for a caller whose program does: kubelet and containerd are in its `PATH`,
    /// their configuration is in `/etc/kubernetes/kubelet.json` and `/etc/kubernetes/kubeconfig`, and the
    /// kubelet's directory is empty.
    ///
    /// # Errors
    /// A tool is missing on this machine, or the guest can't be prepared; with the last lines of its output.
    pub fn boot(self, kube: &Kube) -> Result<GuestNode> {
        let (port, images) = (reserve_port()?, ScratchDir::new()?);
        let guest = self.add_node_files(kube, &port, &images)?.boot().context("boot the node")?;
        let node =
            GuestNode { name: self.name, kubelet: None, containerd: None, guest, port, _images: images };
        node.run_shell(&format!("{PREPARE_AT} {SEEN_FROM_GUEST} {}", kube.api_port()))
            .context("prepare the node")?;
        Ok(node)
    }

    fn add_node_files(
        &self,
        kube: &Kube,
        port: &ReservedPort,
        images: &ScratchDir,
    ) -> Result<guest::GuestBuilder> {
        let runtime = gotool::CONTAINERD.program_directory()?;
        let mut guest = self.guest_builder.clone().with_disk(self.disk_bytes);
        let loopback = port.socket_address();
        guest = guest.forward_port(loopback.into(), loopback.port());
        for program in ["containerd", "containerd-shim-runc-v2", "ctr"] {
            guest = guest.add_file(Path::new("/usr/bin").join(program), runtime.join(program));
        }
        guest = guest.add_file("/usr/bin/kubelet", kube.programs().program_path("kubelet"));
        guest = guest.add_program("/usr/bin/runc", tools::find_tool(tools::RUNC)?);
        for plugin in CNI_PLUGINS {
            let source = Path::new(CNI_DIRECTORY).join(plugin);
            ensure!(
                source.exists(),
                "{} is missing: install Debian's {}",
                source.display(),
                "containernetworking-plugins"
            );
            guest = guest.add_program(Path::new("/opt/cni/bin").join(plugin), source);
        }
        for (number, archive) in self.write_archives(images)?.into_iter().enumerate() {
            guest = guest.add_file(Path::new(IMAGES).join(format!("{number}.tar")), archive);
        }
        let kubeconfig = kube.kubeconfig_for_guest(&KubeUser::for_node(&self.name).name)?;
        Ok(guest
            .add_text(PREPARE_AT, 0o755, PREPARE)
            .add_text(IMPORT_AT, 0o755, IMPORT)
            .add_text("/etc/kubernetes/kubeconfig", 0o600, kubeconfig)
            .add_text("/etc/kubernetes/kubelet.json", 0o644, self.kubelet_config(port).to_string())
            .add_text("/etc/containerd/config.toml", 0o644, CONTAINERD_CONFIG.replace("PAUSE", BUSYBOX_IMAGE))
            .add_text("/etc/cni/net.d/10-pods.conflist", 0o644, NETWORK))
    }

    /// The images as archives.
    fn write_archives(&self, scratch: &ScratchDir) -> Result<Vec<PathBuf>> {
        let busybox = scratch.path().join("busybox.tar");
        ContainerImage::busybox()?.write_archive(&busybox)?;
        let mut archives = vec![busybox];
        for (number, image) in self.images.iter().enumerate() {
            let packed = scratch.path().join(format!("{number}.tar"));
            if image.is_dir() {
                image::archive_layout(image, &packed)?;
                archives.push(packed);
            } else {
                archives.push(image.clone());
            }
        }
        Ok(archives)
    }

    fn kubelet_config(&self, port: &ReservedPort) -> Value {
        let mut config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "port": port.number(),
            // It is reached from this machine's loopback interface alone.
            "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "cgroupDriver": "cgroupfs", "failSwapOn": false, "resolvConf": "",
            // A kubelet reports its first readiness at once. Each further report takes an emulated processor, and what
            // watches the Node, their time.
            "nodeStatusUpdateFrequency": "10s",
            // Evict nothing for the guest's small size.
            "evictionHard": {"memory.available": "10Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
        });
        if let (Some(config), Some(settings)) = (config.as_object_mut(), self.settings.as_object()) {
            config.extend(settings.clone());
        }
        config
    }
}

fn is_ready(node: &Value) -> bool {
    let conditions = node["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True"))
}

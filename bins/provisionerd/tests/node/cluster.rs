//! A control plane, a node in a guest, and provisionerd on it.

use std::fmt::Display;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use testbed::{GuestNode, Kube, KubeBuilder, guest, output, wait_until};

use crate::disk::FileSystem;
use crate::times::Times;

pub(crate) const DRIVER: &str = "volumes.nodekeel";
/// What takes longer hangs: the guest's processors are emulated, on a machine that may be busy.
pub(crate) const WITHIN: Duration = Duration::from_secs(240);

const IMAGE: &str = "NODEKEEL_PROVISIONERD_IMAGE";
const IMAGE_AT: &str = "/usr/lib/provisionerd.tar";
const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy");

/// Two nodes at a time would be more than twice as slow.
static TURN: Mutex<()> = Mutex::new(());

/// Everything that runs; gone when this is dropped.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) node: GuestNode,
    pub(crate) kube: Kube,
    pub(crate) file_system: FileSystem,
    pub(crate) times: Times,
    _turn: MutexGuard<'static, ()>,
}

/// Runs a test on a cluster, on which provisionerd is ready; a failure comes with what everybody said last.
pub(crate) fn with_cluster(file_system: FileSystem, test: impl FnOnce(&mut Cluster) -> Result<()>) {
    let furnish = |_: &Kube| image().map(|image| vec![(IMAGE_AT, Content::File(image))]);
    let kube = Kube::builder().service_accounts();
    with_node(file_system, kube, furnish, |cluster| cluster.deploy().and_then(|()| test(cluster)));
}

/// Runs a test on a cluster with a node, on which these files are besides and a disk for volumes is mounted.
pub(crate) fn with_node(
    file_system: FileSystem,
    kube: KubeBuilder,
    furnish: impl FnOnce(&Kube) -> Result<Vec<(&'static str, Content)>>,
    test: impl FnOnce(&mut Cluster) -> Result<()>,
) {
    let cluster = Cluster::start(file_system, kube, furnish);
    let mut cluster = cluster.unwrap_or_else(|error| panic!("{error:#}"));
    if let Err(error) = test(&mut cluster) {
        panic!("{error:#}\n{}", cluster.last_words());
    }
}

/// What a file of the node holds.
pub(crate) enum Content {
    File(PathBuf),
    /// A program of this machine, with its libraries.
    Program(PathBuf),
    /// For root alone.
    Text(String),
}

/// The image's file.
fn image() -> Result<PathBuf> {
    let told = std::env::var_os(IMAGE).map(PathBuf::from);
    let image = told
        .with_context(|| format!("make the image (cargo xtask oci provisionerd) and name it in {IMAGE}"))?;
    ensure!(image.is_file(), "{IMAGE} names {}, where no image is", image.display());
    Ok(image)
}

impl Cluster {
    fn start(
        file_system: FileSystem,
        kube: KubeBuilder,
        furnish: impl FnOnce(&Kube) -> Result<Vec<(&'static str, Content)>>,
    ) -> Result<Self> {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        println!("provisionerd on {file_system:?}");
        let times = Times::start();
        let kube = kube.start().context("start a control plane")?;
        times.took("control plane");
        let files = furnish(&kube)?;
        let put = |guest: guest::Builder| {
            files.into_iter().fold(guest.disk(8 << 30), |guest, (at, content)| match content {
                Content::File(source) => guest.file(at, source),
                Content::Program(source) => guest.program(at, source),
                Content::Text(text) => guest.text(at, 0o600, text),
            })
        };
        let node = GuestNode::builder()
            // What volumes hold is asked for all the time, not every minute.
            .kubelet_setting("volumeStatsAggPeriod", "2s")
            .guest(put)
            .join(&kube)
            .context("join a node")?;
        times.took("node ready");
        file_system.mount(&node)?;
        times.took("file system");
        Ok(Self { node, kube, file_system, times, _turn })
    }

    /// Goes through the README of `deploy/`.
    fn deploy(&mut self) -> Result<()> {
        let import = ["--namespace", "k8s.io", "images", "import", IMAGE_AT];
        self.node.guest().output(Command::new("ctr").args(import), WITHIN)?;
        self.times.took("image imported");
        let policy = format!("{DEPLOY}/policy/own-node.yaml");
        output(self.kube.kubectl().args(["apply", "--filename", &policy]))?;
        output(self.kube.kubectl().args(["apply", "--kustomize", DEPLOY]))?;
        let is_ready = |set: &Value| set["status"]["numberReady"] == 1;
        self.kube.until_within(WITHIN, "daemonset", "nodekeel/provisionerd", is_ready)?;
        self.driver_known()?;
        self.times.took("provisionerd ready");
        Ok(())
    }

    /// Waits until the kubelet knows the driver.
    pub(crate) fn driver_known(&self) -> Result<()> {
        let is_known = |node: &Value| {
            let mut drivers = node["spec"]["drivers"].as_array().into_iter().flatten();
            drivers.any(|driver| driver["name"] == DRIVER && driver["nodeID"] == self.node.name())
        };
        self.kube.until_within(WITHIN, "csinode", self.node.name(), is_known).map(drop)
    }

    /// provisionerd's pod, as `NAMESPACE/NAME`.
    pub(crate) fn pod(&self) -> Result<String> {
        let pods = self.kube.list("pod")?;
        let ours = pods.iter().find(|pod| pod["metadata"]["namespace"] == "nodekeel");
        let name = ours.and_then(|pod| pod["metadata"]["name"].as_str());
        Ok(format!("nodekeel/{}", name.context("provisionerd has no pod")?))
    }

    /// What provisionerd has said, since it was started last.
    pub(crate) fn said(&self) -> Result<String> {
        output(self.kube.kubectl().args(["logs", "--namespace=nodekeel", "daemonset/provisionerd"]))
    }

    /// Runs a script in a container of the namespace `default`.
    pub(crate) fn exec(&self, pod: &str, script: &str) -> Result<String> {
        output(self.kube.kubectl().args(["exec", pod, "--", "sh", "-c", script]))
    }

    /// Waits until nothing of that name is there.
    pub(crate) fn gone(&self, kind: &str, name: &str) -> Result<()> {
        let mut kubectl = self.kube.kubectl();
        kubectl.args(["wait", kind, name, "--for=delete", &format!("--timeout={}s", WITHIN.as_secs())]);
        output(&mut kubectl).map(drop)
    }

    /// Waits for what nobody reports: for what is seen in the guest, or what a log says.
    pub(crate) fn eventually<T: PartialEq + std::fmt::Debug>(
        &self,
        what: &str,
        wanted: &T,
        look: impl Fn() -> Result<T>,
    ) -> Result<()> {
        wait_until(WITHIN, what, || {
            let seen = look()?;
            ensure!(seen == *wanted, "{seen:?} instead of {wanted:?}");
            Ok(())
        })
    }

    fn last_words(&self) -> String {
        fn text(what: &str, said: Result<impl Display>) -> String {
            said.map_or_else(|error| format!("== {what}: {error:#}\n"), |text| format!("== {what}\n{text}\n"))
        }
        let kubectl = |arguments: &[&str]| output(self.kube.kubectl().args(arguments));
        [
            text("provisionerd", self.said()),
            text("metrics", self.node.shell("wget -qO- http://127.0.0.1:9810/metrics | grep -v '^#'")),
            text("connections", self.node.shell("netstat -tn")),
            text("pods", kubectl(&["describe", "pods", "--all-namespaces"])),
            text("claims", kubectl(&["get", "pvc,pv,csinodes", "--all-namespaces", "--output=wide"])),
            text("kubelet", self.node.log("kubelet")),
        ]
        .concat()
    }
}

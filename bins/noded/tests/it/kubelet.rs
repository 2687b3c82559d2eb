//! A node in a guest, whose kernel has all of cgroup v2: its kubelet is a service, containerd and provisioner are its
//! parts, and they join a control plane on this machine.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use testbed::guest::{GuestBuilder, GuestTask};
use testbed::{BUSYBOX_IMAGE, GUEST_NODE, GuestNode, Kube};

use crate::harness::nodectl_path;

/// Timeout of every wait: the guest's processors are emulated, on a machine that may be busy.
const TIMEOUT: Duration = Duration::from_secs(240);
const CONFIG_AT: &str = "/etc/nodekeel/noded.toml";
const PROVISIONER_KUBECONFIG_AT: &str = "/etc/kubernetes/provisioner.conf";
const MANIFESTS_AT: &str = "/etc/kubernetes/manifests";
/// The kubelet starts when a line is written to it.
const GATE: &str = "/run/gate";
const KUBELET: &str = "root.service.kubelet";

fn node_config() -> String {
    let kubelet = GuestNode::kubelet_command();
    format!(
        r#"
[node]
name = "{GUEST_NODE}"
data = "/var/lib/nodekeel"

[control]
socket = "/run/nodekeel.sock"

[log]
# More than the dump of a kubelet's goroutines.
bytes_per_dn = 8388608

[services.etcd]
enable = false

[services.containerd.cri]
sandbox_image = "{BUSYBOX_IMAGE}"

[[service]]
name = "gate"
command = ["/bin/sh", "-c", "read line <{GATE}; exit 0"]
readiness = "exit"

[[service]]
name = "kubelet"
command = {kubelet:?}
environment = {{ PATH = "/usr/sbin:/usr/bin:/sbin:/bin" }}
depends_on = ["containerd", "gate"]
readiness = "notify"
watchdog = "30s"
log = "klog"

[[service]]
name = "hog"
command = ["/usr/bin/dd", "if=/dev/zero", "of=/dev/null", "bs=134217728", "count=1"]
limits = {{ memory_max = "32MiB" }}
restart = "never"

[provisioner]
kubeconfig = "{PROVISIONER_KUBECONFIG_AT}"
"#
    )
}

/// noded in a guest.
struct NodedInGuest {
    noded: GuestTask,
    node: GuestNode,
    kube: Kube,
}

impl NodedInGuest {
    fn start() -> Result<Self> {
        let kube = Kube::start().context("start a control plane")?;
        let node = GuestNode::builder()
            .with_kubelet_setting("staticPodPath", MANIFESTS_AT)
            .configure_guest(|guest| add_files(guest, &kube))?
            .boot(&kube)?;
        node.run_shell(&format!("mkfifo {GATE}"))?;
        link_containerd_socket(&node)?;
        let noded = node.guest().start_command(Command::new("noded").args(["run", "--config", CONFIG_AT]))?;
        noded.wait_for_line("control socket at", TIMEOUT).context("start noded")?;
        Ok(Self { noded, node, kube })
    }

    fn nodectl(&self, args: &[&str]) -> Command {
        let mut command = Command::new("nodectl");
        command.args(["--socket", "/run/nodekeel.sock"]).args(args);
        command
    }

    /// The output of nodectl with any exit code.
    fn ask(&self, args: &[&str]) -> Result<String> {
        let mut text = String::new();
        self.node.guest().run_command(&self.nodectl(args), TIMEOUT, |line| text.extend([line, "\n"]))?;
        Ok(text)
    }

    /// The first value of a nodectl that streams JSON which satisfies the predicate.
    fn find_value(&self, args: &[&str], mut wanted: impl FnMut(&Value) -> bool) -> Result<Value> {
        let stream = self.node.guest().start_command(&self.nodectl(&[&["-o", "json"], args].concat()))?;
        let (end, mut last) = (Instant::now() + TIMEOUT, None);
        let found = loop {
            let line = stream.wait_for_line("", end.saturating_duration_since(Instant::now()));
            let line = line.with_context(|| format!("nodectl {args:?}: the last value is {last:?}"))?;
            let value = serde_json::from_str(&line).with_context(|| format!("parse {line:?}"))?;
            if wanted(&value) {
                break value;
            }
            last = Some(value);
        };
        stream.send_signal("KILL")?;
        Ok(found)
    }

    /// Waits for an event of a run.
    fn wait_for_event(&self, dn: &str, generation: u64, change: &str) -> Result<Value> {
        self.find_value(&["events", "-f"], |event| {
            event["dn"] == dn && event["generation"] == generation && event["change"] == change
        })
    }

    fn diagnostics(&self) -> String {
        let text = |args: &[&str]| self.ask(args).unwrap_or_else(|error| format!("{error:#}"));
        [text(&["tree"]), text(&["events"]), text(&["logs", "root", "--children", "-n", "200"])].concat()
    }
}

fn add_files(guest: GuestBuilder, kube: &Kube) -> Result<GuestBuilder> {
    Ok(guest
        .add_program("/usr/bin/noded", env!("CARGO_BIN_EXE_noded"))
        .add_program("/usr/bin/nodectl", nodectl_path())
        .add_text(CONFIG_AT, 0o644, node_config())
        .add_text(PROVISIONER_KUBECONFIG_AT, 0o600, kube.kubeconfig_for_guest("admin")?)
        .add_text(format!("{MANIFESTS_AT}/broken.yaml"), 0o644, "no pod\n"))
}

/// Links the path at which the kubelet expects containerd to the socket that `noded check` prints.
fn link_containerd_socket(node: &GuestNode) -> Result<()> {
    let plan = node.run_shell(&format!("noded check --config {CONFIG_AT}"))?;
    let line = plan.lines().find(|line| line.starts_with("root.containerd "));
    let socket = line.and_then(|line| line.split_once("API on ")?.1.split_once(','));
    let (socket, _) = socket.with_context(|| format!("find containerd's socket in {plan}"))?;
    node.run_shell(&format!("mkdir -p /run/containerd; ln -s {socket} /run/containerd/containerd.sock"))?;
    Ok(())
}

/// A claim of the test, and its check.
type Step = (&'static str, fn(&NodedInGuest) -> Result<()>);

#[test]
#[ignore = "sampled: needs kube and a node"]
fn a_node_runs_its_kubelet_as_a_service_and_says_what_goes_wrong() {
    let started = Instant::now();
    let noded = NodedInGuest::start().unwrap_or_else(|error| panic!("{error:#}"));
    let steps: [Step; 6] = [
        ("the provisioner waits for the kubelet", the_provisioner_waits_for_the_kubelet),
        ("kubelet and provisioner are ready", kubelet_and_provisioner_become_ready),
        ("the kubelet's errors", the_errors_of_the_kubelet_are_errors_of_its_log),
        ("out of memory", a_service_beyond_its_memory_is_reported_with_its_limit),
        ("the watchdog", a_kubelet_that_hangs_is_restarted_by_its_watchdog),
        ("the stop", noded_stops),
    ];
    println!("noded runs after {:?}", started.elapsed());
    for (name, step) in steps {
        if let Err(error) = step(&noded) {
            panic!("{name}: {error:#}\n{}", noded.diagnostics());
        }
        println!("{name}: done after {:?}", started.elapsed());
    }
}

fn the_provisioner_waits_for_the_kubelet(noded: &NodedInGuest) -> Result<()> {
    noded.find_value(&["tree", "--watch"], |tree| {
        let mut nodes = tree.as_array().into_iter().flatten();
        nodes.any(|node| {
            let reason = "the kubelet to create /var/lib/kubelet/pods: start the kubelet";
            node["dn"] == "root.provisioner" && node["waiting_for"].to_string().contains(reason)
        })
    })?;
    noded.node.run_shell(&format!("echo go >{GATE}")).map(drop)
}

fn kubelet_and_provisioner_become_ready(noded: &NodedInGuest) -> Result<()> {
    for dn in [KUBELET, "root.provisioner.csi", "root.provisioner"] {
        noded.wait_for_event(dn, 1, "ready")?;
    }
    noded.node.wait_ready(&noded.kube)?;
    noded.kube.wait_for_object_within(TIMEOUT, "csinode", GUEST_NODE, |node| {
        let mut drivers = node["spec"]["drivers"].as_array().into_iter().flatten();
        drivers.any(|driver| driver["name"] == "volumes.nodekeel")
    })?;
    Ok(())
}

/// The manifest of a static pod that is none.
fn the_errors_of_the_kubelet_are_errors_of_its_log(noded: &NodedInGuest) -> Result<()> {
    let entry = noded.find_value(&["logs", "-f", "--min-level", "error", KUBELET], |entry| {
        entry["message"] == "Could not process manifest file"
    })?;
    ensure!(entry["level"] == "error", "{entry}");
    ensure!(entry["fields"].to_string().contains("broken.yaml"), "{entry}");
    Ok(())
}

fn a_service_beyond_its_memory_is_reported_with_its_limit(noded: &NodedInGuest) -> Result<()> {
    noded.wait_for_event("root.service.hog", 1, "exited")?;
    let status = noded.ask(&["status", "root.service.hog"])?;
    ensure!(status.contains("killed by SIGKILL: out of memory, its limit is 32 MiB"), "{status}");
    Ok(())
}

fn a_kubelet_that_hangs_is_restarted_by_its_watchdog(noded: &NodedInGuest) -> Result<()> {
    noded.ask(&["signal", KUBELET, "STOP"])?;
    let exit = noded.wait_for_event(KUBELET, 1, "exited")?;
    let reason = "the process did not report to its watchdog (WATCHDOG=1) within 30s, and was aborted";
    ensure!(exit["detail"].to_string().contains(reason), "{exit}");
    // A Go program that is aborted logs where it hangs.
    let is_abort = |entry: &Value| entry["message"] == "SIGABRT: abort";
    noded.find_value(&["logs", "-f", "--min-level", "fatal", KUBELET], is_abort)?;
    noded.wait_for_event(KUBELET, 2, "ready").map(drop)
}

fn noded_stops(noded: &NodedInGuest) -> Result<()> {
    noded.node.run_shell("kill $(pidof noded)")?;
    let mut said = String::new();
    let code = noded.noded.wait_for_exit(TIMEOUT, |line| said.extend([line, "\n"]))?;
    ensure!(code == 0, "noded exited with {code}: {said}");
    Ok(())
}

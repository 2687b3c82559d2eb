//! `cargo xtask demo`: a node bootstraps a cluster on a real etcd, runs a container of a preseeded image on a
//! real containerd, loses etcd, is killed, and recovers all of it; then it makes a volume of a claim at a real API server.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use testbed::{
    BUSYBOX_IMAGE, ContainerImage, Daemon, KubePrograms, ScratchDir, command_output, leftovers, reserve_port,
    wait_until,
};

use crate::host_leftovers::HostLeftovers;
use crate::{run, setup, workspace};

mod disk;
mod node;
mod volumes;

use disk::DemoDisk;
use node::{DemoNode, TreeWatch};
use volumes::ControlPlane;

const READY_WITHIN: Duration = Duration::from_secs(30);
const STOPPED_WITHIN: Duration = Duration::from_secs(30);
/// The namespace of imported images.
const NAMESPACE: &str = "demo";
const ETCD: &str = "root.cluster.consensus.etcd";
const KEY: &str = "greeting";
const VALUE: &str = "written before the kill";

/// Sets up, builds, and runs a node; a wrong state is an error.
pub(crate) fn run() -> Result<()> {
    setup::install()?;
    let programs = workspace::build_node_programs()?;
    let clock = DemoClock(Instant::now());
    let before = HostLeftovers::find()?;
    let scratch = ScratchDir::new()?;
    let directory = scratch.path().to_owned();
    let disk = DemoDisk::attach(&directory, &directory.join("data"), &clock)?;
    let node = configure(&programs, &scratch, disk.as_ref(), &clock)?;
    let daemon = start(&node, &clock)?;
    let said = |daemon: &Daemon| format!("noded's output:\n{}", daemon.read_log().unwrap_or_default());
    show(&node, &clock).with_context(|| said(&daemon))?;
    let daemon = kill_noded(&node, daemon, &clock)?;
    show_again(&node, &clock).with_context(|| said(&daemon))?;

    // The first time, Kubernetes is built here, for minutes: the node has shown itself by then, and goes on.
    clock.print_step(
        "next, volumes for Kubernetes; the node goes on while its control plane is built and started",
    );
    KubePrograms::locate()?;
    let mut kubernetes = ControlPlane::start(&clock)?;
    stop(daemon, &clock)?;
    kubernetes.configure(&node, &clock)?;
    let daemon = start(&node, &clock)?;
    kubernetes.show_volume(&node, &mut TreeWatch::watch(&node)?, &clock).with_context(|| said(&daemon))?;
    stop(daemon, &clock)?;
    let home = kubernetes.home().context("a control plane has a home")?.to_owned();
    assert_nothing_left(&directory)?;
    drop((kubernetes, disk, scratch));
    assert_nothing_left(&home)?;
    for directory in [&directory, &home] {
        ensure!(!directory.exists(), "{} is left behind", directory.display());
    }
    let new = before.sweep()?;
    ensure!(new.is_empty(), "left behind: {new:?}");
    clock.print_step("noded exited with 0; no process, mount, cgroup, loop device or file is left");
    Ok(())
}

fn stop(mut daemon: Daemon, clock: &DemoClock) -> Result<()> {
    clock.print_step("stop the node with SIGTERM");
    let status = daemon.terminate(STOPPED_WITHIN)?.context("wait for noded's exit: it still runs")?;
    ensure!(status.success(), "noded exited with {status}:\n{}", daemon.read_log()?);
    Ok(())
}

fn assert_nothing_left(directory: &Path) -> Result<()> {
    let left = leftovers::find_processes(directory)?;
    ensure!(left.is_empty(), "processes are left behind: {left:?}");
    let mounts = leftovers::find_mounts(directory)?;
    ensure!(mounts.is_empty(), "mounts are left behind: {mounts:?}");
    Ok(())
}

/// Prints each step with the time since the start.
struct DemoClock(Instant);

impl DemoClock {
    fn print_step(&self, what: &str) {
        println!("\n[{:5.1} s] {what}", self.0.elapsed().as_secs_f64());
    }
}

/// A node that bootstraps a cluster, with an image to preseed.
fn configure(
    programs: &Path,
    scratch: &ScratchDir,
    disk: Option<&DemoDisk>,
    clock: &DemoClock,
) -> Result<DemoNode> {
    let (data, config) = (scratch.path().join("data"), scratch.path().join("noded.toml"));
    let images = scratch.path().join("images").join(NAMESPACE);
    fs::create_dir_all(&images).with_context(|| format!("create {}", images.display()))?;
    ContainerImage::busybox()?.write_archive(&images.join("busybox.tar"))?;
    let peer = reserve_port()?;
    let text = format!(
        "[node]\nname = {:?}\n\n[services.etcd]\npeer_port = {}\n\n\
         [services.containerd]\npreseed = {:?}\n\n[cluster]\naddress = \"127.0.0.1\"\nbootstrap = true\n",
        volumes::NODE,
        peer.number(),
        scratch.path().join("images")
    ) + &disk.map(DemoDisk::config).unwrap_or_default();
    let node = DemoNode { programs: programs.to_owned(), config, data, _etcd_peer: peer };
    node.write_config(&text)?;
    let found = node.check_config()?;
    let volume = found.lines().find(|line| line.starts_with("root.storage")).context("find root.storage")?;
    clock.print_step("noded check: where the node keeps its data, and what it found there");
    println!("    {volume}");
    Ok(node)
}

fn start(node: &DemoNode, clock: &DemoClock) -> Result<Daemon> {
    clock.print_step(&format!("start a node in {}", node.data.display()));
    let mut command = Command::new(node.programs.join("noded"));
    command.arg("run").arg("--config").arg(&node.config).arg("--data").arg(&node.data);
    if !run::is_root() {
        // Containerd needs root; noded logs that and runs the others.
        command.arg("--dev");
    }
    Daemon::start(command, ScratchDir::new()?, || {
        command_output(node.nodectl_command().arg("version")).map(drop)
    })
}

/// The services to wait for; the images are imported once the last of these is done.
fn services(clock: &DemoClock) -> Vec<&'static str> {
    if run::is_root() {
        return vec!["root.cluster", "root.containerd", "root.containerd.preseed"];
    }
    clock.print_step("not root: containerd is skipped");
    vec!["root.cluster"]
}

fn until_ready(tree: &mut TreeWatch, services: &[&str], clock: &DemoClock) -> Result<()> {
    clock.print_step(&format!("wait for {}", services.join(", ")));
    for service in services {
        tree.wait_until(READY_WITHIN, &format!("{service} is ready"), |tree| tree.is_ready(service))?;
        clock.print_step(&format!("{service} is ready"));
    }
    Ok(())
}

fn show(node: &DemoNode, clock: &DemoClock) -> Result<()> {
    let mut tree = TreeWatch::watch(node)?;
    let services = services(clock);
    until_ready(&mut tree, &services, clock)?;
    show_storage(node, clock)?;
    clock.print_step("the cluster that it has bootstrapped, and its members");
    for asked in ["status", "members"] {
        print!("{}", indent(&command_output(node.nodectl_command().args(["cluster", asked]))?));
    }
    put_and_get(node, clock)?;
    if run::is_root() {
        run_container(node, clock)?;
    }
    clock.print_step("the tree, as nodectl shows it");
    print!("{}", indent(&command_output(node.nodectl_command().arg("tree"))?));
    show_log(node, ETCD, clock)?;
    if run::is_root() {
        show_log(node, "root.containerd", clock)?;
    }
    kill_etcd(node, &mut tree, clock)
}

/// Runs a container of the preseeded image.
fn run_container(node: &DemoNode, clock: &DemoClock) -> Result<()> {
    let version = command_output(node.ctr_command()?.arg("version"))?;
    clock.print_step("containerd has answered Version");
    print!("{}", indent(&version));
    const SAYS: &str = "hello from a container";
    let arguments = ["run", "--rm", BUSYBOX_IMAGE, "demo", "/bin/busybox", "echo", SAYS];
    let said = command_output(node.ctr_command()?.args(["--namespace", NAMESPACE]).args(arguments))?;
    ensure!(said.trim_end() == SAYS, "the container wrote {said:?}");
    clock.print_step(&format!("a container of the preseeded {BUSYBOX_IMAGE} has written {SAYS:?}"));
    Ok(())
}

/// Kills noded like a power cut, and starts it again.
fn kill_noded(node: &DemoNode, mut daemon: Daemon, clock: &DemoClock) -> Result<Daemon> {
    let before = node.read_identity()?;
    clock.print_step(&format!("kill noded (pid {}) with SIGKILL", daemon.process_id()));
    let pid =
        i32::try_from(daemon.process_id()).ok().and_then(Pid::from_raw).context("noded has a process id")?;
    kill_process(pid, Signal::KILL).context("kill noded")?;
    daemon.wait_for_exit(STOPPED_WITHIN)?.context("wait for noded's exit: it still runs")?;
    drop(daemon);
    let daemon = start(node, clock)?;
    let mut tree = TreeWatch::watch(node)?;
    until_ready(&mut tree, &services(clock), clock)?;
    let after = node.read_identity()?;
    ensure!(before == after, "the node was {before:?}, and is {after:?}");
    let (name, cluster) = after;
    clock.print_step(&format!("it is node {name} of cluster {cluster}, as before"));
    show_storage(node, clock)?;
    Ok(daemon)
}

/// Shows the data volume, and what opened it.
fn show_storage(node: &DemoNode, clock: &DemoClock) -> Result<()> {
    clock.print_step("the data volume, as nodectl shows it");
    print!("{}", indent(&command_output(node.nodectl_command().args(["storage", "status"]))?));
    Ok(())
}

/// Checks the data from before the kill.
fn show_again(node: &DemoNode, clock: &DemoClock) -> Result<()> {
    let value = command_output(node.etcdctl_command()?.args(["get", "--print-value-only", KEY]))?;
    ensure!(value.trim_end() == VALUE, "etcd lost its data: {KEY} is {value:?}");
    clock.print_step(&format!("the data has survived: {KEY} = {VALUE:?}"));
    if run::is_root() {
        run_container(node, clock)?;
    }
    Ok(())
}

fn put_and_get(node: &DemoNode, clock: &DemoClock) -> Result<()> {
    command_output(node.etcdctl_command()?.args(["put", KEY, VALUE]))?;
    let got = command_output(node.etcdctl_command()?.args(["get", "--print-value-only", KEY]))?;
    ensure!(got.trim_end() == VALUE, "read {KEY} from etcd: it is {got:?}");
    clock.print_step(&format!("etcd has served a put and a get: {KEY} = {VALUE:?}"));
    Ok(())
}

/// Shows the newest log lines of a daemon, and checks that they have levels.
fn show_log(node: &DemoNode, dn: &str, clock: &DemoClock) -> Result<()> {
    clock.print_step(&format!("the log of {dn}"));
    print!("{}", indent(&command_output(node.nodectl_command().args(["logs", dn, "-n", "5", "--leveled"]))?));
    let entries = command_output(node.nodectl_command().args(["-o", "json", "logs", dn, "--leveled"]))?;
    let leveled = entries.lines().filter(|line| has_level(line)).count();
    ensure!(leveled > 0, "find a log line of {dn} with a level");
    println!("    … {leveled} lines with a level in all");
    Ok(())
}

fn has_level(line: &str) -> bool {
    let entry: Value = serde_json::from_str(line).unwrap_or_default();
    entry["kind"] == "leveled" && entry["level"].is_string()
}

fn kill_etcd(node: &DemoNode, tree: &mut TreeWatch, clock: &DemoClock) -> Result<()> {
    let pid = node.etcd_pid()?;
    let generation = tree.generation(ETCD).context("find etcd in the tree")?;
    clock.print_step(&format!("kill etcd (pid {pid}) with SIGKILL"));
    let killed = Instant::now();
    kill_process(Pid::from_raw(pid).context("a process has a positive id")?, Signal::KILL)
        .context("kill etcd")?;
    tree.wait_until(READY_WITHIN, "etcd is ready again", |tree| {
        tree.generation(ETCD).is_some_and(|now| now > generation) && tree.is_ready(ETCD)
    })?;
    clock.print_step(&format!(
        "etcd is ready again after {:.1} s; its record:",
        killed.elapsed().as_secs_f64()
    ));
    // It exits with 6: etcd counts as failing until it has been ready for ten seconds.
    let status = node.nodectl_command().args(["status", ETCD]).output().context("run nodectl")?;
    print!("{}", indent(&String::from_utf8_lossy(&status.stdout)));
    let signal = tree.last_signal(ETCD);
    ensure!(signal == Some(9), "the exit record has signal {signal:?} instead of SIGKILL");
    // Its port may be open a moment before it has a leader.
    let value = wait_until(READY_WITHIN, "etcd to answer", || {
        command_output(node.etcdctl_command()?.args(["get", "--print-value-only", KEY]))
    })?;
    ensure!(value.trim_end() == VALUE, "etcd lost its data: {KEY} is {value:?}");
    clock.print_step(&format!("the data has survived: {KEY} = {VALUE:?}"));
    Ok(())
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}

//! `cargo xtask cluster`: nodes of one cluster on this machine, and what can happen to them.
//!
//! A node is a noded with a real etcd, a network namespace and a disk: an image, mounted below its data. All hosts are on a
//! bridge in a namespace of its own, so that neither an address nor a link of this machine changes. What exists is found
//! again in the state directory and in the kernel: each command may be killed at any place, and repeated.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, Subcommand};
use rustix::fs::{FlockOperation, flock};
use testbed::{Table, command_output, gotool, leftovers, tools, wait_until};

use crate::{run, setup, workspace};

mod network;
mod node;

use network::{Network, Speed};
use node::{Name, Node, State};

/// Ten times what a start or a join takes on a machine that does nothing else.
const WITHIN: Duration = Duration::from_secs(60);
const LOCKED_WITHIN: Duration = Duration::from_secs(5);
const NODES: u8 = 3;
const ON_FAILURE: &str = "what there is stays: see it by `cargo xtask cluster status`, go on by \
                          `cargo xtask cluster up`, or remove it by `cargo xtask cluster down`";
/// The file that tells a state directory from any other directory, and whose lock one command at a time holds.
const MARKER: &str = ".nodekeel-cluster";

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Directory of its files; each is another cluster
    #[arg(long, value_name = "DIR", default_value = "/var/lib/nodekeel-cluster", global = true)]
    state: PathBuf,
    #[command(subcommand)]
    task: ClusterTask,
}

#[derive(Debug, Subcommand)]
enum ClusterTask {
    /// Start a cluster, or what is missing of it
    ///
    /// Builds noded and nodectl, bootstraps n1 and joins the others. Repeated, it starts nodes that were killed or lost by a
    /// reboot, with their data, and joins further ones. A node that was removed joins again once it is reset.
    Up {
        /// Number of nodes; default 3, or those that it has
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=9))]
        nodes: Option<u8>,
        /// Release of etcd, as 3.7; default the machine's own
        #[arg(long, value_name = "RELEASE")]
        etcd: Option<String>,
        /// Directory of noded and nodectl, instead of a build
        #[arg(long, value_name = "DIR")]
        programs: Option<PathBuf>,
    },
    /// End all of it, and remove its data
    Down,
    /// Show the nodes, and what was done to them
    Status,
    /// Start a shell on a node, or run a command there
    ///
    /// nodectl and etcdctl are set up for the node, and its network is the shell's.
    #[command(trailing_var_arg = true)]
    Shell {
        /// n1, n2, …
        node: Name,
        /// Command instead of a shell
        #[arg(allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Lose what two nodes send to each other
    Cut {
        /// n1, n2, …
        node: Name,
        /// The other node; default every other one
        other: Option<Name>,
    },
    /// Undo cut
    Heal {
        /// n1, n2, …; default every node
        node: Option<Name>,
        /// The other node; default every other one
        other: Option<Name>,
    },
    /// Limit how fast two nodes send to each other
    Slow {
        /// Two nodes; or one, for each of its links
        #[arg(required = true, num_args = 1..=2, value_name = "NODE")]
        nodes: Vec<Name>,
        /// 20mbit, 500kbit, or off
        speed: Speed,
    },
    /// Stall the disk of a node
    Freeze { node: Name },
    /// Undo freeze
    Thaw { node: Name },
}

pub(crate) fn run(arguments: Arguments) -> Result<()> {
    ensure!(run::is_root(), "only root may make network namespaces and mount disks: run this as root");
    let site = Site::new(&arguments.state)?;
    match arguments.task {
        ClusterTask::Up { nodes, etcd, programs } => {
            start_up(&site, nodes, etcd.as_deref(), programs.as_deref())
        }
        ClusterTask::Down => take_down(&site),
        ClusterTask::Status => print_status(&site),
        ClusterTask::Shell { node, command } => Err(site.node(node)?.execute(&command)?.exec())
            .with_context(|| format!("execute the command on {node}")),
        ClusterTask::Cut { node, other } => {
            let _lock = site.lock()?;
            for other in site.peers(node, other)? {
                site.network().cut(node, other)?;
                println!("{node} and {other} are cut off from each other");
            }
            Ok(())
        }
        ClusterTask::Heal { node, other } => {
            let _lock = site.lock()?;
            let nodes = node.map_or_else(|| site.names(), |node| Ok(vec![node]))?;
            for node in nodes {
                site.peers(node, other)?
                    .into_iter()
                    .try_for_each(|other| site.network().heal(node, other))?;
            }
            println!("healed");
            Ok(())
        }
        ClusterTask::Slow { nodes, speed } => {
            let _lock = site.lock()?;
            for other in site.peers(nodes[0], nodes.get(1).copied())? {
                site.network().slow(nodes[0], other, speed)?;
                println!("{} and {other} send to each other: {speed}", nodes[0]);
            }
            Ok(())
        }
        ClusterTask::Freeze { node } => {
            let _lock = site.lock()?;
            site.node(node)?.freeze()?;
            println!("the disk of {node} is frozen: `cargo xtask cluster thaw {node}`");
            Ok(())
        }
        ClusterTask::Thaw { node } => {
            let _lock = site.lock()?;
            site.node(node)?.thaw()?;
            println!("the disk of {node} goes on");
            Ok(())
        }
    }
}

/// The nodes of a state directory.
#[derive(Debug)]
struct Site {
    directory: PathBuf,
}

impl Site {
    fn new(directory: &Path) -> Result<Self> {
        let absolute = std::path::absolute(directory);
        // The mount table has real paths.
        let directory = fs::canonicalize(directory).or(absolute).context("find the state directory")?;
        Ok(Self { directory })
    }

    fn network(&self) -> Network<'_> {
        Network(&self.directory)
    }

    /// The node's files.
    fn files(&self, name: Name) -> Node<'_> {
        Node { name, site: &self.directory }
    }

    /// The nodes up to the last one that has a directory, which is made first: a killed `up` has all of them.
    fn names(&self) -> Result<Vec<Name>> {
        let last = Name::all().filter(|name| self.files(*name).path("").exists()).last();
        let names: Vec<_> = Name::all().take_while(|name| last.is_some_and(|last| *name <= last)).collect();
        ensure!(
            !names.is_empty(),
            "no cluster in {}: start one by `cargo xtask cluster up`",
            self.directory.display()
        );
        Ok(names)
    }

    /// A node that was started since the machine was.
    fn node(&self, name: Name) -> Result<Node<'_>> {
        let names = self.names()?;
        let known = || names.iter().map(Name::to_string).collect::<Vec<_>>().join(", ");
        ensure!(names.contains(&name), "no node {name}; there are {}", known());
        let is_up = self.network().has_host(name);
        ensure!(is_up, "{name} has no network yet: `cargo xtask cluster up` starts what is missing");
        Ok(self.files(name))
    }

    /// The other node, or every other one.
    fn peers(&self, node: Name, other: Option<Name>) -> Result<Vec<Name>> {
        self.node(node)?;
        let Some(other) = other else {
            return Ok(self.names()?.into_iter().filter(|other| *other != node).collect());
        };
        ensure!(other != node, "{node} has no link to itself: name two nodes");
        self.node(other)?;
        Ok(vec![other])
    }

    /// Makes it a state directory.
    fn create(&self) -> Result<()> {
        let place = self.directory.display();
        fs::create_dir_all(&self.directory).with_context(|| format!("create {place}"))?;
        let is_empty = self.is_empty()?;
        let marker = self.directory.join(MARKER);
        ensure!(is_empty || marker.exists(), "{place} has other files: choose an empty or a new directory");
        File::options()
            .append(true)
            .create(true)
            .open(&marker)
            .map(drop)
            .with_context(|| format!("create {}", marker.display()))
    }

    fn is_empty(&self) -> Result<bool> {
        let mut entries =
            fs::read_dir(&self.directory).with_context(|| format!("read {}", self.directory.display()))?;
        Ok(entries.next().is_none())
    }

    /// Lets no other command change it while the file is open.
    fn lock(&self) -> Result<File> {
        let place = self.directory.display();
        let exists = self.directory.join(MARKER).exists();
        ensure!(exists, "no cluster in {place}: start one by `cargo xtask cluster up`");
        // One that was just killed has not ended yet.
        wait_until(LOCKED_WITHIN, "the cluster to be free", || self.try_lock())
    }

    fn try_lock(&self) -> Result<File> {
        let place = self.directory.display();
        let marker = File::open(self.directory.join(MARKER)).with_context(|| format!("open {place}"))?;
        let is_mine = flock(&marker, FlockOperation::NonBlockingLockExclusive).is_ok();
        ensure!(is_mine, "another `cargo xtask cluster` changes {place}: wait for its end, or end it");
        Ok(marker)
    }

    /// Where a shell finds noded, nodectl, etcd and etcdctl.
    fn programs(&self) -> PathBuf {
        self.directory.join("bin")
    }
}

fn start_up(site: &Site, count: Option<u8>, etcd: Option<&str>, programs: Option<&Path>) -> Result<()> {
    let clock = Instant::now();
    let report = |what: &str| println!("[{:5.1} s] {what}", clock.elapsed().as_secs_f64());
    site.create()?;
    let _lock = site.lock()?;
    let before = site.names().unwrap_or_default();
    let count = count.unwrap_or_else(|| before.len().try_into().ok().filter(|n| *n > 0).unwrap_or(NODES));
    ensure!(
        before.len() <= count.into(),
        "the cluster has {} nodes already: `cargo xtask cluster down` removes it",
        before.len()
    );
    let names: Vec<Name> = Name::all().take(count.into()).collect();
    link_programs(site, etcd, programs)?;
    for name in names.iter().rev() {
        let directory = site.files(*name).path("");
        fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    }
    site.network().create_hub()?;
    for name in &names {
        site.network().create_host(*name)?;
        let node = site.files(*name);
        node.create_disk()?;
        if node.start()? {
            report(&format!("{name} starts at {}", name.address()));
        }
    }
    let (mut is_whole, mut voting) = (true, Vec::new());
    for name in &names {
        if site.files(*name).is_frozen() || !site.network().cuts(*name)?.is_empty() {
            report(&format!("{name} is frozen or cut off, and not waited for"));
            is_whole = false;
            continue;
        }
        if join(site, *name, &names, &report).with_context(|| format!("start {name}: {ON_FAILURE}"))? {
            voting.push(*name);
        }
    }
    if let Some(first) = voting.first().filter(|_| is_whole) {
        wait_until(WITHIN, "every node to vote", || {
            let voters = site.files(*first).count_voters()?;
            ensure!(voters == voting.len(), "{voters} of {} nodes vote", voting.len());
            Ok(())
        })?;
        report("every node is Running, and votes");
    }
    println!("\nuse it by `cargo xtask cluster shell n1`, end it by `cargo xtask cluster down`");
    Ok(())
}

/// Waits until the node is in the cluster, with a ticket if it waits for one; false if it was removed.
fn join(site: &Site, name: Name, names: &[Name], report: &impl Fn(&str)) -> Result<bool> {
    let node = site.files(name);
    let others = || names.iter().filter(|other| **other != name).map(|other| site.files(*other));
    let running =
        || others().find(|other| other.cluster_state().is_ok_and(|state| state.state == State::RUNNING));
    let is_listed = || running().is_none_or(|member| member.lists(name).unwrap_or(true));
    // One that has never joined has no data yet.
    let is_removed = || node.has_member_data() && !is_listed();
    match node.wait_for(&[State::RUNNING, State::WAITING], is_removed)? {
        State::REMOVED => {
            let reset = format!("cargo xtask cluster shell {name} nodectl reset --yes");
            report(&format!(
                "{name} was removed from the cluster: `{reset}`, and then `cargo xtask cluster up`, join it again"
            ));
            return Ok(false);
        }
        State::WAITING => {
            let member = running()
                .with_context(|| format!("no node is Running that could make a ticket for {name}"))?;
            node.put_ticket(&member)?;
            node.wait_for(&[State::RUNNING], || false)?;
            report(&format!("{name} has joined"));
        }
        _ => report(&format!("{name} is Running")),
    }
    node.remove_ticket()?;
    Ok(true)
}

/// Links the programs into one directory. A cluster keeps its etcd: its data may not go back to an older release.
fn link_programs(site: &Site, release: Option<&str>, programs: Option<&Path>) -> Result<()> {
    let bin = site.programs();
    let etcd = match fs::read_link(bin.join("etcd")) {
        Ok(etcd) if release.is_none() => etcd,
        found => {
            let etcd = find_etcd(release)?;
            if let Some(other) = found.ok().filter(|found| *found != etcd) {
                bail!(
                    "the cluster runs {}, not {}: leave --etcd out, or remove the cluster first by \
                     `cargo xtask cluster down`",
                    other.display(),
                    etcd.display()
                );
            }
            etcd
        }
    };
    let beside = etcd.with_file_name("etcdctl");
    let etcdctl = if beside.exists() { beside } else { tools::find_tool(tools::ETCDCTL)? };
    let programs = match programs {
        Some(programs) => std::path::absolute(programs).context("find the programs")?,
        None => {
            setup::install()?;
            workspace::build_node_programs()?
        }
    };
    fs::create_dir_all(&bin).with_context(|| format!("create {}", bin.display()))?;
    for target in [programs.join("noded"), programs.join("nodectl"), etcdctl, etcd] {
        let place = || format!("link {}", target.display());
        ensure!(target.exists(), "{}: there is no such program", place());
        let new = bin.join("new");
        remove_file(&new)?;
        symlink(&target, &new).with_context(place)?;
        fs::rename(&new, bin.join(target.file_name().unwrap_or_default())).with_context(place)?;
    }
    Ok(())
}

/// The pinned etcd, or the machine's own.
fn find_etcd(release: Option<&str>) -> Result<PathBuf> {
    let pinned = gotool::ETCD.version;
    if release.is_some_and(|release| is_of_release(pinned, release)) {
        return gotool::ETCD.program_path("etcd");
    }
    let own = tools::find_tool(tools::ETCD)?;
    let printed = command_output(Command::new(&own).arg("--version"))?;
    let version = printed.lines().find_map(|line| line.strip_prefix("etcd Version: "));
    let version = version.with_context(|| format!("{} --version prints {printed:?}", own.display()))?;
    if let Some(release) = release.filter(|release| !is_of_release(version, release)) {
        bail!("no etcd {release} here: --etcd may be {pinned}, or {version}, which is {}", own.display());
    }
    Ok(own)
}

/// Whether a version is of a release such as `3.7`, or is it.
fn is_of_release(version: &str, release: &str) -> bool {
    version.strip_prefix(release).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn take_down(site: &Site) -> Result<()> {
    let directory = &site.directory;
    let marker = directory.join(MARKER);
    let _lock = if marker.exists() { Some(site.lock()?) } else { None };
    let is_other = !marker.exists() && directory.exists() && !site.is_empty()?;
    ensure!(!is_other, "{} is no state directory of a cluster", directory.display());
    for node in Name::all().map(|name| site.files(name)) {
        let is_inside =
            std::env::var_os(leftovers::MARK).is_some_and(|mark| Path::new(&mark) == node.path(""));
        ensure!(!is_inside, "this is the shell of {}: leave it first, by `exit`", node.name);
    }
    for node in Name::all().map(|name| site.files(name)) {
        node.remove()?;
    }
    site.network().remove()?;
    // The marker last: without it, the rest would be anyone's.
    leftovers::remove_directory(&site.programs())?;
    remove_file(&marker)?;
    match fs::remove_dir(directory) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", directory.display()))
        }
        _ => {
            println!("nothing is left of the cluster");
            Ok(())
        }
    }
}

fn print_status(site: &Site) -> Result<()> {
    let mut table = Table::new(["NODE", "ADDRESS", "NODED", "STATE", "DETAIL"]);
    for node in site.names()?.into_iter().map(|name| site.files(name)) {
        let (pid, mut details) = (node.pid()?, Vec::new());
        let state = match (pid, node.cluster_state()) {
            (None, _) => "stopped".to_owned(),
            (_, Err(error)) => {
                details.push(format!("{error:#}"));
                "unknown".to_owned()
            }
            (_, Ok(state)) => {
                details.extend(Some(state.detail).filter(|detail| !detail.is_empty()));
                state.state
            }
        };
        if node.is_frozen() {
            details.push("frozen disk".to_owned());
        }
        if site.network().has_host(node.name) {
            let cuts = site.network().cuts(node.name)?;
            details.extend(cuts.into_iter().map(|other| format!("cut off from {other}")));
            let slow = site.network().speeds(node.name)?;
            details.extend(slow.into_iter().map(|(other, speed)| format!("{speed} to {other}")));
        }
        let pid = pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        table.add_row([node.name.to_string(), node.name.address(), pid, state, details.join("; ")]);
    }
    println!("{table}");
    Ok(())
}

/// A missing file is not an error.
fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_has_its_versions_alone() {
        assert!(is_of_release("3.7.3", "3.7") && is_of_release("3.7.3", "3.7.3"));
        assert!(!is_of_release("3.70.1", "3.7") && !is_of_release("3.4.23", "3.7"));
    }

    #[test]
    fn a_directory_with_other_files_is_neither_used_nor_removed() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("letter"), "").unwrap();
        let site = Site::new(directory.path()).unwrap();
        assert!(site.create().unwrap_err().to_string().contains("has other files"));
        assert!(take_down(&site).unwrap_err().to_string().contains("no state directory"));
        assert!(directory.path().join("letter").exists());
    }

    #[test]
    fn one_command_at_a_time_changes_a_cluster() {
        let directory = tempfile::tempdir().unwrap();
        let site = Site::new(directory.path()).unwrap();
        assert!(site.lock().unwrap_err().to_string().contains("cargo xtask cluster up"));
        site.create().unwrap();
        let lock = site.try_lock().unwrap();
        assert!(site.try_lock().unwrap_err().to_string().contains("another"));
        drop(lock);
        site.create().unwrap();
        site.try_lock().unwrap();
    }
}

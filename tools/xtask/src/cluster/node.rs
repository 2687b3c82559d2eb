//! A node: its disk, its noded, its place in the cluster.

use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::Value;
use testbed::{command_output, leftovers, tools, wait_until};

use super::network::Network;
use super::{WITHIN, remove_file};

const DISK_BYTES: u64 = 2 << 30;
const LINES_SHOWN: usize = 10;

/// The name of a node: `n1` to `n9`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name(u8);

impl Name {
    pub(super) fn new(number: u8) -> Option<Self> {
        (1..=9).contains(&number).then_some(Self(number))
    }

    pub(super) fn all() -> impl Iterator<Item = Self> {
        (1..=9).map(Self)
    }

    pub(super) fn number(self) -> u8 {
        self.0
    }

    /// Its address in its network, which no other network of the machine sees.
    pub(super) fn address(self) -> String {
        format!("10.91.0.{}", self.0)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "n{}", self.0)
    }
}

impl FromStr for Name {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let number = text.strip_prefix('n').and_then(|number| number.parse().ok());
        number.and_then(Self::new).ok_or_else(|| anyhow!("not the name of a node: they are n1, n2, …, n9"))
    }
}

/// A state of the enrolment, as nodectl prints it.
#[derive(Debug)]
pub(super) struct State {
    pub(super) state: String,
    pub(super) detail: String,
}

impl State {
    pub(super) const RUNNING: &str = "Running";
    pub(super) const WAITING: &str = "Waiting";
    /// What nodectl does not print: its cluster has no such member any more.
    pub(super) const REMOVED: &str = "removed";
}

/// The files of a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node<'a> {
    pub(super) name: Name,
    pub(super) site: &'a Path,
}

impl Node<'_> {
    /// A path below its directory.
    pub(super) fn path(self, below: &str) -> PathBuf {
        let directory = self.site.join(self.name.to_string());
        if below.is_empty() { directory } else { directory.join(below) }
    }

    fn program(self, name: &str) -> PathBuf {
        self.site.join("bin").join(name)
    }

    /// What noded keeps on the node's disk.
    fn mount_point(self) -> PathBuf {
        self.path("data/data")
    }

    /// The kernel tells no one whether a file system is frozen: this file does, until the disk is mounted anew.
    fn frozen_marker(self) -> PathBuf {
        self.path("frozen")
    }

    fn is_mounted(self) -> Result<bool> {
        Ok(!leftovers::find_mounts(&self.mount_point())?.is_empty())
    }

    /// Makes and mounts what is missing of the disk.
    pub(super) fn create_disk(self) -> Result<()> {
        let (image, mount_point) = (self.path("disk"), self.mount_point());
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&mount_point);
        made.with_context(|| format!("create {}", mount_point.display()))?;
        if !image.exists() {
            // Whole under its name, or not there.
            let new = self.path("disk.new");
            let file = File::create(&new).with_context(|| format!("create {}", new.display()))?;
            file.set_len(DISK_BYTES).with_context(|| format!("size {}", new.display()))?;
            command_output(Command::new(tools::find_tool(tools::MKFS_EXT4)?).args(["-q", "-F"]).arg(&new))?;
            fs::rename(&new, &image).with_context(|| format!("rename {}", new.display()))?;
        }
        if !self.is_mounted()? {
            remove_file(&self.frozen_marker())?;
            let _ = Command::new("modprobe").arg("loop").output();
            let mut mount = Command::new(tools::find_tool(tools::MOUNT)?);
            command_output(mount.args(["-o", "loop"]).arg(&image).arg(&mount_point))?;
        }
        // noded begins with an empty directory of its own. A frozen disk is only read, or this would wait for its thaw.
        let (lost_found, place) =
            (mount_point.join("lost+found"), || format!("set up {}", mount_point.display()));
        if lost_found.exists() {
            fs::remove_dir(lost_found).with_context(place)?;
        }
        if fs::metadata(&mount_point).with_context(place)?.permissions().mode() & 0o777 != 0o700 {
            fs::set_permissions(&mount_point, fs::Permissions::from_mode(0o700)).with_context(place)?;
        }
        Ok(())
    }

    /// Starts noded; whether it did not run.
    pub(super) fn start(self) -> Result<bool> {
        if self.pid()?.is_some() {
            return Ok(false);
        }
        let (config, log) = (self.path("noded.toml"), self.path("noded.log"));
        let text = format!(
            "[node]\nname = \"{}\"\ndata = {:?}\n\n[services.containerd]\nenable = false\n\n[services.etcd]\n\
             binary = {:?}\n\n[kernel]\nlog = false\n\n[cluster]\naddress = \"{}\"\nbootstrap = {}\n\
             golden_tickets = true\n",
            self.name,
            self.path("data"),
            self.program("etcd"),
            self.name.address(),
            self.name.number() == 1
        );
        fs::write(&config, text).with_context(|| format!("write {}", config.display()))?;
        let output = File::options().append(true).create(true).open(&log);
        let output = output.with_context(|| format!("open {}", log.display()))?;
        let errors = output.try_clone().context("share the log file")?;
        let mut noded = self.command()?;
        noded.arg(self.program("noded")).args(["run", "--config"]).arg(&config);
        // Neither Ctrl-C nor the terminal's hangup is meant for it.
        noded.stdin(Stdio::null()).stdout(output).stderr(errors).process_group(0);
        noded.spawn().context("start noded").map(|_| true)
    }

    /// The process of noded.
    pub(super) fn pid(self) -> Result<Option<i32>> {
        let command = format!("noded run --config {}", self.path("noded.toml").display());
        let processes = leftovers::find_processes(&self.path(""))?;
        Ok(processes.iter().find(|process| process.command.ends_with(&command)).map(|process| process.pid))
    }

    /// A command in the node's network, by the program that follows.
    fn command(self) -> Result<Command> {
        let mut command = Command::new(tools::find_tool(tools::NSENTER)?);
        let network = Network(self.site).namespace_path(self.name);
        command.arg(format!("--net={}", network.display())).env(leftovers::MARK, self.path(""));
        Ok(command)
    }

    /// The command on the node, or a shell.
    pub(super) fn execute(self, words: &[String]) -> Result<Command> {
        let mut command = self.command()?;
        let path = std::env::var_os("PATH").unwrap_or_default();
        let paths = [self.site.join("bin")].into_iter().chain(std::env::split_paths(&path));
        command.env("PATH", std::env::join_paths(paths).context("join PATH")?);
        command.env("NODEKEEL_SOCKET", self.socket());
        let socket = self.mount_point().join("cluster/etcd/client/etcd:0");
        command.env("ETCDCTL_ENDPOINTS", format!("unix://{}", socket.display()));
        if words.is_empty() {
            println!("a shell on {}: nodectl and etcdctl talk to this node; leave it by `exit`", self.name);
            command.arg(std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into()));
        }
        command.args(words);
        Ok(command)
    }

    fn socket(self) -> PathBuf {
        self.path("data/run/control.sock")
    }

    fn nodectl(self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.program("nodectl"));
        command.arg("--socket").arg(self.socket()).args(arguments).stdin(Stdio::null());
        command
    }

    /// The state of its enrolment.
    pub(super) fn cluster_state(self) -> Result<State> {
        // It exits with 6 where the node is not Running.
        let output =
            self.nodectl(&["-o", "json", "cluster", "status"]).output().context("execute nodectl")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        let status: Value =
            serde_json::from_slice(&output.stdout).with_context(|| errors.trim().to_owned())?;
        let text = |key: &str| status[key].as_str().unwrap_or_default().to_owned();
        Ok(State { state: text("state"), detail: text("detail") })
    }

    /// Waits for one of these states of its enrolment, or until it was removed, and returns it.
    pub(super) fn wait_for(
        self,
        states: &[&'static str],
        is_removed: impl Fn() -> bool,
    ) -> Result<&'static str> {
        let what = format!("{} to be {}", self.name, states.join(" or "));
        wait_until(WITHIN, &what, || {
            if self.pid()?.is_none() {
                return Ok(Err(anyhow!("noded has exited; {}", self.last_output())));
            }
            let now = self.cluster_state()?;
            let found = states.iter().copied().find(|state| now.state == *state);
            let found = found.or_else(|| is_removed().then_some(State::REMOVED));
            found.map(Ok).with_context(|| format!("it is {}: {}", now.state, now.detail))
        })?
    }

    fn last_output(self) -> String {
        let log = self.path("noded.log");
        let text = fs::read_to_string(&log).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        let last = lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n");
        format!("the end of {}:\n{last}", log.display())
    }

    /// The number of members that vote, as the node knows it.
    pub(super) fn count_voters(self) -> Result<usize> {
        Ok(self.members()?.iter().filter(|member| member["learner"] == false).count())
    }

    /// Whether its cluster has a member at the address of the other node, as the node knows it.
    pub(super) fn lists(self, other: Name) -> Result<bool> {
        let host = format!("//{}:", other.address());
        let has_host = |url: &Value| url.as_str().is_some_and(|url| url.contains(&host));
        let members = self.members()?;
        Ok(members.iter().any(|member| member["peer_urls"].as_array().into_iter().flatten().any(has_host)))
    }

    fn members(self) -> Result<Vec<Value>> {
        let members = command_output(&mut self.nodectl(&["-o", "json", "cluster", "members"]))?;
        serde_json::from_str(&members).context("nodectl prints JSON")
    }

    /// Whether it has data of a member, which it keeps until it is reset.
    pub(super) fn has_member_data(self) -> bool {
        self.mount_point().join("cluster/etcd/data/member").exists()
    }

    /// Makes a ticket by the member, and gives it to the node, whole.
    pub(super) fn put_ticket(self, member: &Node<'_>) -> Result<()> {
        let new = self.path("ticket.new");
        let (address, file) = (self.name.address(), new.to_string_lossy());
        // One that has joined just now is a learner for a moment, and the cluster has one at a time.
        wait_until(WITHIN, &format!("a ticket for {}", self.name), || {
            remove_file(&new)?;
            let create = ["cluster", "ticket", "create", "--golden", "--address", &address, "--file", &file];
            command_output(&mut member.nodectl(&create)).map(drop)
        })?;
        let ticket = self.ticket();
        fs::rename(&new, &ticket).with_context(|| format!("rename {} to {}", new.display(), ticket.display()))
    }

    fn ticket(self) -> PathBuf {
        self.path("data/esp/enrolment.pb")
    }

    pub(super) fn remove_ticket(self) -> Result<()> {
        remove_file(&self.ticket())
    }

    pub(super) fn is_frozen(self) -> bool {
        self.frozen_marker().exists() && self.is_mounted().unwrap_or_default()
    }

    /// Lets each write to its disk wait.
    pub(super) fn freeze(self) -> Result<()> {
        let marker = self.frozen_marker();
        File::create(&marker).with_context(|| format!("create {}", marker.display()))?;
        self.fsfreeze("-f", "Device or resource busy")
    }

    pub(super) fn thaw(self) -> Result<()> {
        self.fsfreeze("-u", "Invalid argument")?;
        remove_file(&self.frozen_marker())
    }

    /// Freezes or thaws its disk; by this error the kernel refuses what is done already.
    fn fsfreeze(self, how: &str, done: &str) -> Result<()> {
        let mount_point = self.mount_point();
        ensure!(self.is_mounted()?, "no disk is mounted at {}", mount_point.display());
        let mut command = Command::new(tools::find_tool(tools::FSFREEZE)?);
        match command_output(command.arg(how).arg(&mount_point)) {
            Err(error) if !error.to_string().contains(done) => Err(error),
            _ => Ok(()),
        }
    }

    /// Ends its processes, and removes its disk and its files.
    pub(super) fn remove(self) -> Result<()> {
        // What waits for a frozen disk can't be killed.
        if self.is_mounted()? {
            self.thaw()?;
        }
        leftovers::remove_directory(&self.path(""))?;
        // The kernel detaches a loop device when the last user of its file system is gone.
        wait_until(WITHIN, "the loop device to be detached", || {
            let devices = leftovers::find_loop_devices(&self.path(""))?;
            for device in &devices {
                let losetup = tools::find_tool(tools::LOSETUP)?;
                let _ = Command::new(losetup).arg("-d").arg(Path::new("/dev").join(device)).output();
            }
            ensure!(devices.is_empty(), "{} are attached", devices.join(", "));
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_named_n1_to_n9() {
        let name = |text: &str| text.parse::<Name>().ok();
        assert_eq!(
            name("n3").map(|name| (name.to_string(), name.address())).unwrap(),
            ("n3".into(), "10.91.0.3".into())
        );
        for wrong in ["n0", "n10", "3", "n", "N1"] {
            assert!(name(wrong).is_none(), "{wrong}");
        }
    }
}

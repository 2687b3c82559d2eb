//! The demo's node, through nodectl and the daemons' clients.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use testbed::{ReservedPort, command_output, leftovers, tools};

/// The paths and ports of a node and its daemons.
#[derive(Debug)]
pub(crate) struct DemoNode {
    /// The directory of noded and nodectl.
    pub(crate) programs: PathBuf,
    pub(crate) config: PathBuf,
    pub(crate) data: PathBuf,
    /// It stays reserved while etcd is restarted.
    pub(crate) _etcd_peer: ReservedPort,
}

impl DemoNode {
    pub(crate) fn write_config(&self, text: &str) -> Result<()> {
        fs::write(&self.config, text).with_context(|| format!("write {}", self.config.display()))
    }

    /// `noded check` of the configuration, which skips what is missing.
    pub(crate) fn check_config(&self) -> Result<String> {
        let mut check = Command::new(self.programs.join("noded"));
        check.args(["check", "--dev", "--config"]).arg(&self.config).arg("--data").arg(&self.data);
        command_output(&mut check)
    }

    pub(crate) fn nodectl_command(&self) -> Command {
        let mut command = Command::new(self.programs.join("nodectl"));
        command.arg("--socket").arg(self.data.join("run/control.sock"));
        command
    }

    pub(crate) fn etcdctl_command(&self) -> Result<Command> {
        let mut command = Command::new(tools::find_tool(tools::ETCDCTL)?);
        // The path of the socket may be too long for a client.
        command.current_dir(self.data.join("data/cluster/etcd/client"));
        command.env("ETCDCTL_API", "3").arg("--endpoints=unix://etcd:0");
        Ok(command)
    }

    pub(crate) fn ctr_command(&self) -> Result<Command> {
        let mut command = Command::new(tools::find_tool(tools::CTR)?);
        command.arg("--address").arg(self.data.join("run/containerd/containerd.sock"));
        Ok(command)
    }

    /// Its name in its cluster, and the cluster's id.
    pub(crate) fn read_identity(&self) -> Result<(String, String)> {
        let status = command_output(self.nodectl_command().args(["-o", "json", "cluster", "status"]))?;
        let status: Value = serde_json::from_str(&status).context("nodectl prints JSON")?;
        let text = |key: &str| {
            status[key].as_str().map(str::to_owned).with_context(|| format!("find {key} in {status}"))
        };
        Ok((text("node")?, text("cluster")?))
    }

    /// The process of etcd, found by its data directory.
    pub(crate) fn etcd_pid(&self) -> Result<i32> {
        let is_etcd = |command: &str| {
            let program = command.split(' ').next().unwrap_or_default();
            program.rsplit('/').next() == Some(tools::ETCD.name)
        };
        let processes = leftovers::find_processes(&self.data)?;
        let etcd = processes.iter().find(|process| is_etcd(&process.command));
        etcd.map(|process| process.pid).with_context(|| format!("find etcd among {processes:?}"))
    }
}

/// The tree, followed through `nodectl tree --watch`.
#[derive(Debug)]
pub(crate) struct TreeWatch {
    watcher: Child,
    trees: Receiver<Value>,
    newest: Value,
}

impl TreeWatch {
    /// Starts to watch.
    pub(crate) fn watch(node: &DemoNode) -> Result<Self> {
        let mut command = node.nodectl_command();
        command.args(["-o", "json", "tree", "--watch"]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut watcher = command.spawn().context("execute nodectl")?;
        let pipe = watcher.stdout.take().context("the output is piped")?;
        let (sender, trees) = channel();
        thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                let tree = serde_json::from_str(&line).unwrap_or_default();
                // The receiver is dropped when the demo has ended.
                if sender.send(tree).is_err() {
                    return;
                }
            }
        });
        Ok(Self { watcher, trees, newest: Value::Null })
    }

    /// Waits until the tree meets the condition, and prints every state until then.
    pub(crate) fn wait_until(
        &mut self,
        within: Duration,
        what: &str,
        is: impl Fn(&Self) -> bool,
    ) -> Result<()> {
        let deadline = Instant::now() + within;
        while !is(self) {
            match self.trees.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(tree) => {
                    println!("    {}", format_states(&tree));
                    self.newest = tree;
                }
                Err(RecvTimeoutError::Timeout) => {
                    bail!("waited {within:?} until {what}; now: {}", format_states(&self.newest));
                }
                Err(RecvTimeoutError::Disconnected) => bail!("nodectl exited before {what}"),
            }
        }
        Ok(())
    }

    /// Whether it is ready or done.
    pub(crate) fn is_ready(&self, dn: &str) -> bool {
        self.find_entry(dn).is_some_and(|node| node["state"] == "ready" || node["state"] == "done")
    }

    pub(crate) fn generation(&self, dn: &str) -> Option<u64> {
        self.find_entry(dn)?["generation"].as_u64()
    }

    /// The signal that ended the runnable's last incarnation.
    pub(crate) fn last_signal(&self, dn: &str) -> Option<i64> {
        self.find_entry(dn)?["exits"].as_array()?.last()?["signal"].as_i64()
    }

    fn find_entry(&self, dn: &str) -> Option<&Value> {
        self.newest.as_array()?.iter().find(|node| node["dn"] == dn)
    }
}

impl Drop for TreeWatch {
    fn drop(&mut self) {
        // It exits with the node by itself, but the demo may have failed before.
        if let Err(error) = self.watcher.kill().and_then(|()| self.watcher.wait()) {
            eprintln!("end nodectl: {error}");
        }
    }
}

/// The states of all entries in one line.
fn format_states(tree: &Value) -> String {
    let nodes = tree.as_array().into_iter().flatten();
    let texts = nodes.map(|node| {
        let text = |key: &str| node[key].as_str().unwrap_or("?").to_owned();
        format!("{} {}", text("dn"), text("state"))
    });
    texts.collect::<Vec<_>>().join(" · ")
}

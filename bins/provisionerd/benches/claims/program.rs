//! The provisionerd binary, as a process.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use testbed::{Daemon, ScratchDir};

use crate::bench_cluster::BenchCluster;
use crate::contender::Contender;

/// A running `provisionerd run`, with limits in files.
pub(crate) struct ProgramDaemon {
    pub(crate) daemon: Daemon,
}

impl ProgramDaemon {
    pub(crate) fn start(cluster: &BenchCluster) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let [volumes, quota_dir] = ["base", "books"].map(|name| scratch.path().join(name));
        fs::create_dir(&volumes)?;
        fs::create_dir(&quota_dir)?;
        let mut command = program_command();
        command.env("PROVISIONERD_BOOKS", quota_dir);
        command.args(["run", "--no-csi", "--listen=127.0.0.1:0"]);
        command.args(["--driver", &Contender::Program.driver(), "--node", &Contender::Program.node()]);
        command.arg("--directory").arg(volumes).arg("--kubeconfig").arg(cluster.account_kubeconfig()?);
        let is_ready = |line: &str| line.contains("root.provisioner") && line.contains("ready");
        Ok(Self { daemon: start_daemon(command, scratch, is_ready)? })
    }

    /// Where the data of a volume are.
    pub(crate) fn volume_path(&self, volume: &str) -> PathBuf {
        self.base().join("volumes").join(volume)
    }

    /// Whether removed volumes still have to be erased.
    pub(crate) fn is_erasing(&self) -> Result<bool> {
        Ok(fs::read_dir(self.base().join(".trash"))?.next().is_some())
    }

    fn base(&self) -> PathBuf {
        self.daemon.directory_path().join("base")
    }
}

/// Starts the agent, as an administrator, and waits until it leads.
pub(crate) fn start_agent(cluster: &BenchCluster) -> Result<Daemon> {
    let mut command = program_command();
    command.args(["agent", "--namespace=default", "--listen=127.0.0.1:0"]);
    command.args(["--driver", &Contender::Program.driver()]);
    command.arg("--kubeconfig").arg(cluster.kube.kubeconfig_file("admin")?);
    start_daemon(command, ScratchDir::new()?, |line| line.contains("leading"))
}

fn program_command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
    command.env_clear();
    command
}

fn start_daemon(command: Command, scratch: ScratchDir, is_ready: impl Fn(&str) -> bool) -> Result<Daemon> {
    let log: &Path = &scratch.path().join("output.log");
    Daemon::start(command, scratch, || {
        let text = fs::read_to_string(log).context("read the log")?;
        ensure!(text.lines().any(&is_ready), "not ready yet");
        Ok(())
    })
}

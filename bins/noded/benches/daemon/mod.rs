//! A noded that is measured.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nodekeel_node::client;
use nodekeel_node::v1::{State, TreeRequest};

/// A noded, which ends when it is dropped.
pub(crate) struct NodedProcess(Child);

impl NodedProcess {
    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(i32::try_from(self.0.id())?), Signal::SIGTERM).context("stop noded")?;
        let status = self.0.wait().context("wait for noded")?;
        ensure!(status.success(), "noded exited with {status}");
        Ok(())
    }
}

impl Drop for NodedProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts noded, and waits until its control API answers.
pub(crate) fn start_noded(directory: &Path, config: &str) -> Result<NodedProcess> {
    let file = directory.join("noded.toml");
    fs::write(&file, config).context("write the configuration")?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_noded"));
    command.arg("run").arg("--config").arg(file).arg("--data").arg(directory.join("data"));
    let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().context("start noded")?;
    let stderr = child.stderr.take().context("noded's stderr")?;
    let noded = NodedProcess(child);
    let mut lines = BufReader::new(stderr).lines().map_while(Result::ok);
    let mut said = Vec::new();
    let answers =
        lines.by_ref().inspect(|line| said.push(line.clone())).any(|line| line.contains("control socket at"));
    ensure!(answers, "noded did not start: {said:?}");
    // noded must not block on a full pipe later on.
    std::thread::spawn(move || lines.for_each(drop));
    Ok(noded)
}

/// Waits until all runnables of the noded are ready.
pub(crate) fn wait_until_ready(directory: &Path) -> Result<()> {
    let socket = directory.join("data/run/control.sock");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut trees = client::connect(&socket).await?.watch_tree(TreeRequest {}).await?.into_inner();
        while let Some(tree) = trees.message().await? {
            if tree.nodes.iter().all(|node| node.state() == State::Ready) {
                return Ok(());
            }
        }
        anyhow::bail!("the node exited")
    })
}

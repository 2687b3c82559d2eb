//! The cost of an idle noded: its wake-ups and its memory.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nodekeel_node::client;
use nodekeel_node::v1::{State, TreeRequest};
use testbed::bench::{BenchRow, RowWriter};
use testbed::noded::EtcdPorts;
use testbed::{ScratchDir, process_cost};

/// The time in which wake-ups are counted.
const MEASURE_TIME: Duration = Duration::from_secs(10);

/// The daemons have finished their start when noded is ready, but their first seconds are not idle, and tokio
/// keeps a blocking thread for ten seconds after its last use.
const SETTLE_TIME: Duration = Duration::from_secs(15);

/// Long enough, from the readiness of the daemons, for one health check of containerd.
const HEALTH_CHECK_TIME: Duration = Duration::from_secs(45);

/// Goal for the resident memory of a noded alone. Heap and stacks take less than 1 MiB of it (`/proc/PID/smaps`). The rest
/// becomes less only with the size of the program: the pages of it that the start has touched, which the kernel maps sixteen
/// at a time, and the tables that the loader relocates, which count as its own.
const MAX_MEMORY_KIB: f64 = 12.0 * 1024.0;

fn main() -> Result<()> {
    let mut rows = RowWriter::new("idle");
    let bare = "services.etcd.enable = false\nservices.containerd.enable = false\n";
    rows.add_rows(measure("alone", "a node without services", bare, false)?)?;
    for (id, node, cluster) in [
        ("daemons", "a node with etcd and containerd, noded alone counted", ""),
        // It asks its etcd for its status every four seconds: etcd does not notify of an alarm.
        (
            "whole",
            "a member of its cluster, with containerd, noded alone counted",
            "cluster.address = \"127.0.0.1\"\ncluster.bootstrap = true\n",
        ),
    ] {
        let ports = EtcdPorts::reserve();
        let config = format!("{cluster}{}", ports.section(""));
        rows.add_rows(measure(id, node, &config, true)?)?;
    }
    rows.finish()?;
    Ok(())
}

/// The rows of one configuration.
fn measure(id: &str, node: &str, config: &str, has_containerd: bool) -> Result<Vec<BenchRow>> {
    let scratch = ScratchDir::new()?;
    let noded = start_noded(scratch.path(), config)?;
    wait_until_ready(&scratch.path().join("data/run/control.sock"))?;
    sleep(SETTLE_TIME);
    let seconds = MEASURE_TIME.as_secs();
    let idle = BenchRow::new(
        format!("wake_ups_{id}"),
        format!("{node}, idle for {seconds} s"),
        "wake-ups",
        noded.count_wake_ups(MEASURE_TIME)? as f64,
    );
    let mut rows = vec![idle.limit(0.0).goal_at_most(0.0)];
    if has_containerd {
        let work = format!("{node}, {} s with one health check of containerd", HEALTH_CHECK_TIME.as_secs());
        rows.push(BenchRow::new(
            format!("wake_ups_{id}_asked"),
            work,
            "wake-ups",
            noded.count_wake_ups(HEALTH_CHECK_TIME)? as f64,
        ));
    }
    let (memory, own) =
        (process_cost::resident_kib(noded.0.id())?, process_cost::anonymous_kib(noded.0.id())?);
    let resident =
        BenchRow::new(format!("memory_{id}"), format!("{node}, resident after that"), "KiB", memory as f64);
    // The rest is pages of the program and its libraries.
    let resident = resident.limit((memory - own) as f64);
    rows.push(if has_containerd { resident } else { resident.goal_at_most(MAX_MEMORY_KIB) });
    let work = format!("{node}, of that without the pages of program files, which are the limit above");
    rows.push(BenchRow::new(format!("memory_{id}_own"), work, "KiB", own as f64));
    noded.stop()?;
    Ok(rows)
}

#[expect(clippy::disallowed_methods, reason = "the measured value is elapsed time")]
fn sleep(time: Duration) {
    std::thread::sleep(time);
}

struct NodedProcess(Child);

impl NodedProcess {
    /// Number of wake-ups during this time.
    fn count_wake_ups(&self, time: Duration) -> Result<u64> {
        let before = process_cost::count_wake_ups(self.0.id())?;
        sleep(time);
        Ok(process_cost::count_wake_ups(self.0.id())?.count_since(&before))
    }

    fn stop(mut self) -> Result<()> {
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

/// Starts noded and waits until its control API answers.
fn start_noded(directory: &Path, config: &str) -> Result<NodedProcess> {
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

fn wait_until_ready(socket: &Path) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut trees = client::connect(socket).await?.watch_tree(TreeRequest {}).await?.into_inner();
        while let Some(tree) = trees.message().await? {
            if tree.nodes.iter().all(|node| node.state() == State::Ready) {
                return Ok(());
            }
        }
        anyhow::bail!("the node exited")
    })
}

//! Memory and wake-ups of provisionerd, without volumes and with a thousand.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use testbed::bench::BenchRow;
use testbed::{Daemon, ScratchDir, process_cost};

use crate::bench_cluster::BenchCluster;
use crate::contender::Contender;

const VOLUMES: usize = 1000;
/// Time until memory of the burst is freed and the last events are written.
const SETTLE_TIME: Duration = Duration::from_secs(10);
/// Measuring time. Short enough to exclude most watch bookmarks, three per minute.
const IDLE_TIME: Duration = Duration::from_secs(30);
/// *Source:* the goal in the project's notes on storage: at most 20 MiB for any cluster.
const GOAL_KIB: f64 = 20.0 * 1024.0;

pub(crate) async fn measure(cluster: &mut BenchCluster) -> Result<Vec<BenchRow>> {
    let program = start_daemon(cluster)?;
    let mut rows = measure_idle(&program, 0).await?;
    let (_batch, took) = cluster.bind_claims(Contender::Program, "footprint", VOLUMES).await?;
    let work = format!("{VOLUMES} claims at once, by the provisionerd binary, with limits in files");
    rows.push(BenchRow::new("burst_1000_program", work, "s", took / 1e3));
    rows.extend(measure_idle(&program, VOLUMES).await?);
    Ok(rows)
}

fn start_daemon(cluster: &BenchCluster) -> Result<Daemon> {
    let scratch = ScratchDir::new()?;
    let [volumes, quota_dir] = ["base", "books"].map(|name| scratch.path().join(name));
    fs::create_dir(&volumes)?;
    fs::create_dir(&quota_dir)?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
    command.env_clear().env("PROVISIONERD_BOOKS", quota_dir);
    command.args(["run", "--no-csi", "--listen=127.0.0.1:0"]);
    command.args(["--driver", &Contender::Program.driver(), "--node", &Contender::Program.node()]);
    command.arg("--directory").arg(volumes).arg("--kubeconfig").arg(cluster.account_kubeconfig()?);
    let log = scratch.path().join("output.log");
    Daemon::start(command, scratch, || {
        let text = fs::read_to_string(&log).context("read the log")?;
        let is_ready = text.lines().any(|line| line.contains("root.provisioner") && line.contains("ready"));
        ensure!(is_ready, "not ready yet");
        Ok(())
    })
}

/// The rows of an idle process.
async fn measure_idle(program: &Daemon, volumes: usize) -> Result<Vec<BenchRow>> {
    tokio::time::sleep(SETTLE_TIME).await;
    let before = process_cost::count_wake_ups(program.process_id())?;
    tokio::time::sleep(IDLE_TIME).await;
    let woken = process_cost::count_wake_ups(program.process_id())?.count_since(&before);
    let memory = process_cost::resident_kib(program.process_id())? as f64;
    let seconds = IDLE_TIME.as_secs();
    let idle = format!("provisionerd with {volumes} volumes, idle for {seconds} s");
    let resident = format!("provisionerd with {volumes} volumes, resident");
    Ok(vec![
        BenchRow::new(format!("rss_{volumes}"), resident, "KiB", memory).goal_at_most(GOAL_KIB),
        BenchRow::new(format!("wake_ups_{volumes}"), idle, "wake-ups", woken as f64),
    ])
}

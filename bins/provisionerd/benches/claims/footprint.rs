//! What provisionerd itself costs, without volumes and with a thousand.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use testbed::bench::BenchRow;
use testbed::{Daemon, Scratch, process};

use crate::scene::Scene;
use crate::side::Side;

const VOLUMES: usize = 1000;
/// What was allocated for the burst is given back, and the last events are written.
const SETTLED: Duration = Duration::from_secs(10);
/// Without the bookmarks of the watches, of which each minute has three.
const WATCHED: Duration = Duration::from_secs(30);
/// *Source:* the aim of the project's notes on storage: no more than 20 MiB, whatever the cluster holds.
const GOAL_KIB: f64 = 20.0 * 1024.0;

pub(crate) async fn measure(scene: &mut Scene) -> Result<Vec<BenchRow>> {
    let program = start(scene)?;
    let mut rows = quiet(&program, 0).await?;
    let (_batch, took) = scene.bind(Side::Program, "footprint", VOLUMES).await?;
    let work = format!("{VOLUMES} claims at once, by provisionerd itself, with limits kept in files");
    rows.push(BenchRow::new("burst_1000_program", work, "s", took / 1e3));
    rows.extend(quiet(&program, VOLUMES).await?);
    Ok(rows)
}

fn start(scene: &Scene) -> Result<Daemon> {
    let scratch = Scratch::new()?;
    let [volumes, books] = ["base", "books"].map(|name| scratch.path().join(name));
    fs::create_dir(&volumes)?;
    fs::create_dir(&books)?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
    command.env_clear().env("PROVISIONERD_BOOKS", books);
    command.args(["run", "--no-csi", "--listen=127.0.0.1:0"]);
    command.args(["--driver", &Side::Program.driver(), "--node", &Side::Program.node()]);
    command.arg("--directory").arg(volumes).arg("--kubeconfig").arg(scene.account()?);
    let log = scratch.path().join("output.log");
    Daemon::start(command, scratch, || {
        let said = fs::read_to_string(&log).context("read what it said")?;
        let is_ready = said.lines().any(|line| line.contains("root.provisioner") && line.contains("ready"));
        ensure!(is_ready, "it isn't ready");
        Ok(())
    })
}

/// The rows of a program that has nothing to do.
async fn quiet(program: &Daemon, volumes: usize) -> Result<Vec<BenchRow>> {
    tokio::time::sleep(SETTLED).await;
    let before = process::wake_ups(program.pid())?;
    tokio::time::sleep(WATCHED).await;
    let woken = process::wake_ups(program.pid())?.since(&before);
    let memory = process::resident_kib(program.pid())? as f64;
    let seconds = WATCHED.as_secs();
    let idle = format!("provisionerd with {volumes} volumes, idle for {seconds} s");
    let resident = format!("provisionerd with {volumes} volumes, resident");
    Ok(vec![
        BenchRow::new(format!("rss_{volumes}"), resident, "KiB", memory).at_most(GOAL_KIB),
        BenchRow::new(format!("wake_ups_{volumes}"), idle, "wake-ups", woken as f64),
    ])
}

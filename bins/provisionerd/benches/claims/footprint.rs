//! Memory and wake-ups of provisionerd, without volumes, with a thousand, and in a cluster with ten thousand of other
//! drivers.

use std::time::Duration;

use anyhow::Result;
use testbed::bench::BenchRow;
use testbed::{Daemon, process_cost};

use crate::bench_cluster::BenchCluster;
use crate::contender::Contender;
use crate::program::{self, ProgramDaemon};

const VOLUMES: usize = 1000;
const FOREIGN_VOLUMES: usize = 10_000;
/// Time until memory of the burst is freed and the last events are written.
const SETTLE_TIME: Duration = Duration::from_secs(10);
/// Measuring time. Short enough to exclude most watch bookmarks, three per minute.
const IDLE_TIME: Duration = Duration::from_secs(30);
/// *Source:* the goal in the project's notes on storage: at most 20 MiB for any cluster.
const GOAL_KIB: f64 = 20.0 * 1024.0;

pub(crate) async fn measure(cluster: &mut BenchCluster) -> Result<Vec<BenchRow>> {
    let program = ProgramDaemon::start(cluster)?;
    let mut rows = measure_idle(&program.daemon, ("", 0)).await?;
    let (batch, took) = cluster.bind_claims(Contender::Program, "footprint", VOLUMES).await?;
    let work = format!("{VOLUMES} claims at once, by the provisionerd binary, with limits in files");
    rows.push(BenchRow::new("burst_1000_program", work, "s", took / 1e3));
    rows.extend(measure_idle(&program.daemon, ("", VOLUMES)).await?);
    cluster.delete_claims(batch).await?;
    Ok(rows)
}

/// In a cluster with volumes of another driver only.
pub(crate) async fn measure_foreign(cluster: &BenchCluster) -> Result<Vec<BenchRow>> {
    cluster.create_foreign_volumes(FOREIGN_VOLUMES).await?;
    let mut rows = Vec::new();
    {
        let program = ProgramDaemon::start(cluster)?;
        rows.extend(measure_idle(&program.daemon, ("foreign_", FOREIGN_VOLUMES)).await?);
    }
    let agent = program::start_agent(cluster)?;
    rows.extend(measure_idle(&agent, ("agent_foreign_", FOREIGN_VOLUMES)).await?);
    Ok(rows)
}

/// The rows of an idle process.
async fn measure_idle(program: &Daemon, (kind, volumes): (&str, usize)) -> Result<Vec<BenchRow>> {
    tokio::time::sleep(SETTLE_TIME).await;
    let before = process_cost::count_wake_ups(program.process_id())?;
    tokio::time::sleep(IDLE_TIME).await;
    let woken = process_cost::count_wake_ups(program.process_id())?.count_since(&before);
    let memory = process_cost::resident_kib(program.process_id())? as f64;
    let own = process_cost::anonymous_kib(program.process_id())? as f64;
    let seconds = IDLE_TIME.as_secs();
    let what = match kind {
        "" => format!("provisionerd with {volumes} volumes"),
        "foreign_" => format!("provisionerd beside {volumes} PersistentVolumes of another driver"),
        _ => format!("the agent beside {volumes} PersistentVolumes of another driver"),
    };
    Ok(vec![
        BenchRow::new(format!("rss_{kind}{volumes}"), format!("{what}, resident"), "KiB", memory)
            .goal_at_most(GOAL_KIB),
        BenchRow::new(
            format!("rss_anon_{kind}{volumes}"),
            format!("{what}, resident without the program's file"),
            "KiB",
            own,
        ),
        BenchRow::new(
            format!("wake_ups_{kind}{volumes}"),
            format!("{what}, idle for {seconds} s"),
            "wake-ups",
            woken as f64,
        ),
    ])
}

//! One claim at a time.

use std::fs::{self, File};
use std::time::Instant;

use anyhow::Result;
use testbed::ScratchDir;
use testbed::bench::{BenchRow, InterleavedSamples, median, percentile};

use crate::bench_cluster::BenchCluster;
use crate::contender::Contender;

const ROUNDS: usize = 300;
/// The first claims, with new connections and cold caches, are not counted.
const WARM_UP: usize = 10;
/// Maximum time that ours may add to the null provisioner and the disk: for another read of the claim, and
/// its work.
const ADDED_MS: f64 = 3.0;

pub(crate) async fn measure(cluster: &mut BenchCluster) -> Result<Vec<BenchRow>> {
    let mut figures = InterleavedSamples::default();
    for run_number in 0..WARM_UP + ROUNDS {
        let turns = if run_number % 2 == 0 {
            [Contender::Ours, Contender::Null]
        } else {
            [Contender::Null, Contender::Ours]
        };
        for contender in turns {
            let label = format!("one-{}-{run_number}", contender.name());
            let (batch, took) = cluster.bind_claims(contender, &label, 1).await?;
            if run_number >= WARM_UP {
                let samples =
                    if contender == Contender::Ours { &mut figures.ours } else { &mut figures.peer };
                samples.push(took);
            }
            cluster.delete_claims(batch).await?;
        }
    }
    let disk = median(&measure_disk()?);
    let row = |percent: f64| {
        let (ours, null) = (percentile(&figures.ours, percent), percentile(&figures.peer, percent));
        let work =
            format!("one claim from its POST to Bound, p{percent} of {ROUNDS}; limit: null and the disk");
        let row = BenchRow::new(format!("bound_p{percent}"), work, "ms", ours).peer("null", "-", null);
        row.limit(null + disk)
    };
    let work = "the syncs to create a volume: mkdir, fsync, rename, fsync of both parents";
    let bare = BenchRow::new("bare_disk", work, "ms", disk);
    let p50 = row(50.0);
    let goal = p50.limit.unwrap_or_default() + ADDED_MS;
    Ok(vec![p50.goal_at_most(goal), row(99.0), bare])
}

/// Milliseconds of the system calls needed to create a volume.
fn measure_disk() -> Result<Vec<f64>> {
    let scratch = ScratchDir::new()?;
    let [new, volumes] = ["new", "volumes"].map(|name| scratch.path().join(name));
    fs::create_dir(&new)?;
    fs::create_dir(&volumes)?;
    let parents = [File::open(&volumes)?, File::open(&new)?];
    (0..ROUNDS)
        .map(|run_number| {
            let [from, to] = [&new, &volumes].map(|parent| parent.join(run_number.to_string()));
            let start = Instant::now();
            fs::create_dir(&from)?;
            File::open(&from)?.sync_all()?;
            fs::rename(&from, &to)?;
            parents.iter().try_for_each(File::sync_all)?;
            Ok(start.elapsed().as_secs_f64() * 1e3)
        })
        .collect()
}

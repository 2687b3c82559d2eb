//! Claims that are provisioned one after another, while nothing is erased, and while a volume of a million files is.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use testbed::bench::{BenchRow, percentile};

use crate::bench_cluster::{BenchCluster, ClaimBatch};
use crate::contender::Contender;
use crate::program::ProgramDaemon;

const CLAIMS: usize = 100;
/// The first claims, with new connections and cold caches, are not counted.
const WARM_UP: usize = 10;
const DIRECTORIES: usize = 100;
const FILES_OF_EACH: usize = 10_000;
/// How much later than without the erasure a claim may be bound. A hundred samples have one that is their p99: it varies by
/// as much between two runs without an erasure.
const GOAL_RATIO: f64 = 1.25;

pub(crate) async fn measure(cluster: &mut BenchCluster) -> Result<Vec<BenchRow>> {
    let program = ProgramDaemon::start(cluster)?;
    bind_in_turn(cluster, "warm", WARM_UP).await?;
    let (large, _) = cluster.bind_claims(Contender::Program, "large", 1).await?;
    fill_volume(&program, &large)?;
    let before = bind_in_turn(cluster, "before", CLAIMS).await?;
    cluster.delete_claims(large).await?;
    let during = bind_in_turn(cluster, "during", CLAIMS).await?;
    ensure!(program.is_erasing()?, "the volume was erased before the last claim: it needs more files");
    let row = |percent: f64| {
        let (during, before) = (percentile(&during, percent), percentile(&before, percent));
        let files = DIRECTORIES * FILES_OF_EACH;
        let work = format!(
            "one claim from its POST to Bound, p{percent} of {CLAIMS}, while a volume of {files} files is erased; \
             peer: without"
        );
        BenchRow::new(format!("erasing_bound_p{percent}"), work, "ms", during)
            .peer("idle", "-", before)
            .goal_at_most(before * GOAL_RATIO)
    };
    Ok(vec![row(50.0), row(99.0)])
}

/// Binds claims one after another; returns the milliseconds that each took.
async fn bind_in_turn(cluster: &mut BenchCluster, name: &str, count: usize) -> Result<Vec<f64>> {
    let mut samples = Vec::new();
    for number in 0..count {
        let label = format!("erasing-{name}-{number}");
        let (batch, took) = cluster.bind_claims(Contender::Program, &label, 1).await?;
        samples.push(took);
        cluster.delete_claims(batch).await?;
    }
    Ok(samples)
}

fn fill_volume(program: &ProgramDaemon, large: &ClaimBatch) -> Result<()> {
    let volume = program.volume_path(large.volumes().next().context("a claim has a volume")?);
    for directory in 0..DIRECTORIES {
        fill_directory(&volume.join(directory.to_string()))?;
    }
    // Otherwise the claims would wait for these writes.
    File::open(&volume).and_then(|volume| Ok(rustix::fs::syncfs(&volume)?)).context("write all to the disk")
}

fn fill_directory(directory: &Path) -> Result<()> {
    fs::create_dir(directory)?;
    for file in 0..FILES_OF_EACH {
        File::create(directory.join(file.to_string()))?;
    }
    Ok(())
}

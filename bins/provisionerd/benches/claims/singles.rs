//! One claim at a time.

use std::fs::{self, File};
use std::time::Instant;

use anyhow::Result;
use testbed::Scratch;
use testbed::bench::{BenchRow, Interleaved, median, percentile};

use crate::scene::Scene;
use crate::side::Side;

const ROUNDS: usize = 300;
/// Those whose connections and caches are new are not counted.
const WARM_UP: usize = 10;
/// What ours may add to the null provisioner and the disk: reading the claim once more, and its own work.
const ADDED_MS: f64 = 3.0;

pub(crate) async fn measure(scene: &mut Scene) -> Result<Vec<BenchRow>> {
    let mut figures = Interleaved::default();
    for round in 0..WARM_UP + ROUNDS {
        let turns = if round % 2 == 0 { [Side::Ours, Side::Null] } else { [Side::Null, Side::Ours] };
        for side in turns {
            let label = format!("one-{}-{round}", side.name());
            let (batch, took) = scene.bind(side, &label, 1).await?;
            if round >= WARM_UP {
                let samples = if side == Side::Ours { &mut figures.ours } else { &mut figures.peer };
                samples.push(took);
            }
            scene.delete(batch).await?;
        }
    }
    let disk = median(&disk()?);
    let row = |percent: f64| {
        let (ours, null) = (percentile(&figures.ours, percent), percentile(&figures.peer, percent));
        let work =
            format!("one claim from its POST to Bound, p{percent} of {ROUNDS}; limit: null and the disk");
        let row = BenchRow::new(format!("bound_p{percent}"), work, "ms", ours).peer("null", "-", null);
        row.limit(null + disk)
    };
    let work = "what a volume's birth has to sync: mkdir, fsync, rename, fsync of both parents";
    let bare = BenchRow::new("bare_disk", work, "ms", disk);
    let p50 = row(50.0);
    let goal = p50.limit.unwrap_or_default() + ADDED_MS;
    Ok(vec![p50.at_most(goal), row(99.0), bare])
}

/// Milliseconds for the calls that a volume's birth can't do without.
fn disk() -> Result<Vec<f64>> {
    let scratch = Scratch::new()?;
    let [new, volumes] = ["new", "volumes"].map(|name| scratch.path().join(name));
    fs::create_dir(&new)?;
    fs::create_dir(&volumes)?;
    let parents = [File::open(&volumes)?, File::open(&new)?];
    (0..ROUNDS)
        .map(|round| {
            let [from, to] = [&new, &volumes].map(|parent| parent.join(round.to_string()));
            let start = Instant::now();
            fs::create_dir(&from)?;
            File::open(&from)?.sync_all()?;
            fs::rename(&from, &to)?;
            parents.iter().try_for_each(File::sync_all)?;
            Ok(start.elapsed().as_secs_f64() * 1e3)
        })
        .collect()
}

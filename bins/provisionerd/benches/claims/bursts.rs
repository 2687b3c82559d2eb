//! Many claims at once, and their requests at the API server.

use anyhow::Result;
use testbed::bench::{BenchRow, InterleavedSamples, median};

use crate::bench_cluster::BenchCluster;
use crate::contender::Contender;
use crate::requests::RequestCounts;

/// How many claims at once, and how often.
const BURSTS: [(usize, usize); 2] = [(300, 4), (1000, 2)];
/// How many claims ours has to bind in the time in which the null provisioner binds one.
const GOAL_RATIO: f64 = 0.95;

/// Durations and request counts of one contender's bursts.
#[derive(Default)]
struct BurstFigures {
    bound: Vec<f64>,
    deleted_after: Vec<f64>,
    provisioner_writes: Vec<f64>,
    writes: Vec<f64>,
    reads: Vec<f64>,
    deleting: Vec<f64>,
}

pub(crate) async fn measure(cluster: &mut BenchCluster) -> Result<Vec<BenchRow>> {
    let mut rows = Vec::new();
    for (claims, rounds) in BURSTS {
        let (mut ours, mut null) = (BurstFigures::default(), BurstFigures::default());
        for run_number in 0..rounds {
            let turns = if run_number % 2 == 0 {
                [Contender::Ours, Contender::Null]
            } else {
                [Contender::Null, Contender::Ours]
            };
            for contender in turns {
                let figures = if contender == Contender::Ours { &mut ours } else { &mut null };
                measure_burst(cluster, (contender, run_number), claims, figures).await?;
            }
        }
        rows.extend(bench_rows((claims, rounds), &ours, &null));
    }
    Ok(rows)
}

async fn measure_burst(
    cluster: &mut BenchCluster,
    (contender, run_number): (Contender, usize),
    claims: usize,
    figures: &mut BurstFigures,
) -> Result<()> {
    let before = RequestCounts::read(&cluster.kube)?;
    let label = format!("many-{}-{claims}-{run_number}", contender.name());
    let (batch, took) = cluster.bind_claims(contender, &label, claims).await?;
    let requests = RequestCounts::since(&cluster.kube, &before, claims)?;
    let each = |count: f64| count / claims as f64;
    figures.bound.push(took / 1e3);
    figures.provisioner_writes.push(each(requests.provisioner_writes()));
    figures.writes.push(each(requests.all_writes()));
    figures.reads.push(each(requests.all_reads()));
    let before = RequestCounts::read(&cluster.kube)?;
    figures.deleted_after.push(cluster.delete_claims(batch).await? / 1e3);
    let requests = RequestCounts::since(&cluster.kube, &before, 0)?;
    figures.deleting.push(each(requests.provisioner_writes()));
    Ok(())
}

fn bench_rows((claims, rounds): (usize, usize), ours: &BurstFigures, null: &BurstFigures) -> Vec<BenchRow> {
    let row = |id: &str, work: &str, unit: &str, figures: fn(&BurstFigures) -> &Vec<f64>| {
        let both = InterleavedSamples { ours: figures(ours).clone(), peer: figures(null).clone() };
        let work = format!("{work}; median of {rounds}");
        let id = format!("{id}_{claims}");
        BenchRow::new(id, work, unit, median(&both.ours)).peer("null", "-", median(&both.peer))
    };
    let burst = format!("{claims} claims at once, from the first POST to the last Bound");
    let deleted = format!(
        "{claims} claims deleted at once, until the last PersistentVolume is deleted; null: deleted for it"
    );
    let provisioner = "write requests of the provisioner per claim";
    let all = "write requests of all clients per claim, by the API server's metrics";
    let reads = "reads of single objects by all clients per claim";
    let deleting = "write requests of the provisioner per deleted volume";
    vec![
        row("burst", &burst, "s", |contender| &contender.bound)
            .goal_at_most(median(&null.bound) / GOAL_RATIO),
        row("delete", &deleted, "s", |contender| &contender.deleted_after),
        row("writes_own", provisioner, "requests", |contender| &contender.provisioner_writes)
            .goal_at_most(2.0),
        row("writes_all", all, "requests", |contender| &contender.writes),
        row("reads_all", reads, "requests", |contender| &contender.reads),
        row("writes_delete", deleting, "requests", |contender| &contender.deleting).goal_at_most(2.0),
    ]
}

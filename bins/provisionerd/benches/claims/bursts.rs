//! Many claims at once, and what they ask of the API server.

use anyhow::Result;
use testbed::bench::{BenchRow, Interleaved, median};

use crate::requests::Requests;
use crate::scene::Scene;
use crate::side::Side;

const CLAIMS: usize = 300;
const ROUNDS: usize = 4;

/// What one side's bursts took and asked for.
#[derive(Default)]
struct Side300 {
    bound: Vec<f64>,
    gone: Vec<f64>,
    own: Vec<f64>,
    writes: Vec<f64>,
    reads: Vec<f64>,
    deleting: Vec<f64>,
}

pub(crate) async fn measure(scene: &mut Scene) -> Result<Vec<BenchRow>> {
    let (mut ours, mut null) = (Side300::default(), Side300::default());
    for round in 0..ROUNDS {
        let turns = if round % 2 == 0 { [Side::Ours, Side::Null] } else { [Side::Null, Side::Ours] };
        for side in turns {
            let figures = if side == Side::Ours { &mut ours } else { &mut null };
            burst(scene, side, round, figures).await?;
        }
    }
    Ok(rows(&ours, &null))
}

async fn burst(scene: &mut Scene, side: Side, round: usize, figures: &mut Side300) -> Result<()> {
    let before = Requests::read(&scene.kube)?;
    let (batch, took) = scene.bind(side, &format!("many-{}-{round}", side.name()), CLAIMS).await?;
    let asked = Requests::since(&scene.kube, &before, CLAIMS)?;
    let each = |count: f64| count / CLAIMS as f64;
    figures.bound.push(took / 1e3);
    figures.own.push(each(asked.own_writes()));
    figures.writes.push(each(asked.all_writes()));
    figures.reads.push(each(asked.all_reads()));
    let before = Requests::read(&scene.kube)?;
    figures.gone.push(scene.delete(batch).await? / 1e3);
    let asked = Requests::since(&scene.kube, &before, 0)?;
    figures.deleting.push(each(asked.own_writes()));
    Ok(())
}

fn rows(ours: &Side300, null: &Side300) -> Vec<BenchRow> {
    let row = |id: &str, work: &str, unit: &str, figures: fn(&Side300) -> &Vec<f64>| {
        let both = Interleaved { ours: figures(ours).clone(), peer: figures(null).clone() };
        let work = format!("{work}; median of {ROUNDS}");
        BenchRow::new(id, work, unit, median(&both.ours)).peer("null", "-", median(&both.peer))
    };
    let burst = format!("{CLAIMS} claims at once, from the first POST to the last Bound");
    let deleted = format!(
        "{CLAIMS} claims deleted at once, until the last volume's object is gone; null: deleted for it"
    );
    let own = "requests per claim that the provisioner writes with";
    let all = "requests per claim that anybody writes with, by the API server's count";
    let reads = "requests per claim that anybody reads one object with";
    let deleting = "requests per deleted volume that the provisioner writes with";
    vec![
        row("burst_300", &burst, "s", |side| &side.bound),
        row("delete_300", &deleted, "s", |side| &side.gone),
        row("writes_own", own, "requests", |side| &side.own).at_most(2.0),
        row("writes_all", all, "requests", |side| &side.writes),
        row("reads_all", reads, "requests", |side| &side.reads),
        row("writes_delete", deleting, "requests", |side| &side.deleting).at_most(2.0),
    ]
}

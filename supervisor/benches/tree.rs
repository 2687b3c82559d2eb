//! The tree beside suture: restarts in the process, ten thousand runnables up, and what each of them weighs.
//!
//! `cargo xtask bench supervisor-tree`

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nodekeel_supervisor::{Backoff, Child, Context, Failure, Policy, Supervisor};
use testbed::bench::{BenchRow, median};
use tokio::sync::Notify;

const ROUNDS: usize = 5;
const RESTARTS: usize = 10_000;
const RUNNABLES: usize = 10_000;
const GROUP: usize = 64;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    // A process of its own for each sample: memory that an earlier one has left to the allocator would be invisible.
    if std::env::args().nth(1).as_deref() == Some("up") {
        let (up, bytes) = up().await;
        println!("{up}\n{bytes}");
        return Ok(());
    }
    let this = std::env::current_exe()?;
    let suture = suture();
    if let Err(reason) = &suture {
        println!("without the peer suture: {reason:#}");
    }
    let mut ours: [Vec<f64>; 4] = Default::default();
    let mut theirs: [Vec<f64>; 3] = Default::default();
    // In turn, so that a machine that gets slower meanwhile slows both.
    for _ in 0..ROUNDS {
        ours[0].push(restart().await);
        ours[1].push(group_restart().await);
        let up = figures(&this, "up")?;
        ours[2].push(up[0]);
        ours[3].push(up[1]);
        if let Ok(suture) = &suture {
            theirs[0].extend(figures(suture, "restart")?);
            let up = figures(suture, "up")?;
            theirs[1].push(up[0]);
            theirs[2].push(up[1]);
        }
    }
    testbed::bench::write("supervisor-tree", &rows(&ours, &theirs))?;
    Ok(())
}

/// What was measured, beside the peer where it was there.
fn rows(ours: &[Vec<f64>; 4], theirs: &[Vec<f64>; 3]) -> [BenchRow; 4] {
    let row =
        |id, work, unit, index: usize, scale| BenchRow::new(id, work, unit, median(&ours[index]) / scale);
    let beside = |row: BenchRow, index: usize, scale: f64| match theirs[index].is_empty() {
        true => row,
        false => row.peer("suture", "4.0.6", median(&theirs[index]) / scale),
    };
    let restart = row("restart", "exit of a runnable to its next run, no backoff, p50", "µs", 0, 1e3);
    let group = "one failure to all 64 of its group running again, p50";
    let up = row("up-10000", "10,000 children of one parent added and running", "ms", 2, 1e6);
    let bytes = row("bytes-each", "resident memory of one of 10,000 idle runnables", "bytes", 3, 1.0);
    [
        beside(restart, 0, 1e3).at_most(5.0),
        row("restart-group-64", group, "µs", 1, 1e3).at_most(200.0),
        beside(up, 1, 1e6).at_most(50.0),
        beside(bytes, 2, 1.0).at_most(1536.0),
    ]
}

fn tree(root: impl nodekeel_supervisor::Runnable) -> Supervisor {
    Supervisor::builder().policy(Policy { backoff: Backoff::NONE, ..Policy::default() }).start(root)
}

async fn idle(ctx: Context) -> Result<(), Failure> {
    ctx.ready()?;
    Err(ctx.cancelled().await.into())
}

/// Nanoseconds from the end of one run to the beginning of the next, p50.
async fn restart() -> f64 {
    let samples = Arc::new(Mutex::new((None::<Instant>, Vec::with_capacity(RESTARTS))));
    let (taken, full) = (Arc::clone(&samples), Arc::new(Notify::new()));
    let enough = Arc::clone(&full);
    let supervisor = tree(move |ctx: Context| {
        let (taken, enough) = (Arc::clone(&taken), Arc::clone(&enough));
        async move {
            let failing = move |ctx: Context| {
                let (taken, enough) = (Arc::clone(&taken), Arc::clone(&enough));
                async move {
                    let measured = {
                        let mut taken = taken.lock().expect("no panic holds it");
                        if let Some(ended) = taken.0.take() {
                            taken.1.push(ended.elapsed().as_nanos() as f64);
                        }
                        taken.1.len()
                    };
                    if measured == RESTARTS {
                        enough.notify_one();
                        return Err(ctx.cancelled().await.into());
                    }
                    taken.lock().expect("no panic holds it").0 = Some(Instant::now());
                    Err(Failure::new("fails"))
                }
            };
            ctx.run("failing", failing)?;
            idle(ctx).await
        }
    });
    full.notified().await;
    supervisor.shutdown().await;
    let samples = samples.lock().expect("no panic holds it");
    median(&samples.1)
}

/// Nanoseconds from one failure until the whole group runs again, p50 of many failures.
async fn group_restart() -> f64 {
    let (running, all, fail) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (counted, complete, told) = (Arc::clone(&running), Arc::clone(&all), Arc::clone(&fail));
    let supervisor = tree(move |ctx: Context| {
        let (counted, complete, told) = (Arc::clone(&counted), Arc::clone(&complete), Arc::clone(&told));
        async move {
            let member = |number: usize| {
                let (counted, complete, told) =
                    (Arc::clone(&counted), Arc::clone(&complete), Arc::clone(&told));
                Child::new(format!("member-{number}"), move |ctx: Context| {
                    let (counted, complete, told) =
                        (Arc::clone(&counted), Arc::clone(&complete), Arc::clone(&told));
                    async move {
                        ctx.ready()?;
                        if counted.fetch_add(1, Ordering::SeqCst) + 1 == GROUP {
                            complete.notify_one();
                        }
                        tokio::select! {
                            cancelled = ctx.cancelled() => Err(cancelled.into()),
                            () = told.notified(), if number == 0 => Err(Failure::new("fails")),
                        }
                    }
                })
            };
            ctx.run_group((0..GROUP).map(member))?;
            idle(ctx).await
        }
    });
    all.notified().await;
    let mut samples = Vec::new();
    for _ in 0..500 {
        running.store(0, Ordering::SeqCst);
        let began = Instant::now();
        fail.notify_one();
        all.notified().await;
        samples.push(began.elapsed().as_nanos() as f64);
    }
    supervisor.shutdown().await;
    median(&samples)
}

/// Nanoseconds until all runnables are up, and the bytes of resident memory that each takes.
async fn up() -> (f64, f64) {
    let (before, began) = (resident(), Instant::now());
    let (left, all) = (Arc::new(AtomicUsize::new(RUNNABLES)), Arc::new(Notify::new()));
    let (counted, complete) = (Arc::clone(&left), Arc::clone(&all));
    let supervisor = tree(move |ctx: Context| {
        let (counted, complete) = (Arc::clone(&counted), Arc::clone(&complete));
        async move {
            for number in 0..RUNNABLES {
                let (counted, complete) = (Arc::clone(&counted), Arc::clone(&complete));
                ctx.run(format!("r{number}"), move |ctx: Context| {
                    if counted.fetch_sub(1, Ordering::SeqCst) == 1 {
                        complete.notify_one();
                    }
                    idle(ctx)
                })?;
            }
            idle(ctx).await
        }
    });
    all.notified().await;
    let figures = (began.elapsed().as_nanos() as f64, (resident() as f64 - before as f64) / RUNNABLES as f64);
    let report = tokio::time::timeout(Duration::from_secs(10), supervisor.shutdown()).await;
    assert!(report.is_ok_and(|report| report.stragglers.is_empty()), "the tree goes down");
    figures
}

fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("every Linux has it");
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("its second field");
    pages * 4096
}

/// The peer, built from its own module where Go is there.
fn suture() -> anyhow::Result<PathBuf> {
    let module = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../bins/testbed/peers/suture");
    let binary = testbed::bench::directory().join("suture-peer");
    let built =
        Command::new("go").args(["build", "-o"]).arg(&binary).arg(".").current_dir(module).status()?;
    anyhow::ensure!(built.success(), "go build: {built}");
    Ok(binary)
}

fn figures(program: &PathBuf, what: &str) -> anyhow::Result<Vec<f64>> {
    let output = Command::new(program).arg(what).output()?;
    anyhow::ensure!(output.status.success(), "{} {what}: {}", program.display(), output.status);
    Ok(String::from_utf8(output.stdout)?.lines().map(str::parse).collect::<Result<_, _>>()?)
}

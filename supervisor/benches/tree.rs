//! The tree, compared with suture: restarts, the start of ten thousand runnables, and the memory of each. And what takes
//! in a large tree how many times as long as in one of half its size.
//!
//! `cargo xtask bench supervisor-tree`

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use nodekeel_supervisor::{
    Backoff, ChildPolicy, ChildSpec, Context, Failure, GroupPolicy, Removal, Supervisor,
};
use testbed::bench::{BenchRow, median};
use tokio::sync::Notify;

const ROUNDS: usize = 5;
const RESTARTS: usize = 10_000;
const RUNNABLES: usize = 10_000;
const GROUP: usize = 64;
/// The sizes that are compared, and how many times as long the larger one may take: 2 is linear, 4 is quadratic.
const SIZES: [usize; 2] = [8_000, 16_000];
const GROWTH: f64 = 3.0;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    // A separate process for each sample, as for the peer: memory that an earlier sample has left to the allocator would
    // not be counted.
    match std::env::args().nth(1).as_deref() {
        Some("up") => {
            let (up, bytes) = time_start_all().await;
            println!("{up}\n{bytes}");
            return Ok(());
        }
        Some("restart") => {
            println!("{}", time_restarts().await);
            return Ok(());
        }
        _ => {}
    }
    if let Some(work) =
        std::env::args().nth(1).and_then(|name| Growing::ALL.into_iter().find(|work| work.id() == name))
    {
        let size = std::env::args().nth(2).and_then(|size| size.parse().ok());
        println!("{}", work.time(size.unwrap_or(SIZES[0])).await);
        return Ok(());
    }
    let this = std::env::current_exe()?;
    let suture = build_suture();
    if let Err(reason) = &suture {
        println!("without the peer suture: {reason:#}");
    }
    let mut ours: [Vec<f64>; 4] = Default::default();
    let mut theirs: [Vec<f64>; 3] = Default::default();
    // In turn, so that a host that becomes slower in between slows both.
    for _ in 0..ROUNDS {
        ours[0].extend(run_peer(&this, &["restart"])?);
        ours[1].push(time_group_restarts().await);
        let up = run_peer(&this, &["up"])?;
        ours[2].push(up[0]);
        ours[3].push(up[1]);
        if let Ok(suture) = &suture {
            theirs[0].extend(run_peer(suture, &["restart"])?);
            let up = run_peer(suture, &["up"])?;
            theirs[1].push(up[0]);
            theirs[2].push(up[1]);
        }
    }
    let mut rows = rows(&ours, &theirs).to_vec();
    for work in Growing::ALL {
        rows.push(work.row(&this)?);
    }
    testbed::bench::write_rows("supervisor-tree", &rows)?;
    Ok(())
}

/// The measured rows, with the peer's values where it is installed.
fn rows(ours: &[Vec<f64>; 4], theirs: &[Vec<f64>; 3]) -> [BenchRow; 4] {
    let row =
        |id, work, unit, index: usize, scale| BenchRow::new(id, work, unit, median(&ours[index]) / scale);
    let with_peer = |row: BenchRow, index: usize, scale: f64| {
        if theirs[index].is_empty() {
            return row;
        }
        row.peer("suture", "4.0.6", median(&theirs[index]) / scale)
    };
    let restart_goal = if theirs[0].is_empty() { 5.0 } else { median(&theirs[0]) / 1e3 };
    let restart = row("restart", "exit of a runnable to its next run, no backoff, p50", "µs", 0, 1e3);
    let group = "one failure to all 64 of its group running again, p50";
    let up = row("up-10000", "10,000 children of one parent added and running", "ms", 2, 1e6);
    let bytes = row("bytes-each", "resident memory of one of 10,000 idle runnables", "bytes", 3, 1.0);
    [
        with_peer(restart, 0, 1e3).goal_at_most(restart_goal),
        row("restart-group-64", group, "µs", 1, 1e3).goal_at_most(200.0),
        with_peer(up, 1, 1e6).goal_at_most(50.0),
        with_peer(bytes, 2, 1.0).goal_at_most(1536.0),
    ]
}

fn start_tree(root: impl nodekeel_supervisor::Runnable) -> Supervisor {
    Supervisor::builder()
        .default_policy(ChildPolicy { backoff: Backoff::NONE, ..ChildPolicy::default() })
        .start(root)
}

async fn run_idle(ctx: Context) -> Result<(), Failure> {
    ctx.signal_ready()?;
    Err(ctx.canceled().await.into())
}

/// Nanoseconds from the end of one run to the start of the next, p50.
async fn time_restarts() -> f64 {
    let samples = Arc::new(Mutex::new((None::<Instant>, Vec::with_capacity(RESTARTS))));
    let (taken, full) = (Arc::clone(&samples), Arc::new(Notify::new()));
    let enough = Arc::clone(&full);
    let supervisor = start_tree(move |ctx: Context| {
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
                        return Err(ctx.canceled().await.into());
                    }
                    taken.lock().expect("no panic holds it").0 = Some(Instant::now());
                    Err(Failure::new("fails"))
                }
            };
            ctx.run_child("failing", failing)?;
            run_idle(ctx).await
        }
    });
    full.notified().await;
    supervisor.shutdown().await;
    let samples = samples.lock().expect("no panic holds it");
    median(&samples.1)
}

/// Nanoseconds from one failure until the whole group is running again, p50 of many failures.
async fn time_group_restarts() -> f64 {
    let (running, all, fail) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (counted, complete, failing) = (Arc::clone(&running), Arc::clone(&all), Arc::clone(&fail));
    let supervisor = start_tree(move |ctx: Context| {
        let (counted, complete, failing) =
            (Arc::clone(&counted), Arc::clone(&complete), Arc::clone(&failing));
        async move {
            let member = |number: usize| {
                let (counted, complete, failing) =
                    (Arc::clone(&counted), Arc::clone(&complete), Arc::clone(&failing));
                ChildSpec::new(format!("member-{number}"), move |ctx: Context| {
                    let (counted, complete, failing) =
                        (Arc::clone(&counted), Arc::clone(&complete), Arc::clone(&failing));
                    async move {
                        ctx.signal_ready()?;
                        if counted.fetch_add(1, Ordering::SeqCst) + 1 == GROUP {
                            complete.notify_one();
                        }
                        tokio::select! {
                            canceled = ctx.canceled() => Err(canceled.into()),
                            () = failing.notified(), if number == 0 => Err(Failure::new("fails")),
                        }
                    }
                })
            };
            ctx.run_group((0..GROUP).map(member))?;
            run_idle(ctx).await
        }
    });
    all.notified().await;
    let mut samples = Vec::new();
    for _ in 0..500 {
        running.store(0, Ordering::SeqCst);
        let started = Instant::now();
        fail.notify_one();
        all.notified().await;
        samples.push(started.elapsed().as_nanos() as f64);
    }
    supervisor.shutdown().await;
    median(&samples)
}

/// Nanoseconds until all runnables are running, and the bytes of resident memory of each.
async fn time_start_all() -> (f64, f64) {
    let (before, started) = (resident_bytes(), Instant::now());
    let (left, all) = (Arc::new(AtomicUsize::new(RUNNABLES)), Arc::new(Notify::new()));
    let (counted, complete) = (Arc::clone(&left), Arc::clone(&all));
    let supervisor = start_tree(move |ctx: Context| {
        let (counted, complete) = (Arc::clone(&counted), Arc::clone(&complete));
        async move {
            for number in 0..RUNNABLES {
                let (counted, complete) = (Arc::clone(&counted), Arc::clone(&complete));
                ctx.run_child(format!("r{number}"), move |ctx: Context| {
                    if counted.fetch_sub(1, Ordering::SeqCst) == 1 {
                        complete.notify_one();
                    }
                    run_idle(ctx)
                })?;
            }
            run_idle(ctx).await
        }
    });
    all.notified().await;
    let figures =
        (started.elapsed().as_nanos() as f64, (resident_bytes() as f64 - before as f64) / RUNNABLES as f64);
    let report = tokio::time::timeout(Duration::from_secs(10), supervisor.shutdown()).await;
    assert!(report.is_ok_and(|report| report.stragglers.is_empty()), "the tree goes down");
    figures
}

/// Work on many runnables at once that has to be linear.
#[derive(Clone, Copy)]
enum Growing {
    Waiters,
    Chain,
    Removals,
    GroupRemovals,
}

impl Growing {
    const ALL: [Self; 4] = [Self::Waiters, Self::Chain, Self::Removals, Self::GroupRemovals];

    fn id(self) -> &'static str {
        match self {
            Self::Waiters => "waiters-growth",
            Self::Chain => "chain-growth",
            Self::Removals => "removals-growth",
            Self::GroupRemovals => "group-removals-growth",
        }
    }

    fn row(self, this: &PathBuf) -> anyhow::Result<BenchRow> {
        let mut times: [Vec<f64>; 2] = Default::default();
        for _ in 0..ROUNDS {
            for (times, size) in times.iter_mut().zip(SIZES) {
                times.extend(run_peer(this, &[self.id(), &size.to_string()])?);
            }
        }
        let work = match self {
            Self::Waiters => "runnables that wait for the same one to be ready",
            Self::Chain => "a chain of runnables of which each waits for the one before it",
            Self::Removals => "removals at the same time of runnables that were added one by one",
            Self::GroupRemovals => "removals at the same time of the members of one group",
        };
        let [small, large] = [median(&times[0]), median(&times[1])];
        let work = format!("{work}: 16,000 of them ({:.0} ms) compared with 8,000", large / 1e6);
        Ok(BenchRow::new(self.id(), work, "times", large / small).goal_at_most(GROWTH))
    }

    /// Nanoseconds.
    async fn time(self, size: usize) -> f64 {
        let (left, all) = (Arc::new(AtomicUsize::new(size)), Arc::new(Notify::new()));
        let (counted, complete, started) = (Arc::clone(&left), Arc::clone(&all), Instant::now());
        let supervisor = start_tree(move |ctx: Context| {
            let child = |number: usize| {
                let (counted, complete) = (Arc::clone(&counted), Arc::clone(&complete));
                ChildSpec::new(format!("r{number}"), move |ctx: Context| {
                    let (counted, complete) = (Arc::clone(&counted), Arc::clone(&complete));
                    async move {
                        ctx.signal_ready()?;
                        if counted.fetch_sub(1, Ordering::SeqCst) == 1 {
                            complete.notify_one();
                        }
                        Err::<(), Failure>(ctx.canceled().await.into())
                    }
                })
            };
            let added = match self {
                Self::Removals => (0..size).try_for_each(|number| ctx.run_group([child(number)])),
                Self::GroupRemovals => ctx.run_group_with(GroupPolicy::RestForOne, (0..size).map(child)),
                // The last one starts first, so that all the others wait.
                Self::Waiters => (0..size).try_for_each(|number| {
                    let last = format!("root.r{}", size - 1);
                    ctx.run_group([child(number).depends_on((number + 1 < size).then_some(last))])
                }),
                Self::Chain => (0..size).try_for_each(|number| {
                    let next = format!("root.r{}", number + 1);
                    ctx.run_group([child(number).depends_on((number + 1 < size).then_some(next))])
                }),
            };
            async move {
                added?;
                run_idle(ctx).await
            }
        });
        all.notified().await;
        if matches!(self, Self::Waiters | Self::Chain) {
            return started.elapsed().as_nanos() as f64;
        }
        let dns: Vec<String> = (0..size).map(|number| format!("root.r{number}")).collect();
        let started = Instant::now();
        let removed = join_all(dns.iter().map(|dn| supervisor.remove_runnable(dn, Removal::ForGood))).await;
        assert!(removed.iter().all(Result::is_ok), "{removed:?}");
        started.elapsed().as_nanos() as f64
    }
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("every Linux has it");
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("its second field");
    pages * 4096
}

/// Builds the peer from its module, if Go is installed.
fn build_suture() -> anyhow::Result<PathBuf> {
    let module = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tools/testbed/peers/suture");
    let binary = testbed::bench::rows_directory().join("suture-peer");
    let built =
        Command::new("go").args(["build", "-o"]).arg(&binary).arg(".").current_dir(module).status()?;
    anyhow::ensure!(built.success(), "go build: {built}");
    Ok(binary)
}

fn run_peer(program: &PathBuf, what: &[&str]) -> anyhow::Result<Vec<f64>> {
    let output = Command::new(program).args(what).output()?;
    anyhow::ensure!(output.status.success(), "{} {what:?}: {}", program.display(), output.status);
    Ok(String::from_utf8(output.stdout)?.lines().map(str::parse).collect::<Result<_, _>>()?)
}

//! A service that fails, restarts and reports.
//!
//! `cargo run -p examples --example supervise`

use std::time::Duration;

use nodekeel_supervisor::{Backoff, Context, Event, Failure, Policy, State, Supervisor};

/// Works twice for a moment before it has had enough; the third time it stays.
async fn flaky(ctx: Context) -> Result<(), Failure> {
    ctx.ready()?;
    tracing::info!("at work, for the {}. time", ctx.generation());
    if ctx.generation() < 3 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        return Err("the disk went away".into());
    }
    Err(ctx.cancelled().await.into())
}

#[tokio::main]
async fn main() {
    tracing_subscriber::fmt().without_time().with_target(false).with_writer(std::io::stdout).init();
    let backoff = Backoff { initial: Duration::from_millis(100), ..Backoff::default() };
    let supervisor = Supervisor::builder()
        .policy(Policy { backoff, ..Policy::default() })
        .hook(|event: &Event| {
            println!("event {:>2}  {:<10} run {}  {}", event.seq, event.dn, event.generation, event.change)
        })
        .start(|ctx: Context| async move {
            ctx.run("flaky", flaky)?;
            ctx.ready()?;
            Err::<(), Failure>(ctx.cancelled().await.into())
        });

    let mut changes = supervisor.watch();
    while supervisor.snapshot().iter().all(|node| (node.generation, node.state) != (3, State::Ready)) {
        changes.changed().await.expect("the supervisor lives as long as this function");
    }
    for node in supervisor.snapshot() {
        println!(
            "{:<10} {:<6} {} restarts, {} failures in a row",
            node.dn,
            node.state,
            node.restarts(),
            node.failures
        );
        for exit in node.exits {
            println!("           run {} ended {}: {}", exit.generation, exit.state, exit.exit);
        }
    }
    let report = supervisor.shutdown().await;
    println!("stopped, {} stragglers", report.stragglers.len());
}

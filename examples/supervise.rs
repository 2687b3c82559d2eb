//! A service that fails, restarts and reports.
//!
//! `cargo run -p examples --example supervise`

use std::time::Duration;

use nodekeel_supervisor::{Backoff, ChildPolicy, Context, Event, Failure, RunnableState, Supervisor};

/// Fails twice after a moment; the third incarnation keeps running.
async fn run_flaky_service(ctx: Context) -> Result<(), Failure> {
    ctx.signal_ready()?;
    tracing::info!("incarnation {} is working", ctx.generation());
    if ctx.generation() < 3 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        return Err("the disk has failed".into());
    }
    Err(ctx.canceled().await.into())
}

#[tokio::main]
async fn main() {
    tracing_subscriber::fmt().without_time().with_target(false).with_writer(std::io::stdout).init();
    let backoff = Backoff { initial: Duration::from_millis(100), ..Backoff::default() };
    let supervisor = Supervisor::builder()
        .default_policy(ChildPolicy { backoff, ..ChildPolicy::default() })
        .event_hook(|event: &Event| {
            println!("event {:>2}  {:<10} run {}  {}", event.seq, event.dn, event.generation, event.change)
        })
        .start(|ctx: Context| async move {
            ctx.run_child("flaky", run_flaky_service)?;
            ctx.signal_ready()?;
            Err::<(), Failure>(ctx.canceled().await.into())
        });

    let mut changes = supervisor.watch_changes();
    while supervisor.snapshot().iter().all(|node| (node.generation, node.state) != (3, RunnableState::Ready))
    {
        changes.changed().await.expect("the supervisor exists as long as this function");
    }
    for node in supervisor.snapshot() {
        println!(
            "{:<10} {:<6} {} restarts, {} consecutive failures",
            node.dn,
            node.state,
            node.restart_count(),
            node.failures
        );
        for exit in node.exits {
            println!("           run {} exited {}: {}", exit.generation, exit.state, exit.exit);
        }
    }
    let report = supervisor.shutdown().await;
    println!("stopped, {} stragglers", report.stragglers.len());
}

//! Children that the program starts by other means keep their status, also when it is PID 1.

use std::process::{Command, Stdio};
use std::time::Duration;

use nodekeel_supervisor::{Backoff, Child, Context, Failure, Policy, Supervisor};
use tokio::process::Command as AsyncCommand;

use super::{ALONE, Bed, sh, until_gone};

/// Runs hundreds of supervised processes that leave orphans behind, one after the other in ten places.
fn busy() -> Supervisor {
    Supervisor::builder().start(|ctx: Context| async move {
        for place in 0..10 {
            let process = sh("(exec sleep 0.01 &) ; exec true");
            let delay = Duration::from_millis(1);
            let policy = Policy {
                backoff: Backoff { initial: delay, max: delay, ..Backoff::default() },
                ..Policy::default()
            };
            ctx.run_group([Child::new(format!("p{place}"), process).policy(policy)])?;
        }
        ctx.ready()?;
        Err::<(), Failure>(ctx.cancelled().await.into())
    })
}

fn starts(supervisor: &Supervisor) -> u64 {
    supervisor.snapshot().iter().filter(|node| &*node.dn != "root").map(|node| node.generation).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_status_of_tokios_and_stds_children_is_stolen() {
    let _alone = ALONE.lock().await;
    let supervisor = busy();
    let mut changes = supervisor.watch();
    let mut rounds = 0;
    while starts(&supervisor) < 300 || rounds < 100 {
        rounds += 1;
        let code = rounds % 100;
        let script = format!("exit {code}");
        let status =
            AsyncCommand::new("/bin/sh").args(["-c", &script]).status().await.expect("tokio gets its status");
        assert_eq!(status.code(), Some(code));
        // It has a session of its own, and ends while nobody waits for it yet.
        let mut child = Command::new("setsid")
            .args(["/bin/sh", "-c", &script])
            .stdin(Stdio::null())
            .spawn()
            .expect("it starts");
        changes.changed().await.expect("the supervisor lives");
        assert_eq!(child.wait().expect("std gets its status").code(), Some(code));
    }
    let report = supervisor.shutdown().await;
    assert!(report.stragglers.is_empty(), "{report:?}");
    println!("{rounds} rounds beside supervised starts");
}

// What nsenter brings has no mark and a session of its own; so has what a child makes so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pid_1_reaps_what_others_bring_into_its_namespace() {
    if std::process::id() != 1 {
        println!("for PID 1 only");
        return;
    }
    let bed = Bed::once(sh("echo pid $$; exec sleep 100"));
    bed.output.pid().await;
    let script = "ulimit -S -x unlimited; setsid sh -c 'sleep 0.05 & echo $!'; true";
    let output = AsyncCommand::new("/bin/bash").args(["-c", script]).output().await.expect("it runs");
    let orphan = String::from_utf8_lossy(&output.stdout).trim().parse().expect("a pid");
    until_gone(orphan);
    bed.shutdown().await;
}

//! Children that the program starts by other means keep their status, also when it is PID 1.

use std::process::{Command, Stdio};
use std::time::Duration;

use nodekeel_supervisor::{Backoff, ChildPolicy, Supervisor};
use tokio::process::Command as AsyncCommand;

use crate::harness::parent_of;

use super::{EXCLUSIVE, ProcessFixture, sh, wait_gone};

/// Runs hundreds of supervised processes that leave orphans behind, in ten runnables.
fn start_busy_supervisor() -> Supervisor {
    let delay = Duration::from_millis(1);
    let backoff = Backoff { initial: delay, max: delay, ..Backoff::default() };
    let policy = ChildPolicy { backoff, ..ChildPolicy::default() };
    Supervisor::builder().default_policy(policy).start(parent_of(|ctx| {
        (0..10)
            .try_for_each(|place| ctx.run_child(format!("p{place}"), sh("(exec sleep 0.01 &) ; exec true")))
    }))
}

fn count_starts(supervisor: &Supervisor) -> u64 {
    supervisor.snapshot().iter().filter(|node| &*node.dn != "root").map(|node| node.generation).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_status_of_tokios_and_stds_children_is_stolen() {
    let _alone = EXCLUSIVE.lock().await;
    let supervisor = start_busy_supervisor();
    let mut changes = supervisor.watch_changes();
    let mut rounds = 0;
    while count_starts(&supervisor) < 300 || rounds < 100 {
        rounds += 1;
        let code = rounds % 100;
        let script = format!("exit {code}");
        let status =
            AsyncCommand::new("/bin/sh").args(["-c", &script]).status().await.expect("tokio gets its status");
        assert_eq!(status.code(), Some(code));
        // It runs in a new session, and exits before its parent waits for it.
        let mut child = Command::new("setsid")
            .args(["/bin/sh", "-c", &script])
            .stdin(Stdio::null())
            .spawn()
            .expect("it starts");
        changes.changed().await.expect("the supervisor is running");
        assert_eq!(child.wait().expect("std gets its status").code(), Some(code));
    }
    let report = supervisor.shutdown().await;
    assert!(report.stragglers.is_empty(), "{report:?}");
    println!("{rounds} rounds beside supervised starts");
}

// A process that joins by nsenter has no mark and a separate session; the child here imitates that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pid_1_reaps_orphans_that_entered_its_namespace() {
    if std::process::id() != 1 {
        println!("for PID 1 only");
        return;
    }
    let fixture = ProcessFixture::run_once(sh("echo pid $$; exec sleep 100"));
    fixture.output.wait_pid().await;
    let script = "ulimit -S -x unlimited; setsid sh -c 'sleep 0.05 & echo $!'; true";
    let output = AsyncCommand::new("/bin/bash").args(["-c", script]).output().await.expect("it runs");
    let orphan = String::from_utf8_lossy(&output.stdout).trim().parse().expect("a pid");
    wait_gone(orphan);
    fixture.shutdown().await;
}

/// Set in the program that a script executes as PID 1: the pids of the jobs of that script.
const JOBS: &str = "NODEKEEL_JOBS";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root"]
async fn pid_1_reaps_the_jobs_of_a_script_that_has_executed_it() {
    if let Ok(jobs) = std::env::var(JOBS) {
        return reap_jobs(&jobs).await;
    }
    let test = "process::other_children::pid_1_reaps_the_jobs_of_a_script_that_has_executed_it";
    // One ends before the supervisor starts, one after that, and one is an orphan by then.
    let script = format!(
        "true & a=$!; sleep 0.5 & b=$!; c=$(sleep 0.5 >/dev/null & echo $!)
         {JOBS}=\"$a $b $c\" exec $0 --exact {test} --ignored --nocapture"
    );
    let this = std::env::current_exe().expect("it runs");
    let mut command = AsyncCommand::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", &script]).arg(this);
    let output = command.output().await.expect("it starts");
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{text:?}");
}

async fn reap_jobs(jobs: &str) {
    assert_eq!(std::process::id(), 1);
    // The program's own child, from before its supervisor, keeps its status.
    let mut own = Command::new("/bin/sh").args(["-c", "exit 7"]).spawn().expect("it starts");
    let fixture = ProcessFixture::run_once(sh("echo pid $$; exec sleep 100"));
    fixture.output.wait_pid().await;
    let jobs: Vec<i32> = jobs.split(' ').map(|pid| pid.parse().expect("a pid")).collect();
    assert_eq!(jobs.len(), 3);
    jobs.into_iter().for_each(wait_gone);
    assert_eq!(own.wait().expect("it keeps its status").code(), Some(7));
    fixture.shutdown().await;
}

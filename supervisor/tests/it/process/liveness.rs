//! Probes of a process that is ready.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nodekeel_supervisor::process::{Liveness, Process, Readiness, Signal, Unready};
use nodekeel_supervisor::{Failure, RunnableChange, RunnableState};

use super::{ProcessFixture, sh};

/// Waits until the first run is not ready for this reason.
async fn wait_for_reason(fixture: &ProcessFixture, reason: &str) {
    let mut changes = fixture.supervisor.watch_changes();
    loop {
        changes.mark_unchanged();
        let found = fixture.supervisor.snapshot().into_iter().find(|status| &*status.dn == "root.p");
        if let Some(status) = found.filter(|status| status.waiting_for.to_string().starts_with(reason)) {
            return assert_eq!((status.state, status.generation), (RunnableState::New, 1));
        }
        changes.changed().await.expect("the supervisor exists");
    }
}

#[tokio::test]
async fn a_process_whose_probe_keeps_failing_is_stopped_with_the_last_failure_and_restarted() {
    let dir = tempfile::tempdir().expect("a directory");
    let alive = dir.path().join("alive");
    // Each start is alive until the file is removed.
    let main = format!("touch {0}; echo up; exec sleep 100", alive.display());
    let probe = format!("test -e {} || {{ echo stuck; exit 3; }}", alive.display());
    let liveness =
        Liveness::command(sh(&probe)).with_period(Duration::from_millis(20)).with_failure_threshold(2);
    let ready = Readiness::on_command(sh(&probe));
    let fixture = ProcessFixture::restart_always(sh(&main).ready_when(ready).liveness(liveness));
    fixture.wait_for_state(RunnableState::Ready).await;
    std::fs::remove_file(&alive).expect("it is there");
    let (error, exit) = fixture.wait_failure().await;
    let text = "the process failed 2 liveness probes in a row, and was stopped: killed by SIGTERM; \
        last probe: exited with code 3: stuck";
    assert_eq!((error.as_str(), exit.signal), (text, Some(Signal::TERM)));
    fixture.wait_for_state(RunnableState::Ready).await;
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_process_is_not_ready_from_the_first_failed_probe_on_until_one_succeeds() {
    let serves = Arc::new(AtomicBool::new(false));
    let probed = Arc::clone(&serves);
    let probe = move || {
        let serves = probed.load(Ordering::Relaxed);
        async move { if serves { Ok(()) } else { Err(Failure::from(Unready::new("has no leader"))) } }
    };
    let liveness = Liveness::probe(probe).with_period(Duration::from_millis(20)).with_failure_threshold(1);
    let fixture = ProcessFixture::restart_always(Process::new("sleep").args(["100"]).liveness(liveness));
    // Nor before the first success.
    wait_for_reason(&fixture, "has no leader").await;
    serves.store(true, Ordering::Relaxed);
    fixture.wait_for_state(RunnableState::Ready).await;
    serves.store(false, Ordering::Relaxed);
    let taken = fixture.wait_for_state(RunnableState::New).await;
    assert_eq!(taken.change, RunnableChange::NotReady { reason: "has no leader".into() });
    serves.store(true, Ordering::Relaxed);
    let given = fixture.wait_for_state(RunnableState::Ready).await;
    assert_eq!((given.generation, taken.generation), (1, 1));
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_process_that_waits_in_the_kernel_is_not_ready_and_left_alone_until_it_does_not() {
    // A vfork(2) waits like a read of a disk that does not answer, until its child ends.
    let vfork = format!("syscall({}) == 0 and sleep(1000); sleep(1000)", libc::SYS_vfork);
    let frozen = Arc::new(AtomicBool::new(false));
    let probed = Arc::clone(&frozen);
    let probe = move || {
        let answers = !probed.load(Ordering::Relaxed);
        async move { if answers { Ok(()) } else { Err("no answer") } }
    };
    let liveness = Liveness::probe(probe).with_period(Duration::from_millis(20)).with_failure_threshold(2);
    let process = Process::new("perl").args(["-e", &vfork]).liveness(liveness);
    let fixture = ProcessFixture::restart_always(process);
    fixture.wait_for_state(RunnableState::Ready).await;
    frozen.store(true, Ordering::Relaxed);
    let reason = "its liveness probe fails: no answer, and a thread of it waits in the kernel";
    wait_for_reason(&fixture, reason).await;
    fixture.shutdown().await;
}

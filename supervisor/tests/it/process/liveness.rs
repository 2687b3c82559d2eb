//! Probes of a process that is ready.

use std::time::Duration;

use nodekeel_supervisor::RunnableState;
use nodekeel_supervisor::process::{Liveness, Readiness, Signal};

use super::{ProcessFixture, sh};

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
    let text = "the process failed 2 liveness probes in a row, and was stopped: exited with code 3: stuck";
    assert_eq!((error.as_str(), exit.signal), (text, Some(Signal::TERM)));
    fixture.wait_for_state(RunnableState::Ready).await;
    fixture.shutdown().await;
}

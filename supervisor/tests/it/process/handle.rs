//! Signals and reloads from outside of a run.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_supervisor::process::{ProcessHandle, ProcessHandleError, ReloadAction, Signal};

use super::{ProcessFixture, sh};

const REPORTS_SIGNALS: &str =
    "trap 'echo hup' HUP; trap 'echo usr1' USR1; trap 'exit 0' USR2; echo up; while :; do sleep 0.01; done";

#[tokio::test]
async fn a_handle_signals_and_reloads_the_process_while_it_is_running() {
    let handle = ProcessHandle::default();
    assert!(matches!(handle.send_signal(Signal::HUP), Err(ProcessHandleError::NotRunning)));
    let process = sh(REPORTS_SIGNALS).handle(&handle).reload(ReloadAction::Signal(Signal::HUP));
    let fixture = ProcessFixture::run_once(process);
    fixture.output.wait_line("up").await;
    handle.send_signal(Signal::USR1).expect("it is running");
    fixture.output.wait_line("usr1").await;
    handle.reload().await.expect("it is running");
    fixture.output.wait_line("hup").await;
    handle.send_signal(Signal::USR2).expect("it is running");
    fixture.wait_exit().await;
    assert!(matches!(handle.reload().await, Err(ProcessHandleError::NotRunning)));
    assert_eq!(handle.pid(), None);
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_reload_command_gets_the_pid_and_its_failure_is_reported() {
    let handle = ProcessHandle::default();
    let command = sh("kill -HUP $MAINPID && echo no such file >&2 && exit 4");
    let reload = ReloadAction::Command(Arc::new(command));
    let fixture = ProcessFixture::run_once(sh(REPORTS_SIGNALS).handle(&handle).reload(reload));
    fixture.output.wait_line("up").await;
    let error = handle.reload().await.expect_err("it exits with 4").to_string();
    assert_eq!(error, "the reload command failed: exited with code 4: no such file");
    fixture.output.wait_line("hup").await;
    fixture.shutdown().await;

    let fixture = ProcessFixture::run_once(sh("echo up; exec sleep 100").handle(&handle));
    fixture.output.wait_line("up").await;
    let error = handle.reload().await.expect_err("it has no action").to_string();
    assert_eq!(error, "the process has no reload action: restart it instead");
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_handle_has_no_process_while_descendants_of_an_exited_one_are_still_running() {
    let dir = tempfile::tempdir().expect("a directory");
    let kept = dir.path().join("kept");
    std::fs::write(&kept, "").expect("it is written");
    let script = format!(
        "trap 'exit 0' USR2; (trap '' TERM; echo up; while test -e {}; do sleep 0.01; done) & while :; do sleep 0.01; done",
        kept.display()
    );
    let handle = ProcessHandle::default();
    let process = sh(&script).handle(&handle).reload(ReloadAction::Command(Arc::new(sh("true"))));
    let fixture = ProcessFixture::run_once(process.grace_period(Duration::from_secs(3600)));
    fixture.output.wait_line("up").await;
    handle.send_signal(Signal::USR2).expect("it is running");
    let has_exited = async {
        while handle.pid().is_some() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), has_exited).await.expect("the main process exits at once");
    assert!(matches!(handle.send_signal(Signal::HUP), Err(ProcessHandleError::NotRunning)));
    assert!(matches!(handle.reload().await, Err(ProcessHandleError::NotRunning)));
    std::fs::remove_file(&kept).expect("it is there");
    fixture.wait_exit().await;
    fixture.shutdown().await;
}

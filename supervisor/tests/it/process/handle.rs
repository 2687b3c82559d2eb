//! Signals and reloads from outside of a run.

use std::sync::Arc;

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

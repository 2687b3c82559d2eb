//! The reports of a process that is ready: that it works, that it stops, that it needs more time.

use std::time::Duration;

use nodekeel_supervisor::process::{Readiness, Signal};
use nodekeel_supervisor::{ExitReason, RunnableState};

use super::readiness::notify_process;
use super::{ProcessFixture, perl, sh};

fn send_usr1(pid: i32) {
    super::send_signal("USR1", pid);
}

#[tokio::test]
async fn a_process_that_is_silent_is_aborted_and_restarted_with_the_reason() {
    let process = notify_process(&["READY=1"]).ready_when(Readiness::on_notify());
    let fixture = ProcessFixture::restart_always(process.watchdog(Duration::from_millis(200)));
    let (error, exit) = fixture.wait_failure().await;
    assert_eq!(
        error,
        "the process did not report to its watchdog (WATCHDOG=1) within 200ms, and was aborted"
    );
    assert_eq!(exit.signal, Some(Signal::ABRT));
    fixture.wait_for_state(RunnableState::Ready).await;
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_watchdog_does_not_change_when_a_process_is_ready() {
    let fixture = ProcessFixture::run_once(sh("exec sleep 100").watchdog(Duration::from_millis(200)));
    fixture.wait_for_state(RunnableState::Ready).await;
    let (error, _) = fixture.wait_failure().await;
    assert!(error.starts_with("the process did not report to its watchdog"), "{error}");
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_process_finds_its_watchdog_in_its_environment_and_can_trigger_it() {
    let process = notify_process(&["READY=1", "WATCHDOG=trigger"]).ready_when(Readiness::on_notify());
    let fixture = ProcessFixture::run_once(process.watchdog(Duration::from_secs(3600)));
    let pid = fixture.output.wait_pid().await;
    let environment = std::fs::read_to_string(format!("/proc/{pid}/environ")).expect("it runs");
    assert!(
        environment.split('\0').any(|variable| variable == "WATCHDOG_USEC=3600000000"),
        "{environment:?}"
    );
    fixture.wait_for_state(RunnableState::Ready).await;
    send_usr1(pid);
    let (error, _) = fixture.wait_failure().await;
    assert_eq!(error, "the process asked for its watchdog by WATCHDOG=trigger, and was aborted");
    fixture.shutdown().await;
}

/// A Go program writes its goroutines and registers.
#[tokio::test]
async fn the_last_lines_of_an_aborted_process_are_those_before_its_dump() {
    let script = r#"use Socket; $|=1; my $name = $ENV{NOTIFY_SOCKET}; $name =~ s/^@/\0/;
        socket(my $s, AF_UNIX, SOCK_DGRAM, 0); connect($s, sockaddr_un($name));
        $SIG{USR1} = sub { send($s, "WATCHDOG=trigger", 0) };
        $SIG{ABRT} = sub { print "register $_\n" for 1..20; exit 2 };
        print "stuck\npid $$\n"; sleep 1 while 1"#;
    let fixture = ProcessFixture::run_once(perl(script).watchdog(Duration::from_secs(3600)));
    let pid = fixture.output.wait_pid().await;
    send_usr1(pid);
    let (_, exit) = fixture.wait_failure().await;
    assert_eq!(exit.tail, ["stuck".to_owned(), format!("pid {pid}")]);
    assert!(fixture.output.text().ends_with("register 20\n"), "its log has the dump");
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_process_that_reports_its_stop_is_no_longer_ready_and_has_its_grace_period() {
    let process = notify_process(&["READY=1", "STOPPING=1"]).ready_when(Readiness::on_notify());
    let fixture = ProcessFixture::run_once(process.grace_period(Duration::from_millis(300)));
    let pid = fixture.output.wait_pid().await;
    fixture.wait_for_state(RunnableState::Ready).await;
    send_usr1(pid);
    // It never exits by itself, and does not handle the stop signal.
    let (error, exit) = fixture.wait_failure().await;
    assert_eq!((error.as_str(), exit.signal), ("killed by SIGTERM", Some(Signal::TERM)));
    fixture.shutdown().await;
}

#[tokio::test]
async fn an_exit_after_the_report_of_a_stop_is_an_exit_as_any_other() {
    let script = r#"use Socket; my $name = $ENV{NOTIFY_SOCKET}; $name =~ s/^@/\0/;
        socket(my $s, AF_UNIX, SOCK_DGRAM, 0); connect($s, sockaddr_un($name));
        send($s, "READY=1\nSTOPPING=1", 0); select undef,undef,undef,.1; exit 7"#;
    let fixture = ProcessFixture::run_once(perl(script).ready_when(Readiness::on_notify()));
    let (error, exit) = fixture.wait_failure().await;
    assert_eq!((error.as_str(), exit.code), ("exited with code 7", Some(7)));
    fixture.shutdown().await;
}

/// It asks for an hour to start, and for a minute at TERM. It exits well after its grace period.
const SLOW_STOP: &str = r#"use Socket; $|=1; my $name = $ENV{NOTIFY_SOCKET}; $name =~ s/^@/\0/;
    socket(my $s, AF_UNIX, SOCK_DGRAM, 0); connect($s, sockaddr_un($name));
    $SIG{TERM} = sub { send($s, "EXTEND_TIMEOUT_USEC=60000000", 0); select undef,undef,undef,1.5; exit 0 };
    send($s, "EXTEND_TIMEOUT_USEC=3600000000\nREADY=1", 0); print "up\n"; sleep 1 while 1"#;

/// The listener runs beside the task that sends the stop signal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_can_extend_its_stop_as_far_as_its_settings_permit() {
    let grace = Duration::from_millis(500);
    let process = perl(SLOW_STOP).ready_when(Readiness::on_notify()).grace_period(grace);
    let cases = [
        (Duration::from_secs(60), None),
        (Duration::from_millis(700), Some("still running 700ms after SIGTERM")),
        (Duration::ZERO, Some("still running 500ms after SIGTERM")),
    ];
    for (max, kill) in cases {
        let fixture = ProcessFixture::run_once(process.clone().max_grace_period(max));
        fixture.output.wait_line("up").await;
        fixture.wait_for_state(RunnableState::Ready).await;
        fixture.supervisor.stop_runnable("root.p").expect("the DN exists");
        let (_, exit) = fixture.wait_exit().await;
        assert_eq!(matches!(exit, ExitReason::Killed { .. }), kill.is_some(), "{max:?}: {exit:?}");
        assert!(exit.to_string().contains(kill.unwrap_or_default()), "{max:?}: {exit}");
        fixture.shutdown().await;
    }
}

#[tokio::test]
async fn a_process_can_extend_the_stop_that_it_reports() {
    let script = r#"use Socket; my $name = $ENV{NOTIFY_SOCKET}; $name =~ s/^@/\0/;
        socket(my $s, AF_UNIX, SOCK_DGRAM, 0); connect($s, sockaddr_un($name)); send($s, "READY=1", 0);
        select undef,undef,undef,.2; send($s, "STOPPING=1\nEXTEND_TIMEOUT_USEC=60000000", 0);
        select undef,undef,undef,1.5; exit 7"#;
    let process = perl(script).ready_when(Readiness::on_notify()).grace_period(Duration::from_millis(500));
    let fixture = ProcessFixture::run_once(process.max_grace_period(Duration::from_secs(60)));
    let (error, _) = fixture.wait_failure().await;
    assert_eq!(error, "exited with code 7", "it was not stopped before");
    fixture.shutdown().await;
}

//! The reports of exits.

use std::time::Duration;

use nodekeel_supervisor::process::{MAX_TAIL_LINE_BYTES, MAX_TAIL_LINES, Readiness, Signal};
use nodekeel_supervisor::{ExitReason, RunnableState};

use super::{ProcessFixture, perl, sh};

const GRACE: Duration = Duration::from_millis(200);

#[tokio::test]
async fn an_exit_code_is_reported_with_the_last_lines() {
    let fixture = ProcessFixture::run_once(sh(
        "for n in $(seq 20); do echo line $n; done; echo last words >&2; exit 3",
    ));
    let (error, exit) = fixture.wait_failure().await;
    assert_eq!((error.as_str(), exit.code, exit.signal), ("exited with code 3", Some(3), None));
    assert_eq!(exit.tail.len(), MAX_TAIL_LINES);
    assert!(
        exit.tail.contains(&"last words".to_owned()) && exit.tail.contains(&"line 20".to_owned()),
        "{exit:?}"
    );
    assert!(!exit.is_success() && exit.pid > 0);
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_failure_is_reported_by_its_code_or_signal() {
    let task = |script| sh(script).ready_when(Readiness::on_exit());
    for (fixture, error, code, signal) in [
        (ProcessFixture::run_once(sh("kill -SEGV $$")), "killed by SIGSEGV", None, Some(11)),
        (ProcessFixture::run_once(sh("kill -37 $$")), "killed by signal 37", None, Some(37)),
        (ProcessFixture::run_once(task("exit 1")), "exited with code 1", Some(1), None),
        // A daemon that exits with code 0 has failed, too.
        (ProcessFixture::restart_always(sh("exit 0")), "exited with code 0 by itself", Some(0), None),
    ] {
        let (text, exit) = fixture.wait_failure().await;
        assert_eq!(text.trim_end_matches(" (core dumped)"), error);
        assert_eq!((exit.code, exit.signal.map(Signal::as_number)), (code, signal), "{text}");
        fixture.shutdown().await;
    }
}

#[tokio::test]
async fn a_daemon_that_exits_with_code_0_is_reported_with_its_last_lines() {
    let fixture = ProcessFixture::restart_always(sh("echo last words; exit 0"));
    assert_eq!(fixture.wait_failure().await.1.tail, ["last words"]);
    fixture.shutdown().await;
}

#[tokio::test]
async fn code_0_means_done_for_a_task_and_where_the_policy_permits_it() {
    for fixture in [
        ProcessFixture::run_once(sh("echo last words; exit 0")),
        ProcessFixture::restart_always(sh("exit 0").ready_when(Readiness::on_exit())),
    ] {
        assert_eq!(fixture.wait_exit().await, (RunnableState::Done, ExitReason::Done));
        fixture.shutdown().await;
    }
}

#[tokio::test]
async fn a_canceled_process_has_not_failed_however_it_exits_and_its_exit_is_kept() {
    let script = r#"$SIG{TERM} = sub { exit 9 }; $| = 1; print "pid $$\n"; sleep 100"#;
    let fixture = ProcessFixture::run_once(perl(script));
    fixture.output.wait_pid().await;
    fixture.supervisor.stop_runnable("root.p").expect("the DN exists");
    let (state, exit) = fixture.wait_exit().await;
    assert_eq!((state, &*exit.to_string()), (RunnableState::Canceled, "canceled; exited with code 9"));
    let ExitReason::Canceled { process: Some(process) } = exit else { panic!("{exit:?}") };
    assert_eq!(process.code, Some(9));
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_killed_process_is_restarted() {
    let fixture = ProcessFixture::restart_always(sh("echo pid $$; exec sleep 100"));
    let first = fixture.output.wait_pid().await;
    fixture.wait_for_state(RunnableState::Ready).await;
    super::send_signal("KILL", first);
    let again = fixture.wait_for_state(RunnableState::Ready).await;
    assert_eq!(again.generation, 2);
    let status = fixture.supervisor.snapshot();
    let killed = status.iter().find(|node| &*node.dn == "root.p").and_then(|node| node.exits.last());
    assert_eq!(killed.map(|record| record.exit.to_string()).as_deref(), Some("killed by SIGKILL"));
    fixture.shutdown().await;
}

#[tokio::test]
async fn the_last_lines_are_bounded_and_safe_to_print() {
    let script = r#"print "\e[31m", "x" x 100000, "\n", "\xff" x 3000, "\n", "\n" x 3, "end"; exit 1"#;
    let fixture = ProcessFixture::run_once(perl(script));
    let (_, exit) = fixture.wait_failure().await;
    assert!(
        exit.tail.iter().all(|line| line.len() <= MAX_TAIL_LINE_BYTES && !line.contains('\u{1b}')),
        "{exit:?}"
    );
    assert_eq!(exit.tail.last().map(String::as_str), Some("end"));
    fixture.shutdown().await;
}

/// The events of a process that was stopped, as text, and its last exit.
async fn stop(fixture: &ProcessFixture) -> (Vec<String>, nodekeel_supervisor::ExitRecord) {
    fixture.supervisor.stop_runnable("root.p").expect("the DN exists");
    fixture.wait_exit().await;
    let events = fixture.recorder.events().into_iter().filter(|event| &*event.dn == "root.p");
    let status = fixture.supervisor.snapshot().remove(1);
    let exit = status.exits.last().expect("it has exited").clone();
    (events.map(|event| event.change.to_string()).collect(), exit)
}

#[tokio::test]
async fn a_stop_that_needed_sigkill_is_an_event_and_names_the_timeout_and_the_signal() {
    let ignores = perl("$SIG{TERM} = 'IGNORE'; $| = 1; print \"pid $$\\n\"; sleep 100 while 1");
    let fixture = ProcessFixture::run_once(ignores.grace_period(GRACE));
    fixture.output.wait_pid().await;
    let (events, exit) = stop(&fixture).await;
    let kill = "killed by SIGKILL: still running 200ms after SIGTERM";
    assert!(events.contains(&kill.to_owned()), "{events:?}");
    let ExitReason::Killed { process, .. } = &exit.exit else { panic!("{exit:?}") };
    assert_eq!(process.signal, Some(Signal::KILL));
    assert_eq!((exit.state, exit.exit.to_string()), (RunnableState::Canceled, format!("canceled; {kill}")));
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_descendant_that_needed_sigkill_is_reported_apart_from_its_process() {
    let script =
        "trap 'exit 0' TERM; sh -c \"trap '' TERM; echo pid \\$\\$; while :; do sleep 100; done\" & wait";
    let fixture = ProcessFixture::run_once(sh(script).grace_period(GRACE));
    fixture.output.wait_pid().await;
    let (events, exit) = stop(&fixture).await;
    let kill = "descendants killed by SIGKILL: still running 200ms after SIGTERM";
    assert!(events.contains(&kill.to_owned()), "{events:?}");
    let ExitReason::Killed { process, .. } = &exit.exit else { panic!("{exit:?}") };
    assert_eq!(process.code, Some(0));
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_stop_in_time_reports_no_kill() {
    for signal in [Signal::TERM, Signal::KILL] {
        let script = "sleep 100 & echo pid $$; wait";
        let fixture = ProcessFixture::run_once(sh(script).stop_signal(signal));
        fixture.output.wait_pid().await;
        let (events, exit) = stop(&fixture).await;
        assert!(matches!(exit.exit, ExitReason::Canceled { process: Some(_) }), "{exit:?}: {events:?}");
        fixture.shutdown().await;
    }
}

//! When a process is ready.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use nodekeel_supervisor::process::{Process, Readiness};
use nodekeel_supervisor::{Failure, RunnableChange, RunnableState};

use super::{ProcessFixture, mark_of, marked_processes, perl, sh, wait_gone};

/// A program that sends these messages to its `NOTIFY_SOCKET`: the first one at once, and one more at each
/// USR1.
pub(super) fn notify_process(messages: &[&str]) -> Process {
    let quoted: Vec<_> = messages.iter().map(|message| format!("{message:?}")).collect();
    let script = format!(
        r#"use Socket; $|=1; my $name = $ENV{{NOTIFY_SOCKET}}; $name =~ s/^@/\0/;
        socket(my $s, AF_UNIX, SOCK_DGRAM, 0) or die; connect($s, sockaddr_un($name)) or die "$!";
        my $pending = 1; $SIG{{USR1}} = sub {{ $pending++ }}; print "pid $$\nsocket $ENV{{NOTIFY_SOCKET}}\n";
        for ({}) {{ until ($pending) {{ select undef,undef,undef,.01 }} $pending--; defined(send($s, $_, 0)) or die "$!"; print "sent $_\n" }}
        sleep 100"#,
        quoted.join(",")
    );
    perl(&script)
}

fn is_ready(fixture: &ProcessFixture) -> bool {
    fixture
        .recorder
        .events()
        .iter()
        .any(|event| &*event.dn == "root.p" && event.change == RunnableChange::Ready)
}

#[tokio::test]
async fn a_process_is_ready_when_it_sends_ready() {
    let fixture = ProcessFixture::run_once(
        notify_process(&["STATUS=loading", "MAINPID=1\nREADY=1"]).ready_when(Readiness::on_notify()),
    );
    let pid = fixture.output.wait_pid().await;
    fixture.output.wait_line("sent STATUS=loading").await;
    assert!(!is_ready(&fixture));
    super::send_signal("USR1", pid);
    fixture.wait_for_state(RunnableState::Ready).await;
    fixture.shutdown().await;
}

#[tokio::test]
#[ignore = "needs root: a process that changes its user"]
async fn a_process_that_changes_its_user_before_it_reports_fails_with_the_remedy() {
    let script = r#"use Socket; $< = $> = 65534; socket(my $s, AF_UNIX, SOCK_DGRAM, 0);
        send($s, "READY=1", 0, sockaddr_un($ENV{NOTIFY_SOCKET})); sleep 100"#;
    let readiness = Readiness::on_notify().with_timeout(Duration::from_secs(1));
    let fixture = ProcessFixture::run_once(perl(script).ready_when(readiness));
    let (error, _) = fixture.wait_failure().await;
    let remedy = "it has not sent READY=1; it runs as user 65534 now, who can't send to its NOTIFY_SOCKET: have it started as that user";
    assert!(error.ends_with(remedy), "{error}");
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_descendant_may_send_ready() {
    let script = r#"use Socket; my $name = $ENV{NOTIFY_SOCKET}; if (!fork) {
        socket(my $s, AF_UNIX, SOCK_DGRAM, 0); send($s, "READY=1", 0, sockaddr_un($name)); sleep 100 } wait"#;
    for _ in 0..10 {
        let fixture = ProcessFixture::run_once(perl(script).ready_when(Readiness::on_notify()));
        fixture.wait_for_state(RunnableState::Ready).await;
        fixture.shutdown().await;
    }
}

/// Neither this program, nor a process that copies the mark, nor one that has gone when its message is read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ready_from_an_unrelated_process_is_ignored() {
    let fixture = ProcessFixture::run_once(
        notify_process(&["STATUS=up", "READY=1"]).ready_when(Readiness::on_notify()),
    );
    let pid = fixture.output.wait_pid().await;
    fixture.output.wait_line("sent STATUS=up").await;
    let path = fixture.output.wait_line("socket ").await;
    let socket = std::os::unix::net::UnixDatagram::unbound().expect("a socket");
    assert_eq!(socket.send_to(b"READY=1", &path).expect("it is there"), 7);
    let forger = r#"use Socket; socket(my $s, AF_UNIX, SOCK_DGRAM, 0); for (1..2) { send($s, "READY=1", 0, sockaddr_un($ARGV[0])) or die "$!"; sleep 1 }"#;
    let script = format!("ulimit -S -x {}; exec /usr/bin/perl -e '{forger}' {path}", mark_of(pid));
    // A child of this program with that mark would be taken for an orphan of the process, and reaped.
    let forge = ["-c", "/bin/bash -c \"$0\"; exit $?", &script];
    let forged = tokio::process::Command::new("/bin/sh").args(forge).status().await;
    assert!(forged.expect("it runs").success());
    assert!(!is_ready(&fixture), "they are no permitted senders");
    super::send_signal("USR1", pid);
    fixture.wait_for_state(RunnableState::Ready).await;
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_process_without_a_directory_for_its_socket_is_not_started() {
    let builder = nodekeel_supervisor::Supervisor::builder();
    let process = sh("exit 0").ready_when(Readiness::on_notify());
    let fixture = ProcessFixture::start_built(
        builder,
        nodekeel_supervisor::RestartPolicy::Never,
        None,
        vec![("p", process)],
    );
    let (_, exit) = fixture.wait_exit().await;
    assert_eq!(
        exit.to_string(),
        "can't make the notification socket of the process: the supervisor has no directory for it: set SupervisorBuilder::notify_directory"
    );
    fixture.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_is_not_ready_in_time_is_stopped_with_the_reason() {
    let process = notify_process(&["STATUS=reading the disk"])
        .ready_when(Readiness::on_notify().with_timeout(Duration::from_secs(3)));
    let fixture = ProcessFixture::run_once(process);
    let mark = mark_of(fixture.output.wait_pid().await);
    let (error, exit) = fixture.wait_failure().await;
    assert_eq!(
        error,
        "the process was not ready within 3s, and was stopped: it has not sent READY=1, its status is \"reading the disk\""
    );
    assert_eq!(
        (exit.signal.map(|signal| signal.to_string()).as_deref(), marked_processes(&mark).len()),
        (Some("SIGTERM"), 0)
    );
    assert!(!is_ready(&fixture));
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_probe_runs_only_after_the_process_has_sent_ready() {
    let (asked, answer) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let probe = {
        let (asked, answer) = (Arc::clone(&asked), Arc::clone(&answer));
        move || {
            asked.fetch_add(1, Ordering::SeqCst);
            let answer = answer.load(Ordering::SeqCst);
            async move { if answer { Ok(()) } else { Err(Failure::new("connection refused")) } }
        }
    };
    let fixture = ProcessFixture::run_once(
        notify_process(&["STATUS=1", "READY=1"]).ready_when(Readiness::on_notify().and_probe(probe)),
    );
    let pid = fixture.output.wait_pid().await;
    fixture.output.wait_line("sent STATUS=1").await;
    assert_eq!(asked.load(Ordering::SeqCst), 0);
    super::send_signal("USR1", pid);
    while asked.load(Ordering::SeqCst) < 3 {
        tokio::task::yield_now().await;
    }
    assert!(!is_ready(&fixture));
    answer.store(true, Ordering::SeqCst);
    fixture.wait_for_state(RunnableState::Ready).await;
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_probe_command_is_repeated_until_it_exits_with_0() {
    let dir = tempfile::tempdir().expect("a directory");
    let times = dir.path().join("times");
    // Each probe adds a letter; the third succeeds.
    let script = format!("printf x >> {0}; [ $(wc -c < {0}) -ge 3 ]", times.display());
    let fixture =
        ProcessFixture::run_once(sh("exec sleep 100").ready_when(Readiness::on_command(sh(&script))));
    fixture.wait_for_state(RunnableState::Ready).await;
    assert_eq!(std::fs::read_to_string(&times).expect("it is there"), "xxx");
    assert_eq!(fixture.output.text(), "", "its output is not the process' output");
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_failing_probe_command_is_reported_with_its_last_line() {
    let assert_reported = async |command: Process, end: &str| {
        let fixture = ProcessFixture::run_once(
            sh("exec sleep 100")
                .ready_when(Readiness::on_command(command).with_timeout(Duration::from_secs(2))),
        );
        let (error, _) = fixture.wait_failure().await;
        assert!(
            error.starts_with("the process was not ready within 2s, and was stopped: its probe fails: ")
                && error.contains(end),
            "{error}"
        );
        fixture.shutdown().await;
    };
    let failing = sh("echo first; echo connection refused >&2; exit 7");
    tokio::join!(
        assert_reported(failing, "fails: exited with code 7: connection refused"),
        assert_reported(Process::new("/no/such"), "fails: can't start /no/such: no such file"),
    );
}

/// The processes that a command has forked end with it, whether it has exited or was interrupted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_forked_by_a_probe_command_are_ended() {
    let dir = tempfile::tempdir().expect("a directory");
    let fifo = dir.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).expect("it is made");
    for (end, becomes) in [("exit 0", RunnableState::Ready), ("wait", RunnableState::Canceled)] {
        let script = format!("setsid sleep 100 & echo $! > {}; {end}", fifo.display());
        let fixture =
            ProcessFixture::run_once(sh("exec sleep 100").ready_when(Readiness::on_command(sh(&script))));
        let path = fifo.clone();
        let pid =
            tokio::task::spawn_blocking(move || std::fs::read_to_string(path)).await.expect("it is read");
        let pid: i32 = pid.expect("it is text").trim().parse().expect("a pid");
        if becomes == RunnableState::Canceled {
            mark_of(pid);
            fixture.supervisor.stop_runnable("root.p").expect("the DN exists");
        }
        fixture.wait_for_state(becomes).await;
        wait_gone(pid);
        fixture.shutdown().await;
    }
}

/// A program that exits after the shutdown leaves no process to another reaper, and no cgroup that could not
/// be removed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_waits_for_a_running_probe_command_to_end() {
    let dir = tempfile::tempdir().expect("a directory");
    let fifo = dir.path().join("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).expect("it is made");
    for _ in 0..10 {
        let script = format!("setsid sleep 100 & echo $$ > {}; wait", fifo.display());
        let fixture =
            ProcessFixture::run_once(sh("exec sleep 100").ready_when(Readiness::on_command(sh(&script))));
        let path = fifo.clone();
        let pid =
            tokio::task::spawn_blocking(move || std::fs::read_to_string(path)).await.expect("it is read");
        let mark = mark_of(pid.expect("it is text").trim().parse().expect("a pid"));
        fixture.shutdown().await;
        assert_eq!(marked_processes(&mark), [""; 0], "no process is left, not even a zombie");
    }
}

#[tokio::test]
async fn a_stop_does_not_wait_for_readiness() {
    let fixture =
        ProcessFixture::run_once(sh("echo pid $$; exec sleep 100").ready_when(Readiness::on_notify()));
    fixture.output.wait_pid().await;
    fixture.stop().await;
    fixture.shutdown().await;
}

#[tokio::test]
async fn an_exit_does_not_wait_for_readiness() {
    let fixture = ProcessFixture::run_once(
        sh("exit 4").ready_when(Readiness::on_probe(|| async { Err::<(), _>("no answer") })),
    );
    assert_eq!(fixture.wait_failure().await.0, "exited with code 4");
    assert!(!is_ready(&fixture));
    fixture.shutdown().await;
}

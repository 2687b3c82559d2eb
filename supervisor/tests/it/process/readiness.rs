//! When a process counts as ready.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use nodekeel_supervisor::process::{Process, Readiness};
use nodekeel_supervisor::{Change, Failure, State};

use super::{Bed, mark_of, marked, perl, sh, until_gone};

/// A program that tells its `NOTIFY_SOCKET` these things, each when it is told to by a signal, the first at once.
fn notifying(messages: &[&str]) -> Process {
    let quoted: Vec<_> = messages.iter().map(|message| format!("{message:?}")).collect();
    let script = format!(
        r#"use Socket; $|=1; my $name = $ENV{{NOTIFY_SOCKET}}; $name =~ s/^@/\0/;
        socket(my $s, AF_UNIX, SOCK_DGRAM, 0) or die; connect($s, sockaddr_un($name)) or die "$!";
        my $told = 1; $SIG{{USR1}} = sub {{ $told++ }}; print "pid $$\nsocket $ENV{{NOTIFY_SOCKET}}\n";
        for ({}) {{ until ($told) {{ select undef,undef,undef,.01 }} $told--; defined(send($s, $_, 0)) or die "$!"; print "sent $_\n" }}
        sleep 100"#,
        quoted.join(",")
    );
    perl(&script)
}

fn ready_now(bed: &Bed) -> bool {
    bed.recorder.events().iter().any(|event| &*event.dn == "root.p" && event.change == Change::Ready)
}

#[tokio::test]
async fn ready_is_what_the_process_says() {
    let bed = Bed::once(notifying(&["STATUS=loading", "MAINPID=1\nREADY=1"]).ready(Readiness::notify()));
    let pid = bed.output.pid().await;
    bed.output.line("sent STATUS=loading").await;
    assert!(!ready_now(&bed));
    std::process::Command::new("/bin/kill").args(["-USR1", &pid.to_string()]).status().expect("kill runs");
    bed.until(State::Ready).await;
    bed.shutdown().await;
}

#[tokio::test]
async fn a_descendant_may_say_it_and_be_gone() {
    let script = r#"use Socket; my $name = $ENV{NOTIFY_SOCKET}; $name =~ s/^@/\0/; if (!fork) {
        socket(my $s, AF_UNIX, SOCK_DGRAM, 0); connect($s, sockaddr_un($name)); send($s, "READY=1", 0); exit } wait; sleep 100"#;
    for _ in 0..10 {
        let bed = Bed::once(perl(script).ready(Readiness::notify()));
        bed.until(State::Ready).await;
        bed.shutdown().await;
    }
}

#[tokio::test]
async fn nobody_else_may_say_it() {
    let bed = Bed::once(notifying(&["STATUS=up", "READY=1"]).ready(Readiness::notify()));
    let pid = bed.output.pid().await;
    bed.output.line("sent STATUS=up").await;
    let name = bed.output.line("socket @").await;
    use std::os::linux::net::SocketAddrExt as _;
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name).expect("a name");
    let socket = std::os::unix::net::UnixDatagram::unbound().expect("a socket");
    assert_eq!(socket.send_to_addr(b"READY=1", &address).expect("it is there"), 7);
    let early = tokio::time::timeout(Duration::from_millis(300), bed.until(State::Ready)).await;
    assert!(early.is_err(), "this program has no say: {early:?}");
    std::process::Command::new("/bin/kill").args(["-USR1", &pid.to_string()]).status().expect("kill runs");
    bed.until(State::Ready).await;
    bed.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_ready_in_time_is_stopped_and_says_what_it_waited_for() {
    let process =
        notifying(&["STATUS=reading the disk"]).ready(Readiness::notify().within(Duration::from_secs(3)));
    let bed = Bed::once(process);
    let mark = mark_of(bed.output.pid().await);
    let (error, exit) = bed.failed().await;
    assert_eq!(error, "not ready within 3s: it has not sent READY=1, its status is \"reading the disk\"");
    assert_eq!(
        (exit.signal.map(|signal| signal.to_string()).as_deref(), marked(&mark).len()),
        (Some("SIGTERM"), 0)
    );
    assert!(!ready_now(&bed));
    bed.shutdown().await;
}

#[tokio::test]
async fn a_probe_is_asked_only_after_the_process_has_said_that_it_is_ready() {
    let (asked, answer) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let probe = {
        let (asked, answer) = (Arc::clone(&asked), Arc::clone(&answer));
        move || {
            asked.fetch_add(1, Ordering::SeqCst);
            let answer = answer.load(Ordering::SeqCst);
            async move { if answer { Ok(()) } else { Err(Failure::new("connection refused")) } }
        }
    };
    let bed = Bed::once(notifying(&["STATUS=1", "READY=1"]).ready(Readiness::notify().and_probe(probe)));
    let pid = bed.output.pid().await;
    bed.output.line("sent STATUS=1").await;
    assert_eq!(asked.load(Ordering::SeqCst), 0);
    std::process::Command::new("/bin/kill").args(["-USR1", &pid.to_string()]).status().expect("kill runs");
    while asked.load(Ordering::SeqCst) < 3 {
        tokio::task::yield_now().await;
    }
    assert!(!ready_now(&bed));
    answer.store(true, Ordering::SeqCst);
    bed.until(State::Ready).await;
    bed.shutdown().await;
}

#[tokio::test]
async fn a_command_is_asked_until_it_exits_with_0() {
    let dir = tempfile::tempdir().expect("a directory");
    let times = dir.path().join("times");
    // Each question adds a letter; the third is answered.
    let script = format!("printf x >> {0}; [ $(wc -c < {0}) -ge 3 ]", times.display());
    let bed = Bed::once(sh("exec sleep 100").ready(Readiness::command(sh(&script))));
    bed.until(State::Ready).await;
    assert_eq!(std::fs::read_to_string(&times).expect("it is there"), "xxx");
    assert_eq!(bed.output.text(), "", "what it says is not the process' output");
    bed.shutdown().await;
}

#[tokio::test]
async fn a_command_that_fails_is_told_with_its_last_line() {
    let told = async |command: Process, end: &str| {
        let bed =
            Bed::once(sh("exec sleep 100").ready(Readiness::command(command).within(Duration::from_secs(2))));
        let (error, _) = bed.failed().await;
        assert!(
            error.starts_with("not ready within 2s: its probe fails: ") && error.contains(end),
            "{error}"
        );
        bed.shutdown().await;
    };
    let failing = sh("echo first; echo connection refused >&2; exit 7");
    tokio::join!(
        told(failing, "fails: exited with code 7: connection refused"),
        told(Process::new("/no/such"), "fails: start /no/such: there is no such file"),
    );
}

/// What a command has forked is gone with it, whether it has answered or was not let to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_that_a_command_forks_is_left() {
    let dir = tempfile::tempdir().expect("a directory");
    let told = dir.path().join("told");
    rustix::fs::mkfifoat(rustix::fs::CWD, &told, rustix::fs::Mode::RWXU).expect("it is made");
    for (end, becomes) in [("exit 0", State::Ready), ("wait", State::Canceled)] {
        let script = format!("setsid sleep 100 & echo $! > {}; {end}", told.display());
        let bed = Bed::once(sh("exec sleep 100").ready(Readiness::command(sh(&script))));
        let path = told.clone();
        let pid =
            tokio::task::spawn_blocking(move || std::fs::read_to_string(path)).await.expect("it is read");
        let pid: i32 = pid.expect("it is text").trim().parse().expect("a pid");
        if becomes == State::Canceled {
            mark_of(pid);
            bed.supervisor.stop("root.p").expect("it is there");
        }
        bed.until(becomes).await;
        until_gone(pid);
        bed.shutdown().await;
    }
}

/// Whoever ends when the shutdown has ended leaves nobody to somebody else, nor a cgroup that could not be removed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_waits_for_the_end_of_a_command_that_was_asked() {
    let dir = tempfile::tempdir().expect("a directory");
    let told = dir.path().join("told");
    rustix::fs::mkfifoat(rustix::fs::CWD, &told, rustix::fs::Mode::RWXU).expect("it is made");
    for _ in 0..10 {
        let script = format!("setsid sleep 100 & echo $$ > {}; wait", told.display());
        let bed = Bed::once(sh("exec sleep 100").ready(Readiness::command(sh(&script))));
        let path = told.clone();
        let pid =
            tokio::task::spawn_blocking(move || std::fs::read_to_string(path)).await.expect("it is read");
        let mark = mark_of(pid.expect("it is text").trim().parse().expect("a pid"));
        bed.shutdown().await;
        assert_eq!(marked(&mark), [""; 0], "nobody is left, not even a zombie");
    }
}

#[tokio::test]
async fn a_stop_does_not_wait_for_readiness() {
    let bed = Bed::once(sh("echo pid $$; exec sleep 100").ready(Readiness::notify()));
    bed.output.pid().await;
    bed.supervisor.stop("root.p").expect("it is there");
    bed.until(State::Canceled).await;
    bed.shutdown().await;
}

#[tokio::test]
async fn an_end_does_not_wait_for_readiness() {
    let bed = Bed::once(sh("exit 4").ready(Readiness::probe(|| async { Err::<(), _>("no answer") })));
    assert_eq!(bed.failed().await.0, "exited with code 4");
    assert!(!ready_now(&bed));
    bed.shutdown().await;
}

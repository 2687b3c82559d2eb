//! What a process is born with, and what keeps it from being born.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;

use nodekeel_supervisor::process::{Process, Stdin};
use nodekeel_supervisor::testing::Recorder;
use nodekeel_supervisor::{Context, Exit, Failure, State, Supervisor};

use super::{Bed, mark_of, perl, sh, until_gone};

/// What is said of a process that can't be started.
async fn refused(process: Process) -> String {
    let bed = Bed::once(process);
    let end = bed.ended().await;
    bed.shutdown().await;
    match end {
        (State::Dead, Exit::Failed { error, process: None }) => error,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn what_cannot_be_executed_says_who_why_and_what_to_do() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = |name: &str, text: &str, mode| {
        let path = dir.path().join(name);
        testbed::write_program(&path, text).expect("it is written");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("it is set");
        path
    };
    let at = dir.path().display();
    let no_mode = Process::new(file("no-mode", "#!/bin/sh\n", 0o644));
    let expected = "it may not be executed: check its mode, its directories' and the mount's noexec: Permission denied (os error 13)";
    assert_eq!(refused(no_mode).await, format!("start {at}/no-mode: {expected}"));
    let garbage = Process::new(file("garbage", "no program", 0o755));
    let expected =
        "it is no program of this machine, nor a script with a #! line: Exec format error (os error 8)";
    assert_eq!(refused(garbage).await, format!("start {at}/garbage: {expected}"));
    let interpreter = Process::new(file("interpreter", "#!/no/such\n", 0o755));
    let expected = "its interpreter or its loader is missing: see its #! line, or `ldd`: No such file or directory (os error 2)";
    assert_eq!(refused(interpreter).await, format!("start {at}/interpreter: {expected}"));
    let expected =
        "there is no such file: install it or correct the path: No such file or directory (os error 2)";
    assert_eq!(refused(Process::new("/no/such")).await, format!("start /no/such: {expected}"));
    let expected = "it is not in the PATH it is given: install it or give its full path: No such file or directory (os error 2)";
    assert_eq!(refused(Process::new("no-such")).await, format!("start no-such: {expected}"));
    let expected = "its working directory /no/such can't be entered: create it or give another: No such file or directory (os error 2)";
    assert_eq!(refused(sh("true").current_dir("/no/such")).await, format!("start /bin/sh: {expected}"));
    let error = refused(sh("true").arg("a\0b")).await;
    assert!(error.contains("has a NUL byte in it"), "{error}");
    let error = refused(sh("true").uid(1234)).await;
    assert!(error.contains("give it a gid too"), "{error}");
    let error = refused(sh("true").env("A=B", "c")).await;
    assert!(error.contains("can't name a variable"), "{error}");
}

#[tokio::test]
async fn the_environment_is_what_is_given() {
    let bed = Bed::once(Process::new("/usr/bin/env").env("A", "b").envs([("C", "d = e")]));
    bed.ended().await;
    assert_eq!(bed.output.text(), "A=b\nC=d = e\n");
    bed.shutdown().await;
}

#[tokio::test]
async fn a_program_is_looked_for_in_the_path_that_it_is_given() {
    let dir = tempfile::tempdir().expect("a directory");
    std::os::unix::fs::symlink("/bin/echo", dir.path().join("here")).expect("it is made");
    let bed = Bed::once(
        Process::new("here").arg("found").env("PATH", format!("/no/such:{}", dir.path().display())),
    );
    bed.ended().await;
    assert_eq!(bed.output.text(), "found\n");
    bed.shutdown().await;
}

#[tokio::test]
async fn it_starts_where_it_should() {
    let bed = Bed::once(Process::new("/bin/pwd").current_dir("/usr"));
    bed.ended().await;
    assert_eq!(bed.output.text(), "/usr\n");
    bed.shutdown().await;
}

#[tokio::test]
async fn it_has_a_group_of_its_own_no_files_and_default_signals() {
    let file = fs::File::open("/dev/null").expect("it is there");
    let inheritable = rustix::io::dup(&file).expect("a copy that is not closed on exec");
    let script = r#"$|=1; opendir(my $d, "/proc/self/fd"); print "fds ", join(" ", sort grep { /^\d$/ } readdir $d), "\n";
        print "group ", getpgrp == $$ ? "own" : "another", "\n"; open(F, "/proc/self/status");
        while (<F>) { print if s/^(Sig(Ign|Blk|Cgt)):\s+/$1 / } sleep 100"#;
    let bed = Bed::once(perl(script));
    bed.output.line("SigCgt").await;
    // One of them reads the directory.
    assert!(matches!(bed.output.line("fds").await.as_str(), "0 1 2 3"), "{}", bed.output.text());
    assert_eq!(bed.output.line("group").await, "own");
    for set in ["SigIgn", "SigBlk", "SigCgt"] {
        let signals = u64::from_str_radix(&bed.output.line(set).await, 16).expect("a set");
        // Perl itself asks for SIGFPE to be ignored.
        assert_eq!(signals & !(1 << 7), 0, "{set}");
    }
    drop(inheritable);
    bed.shutdown().await;
}

#[tokio::test]
async fn its_hard_limit_is_left_alone_so_that_it_can_supervise_too() {
    let bed = Bed::once(sh("echo pid $$; exec sleep 100"));
    let pid = bed.output.pid().await;
    let mark: u64 = mark_of(pid).parse().expect("a number");
    assert_eq!(mark >> 61, 1);
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).expect("it lives");
    let line = limits.lines().find(|line| line.starts_with("Max file locks")).expect("it is there");
    assert_eq!(line.split_whitespace().nth(4), Some("unlimited"));
    bed.shutdown().await;
}

#[tokio::test]
async fn it_runs_as_the_user_it_should_or_says_that_it_may_not() {
    let process = Process::new("/usr/bin/id").uid(1234).gid(4321);
    // Also where this is root: then it is a user without any group of root's.
    if fs::metadata("/proc/self").map(|meta| std::os::unix::fs::MetadataExt::uid(&meta)).ok() == Some(0) {
        let bed = Bed::once(process);
        bed.ended().await;
        assert_eq!(bed.output.text(), "uid=1234 gid=4321 groups=4321\n");
        bed.shutdown().await;
    } else {
        let error = refused(process).await;
        assert!(
            error.starts_with("start /usr/bin/id: its user or group can't be taken on: only root may"),
            "{error}"
        );
    }
}

// The kernel lets nobody open a file that another program has a lease on until that has given it back.
#[tokio::test]
async fn a_program_that_the_kernel_can_not_run_yet_holds_up_no_other() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("slow");
    testbed::copy_program("/bin/sleep".as_ref(), &program).expect("it is copied");
    let script = r#"$SIG{IO} = 'IGNORE'; my ($setlease, $exclusive) = (1024, 1); open(my $file, "+<", $ARGV[0]) or die;
        fcntl($file, $setlease, $exclusive) or die "lease: $!"; $| = 1; print "up\n"; <STDIN>; "#;
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let lease = Bed::once(perl(script).arg(&program).stdin(Stdin::from(OwnedFd::from(reader))));
    lease.output.line("up").await;

    let recorder = Recorder::default();
    let supervisor = Supervisor::builder().hook(recorder.clone()).start(move |ctx: Context| {
        let slow = Process::new(program.clone()).arg("100");
        async move {
            ctx.run("slow", slow)?;
            ctx.run("quick", sh("exec sleep 100"))?;
            ctx.ready()?;
            Err::<(), Failure>(ctx.cancelled().await.into())
        }
    });
    recorder.until("root.quick", State::Ready).await;
    let state_of_slow = || {
        let tree = supervisor.snapshot();
        tree.iter().find(|node| &*node.dn == "root.slow").map(|node| (node.state, node.generation))
    };
    assert_eq!(state_of_slow(), Some((State::New, 1)), "the kernel still waits for the lease");
    drop(writer);
    recorder.until("root.slow", State::Ready).await;
    lease.shutdown().await;
    supervisor.restart("root.quick").expect("it is there");
    recorder.until("root.quick", State::Ready).await;
    assert_eq!(state_of_slow(), Some((State::Ready, 1)), "the thread that started it lives as long");
    let report = supervisor.shutdown().await;
    assert!(report.stragglers.is_empty(), "{report:?}");
}

const KILLED: &str = "NODEKEEL_TEST_IS_KILLED";

// The program dies by SIGKILL, so it is one of its own: this test again, with another job.
#[tokio::test]
async fn when_the_program_is_killed_so_is_the_process() {
    if std::env::var_os(KILLED).is_some() {
        let bed = Bed::once(sh("echo pid $$; exec sleep 100"));
        eprintln!("pid {}", bed.output.pid().await);
        std::future::pending::<()>().await;
    }
    // Its orphan comes to this program, the next subreaper above: a supervisor here waits for it.
    let above = Bed::once(sh("exec sleep 100"));
    above.until(State::Ready).await;
    let name = "process::start::when_the_program_is_killed_so_is_the_process";
    let mut program = tokio::process::Command::new(std::env::current_exe().expect("it has a path"))
        .args(["--exact", name, "--nocapture"])
        .env(KILLED, "1")
        .stderr(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("it starts");
    let mut lines =
        tokio::io::AsyncBufReadExt::lines(tokio::io::BufReader::new(program.stderr.take().expect("piped")));
    let pid = loop {
        let line = lines.next_line().await.expect("it is text").expect("it says the pid");
        if let Some(pid) = line.strip_prefix("pid ") {
            break pid.parse().expect("a pid");
        }
    };
    mark_of(pid);
    program.kill().await.expect("it is killed");
    tokio::task::spawn_blocking(move || until_gone(pid)).await.expect("it is gone");
    above.shutdown().await;
}

//! The environment in which a process starts, and failed starts.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;

use nodekeel_supervisor::process::{Process, ProcessRecords, StdinSource};
use nodekeel_supervisor::testing::EventRecorder;
use nodekeel_supervisor::{Context, ExitReason, RunnableState, Supervisor};

use crate::harness::{parent_of, steady};

use super::{ProcessFixture, configured_cgroups, mark_of, perl, rerun_test, sh, wait_gone};

/// The error of a process that can't be started.
pub(super) async fn start_failure(process: Process) -> String {
    let fixture = ProcessFixture::run_once(process);
    let end = fixture.wait_exit().await;
    fixture.shutdown().await;
    match end {
        (RunnableState::Dead, ExitReason::Failed { error, process: None }) => error,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_start_error_names_the_program_the_reason_and_the_fix() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = |name: &str, text: &str, mode| {
        let path = dir.path().join(name);
        testbed::write_program(&path, text).expect("it is written");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("it is set");
        path
    };
    let at = dir.path().display().to_string();
    for (process, program, error) in [
        (
            Process::new(file("no-mode", "#!/bin/sh\n", 0o644)),
            format!("{at}/no-mode"),
            "not executable: check its mode, its directories' and the mount's noexec: Permission denied (os error 13)",
        ),
        (
            Process::new(file("garbage", "no program", 0o755)),
            format!("{at}/garbage"),
            "not a program for this host, nor a script with a #! line: Exec format error (os error 8)",
        ),
        (
            Process::new(file("interpreter", "#!/no/such\n", 0o755)),
            format!("{at}/interpreter"),
            "its interpreter or loader is missing: check its #! line, or run `ldd`: No such file or directory (os error 2)",
        ),
        (
            Process::new("/no/such"),
            "/no/such".to_owned(),
            "no such file: install it or correct the path: No such file or directory (os error 2)",
        ),
        (
            Process::new("no-such"),
            "no-such".to_owned(),
            "not found in its PATH: install it or configure its full path: No such file or directory (os error 2)",
        ),
        (
            sh("true").current_dir("/no/such"),
            "/bin/sh".to_owned(),
            "can't enter the working directory /no/such: create it or configure another: No such file or directory (os error 2)",
        ),
    ] {
        assert_eq!(start_failure(process).await, format!("can't start {program}: {error}"));
    }
    for (process, clause) in [
        (sh("true").arg("a\0b"), "contains a NUL byte"),
        (sh("true").uid(1234), "set a gid too"),
        (sh("true").env("A=B", "c"), "invalid variable name"),
    ] {
        let error = start_failure(process).await;
        assert!(error.contains(clause), "{error}");
    }
}

#[tokio::test]
async fn a_process_gets_its_own_environment_path_and_directory_and_no_others() {
    let dir = tempfile::tempdir().expect("a directory");
    std::os::unix::fs::symlink("/bin/echo", dir.path().join("here")).expect("it is made");
    let path = format!("/no/such:{}", dir.path().display());
    for (process, output) in [
        (Process::new("/usr/bin/env").env("A", "b").envs([("C", "d = e")]), "A=b\nC=d = e\n"),
        (Process::new("here").arg("found").env("PATH", path), "found\n"),
        (Process::new("/bin/pwd").current_dir("/usr"), "/usr\n"),
    ] {
        let fixture = ProcessFixture::run_once(process);
        fixture.wait_exit().await;
        assert_eq!(fixture.output.text(), output);
        fixture.shutdown().await;
    }
}

#[tokio::test]
async fn a_process_has_a_separate_group_no_extra_files_and_default_signals() {
    let file = fs::File::open("/dev/null").expect("it is there");
    let inheritable = rustix::io::dup(&file).expect("a copy that is not closed on exec");
    let script = r#"$|=1; opendir(my $d, "/proc/self/fd"); print "fds ", join(" ", sort grep { /^\d+$/ } readdir $d), "\n";
        print "group ", getpgrp == $$ ? "own" : "another", "\n"; open(F, "/proc/self/status");
        while (<F>) { print if s/^(Sig(Ign|Blk|Cgt)):\s+/$1 / } sleep 100"#;
    let fixture = ProcessFixture::run_once(perl(script));
    fixture.output.wait_line("SigCgt").await;
    // The additional one reads the directory.
    assert!(matches!(fixture.output.wait_line("fds").await.as_str(), "0 1 2 3"), "{}", fixture.output.text());
    assert_eq!(fixture.output.wait_line("group").await, "own");
    for set in ["SigIgn", "SigBlk", "SigCgt"] {
        let signals = u64::from_str_radix(&fixture.output.wait_line(set).await, 16).expect("a set");
        // Perl itself ignores SIGFPE.
        assert_eq!(signals & !(1 << 7), 0, "{set}");
    }
    drop(inheritable);
    fixture.shutdown().await;
}

#[tokio::test]
async fn the_hard_lock_limit_is_unchanged_so_that_a_child_can_supervise() {
    let fixture = ProcessFixture::run_once(sh("echo pid $$; exec sleep 100"));
    let pid = fixture.output.wait_pid().await;
    let mark: u64 = mark_of(pid).parse().expect("a number");
    assert_eq!(mark >> 61, 1);
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).expect("the process is running");
    let line = limits.lines().find(|line| line.starts_with("Max file locks")).expect("it is there");
    assert_eq!(line.split_whitespace().nth(4), Some("unlimited"));
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_process_runs_as_the_given_user_or_the_error_says_that_only_root_may() {
    let process = Process::new("/usr/bin/id").uid(1234).gid(4321);
    // As root, it must also lose all of root's groups.
    if fs::metadata("/proc/self").map(|meta| std::os::unix::fs::MetadataExt::uid(&meta)).ok() == Some(0) {
        let fixture = ProcessFixture::run_once(process);
        fixture.wait_exit().await;
        assert_eq!(fixture.output.text(), "uid=1234 gid=4321 groups=4321\n");
        fixture.shutdown().await;
    } else {
        let error = start_failure(process).await;
        assert!(
            error.starts_with("can't start /usr/bin/id: can't change user or group: only root may"),
            "{error}"
        );
    }
}

// While another program has a lease on a file, the kernel blocks every open of it.
#[tokio::test]
async fn a_program_that_blocks_in_exec_delays_no_other() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("slow");
    testbed::copy_program("/bin/sleep".as_ref(), &program).expect("it is copied");
    let script = r#"$SIG{IO} = 'IGNORE'; my ($setlease, $exclusive) = (1024, 1); open(my $file, "+<", $ARGV[0]) or die;
        fcntl($file, $setlease, $exclusive) or die "lease: $!"; $| = 1; print "up\n"; <STDIN>; "#;
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let lease =
        ProcessFixture::run_once(perl(script).arg(&program).stdin(StdinSource::from(OwnedFd::from(reader))));
    lease.output.wait_line("up").await;

    let recorder = EventRecorder::default();
    let supervisor = Supervisor::builder().event_hook(recorder.clone()).start(parent_of(move |ctx| {
        ctx.run_child("slow", Process::new(program.clone()).arg("100"))?;
        ctx.run_child("quick", sh("exec sleep 100"))
    }));
    recorder.wait_for_state("root.quick", RunnableState::Ready).await;
    let state_of_slow = || {
        let tree = supervisor.snapshot();
        tree.iter().find(|node| &*node.dn == "root.slow").map(|node| (node.state, node.generation))
    };
    assert_eq!(state_of_slow(), Some((RunnableState::New, 1)), "the kernel still waits for the lease");
    drop(writer);
    recorder.wait_for_state("root.slow", RunnableState::Ready).await;
    lease.shutdown().await;
    supervisor.restart_runnable("root.quick").expect("the DN exists");
    recorder.wait_for_state("root.quick", RunnableState::Ready).await;
    assert_eq!(state_of_slow(), Some((RunnableState::Ready, 1)), "its spawner thread still exists");
    let report = supervisor.shutdown().await;
    assert!(report.stragglers.is_empty(), "{report:?}");
}

// Otherwise, an answer of this program would wait for all starts at each of its awaits.
#[tokio::test]
async fn a_burst_of_starts_delays_no_other_task() {
    const STARTS: usize = 300;
    let dir = tempfile::tempdir().expect("a directory");
    let records = dir.path().to_owned();
    // Each start is recorded when it is prepared.
    let is_record = |name: &str| name.starts_with("kept-") && !name.contains('.');
    let count_prepared = move || {
        let entries = fs::read_dir(&records).expect("it exists");
        entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_record)).count()
    };
    let (report, mut reported) = tokio::sync::mpsc::unbounded_channel();
    let builder = Supervisor::builder().cgroup_parent(configured_cgroups());
    let supervisor = builder.process_records(ProcessRecords::new(dir.path())).start(move |ctx: Context| {
        let (count_prepared, report) = (count_prepared.clone(), report.clone());
        async move {
            for number in 0..STARTS {
                let process = Process::new("/bin/sleep").arg("20").keep(true);
                ctx.run_child(format!("p{number}"), process)?;
            }
            // The runtime has one thread: this task follows the first step of all of those.
            tokio::spawn(async {}).await?;
            report.send(count_prepared())?;
            steady(ctx).await
        }
    });
    let prepared = reported.recv().await.expect("the root reports");
    let report = supervisor.shutdown().await;
    assert!(report.stragglers.is_empty(), "{report:?}");
    assert!((1..STARTS / 10).contains(&prepared), "{prepared} of {STARTS} starts were prepared before it");
}

const IS_KILLED: &str = "NODEKEEL_TEST_IS_KILLED";

// The program dies by SIGKILL, so it is a separate one: this test again, with another job.
#[tokio::test]
async fn a_process_is_killed_with_its_supervising_program() {
    if std::env::var_os(IS_KILLED).is_some() {
        let fixture = ProcessFixture::run_once(sh("echo pid $$; exec sleep 100"));
        eprintln!("pid {}", fixture.output.wait_pid().await);
        std::future::pending::<()>().await;
    }
    // This program is the next subreaper above, so it gets the orphan; its supervisor reaps it.
    let above = ProcessFixture::run_once(sh("exec sleep 100"));
    above.wait_for_state(RunnableState::Ready).await;
    let test = "start::a_process_is_killed_with_its_supervising_program";
    let mut program = tokio::process::Command::from(rerun_test(test))
        .env(IS_KILLED, "1")
        .stderr(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("it starts");
    let mut lines =
        tokio::io::AsyncBufReadExt::lines(tokio::io::BufReader::new(program.stderr.take().expect("piped")));
    let pid = loop {
        let line = lines.next_line().await.expect("it is text").expect("it prints the pid");
        if let Some(pid) = line.strip_prefix("pid ") {
            break pid.parse().expect("a pid");
        }
    };
    mark_of(pid);
    program.kill().await.expect("it is killed");
    tokio::task::spawn_blocking(move || wait_gone(pid)).await.expect("it is gone");
    above.shutdown().await;
}

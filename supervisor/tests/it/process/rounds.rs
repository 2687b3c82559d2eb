//! Many passes of misbehaving processes, in a separate program: no zombie, descriptor or thread remains.

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nodekeel_supervisor::process::{Process, Readiness};
use nodekeel_supervisor::{ChildPolicy, ExitReason, RestartPolicy, RunnableState, Supervisor};
use rustix::process::{Resource, Rlimit, child_subreaper, getrlimit, setrlimit};

use crate::harness::parent_of;

use super::cgroup::runtime;
use super::{
    EXCLUSIVE, ProcessFixture, configured_cgroups, describe, list_pids, mark_of, marked_processes, perl,
    rerun_test, sh,
};

const IN_SEPARATE_PROGRAM: &str = "NODEKEEL_TEST_IS_THE_PROGRAM";
const GRACE: Duration = Duration::from_millis(20);

fn misbehaving_processes() -> Vec<Process> {
    let daemon = r#"setsid sh -c 'trap "" TERM; exec sleep 100' & "#;
    let flood = r#"$SIG{TERM}='IGNORE'; print "x" x 9999, "\n" while 1"#;
    let hop = r#"use POSIX; my $end = time + 20; if (!fork) { while (time < $end) { exit if fork; POSIX::setsid() } exit } sleep 100"#;
    vec![
        sh("exec sleep 100"),
        sh("trap '' TERM; sleep 100"),
        sh(&format!("{daemon} exec sleep 100")),
        sh(&format!("{daemon} exit 3")),
        sh("(sh -c 'sleep 100' &); exit 0"),
        sh("kill -STOP $$"),
        sh("kill -SEGV $$"),
        sh("exec 0<&- 1>&- 2>&-; sleep 100"),
        perl(flood),
        perl(hop),
        sh("exec sleep 100").ready_when(Readiness::on_notify().with_timeout(Duration::from_millis(10))),
        Process::new("/no/such"),
    ]
}

/// One pass: starts all of them at once, then shuts down. Returns the duration of the shutdown.
async fn run_pass() -> Duration {
    let policy = ChildPolicy { restart: RestartPolicy::Never, ..ChildPolicy::default() };
    let builder = Supervisor::builder().cgroup_parent(configured_cgroups()).default_policy(policy);
    let supervisor = builder.start(parent_of(|ctx| {
        (0..).zip(misbehaving_processes()).try_for_each(|(index, process): (usize, _)| {
            ctx.run_child(format!("p{index}"), process.grace_period(GRACE))
        })
    }));
    tokio::time::sleep(GRACE).await;
    let started = Instant::now();
    let report = supervisor.shutdown().await;
    assert!(report.stragglers.is_empty(), "{report:?}");
    started.elapsed()
}

fn children() -> Vec<String> {
    let own = std::process::id().to_string();
    let descriptions = list_pids().into_iter().map(describe);
    descriptions.filter(|process| process.split_whitespace().last() == Some(&own)).collect()
}

/// The targets of the open descriptors.
fn descriptors() -> Vec<String> {
    let entries = fs::read_dir("/proc/self/fd").expect("proc is mounted").flatten();
    entries.filter_map(|entry| Some(fs::read_link(entry.path()).ok()?.display().to_string())).collect()
}

fn count(dir: &str) -> usize {
    fs::read_dir(dir).expect("proc is mounted").count()
}

#[test]
fn repeated_failures_leave_no_zombie_descriptor_or_thread() {
    run_in_separate_program("repeated_failures_leave_no_zombie_descriptor_or_thread", repeat_passes);
}

// The descriptor limit applies to the whole program.
#[test]
fn a_program_without_descriptors_reports_no_false_exit() {
    run_in_separate_program("a_program_without_descriptors_reports_no_false_exit", || {
        runtime().block_on(stop_without_descriptors());
    });
}

async fn stop_without_descriptors() {
    let script = r#"echo pid $$; setsid sh -c 'trap "" TERM; echo up; exec sleep 100' & exec sleep 100"#;
    let fixture = ProcessFixture::run_once(sh(script).grace_period(GRACE));
    let mark = mark_of(fixture.output.wait_pid().await);
    fixture.output.wait_line("up").await;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).expect("the limit can be lowered");
    fixture.supervisor.stop_runnable("root.p").expect("the DN exists");
    // Ten times the usual duration.
    let early = tokio::time::timeout(10 * GRACE, fixture.wait_exit()).await;
    setrlimit(Resource::Nofile, limit).expect("the limit can be restored");
    assert!(early.is_err(), "{early:?}, but there: {:?}", marked_processes(&mark));
    let exit = fixture.wait_exit().await;
    assert!(matches!(exit, (RunnableState::Canceled, ExitReason::Killed { .. })), "{exit:?}");
    assert_eq!(marked_processes(&mark), [""; 0], "no process is left, not even a zombie");
    fixture.shutdown().await;
}

/// Runs a test's job in a separate program: this one again, with only that test.
fn run_in_separate_program(test: &str, job: impl FnOnce()) {
    if std::env::var_os(IN_SEPARATE_PROGRAM).is_some() {
        return job();
    }
    let _alone = EXCLUSIVE.blocking_lock();
    let output = rerun_test(&format!("rounds::{test}"))
        .env(IN_SEPARATE_PROGRAM, "1")
        .stdin(Stdio::null())
        .output()
        .expect("it starts");
    let streams = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy);
    assert!(
        output.status.success(),
        "{}:\n{}\n{}",
        output.status,
        last_lines(&streams[0]),
        last_lines(&streams[1])
    );
    println!("{}", last_lines(&streams[0]));
}

/// The end of a program's output: enough for a panic with its backtrace.
fn last_lines(output: &str) -> String {
    let lines: Vec<&str> = output.lines().collect();
    lines[lines.len().saturating_sub(60)..].join("\n")
}

fn repeat_passes() {
    let rounds = std::env::var("NODEKEEL_ROUNDS").ok().map_or(10, |rounds| rounds.parse().expect("a number"));
    let runtime = runtime();
    let mut first = None;
    let mut took = Vec::new();
    for number in 0..rounds {
        took.push(runtime.block_on(run_pass()));
        assert_eq!(children(), [""; 0], "round {number}");
        // The first pass opens the runtime's own descriptors, which stay.
        let before = *first.get_or_insert_with(|| count("/proc/self/fd"));
        // The runtime may drop a task's descriptors a little later.
        let closed = || match count("/proc/self/fd") {
            now if now <= before => Ok(()),
            now => Err(anyhow::anyhow!("{now} descriptors, {before} after the first: {:?}", descriptors())),
        };
        testbed::wait_until(Duration::from_secs(5), &format!("round {number} to have closed all"), closed)
            .expect("no descriptor stays");
    }
    took.sort();
    let (median, worst) = (took[took.len() / 2], took[took.len() - 1]);
    println!("{rounds} rounds of {}: down in {median:?}, at worst {worst:?}", misbehaving_processes().len());
    let no_subreaper = || match child_subreaper() {
        Ok(None) => Ok(()),
        other => Err(anyhow::anyhow!("still a subreaper: {other:?}")),
    };
    testbed::wait_until(Duration::from_secs(5), "the program to be no subreaper any more", no_subreaper)
        .expect("the subreaper setting is restored");
    let threads =
        || if count("/proc/self/task") <= 4 { Ok(()) } else { Err(anyhow::anyhow!("too many threads")) };
    testbed::wait_until(Duration::from_secs(5), "the threads to end", threads)
        .expect("all but the runtime's end");
}

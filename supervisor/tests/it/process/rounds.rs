//! Many rounds of everything bad, in a program of their own: no zombie, no descriptor, no thread is left.

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nodekeel_supervisor::process::{Process, Readiness};
use nodekeel_supervisor::{Child, Context, Exit, Failure, Policy, Restart, State, Supervisor};
use rustix::process::{Resource, Rlimit, child_subreaper, getrlimit, setrlimit};
use tokio::runtime::Runtime;

use super::{ALONE, Bed, cgroups, describe, mark_of, marked, perl, pids, sh};

const IS_THE_PROGRAM: &str = "NODEKEEL_TEST_IS_THE_PROGRAM";
const GRACE: Duration = Duration::from_millis(20);

fn mixture() -> Vec<Process> {
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
        sh("exec sleep 100").ready(Readiness::notify().within(Duration::from_millis(10))),
        Process::new("/no/such"),
    ]
}

/// One round: all of them at once, then down with them. How long the way down took.
async fn round() -> Duration {
    let supervisor = Supervisor::builder().cgroups(cgroups()).start(|ctx: Context| async move {
        let policy = Policy { restart: Restart::Never, ..Policy::default() };
        for (index, process) in mixture().into_iter().enumerate() {
            ctx.run_group([Child::new(format!("p{index}"), process.grace(GRACE)).policy(policy)])?;
        }
        ctx.ready()?;
        Err::<(), Failure>(ctx.cancelled().await.into())
    });
    tokio::time::sleep(GRACE).await;
    let began = Instant::now();
    let report = supervisor.shutdown().await;
    assert!(report.stragglers.is_empty(), "{report:?}");
    began.elapsed()
}

fn children() -> Vec<String> {
    let own = std::process::id().to_string();
    let descriptions = pids().into_iter().map(describe);
    descriptions.filter(|process| process.split_whitespace().last() == Some(&own)).collect()
}

/// What the open descriptors are.
fn descriptors() -> Vec<String> {
    let entries = fs::read_dir("/proc/self/fd").expect("proc is mounted").flatten();
    entries.filter_map(|entry| Some(fs::read_link(entry.path()).ok()?.display().to_string())).collect()
}

fn count(dir: &str) -> usize {
    fs::read_dir(dir).expect("proc is mounted").count()
}

#[test]
fn rounds_of_everything_bad_leave_nothing_behind() {
    in_a_program_of_its_own("rounds_of_everything_bad_leave_nothing_behind", alone);
}

// Its limit is that of a whole program.
#[test]
fn a_program_without_descriptors_tells_no_end_that_was_none() {
    in_a_program_of_its_own("a_program_without_descriptors_tells_no_end_that_was_none", || {
        runtime().block_on(without_descriptors());
    });
}

async fn without_descriptors() {
    let script = r#"echo pid $$; setsid sh -c 'trap "" TERM; echo up; exec sleep 100' & exec sleep 100"#;
    let bed = Bed::once(sh(script).grace(GRACE));
    let mark = mark_of(bed.output.pid().await);
    bed.output.line("up").await;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).expect("it may be less");
    bed.supervisor.stop("root.p").expect("it is there");
    // Ten times what it takes otherwise.
    let early = tokio::time::timeout(10 * GRACE, bed.ended()).await;
    setrlimit(Resource::Nofile, limit).expect("it may be as before");
    assert!(early.is_err(), "{early:?}, but there: {:?}", marked(&mark));
    assert_eq!(bed.ended().await, (State::Canceled, Exit::Cancelled));
    assert_eq!(marked(&mark), [""; 0], "nobody is left, not even a zombie");
    bed.shutdown().await;
}

/// Runs a test's job in a program of its own: this one again, with that test only.
fn in_a_program_of_its_own(test: &str, job: impl FnOnce()) {
    if std::env::var_os(IS_THE_PROGRAM).is_some() {
        return job();
    }
    let _alone = ALONE.blocking_lock();
    let output = std::process::Command::new(std::env::current_exe().expect("it has a path"))
        .args(["--exact", &format!("process::rounds::{test}"), "--nocapture"])
        .env(IS_THE_PROGRAM, "1")
        .stdin(Stdio::null())
        .output()
        .expect("it starts");
    let said = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy);
    assert!(output.status.success(), "{}:\n{}\n{}", output.status, last(&said[0]), last(&said[1]));
    println!("{}", last(&said[0]));
}

/// The end of what a program has said: enough for a panic with its backtrace.
fn last(said: &str) -> String {
    let lines: Vec<&str> = said.lines().collect();
    lines[lines.len().saturating_sub(60)..].join("\n")
}

fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().expect("a runtime")
}

fn alone() {
    let rounds = std::env::var("NODEKEEL_ROUNDS").ok().map_or(10, |rounds| rounds.parse().expect("a number"));
    let runtime = runtime();
    let mut first = None;
    let mut took = Vec::new();
    for number in 0..rounds {
        took.push(runtime.block_on(round()));
        assert_eq!(children(), [""; 0], "round {number}");
        // The first round opens what is kept: the runtime's own.
        let before = *first.get_or_insert_with(|| count("/proc/self/fd"));
        // What a task held is closed when the runtime has come to drop it.
        let closed = || match count("/proc/self/fd") {
            now if now <= before => Ok(()),
            now => Err(anyhow::anyhow!("{now} descriptors, {before} after the first: {:?}", descriptors())),
        };
        testbed::wait_until(Duration::from_secs(5), &format!("round {number} to have closed all"), closed)
            .expect("no descriptor stays");
    }
    took.sort();
    let (median, worst) = (took[took.len() / 2], took[took.len() - 1]);
    println!("{rounds} rounds of {}: down in {median:?}, at worst {worst:?}", mixture().len());
    let no_subreaper = || match child_subreaper() {
        Ok(None) => Ok(()),
        other => Err(anyhow::anyhow!("orphans still come here: {other:?}")),
    };
    testbed::wait_until(Duration::from_secs(5), "orphans to go elsewhere again", no_subreaper)
        .expect("they come only as long as somebody waits for them");
    let threads =
        || if count("/proc/self/task") <= 4 { Ok(()) } else { Err(anyhow::anyhow!("too many threads")) };
    testbed::wait_until(Duration::from_secs(5), "the threads to end", threads)
        .expect("all but the runtime's end");
}

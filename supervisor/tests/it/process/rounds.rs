//! Many rounds of everything bad, in a program of their own: no zombie, no descriptor, no thread is left.

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nodekeel_supervisor::process::{Process, Readiness};
use nodekeel_supervisor::{Child, Context, Failure, Policy, Restart, Supervisor};

use super::{ALONE, describe, perl, pids, sh};

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
    let supervisor = Supervisor::builder().start(|ctx: Context| async move {
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

fn count(dir: &str) -> usize {
    fs::read_dir(dir).expect("proc is mounted").count()
}

#[test]
fn rounds_of_everything_bad_leave_nothing_behind() {
    if std::env::var_os(IS_THE_PROGRAM).is_some() {
        return alone();
    }
    let _alone = ALONE.blocking_lock();
    let status = std::process::Command::new(std::env::current_exe().expect("it has a path"))
        .args(["--exact", "process::rounds::rounds_of_everything_bad_leave_nothing_behind", "--nocapture"])
        .env(IS_THE_PROGRAM, "1")
        .stdin(Stdio::null())
        .status()
        .expect("it starts");
    assert!(status.success());
}

fn alone() {
    let rounds = std::env::var("NODEKEEL_ROUNDS").ok().map_or(30, |rounds| rounds.parse().expect("a number"));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let mut first = None;
    let mut took = Vec::new();
    for number in 0..rounds {
        took.push(runtime.block_on(round()));
        assert_eq!(children(), [""; 0], "round {number}");
        let descriptors = count("/proc/self/fd");
        // The first round opens what is kept: the runtime's own.
        let before = *first.get_or_insert(descriptors);
        assert!(descriptors <= before, "round {number}: {descriptors} descriptors, {before} after the first");
    }
    took.sort();
    let (median, worst) = (took[took.len() / 2], took[took.len() - 1]);
    println!("{rounds} rounds of {}: down in {median:?}, at worst {worst:?}", mixture().len());
    let threads =
        || if count("/proc/self/task") <= 4 { Ok(()) } else { Err(anyhow::anyhow!("too many threads")) };
    testbed::wait_until(Duration::from_secs(5), "the threads to end", threads)
        .expect("all but the runtime's end");
}

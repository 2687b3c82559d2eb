//! The input and output of a process.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nodekeel_supervisor::process::{KillMode, Readiness, StdinSource};
use nodekeel_supervisor::{ExitReason, RunnableState};

use super::{OutputBuffer, ProcessFixture, mark_of, marked_processes, perl, sh};

#[tokio::test]
async fn all_output_arrives_however_much_and_however_late() {
    let fixture = ProcessFixture::run_once(perl(r#"print chr($_ % 256) x 65536 for 1..320; exit 1"#));
    fixture.wait_failure().await;
    assert_eq!(fixture.output.len(), 320 * 65536);
    fixture.shutdown().await;
}

#[tokio::test]
async fn output_is_complete_before_the_exit_is_reported() {
    for _ in 0..20 {
        let fixture = ProcessFixture::run_once(sh("echo out; echo err >&2; exit 1"));
        fixture.wait_failure().await;
        let text = fixture.output.text();
        assert!(text.contains("out\n") && text.contains("err\n"), "{text:?}");
        fixture.shutdown().await;
    }
}

#[tokio::test]
async fn a_copy_of_the_output_is_complete_when_the_exit_is_reported() {
    let copy = OutputBuffer::default();
    let fixture =
        ProcessFixture::run_once(sh("echo out; echo err >&2; exit 1").copy_output(copy.clone().sink()));
    fixture.wait_failure().await;
    for text in [copy.text(), fixture.output.text()] {
        assert!(text.contains("out\n") && text.contains("err\n"), "{text:?}");
    }
    fixture.shutdown().await;
}

#[tokio::test]
async fn a_survivor_that_keeps_the_pipe_open_does_not_block_the_run() {
    let script = "echo pid $$; setsid sh -c 'echo up; sleep 100' & read go";
    let (reader, writer) = io::pipe().expect("a pipe");
    let process = sh(script).kill_mode(KillMode::Process).ready_when(Readiness::on_exit());
    let fixture = ProcessFixture::run_once(process.stdin(StdinSource::from(OwnedFd::from(reader))));
    let mark = mark_of(fixture.output.wait_pid().await);
    fixture.output.wait_line("up").await;
    (&writer).write_all(b"go\n").expect("it reads");
    assert_eq!(fixture.wait_exit().await, (RunnableState::Done, ExitReason::Done));
    let left = marked_processes(&mark);
    assert!(!left.is_empty(), "the survivor is running");
    for process in &left {
        let pid = process.split(' ').next().expect("a pid");
        super::send_signal("KILL", pid.parse().expect("a number"));
    }
    fixture.shutdown().await;
}

#[tokio::test]
async fn stdin_bytes_are_read_from_the_beginning_at_each_start() {
    let fixture = ProcessFixture::restart_always(
        sh("cat; echo; exec sleep 100").stdin(StdinSource::from(vec![b'x'; 300_000])),
    );
    fixture.output.wait_line("xxx").await;
    assert_eq!(fixture.output.len(), 300_001);
    fixture.supervisor.restart_runnable("root.p").expect("the DN exists");
    let started = Instant::now();
    while fixture.output.len() < 600_002 {
        assert!(started.elapsed() < Duration::from_secs(5), "{}", fixture.output.len());
        tokio::task::yield_now().await;
    }
    fixture.shutdown().await;
}

#[tokio::test]
async fn an_open_file_is_read_as_stdin() {
    let file = File::open("/proc/self/limits").expect("proc is mounted");
    let fixture = ProcessFixture::run_once(sh("cat; exit 1").stdin(file.into()));
    fixture.wait_failure().await;
    assert!(fixture.output.text().contains("Max file locks"));
    fixture.shutdown().await;
}

#[tokio::test]
async fn stdin_is_empty_by_default() {
    let fixture = ProcessFixture::run_once(sh("readlink /proc/self/fd/0; cat; exit 1"));
    fixture.wait_failure().await;
    assert_eq!(fixture.output.text(), "/dev/null\n");
    fixture.shutdown().await;
}

//! What goes in and out of a process.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nodekeel_supervisor::process::{KillMode, Readiness, Stdin};
use nodekeel_supervisor::{Exit, State};

use super::{Bed, mark_of, marked, perl, sh};

#[tokio::test]
async fn all_that_is_written_arrives_however_much_and_however_late() {
    let bed = Bed::once(perl(r#"print chr($_ % 256) x 65536 for 1..320; exit 1"#));
    bed.failed().await;
    assert_eq!(bed.output.len(), 320 * 65536);
    bed.shutdown().await;
}

#[tokio::test]
async fn output_is_there_before_the_end_is_told() {
    for _ in 0..20 {
        let bed = Bed::once(sh("echo out; echo err >&2; exit 1"));
        bed.failed().await;
        let text = bed.output.text();
        assert!(text.contains("out\n") && text.contains("err\n"), "{text:?}");
        bed.shutdown().await;
    }
}

#[tokio::test]
async fn a_survivor_that_keeps_the_pipe_open_does_not_keep_the_run() {
    let script = "echo pid $$; setsid sh -c 'echo up; sleep 100' & read go";
    let (reader, writer) = io::pipe().expect("a pipe");
    let process = sh(script).kill(KillMode::Process).ready(Readiness::exit());
    let bed = Bed::once(process.stdin(Stdin::from(OwnedFd::from(reader))));
    let mark = mark_of(bed.output.pid().await);
    bed.output.line("up").await;
    (&writer).write_all(b"go\n").expect("it reads");
    assert_eq!(bed.ended().await, (State::Done, Exit::Done));
    let left = marked(&mark);
    assert!(!left.is_empty(), "it lives on");
    for process in &left {
        let pid = process.split(' ').next().expect("a pid");
        std::process::Command::new("/bin/kill").args(["-KILL", pid]).status().expect("kill runs");
    }
    bed.shutdown().await;
}

#[tokio::test]
async fn bytes_are_read_from_the_start_at_each_start() {
    let bed = Bed::always(sh("cat; echo; exec sleep 100").stdin(Stdin::from(vec![b'x'; 300_000])));
    bed.output.line("xxx").await;
    assert_eq!(bed.output.len(), 300_001);
    bed.supervisor.restart("root.p").expect("it is there");
    let began = Instant::now();
    while bed.output.len() < 600_002 {
        assert!(began.elapsed() < Duration::from_secs(5), "{}", bed.output.len());
        tokio::task::yield_now().await;
    }
    bed.shutdown().await;
}

#[tokio::test]
async fn an_open_file_is_read() {
    let file = File::open("/proc/self/limits").expect("proc is mounted");
    let bed = Bed::once(sh("cat; exit 1").stdin(file.into()));
    bed.failed().await;
    assert!(bed.output.text().contains("Max file locks"));
    bed.shutdown().await;
}

#[tokio::test]
async fn nothing_is_read_by_default() {
    let bed = Bed::once(sh("readlink /proc/self/fd/0; cat; exit 1"));
    bed.failed().await;
    assert_eq!(bed.output.text(), "/dev/null\n");
    bed.shutdown().await;
}

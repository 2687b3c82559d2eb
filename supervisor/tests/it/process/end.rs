//! How an end is told.

use nodekeel_supervisor::process::{MAX_TAIL_LINE, MAX_TAIL_LINES, Readiness, Signal};
use nodekeel_supervisor::{Exit, State};

use super::{Bed, perl, sh};

#[tokio::test]
async fn a_code_is_told_with_the_last_lines() {
    let bed = Bed::once(sh("for n in $(seq 20); do echo line $n; done; echo last words >&2; exit 3"));
    let (error, exit) = bed.failed().await;
    assert_eq!((error.as_str(), exit.code, exit.signal), ("exited with code 3", Some(3), None));
    assert_eq!(exit.tail.len(), MAX_TAIL_LINES);
    assert!(
        exit.tail.contains(&"last words".to_owned()) && exit.tail.contains(&"line 20".to_owned()),
        "{exit:?}"
    );
    assert!(!exit.is_success() && exit.pid > 0);
    bed.shutdown().await;
}

#[tokio::test]
async fn a_signal_is_told_by_its_name() {
    let bed = Bed::once(sh("kill -SEGV $$"));
    let (error, exit) = bed.failed().await;
    assert!(error.starts_with("killed by SIGSEGV"), "{error}");
    assert_eq!((exit.code, exit.signal.map(Signal::number)), (None, Some(11)));
    bed.shutdown().await;
}

#[tokio::test]
async fn a_realtime_signal_is_told_by_its_number() {
    let bed = Bed::once(sh("kill -37 $$"));
    assert_eq!(bed.failed().await.0, "killed by signal 37");
    bed.shutdown().await;
}

#[tokio::test]
async fn a_daemon_that_exits_with_code_0_has_not_done_its_work_and_is_told_with_its_last_lines() {
    let bed = Bed::always(sh("echo last words; exit 0"));
    let (error, exit) = bed.failed().await;
    assert_eq!((error.as_str(), exit.code, exit.signal), ("exited with code 0 by itself", Some(0), None));
    assert_eq!(exit.tail, ["last words"]);
    bed.shutdown().await;
}

#[tokio::test]
async fn code_0_is_the_end_of_the_work_where_the_policy_says_so() {
    let bed = Bed::once(sh("echo last words; exit 0"));
    assert_eq!(bed.ended().await, (State::Done, Exit::Done));
    bed.shutdown().await;
}

#[tokio::test]
async fn a_task_that_exits_with_code_0_is_done() {
    let bed = Bed::always(sh("exit 0").ready(Readiness::exit()));
    assert_eq!(bed.ended().await, (State::Done, Exit::Done));
    bed.shutdown().await;
}

#[tokio::test]
async fn a_task_that_exits_with_another_code_is_not() {
    let bed = Bed::once(sh("exit 1").ready(Readiness::exit()));
    assert_eq!(bed.failed().await.0, "exited with code 1");
    bed.shutdown().await;
}

#[tokio::test]
async fn cancelled_is_not_failed_whatever_the_process_makes_of_it() {
    let bed = Bed::once(sh("trap 'exit 9' TERM; echo pid $$; sleep 100 & wait"));
    bed.output.pid().await;
    bed.supervisor.stop("root.p").expect("it is there");
    assert_eq!(bed.ended().await, (State::Canceled, Exit::Cancelled));
    bed.shutdown().await;
}

#[tokio::test]
async fn what_dies_comes_back() {
    let bed = Bed::always(sh("echo pid $$; exec sleep 100"));
    let first = bed.output.pid().await;
    bed.until(State::Ready).await;
    std::process::Command::new("/bin/kill").args(["-KILL", &first.to_string()]).status().expect("kill runs");
    let again = bed.until(State::Ready).await;
    assert_eq!(again.generation, 2);
    let status = bed.supervisor.snapshot();
    let killed = status.iter().find(|node| &*node.dn == "root.p").and_then(|node| node.exits.last());
    assert_eq!(killed.map(|record| record.exit.to_string()).as_deref(), Some("killed by SIGKILL"));
    bed.shutdown().await;
}

#[tokio::test]
async fn the_last_lines_are_bounded_and_safe_to_print() {
    let script = r#"print "\e[31m", "x" x 100000, "\n", "\xff" x 3000, "\n", "\n" x 3, "end"; exit 1"#;
    let bed = Bed::once(perl(script));
    let (_, exit) = bed.failed().await;
    assert!(exit.tail.iter().all(|line| line.len() <= MAX_TAIL_LINE && !line.contains('\u{1b}')), "{exit:?}");
    assert_eq!(exit.tail.last().map(String::as_str), Some("end"));
    bed.shutdown().await;
}

//! nodectl as a process without a node; the tests of noded have one.
#![allow(clippy::unwrap_used, reason = "a test that can't continue fails")]

use std::os::unix::net::UnixListener;
use std::process::Command;

use testbed::{ScratchDir, command_line};

const NODECTL: &str = env!("CARGO_BIN_EXE_nodectl");

/// The stderr and the exit code of nodectl.
fn stderr_and_code(args: &[&str]) -> (String, Option<i32>) {
    let output = Command::new(NODECTL).args(args).env_clear().output().unwrap();
    (String::from_utf8_lossy(&output.stderr).trim_end().to_owned(), output.status.code())
}

#[test]
fn a_missing_a_stale_and_a_foreign_socket_are_distinguished() {
    let scratch = ScratchDir::new().unwrap();
    let path = scratch.path().join("control.sock");
    let socket = path.to_str().unwrap();
    let assert_fails = |text: &str| {
        let (said, code) = stderr_and_code(&["--socket", socket, "tree"]);
        assert!(code == Some(3) && said.contains(text) && said.lines().count() == 1, "{code:?} {said}");
    };
    assert_fails("the socket does not exist; start noded, or use another path with --socket");
    let listener = UnixListener::bind(&path).unwrap();
    let foreign = std::thread::spawn(move || {
        // A server that does not speak gRPC.
        let (mut stream, _) = listener.accept().unwrap();
        std::io::Write::write_all(&mut stream, b"hello\n").unwrap();
    });
    assert_fails("connection to noded lost");
    foreign.join().unwrap();
    assert_fails("the socket is stale; start noded again");
}

#[test]
fn wrong_usage_exits_with_2() {
    let lines = [
        &["dance"][..],
        &["--nonsense"],
        &["--timeout", "0", "tree"],
        &["logs", "--min-level", "loud"],
        &["logs", "--raw", "--leveled"],
        &["logs", "--raw", "--min-level", "info"],
        &["stop"],
    ];
    command_line::assert_rejects_usage(NODECTL.as_ref(), &lines);
}

#[test]
fn completions_and_help_need_no_node() {
    command_line::assert_prints_help(NODECTL.as_ref());
}

#[test]
fn unwritable_completions_are_a_failure_and_a_closed_pipe_is_not() {
    command_line::assert_reports_write_errors(NODECTL.as_ref());
}

#[test]
fn a_socket_without_a_server_times_out() {
    let scratch = ScratchDir::new().unwrap();
    let path = scratch.path().join("control.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    let (text, code) = stderr_and_code(&["--timeout", "0.1s", "--socket", path.to_str().unwrap(), "tree"]);
    assert!(code == Some(3) && text.starts_with("nodectl: noded does not answer within 100ms"), "{text}");
}

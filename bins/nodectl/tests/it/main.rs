//! nodectl as a process without a node; nodekeel-node, which has noded, tests it with one.
#![allow(clippy::unwrap_used, reason = "a test that can't continue fails")]

use std::os::unix::net::UnixListener;
use std::process::{Command, Output};

fn nodectl(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_nodectl")).args(args).env_clear().output().unwrap()
}

/// Its stderr, and its exit code.
fn stderr_and_code(args: &[&str]) -> (String, Option<i32>) {
    let output = nodectl(args);
    (String::from_utf8_lossy(&output.stderr).trim_end().to_owned(), output.status.code())
}

#[test]
fn a_missing_a_stale_and_a_foreign_socket_are_distinguished() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("control.sock");
    let socket = path.to_str().unwrap();
    let says = |text: &str| {
        let (said, code) = stderr_and_code(&["--socket", socket, "tree"]);
        assert!(code == Some(3) && said.contains(text) && said.lines().count() == 1, "{code:?} {said}");
    };
    says("the socket does not exist; start noded, or use another path with --socket");
    let listener = UnixListener::bind(&path).unwrap();
    let foreign = std::thread::spawn(move || {
        // A server that does not speak gRPC.
        let (mut stream, _) = listener.accept().unwrap();
        std::io::Write::write_all(&mut stream, b"hello\n").unwrap();
    });
    says("connection to noded lost");
    foreign.join().unwrap();
    says("the socket is stale; start noded again");
}

#[test]
fn wrong_usage_exits_with_2() {
    for args in [
        &["dance"][..],
        &["logs", "--raw", "--leveled"],
        &["logs", "--raw", "--min-level", "info"],
        &["stop"],
    ] {
        assert_eq!(stderr_and_code(args).1, Some(2), "{args:?}");
    }
}

#[test]
fn completions_and_help_need_no_node() {
    for args in [&["completion", "bash"][..], &["completion", "fish"], &["--help"], &["--version"]] {
        let output = nodectl(args);
        assert!(output.status.success() && !output.stdout.is_empty(), "{args:?}");
    }
    let help = String::from_utf8(nodectl(&["--help"]).stdout).unwrap();
    assert!(help.contains("Exit codes:"), "{help}");
}

#[test]
fn unwritable_completions_are_a_failure_and_a_closed_pipe_is_not() {
    let complete = |output: std::process::Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nodectl"));
        let output = command.args(["completion", "bash"]).env_clear().stdout(output).output().unwrap();
        (String::from_utf8_lossy(&output.stderr).into_owned(), output.status.code())
    };
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let (text, code) = complete(full.into());
    assert!(code == Some(1) && text.starts_with("nodectl: can't write the output: "), "{code:?} {text}");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(complete(writer.into()), (String::new(), Some(0)));
}

#[test]
fn a_socket_without_a_server_times_out() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("control.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    let (text, code) = stderr_and_code(&["--timeout", "0.1s", "--socket", path.to_str().unwrap(), "tree"]);
    assert!(code == Some(3) && text.starts_with("nodectl: noded does not answer within 100ms"), "{text}");
    assert_eq!(stderr_and_code(&["--timeout", "0", "tree"]).1, Some(2));
}

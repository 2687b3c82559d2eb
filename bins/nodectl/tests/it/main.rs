//! nodectl as a process where there is no node; with one it is tested by nodekeel-node, which has noded.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::os::unix::net::UnixListener;
use std::process::{Command, Output};

fn nodectl(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_nodectl")).args(args).env_clear().output().unwrap()
}

/// What it printed to stderr, and its exit code.
fn failed(args: &[&str]) -> (String, Option<i32>) {
    let output = nodectl(args);
    (String::from_utf8_lossy(&output.stderr).trim_end().to_owned(), output.status.code())
}

#[test]
fn an_absent_a_dead_and_a_foreign_socket_are_told_apart() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("control.sock");
    let socket = path.to_str().unwrap();
    let says = |text: &str| {
        let (said, code) = failed(&["--socket", socket, "tree"]);
        assert!(code == Some(3) && said.contains(text) && said.lines().count() == 1, "{code:?} {said}");
    };
    says("there is no such socket; start noded, or give its socket with --socket");
    let listener = UnixListener::bind(&path).unwrap();
    let foreign = std::thread::spawn(move || {
        // Somebody who listens and does not speak gRPC.
        let (mut stream, _) = listener.accept().unwrap();
        std::io::Write::write_all(&mut stream, b"hello\n").unwrap();
    });
    says("the node at the socket went away");
    foreign.join().unwrap();
    says("the socket is dead; start noded again");
}

#[test]
fn wrong_usage_exits_with_2() {
    for args in [
        &["dance"][..],
        &["logs", "--raw", "--leveled"],
        &["logs", "--raw", "--min-level", "info"],
        &["stop"],
    ] {
        assert_eq!(failed(args).1, Some(2), "{args:?}");
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
fn completions_that_can_not_be_written_are_a_failure_and_an_early_reader_is_none() {
    let complete = |output: std::process::Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nodectl"));
        let output = command.args(["completion", "bash"]).env_clear().stdout(output).output().unwrap();
        (String::from_utf8_lossy(&output.stderr).into_owned(), output.status.code())
    };
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let (text, code) = complete(full.into());
    assert!(code == Some(1) && text.starts_with("nodectl: write the output: "), "{code:?} {text}");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    assert_eq!(complete(writer.into()), (String::new(), Some(0)));
}

#[test]
fn a_socket_that_nobody_serves_is_given_up_on() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("control.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    let (text, code) = failed(&["--timeout", "0.1s", "--socket", path.to_str().unwrap(), "tree"]);
    assert!(
        code == Some(3) && text.starts_with("nodectl: noded does not answer: nothing came within 100ms"),
        "{text}"
    );
    assert_eq!(failed(&["--timeout", "0", "tree"]).1, Some(2));
}

//! Claims about the command line of every program: each function asserts one of the program at a path.

use std::fs::OpenOptions;
use std::path::Path;
use std::process::{Command, Stdio};

/// The exit code and the error of a program in a clean environment.
fn run(program: &Path, args: &[&str], stdout: Stdio) -> (Option<i32>, String) {
    let mut command = Command::new(program);
    let output = command.args(args).env_clear().stdout(stdout).output().expect("the program starts");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Asserts that help, version and completions are printed.
///
/// # Panics
/// If one of them is not.
pub fn assert_prints_help(program: &Path) {
    for args in [&["completion", "bash"][..], &["completion", "fish"], &["--help"], &["--version"]] {
        let output = Command::new(program).args(args).env_clear().output().expect("the program starts");
        let text = String::from_utf8(output.stdout).expect("UTF-8 output");
        assert!(output.status.success() && !text.is_empty(), "{args:?}: {text}");
        assert_eq!(text.contains("Exit codes:"), args == ["--help"], "{args:?}: {text}");
    }
}

/// Asserts that wrong arguments exit with 2.
///
/// # Panics
/// If one of these lines exits with another code.
pub fn assert_rejects_usage(program: &Path, lines: &[&[&str]]) {
    for args in lines {
        assert_eq!(run(program, args, Stdio::null()).0, Some(2), "{args:?}");
    }
}

/// Asserts that output which can't be written is a failure, and a pipe that its reader has closed is not.
///
/// # Panics
/// If the exit code or the error is another one.
pub fn assert_reports_write_errors(program: &Path) {
    let full = OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
    let (code, error) = run(program, &["completion", "bash"], full.into());
    let name = program.file_name().unwrap_or_default().display();
    let says = format!("{name}: can't write the output: ");
    assert!(code == Some(1) && error.starts_with(&says), "{code:?} {error}");
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    assert_eq!(run(program, &["completion", "bash"], writer.into()), (Some(0), String::new()));
}

//! dirquota as a process.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod errors;
mod kernel;

use std::path::Path;
use std::process::{Command, Output};

fn dirquota(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dirquota")).args(args).env_clear().output().unwrap()
}

/// What it printed to stderr, and its exit code.
fn failed(args: &[&str]) -> (String, Option<i32>) {
    let output = dirquota(args);
    assert_eq!(output.stdout, b"", "what fails prints no result");
    (String::from_utf8_lossy(&output.stderr).trim_end().to_owned(), output.status.code())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

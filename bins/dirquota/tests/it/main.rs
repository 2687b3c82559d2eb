//! Tests of the dirquota binary.
#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]

mod errors;
mod kernel;

use std::path::Path;
use std::process::{Command, Output};

const DIRQUOTA: &str = env!("CARGO_BIN_EXE_dirquota");

fn run_dirquota(args: &[&str]) -> Output {
    Command::new(DIRQUOTA).args(args).env_clear().output().unwrap()
}

/// The stderr and the exit code of dirquota.
fn run_failing(args: &[&str]) -> (String, Option<i32>) {
    let output = run_dirquota(args);
    assert_eq!(output.stdout, b"", "a failed command prints no result");
    (String::from_utf8_lossy(&output.stderr).trim_end().to_owned(), output.status.code())
}

fn path_text(path: &Path) -> &str {
    path.to_str().unwrap()
}

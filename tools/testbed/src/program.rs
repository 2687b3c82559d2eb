//! Programs that a test writes and then executes.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

/// Writes an executable file with this text, mode 0755, and replaces an existing one: a script by its `#!`
/// line.
///
/// Another program writes it. The kernel doesn't execute a file that a process has open for writing
/// (`ETXTBSY`), and a file that a test process writes itself is also open in each child that another thread
/// forks meanwhile, until that child's exec.
///
/// # Errors
/// It can't be written.
pub fn write_program(path: &Path, text: &str) -> Result<()> {
    let place = || format!("write the program {}", path.display());
    let mut child = writer_command(path).stdin(Stdio::piped()).spawn().with_context(place)?;
    // Moved out, so that it is closed once all is written.
    let written =
        child.stdin.take().context("no pipe").and_then(|mut pipe| Ok(pipe.write_all(text.as_bytes())?));
    let status = child.wait().with_context(place)?;
    ensure!(status.success(), "{}: it ended with {status}", place());
    written.with_context(place)
}

/// Copies a program in the same way as [`write_program`].
///
/// # Errors
/// It can't be copied.
pub fn copy_program(from: &Path, to: &Path) -> Result<()> {
    let place = || format!("copy the program {} to {}", from.display(), to.display());
    let from = File::open(from).with_context(place)?;
    let status = writer_command(to).stdin(from).status().with_context(place)?;
    ensure!(status.success(), "{}: it ended with {status}", place());
    Ok(())
}

/// Writes its standard input to the path. A guest has a shell, but no install(1).
fn writer_command(path: &Path) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"rm -f "$0" && cat >"$0" && chmod 755 "$0""#]).arg(path);
    shell
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_can_be_executed_while_other_threads_fork() {
        let directory = tempfile::tempdir().unwrap();
        let forks = || (0..100).for_each(|_| assert!(Command::new("true").status().unwrap().success()));
        std::thread::scope(|scope| {
            scope.spawn(forks);
            scope.spawn(forks);
            for number in 0..30 {
                let (first, second) = (directory.path().join("first"), directory.path().join("second"));
                write_program(&first, &format!("#!/bin/sh\nexit {number}\n")).unwrap();
                copy_program(&first, &second).unwrap();
                for program in [first, second] {
                    assert_eq!(Command::new(program).status().unwrap().code(), Some(number));
                }
            }
        });
    }

    #[test]
    fn an_error_names_the_path_of_the_program() {
        let error = write_program(Path::new("/proc/none/program"), "").unwrap_err();
        assert!(error.to_string().contains("/proc/none/program"), "{error}");
    }
}

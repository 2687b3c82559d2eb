//! Running a command with its output streamed, kept, and bounded in time.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::Value;
use testbed::{Scratch, leftovers, wait_exit};

/// How long the output may stay open once the command has ended: whoever holds it then was left behind.
const OUTPUT_CLOSES_WITHIN: Duration = Duration::from_secs(5);

/// What a command did.
#[derive(Debug)]
pub(crate) struct Ran {
    /// Its standard output, by line.
    pub(crate) lines: Vec<String>,
    /// How long it took.
    pub(crate) took: Duration,
    /// What went wrong; `None` for an exit with 0 that left nothing behind.
    pub(crate) problem: Option<String>,
}

/// Whether the standard output is shown while it is collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Echo {
    /// Shown.
    Shown,
    /// Only collected; it is meant for a program.
    Hidden,
}

/// Runs the command to its end. Past the deadline it and everything that it started are killed.
///
/// # Errors
/// When it can't be executed.
pub(crate) fn stream(mut command: Command, echo: Echo, deadline: Duration) -> Result<Ran> {
    let start = Instant::now();
    // Its path marks what the command starts, so that none of it can stay.
    let scratch = Scratch::new()?;
    command.env(leftovers::MARK, scratch.path()).stdin(Stdio::null()).stdout(Stdio::piped());
    let name = Path::new(command.get_program()).display().to_string();
    let mut child = command.spawn().with_context(|| format!("execute {name}"))?;
    let pipe = child.stdout.take().context("the output is piped")?;
    let (lines, end) = collect(pipe, echo);
    let status = wait_exit(&mut child, deadline)?;
    if status.is_none() {
        child.kill().with_context(|| format!("kill {name}"))?;
        child.wait().with_context(|| format!("reap {name}"))?;
        leftovers::remove(scratch.path())?;
    }
    let is_held = end.recv_timeout(OUTPUT_CLOSES_WITHIN).is_err();
    let left = leftovers::processes(scratch.path())?;
    let problem = problem(status, deadline, is_held, &left);
    scratch.close()?;
    let lines = lines.lock().map(|mut lines| std::mem::take(&mut *lines)).unwrap_or_default();
    Ok(Ran { lines, took: start.elapsed(), problem })
}

/// Reads on a thread of its own: a process that was left behind may hold the pipe open for ever.
fn collect(pipe: ChildStdout, echo: Echo) -> (Arc<Mutex<Vec<String>>>, Receiver<()>) {
    let (ended, end) = channel();
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&lines);
    thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            if echo == Echo::Shown {
                println!("{line}");
            }
            sink.lock().expect("nobody panics with the lock").push(line);
        }
        // Nobody waits any more when the command was given up.
        let _ = ended.send(());
    });
    (lines, end)
}

fn problem(
    status: Option<ExitStatus>,
    deadline: Duration,
    is_held: bool,
    left: &[leftovers::Process],
) -> Option<String> {
    let commands: Vec<_> = left.iter().map(|process| process.command.as_str()).collect();
    match status {
        None => Some(format!("was killed after {deadline:?}")),
        Some(status) if !status.success() => Some(status.to_string()),
        Some(_) if !left.is_empty() => Some(format!("left running: {}", commands.join("; "))),
        Some(_) if is_held => Some("left a process that holds its output".into()),
        Some(_) => None,
    }
}

/// A cargo of the toolchain that runs this, in the workspace's root.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(root());
    // Set by the cargo that runs this; build scripts that watch them would run again, and all above them.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// What cargo knows of the members.
///
/// # Errors
/// When a manifest is wrong.
pub(crate) fn metadata() -> Result<Value> {
    let text = testbed::output(&mut cargo(&["metadata", "--no-deps", "--format-version", "1"]))?;
    serde_json::from_str(&text).context("parse cargo metadata")
}

/// The workspace's root.
pub(crate) fn root() -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"));
    path.ancestors().nth(2).unwrap_or(path).to_owned()
}

/// Whether this runs as root.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A headline in the stream of output.
pub(crate) fn headline(text: &str) {
    println!("\n==> {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn output_is_kept_by_line_and_success_is_no_problem() {
        let ran = stream(shell("echo a; printf b"), Echo::Hidden, SOON).unwrap();
        assert_eq!((ran.lines, ran.problem), (vec!["a".to_owned(), "b".to_owned()], None));
    }

    #[test]
    fn a_failure_says_how_it_ended() {
        let ran = stream(shell("exit 3"), Echo::Hidden, SOON).unwrap();
        assert_eq!(ran.problem.as_deref(), Some("exit status: 3"));
    }

    #[test]
    fn what_takes_too_long_is_killed_with_all_it_started() {
        let ran = stream(shell("sleep 1000 & sleep 1000"), Echo::Hidden, Duration::from_millis(50)).unwrap();
        assert_eq!(ran.problem.as_deref(), Some("was killed after 50ms"));
    }

    #[test]
    fn a_process_left_behind_is_a_problem() {
        let ran = stream(shell("setsid sleep 1000 >/dev/null 2>&1 &"), Echo::Hidden, SOON).unwrap();
        let problem = ran.problem.unwrap_or_default();
        // It is the shell and then setsid for a moment.
        assert!(problem.starts_with("left running: ") && problem.contains("sleep 1000"), "{problem}");
    }
}

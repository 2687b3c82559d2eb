//! Runs commands with their output logged or collected, and bounded in time.

use std::io::{BufRead as _, BufReader, Read};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use testbed::{ScratchDir, leftovers, wait_exit};

/// How long the output may stay open once the command has ended; a process that holds it longer was left
/// behind.
const OUTPUT_CLOSES_WITHIN: Duration = Duration::from_secs(5);

/// How a command ended, and what it wrote.
#[derive(Debug)]
pub(crate) struct CommandOutcome {
    /// Its standard output, by line.
    pub(crate) lines: Vec<String>,
    pub(crate) elapsed: Duration,
    /// What went wrong; `None` for an exit with 0 that left nothing behind.
    pub(crate) problem: Option<String>,
}

/// Where output goes: to the terminal as it comes, or into memory until its part of the run ends.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log(Option<Arc<Mutex<String>>>);

impl Log {
    pub(crate) fn buffered() -> Self {
        Self(Some(Arc::default()))
    }

    pub(crate) fn line(&self, line: &str) {
        match &self.0 {
            None => println!("{line}"),
            Some(buffer) => lock(buffer).extend([line, "\n"]),
        }
    }

    pub(crate) fn headline(&self, text: &str) {
        self.line(&format!("\n==> {text}"));
    }

    /// The buffered text, which is empty afterwards.
    pub(crate) fn take(&self) -> String {
        self.0.as_ref().map(|buffer| std::mem::take(&mut *lock(buffer))).unwrap_or_default()
    }
}

/// What the log shows of a line of standard output.
pub(crate) type LineFilter = fn(&str) -> Option<String>;

/// Shows every line.
pub(crate) fn show_line(line: &str) -> Option<String> {
    Some(line.to_owned())
}

/// Shows nothing: the output is meant for a program.
pub(crate) fn hide_line(_line: &str) -> Option<String> {
    None
}

/// Runs the command to its end. At the deadline it is killed with all processes that it started.
///
/// # Errors
/// The command can't be executed.
pub(crate) fn run_command(
    mut command: Command,
    log: &Log,
    filter: LineFilter,
    deadline: Duration,
) -> Result<CommandOutcome> {
    let start = Instant::now();
    // Its path marks the processes that the command starts, so that none of them can stay.
    let scratch = ScratchDir::new()?;
    command.env(leftovers::MARK, scratch.path()).stdin(Stdio::null()).stdout(Stdio::piped());
    if log.0.is_some() {
        command.stderr(Stdio::piped());
    }
    let name = Path::new(command.get_program()).display().to_string();
    let mut child = command.spawn().with_context(|| format!("execute {name}"))?;
    let (open, closed) = channel();
    let lines = child.stdout.take().map(|pipe| collect_lines(pipe, log, filter, open.clone()));
    child.stderr.take().map(|pipe| collect_lines(pipe, log, show_line, open.clone()));
    drop(open);
    let status = wait_exit(&mut child, deadline)?;
    if status.is_none() {
        child.kill().with_context(|| format!("kill {name}"))?;
        child.wait().with_context(|| format!("reap {name}"))?;
        leftovers::remove_directory(scratch.path())?;
    }
    let is_held = closed.recv_timeout(OUTPUT_CLOSES_WITHIN) == Err(RecvTimeoutError::Timeout);
    let left = leftovers::find_processes(scratch.path())?;
    let problem = find_problem(status, deadline, is_held, &left);
    scratch.close()?;
    let lines = lines.map(|lines| std::mem::take(&mut *lock(&lines))).unwrap_or_default();
    Ok(CommandOutcome { lines, elapsed: start.elapsed(), problem })
}

/// Reads on a separate thread: a process that was left behind may hold the pipe open forever. The sender is
/// dropped at the pipe's end.
fn collect_lines(
    pipe: impl Read + Send + 'static,
    log: &Log,
    filter: LineFilter,
    open: Sender<()>,
) -> Arc<Mutex<Vec<String>>> {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let (sink, log) = (Arc::clone(&lines), log.clone());
    thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            if let Some(text) = filter(&line) {
                log.line(&text);
            }
            lock(&sink).push(line);
        }
        drop(open);
    });
    lines
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn find_problem(
    status: Option<ExitStatus>,
    deadline: Duration,
    is_held: bool,
    left: &[leftovers::LeftoverProcess],
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

/// Whether this program runs as root.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
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
    fn output_is_collected_by_line_and_success_has_no_problem() {
        let outcome = run_command(shell("echo a; printf b"), &Log::default(), hide_line, SOON).unwrap();
        assert_eq!((outcome.lines, outcome.problem), (vec!["a".to_owned(), "b".to_owned()], None));
    }

    #[test]
    fn a_buffered_log_holds_both_outputs_until_it_is_taken() {
        let log = Log::buffered();
        let outcome = run_command(shell("echo a; echo b >&2"), &log, show_line, SOON).unwrap();
        let text = log.take();
        assert!(text.contains("a\n") && text.contains("b\n") && outcome.lines == ["a"], "{text}");
        assert_eq!(log.take(), "");
    }

    #[test]
    fn a_failed_command_reports_its_status() {
        let outcome = run_command(shell("exit 3"), &Log::default(), hide_line, SOON).unwrap();
        assert_eq!(outcome.problem.as_deref(), Some("exit status: 3"));
    }

    #[test]
    fn a_command_past_its_deadline_is_killed_with_its_children() {
        let script = shell("sleep 1000 & sleep 1000");
        let outcome = run_command(script, &Log::default(), hide_line, Duration::from_millis(50)).unwrap();
        assert_eq!(outcome.problem.as_deref(), Some("was killed after 50ms"));
    }

    #[test]
    fn a_process_left_behind_is_a_problem() {
        let script = shell("setsid sleep 1000 >/dev/null 2>&1 &");
        let outcome = run_command(script, &Log::default(), hide_line, SOON).unwrap();
        let problem = outcome.problem.unwrap_or_default();
        // For a moment it is the shell and then setsid.
        assert!(problem.starts_with("left running: ") && problem.contains("sleep 1000"), "{problem}");
    }
}

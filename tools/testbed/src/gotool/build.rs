//! One build, with its progress.

use std::fs;
use std::io::{BufRead as _, BufReader, IsTerminal as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::{GoTools, go};

/// Flags of every build: without paths of this machine, and without symbols (a third of the size).
pub(super) const FLAGS: &str = "-trimpath -s -w";
const LINES_SHOWN: usize = 20;
const TERMINAL_EVERY: Duration = Duration::from_millis(200);
const FILE_EVERY: Duration = Duration::from_secs(20);

/// Builds all programs into the directory, beside the module that they were built from.
pub(super) fn build_tools(tools: &GoTools, partial: &Path) -> Result<()> {
    let go = go::find_go(tools.go_version())?;
    let module = partial.join("module");
    fs::create_dir(&module).with_context(|| format!("create {}", module.display()))?;
    for (name, text) in [("go.mod", tools.go_mod), ("go.sum", tools.go_sum)] {
        fs::write(module.join(name), text).with_context(|| format!("write {name}"))?;
    }
    let mut progress = BuildProgress::new(tools, &go);
    for (index, program) in tools.programs.iter().enumerate() {
        progress.program = format!("{} ({} of {})", program.file, index + 1, tools.programs.len());
        let mut command = go_command(&go, &module);
        command.args(if program.is_test { ["test", "-c"] } else { ["build", "-v"] }).args(build_flags(tools));
        command.arg("-o").arg(partial.join(program.file)).arg(program.package);
        run_build(command, &mut progress)
            .with_context(|| format!("build {} {}", program.file, tools.version))?;
    }
    progress.report_done();
    Ok(())
}

fn go_command(go: &go::GoToolchain, module: &Path) -> Command {
    let mut command = Command::new(&go.path);
    command.current_dir(module);
    // The machine's proxies and caches stay as they are set; variables that change the result don't.
    command.env("CGO_ENABLED", "0").env("GOWORK", "off").env_remove("GOFLAGS").env_remove("GOEXPERIMENT");
    if let Some(toolchain) = go.toolchain {
        command.env("GOTOOLCHAIN", toolchain);
    }
    command
}

fn build_flags(tools: &GoTools) -> Vec<String> {
    let mut flags = vec!["-trimpath".to_owned(), "-buildvcs=false".to_owned()];
    if !tools.tags.is_empty() {
        flags.push(format!("-tags={}", tools.tags));
    }
    flags.push(format!("-ldflags=-s -w {}", tools.ldflags));
    flags
}

fn run_build(mut command: Command, progress: &mut BuildProgress) -> Result<()> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().context("execute go")?;
    let pipe = child.stderr.take().context("its messages are piped")?;
    let mut lines = Vec::new();
    for line in BufReader::new(pipe).lines().map_while(Result::ok) {
        progress.report_line(&line);
        lines.push(line);
    }
    let status = child.wait().context("reap go")?;
    let last = &lines[lines.len().saturating_sub(LINES_SHOWN)..];
    ensure!(status.success(), "go ended with {status}; its last output:\n{}", last.join("\n"));
    Ok(())
}

/// Reports the progress: on a terminal in one line that changes, else in a line now and then.
#[derive(Debug)]
struct BuildProgress {
    title: String,
    program: String,
    compiled: usize,
    start: Instant,
    last_print: Instant,
    is_terminal: bool,
}

impl BuildProgress {
    fn new(tools: &GoTools, go: &go::GoToolchain) -> Self {
        let title = format!("{} {}", tools.name, tools.version);
        let is_terminal = std::io::stderr().is_terminal();
        let now = Instant::now();
        let progress =
            Self { title, program: String::new(), compiled: 0, start: now, last_print: now, is_terminal };
        let fetches = if go.toolchain == Some("auto") { "; go fetches a newer go first" } else { "" };
        progress.print_text(&format!("first build, about {} on two cores{fetches}", tools.first_build), "\n");
        progress
    }

    /// Go prints each package that it compiles, each module that it fetches, and errors.
    fn report_line(&mut self, line: &str) {
        let is_package = !line.contains(' ') && !line.starts_with('#');
        self.compiled += usize::from(is_package);
        let every = if self.is_terminal { TERMINAL_EVERY } else { FILE_EVERY };
        if self.last_print.elapsed() >= every {
            self.last_print = Instant::now();
            let doing = if is_package { "compiling" } else { line };
            let text = format!("{}: {doing}, {} packages so far", self.program, self.compiled);
            self.print_text(&text, if self.is_terminal { "" } else { "\n" });
        }
    }

    fn report_done(&self) {
        self.print_text(&format!("built in {} s", self.start.elapsed().as_secs()), "\n");
    }

    /// Writes to the descriptor itself: the test harness hides the print macros' output until a test has
    /// failed.
    fn print_text(&self, text: &str, end: &str) {
        let begin = if self.is_terminal { "\r\x1b[K" } else { "" };
        let seconds = self.start.elapsed().as_secs();
        // A caller that has closed standard error does not want the progress.
        let _ = write!(std::io::stderr(), "{begin}{}: [{seconds:3} s] {text}{end}", self.title);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    fn silent() -> BuildProgress {
        let now = Instant::now();
        let (title, program) = (String::new(), String::new());
        BuildProgress { title, program, compiled: 0, start: now, last_print: now, is_terminal: false }
    }

    #[test]
    fn packages_are_counted_and_other_messages_are_not() {
        let mut progress = silent();
        run_build(shell("echo go: downloading x v1 >&2; echo a/b >&2; echo a/c >&2"), &mut progress).unwrap();
        assert_eq!(progress.compiled, 2);
    }

    #[test]
    fn a_failed_build_is_reported_with_the_output_of_go() {
        let error = run_build(shell("echo a/b; echo no such host >&2; exit 1"), &mut silent()).unwrap_err();
        assert!(error.to_string().contains("no such host"), "{error}");
    }
}

//! One build, with its progress.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};

use super::{GoTools, go};
use crate::command_output;

/// Flags of every build: without paths of this machine, and without symbols (a third of the size).
pub(super) const FLAGS: &str = "-trimpath -s -w";

/// Builds all programs into the directory, beside the module that they were built from.
pub(super) fn build_tools(tools: &GoTools, partial: &Path) -> Result<()> {
    let module = partial.join("module");
    fs::create_dir(&module).with_context(|| format!("create {}", module.display()))?;
    let files = [("go.mod", tools.go_mod), ("go.sum", tools.go_sum), ("main.go", tools.main)];
    for (name, text) in files.into_iter().filter(|(_, text)| !text.is_empty()) {
        fs::write(module.join(name), text).with_context(|| format!("write {name}"))?;
    }
    let start = Instant::now();
    for (index, program) in tools.programs.iter().enumerate() {
        let (number, count) = (index + 1, tools.programs.len());
        report(tools, start, &format!("build {} ({number} of {count}), once", program.file));
        let mut go = go::go_command()?;
        go.current_dir(&module).args(if program.is_test { &["test", "-c"][..] } else { &["build"] });
        // The machine's proxies and caches stay as they are set; variables that change the result don't.
        go.env("CGO_ENABLED", "0").env("GOWORK", "off").env_remove("GOFLAGS").env_remove("GOEXPERIMENT");
        go.args(["-trimpath", "-buildvcs=false", &format!("-tags={}", tools.tags)]);
        go.arg(format!("-ldflags=-s -w {}", tools.ldflags));
        go.arg("-o").arg(partial.join(program.file)).arg(program.package);
        command_output(&mut go).with_context(|| format!("build {} {}", program.file, tools.version))?;
    }
    report(tools, start, "built");
    Ok(())
}

/// Writes to the descriptor itself: the test harness hides the print macros' output until a test has failed.
fn report(tools: &GoTools, start: Instant, text: &str) {
    let seconds = start.elapsed().as_secs();
    // A caller that has closed standard error does not want the progress.
    let _ = writeln!(std::io::stderr(), "{} {}: [{seconds:3} s] {text}", tools.name, tools.version);
}

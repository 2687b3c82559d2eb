//! `cargo xtask soak fuzz`: every fuzz target for a while. cargo-fuzz isn't needed: a nightly Rust, for its coverage, and a
//! C++ compiler, for the fuzzer itself, are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::report::Report;
use crate::run::{self, Echo};

/// How long each target is run: the variable that says it, and the default in seconds.
const SECONDS: (&str, u64) = ("NODEKEEL_FUZZ_SECONDS", 60);
const BUILT_WITHIN: Duration = Duration::from_secs(1200);
/// Beyond the time that a target is run for.
const ENDS_WITHIN: Duration = Duration::from_secs(60);

/// What libFuzzer wants of the code that it calls. *Source:* cargo-fuzz, `project.rs`; Clang's SanitizerCoverage.
const INSTRUMENTED: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Cdebug-assertions -Coverflow-checks";

/// Builds and runs all of them. What they have found stays in `target/fuzz/MEMBER/TARGET`, and is begun with the next time.
pub(crate) fn run(report: &mut Report) -> Result<()> {
    let seconds = std::env::var(SECONDS.0).ok().and_then(|text| text.parse().ok()).unwrap_or(SECONDS.1);
    let host = host()?;
    for member in members()? {
        let name = member.file_name().unwrap_or_default().to_string_lossy().into_owned();
        run::headline(&format!("fuzz targets of {name}"));
        let built = run::stream(build(&member, &host), Echo::Shown, BUILT_WITHIN)?;
        if let Some(problem) = built.problem {
            report.could_not_run(&format!("fuzz targets of {name}"), &format!("their build: {problem}"));
            continue;
        }
        for target in targets(&member)? {
            let program = directory().join(&host).join("release").join(&target);
            fuzz(&program, &directory().join(&name).join(&target), seconds, report)?;
        }
    }
    Ok(())
}

fn directory() -> PathBuf {
    run::root().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into())).join("fuzz")
}

/// The members that have targets.
fn members() -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(run::root()).context("list the members")?;
    let paths = entries.flatten().map(|entry| entry.path());
    let mut members: Vec<_> = paths.filter(|path| path.join("fuzz/Cargo.toml").is_file()).collect();
    members.sort();
    Ok(members)
}

/// The target's triple: code for it, and not what builds it, is instrumented where it is named.
fn host() -> Result<String> {
    let text = testbed::output(nightly("rustc").arg("-vV"))
        .context("ask the nightly Rust: `rustup toolchain add nightly`")?;
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).context("the nightly Rust doesn't say its host")
}

fn nightly(program: &str) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", program]);
    // Those of the toolchain that runs this.
    for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    command
}

fn build(member: &Path, host: &str) -> Command {
    let mut command = nightly("cargo");
    command.args(["build", "--release", "--target", host]).current_dir(member.join("fuzz"));
    command.env("RUSTFLAGS", INSTRUMENTED).env("CARGO_TARGET_DIR", directory());
    command
}

fn targets(member: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(member.join("fuzz/Cargo.toml")).context("read the manifest")?;
    let manifest: toml::Table = toml::from_str(&text).context("parse the manifest")?;
    let programs = manifest.get("bin").and_then(toml::Value::as_array).into_iter().flatten();
    let names = programs.filter_map(|program| program.get("name")?.as_str().map(str::to_owned));
    let names: Vec<String> = names.collect();
    ensure!(!names.is_empty(), "{} has no fuzz target", member.display());
    Ok(names)
}

fn fuzz(program: &Path, corpus: &Path, seconds: u64, report: &mut Report) -> Result<()> {
    fs::create_dir_all(corpus).with_context(|| format!("create {}", corpus.display()))?;
    // It says all on its standard error.
    let mut command = Command::new("/bin/sh");
    command.args(["-c", r#"exec "$0" "$@" 2>&1"#]).arg(program).arg(corpus);
    command.args([format!("-max_total_time={seconds}"), format!("-artifact_prefix={}/", corpus.display())]);
    command.args(["-print_final_stats=1", "-verbosity=0"]);
    let ran = run::stream(command, Echo::Hidden, Duration::from_secs(seconds) + ENDS_WITHIN)?;
    let name = format!("fuzz {}", corpus.strip_prefix(directory()).unwrap_or(corpus).display());
    match &ran.problem {
        Some(_) => ran.lines.iter().for_each(|line| println!("{line}")),
        None => println!("{name}: {} inputs, nothing found", executed(&ran.lines)),
    }
    report.checked(&name, ran.took, ran.problem);
    Ok(())
}

/// *Source:* libFuzzer's `-print_final_stats=1`.
fn executed(lines: &[String]) -> &str {
    let count = lines.iter().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    count.map_or("?", str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_its_source_and_every_source_is_a_target() {
        let members = members().unwrap();
        assert!(members.len() >= 4);
        for member in members {
            let mut names = targets(&member).unwrap();
            let files = fs::read_dir(member.join("fuzz/targets")).unwrap().flatten();
            let mut sources: Vec<_> =
                files.map(|file| file.path().file_stem().unwrap().to_str().unwrap().to_owned()).collect();
            names.sort();
            sources.sort();
            assert_eq!(names, sources, "{}", member.display());
        }
    }

    #[test]
    fn the_count_is_found_among_the_figures() {
        let lines = ["Done 5 runs", "stat::number_of_executed_units: 5"].map(String::from);
        assert_eq!(executed(&lines), "5");
        assert_eq!(executed(&[]), "?");
    }
}

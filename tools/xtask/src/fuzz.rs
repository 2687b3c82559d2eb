//! `cargo xtask soak fuzz`: every fuzz target for a while, by cargo-fuzz on a nightly Rust.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::report::Report;
use crate::setup;
use crate::workspace::{root, target_directory};

/// How long each target runs: the variable that says it, and the default in seconds.
const SECONDS: (&str, u64) = ("NODEKEEL_FUZZ_SECONDS", 60);
/// Beyond the time that a target runs: its build.
const BUILDS_WITHIN: Duration = Duration::from_secs(1200);
const CARGO_FUZZ: &str = "cargo-fuzz@0.13.2";

/// Runs all of them. The inputs that they find stay in `target/fuzz/MEMBER/TARGET`, where the next run
/// starts.
pub(crate) fn run(report: &mut Report) -> Result<()> {
    setup::install_cargo_tool("fuzz", CARGO_FUZZ, &[])?;
    let seconds = std::env::var(SECONDS.0).ok().and_then(|text| text.parse().ok()).unwrap_or(SECONDS.1);
    for member in members()? {
        let targets = testbed::command_output(&mut cargo_fuzz("list", &member))
            .context("list the fuzz targets (they need `rustup toolchain add nightly`)")?;
        for target in targets.lines() {
            fuzz(&member, target, seconds, report)?;
        }
    }
    Ok(())
}

/// The directories of members that have targets.
fn members() -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(root()).context("list the members")?;
    let paths = entries.flatten().map(|entry| entry.path());
    let mut members: Vec<_> = paths.filter(|path| path.join("fuzz/Cargo.toml").is_file()).collect();
    members.sort();
    Ok(members)
}

fn cargo_fuzz(verb: &str, member: &Path) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo", "fuzz", verb, "--fuzz-dir"]).arg(member.join("fuzz"));
    // Those of the toolchain that runs this program.
    for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    command
}

fn fuzz(member: &Path, target: &str, seconds: u64, report: &mut Report) -> Result<()> {
    let member_name = member.file_name().unwrap_or_default();
    let corpus = target_directory().join("fuzz").join(member_name).join(target);
    fs::create_dir_all(&corpus).with_context(|| format!("create {}", corpus.display()))?;
    let mut command = cargo_fuzz("run", member);
    command.args(["--sanitizer", "none", "--target-dir"]).arg(target_directory().join("fuzz/build"));
    command.arg(target).arg(&corpus).arg("--").arg(format!("-max_total_time={seconds}"));
    command.arg(format!("-artifact_prefix={}/", corpus.display()));
    command.args(["-print_final_stats=1", "-verbosity=0"]);
    let within = Duration::from_secs(seconds) + BUILDS_WITHIN;
    report.run_check(&format!("fuzz {} {target}", member_name.display()), command, within);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_source_of_a_fuzz_target_is_in_its_manifest() {
        let members = members().unwrap();
        assert!(members.len() >= 4);
        for member in members {
            let manifest = fs::read_to_string(member.join("fuzz/Cargo.toml")).unwrap();
            let files = fs::read_dir(member.join("fuzz/targets")).unwrap().flatten();
            let sources: Vec<_> = files.map(|file| file.file_name().into_string().unwrap()).collect();
            let is_listed = |source: &String| manifest.contains(&format!("path = \"targets/{source}\""));
            assert!(sources.iter().all(is_listed), "{}: {sources:?}", member.display());
            assert_eq!(manifest.matches("path = \"targets/").count(), sources.len());
        }
    }
}

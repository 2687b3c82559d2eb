//! `cargo xtask check`: what must hold besides the tests.

use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::report::Report;
use crate::run::{self, Echo};
use crate::setup;

const STEP_WITHIN: Duration = Duration::from_secs(30 * 60);
/// The newest that is known to build with this workspace's toolchain. Without its default features it leaves out
/// what fetches advisories, which aren't asked for.
const CARGO_DENY: &str = "cargo-deny@0.20.2";

/// Runs every check, also after one has failed.
pub(crate) fn run() -> Result<ExitCode> {
    setup::install()?;
    let packages = packages(&run::metadata()?);
    let mut report = Report::default();
    step("format", cargo("fmt --all --check"), &mut report);
    step(
        "clippy",
        cargo("clippy --workspace --all-targets --all-features --keep-going -- -D warnings"),
        &mut report,
    );
    let mut docs = cargo("doc --workspace --no-deps --all-features --keep-going");
    docs.env("RUSTDOCFLAGS", "-D warnings");
    step("docs", docs, &mut report);
    for package in &packages {
        for features in package.feature_sets() {
            let name = format!("{} alone {}", package.name, features.join(" "));
            step(name.trim_end(), package.check(&features), &mut report);
        }
    }
    match install_cargo_deny() {
        Ok(()) => step("cargo-deny", cargo("deny --all-features check bans licenses sources"), &mut report),
        Err(error) => report.could_not_run("cargo-deny", &format!("{error:#}")),
    }
    Ok(report.finish())
}

fn cargo(line: &str) -> Command {
    run::cargo(&line.split(' ').collect::<Vec<_>>())
}

fn step(name: &str, command: Command, report: &mut Report) {
    run::headline(name);
    match run::stream(command, Echo::Shown, STEP_WITHIN) {
        Ok(ran) => report.checked(name, ran.took, ran.problem),
        Err(error) => report.could_not_run(name, &format!("{error:#}")),
    }
}

fn install_cargo_deny() -> Result<()> {
    let mut version = cargo("deny --version");
    let known = version.stdout(Stdio::null()).stderr(Stdio::null()).status();
    if known.is_ok_and(|status| status.success()) {
        return Ok(());
    }
    run::headline("install cargo-deny");
    // It runs for a second: what counts is how long its own build takes.
    let quick = "--config profile.release.opt-level=1 --config profile.release.lto=false";
    let install = cargo(&format!("install --locked --no-default-features {quick} {CARGO_DENY}"));
    let ran = run::stream(install, Echo::Shown, STEP_WITHIN)?;
    ensure!(ran.problem.is_none(), "cargo install: {}", ran.problem.unwrap_or_default());
    Ok(())
}

/// A member and the features that it can be built with.
#[derive(Debug, PartialEq, Eq)]
struct Package {
    name: String,
    features: Vec<String>,
}

impl Package {
    /// As a dependant gets it: by default, without defaults, and with each feature alone. A build of the workspace
    /// unites the features of all members and so hides one that is missing.
    fn feature_sets(&self) -> Vec<Vec<&str>> {
        let mut sets = vec![vec![]];
        if !self.features.is_empty() {
            sets.push(vec!["--no-default-features"]);
        }
        let features = self.features.iter().filter(|feature| *feature != "default");
        sets.extend(features.map(|feature| vec!["--no-default-features", "--features", feature]));
        sets
    }

    fn check(&self, features: &[&str]) -> Command {
        let mut command = run::cargo(&["clippy", "-p", &self.name]);
        command.args(features).args(["--", "-D", "warnings"]);
        command
    }
}

fn packages(metadata: &Value) -> Vec<Package> {
    let list = metadata["packages"].as_array().into_iter().flatten();
    list.filter_map(|package| {
        let features = package["features"].as_object()?.keys().cloned().collect();
        Some(Package { name: package["name"].as_str()?.to_owned(), features })
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_feature_is_checked_alone() {
        let package = Package { name: "a".into(), features: vec!["default".into(), "tonic".into()] };
        let sets: Vec<String> = package.feature_sets().iter().map(|set| set.join(" ")).collect();
        assert_eq!(sets, ["", "--no-default-features", "--no-default-features --features tonic"]);
    }

    #[test]
    fn a_package_without_features_is_checked_once() {
        assert_eq!(Package { name: "a".into(), features: vec![] }.feature_sets().len(), 1);
    }

    #[test]
    fn members_are_read_from_the_metadata() {
        let text = serde_json::json!({"packages": [{"name": "a", "features": {"x": []}}]});
        assert_eq!(packages(&text), [Package { name: "a".into(), features: vec!["x".into()] }]);
    }
}

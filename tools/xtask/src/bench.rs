//! `cargo xtask bench`: every bench of the workspace. Each prints its rows, and leaves them in `target/bench`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Error, Result, bail};
use clap::Args;

use crate::kernel_test::{self, need::GuestNeed};
use crate::report::Report;
use crate::run::{self, CommandOutcome, Log, run_command};
use crate::setup;
use crate::test::binaries;
use crate::workspace::{self, Package, cargo};

const WITHIN: Duration = Duration::from_secs(1800);

/// The part of a member's manifest that lists the benches that run in a guest, with its devices:
/// `[package.metadata.kernel-benches]`, `quota = "kernel with a disk of 4 GiB"`.
const IN_GUEST: &str = "kernel-benches";

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Benches, their packages' directories, or both as DIRECTORY-BENCH; all without
    names: Vec<String>,
}

/// A bench target of a member.
#[derive(Debug)]
struct Bench {
    package: String,
    /// The member's directory, as `supervisor`.
    directory: String,
    target: String,
    /// The features that it is built with, separated by commas.
    features: String,
    /// The guest in which it runs.
    need: Option<GuestNeed>,
}

impl Bench {
    fn name(&self) -> String {
        format!("{}-{}", self.directory, self.target)
    }

    fn run(&self) -> Result<CommandOutcome> {
        let arguments = ["bench", "-p", &self.package, "--bench", &self.target, "--features", &self.features];
        match &self.need {
            None => run_command(cargo(&arguments), &Log::default(), run::show_line, WITHIN),
            Some(need) => kernel_test::run_bench(&binaries::build_one(&arguments, WITHIN)?, need, WITHIN),
        }
    }

    /// Whether the name selects it: `supervisor-tree`, `tree`, or `supervisor` for all of its member.
    fn is_selected(&self, name: &str) -> bool {
        name == self.name() || name == self.target || name == self.directory
    }
}

/// Runs the named ones, or all, also after one has failed. A missed goal is not a failure.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let all = find_benches(&workspace::read_metadata()?.packages)?;
    let names = &arguments.names;
    if let Some(unknown) = names.iter().find(|name| !all.iter().any(|bench| bench.is_selected(name))) {
        let known: Vec<_> = all.iter().map(Bench::name).collect();
        bail!("unknown bench {unknown:?}; known: {}", known.join(", "));
    }
    setup::install()?;
    let is_chosen = |bench: &&Bench| names.is_empty() || names.iter().any(|name| bench.is_selected(name));
    let mut report = Report::new(Log::default());
    for bench in all.iter().filter(is_chosen) {
        report.log.headline(&bench.name());
        match bench.run() {
            Ok(outcome) => report.add_check(&bench.name(), outcome.elapsed, outcome.problem),
            Err(error) => report.could_not_run(&bench.name(), &format!("{error:#}")),
        }
    }
    Ok(report.finish())
}

fn find_benches(packages: &[Package]) -> Result<Vec<Bench>> {
    let mut found = Vec::new();
    for package in packages {
        let directory = package.directory().file_name().unwrap_or_default().to_string_lossy().into_owned();
        for target in package.targets.iter().filter(|target| target.kind[0] == "bench") {
            let need = package.metadata[IN_GUEST][&target.name].as_str();
            found.push(Bench {
                need: need.map(GuestNeed::parse).transpose().map_err(Error::msg)?,
                package: package.name.clone(),
                directory: directory.clone(),
                target: target.name.clone(),
                features: target.required_features.join(","),
            });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benches_are_found_with_their_features_and_guests_and_selected_by_three_names() {
        let find = |need: &str| {
            let metadata = serde_json::json!({"target_directory": "/w/target", "packages": [{
                "name": "nodekeel-fsquota", "manifest_path": "/w/fsquota/Cargo.toml",
                "targets": [
                    {"kind": ["lib"], "name": "nodekeel_fsquota"},
                    {"kind": ["bench"], "name": "quota", "required-features": ["testing", "more"]},
                ],
                "metadata": {"kernel-benches": {"quota": need}},
            }]});
            find_benches(&serde_json::from_value::<workspace::Metadata>(metadata).unwrap().packages)
        };
        let found = find("kernel with a disk of 4 GiB").unwrap();
        assert_eq!((found.len(), &*found[0].features), (1, "testing,more"));
        assert_eq!(found[0].need, GuestNeed::parse("kernel with a disk of 4 GiB").ok());
        assert!(["fsquota-quota", "fsquota", "quota"].iter().all(|name| found[0].is_selected(name)));
        assert!(!found[0].is_selected("logtree"));
        assert!(find("a moon rocket").is_err());
    }
}

//! `cargo xtask bench`: every bench of the workspace, then one table of all.

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Error, Result, bail};
use clap::Args;
use testbed::bench::{self, BenchRow};

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
#[derive(Clone, Debug, PartialEq, Eq)]
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
        let mut arguments = vec!["bench", "-p", &self.package, "--bench", &self.target];
        if !self.features.is_empty() {
            arguments.extend(["--features", &self.features]);
        }
        match self.need {
            None => run_command(cargo(&arguments), &Log::default(), run::show_line, WITHIN),
            Some(need) => kernel_test::run_bench(&binaries::build_one(&arguments, WITHIN)?, need, WITHIN),
        }
    }

    /// Whether the name selects it: `supervisor-tree`, `tree`, or `supervisor` for all of its member.
    fn is_selected(&self, name: &str) -> bool {
        name == self.name() || name == self.target || name == self.directory
    }
}

/// Runs the named ones, or all. A missed goal is not a failure; a bench that did not run is.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let all = find_benches(&workspace::read_metadata()?.packages)?;
    let names = &arguments.names;
    if let Some(unknown) = names.iter().find(|name| !all.iter().any(|bench| bench.is_selected(name))) {
        let known: Vec<_> = all.iter().map(Bench::name).collect();
        bail!("unknown bench {unknown:?}; known: {}", known.join(", "));
    }
    let is_chosen = |bench: &&Bench| names.is_empty() || names.iter().any(|name| bench.is_selected(name));
    let chosen: Vec<&Bench> = all.iter().filter(is_chosen).collect();
    setup::install()?;
    let (mut report, mut rows) = (Report::new(Log::default()), Vec::new());
    for bench in chosen {
        report.log.headline(&bench.name());
        rows.extend(measure(bench, &bench::rows_directory(), &mut report, Bench::run));
    }
    report.log.headline("all rows");
    println!("{}", bench::format_table(&rows));
    Ok(report.finish())
}

/// Runs a bench, and gives its rows. An error of it goes into the report: the others can still run.
fn measure(
    bench: &Bench,
    directory: &Path,
    report: &mut Report,
    run: impl FnOnce(&Bench) -> Result<CommandOutcome>,
) -> Vec<BenchRow> {
    let start = SystemTime::now();
    let outcome = match run(bench) {
        Ok(outcome) => outcome,
        Err(error) => {
            report.could_not_run(&bench.name(), &format!("{error:#}"));
            return Vec::new();
        }
    };
    let (rows, unread) = match take_rows_since(directory, start) {
        Ok(rows) if rows.is_empty() => (rows, Some("wrote no row".to_owned())),
        Ok(rows) => (rows, None),
        Err(error) => (Vec::new(), Some(format!("{error:#}"))),
    };
    report.add_check(&bench.name(), outcome.elapsed, outcome.problem.or(unread));
    rows
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

/// The rows of the files that were written since then: a bench names its files itself.
fn take_rows_since(directory: &Path, start: SystemTime) -> Result<Vec<BenchRow>> {
    let mut rows = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let is_new = entry.metadata().and_then(|file| file.modified()).is_ok_and(|time| time >= start);
        let name = entry.file_name();
        if let Some(name) = name.to_str().and_then(|name| name.strip_suffix(".json")).filter(|_| is_new) {
            rows.extend(bench::read_rows_from(directory, name).context("read what the bench wrote")?);
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(metadata: serde_json::Value) -> Result<Vec<Bench>> {
        find_benches(&serde_json::from_value::<workspace::Metadata>(metadata)?.packages)
    }

    #[test]
    fn benches_are_found_in_the_metadata_and_selected_by_three_names() {
        let metadata = serde_json::json!({"target_directory": "/w/target", "packages": [{
            "name": "nodekeel-supervisor", "manifest_path": "/w/supervisor/Cargo.toml",
            "targets": [{"kind": ["lib"], "name": "nodekeel_supervisor"}, {"kind": ["bench"], "name": "tree"}],
            "metadata": null,
        }]});
        let found = find(metadata).unwrap();
        assert_eq!((found.len(), found[0].need), (1, None));
        assert!(["supervisor-tree", "supervisor", "tree"].iter().all(|name| found[0].is_selected(name)));
        assert!(!found[0].is_selected("logtree"));
    }

    #[test]
    fn a_manifest_sends_a_bench_into_a_guest() {
        let metadata = |need: &str| {
            serde_json::json!({"target_directory": "/w/target", "packages": [{
                "name": "nodekeel-fsquota", "manifest_path": "/w/fsquota/Cargo.toml",
                "targets": [{"kind": ["bench"], "name": "quota"}], "metadata": {"kernel-benches": {"quota": need}},
            }]})
        };
        let found = find(metadata("kernel with a disk of 4 GiB")).unwrap();
        assert_eq!(found[0].need.map(|need| (need.disks, need.disk_size)), Some((1, 4 << 30)));
        assert!(find(metadata("a moon rocket")).is_err());
    }

    #[test]
    fn a_bench_is_built_with_the_features_that_it_requires() {
        let metadata = serde_json::json!({"target_directory": "/w/target", "packages": [{
            "name": "provisionerd", "manifest_path": "/w/bins/provisionerd/Cargo.toml", "metadata": null,
            "targets": [{"kind": ["bench"], "name": "claims", "required-features": ["kill-points", "more"]}],
        }]});
        assert_eq!(find(metadata).unwrap()[0].features, "kill-points,more");
    }

    #[test]
    fn a_failed_bench_is_reported_and_does_not_end_the_others() {
        let directory = tempfile::tempdir().unwrap();
        let bench = Bench {
            package: "p".into(),
            directory: "d".into(),
            target: "t".into(),
            features: String::new(),
            need: None,
        };
        let mut report = Report::new(Log::default());
        let mut measured = |written: Option<&str>| {
            let run = |_: &Bench| {
                let text = written.ok_or_else(|| Error::msg("no linker").context("build it"))?;
                let path = directory.path().join("rows.json");
                fs::write(&path, text)?;
                // The clock of the file system may be some milliseconds behind.
                fs::File::options().write(true).open(path)?.set_modified(SystemTime::now())?;
                Ok(CommandOutcome { lines: Vec::new(), elapsed: Duration::ZERO, problem: None })
            };
            measure(&bench, directory.path(), &mut report, run).len()
        };
        let row = r#"[{"id": "a", "work": "b", "unit": "ms", "ours": 1.0, "peer": null, "limit": null, "goal": null,
            "goal_met": null, "command": "c"}]"#;
        let measured = [None, Some("no array"), Some("[]"), Some(row)].map(&mut measured);
        assert_eq!(measured, [0, 0, 0, 1]);
        let text = report.to_string();
        assert!(text.contains("d-t: could not run: build it: no linker"), "{text}");
        assert!(
            text.contains("d-t: wrote no row") && text.contains("d-t: read what the bench wrote"),
            "{text}"
        );
        assert_eq!(text.lines().last(), Some("1 passed, 3 failed"));
    }

    #[test]
    fn rows_of_an_earlier_run_are_not_new() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("old.json"), "[]").unwrap();
        let long_after = SystemTime::now() + Duration::from_secs(60);
        assert_eq!(take_rows_since(directory.path(), long_after).unwrap(), []);
        fs::write(directory.path().join("new.json"), "no array").unwrap();
        assert!(take_rows_since(directory.path(), SystemTime::UNIX_EPOCH).is_err());
    }
}

//! `cargo xtask bench`: every bench of the workspace, then one table of all.

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Error, Result, bail};
use serde_json::Value;
use testbed::bench::{self, BenchRow};

use crate::kernel_test::{self, need::Need};
use crate::report::Report;
use crate::run::{self, Echo, Ran};
use crate::setup;
use crate::test::binaries;

const WITHIN: Duration = Duration::from_secs(1800);

/// Where a member's manifest says which of its benches run in a guest, and what that must have:
/// `[package.metadata.kernel-benches]`, `quota = "kernel with a disk of 4 GiB"`.
const IN_GUEST: &str = "kernel-benches";

/// A bench target of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Bench {
    package: String,
    /// The member's directory, as `supervisor`.
    directory: String,
    target: String,
    /// What of its package it is built with, by comma.
    features: String,
    /// What the guest must have in which it runs.
    need: Option<Need>,
}

impl Bench {
    fn name(&self) -> String {
        format!("{}-{}", self.directory, self.target)
    }

    fn run(&self) -> Result<Ran> {
        let mut arguments = vec!["bench", "-p", &self.package, "--bench", &self.target];
        if !self.features.is_empty() {
            arguments.extend(["--features", &self.features]);
        }
        match self.need {
            None => run::stream(run::cargo(&arguments), Echo::Shown, WITHIN),
            Some(need) => {
                let built = binaries::build_one(&arguments, WITHIN)?;
                kernel_test::bench(&built, need, WITHIN)
            }
        }
    }

    /// Whether people mean it by this name: `supervisor-tree`, `tree`, or `supervisor` for all of its member.
    fn is_meant(&self, name: &str) -> bool {
        name == self.name() || name == self.target || name == self.directory
    }
}

/// Runs the named ones, or all. A missed goal is no failure, a bench that did not run is.
pub(crate) fn run(name: Option<&str>) -> Result<ExitCode> {
    let all = benches(&run::metadata()?)?;
    let chosen: Vec<&Bench> =
        all.iter().filter(|bench| name.is_none_or(|name| bench.is_meant(name))).collect();
    if chosen.is_empty() {
        let names: Vec<_> = all.iter().map(Bench::name).collect();
        bail!("no such bench; there are: {}", names.join(", "));
    }
    setup::install()?;
    let (mut report, mut rows) = (Report::default(), Vec::new());
    for bench in chosen {
        run::headline(&bench.name());
        rows.extend(measure(bench, &bench::directory(), &mut report, Bench::run));
    }
    run::headline("all rows");
    println!("{}", bench::table(&rows));
    Ok(report.finish())
}

/// Runs one, and gives its rows. Whatever is wrong with it goes into the report: the others can run all the same.
fn measure(
    bench: &Bench,
    directory: &Path,
    report: &mut Report,
    run: impl FnOnce(&Bench) -> Result<Ran>,
) -> Vec<BenchRow> {
    let start = SystemTime::now();
    let ran = match run(bench) {
        Ok(ran) => ran,
        Err(error) => {
            report.could_not_run(&bench.name(), &format!("{error:#}"));
            return Vec::new();
        }
    };
    let (rows, unread) = match written_since(directory, start) {
        Ok(rows) if rows.is_empty() => (rows, Some("wrote no row".to_owned())),
        Ok(rows) => (rows, None),
        Err(error) => (Vec::new(), Some(format!("{error:#}"))),
    };
    report.checked(&bench.name(), ran.took, ran.problem.or(unread));
    rows
}

fn benches(metadata: &Value) -> Result<Vec<Bench>> {
    let mut found = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let directory =
            package["manifest_path"].as_str().and_then(|path| Path::new(path).parent()?.file_name());
        let targets = package["targets"].as_array().into_iter().flatten();
        for target in targets.filter(|target| target["kind"][0] == "bench") {
            let need = target["name"].as_str().and_then(|name| package["metadata"][IN_GUEST][name].as_str());
            found.push(Bench {
                need: need.map(Need::parse).transpose().map_err(Error::msg)?,
                package: package["name"].as_str().unwrap_or_default().to_owned(),
                directory: directory.unwrap_or_default().to_string_lossy().into_owned(),
                target: target["name"].as_str().unwrap_or_default().to_owned(),
                features: texts(&target["required-features"]).join(","),
            });
        }
    }
    Ok(found)
}

fn texts(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// The rows of the files that were written since then: a bench names its files itself.
fn written_since(directory: &Path, start: SystemTime) -> Result<Vec<BenchRow>> {
    let mut rows = Vec::new();
    let Ok(entries) = fs::read_dir(directory) else { return Ok(rows) };
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_new = path.metadata().and_then(|file| file.modified()).is_ok_and(|time| time >= start);
        if let Some(name) = path.to_str().and_then(|path| Path::new(path.strip_suffix(".json")?).file_name())
            && is_new
        {
            rows.extend(
                bench::read_from(directory, &name.to_string_lossy()).context("read what the bench wrote")?,
            );
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benches_are_found_in_the_metadata_and_meant_by_three_names() {
        let metadata = serde_json::json!({"packages": [{
            "name": "nodekeel-supervisor", "manifest_path": "/w/supervisor/Cargo.toml",
            "targets": [{"kind": ["lib"], "name": "nodekeel_supervisor"}, {"kind": ["bench"], "name": "tree"}],
            "metadata": null,
        }]});
        let found = benches(&metadata).unwrap();
        assert_eq!((found.len(), found[0].need), (1, None));
        assert!(["supervisor-tree", "supervisor", "tree"].iter().all(|name| found[0].is_meant(name)));
        assert!(!found[0].is_meant("logtree"));
    }

    #[test]
    fn a_manifest_sends_a_bench_into_a_guest() {
        let metadata = |need: &str| {
            serde_json::json!({"packages": [{
                "name": "nodekeel-fsquota", "manifest_path": "/w/fsquota/Cargo.toml",
                "targets": [{"kind": ["bench"], "name": "quota"}], "metadata": {"kernel-benches": {"quota": need}},
            }]})
        };
        let found = benches(&metadata("kernel with a disk of 4 GiB")).unwrap();
        assert_eq!(found[0].need.map(|need| (need.disks, need.disk_size)), Some((1, 4 << 30)));
        assert!(benches(&metadata("a moon rocket")).is_err());
    }

    #[test]
    fn a_bench_is_built_with_the_features_that_it_requires() {
        let metadata = serde_json::json!({"packages": [{
            "name": "provisionerd", "manifest_path": "/w/bins/provisionerd/Cargo.toml", "metadata": null,
            "targets": [{"kind": ["bench"], "name": "claims", "required-features": ["kill-points", "more"]}],
        }]});
        assert_eq!(benches(&metadata).unwrap()[0].features, "kill-points,more");
    }

    #[test]
    fn one_that_fails_is_told_and_does_not_end_the_others() {
        let directory = tempfile::tempdir().unwrap();
        let bench = Bench {
            package: "p".into(),
            directory: "d".into(),
            target: "t".into(),
            features: String::new(),
            need: None,
        };
        let mut report = Report::default();
        let mut measured = |written: Option<&str>| {
            let run = |_: &Bench| {
                let text = written.ok_or_else(|| Error::msg("no linker").context("build it"))?;
                let path = directory.path().join("rows.json");
                fs::write(&path, text)?;
                // The clock of the files may be some milliseconds behind.
                fs::File::options().write(true).open(path)?.set_modified(SystemTime::now())?;
                Ok(Ran { lines: Vec::new(), took: Duration::ZERO, problem: None })
            };
            measure(&bench, directory.path(), &mut report, run).len()
        };
        let row = r#"[{"id": "a", "work": "b", "unit": "ms", "ours": 1.0, "peer": null, "limit": null, "goal": null,
            "goal_met": null, "command": "c"}]"#;
        let measured = [None, Some("no array"), Some("[]"), Some(row)].map(&mut measured);
        assert_eq!(measured, [0, 0, 0, 1]);
        let told = report.to_string();
        assert!(told.contains("d-t: could not run: build it: no linker"), "{told}");
        assert!(
            told.contains("d-t: wrote no row") && told.contains("d-t: read what the bench wrote"),
            "{told}"
        );
        assert_eq!(told.lines().last(), Some("1 passed, 3 failed"));
    }

    #[test]
    fn rows_of_an_earlier_run_are_not_taken_for_new_ones() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("old.json"), "[]").unwrap();
        let long_after = SystemTime::now() + Duration::from_secs(60);
        assert_eq!(written_since(directory.path(), long_after).unwrap(), []);
        fs::write(directory.path().join("new.json"), "no array").unwrap();
        assert!(written_since(directory.path(), SystemTime::UNIX_EPOCH).is_err());
    }
}

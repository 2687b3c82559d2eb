//! `cargo xtask kernel-test`: the tests that need a kernel of their own, in a guest.

use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use testbed::{Guest, bench, gotool, guest};

use crate::report::Report;
use crate::run::{self, Ran};
use crate::setup;
use crate::test::binaries::{self, Binary};
use crate::test::ways::{self, Selection};
use crate::test::{judge, list_ignored};

pub(crate) mod counted;
pub(crate) mod need;

use need::Need;

const BUILD_WITHIN: Duration = Duration::from_secs(30 * 60);
/// Longer than a binary's tests take in a guest, which computes ten times slower than this machine.
const BINARY_WITHIN: Duration = Duration::from_secs(8 * 60);
/// Where a bench in a guest leaves its rows.
const TARGET_IN_GUEST: &str = "/run/target";
const COPY_WITHIN: Duration = Duration::from_secs(120);
/// What marks a test for this command, at the beginning of its line.
const MARK: &str = "#[ignore = \"needs kernel";

/// The tests of one binary that wait for a guest.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) binary: Binary,
    pub(crate) need: Need,
    pub(crate) tests: Vec<String>,
}

/// Builds the packages that have such tests, and runs those of them whose `PACKAGE BINARY TEST` contains the filter.
pub(crate) fn run(filter: Option<&str>) -> Result<ExitCode> {
    setup::install()?;
    let packages = narrowed(packages(&run::metadata()?), filter);
    let mut report = Report::default();
    let mut jobs = Vec::new();
    if !packages.is_empty() {
        run::headline(&format!("build {}", packages.join(", ")));
        let built = binaries::build(&packages, BUILD_WITHIN)?;
        report.checked("build", built.took, built.problem);
        for binary in built.binaries {
            jobs.extend(job(binary, filter, &mut report)?);
        }
    }
    if jobs.is_empty() && filter.is_some() {
        bail!("no test that needs a kernel has {:?} in its name", filter.unwrap_or_default());
    }
    run_jobs(jobs, &mut report);
    Ok(report.finish())
}

/// Runs them, as many as can be in one guest. What a hang or a panic has taken the guest from runs in another one.
pub(crate) fn run_jobs(jobs: Vec<Job>, report: &mut Report) {
    let mut waiting: VecDeque<Job> = jobs.into();
    while !waiting.is_empty() {
        let start = Instant::now();
        let guest = match boot(waiting.make_contiguous()) {
            Ok(guest) => guest,
            Err(error) => {
                for job in waiting {
                    report.could_not_run(&name(&job), &format!("{error:#}"));
                }
                return;
            }
        };
        report.checked("boot a guest", start.elapsed(), None);
        while let Some(job) = waiting.pop_front() {
            if !run_job(&guest, &job, report) {
                break;
            }
        }
    }
}

/// Whether the guest can be used further.
fn run_job(guest: &Guest, job: &Job, report: &mut Report) -> bool {
    let name = name(job);
    run::headline(&name);
    let selection = Selection::Exactly(job.tests.clone());
    let mut command = job.binary.command();
    command.args(selection.arguments());
    let (ran, error) = stream(guest, &command, BINARY_WITHIN);
    judge(&name, &ran, &selection, report);
    error.inspect(|error| println!("{error:#}")).is_none()
}

fn name(job: &Job) -> String {
    format!("{} in a guest", job.binary.name())
}

/// Runs a command in the guest with its output shown and kept; and what happened to the guest, where something did.
pub(crate) fn stream(guest: &Guest, command: &Command, deadline: Duration) -> (Ran, Option<anyhow::Error>) {
    let start = Instant::now();
    let mut lines = Vec::new();
    let ended = guest.run(command, deadline, |line| {
        println!("{line}");
        lines.push(line.to_owned());
    });
    let (problem, error) = match ended {
        Ok(0) => (None, None),
        Ok(code) => (Some(format!("exit status: {code}")), None),
        Err(error) => (Some(error.root_cause().to_string()), Some(error)),
    };
    (Ran { lines, took: start.elapsed(), problem }, error)
}

fn boot(jobs: &[Job]) -> Result<Guest> {
    let need = jobs.iter().map(|job| job.need).reduce(Need::and).unwrap_or_default();
    let mut builder = guest(need)?;
    for job in jobs {
        builder = furnish(builder, &job.binary)?;
    }
    builder.boot()
}

/// A guest with what is needed, and none of the test's own programs.
pub(crate) fn guest(need: Need) -> Result<guest::Builder> {
    let mut builder = Guest::builder().memory(need.memory).cpus(need.cpus);
    for _ in 0..need.disks {
        builder = builder.disk(need.disk_size);
    }
    if need.csi_sanity {
        builder = builder.file("/usr/bin/csi-sanity", gotool::CSI_SANITY.program("csi-sanity")?);
    }
    if need.gvisor {
        for tools in [gotool::CONTAINERD, gotool::GVISOR] {
            let directory = tools.directory()?;
            for program in tools.programs {
                builder =
                    builder.file(Path::new("/usr/bin").join(program.file), directory.join(program.file));
            }
        }
    }
    Ok(if need.network { builder.network() } else { builder })
}

/// The test binary, the programs of its package and the package's files, each where it is on this machine: a test knows
/// them by paths of the build.
pub(crate) fn furnish(mut builder: guest::Builder, binary: &Binary) -> Result<guest::Builder> {
    builder = builder.program(&binary.path, &binary.path);
    for program in &binary.programs {
        builder = builder.program(program, program);
    }
    builder.directory(&binary.directory, &binary.directory)
}

/// Runs a bench in a guest of its own, and puts the rows that it wrote there where those of other benches are.
pub(crate) fn bench(binary: &Binary, need: Need, deadline: Duration) -> Result<Ran> {
    let guest = furnish(guest(need)?, binary)?.boot()?;
    let mut command = binary.command();
    command.arg("--bench").env("CARGO_TARGET_DIR", TARGET_IN_GUEST);
    let (ran, error) = stream(&guest, &command, deadline);
    if let Some(error) = error {
        return Err(error);
    }
    let rows = format!("{TARGET_IN_GUEST}/bench");
    let names = guest.output(Command::new("find").args([&rows, "-name", "*.json"]), COPY_WITHIN)?;
    fs::create_dir_all(bench::directory()).context("create the directory of rows")?;
    for path in names.lines().map(Path::new) {
        let text = guest.output(Command::new("cat").arg(path), COPY_WITHIN)?;
        let place = bench::directory().join(path.file_name().unwrap_or_default());
        fs::write(&place, text).with_context(|| format!("write {}", place.display()))?;
    }
    Ok(ran)
}

/// The tests of the binary that wait for a guest; needs that nobody understands are failures.
fn job(binary: Binary, filter: Option<&str>, report: &mut Report) -> Result<Option<Job>> {
    let is_meant =
        |test: &str| filter.is_none_or(|filter| format!("{} {test}", binary.name()).contains(filter));
    let sorted = ways::sort(list_ignored(&binary)?, run::is_root());
    for (test, why) in
        sorted.unknown.into_iter().filter(|(test, why)| is_meant(test) && why.contains("kernel"))
    {
        report.could_not_run(&format!("{} {test}", binary.name()), &why);
    }
    let chosen = sorted.kernel.into_iter().filter(|(_, test)| is_meant(test)).collect();
    Ok(Job::new(binary, chosen))
}

impl Job {
    /// Nothing where there is no test.
    pub(crate) fn new(binary: Binary, tests: Vec<(Need, String)>) -> Option<Self> {
        let need = tests.iter().map(|(need, _)| *need).reduce(Need::and)?;
        Some(Self { binary, need, tests: tests.into_iter().map(|(_, test)| test).collect() })
    }
}

/// The packages whose sources mark a test for a guest.
fn packages(metadata: &Value) -> Vec<String> {
    let members = metadata["packages"].as_array().into_iter().flatten();
    let marked = members.filter(|package| {
        let manifest = package["manifest_path"].as_str().map(Path::new);
        manifest
            .and_then(Path::parent)
            .is_some_and(|directory| ["src", "tests"].iter().any(|part| is_marked(&directory.join(part))))
    });
    marked.filter_map(|package| package["name"].as_str().map(String::from)).collect()
}

/// A filter that begins with a package's whole name means no other package: those needn't be built.
fn narrowed(packages: Vec<String>, filter: Option<&str>) -> Vec<String> {
    let first = filter.and_then(|filter| filter.split(' ').next()).unwrap_or_default();
    if packages.iter().any(|package| package == first) { vec![first.to_owned()] } else { packages }
}

fn is_marked(path: &Path) -> bool {
    if path.is_dir() {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        return entries.map(|entry| entry.path()).any(|path| is_marked(&path));
    }
    let is_source = path.extension().is_some_and(|extension| extension == "rs");
    is_source
        && fs::read_to_string(path)
            .is_ok_and(|text| text.lines().any(|line| line.trim_start().starts_with(MARK)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_packages_with_marked_tests_are_built() {
        let workspace = tempfile::tempdir().unwrap();
        let place = |name: &str, text: &str| {
            let source = workspace.path().join(name).join("tests/it");
            fs::create_dir_all(&source).unwrap();
            fs::write(source.join("main.rs"), text).unwrap();
            serde_json::json!({"name": name, "manifest_path": workspace.path().join(name).join("Cargo.toml")})
        };
        let metadata = serde_json::json!({"packages": [
            place("marked", "    #[ignore = \"needs kernel with network\"]\nfn a() {}"),
            place("root", "#[ignore = \"needs root\"]"),
            place("words", "// #[ignore = \"needs kernel\"] is for others"),
        ]});
        assert_eq!(packages(&metadata), ["marked"]);
    }

    #[test]
    fn a_filter_that_begins_with_a_package_builds_that_one_alone() {
        let packages = || vec!["a".to_owned(), "b".to_owned()];
        assert_eq!(narrowed(packages(), Some("b it x::y")), ["b"]);
        assert_eq!(narrowed(packages(), Some("bo")), packages());
        assert_eq!(narrowed(packages(), None), packages());
    }
}

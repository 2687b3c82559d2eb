//! `cargo xtask test`: everything, on the real things, with one summary.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::kernel_test::{self, Job};
use crate::kube;
use crate::oci;
use crate::planted;
use crate::report::{Part, Report};
use crate::run::{self, Echo, Ran};
use crate::setup;
use crate::traces::Traces;

pub(crate) mod binaries;
mod libtest;
pub(crate) mod ways;

use binaries::{Binary, Built};
use libtest::{Ignored, Outcome};
use ways::{Prepared, Selection, Sorted, Way};

/// Longer than a cold build takes.
const BUILD_WITHIN: Duration = Duration::from_secs(30 * 60);
/// Longer than any part takes, also beside other work: what exceeds it hangs.
const PART_WITHIN: Duration = Duration::from_secs(15 * 60);
const EXAMPLE_WITHIN: Duration = Duration::from_secs(120);

/// Tests that `cargo test` samples, for it has a minute, run whole here: the variables that say so.
const WHOLE: [(&str, &str); 3] =
    [("NODEKEEL_KILLS", "all"), ("NODEKEEL_CASES", "all"), ("NODEKEEL_LIVES", "10000")];

/// The tests of child processes: their module in the test binary of this package runs in every way.
const PROCESS_TESTS: (&str, &str, &str) = ("nodekeel-supervisor", "it", "process::");

/// Installs what is missing, builds once, then runs every test, example and doctest.
///
/// A test marked `#[ignore = "needs …"]` runs in the way that its need asks for; one that could not run is a failure.
/// Those marked `#[ignore = "soak…"]` are for `cargo xtask soak`.
pub(crate) fn run() -> Result<ExitCode> {
    let mut report = Report::default();
    run::headline("set-up");
    setup::install()?;
    if let Err(error) = kube::tools::build() {
        report.could_not_run("the tools that Debian has not", &format!("{error:#}"));
    }
    run::headline("build everything");
    let Built { mut binaries, examples, took, problem } = binaries::build(&[], BUILD_WITHIN)?;
    report.checked("build", took, problem);
    give_image(&mut binaries, &mut report);
    let before = Traces::look()?;
    let in_guests = binaries.iter().filter_map(|binary| run_binary(binary, &mut report)).collect();
    kernel_test::run_jobs(in_guests, &mut report);
    for example in &examples {
        run_example(example, &mut report);
    }
    run_doctests(&mut report);
    let left = before.sweep()?;
    let problem = (!left.is_empty()).then(|| format!("left behind: {left:?}"));
    report.checked("nothing is left behind", Duration::ZERO, problem);
    if let Err(error) = planted::run(&mut report) {
        report.could_not_run("planted bugs", &format!("{error:#}"));
    }
    Ok(report.finish())
}

/// Makes the image that tests of provisionerd run, and tells them where it is.
fn give_image(binaries: &mut [Binary], report: &mut Report) {
    run::headline("the image of provisionerd");
    let start = Instant::now();
    match oci::for_tests() {
        Ok(image) => {
            report.checked("the image of provisionerd", start.elapsed(), None);
            let ours = binaries.iter_mut().filter(|binary| binary.package == "provisionerd");
            ours.for_each(|binary| binary.files.push((oci::IMAGE_FILE, image.clone())));
        }
        Err(error) => report.could_not_run("the image of provisionerd", &format!("{error:#}")),
    }
}

/// Runs the rounds of child processes as often as `count` says, in every way in which they have to hold.
pub(crate) fn process_rounds(count: (&str, &str), within: Duration, report: &mut Report) -> Result<()> {
    let (package, target, _) = PROCESS_TESTS;
    let built = binaries::build(&[PROCESS_TESTS.0.to_owned()], PART_WITHIN)?;
    let is_it = |binary: &&Binary| (binary.package.as_str(), binary.target.as_str()) == (package, target);
    let binary = built.binaries.iter().find(is_it).context("the tests of child processes were not built")?;
    let selection = Selection::Module("process::rounds::");
    for way in [Way::AsIs].into_iter().chain(ways::others(run::is_root())) {
        let name = format!("{} {selection}{} ({}={})", binary.name(), way.label(), count.0, count.1);
        run::headline(&name);
        let Prepared { mut command, home: _home } = ways::command(binary, way, &selection)?;
        command.env(count.0, count.1).arg("--nocapture");
        let ran = run::stream(command, Echo::Shown, within)?;
        judge(&name, &ran, &selection, report);
    }
    Ok(())
}

/// Runs what runs here, and gives what runs in a guest.
fn run_binary(binary: &Binary, report: &mut Report) -> Option<Job> {
    let ran = run_selected(binary, Way::AsIs, &Selection::Unmarked, report);
    let Sorted { here, kernel, unknown } = ways::sort(ran.ignored, run::is_root());
    for (test, why) in unknown {
        report.could_not_run(&format!("{} {test}", binary.name()), &why);
    }
    for (way, tests) in here {
        run_selected(binary, way, &Selection::Exactly(tests), report);
    }
    let (package, target, module) = PROCESS_TESTS;
    if (binary.package.as_str(), binary.target.as_str()) == (package, target) {
        for way in ways::others(run::is_root()) {
            run_selected(binary, way, &Selection::Module(module), report);
        }
    }
    Job::new(binary.clone(), kernel)
}

/// The binary's ignored tests with their reasons; none of its tests runs.
pub(crate) fn list_ignored(binary: &Binary) -> Result<Vec<Ignored>> {
    let listed = testbed::output(binary.command().args(["--list", "--ignored", "--format", "terse"]))?;
    let names: Vec<&str> = listed.lines().filter_map(|line| line.strip_suffix(": test")).collect();
    if names.is_empty() {
        return Ok(Vec::new());
    }
    // The list is without reasons: those are told by a run of exactly what is ignored.
    let told = testbed::output(binary.command().arg("--exact").args(names))?;
    Ok(libtest::read(&told.lines().map(String::from).collect::<Vec<_>>()).ignored)
}

fn run_selected(binary: &Binary, way: Way, selection: &Selection, report: &mut Report) -> Outcome {
    let name = format!("{} {}{}", binary.name(), selection, way.label());
    run::headline(&name);
    // What the command stands on (a plain user's home) lasts until it has ended.
    let ran = ways::command(binary, way, selection).and_then(|Prepared { mut command, home: _home }| {
        command.envs(WHOLE);
        run::stream(command, Echo::Shown, PART_WITHIN)
    });
    match ran {
        Ok(ran) => judge(&name, &ran, selection, report),
        Err(error) => {
            report.could_not_run(&name, &format!("{error:#}"));
            Outcome::default()
        }
    }
}

/// Takes the counts out of the output; a run that gives none, or fewer than were asked for, has failed.
pub(crate) fn judge(name: &str, ran: &Ran, selection: &Selection, report: &mut Report) -> Outcome {
    let mut outcome = libtest::read(&ran.lines);
    let missing = match selection {
        _ if !outcome.is_complete => Some("ended without a result".to_owned()),
        Selection::Exactly(tests) if outcome.passed + outcome.failed < tests.len() => {
            Some(format!("only {} of {} tests ran", outcome.passed + outcome.failed, tests.len()))
        }
        Selection::Module(_) if outcome.passed + outcome.failed == 0 => Some("ran no test".into()),
        _ => None,
    };
    let problem = missing.or_else(|| ran.problem.clone());
    if outcome.failed == 0 && problem.is_some() {
        outcome.failed = 1;
    }
    // The exit code says no more than the failed tests do.
    if let Some(problem) = problem.filter(|_| outcome.failures.is_empty() || !outcome.is_complete) {
        report.note(format!("{name}: {problem}"));
    }
    for test in &outcome.failures {
        report.note(format!("{name}: {test} failed"));
    }
    let (passed, failed) = (outcome.passed, outcome.failed);
    report.ran(Part { name: name.into(), passed, failed, took: ran.took });
    outcome
}

fn run_example(example: &Binary, report: &mut Report) {
    let name = format!("example {}", example.target);
    run::headline(&name);
    let ran = run::stream(example.command(), Echo::Shown, EXAMPLE_WITHIN);
    match ran {
        Ok(ran) => report.checked(&name, ran.took, ran.problem),
        Err(error) => report.could_not_run(&name, &format!("{error:#}")),
    }
}

fn run_doctests(report: &mut Report) {
    run::headline("doctests");
    let command = run::cargo(&["test", "--workspace", "--all-features", "--doc", "--no-fail-fast"]);
    match run::stream(command, Echo::Shown, BUILD_WITHIN) {
        Ok(ran) => drop(judge("doctests", &ran, &Selection::Unmarked, report)),
        Err(error) => report.could_not_run("doctests", &format!("{error:#}")),
    }
}

//! The parts of a test run: which tests of which binary run together, as whom, and in which lane.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::binaries::{Build, Executable};
use super::lanes::{Job, Lane};
use super::launch::{RunAs, TestCommand, TestSelection, test_command};
use super::sample::Sample;
use super::since::{TestPlan, Tier};
use super::{PART_WITHIN, WHOLE_COUNTS, add_tests, doctests, events, list_ignored, requirement};
use crate::kernel_test::GuestJob;
use crate::oci;
use crate::report::Report;
use crate::run::{self, run_command};
use crate::workspace::Package;

/// The tests that measure time: package, target and module.
const TIMED_TESTS: [(&str, &str, &str); 3] = [
    ("nodekeel-supervisor", "it", "process::"),
    ("noded", "it", "ports::"),
    ("provisionerd", "it", "ports::"),
];
/// Of these, the package whose tests run as every user: those of child processes.
const PROCESS_PACKAGE: &str = "nodekeel-supervisor";
/// How many of a part that runs alone run beside each other: most of them wait for a process.
const THREADS_ALONE: &str = "--test-threads=4";

/// Tests of one binary that run together.
struct TestJob<'a> {
    binary: &'a Executable,
    run_as: RunAs,
    selection: TestSelection,
    lane: Lane,
    variables: Vec<(&'static str, String)>,
}

/// All jobs of a run.
pub(super) fn plan_jobs<'a>(
    build: &'a Build,
    (plan, sample): (&'a TestPlan, Sample),
    packages: &'a [Package],
    report: &mut Report,
) -> Vec<Job<'a>> {
    let (mut jobs, mut guest_jobs) = (Vec::new(), Vec::new());
    for binary in &build.tests {
        let tests = match plan.get(&binary.package) {
            Some(Tier::Whole) => plan_all_tests(binary, sample, &mut guest_jobs, report),
            Some(Tier::Quick) => plan_plain_tests(binary),
            None => Vec::new(),
        };
        for job in tests {
            jobs.push(Job::new(job.name(), job.lane, move |report| job.run(report)));
        }
    }
    let in_guests = guest_jobs.into_iter();
    jobs.extend(in_guests.map(|job| Job::new(job.name(), Lane::Guest, move |report| job.run(report))));
    jobs.extend(plan_doctests(plan, packages));
    jobs
}

fn plan_doctests<'a>(plan: &'a TestPlan, packages: &'a [Package]) -> Option<Job<'a>> {
    let is_whole = |name: &str| plan.get(name) == Some(&Tier::Whole);
    let libraries = packages.iter().filter(|package| package.is_library() && is_whole(&package.name));
    let libraries: Vec<&str> = libraries.map(|package| &*package.name).collect();
    if libraries.is_empty() {
        return None;
    }
    Some(Job::new("doctests", Lane::Computing, move |report| doctests::run(&libraries, report)))
}

/// All tests of a binary that are in the sample; those that need a guest are added to the guest's.
fn plan_all_tests<'a>(
    binary: &'a Executable,
    sample: Sample,
    guest_jobs: &mut Vec<GuestJob>,
    report: &mut Report,
) -> Vec<TestJob<'a>> {
    let ignored = list_ignored(binary).unwrap_or_else(|error| {
        report.could_not_run(&format!("the list of {}", binary.name()), &format!("{error:#}"));
        Vec::new()
    });
    let (ignored, left_out) = sample.choose(ignored);
    for test in left_out {
        report.log.line(&format!("not in the sample: {} {}", binary.name(), test.name));
    }
    let timed = timed_module(binary);
    let measures = |test: &str| timed.is_some_and(|module| test.starts_with(module));
    let groups = requirement::group_tests(ignored, run::is_root(), measures);
    for (test, why) in groups.unmet {
        report.could_not_run(&format!("{} {test}", binary.name()), &why);
    }
    guest_jobs.extend(GuestJob::new(binary.clone(), groups.guest));
    let mut jobs = plan_plain_tests(binary);
    let host = groups.host.into_iter();
    jobs.extend(
        host.map(|((run_as, lane), tests)| TestJob::new(binary, run_as, TestSelection::Exactly(tests), lane)),
    );
    let counts = WHOLE_COUNTS.map(|(name, count)| (name, count.to_owned()));
    jobs.iter_mut().for_each(|job| job.variables.extend(counts.clone()));
    if let Some(module) = timed.filter(|_| binary.package == PROCESS_PACKAGE) {
        let selection = TestSelection::Inside(module);
        let others = RunAs::others(run::is_root()).into_iter();
        jobs.extend(others.map(|run_as| TestJob::new(binary, run_as, selection.clone(), Lane::Alone)));
    }
    jobs
}

/// The tests of a binary that need nothing.
fn plan_plain_tests(binary: &Executable) -> Vec<TestJob<'_>> {
    let job = |selection, lane| TestJob::new(binary, RunAs::Caller, selection, lane);
    let Some(module) = timed_module(binary) else {
        return vec![job(TestSelection::Unignored, Lane::Computing)];
    };
    let (outside, inside) = (TestSelection::Outside(module), TestSelection::Inside(module));
    vec![job(outside, Lane::Computing), job(inside, Lane::Alone)]
}

/// The module of a binary whose tests measure time.
fn timed_module(binary: &Executable) -> Option<&'static str> {
    let of_binary = |(package, target, _): &&_| (*package, *target) == (&*binary.package, &*binary.target);
    TIMED_TESTS.iter().find(of_binary).map(|(.., module)| *module)
}

impl<'a> TestJob<'a> {
    fn new(binary: &'a Executable, run_as: RunAs, selection: TestSelection, lane: Lane) -> Self {
        Self { binary, run_as, selection, lane, variables: Vec::new() }
    }

    fn name(&self) -> String {
        let lane = match self.selection {
            TestSelection::Exactly(_) => self.lane.label(),
            _ => "",
        };
        format!("{} {}{lane}{}", self.binary.name(), self.selection, self.run_as.label())
    }

    fn run(mut self, report: &mut Report) {
        let name = self.name();
        if self.lane == Lane::Guest && self.binary.package == oci::PACKAGE {
            match build_image(report) {
                Some(image) => self.variables.push((oci::IMAGE_FILE, image.display().to_string())),
                None => return,
            }
        }
        report.log.headline(&name);
        let command = test_command(self.binary, self.run_as, &self.selection);
        let outcome = command.and_then(|TestCommand { mut command, home: _home }| {
            command.envs(self.variables);
            if self.lane == Lane::Alone {
                command.arg(THREADS_ALONE);
            }
            run_command(command, &report.log, events::show_event, PART_WITHIN)
        });
        match outcome {
            Ok(outcome) => add_tests(&name, &outcome, &self.selection, report),
            Err(error) => report.could_not_run(&name, &format!("{error:#}")),
        }
    }
}

/// Builds the image of provisionerd that its tests run; `cargo xtask soak` runs them on that of a release.
fn build_image(report: &mut Report) -> Option<PathBuf> {
    const NAME: &str = "image of provisionerd";
    report.log.headline(NAME);
    let image = oci::build_for_tests(oci::TEST_PROFILE, &report.log);
    match image {
        Ok((_, elapsed)) => report.add_check(NAME, elapsed, None),
        Err(ref error) => report.could_not_run(NAME, &format!("{error:#}")),
    }
    image.ok().map(|(image, _)| image)
}

/// Runs the rounds of child processes as often as `count` says, as every user.
///
/// # Errors
/// The tests can't be built or started.
pub(crate) fn run_process_rounds(
    count: Option<&(&str, String)>,
    within: Duration,
    report: &mut Report,
) -> Result<()> {
    let built = super::binaries::build(&[PROCESS_PACKAGE.to_owned()], PART_WITHIN)?;
    let binary = built.tests.iter().find(|binary| timed_module(binary).is_some());
    let binary = binary.context("cargo built no tests of child processes")?;
    let selection = TestSelection::Inside("process::rounds::");
    for run_as in [RunAs::Caller].into_iter().chain(RunAs::others(run::is_root())) {
        let name = format!("{} {selection}{}", binary.name(), run_as.label());
        report.log.headline(&name);
        let TestCommand { mut command, home: _home } = test_command(binary, run_as, &selection)?;
        command.envs(count.cloned()).arg("--nocapture");
        let outcome = run_command(command, &report.log, events::show_event, within)?;
        add_tests(&name, &outcome, &selection, report);
    }
    Ok(())
}

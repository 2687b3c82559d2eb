//! `cargo xtask test`: all tests on real daemons and kernels, with one summary.

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use testbed::write_program;

use crate::host_leftovers::HostLeftovers;
use crate::kernel_test::{self, GuestJob};
use crate::report::{Part, Report};
use crate::run::{self, CommandOutcome, Log, run_command};
use crate::workspace::{self, Package, cargo};
use crate::{kube, oci, planted, setup};

pub(crate) mod binaries;
pub(crate) mod events;
mod lanes;
pub(crate) mod launch;
pub(crate) mod requirement;
mod since;

use binaries::{Build, Executable};
use events::{IgnoredTest, TestRun};
use lanes::{Job, Lane};
use launch::{RunAs, TestCommand, TestSelection, test_command};
use since::{TestPlan, Tier};

/// Longer than a cold build takes.
const BUILD_WITHIN: Duration = Duration::from_secs(30 * 60);
/// Longer than any part takes, also beside other work: what exceeds it hangs.
const PART_WITHIN: Duration = Duration::from_secs(25 * 60);
const EXAMPLE_WITHIN: Duration = Duration::from_secs(120);

/// `cargo test` has a minute and samples the longest tests; here they run whole.
const WHOLE_COUNTS: [(&str, &str); 3] =
    [("NODEKEEL_KILLS", "all"), ("NODEKEEL_CASES", "all"), ("NODEKEEL_LIVES", "10000")];

/// The needs that programs meet which Go builds.
const GO_TOOLS: [&str; 5] = ["kube", "node", "go", "gvisor", "csi-sanity"];

/// The tests of child processes: package, target and module. They run as every user, and measure time.
const PROCESS_TESTS: (&str, &str, &str) = ("nodekeel-supervisor", "it", "process::");

/// Stands in for rustdoc: says whose doctests follow, skips those of other packages, and lets a stable harness write
/// events. The variable is not set for cargo, whose build scripts watch it.
const RUSTDOC: &str = r#"#!/bin/sh
case " $NODEKEEL_DOCTESTS " in *" $CARGO_PKG_NAME "*) ;; *) exit 0 ;; esac
printf '{ "type": "package", "name": "%s" }\n' "$CARGO_PKG_NAME"
RUSTC_BOOTSTRAP=1 exec rustdoc "$@"
"#;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Test the packages changed since COMMIT, and their dependents quickly
    ///
    /// A changed package runs all its tests; a package that depends on it runs those of `cargo test`. Changed documents
    /// run the tests that check documents. A change of Cargo.toml, Cargo.lock, .cargo, bins/testbed, or of another file
    /// outside the packages runs everything.
    #[arg(long, value_name = "COMMIT")]
    since: Option<String>,
    /// Run all tests of dependents, too
    #[arg(long, requires = "since")]
    deep: bool,
}

/// Installs what is missing, builds once, then runs every test, example and doctest that the plan has.
///
/// A test marked `#[ignore = "needs …"]` runs where its need is met; a need that can't be met is a failure.
/// `#[ignore = "soak…"]` leaves a test to `cargo xtask soak`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let packages = workspace::read_metadata()?.packages;
    let mut report = Report::new(Log::default());
    let plan = make_plan(arguments, &packages)?;
    if plan.is_empty() {
        return Ok(report.finish());
    }
    let build = prepare(&plan, &packages, &mut report)?;
    let before = HostLeftovers::find()?;
    let jobs = plan_jobs(&build, &plan, &packages, &mut report);
    lanes::run_jobs(jobs, &mut report);
    let left = before.sweep()?;
    let problem = (!left.is_empty()).then(|| format!("left behind: {left:?}"));
    report.add_check("nothing is left behind", Duration::ZERO, problem);
    report.write(&workspace::target_directory().join("test"))?;
    Ok(report.finish())
}

fn make_plan(arguments: &Arguments, packages: &[Package]) -> Result<TestPlan> {
    let Some(commit) = &arguments.since else { return Ok(since::plan_everything(packages)) };
    let files = since::changed_files(commit)?;
    let plan = since::plan(&files, packages, &workspace::root(), arguments.deep);
    println!("{} files have changed since {commit}", files.len());
    for (package, tier) in &plan {
        println!("  {package}: {}", if *tier == Tier::Whole { "all tests" } else { "quick tests" });
    }
    Ok(plan)
}

/// Installs and builds. Go downloads and links one program at a time, so its builds run beside cargo's.
fn prepare(plan: &TestPlan, packages: &[Package], report: &mut Report) -> Result<Build> {
    report.log.headline("setup");
    setup::install()?;
    let is_whole = |package: &&Package| plan.get(&package.name) == Some(&Tier::Whole);
    let needs_tools = packages.iter().filter(is_whole).any(|package| package.has_test_that_needs(&GO_TOOLS));
    let (tools, build) = thread::scope(|scope| {
        let tools = scope.spawn(|| if needs_tools { kube::tools::build() } else { Ok(()) });
        report.log.headline("build");
        // With all members, as an earlier run built them: other features of dependencies would be another build.
        let build = binaries::build(&[], BUILD_WITHIN);
        (tools.join().expect("the build of Go tools does not panic"), build)
    });
    if let Err(error) = tools {
        report.could_not_run("build of Go tools", &format!("{error:#}"));
    }
    let build = build?;
    report.add_check("build", build.elapsed, build.problem.clone());
    Ok(build)
}

/// The parts of the run, each with its lane.
fn plan_jobs<'a>(
    build: &'a Build,
    plan: &'a TestPlan,
    packages: &'a [Package],
    report: &mut Report,
) -> Vec<Job<'a>> {
    let (mut jobs, mut guest_jobs) = (Vec::new(), Vec::new());
    for binary in &build.tests {
        match plan.get(&binary.package) {
            Some(Tier::Whole) => jobs.extend(whole_jobs(binary, &mut guest_jobs, report)),
            Some(Tier::Quick) => jobs.extend(plain_jobs(binary, &[])),
            None => {}
        }
    }
    if !guest_jobs.is_empty() {
        let run = |report: &mut Report| kernel_test::run_jobs(guest_jobs, report);
        jobs.push(Job::new("tests in a guest", Lane::Guest, run));
    }
    if plan.contains_key("examples") {
        jobs.push(Job::new("examples", Lane::Computing, |report| run_examples(&build.examples, report)));
    }
    let is_whole = |name: &str| plan.get(name) == Some(&Tier::Whole);
    let is_library = |package: &&Package| package.targets.iter().any(|target| target.kind[0] == "lib");
    let libraries: Vec<&str> = packages.iter().filter(is_library).map(|package| &*package.name).collect();
    let documented: Vec<&str> = libraries.into_iter().filter(|name| is_whole(name)).collect();
    if !documented.is_empty() {
        let run = move |report: &mut Report| run_doctests(&documented, report);
        jobs.push(Job::new("doctests", Lane::Computing, run));
    }
    if planted::has_bugs(is_whole) {
        let run = move |report: &mut Report| planted::run_sample(is_whole, report);
        jobs.push(Job::new("planted bugs", Lane::Computing, run));
    }
    jobs
}

/// The jobs of all tests of a binary; those that need a guest are added to the guest's.
fn whole_jobs<'a>(
    binary: &'a Executable,
    guest_jobs: &mut Vec<GuestJob>,
    report: &mut Report,
) -> Vec<Job<'a>> {
    let ignored = list_ignored(binary).unwrap_or_else(|error| {
        report.could_not_run(&format!("the list of {}", binary.name()), &format!("{error:#}"));
        Vec::new()
    });
    let groups = requirement::group_tests(ignored, run::is_root());
    for (test, why) in groups.unmet {
        report.could_not_run(&format!("{} {test}", binary.name()), &why);
    }
    guest_jobs.extend(GuestJob::new(binary.clone(), groups.guest));
    let mut jobs = plain_jobs(binary, &WHOLE_COUNTS);
    for ((run_as, lane), tests) in groups.host {
        let measures = |test: &String| has_process_tests(binary) && test.starts_with(PROCESS_TESTS.2);
        let (alone, beside): (Vec<_>, Vec<_>) = tests.into_iter().partition(measures);
        for (tests, lane) in
            [(alone, Lane::Alone), (beside, lane)].into_iter().filter(|(tests, _)| !tests.is_empty())
        {
            jobs.push(test_job(binary, run_as, TestSelection::Exactly(tests), lane, &WHOLE_COUNTS));
        }
    }
    if has_process_tests(binary) {
        let others = RunAs::others(run::is_root()).into_iter();
        let inside =
            |run_as| test_job(binary, run_as, TestSelection::Inside(PROCESS_TESTS.2), Lane::Alone, &[]);
        jobs.extend(others.map(inside));
    }
    jobs
}

/// The jobs of the tests that need nothing.
fn plain_jobs<'a>(binary: &'a Executable, counts: &'static [(&str, &str)]) -> Vec<Job<'a>> {
    let module = PROCESS_TESTS.2;
    let selections = match has_process_tests(binary) {
        true => vec![
            (TestSelection::Outside(module), Lane::Computing),
            (TestSelection::Inside(module), Lane::Alone),
        ],
        false => vec![(TestSelection::Unignored, Lane::Computing)],
    };
    let job = |(selection, lane)| test_job(binary, RunAs::Caller, selection, lane, counts);
    selections.into_iter().map(job).collect()
}

fn has_process_tests(binary: &Executable) -> bool {
    (&*binary.package, &*binary.target) == (PROCESS_TESTS.0, PROCESS_TESTS.1)
}

fn test_job<'a>(
    binary: &'a Executable,
    run_as: RunAs,
    selection: TestSelection,
    lane: Lane,
    counts: &'static [(&str, &str)],
) -> Job<'a> {
    let needs = match selection {
        TestSelection::Exactly(_) => format!(" (need {})", lane.needs()),
        _ => String::new(),
    };
    let name = format!("{} {selection}{needs}{}", binary.name(), run_as.label());
    Job::new(name.clone(), lane, move |report| {
        let mut variables: Vec<(&str, String)> =
            counts.iter().map(|(name, count)| (*name, (*count).to_owned())).collect();
        if lane == Lane::Guest && binary.package == oci::PACKAGE {
            match build_image(report) {
                Some(image) => variables.push((oci::IMAGE_FILE, image)),
                None => return,
            }
        }
        report.log.headline(&name);
        let outcome =
            test_command(binary, run_as, &selection).and_then(|TestCommand { mut command, home: _home }| {
                command.envs(variables);
                run_command(command, &report.log, events::show_event, PART_WITHIN)
            });
        match outcome {
            Ok(outcome) => add_tests(&name, &outcome, &selection, report),
            Err(error) => report.could_not_run(&name, &format!("{error:#}")),
        }
    })
}

/// Builds the image of provisionerd that its tests run.
fn build_image(report: &mut Report) -> Option<String> {
    const NAME: &str = "image of provisionerd";
    report.log.headline(NAME);
    match oci::build_for_tests(&report.log) {
        Ok((image, elapsed)) => {
            report.add_check(NAME, elapsed, None);
            Some(image.display().to_string())
        }
        Err(error) => {
            report.could_not_run(NAME, &format!("{error:#}"));
            None
        }
    }
}

/// Runs the rounds of child processes as often as `count` says, as every user.
pub(crate) fn run_process_rounds(count: (&str, &str), within: Duration, report: &mut Report) -> Result<()> {
    let built = binaries::build(&[PROCESS_TESTS.0.to_owned()], PART_WITHIN)?;
    let binary = built.tests.iter().find(|binary| has_process_tests(binary));
    let binary = binary.context("cargo built no tests of child processes")?;
    let selection = TestSelection::Inside("process::rounds::");
    for run_as in [RunAs::Caller].into_iter().chain(RunAs::others(run::is_root())) {
        let name = format!("{} {selection}{} ({}={})", binary.name(), run_as.label(), count.0, count.1);
        report.log.headline(&name);
        let TestCommand { mut command, home: _home } = test_command(binary, run_as, &selection)?;
        command.env(count.0, count.1).arg("--nocapture");
        let outcome = run_command(command, &report.log, events::show_event, within)?;
        add_tests(&name, &outcome, &selection, report);
    }
    Ok(())
}

/// The binary's ignored tests with their reasons; none of its tests runs.
pub(crate) fn list_ignored(binary: &Executable) -> Result<Vec<IgnoredTest>> {
    let mut command = binary.command();
    command.args(["--list", "--ignored"]).args(events::ARGUMENTS).envs([events::UNSTABLE]);
    events::parse_list(&testbed::output(&mut command)?)
}

/// Adds the tests of a run. One that reports fewer tests than were selected, or does not end well, is a failure.
pub(crate) fn add_tests(
    name: &str,
    outcome: &CommandOutcome,
    selection: &TestSelection,
    report: &mut Report,
) {
    let run = TestRun::from_lines(outcome.lines.iter().map(String::as_str));
    let missing = match selection {
        _ if !run.is_complete => Some("ended without a result".to_owned()),
        TestSelection::Exactly(tests) => {
            let missing: Vec<_> = tests.iter().filter(|test| !run.has(test)).map(String::as_str).collect();
            (!missing.is_empty()).then(|| format!("did not run {}", missing.join(", ")))
        }
        TestSelection::Inside(_) | TestSelection::Matching(_) if run.tests.is_empty() => {
            Some("ran no test".into())
        }
        _ => None,
    };
    let failures = run.failures().count();
    // The exit status says no more than failed tests do.
    let problem = missing.or_else(|| outcome.problem.clone().filter(|_| failures == 0));
    for test in run.failures() {
        report.add_problem(format!("{name}: {} failed", test.name));
    }
    let failed = failures.max(usize::from(problem.is_some()));
    if let Some(problem) = problem {
        report.add_problem(format!("{name}: {problem}"));
    }
    let (passed, seconds) = (run.tests.len() - failures, outcome.elapsed.as_secs_f64());
    report.add_part(Part { name: name.into(), passed, failed, seconds, tests: run.tests });
}

fn run_examples(examples: &[Executable], report: &mut Report) {
    for example in examples {
        report.run_check(&format!("example {}", example.target), example.command(), EXAMPLE_WITHIN);
    }
}

fn run_doctests(packages: &[&str], report: &mut Report) {
    let outcome = doctest_command(packages)
        .and_then(|command| run_command(command, &report.log, events::show_event, BUILD_WITHIN));
    match outcome {
        Ok(outcome) => add_tests("doctests", &outcome, &TestSelection::Unignored, report),
        Err(error) => report.could_not_run("doctests", &format!("{error:#}")),
    }
}

fn doctest_command(packages: &[&str]) -> Result<std::process::Command> {
    let directory = workspace::target_directory().join("test");
    std::fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let rustdoc = directory.join("rustdoc");
    write_program(&rustdoc, RUSTDOC)?;
    let mut command = cargo(&["test", "--workspace", "--all-features", "--doc", "--no-fail-fast", "--"]);
    command.args(events::ARGUMENTS).env("RUSTDOC", rustdoc).env("NODEKEEL_DOCTESTS", packages.join(" "));
    Ok(command)
}

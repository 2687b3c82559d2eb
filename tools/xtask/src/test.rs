//! `cargo xtask test`: all tests on real daemons and kernels, with one summary.

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::host_leftovers::HostLeftovers;
use crate::report::{Part, Report};
use crate::run::{CommandOutcome, Log};
use crate::setup;
use crate::workspace::{self, Package};

pub(crate) mod binaries;
mod doctests;
pub(crate) mod events;
mod jobs;
pub(crate) mod lanes;
pub(crate) mod launch;
pub(crate) mod requirement;
pub(crate) mod sample;
mod since;

use binaries::{Build, Executable};
use events::{IgnoredTest, TestRun};
pub(crate) use jobs::run_process_rounds;
use launch::TestSelection;
use sample::Sample;
use since::{TestPlan, Tier};

/// Longer than a cold build takes.
const BUILD_WITHIN: Duration = Duration::from_secs(30 * 60);
/// Longer than any part takes, also beside other work: what exceeds it hangs.
const PART_WITHIN: Duration = Duration::from_secs(35 * 60);

/// `cargo test` has a minute; here these tests run whole.
const WHOLE_COUNTS: [(&str, &str); 2] = [("NODEKEEL_KILLS", "all"), ("NODEKEEL_LIVES", "10000")];

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Test the packages changed since COMMIT, and their dependents quickly
    ///
    /// A changed package runs all its tests; a package that depends on it runs those of `cargo test`. Changed
    /// documents run the tests that check documents. A change of Cargo.toml, Cargo.lock, .cargo,
    /// tools/testbed, or of another file outside the packages runs everything.
    #[arg(long, value_name = "COMMIT")]
    since: Option<String>,
    /// Also run what a run samples otherwise
    ///
    /// The longest tests, most of them in emulated guests, are sampled by commit: one of eight of each program runs.
    /// What is left out is printed, and NODEKEEL_SEED chooses another sample. With --since, those of a changed
    /// package run.
    #[arg(long)]
    whole: bool,
}

/// Installs what is missing, builds once, then runs every test, example and doctest that the plan has.
///
/// A test marked `#[ignore = "needs …"]` runs where its need is met; a need that can't be met is a failure.
/// `#[ignore = "soak…"]` leaves a test to `cargo xtask soak`; one for a guest is `#[ignore = "soak: needs kernel …"]`.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let packages = workspace::read_metadata()?.packages;
    let mut report = Report::new(Log::default());
    let plan = make_plan(arguments, &packages)?;
    if plan.is_empty() {
        return Ok(report.finish());
    }
    let build = prepare(&plan, &mut report)?;
    let before = HostLeftovers::find()?;
    let is_whole = arguments.whole || arguments.since.is_some();
    let sample = if is_whole { Sample::All } else { Sample::of_run()? };
    let jobs = jobs::plan_jobs(&build, (&plan, sample), &packages, &mut report);
    lanes::run_jobs(jobs, &mut report);
    let left = before.sweep()?;
    let problem = (!left.is_empty()).then(|| format!("left behind: {left:?}"));
    report.add_check("nothing is left behind", Duration::ZERO, problem);
    Ok(report.finish())
}

fn make_plan(arguments: &Arguments, packages: &[Package]) -> Result<TestPlan> {
    let Some(commit) = &arguments.since else { return Ok(since::plan_everything(packages)) };
    let files = since::changed_files(commit)?;
    let plan = since::plan(&files, packages, &workspace::root());
    println!("{} files have changed since {commit}", files.len());
    for (package, tier) in &plan {
        println!("  {package}: {}", if *tier == Tier::Whole { "all tests" } else { "quick tests" });
    }
    Ok(plan)
}

/// Installs and builds. Go downloads and links one program at a time, so its builds run beside cargo's.
fn prepare(plan: &TestPlan, report: &mut Report) -> Result<Build> {
    report.log.headline("setup");
    setup::install()?;
    let needs_tools = plan.values().any(|tier| *tier == Tier::Whole);
    let (tools, build) = thread::scope(|scope| {
        let tools = scope.spawn(|| if needs_tools { setup::build_go_tools() } else { Ok(()) });
        report.log.headline("build");
        // With all members, as an earlier run built them: other features of dependencies would be another
        // build.
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

/// The binary's ignored tests with their reasons; none of its tests runs.
pub(crate) fn list_ignored(binary: &Executable) -> Result<Vec<IgnoredTest>> {
    let mut command = binary.command();
    command.args(["--list", "--ignored"]).args(events::ARGUMENTS).envs([events::UNSTABLE]);
    events::parse_list(&testbed::command_output(&mut command)?)
}

/// Adds the tests of a run. One that reports fewer tests than were selected, or does not end well, is a
/// failure.
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
    let failed = failures.max(usize::from(problem.is_some()));
    let problems = run.failures().map(|test| format!("{} failed", test.name)).chain(problem);
    problems.for_each(|problem| report.add_problem(format!("{name}: {problem}")));
    let (passed, seconds) = (run.tests.len() - failures, outcome.elapsed.as_secs_f64());
    report.add_part(Part { name: name.into(), passed, failed, seconds, tests: run.tests });
}

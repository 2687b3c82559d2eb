//! `cargo xtask soak`: the random tests at counts that a test run has no time for.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::planted;
use crate::report::Report;
use crate::run::{self, Echo};

/// A test at its full count.
struct Soak {
    name: &'static str,
    /// Which test, as `cargo test` wants it.
    test: &'static [&'static str],
    /// The variable that the test reads its count from.
    count: (&'static str, &'static str),
}

const SOAKS: [Soak; 2] = [
    Soak {
        name: "supervisor-core",
        test: &[
            "-p",
            "nodekeel-supervisor",
            "--lib",
            "--",
            "random_operations_keep_the_invariants",
            "--nocapture",
        ],
        count: ("NODEKEEL_OPS", "5000000"),
    },
    Soak {
        name: "supervisor-process",
        test: &[
            "-p",
            "nodekeel-supervisor",
            "--test",
            "it",
            "--",
            "process::",
            "--include-ignored",
            "--nocapture",
        ],
        count: ("NODEKEEL_ROUNDS", "1000"),
    },
];

/// The bugs that the supervisor's random operations have to find.
const PLANTED: &str = "planted-bugs";
const WITHIN: Duration = Duration::from_secs(3600);

/// Runs the named one, or all.
pub(crate) fn run(name: Option<&str>) -> Result<ExitCode> {
    let is_chosen = |soak: &str| name.is_none_or(|name| name == soak);
    let chosen: Vec<&Soak> = SOAKS.iter().filter(|soak| is_chosen(soak.name)).collect();
    if chosen.is_empty() && !is_chosen(PLANTED) {
        let names: Vec<_> = SOAKS.iter().map(|soak| soak.name).chain([PLANTED]).collect();
        bail!("no such soak; there are: {}", names.join(", "));
    }
    let mut report = Report::default();
    if is_chosen(PLANTED) {
        planted::run(&mut report)?;
    }
    for soak in chosen {
        let (variable, count) = soak.count;
        run::headline(&format!("{} ({variable}={count})", soak.name));
        let mut command = run::cargo(&["test", "--all-features"]);
        command.args(soak.test).env(variable, count);
        let ran = run::stream(command, Echo::Shown, WITHIN)?;
        report.checked(soak.name, ran.took, ran.problem);
    }
    Ok(report.finish())
}

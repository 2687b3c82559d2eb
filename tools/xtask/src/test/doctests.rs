//! The doctests of the workspace's libraries, with each one's time.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result};
use testbed::write_program;

use super::launch::TestSelection;
use super::{BUILD_WITHIN, add_tests, events};
use crate::report::Report;
use crate::run::run_command;
use crate::workspace::{cargo, target_directory};

/// Stands in for rustdoc: says whose doctests follow, skips those of other packages, and lets a stable
/// harness write events. The variable is not set for cargo, whose build scripts watch it.
const RUSTDOC: &str = r#"#!/bin/sh
case " $NODEKEEL_DOCTESTS " in *" $CARGO_PKG_NAME "*) ;; *) exit 0 ;; esac
printf '{ "type": "package", "name": "%s" }\n' "$CARGO_PKG_NAME"
RUSTC_BOOTSTRAP=1 exec rustdoc "$@"
"#;

/// Runs the doctests of these packages.
pub(super) fn run(packages: &[&str], report: &mut Report) {
    let outcome = doctest_command(packages)
        .and_then(|command| run_command(command, &report.log, events::show_event, BUILD_WITHIN));
    match outcome {
        Ok(outcome) => add_tests("doctests", &outcome, &TestSelection::Unignored, report),
        Err(error) => report.could_not_run("doctests", &format!("{error:#}")),
    }
}

/// Builds with all members, as the run has built them: other features of dependencies would be another build.
fn doctest_command(packages: &[&str]) -> Result<Command> {
    let directory = target_directory().join("test");
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let rustdoc = directory.join("rustdoc");
    write_program(&rustdoc, RUSTDOC)?;
    let mut command = cargo(&["test", "--workspace", "--all-features", "--doc", "--no-fail-fast", "--"]);
    command.args(events::ARGUMENTS).env("RUSTDOC", rustdoc).env("NODEKEEL_DOCTESTS", packages.join(" "));
    Ok(command)
}

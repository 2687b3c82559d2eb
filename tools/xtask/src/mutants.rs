//! `cargo xtask soak mutants`: changes the state machines one place at a time, by cargo-mutants. A mutant that their
//! tests don't find is a rule that nothing checks.

use std::time::Duration;

use anyhow::Result;

use crate::report::Report;
use crate::setup;
use crate::workspace::{cargo, target_directory};

const CARGO_MUTANTS: &str = "cargo-mutants@27.1.0";
const WITHIN: Duration = Duration::from_secs(12 * 3600);

/// Each state machine: its package, its files, and the tests of the package that check it.
const MACHINES: [(&str, &str, &str); 2] = [
    ("nodekeel-supervisor", "supervisor/src/fsm/*.rs", "fsm::"),
    ("nodekeel-cluster", "cluster/src/enrolment/fsm.rs", "enrolment::"),
];

/// Runs the first of so many equal shares of the mutants.
pub(crate) fn run(shares: &str, report: &mut Report) -> Result<()> {
    setup::install_cargo_tool("mutants", CARGO_MUTANTS, &[])?;
    for (package, files, tests) in MACHINES {
        let mut command = cargo(&["mutants", "--no-shuffle", "--package", package, "--file", files]);
        command.arg("--output").arg(target_directory().join("mutants"));
        command.args(["--shard", &format!("0/{shares}"), "--features", "testing"]);
        command.args(["--", "--lib", tests]);
        report.run_check(&format!("mutants of {package}"), command, WITHIN);
    }
    Ok(())
}

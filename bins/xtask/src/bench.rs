//! `cargo xtask bench`: every bench, then one table of all.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use testbed::bench;

use crate::report::Report;
use crate::run::{self, Echo};
use crate::setup;

/// A bench and the package that has it.
struct Bench {
    /// Its name and that of its file in target/bench.
    name: &'static str,
    package: &'static str,
    target: &'static str,
}

const BENCHES: [Bench; 3] = [
    Bench { name: "supervisor", package: "nodekeel-supervisor", target: "supervisor" },
    Bench { name: "logtree", package: "nodekeel-logtree", target: "journal" },
    Bench { name: "idle", package: "nodekeel-node", target: "idle" },
];

const WITHIN: Duration = Duration::from_secs(1800);

/// Runs the named one, or all. A missed goal is no failure, a bench that did not run is.
pub(crate) fn run(name: Option<&str>) -> Result<ExitCode> {
    let chosen: Vec<&Bench> =
        BENCHES.iter().filter(|bench| name.is_none_or(|name| name == bench.name)).collect();
    if chosen.is_empty() {
        let names: Vec<_> = BENCHES.iter().map(|bench| bench.name).collect();
        bail!("no such bench; there are: {}", names.join(", "));
    }
    setup::install()?;
    let (mut report, mut rows) = (Report::default(), Vec::new());
    for Bench { name, package, target } in chosen {
        run::headline(name);
        let command = run::cargo(&["bench", "-p", package, "--bench", target]);
        let ran = run::stream(command, Echo::Shown, WITHIN)?;
        match bench::read(name) {
            Ok(of_this) => rows.extend(of_this),
            Err(error) => report.note(format!("{name}: {error:#}")),
        }
        report.checked(name, ran.took, ran.problem);
    }
    run::headline("all rows");
    println!("{}", bench::table(&rows));
    Ok(report.finish())
}

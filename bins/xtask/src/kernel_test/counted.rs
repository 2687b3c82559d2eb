//! Tests in a guest at a count that a test run has no time for.

use std::time::Duration;

use anyhow::Result;

use super::{BUILD_WITHIN, boot, job, name, narrowed, packages, stream};
use crate::report::Report;
use crate::run;
use crate::setup;
use crate::test::binaries;
use crate::test::judge;
use crate::test::ways::Selection;

/// Runs the tests whose `PACKAGE BINARY TEST` contains the filter with a variable set, in a guest of their own.
///
/// # Errors
/// When nothing can be built, or no guest can be had.
pub(crate) fn run(
    filter: &str,
    (variable, count): (&str, &str),
    deadline: Duration,
    report: &mut Report,
) -> Result<()> {
    setup::install()?;
    let built = binaries::build(&narrowed(packages(&run::metadata()?), Some(filter)), BUILD_WITHIN)?;
    report.checked("build", built.took, built.problem);
    for binary in built.binaries {
        let Some(job) = job(binary, Some(filter), report)? else { continue };
        let name = name(&job);
        run::headline(&format!("{name} ({variable}={count})"));
        let selection = Selection::Exactly(job.tests.clone());
        let mut command = job.binary.command();
        command.args(selection.arguments()).arg("--nocapture").env(variable, count);
        let guest = boot(&[job])?;
        let (ran, error) = stream(&guest, &command, deadline);
        judge(&name, &ran, &selection, report);
        error.inspect(|error| println!("{error:#}"));
    }
    Ok(())
}

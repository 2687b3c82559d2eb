//! Tests in a guest at a count that a test run has no time for.

use std::env;
use std::slice;
use std::time::Duration;

use anyhow::Result;

use super::{BUILD_WITHIN, boot, job, name, narrowed, packages, stream};
use crate::report::Report;
use crate::run;
use crate::setup;
use crate::test::binaries;
use crate::test::judge;
use crate::test::ways::Selection;

/// Runs the tests whose `PACKAGE BINARY TEST` contains the filter with a variable set: each in a guest of its own, within
/// its own time, so that one that hangs or fails says nothing of the others. A count that the caller has set wins.
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
    let count = env::var(variable).unwrap_or_else(|_| count.to_owned());
    let built = binaries::build(&narrowed(packages(&run::metadata()?), Some(filter)), BUILD_WITHIN)?;
    report.checked("build", built.took, built.problem);
    for binary in built.binaries {
        let Some(job) = job(binary, Some(filter), report)? else { continue };
        for test in &job.tests {
            let name = format!("{} {test}", name(&job));
            run::headline(&format!("{name} ({variable}={count})"));
            let selection = Selection::Exactly(vec![test.clone()]);
            let mut command = job.binary.command();
            command.args(selection.arguments()).arg("--nocapture").env(variable, &count);
            let guest = boot(slice::from_ref(&job))?;
            let (ran, error) = stream(&guest, &command, deadline);
            judge(&name, &ran, &selection, report);
            error.inspect(|error| println!("{error:#}"));
        }
    }
    Ok(())
}

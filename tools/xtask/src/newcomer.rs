//! `cargo xtask soak newcomer`: the README, as its reader follows it.
//!
//! The examples of the crates' documentation run from packages outside the workspace. The README's commands run in a bare
//! Debian chroot that has what the README names and nothing else, each with its time.

use anyhow::Result;

use crate::report::Report;

mod chroot;
pub(crate) mod examples;
mod markdown;

/// Runs both; of the README's commands those up to the first with the word `last`.
///
/// # Errors
/// The packages or the chroot can't be made.
pub(crate) fn run(last: &str, report: &mut Report) -> Result<()> {
    examples::run(report)?;
    chroot::run(last, report)
}

//! `reset`: resets a node that does not run.

use std::io::{self, Write as _};

use anyhow::{Context as _, bail};

use super::cli::ResetArgs;
use crate::client::describe_reset;
use crate::node::new_log_store;
use crate::plan::NodePlan;
use crate::reset::{OfflineReset, ResetError, ResetOptions};

/// Shows what a reset removes and keeps, asks, and performs it. Returns the lines to print.
pub(crate) fn reset_node(plan: NodePlan, args: &ResetArgs) -> anyhow::Result<String> {
    let log_store = new_log_store(&plan.config.log);
    // The cause is taken out of its variant: `exit_code` looks for its type.
    let reset = OfflineReset::open(plan, log_store).map_err(|error| match error {
        ResetError::Start(error) => error.into(),
        other => anyhow::Error::new(other),
    })?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("can't start the async runtime")?.block_on(async {
        let plan = reset.plan(ResetOptions::new(args.bootstrap, args.give_up_volume)).await?;
        let mut shown = plan.to_wire();
        if plan.is_empty() {
            return Ok(lines(&describe_reset(&shown)));
        }
        if !args.yes && !ask(&describe_reset(&shown)).context("can't ask")? {
            bail!("nothing was changed: type yes, or add --yes");
        }
        reset.perform(&plan).await?;
        shown.is_done = true;
        Ok(lines(&describe_reset(&shown)))
    })
}

fn lines(text: &[String]) -> String {
    text.iter().map(|line| format!("{line}\n")).collect()
}

/// Asks on stderr, so that the question does not mix with the output.
fn ask(plan: &[String]) -> io::Result<bool> {
    let mut terminal = io::stderr();
    write!(terminal, "{}Type yes to reset the node: ", lines(plan))?;
    terminal.flush()?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    Ok(answer.trim() == "yes")
}

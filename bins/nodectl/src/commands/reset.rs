//! `reset`: the node gives up its enrolment, and a data volume that is lost.

use std::io::{self, Write as _};
use std::time::Duration;

use nodekeel_node::client::describe_reset;
use nodekeel_node::v1::{ResetRequest, ResetResponse};
use serde_json::json;

use crate::api_client::ApiClient;
use crate::error::CommandError;
use crate::output::{Printer, escape_control};

/// Timeout of a reset: the cluster stops before, which may take its grace period and more.
const RESET_TIMEOUT: Duration = Duration::from_secs(120);

/// Give up the enrolment, or a lost volume
///
/// Shows what it removes and keeps, and asks. It removes the node's keys in its cluster, its copy of the cluster's data, and its
/// ticket; if the data volume is lost, the node's record of it. Other data and the keys of volumes stay. It can be repeated after
/// an interruption. If noded does not run: `noded reset`.
#[derive(Debug, clap::Args)]
pub(crate) struct ResetArgs {
    /// Reset without asking
    #[arg(long)]
    yes: bool,
    /// Let the node bootstrap a cluster again
    ///
    /// Removes the record that it has been in a cluster. Not for a node that is to join one.
    #[arg(long)]
    bootstrap: bool,
    /// Also give up a volume that stays closed
    ///
    /// For a volume that is there, and that no key opens any more. Its disk is erased by `nodectl storage erase` alone.
    #[arg(long)]
    give_up_volume: bool,
}

impl ResetArgs {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        api.raise_timeout(RESET_TIMEOUT);
        let mut request = ResetRequest {
            bootstrap_again: self.bootstrap,
            give_up_volume: self.give_up_volume,
            agreed: Vec::new(),
        };
        let planned = request.clone();
        let plan = api.call(async |client| client.reset(planned).await).await?;
        if plan.removes.is_empty() {
            return print(&plan, printer);
        }
        if !self.yes {
            print(&plan, printer)?;
            if !ask("reset the node")? {
                return Err(CommandError::NotAgreed);
            }
        }
        request.agreed = plan.removes;
        let done = api.call(async |client| client.reset(request).await).await?;
        print(&done, printer)
    }
}

fn print(reset: &ResetResponse, printer: &mut Printer) -> Result<(), CommandError> {
    if printer.is_json {
        let ResetResponse { removes, keeps, notes, is_done } = reset;
        return Ok(printer.print_json(
            &json!({ "removes": removes, "keeps": keeps, "notes": notes, "is_done": is_done }),
        )?);
    }
    describe_reset(reset).iter().try_for_each(|line| Ok(printer.print_line(&escape_control(line))?))
}

/// Asks on stderr, so that the question does not mix with the output.
pub(super) fn ask(action: &str) -> io::Result<bool> {
    let mut terminal = io::stderr();
    write!(terminal, "Type yes to {action}: ")?;
    terminal.flush()?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    Ok(answer.trim() == "yes")
}

//! nodectl, the operator's client of noded: see docs/nodectl.md.

mod api_client;
mod cli;
mod commands;
mod completion;
mod error;
mod output;
mod runnable;
mod time;
mod wire;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use nodekeel_node::client::format_chain;

use crate::api_client::ApiClient;
use crate::cli::{NodectlCli, NodectlCommand};
use crate::commands::NodeCommand;
use crate::error::CommandError;
use crate::output::Printer;

fn main() -> ExitCode {
    // First, since a shell that asks for completions must get nothing else.
    if completion::answer_shell(NodectlCli::command) {
        return ExitCode::SUCCESS;
    }
    let NodectlCli { socket, output, color, timeout, command } = NodectlCli::parse();
    let result = match command {
        NodectlCommand::Completion { shell } => completion::print_script(shell),
        NodectlCommand::Man { directory } => {
            clap_mangen::generate_to(NodectlCli::command(), directory).map_err(CommandError::from)
        }
        NodectlCommand::Node(command) => {
            // One connection needs no further threads.
            let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => {
                    let _ = writeln!(std::io::stderr(), "nodectl: can't start the async runtime: {error}");
                    return ExitCode::FAILURE;
                }
            };
            runtime.block_on(async {
                let api = ApiClient::connect(&socket, timeout).await?;
                call_node(command, api, Printer::new(output, color)).await
            })
        }
    };
    match result {
        // The output has named the problems.
        Err(error @ CommandError::NotHealthy) => error.exit_code(),
        Err(error) if !error.is_broken_pipe() => {
            // stderr may be closed.
            let _ = writeln!(std::io::stderr(), "nodectl: {}", format_chain(&error));
            error.exit_code()
        }
        // A reader that has closed the pipe, like `head`, has all that it wanted.
        _ => ExitCode::SUCCESS,
    }
}

/// Runs the command. The output of a command that fails is printed, too.
async fn call_node(
    command: NodeCommand,
    mut api: ApiClient,
    mut printer: Printer,
) -> Result<(), CommandError> {
    let done = command.run(&mut api, &mut printer).await;
    printer.flush()?;
    done
}

//! nodectl, the operator's client of noded: see docs/nodectl.md.

mod api_client;
mod cli;
mod commands;
mod completion;
mod contexts;
mod error;
mod output;
mod private_file;
mod runnable;
mod time;
mod wire;

use std::alloc::System;
use std::io::Write as _;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use nodekeel_node::client::format_chain;
use nodekeel_supervisor::process::protect_own_memory;
use zeroizing_alloc::ZeroAlloc;

use crate::api_client::ApiClient;
use crate::cli::{NodectlCli, NodectlCommand};
use crate::commands::NodeCommand;
use crate::contexts::find_endpoint;
use crate::error::{CommandError, usage_json};
use crate::output::{OutputFormat, Printer};

/// Erases each allocation when it is freed, also those of libraries: they copy keys.
#[global_allocator]
static ALLOCATOR: ZeroAlloc<System> = ZeroAlloc(System);

/// With the value 1, this environment variable permits core dumps, for debugging. They contain keys.
const CORE_DUMPS: &str = "NODEKEEL_CORE_DUMPS";

fn main() -> ExitCode {
    // First, since a shell that asks for completions must get nothing else.
    if completion::answer_shell(NodectlCli::command) {
        return ExitCode::SUCCESS;
    }
    // Tickets and passphrases pass through it.
    if std::env::var_os(CORE_DUMPS).is_none_or(|value| value != "1")
        && let Err(error) = protect_own_memory()
    {
        let _ = writeln!(
            std::io::stderr(),
            "nodectl: can't prevent core dumps, which would contain keys: {error}"
        );
    }
    let NodectlCli { socket, context, output, color, timeout, command } = match NodectlCli::try_parse() {
        Ok(line) => line,
        Err(error) if error.use_stderr() && cli::asks_for_json(std::env::args_os()) => {
            let _ = writeln!(std::io::stderr(), "{}", usage_json(error.to_string().trim_end()));
            return ExitCode::from(2);
        }
        Err(error) => error.exit(),
    };
    let result = match command {
        NodectlCommand::Completion { shell } => completion::print_script(shell),
        NodectlCommand::Key(command) => print(Printer::new(output, color), |printer| command.run(printer)),
        NodectlCommand::Context(command) => {
            print(Printer::new(output, color), |printer| command.run(printer))
        }
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
                let api = ApiClient::connect(find_endpoint(socket, context)?, timeout).await?;
                call_node(command, api, Printer::new(output, color)).await
            })
        }
    };
    match result {
        // The output has named the problems.
        Err(error @ CommandError::NotHealthy) => error.exit_code(),
        Err(error) if !error.is_broken_pipe() => {
            let text = match output {
                OutputFormat::Json => error.to_json(),
                OutputFormat::Table => format!("nodectl: {}", format_chain(&error)),
            };
            // stderr may be closed.
            let _ = writeln!(std::io::stderr(), "{text}");
            error.exit_code()
        }
        // A reader that has closed the pipe, like `head`, has all that it wanted.
        _ => ExitCode::SUCCESS,
    }
}

/// Runs a command that calls no node.
fn print(
    mut printer: Printer,
    run: impl FnOnce(&mut Printer) -> Result<(), CommandError>,
) -> Result<(), CommandError> {
    let done = run(&mut printer);
    printer.flush()?;
    done
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

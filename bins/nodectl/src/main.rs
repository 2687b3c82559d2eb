//! nodectl, the operator's client of noded: see docs/nodectl.md.

mod action;
mod api_client;
mod cli;
mod cluster;
mod command_error;
mod completion;
mod events;
mod health;
mod images;
mod log_level;
mod logs;
mod model;
mod output;
mod passphrase;
mod process_command;
mod reload;
mod status;
mod storage;
mod time;
mod tree;
mod tree_table;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use nodekeel_node::client::format_chain;
use nodekeel_node::v1::VersionRequest;

use crate::api_client::ApiClient;
use crate::cli::{NodectlCli, NodectlCommand};
use crate::command_error::CommandError;
use crate::model::Action;
use crate::output::Printer;

fn main() -> ExitCode {
    if completion::answer_shell() {
        return ExitCode::SUCCESS;
    }
    let cli = NodectlCli::parse();
    match &cli.command {
        NodectlCommand::Completion { shell } => return report_result(completion::print_script(*shell)),
        NodectlCommand::Man { directory } => {
            let written = clap_mangen::generate_to(NodectlCli::command(), directory);
            return report_result(written.map_err(CommandError::from));
        }
        _ => {}
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "nodectl: can't start the async runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    report_result(runtime.block_on(run_command(cli)))
}

/// Prints the error, and returns the exit code.
fn report_result(result: Result<(), CommandError>) -> ExitCode {
    match result {
        Err(error @ CommandError::NotHealthy) => error.exit_code(),
        Err(error) if !error.is_broken_pipe() => {
            // stderr may be closed.
            let _ = writeln!(std::io::stderr(), "nodectl: {}", format_chain(&error));
            error.exit_code()
        }
        _ => ExitCode::SUCCESS,
    }
}

async fn run_command(cli: NodectlCli) -> Result<(), CommandError> {
    let mut printer = Printer::new(&cli);
    let mut api = ApiClient::connect(&cli.socket, cli.timeout).await?;
    let done = call_node(cli.command, &mut api, &mut printer).await;
    printer.flush()?;
    done
}

async fn call_node(
    command: NodectlCommand,
    api: &mut ApiClient,
    printer: &mut Printer,
) -> Result<(), CommandError> {
    match command {
        NodectlCommand::Tree { watch: false } => tree::show_tree(api, printer).await?,
        NodectlCommand::Tree { watch: true } => tree::watch_tree(api, printer).await?,
        NodectlCommand::Status { dn: None } => status::show_node(api, printer).await?,
        NodectlCommand::Status { dn: Some(dn) } => status::show_runnable(api, dn, printer).await?,
        NodectlCommand::Health(args) => health::show_health(api, args, printer).await?,
        NodectlCommand::Logs(args) => logs::show_logs(api, args, printer).await?,
        NodectlCommand::LogLevel(args) => log_level::run_log_level(api, args, printer).await?,
        NodectlCommand::Events { follow, newest } => {
            events::show_events(api, follow, newest, printer).await?
        }
        NodectlCommand::Restart(args) => action::run_action(api, Action::Restart, args, printer).await?,
        NodectlCommand::Stop(args) => action::run_action(api, Action::Stop, args, printer).await?,
        NodectlCommand::Start(args) => action::run_action(api, Action::Start, args, printer).await?,
        NodectlCommand::Signal { dn, signal } => {
            process_command::send_signal(api, (dn, signal), printer).await?
        }
        NodectlCommand::Reload(args) => reload::run_reload(api, args, printer).await?,
        NodectlCommand::Cluster { command } => cluster::run_cluster(api, command, printer).await?,
        NodectlCommand::Storage { command } => storage::run_storage(api, command, printer).await?,
        NodectlCommand::Images(args) => images::show_images(api, args, printer).await?,
        NodectlCommand::Version => show_version(api, printer).await?,
        NodectlCommand::Completion { .. } | NodectlCommand::Man { .. } => {}
    }
    Ok(())
}

async fn show_version(api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
    let version =
        model::VersionView::from(api.call(async |client| client.version(VersionRequest {}).await).await?);
    if printer.is_json {
        return Ok(printer.print_json(&version)?);
    }
    Ok(printer
        .print_line(&format!("nodectl {}, noded {} (pid {})", version.nodectl, version.noded, version.pid))?)
}

//! nodectl, the operator's client of noded: see docs/nodectl.md.

mod act;
mod cli;
mod events;
mod failure;
mod logs;
mod model;
mod out;
mod status;
mod time;
mod tree;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use nodekeel_node::client;
use nodekeel_node::v1::VersionRequest;

use crate::act::Action;
use crate::cli::{Cli, Command};
use crate::failure::Failure;
use crate::out::Out;

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Command::Completion { shell } = cli.command {
        clap_complete::generate(shell, &mut Cli::command(), "nodectl", &mut std::io::stdout());
        return ExitCode::SUCCESS;
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "nodectl: start: {error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(run(cli)) {
        Err(failure) if !failure.is_broken_pipe() => {
            // Nobody may be there to read it.
            let _ = writeln!(std::io::stderr(), "nodectl: {}", failure.with_causes());
            failure.exit_code()
        }
        _ => ExitCode::SUCCESS,
    }
}

async fn run(cli: Cli) -> Result<(), Failure> {
    let mut out = Out::new(&cli);
    let mut client = client::connect(&cli.socket).await?;
    let (client, out) = (&mut client, &mut out);
    match cli.command {
        Command::Tree { watch: false } => tree::once(client, out).await?,
        Command::Tree { watch: true } => tree::watch(client, out).await?,
        Command::Status { dn: None } => status::of_node(client, out).await?,
        Command::Status { dn: Some(dn) } => status::of_dn(client, dn, out).await?,
        Command::Logs(args) => logs::run(client, args, out).await?,
        Command::Events { follow, newest } => events::run(client, follow, newest, out).await?,
        Command::Restart(args) => act::run(client, Action::Restart, args, out).await?,
        Command::Stop(args) => act::run(client, Action::Stop, args, out).await?,
        Command::Start(args) => act::run(client, Action::Start, args, out).await?,
        Command::Version => version(client, out).await?,
        Command::Completion { .. } => {}
    }
    Ok(out.flush()?)
}

async fn version(client: &mut client::Client, out: &mut Out) -> Result<(), Failure> {
    let version = model::Version::from(client.version(VersionRequest {}).await?.into_inner());
    if out.json {
        return Ok(out.json(&version)?);
    }
    Ok(out.line(&format!("nodectl {}, noded {} (pid {})", version.nodectl, version.noded, version.pid))?)
}

//! nodectl, the operator's client of noded: see docs/nodectl.md.

mod act;
mod caller;
mod cli;
mod cluster;
mod events;
mod failure;
mod images;
mod logs;
mod model;
mod out;
mod status;
mod time;
mod tree;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use nodekeel_node::v1::VersionRequest;

use crate::act::Action;
use crate::caller::Caller;
use crate::cli::{Cli, Command};
use crate::failure::Failure;
use crate::out::Out;

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Command::Completion { shell } = cli.command {
        return ended(complete(shell));
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "nodectl: start: {error}");
            return ExitCode::FAILURE;
        }
    };
    ended(runtime.block_on(run(cli)))
}

/// What the shell is told.
fn ended(result: Result<(), Failure>) -> ExitCode {
    match result {
        Err(failure) if !failure.is_broken_pipe() => {
            // Nobody may be there to read it.
            let _ = writeln!(std::io::stderr(), "nodectl: {}", failure.with_causes());
            failure.exit_code()
        }
        _ => ExitCode::SUCCESS,
    }
}

fn complete(shell: clap_complete::Shell) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "nodectl", &mut script);
    let mut out = std::io::stdout().lock();
    out.write_all(&script)?;
    Ok(out.flush()?)
}

async fn run(cli: Cli) -> Result<(), Failure> {
    let mut out = Out::new(&cli);
    let mut caller = Caller::connect(&cli.socket, cli.timeout).await?;
    let (caller, out) = (&mut caller, &mut out);
    match cli.command {
        Command::Tree { watch: false } => tree::once(caller, out).await?,
        Command::Tree { watch: true } => tree::watch(caller, out).await?,
        Command::Status { dn: None } => status::of_node(caller, out).await?,
        Command::Status { dn: Some(dn) } => status::of_dn(caller, dn, out).await?,
        Command::Logs(args) => logs::run(caller, args, out).await?,
        Command::Events { follow, newest } => events::run(caller, follow, newest, out).await?,
        Command::Restart(args) => act::run(caller, Action::Restart, args, out).await?,
        Command::Stop(args) => act::run(caller, Action::Stop, args, out).await?,
        Command::Start(args) => act::run(caller, Action::Start, args, out).await?,
        Command::Cluster { command } => cluster::run(caller, command, out).await?,
        Command::Images(args) => images::run(caller, args, out).await?,
        Command::Version => version(caller, out).await?,
        Command::Completion { .. } => {}
    }
    Ok(out.flush()?)
}

async fn version(caller: &mut Caller, out: &mut Out) -> Result<(), Failure> {
    let version =
        model::Version::from(caller.ask(async |client| client.version(VersionRequest {}).await).await?);
    if out.json {
        return Ok(out.json(&version)?);
    }
    Ok(out.line(&format!("nodectl {}, noded {} (pid {})", version.nodectl, version.noded, version.pid))?)
}

//! noded, the node program: see docs/noded.md. What it does is in the library, nodekeel-node.

mod cli;
mod console;
mod run;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use nodekeel_node::config::{Config, ConfigError, SHIPPED};
use nodekeel_node::data::DataError;
use nodekeel_node::node::StartError;
use nodekeel_node::plan::{Plan, Problems};
use nodekeel_node::search::Search;

use crate::cli::{Cli, Command, NodeArgs};

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Run { node, log_level } => plan(node).and_then(|plan| run::run(plan, log_level)),
        Command::Check { node } => plan(node).map(|plan| print(&plan.to_string())),
        Command::Config => Ok(print(SHIPPED)),
        Command::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "noded", &mut script);
            Ok(print(&String::from_utf8_lossy(&script)))
        }
    };
    done.unwrap_or_else(|error| {
        tell(&error);
        ExitCode::from(exit_code(&error))
    })
}

/// Says on stderr what went wrong. Whoever does not read it must not keep noded from ending.
fn tell(error: &anyhow::Error) {
    let text: String = format!("{error:#}").lines().map(|line| format!("noded: {line}\n")).collect();
    let (written, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || written.send(std::io::stderr().write_all(text.as_bytes())));
    let _ = wait.recv_timeout(console::ALLOWANCE);
}

/// Prints to stdout, where a reader that has seen enough is no failure.
fn print(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    }
}

/// What is to be run, where the environment is read.
fn plan(args: NodeArgs) -> anyhow::Result<Plan> {
    let mut config = match &args.config {
        Some(file) => Config::read(file)?,
        None => Config::parse(Path::new("the defaults"), "")?,
    };
    if let Some(data) = args.data {
        config.node.data = data;
    }
    let variable = std::env::var_os;
    let search = Search::from_lists(variable("NODEKEEL_BIN").as_deref(), variable("PATH").as_deref());
    Ok(Plan::make(config, search, args.dev)?)
}

/// What the shell is told; the codes are listed in the help.
fn exit_code(error: &anyhow::Error) -> u8 {
    match (error.downcast_ref::<Problems>(), error.downcast_ref::<StartError>()) {
        (Some(problems), _) if problems.in_use => 5,
        (_, Some(StartError::Data(DataError::InUse { .. }))) => 5,
        (Some(_), _) | (_, Some(StartError::Data(_) | StartError::Volumes(_) | StartError::Control(_))) => 4,
        _ if error.is::<ConfigError>() => 3,
        _ => 1,
    }
}

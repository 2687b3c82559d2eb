//! Per-node volumes with limits, for a cluster that is already there: see docs/provisionerd.md.

#[cfg(feature = "kill-points")]
mod books;
mod check;
mod cli;
mod cluster;
mod config;
#[cfg(test)]
mod deploy_test;
mod http;
#[cfg(feature = "kill-points")]
mod kill;
mod log;
mod metrics;
mod rights;
mod run;
mod volumes;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

use crate::cli::{Cli, Command};
use crate::config::ConfigError;
use crate::run::StartError;
use crate::volumes::VolumesError;

fn main() -> ExitCode {
    let cli = Cli::parse();
    if cli.print_config {
        return print(config::SHIPPED);
    }
    let done = match cli.command {
        Some(Command::Run { flags }) => flags.config().map_err(Into::into).and_then(run::run),
        Some(Command::Check { flags }) => flags.config().map_err(Into::into).and_then(check::check),
        Some(Command::Completion { shell }) => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "provisionerd", &mut script);
            Ok(print(&String::from_utf8_lossy(&script)))
        }
        None => Ok(print(&Cli::command().render_help().to_string())),
    };
    done.unwrap_or_else(|error: anyhow::Error| {
        // Whoever doesn't read it must not keep the program from ending.
        let _ = writeln!(std::io::stderr(), "provisionerd: {error:#}");
        ExitCode::from(exit_code(&error))
    })
}

/// Prints to stdout, where a reader that has seen enough is no failure.
fn print(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    }
}

/// What the shell is told; the codes are listed in the help.
fn exit_code(error: &anyhow::Error) -> u8 {
    match (error.downcast_ref::<VolumesError>(), error.downcast_ref::<StartError>()) {
        (Some(VolumesError::InUse { .. }), _) => 5,
        (Some(_), _) | (_, Some(_)) => 4,
        _ if error.is::<ConfigError>() => 3,
        _ => 1,
    }
}

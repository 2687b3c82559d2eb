//! dirquota, the limits of directory trees by hand: see docs/dirquota.md.

mod cli;
mod commands;
mod failure;
mod model;
mod out;
mod table;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};

use crate::cli::{Cli, Command};
use crate::failure::Failure;
use crate::out::Out;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Err(failure) if !failure.is_broken_pipe() => {
            // Nobody may be there to read it.
            let _ = writeln!(std::io::stderr(), "dirquota: {}", failure.with_causes());
            failure.exit_code()
        }
        _ => ExitCode::SUCCESS,
    }
}

fn run(cli: Cli) -> Result<(), Failure> {
    let mut out = Out::new(&cli);
    match cli.command {
        Command::Set(args) => commands::set(&args, &mut out)?,
        Command::Show { directories } => commands::show(&directories, &mut out)?,
        Command::List { mount } => commands::list(&mount, &mut out)?,
        Command::Clear { directory, recursive } => commands::clear(&directory, recursive, &mut out)?,
        Command::Release { mount } => commands::release(&mount, &mut out)?,
        Command::Check { mount } => commands::check(&mount, &mut out)?,
        Command::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "dirquota", &mut script);
            out.bytes(&script)?;
        }
    }
    Ok(out.flush()?)
}

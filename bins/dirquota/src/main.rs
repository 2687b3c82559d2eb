//! Sets and shows limits of directory trees: see docs/dirquota.md.

mod audit;
mod cli;
mod commands;
mod error;
mod output;
mod report;
mod table;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use nodekeel_fsquota::AuditOptions;

use crate::cli::{Cli, Command};
use crate::error::CommandError;
use crate::output::OutputWriter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run_command(cli) {
        Err(failure) if !failure.is_broken_pipe() => {
            // A closed stderr is not an error.
            let _ = writeln!(std::io::stderr(), "dirquota: {}", failure.with_causes());
            failure.exit_code()
        }
        // The reader of a pipe may end early, as `head` does.
        _ => ExitCode::SUCCESS,
    }
}

fn run_command(cli: Cli) -> Result<(), CommandError> {
    let mut out = OutputWriter::new(&cli);
    match cli.command {
        Command::Set(args) => commands::set_limits(&args, &mut out)?,
        Command::Show { directories } => commands::show_limits(&directories, &mut out)?,
        Command::List { mount } => commands::list_projects(&mount, &mut out)?,
        Command::Clear { directory, recursive } => commands::clear_limits(&directory, recursive, &mut out)?,
        Command::Release { mount } => commands::release_projects(&mount, &mut out)?,
        Command::Check { mount } => commands::check_quota(&mount, &mut out)?,
        Command::Audit { directory, repair, rate } => {
            let mut options = AuditOptions::default();
            (options.repair, options.entries_per_second) = (repair, rate);
            audit::audit_tree(&directory, options, &mut out)?;
        }
        Command::OwnerOf { project, mount } => audit::find_owner(project, &mount, &mut out)?,
        Command::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "dirquota", &mut script);
            out.write_bytes(&script)?;
        }
        Command::Man { directory } => clap_mangen::generate_to(Cli::command(), directory)?,
    }
    Ok(out.flush()?)
}

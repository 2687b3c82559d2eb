//! The command line.

use clap::{Parser, Subcommand};

use crate::config::Flags;

const EXIT_CODES: &str = "Exit codes: 0 done, or stopped cleanly; 1 failure; 2 wrong usage; 3 the configuration is wrong; \
    4 something needed is missing, taken or not permitted; 5 another instance uses the directory; \
    6 stopped, but something had to be given up on; 7 forced by a second signal.";

/// Per-node volumes with limits for Kubernetes: provisioner and CSI node plugin in one program.
#[derive(Debug, Parser)]
#[command(name = "provisionerd", version, after_help = EXIT_CODES, args_conflicts_with_subcommands = true)]
pub(crate) struct Cli {
    /// Print the commented default configuration
    #[arg(long)]
    pub(crate) print_config: bool,
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Make and destroy volumes for this node until SIGTERM, SIGINT or SIGHUP
    Run {
        #[command(flatten)]
        flags: Flags,
    },
    /// Say what is missing for `run`, and what to do about it; change nothing
    Check {
        #[command(flatten)]
        flags: Flags,
    },
    /// Print the completions for a shell
    Completion {
        /// Which one
        shell: clap_complete::Shell,
    },
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}

//! The command line of noded.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use nodekeel_logtree::Level;

const EXIT_CODES: &str = "Exit codes: 0 done, or stopped cleanly; 1 failure; 2 wrong usage; 3 the configuration is wrong; \
    4 something needed is missing, taken or not permitted; 5 another instance uses the data directory; \
    6 stopped, but something had to be given up on; 7 forced by a second signal.";

/// Runs a node: its place in a cluster, etcd, containerd, volumes and services of your own under one supervisor, with
/// their logs in one tree.
#[derive(Debug, Parser)]
#[command(name = "noded", version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Runs the node until SIGTERM, SIGINT or SIGHUP, which drain it; a second one, a second later, forces.
    Run {
        #[command(flatten)]
        node: NodeArgs,
        /// Log entries of this level and above go to stderr as well: trace, debug, info, warn, error, fatal or off.
        #[arg(long, value_name = "LEVEL", default_value = "warn", value_parser = console_level)]
        log_level: ConsoleLevel,
    },
    /// Says what `run` would do and what is missing; touches nothing.
    Check {
        #[command(flatten)]
        node: NodeArgs,
    },
    /// Prints the commented default configuration.
    Config,
    /// Prints the completions for a shell.
    Completion {
        /// Which one.
        shell: clap_complete::Shell,
    },
}

/// What is to be run.
#[derive(Debug, Args)]
pub(crate) struct NodeArgs {
    /// The configuration; without it, the defaults.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// The data directory, instead of the configuration's.
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Skips what can't be run here for want of a program, of root, of an API or of quotas, and says so.
    #[arg(long)]
    pub(crate) dev: bool,
}

/// What goes to stderr; `None` is nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConsoleLevel(pub(crate) Option<Level>);

fn console_level(text: &str) -> Result<ConsoleLevel, String> {
    match text {
        "off" => Ok(ConsoleLevel(None)),
        level => level
            .parse()
            .map(|level| ConsoleLevel(Some(level)))
            .map_err(|_| "use trace, debug, info, warn, error, fatal or off".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn a_wrong_level_is_answered_with_all_of_them() {
        for text in ["warn", "warning", "W"] {
            assert_eq!(console_level(text).map(|level| level.0), Ok(Some(Level::Warn)), "{text}");
        }
        let error = console_level("loud").expect_err("there is none");
        for level in Level::ALL {
            assert!(error.contains(level.as_str()), "{level}: {error}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}

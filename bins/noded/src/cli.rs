//! The command line of noded.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use nodekeel_logtree::Level;

const EXIT_CODES: &str = "Exit codes: 0 success, or graceful shutdown; 1 failure; 2 usage error; 3 invalid configuration; \
    4 a requirement is missing, in use or not permitted; 5 another instance uses the data directory; \
    6 stopped, but a runnable exceeded its stop timeout; 7 a second signal forced the exit.";

/// Run a node: etcd, containerd, volumes and your services
///
/// All of them run under one supervisor, with their logs in one tree.
#[derive(Debug, Parser)]
#[command(name = "noded", version, after_help = EXIT_CODES)]
pub(crate) struct NodedCli {
    #[command(subcommand)]
    pub(crate) command: NodedCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum NodedCommand {
    /// Run the node until a signal stops it
    ///
    /// SIGTERM, SIGINT and SIGHUP start a graceful shutdown; a second signal after 1 s forces exit.
    Run {
        #[command(flatten)]
        node: NodeArgs,
        /// Minimum level of log entries on stderr
        ///
        /// One of trace, debug, info, warn, error, fatal, off.
        #[arg(long, value_name = "LEVEL", default_value = "warn", value_parser = parse_console_level)]
        log_level: ConsoleLevel,
    },
    /// Print what `run` would start; changes nothing
    Check {
        #[command(flatten)]
        node: NodeArgs,
    },
    /// Print the commented default configuration
    Config,
    /// Print shell completions
    Completion {
        /// Shell
        shell: clap_complete::Shell,
    },
    /// Write man pages into a directory
    #[command(hide = true)]
    Man {
        /// Existing directory
        directory: PathBuf,
    },
}

/// Options of `run` and `check`.
#[derive(Debug, Args)]
pub(crate) struct NodeArgs {
    /// Configuration file; without it, the defaults apply
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Data directory; overrides the configuration
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Skip services with missing requirements
    ///
    /// A requirement is a program, root, an API or quotas. Each skipped service is logged.
    #[arg(long)]
    pub(crate) dev: bool,
}

/// The minimum level on stderr; `None` prints nothing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConsoleLevel(pub(crate) Option<Level>);

fn parse_console_level(text: &str) -> Result<ConsoleLevel, String> {
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
    fn an_invalid_log_level_is_answered_with_the_valid_ones() {
        for text in ["warn", "warning", "W"] {
            assert_eq!(parse_console_level(text).map(|level| level.0), Ok(Some(Level::Warn)), "{text}");
        }
        let error = parse_console_level("loud").expect_err("not a level");
        for level in Level::ALL {
            assert!(error.contains(level.as_str()), "{level}: {error}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        NodedCli::command().debug_assert();
    }
}

//! The command line of a node program.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Command, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use nodekeel_logtree::Level;

const EXIT_CODES: &str = "Exit codes: 0 success, or graceful shutdown; 1 failure; 2 usage error; 3 invalid configuration; \
    4 a requirement is missing, in use or not permitted; 5 another instance uses the data directory; \
    6 stopped, but a runnable exceeded its stop timeout; 7 a second signal forced the exit.";

#[derive(Debug, Parser)]
#[command(after_help = EXIT_CODES)]
struct ProgramCli {
    #[command(subcommand)]
    command: ProgramCommand,
}

/// The command line of the program of this name. The first line of `about` is for `-h`, and all of it for `help`.
pub(crate) fn command(name: &'static str, version: &'static str, about: &'static str) -> Command {
    let short = about.lines().next().unwrap_or_default();
    ProgramCli::command().name(name).version(version).about(short).long_about(about)
}

/// Parses the arguments; exits for help, and for those that are wrong.
pub(crate) fn parse(mut command: Command, arguments: Vec<OsString>) -> ProgramCommand {
    let parsed = command
        .try_get_matches_from_mut(arguments)
        .and_then(|matches| ProgramCli::from_arg_matches(&matches));
    parsed.unwrap_or_else(|error| error.format(&mut command).exit()).command
}

#[derive(Debug, Subcommand)]
pub(crate) enum ProgramCommand {
    /// Run the node until a signal stops it
    ///
    /// SIGTERM and SIGINT start a graceful shutdown; a second one after 1 s forces exit. SIGHUP reloads the configuration:
    /// only what has changed restarts.
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
        /// Print what a reload would change
        ///
        /// Asks the node that runs, over its control socket, what it would start, restart and stop with this configuration, and
        /// what needs a restart of the program.
        #[arg(long, conflicts_with = "dev")]
        running: bool,
    },
    /// Give up the enrolment, or a lost volume
    ///
    /// For a node that does not run; else `nodectl reset`. Shows what it removes and keeps, and asks. It removes the node's keys in
    /// its cluster, its copy of the cluster's data, and its ticket; if the data volume is lost, the node's record of it. Other data
    /// and the keys of volumes stay. It can be repeated after an interruption.
    Reset(ResetArgs),
    /// Print the commented default configuration
    Config,
    /// Print alert rules for Prometheus
    ///
    /// An object for the Prometheus operator, for nodes with [metrics] in their configuration, scraped as a job of the program's
    /// name. Prometheus itself reads its `spec` as a file of rules.
    Alerts,
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

/// Options of `reset`.
#[derive(Debug, Args)]
pub(crate) struct ResetArgs {
    #[command(flatten)]
    pub(crate) node: NodeArgs,
    /// Reset without asking
    #[arg(long)]
    pub(crate) yes: bool,
    /// Let the node bootstrap a cluster again
    ///
    /// Removes the record that it has been in a cluster. Not for a node that is to join one.
    #[arg(long)]
    pub(crate) bootstrap: bool,
    /// Also give up a volume that stays closed
    ///
    /// For a volume that is there, and that no key opens any more. Its disk is erased by `nodectl storage erase` alone.
    #[arg(long)]
    pub(crate) give_up_volume: bool,
}

/// Options of `run`, `check` and `reset`.
#[derive(Debug, Clone, Args)]
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

/// Splits the arguments of PID 1 into the program's and those that it ignores: the kernel hands each word of its command
/// line that it does not know to init, between and before the program's own.
///
/// *Source:* Linux `init/main.c`, `unknown_bootoption`.
pub(crate) fn split_init_arguments(
    program: &Command,
    arguments: Vec<OsString>,
) -> (Vec<OsString>, Vec<OsString>) {
    let mut command = program;
    // The first word is the name of the program, and is kept as if it were a value.
    let mut is_value = true;
    let is_own = |argument: &OsString| {
        let text = argument.to_string_lossy();
        let is_option = text.starts_with('-');
        let subcommand = command.find_subcommand(&*text).filter(|_| !is_value && !is_option);
        // After a subcommand with positional arguments, every word may be one of them.
        let is_own = is_value || is_option || subcommand.is_some() || command.get_positionals().count() > 0;
        is_value = !is_value && takes_value(command, &text);
        command = subcommand.unwrap_or(command);
        is_own
    };
    arguments.into_iter().partition(is_own)
}

/// Returns whether the argument is an option whose value is the next argument.
fn takes_value(command: &Command, argument: &str) -> bool {
    let named = |option: &&clap::Arg| option.get_long().is_some_and(|long| argument == format!("--{long}"));
    command.get_opts().find(named).is_some_and(|option| option.get_action().takes_values())
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
    fn words_of_the_kernels_command_line_are_split_from_arguments_of_the_program() {
        for (given, own, ignored) in [
            ("noded", "noded", ""),
            ("noded run", "noded run", ""),
            ("noded nokaslr run --config f --dev", "noded run --config f --dev", "nokaslr"),
            ("noded run nokaslr", "noded run", "nokaslr"),
            (
                "noded single run --data splash 3 --log-level=info quiet",
                "noded run --data splash --log-level=info",
                "single 3 quiet",
            ),
            ("noded run check run", "noded run", "check run"),
            ("noded completion bash", "noded completion bash", ""),
            ("noded run --confg f", "noded run --confg", "f"),
            ("noded nokaslr --help", "noded --help", "nokaslr"),
        ] {
            let split = split_init_arguments(
                &command("noded", "1", "Run"),
                given.split(' ').map(OsString::from).collect(),
            );
            let joined = |words: Vec<OsString>| words.join(" ".as_ref()).into_string().expect("UTF-8");
            assert_eq!((joined(split.0).as_str(), joined(split.1).as_str()), (own, ignored), "{given}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        command("noded", "1", "Run").debug_assert();
    }
}

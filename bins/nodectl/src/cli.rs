//! The command line: the options of all commands, and the commands.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};

use crate::commands::NodeCommand;
use crate::commands::context::ContextCommand;
use crate::commands::key::KeyCommand;
use crate::completion::complete_context;
use crate::output::{ColorMode, OutputFormat};

const EXIT_CODES: &str = "Exit codes: 0 success (also when the reader of the output closed the pipe), 1 failure, 2 usage \
    error, 3 node can't be reached, 4 unknown or ambiguous DN, 5 permission denied, 6 not healthy (health, status, cluster status, storage status), \
    or a --wait has ended.";

/// Inspect and control a node that noded runs
#[derive(Debug, Parser)]
#[command(name = "nodectl", version, after_help = EXIT_CODES)]
pub(crate) struct NodectlCli {
    /// Control socket of the node
    ///
    /// Also the variable NODEKEEL_SOCKET. Default: that of the current context, or /var/lib/nodekeel/run/control.sock.
    #[arg(long, global = true, value_name = "PATH", conflicts_with = "context")]
    pub(crate) socket: Option<PathBuf>,
    /// Context of a node on another machine
    ///
    /// Also the variable NODEKEEL_CONTEXT. `nodectl context list` prints them.
    #[arg(long, global = true, value_name = "NAME", add = complete_context())]
    pub(crate) context: Option<String>,
    /// Output format
    ///
    /// JSON is for programs: one value, or for a stream one value a line.
    #[arg(short, long, global = true, value_enum, default_value_t = OutputFormat::Table)]
    pub(crate) output: OutputFormat,
    /// Use of colors
    ///
    /// `auto`: on a terminal, unless NO_COLOR is set.
    #[arg(long, global = true, value_enum, default_value_t = ColorMode::Auto, value_name = "WHEN")]
    pub(crate) color: ColorMode,
    /// Request timeout
    #[arg(long, global = true, value_name = "SECONDS", default_value = "5", value_parser = parse_seconds)]
    pub(crate) timeout: Duration,
    #[command(subcommand)]
    pub(crate) command: NodectlCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum NodectlCommand {
    #[command(flatten)]
    Node(NodeCommand),
    /// Manage contexts of nodes on other machines
    #[command(subcommand)]
    Context(ContextCommand),
    /// Make and show keys of operators
    #[command(subcommand)]
    Key(KeyCommand),
    /// Print shell completions
    Completion { shell: clap_complete::Shell },
    /// Write man pages into a directory
    #[command(hide = true)]
    Man {
        /// Existing directory
        directory: PathBuf,
    },
}

/// Returns whether the words of a command line that can't be parsed ask for JSON.
pub(crate) fn asks_for_json(words: impl Iterator<Item = OsString>) -> bool {
    let words: Vec<_> = words.map(|word| word.to_string_lossy().into_owned()).collect();
    let in_one = |word: &String| matches!(word.as_str(), "-ojson" | "-o=json" | "--output=json");
    let in_two = |pair: &[String]| matches!(pair, [option, value] if ["-o", "--output"].contains(&option.as_str()) && value == "json");
    words.iter().any(in_one) || words.windows(2).any(in_two)
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.strip_suffix('s').unwrap_or(text).parse().ok();
    // This also rejects negative numbers, NaN and the infinite.
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.filter(|time| !time.is_zero()).ok_or_else(|| "use a number of seconds above 0".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        NodectlCli::command().debug_assert();
    }

    #[test]
    fn the_help_of_every_command_and_option_has_at_most_eight_words() {
        fn check(command: &clap::Command) {
            let options = command.get_arguments().filter_map(|argument| argument.get_help());
            for help in options.chain(command.get_about()) {
                let text = help.to_string();
                assert!(text.split_whitespace().count() <= 8, "{}: {text}", command.get_name());
            }
            command.get_subcommands().for_each(check);
        }
        check(&NodectlCli::command());
    }

    #[test]
    fn a_ticket_is_revoked_by_its_former_verb_too() {
        for verb in ["revoke", "withdraw"] {
            let line = ["nodectl", "cluster", "ticket", verb, "--address", "192.0.2.8"];
            assert!(NodectlCli::try_parse_from(line).is_ok(), "{verb}");
        }
    }
}

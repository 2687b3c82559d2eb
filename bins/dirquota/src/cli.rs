//! The command line.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};
use nodekeel_fsquota::{Bytes, Inodes, Limit};

const EXIT_CODES: &str = "Exit codes: 0 done (also when the reader of the output went away), 1 failure, 2 wrong usage, \
    3 the file system has no limits that bind (the message says what to mount how), 4 there is no such directory, or it \
    has no limits, 5 no permission.";

const ESCAPE: &str = "Limits are project quotas of XFS or ext4. They hold for whoever is in a user namespace of their own. \
    Outside of one, the owner of a file can take it out of its project and so out of the limits, and on ext4 whoever has \
    CAP_SYS_RESOURCE is not bound at all.";

/// Sets and shows the limits of directory trees, in bytes and in inodes.
#[derive(Debug, Parser)]
#[command(name = "dirquota", version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// For people, or for programs: one value of JSON.
    #[arg(short, long, global = true, value_enum, default_value_t = Format::Table)]
    pub(crate) output: Format,
    /// Colours; `auto` is on a terminal, unless NO_COLOR is set.
    #[arg(long, global = true, value_enum, default_value_t = Color::Auto, value_name = "WHEN")]
    pub(crate) color: Color,
    /// Says nothing about what the limits do not protect from.
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Table,
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Color {
    Auto,
    Always,
    Never,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Sets the limits of a directory and of all that is made in it.
    #[command(after_help = ESCAPE)]
    Set(SetArgs),
    /// Shows the limits and the usage of directories.
    Show {
        /// Directories; one inside a limited one shows that one's.
        #[arg(required = true, value_name = "DIR")]
        directories: Vec<PathBuf>,
    },
    /// Shows every project of a file system, also those that others have made.
    List {
        /// Where it is mounted, or any directory of it.
        mount: PathBuf,
    },
    /// Takes the limits from a directory.
    Clear {
        /// A directory that has limits of its own.
        #[arg(value_name = "DIR")]
        directory: PathBuf,
        /// Also where it is not empty: what is in it loses its project, too.
        #[arg(short, long)]
        recursive: bool,
    },
    /// Lets go of the limits whose directories have been removed.
    Release {
        /// Where the file system is mounted, or any directory of it.
        mount: PathBuf,
    },
    /// Tells whether limits would bind, and if not, what to mount how.
    Check {
        /// Where the file system is mounted, or any directory of it.
        mount: PathBuf,
    },
    /// Prints the completions for a shell.
    Completion { shell: clap_complete::Shell },
}

#[derive(Debug, Args)]
pub(crate) struct SetArgs {
    /// The directory; it has to be empty when it gets its first limit, unless --recursive is given.
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// At most so many bytes, as 10Gi, 1.5G or 4096, or `none`; without it, this limit stays.
    #[arg(short, long, value_name = "QUANTITY", value_parser = limit::<Bytes>, required_unless_present = "inodes")]
    pub(crate) bytes: Option<Limit<Bytes>>,
    /// At most so many files and directories, itself among them, as 100k, or `none`; without it, this limit stays.
    #[arg(short, long, value_name = "QUANTITY", value_parser = limit::<Inodes>)]
    pub(crate) inodes: Option<Limit<Inodes>>,
    /// Also where it is not empty: what is in it is counted, too. Follows no symbolic link and stays on the file system.
    #[arg(short, long)]
    pub(crate) recursive: bool,
}

fn limit<T: FromStr>(text: &str) -> Result<Limit<T>, T::Err> {
    if text == "none" { Ok(Limit::Unlimited) } else { text.parse().map(Limit::At) }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_limit_is_kept_lifted_or_set() {
        let parse = |args: &[&str]| {
            let line = ["dirquota", "set", "/d"].iter().chain(args);
            match Cli::try_parse_from(line).map(|cli| cli.command) {
                Ok(Command::Set(args)) => Some((args.bytes, args.inodes)),
                _ => None,
            }
        };
        assert_eq!(parse(&["--bytes", "10Gi"]), Some((Some(Limit::At(Bytes(10 << 30))), None)));
        assert_eq!(parse(&["--inodes", "none"]), Some((None, Some(Limit::Unlimited))));
        assert_eq!(parse(&[]), None, "nothing to set");
        assert_eq!(parse(&["--bytes", "much"]), None);
    }
}

//! The command line.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};
use nodekeel_fsquota::{Bytes, Inodes, LimitChange, ProjectId};

const EXIT_CODES: &str = "Exit codes: 0 success (also if the reader of the output closed the pipe), 1 failure, 2 usage \
    error, 3 the file system does not enforce project quotas or is read-only (the message has what to run), 4 the directory \
    does not exist or has no limits, 5 permission denied, 6 an audit found content that does not count where it lies, and \
    did not repair it.";

const LIMITS_NOTE: &str = "Limits are project quotas of XFS or ext4. They bind processes in a separate user namespace. \
    Outside of one, the owner of a file can remove it from its project and so from the limits, and on ext4 a process \
    with CAP_SYS_RESOURCE is not bound at all.";

const AUDIT_NOTE: &str = "A limited directory of an unknown owner, and what lies in it, is reported and never changed. `set` gives a directory \
    that was limited by another program or an earlier release its own project, or marks it as the owner.";

/// Set and show limits of directory trees
#[derive(Debug, Parser)]
#[command(name = "dirquota", version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// Output format
    ///
    /// `json` prints one value.
    #[arg(short, long, global = true, value_enum, default_value_t = OutputFormat::Table)]
    pub(crate) output: OutputFormat,
    /// Use of colors
    ///
    /// `auto`: on a terminal, unless NO_COLOR is set.
    #[arg(long, global = true, value_enum, default_value_t = ColorMode::Auto, value_name = "WHEN")]
    pub(crate) color: ColorMode,
    /// Suppress warnings
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    Table,
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorMode {
    Auto,
    Always,
    Never,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Set the limits of a directory tree
    #[command(after_help = LIMITS_NOTE)]
    Set(SetArgs),
    /// Show limits and usage of directories
    Show {
        /// Directories, limited or inside limited ones
        #[arg(required = true, value_name = "DIR")]
        directories: Vec<PathBuf>,
    },
    /// List all projects of a file system
    ///
    /// Also those of other programs.
    List {
        /// Mount point, or any directory on it
        mount: PathBuf,
    },
    /// Remove the limits of a directory
    Clear {
        /// A directory with limits
        #[arg(value_name = "DIR")]
        directory: PathBuf,
        /// Clear a non-empty directory, too
        ///
        /// Its content leaves the project.
        #[arg(short, long)]
        recursive: bool,
    },
    /// Release quotas of deleted directories
    Release {
        /// Mount point, or any directory on it
        mount: PathBuf,
    },
    /// Check that project quotas are enforced
    ///
    /// If they are not, the error has the mount options that are needed.
    Check {
        /// Mount point, or any directory on it
        mount: PathBuf,
    },
    /// Find content that counts for other directories
    #[command(after_help = AUDIT_NOTE)]
    Audit {
        /// A limited directory, or the mount point
        ///
        /// From the mount point, the audit knows the owners of all projects.
        #[arg(value_name = "DIR")]
        directory: PathBuf,
        /// Repair what the audit finds
        ///
        /// Content that has escaped counts for its directory again; content in another place leaves the project.
        #[arg(long)]
        repair: bool,
        /// Maximum number of inspected entries per second
        #[arg(long, value_name = "NUMBER")]
        rate: Option<NonZeroU32>,
    },
    /// Find the directory of a project
    OwnerOf {
        /// Project, as `list` prints it
        #[arg(value_parser = parse_project)]
        project: ProjectId,
        /// Mount point, or the directory to search
        mount: PathBuf,
    },
    /// Print shell completions
    Completion { shell: clap_complete::Shell },
    /// Write man pages into a directory
    #[command(hide = true)]
    Man {
        /// Existing directory
        directory: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(crate) struct SetArgs {
    /// Directory to limit
    ///
    /// It must be empty for its first limit, unless --recursive is set.
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// Byte limit like 10Gi or 4096, or `none`
    ///
    /// Unchanged if not set.
    #[arg(short, long, value_name = "QUANTITY", value_parser = parse_limit::<Bytes>, required_unless_present = "inodes")]
    pub(crate) bytes: Option<LimitChange<Bytes>>,
    /// Limit of entries like 100k, or `none`
    ///
    /// Files and directories, including DIR. Unchanged if not set.
    #[arg(short, long, value_name = "QUANTITY", value_parser = parse_limit::<Inodes>)]
    pub(crate) inodes: Option<LimitChange<Inodes>>,
    /// Limit a non-empty directory, too
    ///
    /// Its content is counted. Symbolic links are not followed, and mounts are not entered.
    #[arg(short, long)]
    pub(crate) recursive: bool,
}

fn parse_project(text: &str) -> Result<ProjectId, String> {
    let number = text.parse().map_err(|error| format!("{error}"))?;
    ProjectId::new(number).ok_or_else(|| "not a project: use a number that `list` prints".to_owned())
}

fn parse_limit<T: FromStr>(text: &str) -> Result<LimitChange<T>, T::Err> {
    if text == "none" { Ok(LimitChange::Unlimited) } else { text.parse().map(LimitChange::Set) }
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
        assert_eq!(parse(&["--bytes", "10Gi"]), Some((Some(LimitChange::Set(Bytes(10 << 30))), None)));
        assert_eq!(parse(&["--inodes", "none"]), Some((None, Some(LimitChange::Unlimited))));
        assert_eq!(parse(&[]), None, "nothing to set");
        assert_eq!(parse(&["--bytes", "much"]), None);
    }
}

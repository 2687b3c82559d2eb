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

/// Set and show byte and inode limits of directory trees.
#[derive(Debug, Parser)]
#[command(name = "dirquota", version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// Output format; `json` prints one value.
    #[arg(short, long, global = true, value_enum, default_value_t = OutputFormat::Table)]
    pub(crate) output: OutputFormat,
    /// Colors; `auto`: on a terminal, unless NO_COLOR is set.
    #[arg(long, global = true, value_enum, default_value_t = ColorMode::Auto, value_name = "WHEN")]
    pub(crate) color: ColorMode,
    /// Suppress warnings.
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
    /// Set the limits of a directory tree.
    #[command(after_help = LIMITS_NOTE)]
    Set(SetArgs),
    /// Show limits and usage of directories.
    Show {
        /// Directories; inside a limited directory, its limits are shown.
        #[arg(required = true, value_name = "DIR")]
        directories: Vec<PathBuf>,
    },
    /// List all projects of a file system, also those of other programs.
    List {
        /// Mount point, or any directory on it.
        mount: PathBuf,
    },
    /// Remove the limits of a directory.
    Clear {
        /// A directory with limits.
        #[arg(value_name = "DIR")]
        directory: PathBuf,
        /// Also for a non-empty directory: its content leaves the project, too.
        #[arg(short, long)]
        recursive: bool,
    },
    /// Release quotas of deleted directories.
    Release {
        /// Mount point, or any directory on it.
        mount: PathBuf,
    },
    /// Check whether project quotas are enforced; print the mount options needed.
    Check {
        /// Mount point, or any directory on it.
        mount: PathBuf,
    },
    /// Find content that does not count where it lies.
    #[command(after_help = AUDIT_NOTE)]
    Audit {
        /// A limited directory, or the mount point, to know the owners of all projects.
        #[arg(value_name = "DIR")]
        directory: PathBuf,
        /// Return what escaped to the limits of its directory, and remove what lies elsewhere from its project.
        #[arg(long)]
        repair: bool,
        /// Maximum number of inspected files and directories per second.
        #[arg(long, value_name = "NUMBER")]
        rate: Option<NonZeroU32>,
    },
    /// Find the directory of a project.
    OwnerOf {
        /// Project, as `list` prints it.
        #[arg(value_parser = parse_project)]
        project: ProjectId,
        /// Mount point, or the directory to search.
        mount: PathBuf,
    },
    /// Print shell completions.
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
    /// Directory; must be empty for its first limit, unless --recursive is set.
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// Byte limit, such as 10Gi, 1.5G or 4096, or `none`; unchanged if not set.
    #[arg(short, long, value_name = "QUANTITY", value_parser = parse_limit::<Bytes>, required_unless_present = "inodes")]
    pub(crate) bytes: Option<LimitChange<Bytes>>,
    /// Limit of files and directories, including DIR, such as 100k, or `none`; unchanged if not set.
    #[arg(short, long, value_name = "QUANTITY", value_parser = parse_limit::<Inodes>)]
    pub(crate) inodes: Option<LimitChange<Inodes>>,
    /// Also for a non-empty directory: its content is counted, too. Does not follow symbolic links, enters
    /// no mount.
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

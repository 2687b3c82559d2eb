//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::agent::AgentFlags;
use crate::check::CheckStoreFlags;
use crate::config::ConfigFlags;
use crate::disk_process::DiskFlags;
use crate::import::ImportFlags;
use crate::orphans_cmd::OrphansFlags;
use crate::seccomp::InstallFlags;
use crate::store_cmd::StoreCommand;
use crate::volumes_cmd::VolumesFlags;

const EXIT_CODES: &str = "Exit codes: 0 success, or graceful shutdown; 1 failure; 2 usage error; 3 invalid configuration; \
    4 a requirement is missing, in use or not permitted; 5 another instance uses the directory, or serves the driver; \
    6 stopped, but a runnable exceeded its stop timeout; 7 a second signal forced the exit.";

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
    /// Provision volumes for this node until SIGTERM, SIGINT or SIGHUP
    Run {
        #[command(flatten)]
        flags: ConfigFlags,
    },
    /// Check the requirements of `run`; change nothing
    Check {
        #[command(flatten)]
        flags: ConfigFlags,
    },
    /// Turn a directory into the volume of a claim
    Import {
        #[command(flatten)]
        flags: ImportFlags,
    },
    /// Install the seccomp profile nodekeel-limits.json for pods
    InstallSeccomp {
        #[command(flatten)]
        flags: InstallFlags,
    },
    /// Look after what no node can do for itself, once in a cluster
    Agent {
        #[command(flatten)]
        flags: AgentFlags,
    },
    /// List the volumes of this node
    Volumes(Box<VolumesFlags>),
    /// List, adopt or remove volumes without a PersistentVolume
    Orphans(OrphansFlags),
    /// Show the store on the disk, or declare one lost
    Store {
        #[command(subcommand)]
        command: StoreCommand,
    },
    /// Read a store for `volumes`
    #[command(hide = true)]
    ReadStore(DiskFlags),
    /// Check a store for `check`
    #[command(hide = true)]
    CheckStore(CheckStoreFlags),
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

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}

//! The command line.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use nodekeel_logtree::Level;
use nodekeel_node::client::DEFAULT_SOCKET;

const EXIT_CODES: &str = "Exit codes: 0 done (also when the reader of the output went away), 1 failure, 2 wrong usage, \
    3 the node can't be reached, 4 there is no such DN, 5 no permission.";

/// The operator's client of noded: looks at a node's tree, its log and its events, and acts on its services.
#[derive(Debug, Parser)]
#[command(name = "nodectl", version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// The node's control socket.
    #[arg(long, env = "NODEKEEL_SOCKET", global = true, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,
    /// For people, or for programs: JSON, one value or, where the output is a stream, one value a line.
    #[arg(short, long, global = true, value_enum, default_value_t = Format::Table)]
    pub(crate) output: Format,
    /// Colours; `auto` is on a terminal, unless NO_COLOR is set.
    #[arg(long, global = true, value_enum, default_value_t = Color::Auto, value_name = "WHEN")]
    pub(crate) color: Color,
    /// How long an answer is waited for.
    #[arg(long, global = true, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub(crate) timeout: Duration,
    #[command(subcommand)]
    pub(crate) command: Command,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.strip_suffix('s').unwrap_or(text).parse().ok();
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.filter(|time| !time.is_zero()).ok_or_else(|| "give a number of seconds above 0".to_owned())
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
    /// Shows all runnables with their states.
    Tree {
        /// Goes on, and shows the tree anew whenever it changes.
        #[arg(short, long)]
        watch: bool,
    },
    /// Shows why something is not ready, and how it ended before; without a DN, of the whole node.
    Status {
        /// A name in the tree, like root.etcd.
        dn: Option<String>,
    },
    /// Shows log entries.
    Logs(LogsArgs),
    /// Shows what happened in the tree.
    Events {
        /// Goes on with what comes.
        #[arg(short, long)]
        follow: bool,
        /// Only the newest N that are kept.
        #[arg(short = 'n', long, value_name = "N")]
        newest: Option<u64>,
    },
    /// Stops a runnable and all below it, and starts it at once.
    Restart(ActArgs),
    /// Stops a runnable and all below it, and keeps it stopped.
    Stop(ActArgs),
    /// Starts what was stopped, waits for its backoff, or has ended.
    Start(ActArgs),
    /// Shows the node's cluster, and makes tickets for nodes that are to join it.
    Cluster {
        #[command(subcommand)]
        command: ClusterCommand,
    },
    /// Shows the images of the node's containerd, or imports some from an archive.
    Images(ImagesArgs),
    /// Tells the versions of nodectl and of the node.
    Version,
    /// Prints the completions for a shell.
    Completion { shell: clap_complete::Shell },
}

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// A name in the tree, like root.etcd; without it, the whole log.
    pub(crate) dn: Option<String>,
    /// Goes on with what comes.
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Also of everything below the DN.
    #[arg(short, long)]
    pub(crate) children: bool,
    /// Only the newest N that are kept; 0 with -f shows only what comes.
    #[arg(short = 'n', long, value_name = "N")]
    pub(crate) newest: Option<u64>,
    /// Only of this level and above; raw lines have none and are left out.
    #[arg(long, value_name = "LEVEL", conflicts_with = "raw")]
    pub(crate) min_level: Option<Level>,
    /// Only raw lines.
    #[arg(long, conflicts_with = "leveled")]
    pub(crate) raw: bool,
    /// Only entries with a level.
    #[arg(long)]
    pub(crate) leveled: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ImagesArgs {
    /// In which of containerd's namespaces.
    #[arg(long, default_value = "k8s.io")]
    pub(crate) namespace: String,
    /// Imports an archive first, an OCI layout or a docker-archive, raw, gzip or zstd, and shows what it has brought.
    #[arg(long, value_name = "FILE")]
    pub(crate) import: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Shows how far the node is on its way into its cluster, and who it is there.
    Status,
    /// Shows the cluster's members.
    Members,
    /// Tickets by which other nodes join.
    Ticket {
        #[command(subcommand)]
        command: TicketCommand,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum TicketCommand {
    /// Makes a ticket for one node, or gives the one that was made for the same place and not used yet.
    Create(TicketArgs),
    /// Takes a ticket back that was not used: nobody joins by it any more, and its place is free for another.
    Withdraw(WithdrawArgs),
}

#[derive(Debug, Args)]
pub(crate) struct WithdrawArgs {
    /// The address that the ticket was made for.
    #[arg(long)]
    pub(crate) address: IpAddr,
    /// Its port; the default is that of the node that is asked.
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub(crate) port: u16,
}

#[derive(Debug, Args)]
pub(crate) struct TicketArgs {
    /// A golden ticket: it holds the node's keys, so whoever has read it is that node. The node that is asked must allow
    /// it (cluster.golden_tickets).
    #[arg(long, required = true)]
    pub(crate) golden: bool,
    /// Where the other members will reach the node.
    #[arg(long)]
    pub(crate) address: IpAddr,
    /// Its port for the other members; the default is that of the node that is asked.
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub(crate) port: u16,
    /// Where the ticket is put; nothing may be there.
    #[arg(long)]
    pub(crate) file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct ActArgs {
    /// A name in the tree, like root.etcd.
    pub(crate) dn: String,
    /// Waits until it is ready, or stopped.
    #[arg(short, long)]
    pub(crate) wait: bool,
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

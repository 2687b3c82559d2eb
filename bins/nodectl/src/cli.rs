//! The command line.

mod storage;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::{Args, Parser, Subcommand, ValueEnum};
use nodekeel_logtree::{Level, LogCursor};
use nodekeel_node::client::DEFAULT_SOCKET;

use crate::completion::complete_dn;

pub(crate) use storage::{PassphraseArgs, PermitArgs, RecoveryArgs, StorageCommand};

const EXIT_CODES: &str = "Exit codes: 0 success (also when the reader of the output closed the pipe), 1 failure, 2 usage \
    error, 3 node can't be reached, 4 unknown DN, 5 permission denied, 6 not healthy (health, status, cluster status, storage status).";

/// Inspect and control a node that noded runs
#[derive(Debug, Parser)]
#[command(name = "nodectl", version, after_help = EXIT_CODES)]
pub(crate) struct NodectlCli {
    /// Control socket of the node
    #[arg(long, env = "NODEKEEL_SOCKET", global = true, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,
    /// Output format
    ///
    /// JSON is for programs: one value, or for a stream one value a line.
    #[arg(short, long, global = true, value_enum, default_value_t = OutputFormat::Table)]
    pub(crate) output: OutputFormat,
    /// When to use colors
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

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.strip_suffix('s').unwrap_or(text).parse().ok();
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.filter(|time| !time.is_zero()).ok_or_else(|| "use a number of seconds above 0".to_owned())
}

fn parse_since(text: &str) -> Result<SystemTime, String> {
    if let Ok(time) = text.parse::<jiff::Timestamp>() {
        return Ok(time.into());
    }
    let ago = text.parse::<jiff::SignedDuration>().ok().and_then(|ago| Duration::try_from(ago).ok());
    ago.and_then(|ago| SystemTime::now().checked_sub(ago))
        .ok_or_else(|| "use a time like 2026-11-21T11:23:42Z or a duration like 10m".to_owned())
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    let duration = text.parse::<jiff::SignedDuration>().ok().and_then(|time| Duration::try_from(time).ok());
    duration.ok_or_else(|| "use a duration like 30s or 5m".to_owned())
}

fn parse_field(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("use NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
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
pub(crate) enum NodectlCommand {
    /// List all runnables with their states
    Tree {
        /// Watch: print the tree whenever it changes
        #[arg(short, long)]
        watch: bool,
    },
    /// Show why runnables are not ready
    ///
    /// Also shows their last exits. Without a DN, shows the whole node, and exits with 6 unless it is healthy: see
    /// health. With one, exits with 6 if the runnable is not ready, or restarts in a crash loop.
    Status {
        /// Name in the tree, like root.etcd
        #[arg(add = complete_dn())]
        dn: Option<String>,
    },
    /// Show what is not well, and what to type
    ///
    /// Every part of the node answers: what is wrong, since when, waiting for whom. Exits with 6 if something is a
    /// problem; warnings alone are healthy.
    Health(HealthArgs),
    /// Show log entries
    Logs(LogsArgs),
    /// Show or set minimum levels of log entries
    ///
    /// Without a DN, lists the levels that are set, and how many entries were not kept because of them. A level holds for
    /// a DN and everything below it that has no other, until noded exits; the key `log.levels` lasts. Entries below it
    /// are not kept. Raw lines have no level, and are kept.
    LogLevel(LogLevelArgs),
    /// Show starts, exits and other events
    Events {
        /// Wait for new entries
        #[arg(short, long)]
        follow: bool,
        /// Only the newest N kept events
        #[arg(short = 'n', long, value_name = "N")]
        newest: Option<u64>,
    },
    /// Restart a runnable and everything below it
    Restart(ActionArgs),
    /// Stop a runnable and everything below it
    Stop(ActionArgs),
    /// Start a stopped, waiting or exited runnable
    Start(ActionArgs),
    /// Send a signal to a service's main process
    Signal {
        /// Name in the tree, like root.service.web
        #[arg(add = complete_dn())]
        dn: String,
        /// Name or number, like SIGHUP
        signal: String,
    },
    /// Reload the node's configuration, or a service's
    ///
    /// Without a DN, noded reads its file again and restarts only what has changed; exits with 1, and nothing changes,
    /// if the file is invalid or if a change needs a restart of noded. With a DN, the service reloads by the signal or the
    /// command of its key reload.
    Reload(ReloadArgs),
    /// Show the cluster, and manage join tickets
    Cluster {
        #[command(subcommand)]
        command: ClusterCommand,
    },
    /// Show the data volume, and manage its keys
    Storage {
        #[command(subcommand)]
        command: StorageCommand,
    },
    /// List images of containerd, or import an archive
    Images(ImagesArgs),
    /// Print the versions of nodectl and of noded
    Version,
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
pub(crate) struct HealthArgs {
    /// Wait until the node is healthy
    ///
    /// At most this long, like 30s or 5m; without a duration, as long as it takes.
    #[arg(short, long, value_name = "DURATION", value_parser = parse_duration, num_args = 0..=1)]
    pub(crate) wait: Option<Option<Duration>>,
}

#[derive(Debug, Args)]
pub(crate) struct ReloadArgs {
    /// Name in the tree, like root.service.web
    #[arg(add = complete_dn())]
    pub(crate) dn: Option<String>,
    /// Show what would change; changes nothing
    #[arg(long, conflicts_with = "dn")]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LogLevelArgs {
    /// Name in the tree, like root.etcd
    ///
    /// "" is the whole log.
    #[arg(add = complete_dn())]
    pub(crate) dn: Option<String>,
    /// Minimum level to keep
    #[arg(conflicts_with = "reset")]
    pub(crate) level: Option<Level>,
    /// Return to the level of the configuration
    ///
    /// Without a DN, for all.
    #[arg(long)]
    pub(crate) reset: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// Name in the tree, like root.etcd
    ///
    /// Default: the whole log.
    #[arg(add = complete_dn())]
    pub(crate) dn: Option<String>,
    /// Wait for new entries
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Include everything below the DN
    #[arg(short, long)]
    pub(crate) children: bool,
    /// Only the newest N kept entries
    ///
    /// 0 with -f shows only new entries.
    #[arg(short = 'n', long, value_name = "N")]
    pub(crate) newest: Option<u64>,
    /// Minimum level (hides raw lines)
    #[arg(long, value_name = "LEVEL", conflicts_with = "raw")]
    pub(crate) min_level: Option<Level>,
    /// Only raw lines
    #[arg(long, conflicts_with = "leveled")]
    pub(crate) raw: bool,
    /// Only entries with a level
    #[arg(long)]
    pub(crate) leveled: bool,
    /// Only entries since a time, or for a duration
    ///
    /// RFC 3339 like 2026-11-21T11:23:42Z, or like 10m or 2h30m.
    #[arg(short, long, value_name = "TIME", value_parser = parse_since)]
    pub(crate) since: Option<SystemTime>,
    /// Only entries that match a regular expression
    ///
    /// In the message or raw line, or in a field, as name=value.
    #[arg(short, long, value_name = "PATTERN")]
    pub(crate) grep: Option<String>,
    /// Only entries with this field (repeatable)
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_field)]
    pub(crate) field: Vec<(String, String)>,
    /// Only entries after a cursor
    #[arg(long, value_name = "CURSOR")]
    pub(crate) cursor: Option<LogCursor>,
    /// Print the cursor after the last entry
    #[arg(long, conflicts_with = "follow")]
    pub(crate) show_cursor: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ImagesArgs {
    /// containerd namespace
    #[arg(long, default_value = "k8s.io")]
    pub(crate) namespace: String,
    /// Import an archive, and list its images
    ///
    /// An OCI layout or a docker-archive, raw, gzip or zstd.
    #[arg(long, value_name = "FILE")]
    pub(crate) import: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Show the node's enrolment, identity and health
    ///
    /// Exits with 6 unless the node is Running.
    Status,
    /// Bootstrap a new cluster on this node
    ///
    /// Only a node that waits for a ticket does, once: it records that, and refuses a second time.
    Bootstrap,
    /// List the members of the cluster
    Members,
    /// Create or revoke join tickets
    Ticket {
        #[command(subcommand)]
        command: TicketCommand,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum TicketCommand {
    /// Create a join ticket for one node
    ///
    /// Returns the unused ticket for the same address and port, if one exists.
    Create(CreateTicketArgs),
    /// Revoke an unused join ticket
    ///
    /// No node can join by it afterwards, and another ticket can be created.
    Withdraw(RevokeTicketArgs),
}

#[derive(Debug, Args)]
pub(crate) struct RevokeTicketArgs {
    /// Address of the ticket
    #[arg(long)]
    pub(crate) address: IpAddr,
    /// Peer port of the ticket; default: this node's
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub(crate) port: u16,
}

#[derive(Debug, Args)]
pub(crate) struct CreateTicketArgs {
    /// Golden ticket, which contains the node's private keys
    ///
    /// Bearer credential: anyone who reads it can impersonate the node. This node must allow it
    /// (cluster.golden_tickets).
    #[arg(long, required = true)]
    pub(crate) golden: bool,
    /// Address of the node for other members
    #[arg(long)]
    pub(crate) address: IpAddr,
    /// Peer port of the node; default: this node's
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub(crate) port: u16,
    /// Output file; must not exist
    #[arg(long)]
    pub(crate) file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct ActionArgs {
    /// Name in the tree, like root.etcd
    #[arg(add = complete_dn())]
    pub(crate) dn: String,
    /// Wait until it is ready, or stopped
    #[arg(short, long)]
    pub(crate) wait: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn logs_are_selected_since_a_time_or_for_a_duration() {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_259_022);
        assert_eq!(parse_since("2026-11-21T11:03:42Z"), Ok(time));
        let before = SystemTime::now();
        let ago = |text: &str| before.duration_since(parse_since(text).unwrap()).unwrap().as_secs();
        assert!((599..=600).contains(&ago("10m")) && (8999..=9000).contains(&ago("2h30m")));
        for text in ["", "10", "-10m", "yesterday", "2026-11-21"] {
            assert!(parse_since(text).is_err(), "{text}");
        }
        assert_eq!(parse_field("a=b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
        assert!(parse_field("a").is_err());
    }

    #[test]
    fn health_waits_for_a_duration_or_without_a_limit() {
        let wait = |args: &[&str]| match NodectlCli::try_parse_from([&["nodectl", "health"], args].concat())
            .unwrap()
            .command
        {
            NodectlCommand::Health(args) => args.wait,
            other => panic!("{other:?}"),
        };
        assert_eq!(wait(&[]), None);
        assert_eq!(wait(&["--wait"]), Some(None));
        assert_eq!(wait(&["--wait", "90s"]), Some(Some(Duration::from_secs(90))));
        assert_eq!(wait(&["-w", "2m"]), Some(Some(Duration::from_secs(120))));
        assert!(parse_duration("-1s").is_err() && parse_duration("soon").is_err());
    }

    #[test]
    fn the_command_line_is_consistent() {
        NodectlCli::command().debug_assert();
    }
}

//! The commands that call the node: a file for each, with its arguments, its requests and its output.
//!
//! A new command is a file here, and its lines in `mod`, [`NodeCommand`] and [`NodeCommand::run`].

mod action;
mod cluster;
pub(crate) mod context;
mod events;
mod health;
mod images;
pub(crate) mod key;
mod log_level;
mod logs;
mod operator;
mod reload;
mod reset;
mod signal;
mod status;
mod storage;
mod tree;
mod version;

use clap::Subcommand;

use self::action::Action;
use crate::api_client::ApiClient;
use crate::error::CommandError;
use crate::output::Printer;

/// The help of a variant is on it or on its arguments.
#[derive(Debug, Subcommand)]
pub(crate) enum NodeCommand {
    Tree(tree::TreeArgs),
    Status(status::StatusArgs),
    Health(health::HealthArgs),
    Logs(logs::LogsArgs),
    LogLevel(log_level::LogLevelArgs),
    Events(events::EventsArgs),
    /// Restart a runnable and everything below it
    Restart(action::ActionArgs),
    /// Stop a runnable and everything below it
    Stop(action::ActionArgs),
    /// Start a stopped, waiting or exited runnable
    Start(action::ActionArgs),
    Signal(signal::SignalArgs),
    Reload(reload::ReloadArgs),
    Reset(reset::ResetArgs),
    /// Show the cluster, and manage join tickets
    #[command(subcommand)]
    Cluster(cluster::ClusterCommand),
    /// Show the data volume, and manage its keys
    #[command(subcommand)]
    Storage(storage::StorageCommand),
    Images(images::ImagesArgs),
    /// Manage who may call from other machines
    #[command(subcommand)]
    Operator(operator::OperatorCommand),
    Version(version::VersionArgs),
}

impl NodeCommand {
    pub(crate) async fn run(self, api: &mut ApiClient, printer: &mut Printer) -> Result<(), CommandError> {
        match self {
            Self::Tree(args) => args.run(api, printer).await,
            Self::Status(args) => args.run(api, printer).await,
            Self::Health(args) => args.run(api, printer).await,
            Self::Logs(args) => args.run(api, printer).await,
            Self::LogLevel(args) => args.run(api, printer).await,
            Self::Events(args) => args.run(api, printer).await,
            Self::Restart(args) => args.run(Action::Restart, api, printer).await,
            Self::Stop(args) => args.run(Action::Stop, api, printer).await,
            Self::Start(args) => args.run(Action::Start, api, printer).await,
            Self::Signal(args) => args.run(api, printer).await,
            Self::Reload(args) => args.run(api, printer).await,
            Self::Reset(args) => args.run(api, printer).await,
            Self::Cluster(command) => command.run(api, printer).await,
            Self::Storage(command) => command.run(api, printer).await,
            Self::Images(args) => args.run(api, printer).await,
            Self::Operator(command) => command.run(api, printer).await,
            Self::Version(args) => args.run(api, printer).await,
        }
    }
}

//! `kubectl nodekeel`: the commands of nodes for the whole cluster. This program, by the name `kubectl-nodekeel`.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

use nodekeel_provisioner::format_chain;

use crate::move_cmd::{self, ClusterFlags, DrainFlags, MoveFlags, PodExec};
use crate::start_runtime;

/// The name by which kubectl finds the plugin.
pub(crate) const PLUGIN_NAME: &str = "kubectl-nodekeel";

/// Volumes of nodekeel, on all nodes
#[derive(Debug, Parser)]
#[command(name = "kubectl-nodekeel", bin_name = "kubectl nodekeel", version)]
pub(crate) struct Plugin {
    #[command(subcommand)]
    command: PluginCommand,
}

#[derive(Debug, Subcommand)]
enum PluginCommand {
    /// Run `provisionerd volumes` on each node
    Volumes(NodeFlags),
    /// Run `provisionerd orphans` on each node
    Orphans(NodeFlags),
    /// Run `provisionerd check` on each node
    Check(NodeFlags),
    /// Move the volume of a claim to another node
    Move(MoveFlags),
    /// Move all volumes of a node
    Drain(DrainFlags),
}

#[derive(Debug, Args)]
struct NodeFlags {
    /// Only this node
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
    #[command(flatten)]
    cluster: ClusterFlags,
    /// Arguments of the command on the node
    #[arg(last = true, value_name = "ARGUMENT")]
    arguments: Vec<String>,
}

pub(crate) fn run_plugin(plugin: Plugin) -> Result<ExitCode> {
    match plugin.command {
        PluginCommand::Volumes(flags) => run_on_nodes("volumes", flags),
        PluginCommand::Orphans(flags) => run_on_nodes("orphans", flags),
        PluginCommand::Check(flags) => run_on_nodes("check", flags),
        PluginCommand::Move(flags) => move_cmd::run_move(flags),
        PluginCommand::Drain(flags) => move_cmd::run_drain(flags),
    }
}

/// Runs a command on each node, one after the other. Fails if it fails on one, or can't run there.
fn run_on_nodes(command: &str, flags: NodeFlags) -> Result<ExitCode> {
    start_runtime()?.block_on(async {
        let NodeFlags { node, cluster, arguments } = flags;
        let exec = PodExec::new(cluster).await?;
        let pods = exec.list_pods(node.as_deref()).await?;
        let mut failed = pods.is_empty();
        if failed {
            print_problem(&exec.describe_absence(node.as_deref()));
        }
        for pod in pods {
            print_node(&pod.node);
            let Some(name) = pod.running else {
                failed = true;
                print_problem(&format!("provisionerd does not run on node {}", pod.node));
                continue;
            };
            let mut kubectl = exec.command(&name, &[command]);
            kubectl.args(&arguments);
            match exec.show(&pod.node, kubectl).await {
                Ok(has_succeeded) => failed |= !has_succeeded,
                // One that hangs hides no other one.
                Err(error) => {
                    failed = true;
                    print_problem(&format_chain(&*error));
                }
            }
        }
        Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    })
}

fn print_problem(text: &str) {
    let _ = writeln!(std::io::stderr(), "{PLUGIN_NAME}: {text}");
}

/// A closed pipe is seen by the command that follows.
fn print_node(node: &str) {
    let _ = writeln!(std::io::stdout(), "node {node}:");
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Plugin::command().debug_assert();
        let parsed = Plugin::try_parse_from(["kubectl-nodekeel", "volumes", "--node=a", "--", "--json"]);
        let PluginCommand::Volumes(flags) = parsed.expect("valid").command else { panic!("volumes") };
        assert_eq!((flags.node.as_deref(), flags.arguments), (Some("a"), vec!["--json".to_owned()]));
    }
}

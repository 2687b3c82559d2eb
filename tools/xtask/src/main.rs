//! The workspace's tasks: `cargo xtask COMMAND`; alone it lists them.

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory as _, Parser, Subcommand};

mod bench;
mod check;
mod cluster;
mod demo;
mod dist;
mod docs;
mod fuzz;
mod host_leftovers;
mod kernel_test;
mod kube;
mod mutants;
mod newcomer;
mod oci;
mod report;
mod run;
mod setup;
mod soak;
mod test;
mod workspace;

/// Tasks of the workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct CommandLine {
    #[command(subcommand)]
    task: Option<Task>,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Install what tests, benches and the demo need
    ///
    /// Installs Debian packages, and builds what Debian lacks from pinned Go modules; a second run costs
    /// nothing.
    Setup {
        /// Report what is missing, and install nothing
        #[arg(long)]
        check: bool,
    },
    /// Run a whole node and show what it does
    ///
    /// It bootstraps a cluster, runs a container, makes a volume of a claim, loses etcd, and is killed and
    /// restarted.
    Demo,
    /// Run every test; a test that can't run fails
    Test(test::Arguments),
    /// Run the tests that need a private kernel, in a guest
    KernelTest {
        /// Only tests with this text in PACKAGE BINARY TEST
        filter: Option<String>,
    },
    /// Run a cluster of nodes, and let things happen to it
    Cluster(cluster::Arguments),
    /// Run a Kubernetes control plane in the background
    Kube {
        #[command(subcommand)]
        task: kube::KubeTask,
    },
    /// Build a program's image as an OCI layout
    Oci(oci::Arguments),
    /// Check format, lints, docs, packages and dependencies
    Check,
    /// Generate man pages and shell completions into target/docs
    Docs,
    /// Build a release: a tarball and a Debian package in target/dist
    Dist(dist::Arguments),
    /// Run the longest tests at their full counts
    Soak {
        /// The stress runs; all without
        names: Vec<String>,
    },
    /// Measure beside peers into target/bench/NAME.json
    Bench(bench::Arguments),
}

fn main() -> ExitCode {
    match start(CommandLine::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(arguments: CommandLine) -> Result<ExitCode> {
    match arguments.task {
        None => {
            CommandLine::command().print_help()?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Task::Setup { check: true }) => setup::check(),
        Some(Task::Setup { check: false }) => {
            setup::install().and_then(|()| setup::build_go_tools()).map(|()| ExitCode::SUCCESS)
        }
        Some(Task::Demo) => demo::run().map(|()| ExitCode::SUCCESS),
        Some(Task::Test(arguments)) => test::run(&arguments),
        Some(Task::KernelTest { filter }) => kernel_test::run(filter.as_deref()),
        Some(Task::Cluster(arguments)) => cluster::run(arguments).map(|()| ExitCode::SUCCESS),
        Some(Task::Kube { task }) => kube::run(&task).map(|()| ExitCode::SUCCESS),
        Some(Task::Oci(arguments)) => oci::run(&arguments).map(|()| ExitCode::SUCCESS),
        Some(Task::Check) => check::run(),
        Some(Task::Docs) => docs::run().map(|()| ExitCode::SUCCESS),
        Some(Task::Dist(arguments)) => dist::run(&arguments).map(|()| ExitCode::SUCCESS),
        Some(Task::Soak { names }) => soak::run(&names),
        Some(Task::Bench(arguments)) => bench::run(&arguments),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        CommandLine::command().debug_assert();
    }
}

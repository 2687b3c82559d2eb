//! The workspace's tasks: `cargo xtask COMMAND`; alone it lists them.

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory as _, Parser, Subcommand};

mod bench;
mod check;
mod demo;
mod fuzz;
mod kernel_test;
mod kube;
mod oci;
mod planted;
mod report;
mod run;
mod setup;
mod soak;
mod test;
mod traces;

/// Tasks of the workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    task: Option<Task>,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Install what tests, benches and the demo run, and build what Debian has not; a second run costs nothing
    Setup {
        /// Only say what is missing
        #[arg(long)]
        check: bool,
    },
    /// Show a whole node: in its cluster, with a container and a volume, etcd and then itself killed and back
    Demo,
    /// Run every test on the real things, and fail if one could not run
    Test,
    /// Run the tests that need a kernel of their own, in a guest
    KernelTest {
        /// Only those with this in `PACKAGE BINARY TEST`
        filter: Option<String>,
    },
    /// A Kubernetes control plane for people, in the background
    Kube {
        #[command(subcommand)]
        task: kube::Task,
    },
    /// Make an image of a program, as an OCI layout in a tar
    Oci(oci::Arguments),
    /// Format, lints, docs, each crate and each feature alone, dependencies
    Check,
    /// Run the long random tests at their full counts
    Soak {
        /// One of them; all without
        name: Option<String>,
    },
    /// Measure, each with its peers, into target/bench/NAME.json
    Bench {
        /// One of them; all without
        name: Option<String>,
    },
}

fn main() -> ExitCode {
    match start(Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(arguments: Arguments) -> Result<ExitCode> {
    match arguments.task {
        None => {
            Arguments::command().print_help()?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Task::Setup { check: true }) => setup::check(),
        Some(Task::Setup { check: false }) => {
            setup::install().and_then(|()| kube::tools::build()).map(|()| ExitCode::SUCCESS)
        }
        Some(Task::Demo) => demo::run().map(|()| ExitCode::SUCCESS),
        Some(Task::Test) => test::run(),
        Some(Task::KernelTest { filter }) => kernel_test::run(filter.as_deref()),
        Some(Task::Kube { task }) => kube::run(&task).map(|()| ExitCode::SUCCESS),
        Some(Task::Oci(arguments)) => oci::run(&arguments).map(|_| ExitCode::SUCCESS),
        Some(Task::Check) => check::run(),
        Some(Task::Soak { name }) => soak::run(name.as_deref()),
        Some(Task::Bench { name }) => bench::run(name.as_deref()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }
}

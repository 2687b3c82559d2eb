//! The program around a node: command line, signals, exit codes. See docs/noded.md.

mod cli;
mod console;
mod log_filter;
mod reset;
mod run;
mod running;

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use nodekeel_supervisor::process::{Rlimit, protect_own_memory};

use crate::client::format_chain;
use crate::config::{ConfigError, DEFAULT_CONFIG};
use crate::data::DataError;
use crate::node::{BuildError, NodeBuilder, NodeHandle, StartError};
use crate::plan::{NodePlan, PlanError};
use crate::search_path::SearchPath;
use cli::{NodeArgs, NodedCli, NodedCommand};

/// With the value 1, this environment variable permits core dumps, for debugging. They contain keys.
const CORE_DUMPS: &str = "NODEKEEL_CORE_DUMPS";

/// Parses the command line, performs its command, and returns the exit code.
pub fn main() -> ExitCode {
    let done = match parse_arguments().command {
        NodedCommand::Run { node, log_level } => {
            // Before there are keys in it.
            let child_limits = protect_memory();
            make_plan(node).and_then(|plan| run::run_node(plan, log_level, child_limits))
        }
        NodedCommand::Check { node, running: false } => {
            make_plan(node).map(|plan| print_stdout(&plan.to_string()))
        }
        NodedCommand::Check { node, running: true } => {
            running::compare_with_running(&node).map(|text| print_stdout(&text))
        }
        NodedCommand::Reset(args) => {
            // It opens an encrypted volume by the node's key.
            protect_memory();
            make_plan(args.node.clone())
                .and_then(|plan| reset::reset_node(plan, &args))
                .map(|text| print_stdout(&text))
        }
        NodedCommand::Config => Ok(print_stdout(DEFAULT_CONFIG)),
        NodedCommand::Completion { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut NodedCli::command(), "noded", &mut script);
            Ok(print_stdout(&String::from_utf8_lossy(&script)))
        }
        NodedCommand::Man { directory } => clap_mangen::generate_to(NodedCli::command(), &directory)
            .with_context(|| format!("can't write man pages into {}", directory.display()))
            .map(|()| ExitCode::SUCCESS),
    };
    done.unwrap_or_else(|error| {
        print_stderr(&format_chain(&*error));
        ExitCode::from(exit_code(&error))
    })
}

/// Parses the command line. As PID 1, noded must not exit for a word that the kernel hands to init.
fn parse_arguments() -> NodedCli {
    if std::process::id() != 1 {
        return NodedCli::parse();
    }
    let (arguments, ignored) = cli::split_init_arguments(std::env::args_os().collect());
    for word in ignored {
        print_stderr(&format!("ignoring {word:?} from the kernel's command line"));
    }
    NodedCli::parse_from(arguments)
}

/// Keeps keys out of core dumps and the swap space. Returns the limits that child processes get instead of this program's.
fn protect_memory() -> Vec<Rlimit> {
    if std::env::var_os(CORE_DUMPS).is_some_and(|value| value == "1") {
        return Vec::new();
    }
    protect_own_memory().unwrap_or_else(|error| {
        // A node without its services would be worse.
        print_stderr(&format!("can't prevent core dumps, which would contain keys: {error}"));
        Vec::new()
    })
}

/// Prints lines to stderr. A reader that does not read must not keep noded from exiting.
fn print_stderr(text: &str) {
    let text: String = text.lines().map(|line| format!("noded: {line}\n")).collect();
    let (written, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || written.send(std::io::stderr().write_all(text.as_bytes())));
    let _ = wait.recv_timeout(console::FLUSH_TIMEOUT);
}

/// Prints to stdout. A closed pipe is not a failure.
fn print_stdout(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    }
}

/// Parses the configuration and plans the node. Reads the environment.
fn make_plan(args: NodeArgs) -> anyhow::Result<NodePlan> {
    let builder = match &args.config {
        Some(file) => NodeBuilder::from_file(file)?,
        None => NodeHandle::builder("the defaults", ""),
    };
    let variable = std::env::var_os;
    let search = SearchPath::with_default_directories(
        variable("NODEKEEL_BIN").as_deref(),
        variable("PATH").as_deref(),
    );
    let builder = builder.search_path(search).dev(args.dev);
    let builder = match args.data {
        Some(data) => builder.data(data),
        None => builder,
    };
    // The cause is taken out of its variant: `exit_code` looks for its type.
    builder.plan().map_err(|error| match error {
        BuildError::Config(error) => error.into(),
        BuildError::Plan(error) => error.into(),
        other => other.into(),
    })
}

/// The exit code of an error; the help lists the codes.
fn exit_code(error: &anyhow::Error) -> u8 {
    match (error.downcast_ref::<PlanError>(), error.downcast_ref::<StartError>()) {
        (Some(problems), _) if problems.in_use => 5,
        (Some(problems), _) if problems.keys_conflict => 3,
        (_, Some(StartError::Data(DataError::InUse { .. }))) => 5,
        (Some(_), _) | (_, Some(StartError::Data(_) | StartError::Part(_) | StartError::Control(_))) => 4,
        _ if error.downcast_ref().is_some_and(ConfigError::is_untrusted) => 4,
        _ if error.is::<ConfigError>() => 3,
        _ => 1,
    }
}

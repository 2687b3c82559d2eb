//! The program around a node: command line, console, signals, service manager, exit codes. `noded` is one, and yours is another:
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! use nodekeel_node::node::ExtraRunnable;
//! use nodekeel_node::supervisor::{Context, Failure};
//!
//! async fn greet(ctx: Context) -> Result<(), Failure> {
//!     tracing::info!("hello from {}", ctx.dn());
//!     ctx.signal_ready()?;
//!     ctx.until_canceled().await
//! }
//!
//! fn main() -> ExitCode {
//!     let parts = |node: nodekeel_node::node::NodeBuilder| node.with(ExtraRunnable::new("greeter", greet));
//!     nodekeel_node::program("greeterd", parts).main()
//! }
//! ```
//!
//! `greeterd run`, `check`, `config`, `reset` and `completion` then do what [docs/noded.md] says of noded, for a node with this
//! part, in `/var/lib/greeterd`, and `nodectl --socket /var/lib/greeterd/run/control.sock` calls it.
//!
//! [docs/noded.md]: https://docs.rs/crate/nodekeel-node

#![allow(
    clippy::disallowed_methods,
    reason = "this is the program, from which the libraries get arguments and environment"
)]

mod cli;
mod console;
mod log_filter;
mod reset;
mod run;
mod running;

use std::fmt;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use nodekeel_supervisor::process::{Rlimit, protect_own_memory};

use crate::client::format_chain;
use crate::config::{ConfigError, DEFAULT_CONFIG};
use crate::data::DataError;
use crate::dn::is_valid_runnable_name;
use crate::node::{BuildError, NodeBuilder, NodeHandle, StartError};
use crate::part::catch_panic;
use crate::plan::{NodePlan, PlanError};
use crate::program_name::{program_name, set_metric_prefix, set_program_name};
use crate::search_path::SearchPath;
use cli::{NodeArgs, ProgramCommand};

pub use zeroizing_alloc::ZeroAlloc;

/// The alerts that `alerts` prints, for noded.
const SHIPPED_ALERTS: &str = include_str!("../alerts.yaml");

/// A program around a node: [`program`].
pub struct Program<P> {
    name: &'static str,
    version: &'static str,
    about: &'static str,
    config: Option<&'static str>,
    data: PathBuf,
    environment: String,
    metric_prefix: &'static str,
    alert_rules: &'static str,
    parts: P,
}

impl<P> fmt::Debug for Program<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A program of this name around a node of the shipped parts, which `parts` changes: it adds, replaces and removes parts, and
/// chooses the volume, the network and the consensus. It may be called several times, and changes nothing on the machine.
///
/// The name is that of the executable: 1 to 64 of `a-z`, `0-9`, `_` and `-`. The data directory, the environment variables, the
/// texts and the DN of the program's own log derive from it.
///
/// # Panics
/// The name is invalid.
pub fn program<P: Fn(NodeBuilder) -> NodeBuilder>(name: &'static str, parts: P) -> Program<P> {
    assert!(
        is_valid_runnable_name(name),
        "invalid program name {name:?}; use 1 to 64 of a-z, 0-9, '_' and '-'"
    );
    Program {
        name,
        version: concat!("(nodekeel ", env!("CARGO_PKG_VERSION"), ")"),
        about: "Run a node",
        config: None,
        data: format!("/var/lib/{name}").into(),
        environment: name.to_ascii_uppercase().replace('-', "_"),
        metric_prefix: "nodekeel",
        alert_rules: "",
        parts,
    }
}

impl<P: Fn(NodeBuilder) -> NodeBuilder> Program<P> {
    /// Sets the version that `--version` prints: `env!("CARGO_PKG_VERSION")`. Default: that of nodekeel.
    #[must_use]
    pub fn version(self, version: &'static str) -> Self {
        Self { version, ..self }
    }

    /// Sets the text at the start of `--help`: a line, and after an empty one more for `help`. Default: "Run a node".
    #[must_use]
    pub fn about(self, about: &'static str) -> Self {
        Self { about, ..self }
    }

    /// Sets the configuration that `config` prints, and that applies without `--config`. Default: every key of the shipped parts
    /// that this node has, commented out.
    #[must_use]
    pub fn config(self, text: &'static str) -> Self {
        Self { config: Some(text), ..self }
    }

    /// Sets the data directory of a configuration without `node.data`. Default: `/var/lib/<name>`.
    #[must_use]
    pub fn data(self, directory: impl Into<PathBuf>) -> Self {
        Self { data: directory.into(), ..self }
    }

    /// Sets the start of its environment variables: `<prefix>_BIN`, directories of programs, before those of `PATH`; and
    /// `<prefix>_CORE_DUMPS`, with the value 1, permits core dumps, which contain keys. Default: the name in capitals.
    #[must_use]
    pub fn environment(self, prefix: impl Into<String>) -> Self {
        Self { environment: prefix.into(), ..self }
    }

    /// Sets the start of the names of the node's metrics, as `<prefix>_healthy`, here and in the rules of `alerts`. Parts name
    /// their own metrics. Default: `nodekeel`, so that the alerts of one node are those of all.
    ///
    /// # Panics
    /// It is not of `a-z`, `0-9` and `_`, with a letter first.
    #[must_use]
    pub fn metric_prefix(self, prefix: &'static str) -> Self {
        let is_valid = prefix.starts_with(|c: char| c.is_ascii_lowercase())
            && prefix.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        assert!(is_valid, "invalid prefix of metrics {prefix:?}; use a-z, 0-9 and '_', with a letter first");
        Self { metric_prefix: prefix, ..self }
    }

    /// Adds rules for Prometheus to those that `alerts` prints: a YAML list, each `- alert:` or `- record:` at the start of a
    /// line. Default: none.
    #[must_use]
    pub fn alert_rules(self, rules: &'static str) -> Self {
        Self { alert_rules: rules, ..self }
    }

    /// Parses the command line, performs its command, and returns the exit code. It prints, and installs the program's `tracing`
    /// subscriber.
    ///
    /// A node has keys in its memory: erase it when it is freed, by [`ZeroAlloc`] as the global allocator of the program.
    pub fn main(self) -> ExitCode {
        set_program_name(self.name);
        set_metric_prefix(self.metric_prefix);
        let done = catch_panic("main", || self.perform(self.parse_arguments()));
        done.unwrap_or_else(|panic| Err(panic.into())).unwrap_or_else(|error| {
            print_stderr(&format_chain(&*error));
            ExitCode::from(exit_code(&error))
        })
    }

    fn perform(&self, command: ProgramCommand) -> anyhow::Result<ExitCode> {
        match command {
            ProgramCommand::Run { node, log_level } => {
                // Before there are keys in it.
                let child_limits = self.protect_memory();
                run::run_node(self.make_plan(node)?, log_level, child_limits)
            }
            ProgramCommand::Check { node, running: false } => {
                let builder = self.node_builder(&node)?.beside_running_node();
                builder.plan().map_err(cause_of).map(|plan| {
                    let printed = print_stdout(&plan.to_string());
                    if plan.warnings.is_empty() { printed } else { ExitCode::from(4) }
                })
            }
            ProgramCommand::Check { node, running: true } => {
                let socket = self.node_builder(&node)?.config().map_err(cause_of)?.control_socket();
                running::compare_with_running(&socket, &node, self.config_text())
                    .map(|text| print_stdout(&text))
            }
            ProgramCommand::Reset(args) => {
                // It opens an encrypted volume by the node's key.
                self.protect_memory();
                let plan = self.make_plan(args.node.clone())?;
                reset::reset_node(plan, &args).map(|text| print_stdout(&text))
            }
            ProgramCommand::Alerts => Ok(print_stdout(&self.alerts_text())),
            ProgramCommand::Config => Ok(print_stdout(&self.config_text())),
            ProgramCommand::Completion { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut self.command(), self.name, &mut script);
                Ok(print_stdout(&String::from_utf8_lossy(&script)))
            }
            ProgramCommand::Man { directory } => clap_mangen::generate_to(self.command(), &directory)
                .with_context(|| format!("can't write man pages into {}", directory.display()))
                .map(|()| ExitCode::SUCCESS),
        }
    }

    fn command(&self) -> clap::Command {
        cli::command(self.name, self.version, self.about)
    }

    /// Parses the command line. As PID 1, the program must not exit for a word that the kernel hands to init.
    fn parse_arguments(&self) -> ProgramCommand {
        let arguments = std::env::args_os().collect();
        if std::process::id() != 1 {
            return cli::parse(self.command(), arguments);
        }
        let (arguments, ignored) = cli::split_init_arguments(&self.command(), arguments);
        for word in ignored {
            print_stderr(&format!("ignoring {word:?} from the kernel's command line"));
        }
        cli::parse(self.command(), arguments)
    }

    /// Keeps keys out of core dumps and the swap space. Returns the limits that child processes get instead of this program's.
    fn protect_memory(&self) -> Vec<Rlimit> {
        if std::env::var_os(format!("{}_CORE_DUMPS", self.environment)).is_some_and(|value| value == "1") {
            return Vec::new();
        }
        protect_own_memory().unwrap_or_else(|error| {
            // A node without its services would be worse.
            print_stderr(&format!("can't prevent core dumps, which would contain keys: {error}"));
            Vec::new()
        })
    }

    /// The alerts for nodes that this program runs, as an object for the Prometheus operator.
    fn alerts_text(&self) -> String {
        let shipped = SHIPPED_ALERTS.replace("nodekeel_", &format!("{}_", self.metric_prefix));
        let mut text = shipped.replace("noded", self.name);
        if !self.alert_rules.is_empty() {
            text += &format!("    - name: {}-own\n      rules:\n", self.name);
            let lines = self.alert_rules.lines();
            text.extend(lines.map(|line| format!("        {line}").trim_end().to_owned() + "\n"));
        }
        text
    }

    /// The configuration that applies without a file.
    fn config_text(&self) -> String {
        match self.config {
            Some(text) => text.to_owned(),
            None => {
                let removed = (self.parts)(NodeHandle::builder("", "")).removed_tables();
                let text = without_tables(DEFAULT_CONFIG, &removed);
                let text = text.replace("/var/lib/nodekeel", &self.data.to_string_lossy());
                text.replace("NODEKEEL_", &format!("{}_", self.environment)).replace("noded", self.name)
            }
        }
    }

    /// The builder of the node that these arguments describe. Reads the environment.
    fn node_builder(&self, args: &NodeArgs) -> anyhow::Result<NodeBuilder> {
        let builder = match &args.config {
            Some(file) => NodeBuilder::from_file(file)?,
            None => NodeHandle::builder("the defaults", self.config_text()),
        };
        let search = SearchPath::with_default_directories(
            std::env::var_os(format!("{}_BIN", self.environment)).as_deref(),
            std::env::var_os("PATH").as_deref(),
        );
        let builder = (self.parts)(builder.search_path(search).default_data(&self.data)).dev(args.dev);
        Ok(match &args.data {
            Some(data) => builder.data(data),
            None => builder,
        })
    }

    /// Parses the configuration and plans the node.
    fn make_plan(&self, args: NodeArgs) -> anyhow::Result<NodePlan> {
        self.node_builder(&args)?.plan().map_err(cause_of)
    }
}

/// Takes the cause out of its variant: `exit_code` looks for its type.
fn cause_of(error: BuildError) -> anyhow::Error {
    match error {
        BuildError::Config(error) => error.into(),
        BuildError::Plan(error) => error.into(),
        other => other.into(),
    }
}

/// Leaves out the paragraphs of the shipped configuration that describe these tables.
fn without_tables(text: &str, removed: &[String]) -> String {
    let is_removed = |table: &str| {
        removed.iter().any(|one| {
            table.strip_prefix(one.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    };
    let paragraphs = text
        .trim_end()
        .split("\n\n")
        .filter(|paragraph| !paragraph.lines().filter_map(table_name).any(is_removed));
    paragraphs.collect::<Vec<_>>().join("\n\n") + "\n"
}

/// The name of the table that a line begins, also in a comment.
fn table_name(line: &str) -> Option<&str> {
    let line = line.trim_start_matches(['#', ' ']);
    let name = line.strip_prefix('[')?.strip_suffix(']')?;
    let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    name.chars().all(|c| c.is_ascii_lowercase() || c == '.' || c == '_').then_some(name)
}

/// Prints lines to stderr. A reader that does not read must not keep the program from exiting.
fn print_stderr(text: &str) {
    let text: String = text.lines().map(|line| format!("{}: {line}\n", program_name())).collect();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alerts_have_the_names_of_the_program_and_its_own_rules() {
        let shipped = program("noded", |node| node);
        assert_eq!(shipped.alerts_text(), SHIPPED_ALERTS);
        let rules = "- alert: Storm\n  expr: weather_wind > 20\n";
        let own = program("weatherd", |node| node).metric_prefix("weather").alert_rules(rules).alerts_text();
        assert!(own.contains("up{job=\"weatherd\"}") && own.contains("expr: weather_healthy == 0"), "{own}");
        let group = "    - name: weatherd-own\n      rules:\n        - alert: Storm\n          expr: weather_wind > 20\n";
        assert!(own.ends_with(group) && !own.contains("noded") && !own.contains("nodekeel_"), "{own}");
    }

    #[test]
    fn the_default_configuration_has_the_tables_and_the_names_of_the_program() {
        let shipped = program("noded", |node| node).data("/var/lib/nodekeel").environment("NODEKEEL");
        assert_eq!(shipped.config_text(), DEFAULT_CONFIG);
        let without = |node: NodeBuilder| {
            ["etcd", "cluster", "containerd", "provisioner"].into_iter().fold(node, NodeBuilder::without)
        };
        let own = program("weather-d", without);
        let text = own.config_text();
        let tables: Vec<_> = text.lines().filter_map(table_name).collect();
        let left = [
            "node", "log", "kernel", "events", "control", "health", "metrics", "api", "storage", "worker",
            "service",
        ];
        assert_eq!(tables, left, "{text}");
        for (word, is_there) in [("noded", false), ("NODEKEEL_", false), ("/var/lib/weather-d", true)] {
            assert_eq!(text.contains(word), is_there, "{word}: {text}");
        }
        let args = NodeArgs { config: None, data: None, dev: false };
        let config = own.node_builder(&args).and_then(|node| Ok(node.config()?)).expect("it is valid");
        assert_eq!(config.node.data.to_str(), Some("/var/lib/weather-d"));
    }

    #[test]
    fn the_data_directory_is_that_of_the_option_then_of_the_file_then_of_the_program() {
        let scratch = tempfile::tempdir().expect("a directory");
        let data_of = |text: &str, data: Option<&str>| {
            let file = scratch.path().join("a.toml");
            std::fs::write(&file, text).expect("written");
            let args = NodeArgs { config: Some(file), data: data.map(Into::into), dev: false };
            let builder = program("weatherd", |node| node).node_builder(&args).expect("readable");
            builder.config().expect("valid").node.data
        };
        assert_eq!(data_of("", None).to_str(), Some("/var/lib/weatherd"));
        // Also where the file sets the default of another program.
        let set = "node.data = \"/var/lib/nodekeel\"";
        assert_eq!(data_of(set, None).to_str(), Some("/var/lib/nodekeel"));
        assert_eq!(data_of(set, Some("/d")).to_str(), Some("/d"));
    }
}

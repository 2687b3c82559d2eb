//! The configuration as plain data: one TOML file, parsed once into valid values.

mod check;
mod cluster;
mod containerd;
mod graph;
mod locate;
mod provisioner;
mod value;

use std::collections::BTreeMap;
use std::fmt;
use std::num::{NonZeroU16, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

pub use cluster::ClusterConfig;
pub use containerd::ContainerdConfig;
pub use graph::{is_valid_runnable_name, order_services};
use locate::TomlDocument;
pub use provisioner::{ProvisionerConfig, QuotaMode};
pub use value::{BackoffConfig, ReadinessConfig, RestartPolicy};

/// The shipped, commented file: every key with its default.
pub const DEFAULT_CONFIG: &str = include_str!("../noded.toml");

/// Names of the built-in services in `depends_on`.
pub const BUILT_IN_SERVICES: [&str; 4] = ["etcd", "cluster", "containerd", "provisioner"];

/// The import of images in `depends_on`: it is below containerd in the tree.
pub(crate) const PRESEED: &str = "containerd.preseed";

/// The whole configuration. Its default equals an empty file.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodedConfig {
    /// `[node]`
    pub node: NodeConfig,
    /// `[log]`
    pub log: LogConfig,
    /// `[events]`
    pub events: EventsConfig,
    /// `[control]`
    pub control: ControlConfig,
    /// `[services]`
    pub services: BuiltInServices,
    /// `[cluster]`: if given, the node is a member of a cluster.
    pub cluster: Option<ClusterConfig>,
    /// `[provisioner]`: if given, the node provisions volumes for a Kubernetes cluster.
    pub provisioner: Option<ProvisionerConfig>,
    /// `[[service]]`: the operator's services.
    pub service: Vec<UserService>,
}

/// `[node]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeConfig {
    /// Name of the node.
    pub name: String,
    /// The directory of all its data.
    pub data: PathBuf,
    /// Grace period: how long each service may take to stop before its processes are killed.
    #[serde(deserialize_with = "value::deserialize_duration")]
    pub grace: Duration,
}

impl Default for NodeConfig {
    fn default() -> Self {
        Self { name: "node".into(), data: "/var/lib/nodekeel".into(), grace: Duration::from_secs(10) }
    }
}

/// `[log]`: how much of the log is kept in memory.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// Bytes kept for each DN.
    pub bytes_per_dn: NonZeroUsize,
    /// Bytes kept in total.
    pub bytes: NonZeroUsize,
}

impl Default for LogConfig {
    fn default() -> Self {
        const MIB: usize = 1024 * 1024;
        let mebibytes = |n: usize| NonZeroUsize::new(n * MIB).expect("not zero");
        Self { bytes_per_dn: mebibytes(1), bytes: mebibytes(64) }
    }
}

/// `[events]`: how many events of the tree are kept in memory.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EventsConfig {
    /// Number of events.
    pub keep: NonZeroUsize,
}

impl Default for EventsConfig {
    fn default() -> Self {
        Self { keep: NonZeroUsize::new(4096).expect("not zero") }
    }
}

/// `[control]`: where the control API is served.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ControlConfig {
    /// The socket; `None` is `run/control.sock` below the data directory.
    pub socket: Option<PathBuf>,
}

/// `[services]`: built-in services.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BuiltInServices {
    /// `[services.etcd]`
    pub etcd: EtcdConfig,
    /// `[services.containerd]`
    pub containerd: ContainerdConfig,
}

/// `[services.etcd]`: an etcd of one member on the loopback interface.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EtcdConfig {
    /// Whether to run it.
    pub enable: bool,
    /// The program; `None` searches for `etcd`.
    pub binary: Option<PathBuf>,
    /// Port for clients.
    pub client_port: NonZeroU16,
    /// Port for other members.
    pub peer_port: NonZeroU16,
    /// Arguments after noded's.
    pub extra_args: Vec<String>,
}

impl Default for EtcdConfig {
    fn default() -> Self {
        let port = |n| NonZeroU16::new(n).expect("not zero");
        Self {
            enable: true,
            binary: None,
            client_port: port(2379),
            peer_port: port(2380),
            extra_args: Vec::new(),
        }
    }
}

/// `[[service]]`: a program of the operator.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserService {
    /// Its name; its DN is `root.service.<name>`.
    pub name: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Its complete environment.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// User that runs it; `None` is noded's. Another user needs root.
    #[serde(default)]
    pub user: Option<String>,
    /// Its working directory.
    #[serde(default = "root_directory")]
    pub directory: PathBuf,
    /// Services that must be ready before it starts.
    #[serde(default)]
    pub depends_on: Vec<String>,
    /// When it is ready.
    #[serde(default)]
    pub readiness: ReadinessConfig,
    /// When it restarts; `None` is always, and on failure with readiness `"exit"`.
    #[serde(default)]
    pub restart: Option<RestartPolicy>,
    /// Delays between restarts.
    #[serde(default)]
    pub backoff: BackoffConfig,
    /// Grace period; `None` is `node.grace`.
    #[serde(default, deserialize_with = "value::deserialize_optional_duration")]
    pub grace: Option<Duration>,
}

fn root_directory() -> PathBuf {
    "/".into()
}

/// An invalid configuration: one line that names file, line, column and field.
#[derive(Debug)]
pub struct ConfigError {
    file: PathBuf,
    /// Line and column, from 1.
    at: Option<(usize, usize)>,
    field: String,
    message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let Some((line, column)) = self.at {
            write!(f, ":{line}:{column}")?;
        }
        if !self.field.is_empty() {
            write!(f, ": {}", self.field)?;
        }
        write!(f, ": {}", self.message)
    }
}

impl std::error::Error for ConfigError {}

impl NodedConfig {
    /// Reads and parses a file.
    ///
    /// # Errors
    /// The file can't be read, or see [`parse_toml`](Self::parse_toml).
    pub fn read_file(file: &Path) -> Result<Self, ConfigError> {
        let error_at = |at, message| ConfigError { file: file.to_owned(), at, field: String::new(), message };
        let bytes = std::fs::read(file).map_err(|error| {
            error_at(None, format!("can't be read: {error}; `noded config` prints the default configuration"))
        })?;
        let text = String::from_utf8(bytes).map_err(|error| {
            let valid = String::from_utf8_lossy(&error.as_bytes()[..error.utf8_error().valid_up_to()]);
            let at = locate::line_and_column(&valid, Some(valid.len()..valid.len()));
            error_at(at, "is not UTF-8 here; save the file as UTF-8".to_owned())
        })?;
        Self::parse_toml(file, &text)
    }

    /// Parses and checks the text of a file; `file` is only used in errors.
    ///
    /// # Errors
    /// The text is not TOML, a key is unknown, a value is invalid, or the dependencies of services are.
    pub fn parse_toml(file: &Path, text: &str) -> Result<Self, ConfigError> {
        let error_at = |at, field, message| ConfigError { file: file.to_owned(), at, field, message };
        let document = TomlDocument::parse(text).map_err(|error| {
            error_at(
                locate::line_and_column(text, error.span()),
                String::new(),
                locate::one_line_message(text, &error),
            )
        })?;
        if let Some((span, field, message)) = document.find_misshapen_table() {
            return Err(error_at(locate::line_and_column(text, Some(span)), field, message));
        }
        let config: Self = toml::from_str(text).map_err(|error| {
            let field = error.span().map(|span| document.field_path_at(span)).unwrap_or_default();
            error_at(
                locate::line_and_column(text, error.span()),
                field,
                locate::one_line_message(text, &error),
            )
        })?;
        match graph::check_config(&config) {
            Ok(()) => Ok(config),
            Err(violation) => Err(error_at(
                locate::line_and_column(text, document.span_of_field(&violation.field)),
                violation.field,
                violation.message,
            )),
        }
    }

    /// The path of the control API's socket.
    pub fn control_socket(&self) -> PathBuf {
        self.control.socket.clone().unwrap_or_else(|| self.node.data.join("run/control.sock"))
    }
}

#[cfg(test)]
#[path = "config_test.rs"]
mod tests;

//! What the operator wants, as plain data: one TOML file, parsed once into values that make sense.

mod cluster;
mod containerd;
mod graph;
mod locate;
mod value;
mod volumes;

use std::collections::BTreeMap;
use std::fmt;
use std::num::{NonZeroU16, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

pub use cluster::ClusterConfig;
pub use containerd::ContainerdConfig;
pub use graph::{order, valid_name};
use locate::Document;
pub use value::{Backoff, Readiness, Restart};
pub use volumes::{ProvisionerConfig, Quota};

/// The commented file that is shipped: every key, at its default.
pub const SHIPPED: &str = include_str!("../noded.toml");

/// The names by which `depends_on` calls the node's own services.
pub const BUILT_IN: [&str; 4] = ["etcd", "cluster", "containerd", "provisioner"];

/// The whole configuration. Its default is that of an empty file.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// `[node]`
    pub node: NodeConfig,
    /// `[log]`
    pub log: LogConfig,
    /// `[events]`
    pub events: EventsConfig,
    /// `[control]`
    pub control: ControlConfig,
    /// `[services]`
    pub services: ServicesConfig,
    /// `[cluster]`: the node is a member of a cluster, where this is given.
    pub cluster: Option<ClusterConfig>,
    /// `[provisioner]`: volumes, where a Kubernetes API is given.
    pub provisioner: Option<ProvisionerConfig>,
    /// `[[service]]`: the operator's own services.
    pub service: Vec<UserService>,
}

/// `[node]`
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeConfig {
    /// What the node calls itself.
    pub name: String,
    /// The directory below which all its data lies.
    pub data: PathBuf,
    /// How long the services may take to stop, each, before their processes are killed.
    #[serde(deserialize_with = "value::duration")]
    pub grace: Duration,
}

impl Default for NodeConfig {
    fn default() -> Self {
        Self { name: "node".into(), data: "/var/lib/nodekeel".into(), grace: Duration::from_secs(10) }
    }
}

/// `[log]`: how much of the log is kept, in memory.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// Bytes kept for each DN.
    pub bytes_per_dn: NonZeroUsize,
    /// Bytes kept for all of them.
    pub bytes: NonZeroUsize,
}

impl Default for LogConfig {
    fn default() -> Self {
        const MIB: usize = 1024 * 1024;
        let mebibytes = |n: usize| NonZeroUsize::new(n * MIB).expect("not zero");
        Self { bytes_per_dn: mebibytes(1), bytes: mebibytes(64) }
    }
}

/// `[events]`: how many events of the tree are kept, in memory.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EventsConfig {
    /// How many.
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

/// `[services]`: what the node brings itself.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServicesConfig {
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
    /// The program; `None` is to search for `etcd`.
    pub binary: Option<PathBuf>,
    /// Where clients connect.
    pub client_port: NonZeroU16,
    /// Where other members would connect.
    pub peer_port: NonZeroU16,
    /// Arguments after the node's own.
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

/// `[[service]]`: a program of the operator's.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserService {
    /// Its name; it is `root.service.<name>` in the tree.
    pub name: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// All of its environment.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// As which user it runs; `None` is noded's own. Another one needs root.
    #[serde(default)]
    pub user: Option<String>,
    /// Its working directory.
    #[serde(default = "root_directory")]
    pub directory: PathBuf,
    /// Which services must have become ready before it is started.
    #[serde(default)]
    pub depends_on: Vec<String>,
    /// When it is ready.
    #[serde(default)]
    pub readiness: Readiness,
    /// When it is started again; `None` is always, and on failure where its exit is what it is waited for.
    #[serde(default)]
    pub restart: Option<Restart>,
    /// How fast it is started again.
    #[serde(default)]
    pub backoff: Backoff,
    /// How long it may take to stop; `None` is `node.grace`.
    #[serde(default, deserialize_with = "value::some_duration")]
    pub grace: Option<Duration>,
}

fn root_directory() -> PathBuf {
    "/".into()
}

/// Why a configuration is refused: one line that names the place.
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

impl Config {
    /// Reads and parses a file.
    ///
    /// # Errors
    /// The file can't be read, or see [`parse`](Self::parse).
    pub fn read(file: &Path) -> Result<Self, ConfigError> {
        let refuse = |at, message| ConfigError { file: file.to_owned(), at, field: String::new(), message };
        let bytes = std::fs::read(file).map_err(|error| {
            refuse(None, format!("can't be read: {error}; `noded config` prints one to begin with"))
        })?;
        let text = String::from_utf8(bytes).map_err(|error| {
            let valid = String::from_utf8_lossy(&error.as_bytes()[..error.utf8_error().valid_up_to()]);
            let at = locate::position(&valid, Some(valid.len()..valid.len()));
            refuse(at, "is not UTF-8 here; save the file as UTF-8".to_owned())
        })?;
        Self::parse(file, &text)
    }

    /// Parses and checks the text of a file; `file` only serves the error.
    ///
    /// # Errors
    /// The text is no TOML, a key is unknown, a value makes no sense, or the services' graph does not.
    pub fn parse(file: &Path, text: &str) -> Result<Self, ConfigError> {
        let refuse = |at, field, message| ConfigError { file: file.to_owned(), at, field, message };
        let document = Document::parse(text).map_err(|error| {
            refuse(locate::position(text, error.span()), String::new(), locate::one_line(text, &error))
        })?;
        if let Some((span, field, message)) = document.misshapen() {
            return Err(refuse(locate::position(text, Some(span)), field, message));
        }
        let config: Self = toml::from_str(text).map_err(|error| {
            let field = error.span().map(|span| document.path_at(span)).unwrap_or_default();
            refuse(locate::position(text, error.span()), field, locate::one_line(text, &error))
        })?;
        match graph::check(&config) {
            Ok(()) => Ok(config),
            Err(wrong) => Err(refuse(
                locate::position(text, document.span_of(&wrong.field)),
                wrong.field,
                wrong.message,
            )),
        }
    }

    /// Where the control API is served.
    pub fn socket(&self) -> PathBuf {
        self.control.socket.clone().unwrap_or_else(|| self.node.data.join("run/control.sock"))
    }
}

#[cfg(test)]
#[path = "config_test.rs"]
mod tests;

//! The configuration as plain data: one TOML file, parsed once into valid values.

mod check;
mod cluster;
mod containerd;
mod graph;
mod health;
mod locate;
mod log_levels;
mod provisioner;
mod section;
mod source;
mod storage;
mod user_service;
mod value;

use std::collections::BTreeMap;
use std::fmt;
use std::num::{NonZeroU16, NonZeroUsize};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nodekeel_logtree::{Dn, Level};
use serde::Deserialize;
use toml::de::DeTable;

use crate::dependency::check_dependencies;
use crate::parts::Parts;

pub use check::ConfigViolation;
pub use cluster::ClusterConfig;
pub(crate) use cluster::{check_cluster, check_cluster_address};
pub use containerd::ContainerdConfig;
pub(crate) use containerd::check_containerd;
pub(crate) use graph::{check_etcd, check_service};
pub use health::HealthConfig;
pub(crate) use locate::CORE_TABLES;
use locate::TomlDocument;
pub(crate) use provisioner::check_provisioner;
pub use provisioner::{AuditSettings, CapacitySettings, ProvisionerConfig, QuotaMode};
pub use section::ConfigSection;
use section::PartSections;
pub(crate) use source::LOG_LEVELS;
use source::SourceTables;
pub(crate) use storage::{DeviceConfig, DeviceLocation, EncryptionConfig, EspLocation, SealConfig};
pub use storage::{EncryptionMode, EspKind, SealKind, StorageConfig, VolumeKind};
pub use user_service::{LivenessConfig, ReloadConfig, ServiceLimits, ServicePrivileges, UserService};
pub use value::{BackoffConfig, ReadinessConfig, RestartLimitConfig, RestartPolicy};

/// The shipped, commented file: every key with its default.
pub const DEFAULT_CONFIG: &str = include_str!("../noded.toml");

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
    /// `[health]`
    pub health: HealthConfig,
    /// `[storage]`
    pub storage: StorageConfig,
    /// `[services]`
    pub services: BuiltInServices,
    /// `[cluster]`: if given, the node is a member of a cluster.
    pub cluster: Option<ClusterConfig>,
    /// `[provisioner]`: if given, the node provisions volumes for a Kubernetes cluster.
    pub provisioner: Option<ProvisionerConfig>,
    /// `[[service]]`: the operator's services.
    pub service: Vec<UserService>,
    /// `depends_on` in the sections of parts, by the part's name.
    #[serde(skip)]
    pub depends_on: BTreeMap<String, Vec<String>>,
    /// The sections of parts that are not fields of this type.
    #[serde(skip)]
    sections: PartSections,
    /// The file as it is written.
    #[serde(skip)]
    source: SourceTables,
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

/// `[log]`: what is kept of the log in memory.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// Bytes kept for each DN.
    pub bytes_per_dn: NonZeroUsize,
    /// Bytes kept in total.
    pub bytes: NonZeroUsize,
    /// Minimum levels by DN, each for everything below it, too.
    #[serde(deserialize_with = "log_levels::deserialize_levels")]
    pub levels: BTreeMap<Dn, Level>,
}

impl Default for LogConfig {
    fn default() -> Self {
        const MIB: usize = 1024 * 1024;
        let mebibytes = |n: usize| NonZeroUsize::new(n * MIB).expect("not zero");
        Self { bytes_per_dn: mebibytes(1), bytes: mebibytes(64), levels: BTreeMap::new() }
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
        Self::parse_toml(file, &read_text(file)?)
    }

    /// Parses and checks the text of a file for a node of the shipped parts; `file` is only used in errors.
    ///
    /// # Errors
    /// The text is not TOML, a key is unknown, a value is invalid, or the dependencies of services are.
    pub fn parse_toml(file: &Path, text: &str) -> Result<Self, ConfigError> {
        Self::parse_with(&Parts::shipped(), file, text)
    }

    /// Parses and checks the text of a file for a node of these parts, with their sections.
    ///
    /// # Errors
    /// As [`parse_toml`](Self::parse_toml), and the name of a part is invalid, or used twice.
    pub fn parse_with(parts: &Parts, file: &Path, text: &str) -> Result<Self, ConfigError> {
        let error_at = |span, field, message| {
            let at = locate::line_and_column(text, span);
            ConfigError { file: file.to_owned(), at, field, message }
        };
        parts.check_names().map_err(|violation| error_at(None, String::new(), violation.to_string()))?;
        let document = TomlDocument::parse(text)
            .map_err(|error| error_at(error.span(), String::new(), locate::one_line_message(text, &error)))?;
        let sections: Vec<_> = parts.iter().flat_map(|part| part.sections()).collect();
        let tables = sections.iter().flat_map(ConfigSection::tables);
        let misplaced = document.find_misshapen_table(tables);
        if let Some((span, field, message)) = misplaced.or_else(|| find_removed_section(&document, &sections))
        {
            return Err(error_at(Some(span), field, message));
        }
        let config = Self::parse_document(parts, text).map_err(|error| {
            let field = error.span().map(|span| document.field_path_at(span)).unwrap_or_default();
            let message = locate::one_line_message(text, &error);
            let message = if field.contains('.') { message } else { add_section_names(message, &sections) };
            error_at(error.span(), field, message)
        })?;
        match config.check(parts) {
            Ok(()) => Ok(config),
            Err(violation) => {
                let span = document.span_of_field(&violation.field);
                Err(error_at(span, violation.field, violation.message))
            }
        }
    }

    fn parse_document(parts: &Parts, text: &str) -> Result<Self, toml::de::Error> {
        let mut document = DeTable::parse(text)?;
        let (mut depends_on, mut sections) = (BTreeMap::new(), PartSections::default());
        for part in parts.iter() {
            for (index, section) in part.sections().iter().enumerate() {
                if index == 0
                    && let Some(names) = section::take_dependencies(section, document.get_mut())?
                    && !names.is_empty()
                {
                    depends_on.insert(part.name().to_owned(), names);
                }
                sections.take(section, document.get_mut())?;
            }
        }
        let config = Self::deserialize(toml::Deserializer::from(document))?;
        Ok(Self { depends_on, sections, source: SourceTables(text.parse()?), ..config })
    }

    /// Checks the rules between keys, and the dependencies.
    fn check(&self, parts: &Parts) -> Result<(), ConfigViolation> {
        graph::check_core(self)?;
        parts.iter().try_for_each(|part| part.check(self))?;
        self.check_dependencies(parts)
    }

    /// Checks the names of these parts, and the dependencies between them and the services.
    pub(crate) fn check_dependencies(&self, parts: &Parts) -> Result<(), ConfigViolation> {
        parts.check_names()?;
        check_dependencies(&parts.dependencies(self))
    }

    /// The section of a part that is not a field of this type: see [`ConfigSection::new`]. `None` if the file does not
    /// have it, or if it is of another type.
    pub fn section<T: 'static>(&self, name: &str) -> Option<&T> {
        self.sections.get(name)
    }

    /// The path of the control API's socket.
    pub fn control_socket(&self) -> PathBuf {
        self.control.socket.clone().unwrap_or_else(|| self.node.data.join("run/control.sock"))
    }
}

/// Finds a section of a shipped part that is not among these: its span, its name, and what to do.
fn find_removed_section(
    document: &TomlDocument<'_>,
    sections: &[ConfigSection],
) -> Option<(Range<usize>, String, String)> {
    let shipped = Parts::shipped();
    let is_removed =
        |shipped: &ConfigSection| sections.iter().all(|section| section.path() != shipped.path());
    shipped.iter().flat_map(|part| part.sections()).filter(is_removed).find_map(|removed| {
        let message = "belongs to a part that this node does not have; remove it".to_owned();
        Some((document.span_at(removed.path())?, removed.path().to_owned(), message))
    })
}

/// Reads the text of a file.
pub(crate) fn read_text(file: &Path) -> Result<String, ConfigError> {
    let error_at = |at, message| ConfigError { file: file.to_owned(), at, field: String::new(), message };
    let bytes = std::fs::read(file).map_err(|error| {
        error_at(None, format!("can't be read: {error}; `noded config` prints the default configuration"))
    })?;
    String::from_utf8(bytes).map_err(|error| {
        let valid = String::from_utf8_lossy(&error.as_bytes()[..error.utf8_error().valid_up_to()]);
        let at = locate::line_and_column(&valid, Some(valid.len()..valid.len()));
        error_at(at, "is not UTF-8 here; save the file as UTF-8".to_owned())
    })
}

/// Adds the sections of parts to the names that the parser expects.
fn add_section_names(message: String, sections: &[ConfigSection]) -> String {
    let own = sections.iter().filter(|section| section.is_own()).map(ConfigSection::path);
    match message.starts_with("unknown field") {
        true => own.fold(message, |message, name| format!("{message}, `{name}`")),
        false => message,
    }
}

#[cfg(test)]
#[path = "config_test.rs"]
mod tests;

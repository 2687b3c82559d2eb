//! The configuration as plain data: one TOML file, parsed once into valid values.

pub(crate) mod check;
mod locate;
mod node;
mod section;
mod source;
pub(crate) mod value;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::ops::Range;
use std::path::{Path, PathBuf};

use nodekeel_localstorage::check_file_owner;
use serde::Deserialize;
use toml::de::DeTable;

pub(crate) use self::node::check_node;
pub use self::node::{ControlConfig, EventsConfig, HealthConfig, LogConfig, NodeConfig};
use crate::error_chain::error_chain;
pub use crate::parts::cluster::config::{BackupConfig, ClusterConfig};
pub use crate::parts::containerd::config::ContainerdConfig;
pub use crate::parts::etcd::config::EtcdConfig;
pub use crate::parts::provisioner::config::{AuditSettings, CapacitySettings, ProvisionerConfig, QuotaMode};
pub use crate::parts::service::config::{
    BackoffConfig, LivenessConfig, ReadinessConfig, ReloadConfig, RestartLimitConfig, RestartPolicy,
    ServiceLimits, ServicePrivileges, UserService,
};
pub use crate::parts::storage::config::{
    EncryptionMode, EspKind, SealKind, StorageConfig, TangConfig, VolumeKind,
};
use crate::program_name::program_name;
pub use check::ConfigViolation;
pub(crate) use locate::CORE_TABLES;
use locate::TomlDocument;
pub use section::ConfigSection;
use section::PartSections;
pub(crate) use source::LOG_LEVELS;
use source::SourceTables;

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

/// `[services]`: built-in services.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BuiltInServices {
    /// `[services.etcd]`
    pub etcd: EtcdConfig,
    /// `[services.containerd]`
    pub containerd: ContainerdConfig,
}

/// An invalid configuration: one line that names file, line, column and field.
#[derive(Debug)]
pub struct ConfigError {
    file: PathBuf,
    /// Line and column, from 1.
    at: Option<(usize, usize)>,
    field: String,
    message: String,
    is_untrusted: bool,
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

impl ConfigError {
    /// The program has parts that no configuration makes right.
    pub(crate) fn of_program(file: &Path, violation: &ConfigViolation) -> Self {
        Self::new(file, None, String::new(), violation.to_string())
    }

    fn new(file: &Path, at: Option<(usize, usize)>, field: String, message: String) -> Self {
        Self { file: file.to_owned(), at, field, message, is_untrusted: false }
    }

    /// Returns whether the file was not read, because another user could have written it.
    pub fn is_untrusted(&self) -> bool {
        self.is_untrusted
    }
}

impl NodedConfig {
    /// Parses the text of a file with the tables of a node's parts, and checks it; `file` is only used in errors.
    ///
    /// # Errors
    /// The text is not TOML, a key is unknown, a value is invalid, or the check fails.
    pub(crate) fn parse(
        file: &Path,
        text: &str,
        schema: &ConfigSchema<'_>,
        check: impl FnOnce(&Self) -> Result<(), ConfigViolation>,
    ) -> Result<Self, ConfigError> {
        let error_at = |span, field, message| {
            // Each error names line and column, so that an operator finds the key in a file of any length.
            let at = locate::line_and_column(text, span);
            ConfigError::new(file, at, field, message)
        };
        let document = TomlDocument::parse(text)
            .map_err(|error| error_at(error.span(), String::new(), locate::one_line_message(text, &error)))?;
        // Misshapen tables are found first: serde would take a list for the values of a table's keys.
        let tables = schema.sections().flat_map(ConfigSection::tables);
        // A section of a removed part is reported here, because serde would only report an unknown field.
        let misplaced = document.find_misshapen_table(tables).or_else(|| schema.find_removed(&document));
        if let Some((span, field, message)) = misplaced {
            return Err(error_at(Some(span), field, message));
        }
        let config = Self::parse_document(schema, text).map_err(|error| {
            let field = error.span().map(|span| document.field_path_at(span)).unwrap_or_default();
            let message = locate::one_line_message(text, &error);
            // Only an unknown table of the top level is missing the names of the parts: serde knows the fields of
            // this type alone.
            let message = if field.contains('.') { message } else { schema.add_names(message) };
            error_at(error.span(), field, message)
        })?;
        // The rules between keys need all values. Their errors name a field, whose place in the text is looked up
        // again.
        match check(&config) {
            Ok(()) => Ok(config),
            Err(violation) => {
                let span = document.span_of_field(&violation.field);
                Err(error_at(span, violation.field, violation.message))
            }
        }
    }

    fn parse_document(schema: &ConfigSchema<'_>, text: &str) -> Result<Self, toml::de::Error> {
        // The text is parsed a second time, since the sections are moved out of the document and the first one is
        // still needed for the places of errors.
        let mut document = DeTable::parse(text)?;
        let (mut depends_on, mut sections) = (BTreeMap::new(), PartSections::default());
        for tables in &schema.parts {
            for (index, section) in tables.sections.iter().enumerate() {
                // Only the first section of a part has the part's `depends_on`.
                if index == 0
                    && let Some(names) = section::take_dependencies(section, document.get_mut())?
                    && !names.is_empty()
                {
                    depends_on.insert(tables.part.clone(), names);
                }
                sections.take(section, document.get_mut())?;
            }
        }
        // The rest must consist of the fields of this type, and serde rejects any other key.
        let config = Self::deserialize(toml::Deserializer::from(document))?;
        Ok(Self { depends_on, sections, source: SourceTables(text.parse()?), ..config })
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

/// The tables that a configuration may have besides those of the node itself.
pub(crate) struct ConfigSchema<'a> {
    pub(crate) parts: Vec<PartTables>,
    /// The tables of the shipped parts, of which the program may have removed some.
    pub(crate) shipped: &'a [ConfigSection],
}

/// The tables of one part.
pub(crate) struct PartTables {
    pub(crate) part: String,
    pub(crate) sections: Vec<ConfigSection>,
}

impl ConfigSchema<'_> {
    fn sections(&self) -> impl Iterator<Item = &ConfigSection> {
        self.parts.iter().flat_map(|tables| &tables.sections)
    }

    /// Finds a section of a part that the program has removed: its span, its name, and what to do.
    fn find_removed(&self, document: &TomlDocument<'_>) -> Option<(Range<usize>, String, String)> {
        // A section that another part has taken over is not removed: the operator may keep it.
        let is_removed =
            |shipped: &&ConfigSection| self.sections().all(|section| section.path() != shipped.path());
        self.shipped.iter().filter(is_removed).find_map(|removed| {
            let message = "belongs to a part that this node does not have; remove it".to_owned();
            Some((document.span_at(removed.path())?, removed.path().to_owned(), message))
        })
    }

    /// Adds the sections of parts to the names that the parser expects.
    fn add_names(&self, message: String) -> String {
        if !message.starts_with("unknown field") {
            return message;
        }
        let own = self.sections().filter(|section| section.is_own()).map(ConfigSection::path);
        own.fold(message, |message, name| format!("{message}, `{name}`"))
    }
}

/// Reads the text of a file.
pub(crate) fn read_text(file: &Path) -> Result<String, ConfigError> {
    let error_at = |at, message| ConfigError::new(file, at, String::new(), message);
    let unreadable = |error: io::Error| {
        error_at(
            None,
            format!("can't be read: {error}; `{} config` prints the default configuration", program_name()),
        )
    };
    let mut opened = File::open(file).map_err(unreadable)?;
    check_file_owner(&opened, file)
        .map_err(|error| ConfigError { is_untrusted: true, ..error_at(None, error_chain(&error)) })?;
    let mut bytes = Vec::new();
    opened.read_to_end(&mut bytes).map_err(unreadable)?;
    // The error points at the first byte that is not UTF-8: an editor with another encoding shows the character
    // there.
    String::from_utf8(bytes).map_err(|error| {
        let valid = String::from_utf8_lossy(&error.as_bytes()[..error.utf8_error().valid_up_to()]);
        let at = locate::line_and_column(&valid, Some(valid.len()..valid.len()));
        error_at(at, "is not UTF-8 here; save the file as UTF-8".to_owned())
    })
}

#[cfg(test)]
#[path = "config_test.rs"]
mod tests;

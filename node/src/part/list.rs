//! The list of a node's parts.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::Part;
use super::guard::guard_part;
use crate::config::{
    ConfigError, ConfigSchema, ConfigSection, ConfigViolation, NodedConfig, PartTables, VolumeKind,
    check_node,
};
use crate::dependency::{DependencyEntry, check_dependencies};
use crate::dn::{SERVICES, is_valid_runnable_name};

/// The parts of a node, in the order of their start.
#[derive(Clone)]
pub(crate) struct Parts {
    parts: Vec<Arc<dyn Part>>,
    /// True if the program provides the data volume.
    provides_volume: bool,
    /// The tables of the parts that the program ships with, also of those that were removed since.
    shipped: Vec<ConfigSection>,
    /// Names that were to be replaced or removed, and do not exist.
    unknown: Vec<String>,
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(Part::name)).finish()
    }
}

impl Parts {
    /// The parts of a program: those that it ships with, in the order of their start.
    pub(crate) fn new(parts: Vec<Arc<dyn Part>>, provides_volume: bool) -> Self {
        let parts: Vec<_> = parts.into_iter().map(guard_part).collect();
        let shipped = parts.iter().flat_map(|part| part.sections()).collect();
        Self { parts, provides_volume, shipped, unknown: Vec::new() }
    }

    /// Adds a part. It starts after the shipped ones, and before the services of the configuration.
    pub(crate) fn add(mut self, part: Arc<dyn Part>) -> Self {
        let services = self.parts.iter().position(|known| known.name() == SERVICES);
        self.parts.insert(services.unwrap_or(self.parts.len()), guard_part(part));
        self
    }

    /// Replaces the part of the same name. A name that does not exist is an error of the configuration.
    pub(crate) fn replace(mut self, part: Arc<dyn Part>) -> Self {
        let part = guard_part(part);
        match self.parts.iter_mut().find(|known| known.name() == part.name()) {
            Some(known) => *known = part,
            None => self.unknown.push(part.name().to_owned()),
        }
        self
    }

    /// Removes a part. Its section in the configuration is then unknown, as is a name that does not exist.
    pub(crate) fn without(mut self, name: &str) -> Self {
        let count = self.parts.len();
        self.parts.retain(|known| known.name() != name);
        if self.parts.len() == count {
            self.unknown.push(name.to_owned());
        }
        self
    }

    /// Returns whether the data volume can be looked at before root.storage has opened it: it is a directory.
    pub(crate) fn is_volume_known(&self, config: &NodedConfig) -> bool {
        !self.provides_volume && config.storage.kind == VolumeKind::Directory
    }

    /// Returns whether the program provides the data volume.
    pub(crate) fn provide_volume(&self) -> bool {
        self.provides_volume
    }

    /// The tables of the shipped parts that this node does not have.
    #[cfg(feature = "program")]
    pub(crate) fn removed_tables(&self) -> Vec<String> {
        let own: Vec<_> = self.iter().flat_map(Part::sections).collect();
        let is_removed = |table: &&ConfigSection| own.iter().all(|section| section.path() != table.path());
        self.shipped.iter().filter(is_removed).map(|table| table.path().to_owned()).collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &dyn Part> {
        self.parts.iter().map(AsRef::as_ref)
    }

    /// The names by which parts and services depend on them.
    pub(crate) fn dependencies(&self, config: &NodedConfig) -> Vec<DependencyEntry> {
        self.iter().flat_map(|part| part.dependencies(config)).collect()
    }

    /// Parses and checks the text of a file for a node of these parts, with their sections; `file` is only used in errors.
    ///
    /// # Errors
    /// As [`NodedConfig::parse_toml`], and the name of a part is invalid, or used twice.
    pub(crate) fn parse_config(&self, file: &Path, text: &str) -> Result<NodedConfig, ConfigError> {
        // A mistake of the program comes first. The parser would report it as one of the operator.
        self.check_names().map_err(|violation| ConfigError::of_program(file, &violation))?;
        let tables = |part: &dyn Part| PartTables { part: part.name().to_owned(), sections: part.sections() };
        let schema = ConfigSchema { parts: self.iter().map(tables).collect(), shipped: &self.shipped };
        NodedConfig::parse(file, text, &schema, |config| {
            check_node(config)?;
            self.iter().try_for_each(|part| part.check(config))?;
            // The dependencies come last: their names are those of parts and services that are valid.
            self.check_dependencies(config)
        })
    }

    /// Checks the names of these parts, and the dependencies between them and the services.
    pub(crate) fn check_dependencies(&self, config: &NodedConfig) -> Result<(), ConfigViolation> {
        self.check_names()?;
        check_dependencies(&self.dependencies(config))
    }

    /// Checks the names of the parts and of their sections.
    fn check_names(&self) -> Result<(), ConfigViolation> {
        let names: Vec<_> = self.iter().map(Part::name).collect();
        let refuse = |message: String| Err(ConfigViolation::new("", message));
        // The calls of the builder can't fail, and so a wrong name is reported here.
        if let Some(name) = self.unknown.first() {
            return refuse(format!("unknown part {name:?}; known: {}", names.join(", ")));
        }
        for (index, name) in names.iter().enumerate() {
            if !is_valid_runnable_name(name) {
                return refuse(format!("invalid part name {name:?}; use 1 to 64 of a-z, 0-9, '_' and '-'"));
            }
            if names[..index].contains(name) {
                return refuse(format!(
                    "duplicate part name {name:?}; use another name, or replace the part"
                ));
            }
        }
        let sections: Vec<_> = self.iter().flat_map(Part::sections).collect();
        for (index, section) in sections.iter().enumerate() {
            let path = section.path();
            if !section.is_valid() {
                return refuse(format!("invalid section name {path:?} of a part; use the part's name"));
            }
            // Shipped parts may read the same table.
            let conflicts =
                |other: &ConfigSection| other.path() == path && (other.is_own() || section.is_own());
            if sections[..index].iter().any(conflicts) {
                return refuse(format!("duplicate section name {path:?} of two parts; use another for one"));
            }
        }
        Ok(())
    }
}

//! Tables of the configuration that belong to a part.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::Deserialize as _;
use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use super::locate::CORE_TABLES;

/// A table of the configuration that belongs to a part.
#[derive(Clone)]
pub struct ConfigSection {
    path: String,
    /// The paths that must be written as tables: the section's own, and those of tables in it.
    tables: Vec<String>,
    /// `None` for a field of [`NodedConfig`](super::NodedConfig).
    parse: Option<ParseSection>,
}

type ParseSection = fn(Spanned<DeValue<'_>>) -> Result<Arc<dyn SectionValue>, toml::de::Error>;

impl ConfigSection {
    /// The table of this name, without dots, parsed into `T`;
    /// [`NodedConfig::section`](super::NodedConfig::section) returns it. `T` should deny unknown fields, so that a typing
    /// error is reported.
    pub fn new<T>(name: impl Into<String>) -> Self
    where
        T: DeserializeOwned + fmt::Debug + PartialEq + Send + Sync + 'static,
    {
        let path = name.into();
        Self { tables: vec![path.clone()], path, parse: Some(parse_section::<T>) }
    }

    /// A table that is a field of [`NodedConfig`](super::NodedConfig).
    pub(crate) fn field(path: &str) -> Self {
        Self { path: path.to_owned(), tables: vec![path.to_owned()], parse: None }
    }

    /// An array of tables that is a field of [`NodedConfig`](super::NodedConfig).
    pub(crate) fn array(path: &str) -> Self {
        Self { path: path.to_owned(), tables: Vec::new(), parse: None }
    }

    /// Names the tables in it.
    #[must_use]
    pub fn with_tables<'n>(mut self, paths: impl IntoIterator<Item = &'n str>) -> Self {
        self.tables.extend(paths.into_iter().map(str::to_owned));
        self
    }

    /// The names of the tables that lead to it, separated by dots.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns whether a part may have the section: not if it is a table of the node itself, or a table in another one.
    pub(crate) fn is_valid(&self) -> bool {
        // A dot would make the section a table of another part, which parses the whole of it.
        let is_plain = !self.path.is_empty() && !self.path.contains('.');
        self.parse.is_none() || is_plain && !CORE_TABLES.contains(&self.path.as_str())
    }

    /// Returns whether the section is not a field of [`NodedConfig`](super::NodedConfig).
    pub(crate) fn is_own(&self) -> bool {
        self.parse.is_some()
    }

    /// The paths that must be written as tables.
    pub(super) fn tables(&self) -> impl Iterator<Item = &str> {
        self.tables.iter().map(String::as_str)
    }
}

impl fmt::Debug for ConfigSection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ConfigSection").field(&self.path).finish()
    }
}

fn parse_section<T>(value: Spanned<DeValue<'_>>) -> Result<Arc<dyn SectionValue>, toml::de::Error>
where
    T: DeserializeOwned + fmt::Debug + PartialEq + Send + Sync + 'static,
{
    Ok(Arc::new(T::deserialize(ValueDeserializer::from(value))?))
}

/// A parsed section of any type.
trait SectionValue: fmt::Debug + Send + Sync {
    fn as_any(&self) -> &dyn Any;
    fn is_equal(&self, other: &dyn SectionValue) -> bool;
}

impl<T: fmt::Debug + PartialEq + Send + Sync + 'static> SectionValue for T {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn is_equal(&self, other: &dyn SectionValue) -> bool {
        other.as_any().downcast_ref::<T>() == Some(self)
    }
}

/// The parsed sections of the parts, by their name.
#[derive(Debug, Clone, Default)]
pub(super) struct PartSections(BTreeMap<String, Arc<dyn SectionValue>>);

impl PartialEq for PartSections {
    fn eq(&self, other: &Self) -> bool {
        self.0.len() == other.0.len() && self.0.keys().all(|name| self.has_same(other, name))
    }
}

impl PartSections {
    pub(super) fn get<T: 'static>(&self, name: &str) -> Option<&T> {
        self.0.get(name)?.as_any().downcast_ref()
    }

    /// Returns whether a section has the same value, or is absent from both.
    pub(super) fn has_same(&self, other: &Self, name: &str) -> bool {
        // A section of an unknown name is absent from both, and counts as the same.
        match (self.0.get(name), other.0.get(name)) {
            (Some(value), Some(other)) => value.is_equal(other.as_ref()),
            (None, None) => true,
            _ => false,
        }
    }

    /// Moves a section from the document to here.
    pub(super) fn take(
        &mut self,
        section: &ConfigSection,
        document: &mut DeTable<'_>,
    ) -> Result<(), toml::de::Error> {
        let Some(parse) = section.parse else { return Ok(()) };
        // The section leaves the document, so that the rest can deny unknown fields.
        if let Some(value) = document.remove(section.path.as_str()) {
            self.0.insert(section.path.clone(), parse(value)?);
        }
        Ok(())
    }
}

/// Removes `depends_on` from a section of the document.
pub(super) fn take_dependencies(
    section: &ConfigSection,
    document: &mut DeTable<'_>,
) -> Result<Option<Vec<String>>, toml::de::Error> {
    let mut table = document;
    for step in section.path.split('.') {
        // An absent section, or one that is no table, has no dependencies: the parser reports its shape.
        match table.get_mut(step).map(Spanned::get_mut) {
            Some(DeValue::Table(below)) => table = below,
            _ => return Ok(None),
        }
    }
    // Removed, since the part's own type may deny unknown fields and does not know this key.
    table.remove("depends_on").map(|value| Vec::deserialize(ValueDeserializer::from(value))).transpose()
}

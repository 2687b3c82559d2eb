//! Parts of an operator's own configuration of containerd.

use toml::{Table, Value};

#[cfg(any(test, feature = "client"))]
use super::ConfigVersion;

/// A part of a configuration of containerd, in the format of its release: runtimes, snapshotters, limits, registries. Tables
/// are merged with those of [`ContainerdSettings`](crate::ContainerdSettings); any other value, a list too, replaces theirs.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigFragment {
    name: String,
    table: Table,
}

/// A table has no floats that differ from themselves: TOML's `nan` has no place in a configuration of containerd.
impl Eq for ConfigFragment {}

/// A text that is no part of a configuration of containerd.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidFragment {
    /// It is not TOML: correct it.
    #[error("invalid TOML: {}", .0.message())]
    Toml(#[source] Box<toml::de::Error>),
    /// It is for another release: the tables of each version have other names.
    #[error(
        "containerd's configuration {name} has version {found}, but this containerd has version {expected}: write it for \
         that, see containerd's docs/cri/config.md"
    )]
    Version {
        /// The name of the fragment.
        name: String,
        /// Its version.
        found: i64,
        /// The version of the configuration.
        expected: i64,
    },
}

impl ConfigFragment {
    /// Parses a text; `name` is that of its file, for errors.
    ///
    /// # Errors
    /// [`InvalidFragment::Toml`].
    pub fn parse(name: impl Into<String>, text: &str) -> Result<Self, InvalidFragment> {
        let table = text.parse().map_err(|error| InvalidFragment::Toml(Box::new(error)))?;
        Ok(Self { name: name.into(), table })
    }

    /// Checks that it is for this version, or states none.
    ///
    /// # Errors
    /// [`InvalidFragment::Version`].
    #[cfg(any(test, feature = "client"))]
    pub(crate) fn check_version(&self, version: ConfigVersion) -> Result<(), InvalidFragment> {
        let expected = version.number();
        match self.table.get("version").and_then(Value::as_integer) {
            Some(found) if found != expected => {
                Err(InvalidFragment::Version { name: self.name.clone(), found, expected })
            }
            _ => Ok(()),
        }
    }

    pub(super) fn merge_into(&self, config: &mut Table) {
        merge_tables(config, &self.table);
    }
}

/// A merge of its own: containerd 1.6 replaces the whole table of a plugin by that of an imported file.
fn merge_tables(config: &mut Table, over: &Table) {
    for (key, value) in over {
        match (config.get_mut(key), value) {
            (Some(Value::Table(below)), Value::Table(over)) => merge_tables(below, over),
            _ => drop(config.insert(key.clone(), value.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ContainerdSettings, CriSettings, DirectoryLayout};

    #[test]
    fn tables_are_merged_and_other_values_replaced_in_the_order_of_the_fragments() {
        let parse = |text: &str| ConfigFragment::parse("a.toml", text).expect("TOML");
        let plugin = "[plugins.'io.containerd.grpc.v1.cri'.containerd";
        let fragments = vec![
            parse(&format!(
                "{plugin}.runtimes.kata]\nruntime_type = 'io.containerd.kata.v2'\n{plugin}]\nsnapshotter = 'a'"
            )),
            parse(&format!("disabled_plugins = ['x']\n{plugin}]\nsnapshotter = 'native'")),
        ];
        let settings = ContainerdSettings {
            cri: Some(CriSettings::default()),
            fragments,
            ..ContainerdSettings::default()
        };
        let layout = DirectoryLayout::new("/data", "/run/c").expect("short");
        let rendered: Table = settings.render_toml(&layout).parse().expect("TOML");
        let containerd = &rendered["plugins"]["io.containerd.grpc.v1.cri"]["containerd"];
        assert_eq!(containerd["snapshotter"].as_str(), Some("native"));
        for runtime in ["runc", "kata"] {
            assert!(containerd["runtimes"].get(runtime).is_some(), "{containerd:?}");
        }
        assert_eq!(rendered["disabled_plugins"].as_array().map(Vec::len), Some(1));
    }

    #[test]
    fn a_fragment_for_another_version_is_named() {
        let parse = |text: &str| ConfigFragment::parse("a.toml", text);
        assert!(parse("version = [").is_err());
        for text in ["", "version = 3"] {
            assert!(parse(text).expect("TOML").check_version(ConfigVersion::V3).is_ok());
        }
        let error =
            parse("version = 2").expect("TOML").check_version(ConfigVersion::V3).expect_err("another");
        assert!(
            error.to_string().starts_with("containerd's configuration a.toml has version 2, but"),
            "{error}"
        );
    }
}

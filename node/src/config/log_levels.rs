//! Minimum levels of log entries by DN: `levels` of `[log]`.

use std::collections::BTreeMap;
use std::fmt;

use nodekeel_logtree::{Dn, Level};
use serde::de::{Deserializer, Error, MapAccess, Visitor};

/// Parses a table of names and levels.
pub(super) fn deserialize_levels<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<Dn, Level>, D::Error> {
    deserializer.deserialize_map(LevelsVisitor)
}

struct LevelsVisitor;

impl<'de> Visitor<'de> for LevelsVisitor {
    type Value = BTreeMap<Dn, Level>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(r#"DNs with their levels, like { "root.etcd" = "warn" }"#)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut levels = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            let dn = name.parse::<Dn>().map_err(A::Error::custom)?;
            let level = map.next_value::<LevelText>()?;
            levels.insert(dn, level.0);
        }
        Ok(levels)
    }
}

/// A level as text.
struct LevelText(Level);

impl<'de> serde::Deserialize<'de> for LevelText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(LevelVisitor)
    }
}

struct LevelVisitor;

impl Visitor<'_> for LevelVisitor {
    type Value = LevelText;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(r#"a level like "warn"; a DN with dots needs quotes"#)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<LevelText, E> {
        text.parse().map(LevelText).map_err(E::custom)
    }
}

//! The tables that belong to the node itself: `[node]`, `[log]`, `[events]`, `[control]` and `[health]`.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nodekeel_fsquota::Bytes;
use nodekeel_logtree::{Dn, Level};
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

use super::NodedConfig;
use super::check::{ConfigViolation, check_duration, check_no_nul, reject_field};
use super::value;

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
    pub bytes_per_dn: Bytes,
    /// Bytes kept in total.
    pub bytes: Bytes,
    /// Minimum levels by DN, each for everything below it, too.
    #[serde(deserialize_with = "deserialize_levels")]
    pub levels: BTreeMap<Dn, Level>,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { bytes_per_dn: Bytes(1 << 20), bytes: Bytes(64 << 20), levels: BTreeMap::new() }
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

/// `[health]`: what `nodectl health` reports.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HealthConfig {
    /// Percent of a disk's bytes, and of its inodes, below which the node is not healthy. 0: never. Default 5.
    pub min_free_percent: u8,
    /// Percent of both below which there is a warning. 0: never. Default 10.
    pub warn_free_percent: u8,
    /// Days before the end of a certificate from which on there is a warning. Default 30.
    pub warn_certificate_days: u16,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self { min_free_percent: 5, warn_free_percent: 10, warn_certificate_days: 30 }
    }
}

/// Minimum size of a log: an entry may take a quarter of it.
const MIN_LOG_BYTES: Bytes = Bytes(64 << 10);

/// Maximum number of kept events; each takes some hundred bytes.
const MAX_EVENTS: usize = 1_000_000;

/// Checks the rules between fields that belong to no part.
pub(crate) fn check_node(config: &NodedConfig) -> Result<(), ConfigViolation> {
    // Clients print the name within a line.
    if config.node.name.is_empty() || config.node.name.chars().any(char::is_control) {
        return reject_field("node.name", "must not be empty or contain control characters");
    }
    if config.node.data.as_os_str().is_empty() {
        return reject_field("node.data", "must name a directory");
    }
    check_no_nul("node.data", config.node.data.to_str())?;
    check_no_nul("control.socket", config.control.socket.as_deref().and_then(Path::to_str))?;
    if config.control.socket.as_ref().is_some_and(|socket| socket.as_os_str().is_empty()) {
        return reject_field(
            "control.socket",
            "must be a path, or left out for run/control.sock below the data directory",
        );
    }
    check_duration("node.grace", Some(config.node.grace))?;
    check_health(&config.health)?;
    check_sizes(config)
}

fn check_sizes(config: &NodedConfig) -> Result<(), ConfigViolation> {
    let log = &config.log;
    for (field, bytes) in [("log.bytes", log.bytes), ("log.bytes_per_dn", log.bytes_per_dn)] {
        if bytes < MIN_LOG_BYTES {
            return reject_field(
                field,
                format!("{bytes} is too small for a log; use at least {MIN_LOG_BYTES}"),
            );
        }
    }
    // One DN can't have more than all of them together.
    if log.bytes_per_dn > log.bytes {
        let message = format!("exceeds log.bytes, {}; lower it or raise log.bytes", log.bytes);
        return reject_field("log.bytes_per_dn", message);
    }
    let keep = config.events.keep;
    if keep.get() > MAX_EVENTS {
        return reject_field(
            "events.keep",
            format!("{keep} events are too many to keep in memory; use at most {MAX_EVENTS}"),
        );
    }
    Ok(())
}

fn check_health(health: &HealthConfig) -> Result<(), ConfigViolation> {
    for (field, percent) in [
        ("health.min_free_percent", health.min_free_percent),
        ("health.warn_free_percent", health.warn_free_percent),
    ] {
        // A percent above 100 would make every disk a problem.
        if percent > 100 {
            return reject_field(field, format!("{percent} is more than 100 percent"));
        }
    }
    Ok(())
}

/// Parses a table of names and levels.
fn deserialize_levels<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<Dn, Level>, D::Error> {
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
            // The level has a visitor of its own, so that the error explains the dot in an unquoted DN: TOML reads
            // it as a table.
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

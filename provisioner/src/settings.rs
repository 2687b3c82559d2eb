//! Tables and values of a configuration file that programs with a provisioner share.
//!
//! A program embeds them in its own file, next to its own keys:
//!
//! ```
//! use nodekeel_provisioner::settings::{AuditSettings, CapacitySettings, default_driver};
//! use nodekeel_provisioner::{DriverName, ProvisionerConfig};
//!
//! #[derive(serde::Deserialize)]
//! #[serde(deny_unknown_fields)]
//! struct Config {
//!     #[serde(default = "default_driver")]
//!     driver: DriverName,
//!     #[serde(default)]
//!     capacity: CapacitySettings,
//!     #[serde(default)]
//!     audit: AuditSettings,
//! }
//!
//! let config: Config = toml::from_str("capacity.reserve = \"10Gi\"\naudit.interval = \"30m\"")?;
//! assert_eq!(config.driver.as_str(), "volumes.nodekeel");
//! assert_eq!(config.capacity.reserve.to_string(), "10Gi");
//! assert!(config.capacity.policy().is_ok());
//! # Ok::<_, toml::de::Error>(())
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::SignedDuration;
use nodekeel_fsquota::Bytes;
use nodekeel_localstorage::FileMode;
use serde::Deserialize;
use serde::de::{Deserializer, Error, Unexpected, Visitor};

use crate::{CapacityPolicy, DriverName, InvalidRatio, StoreName};

/// The kubelet's root directory, unless its `--root-dir` names another.
pub const DEFAULT_KUBELET: &str = "/var/lib/kubelet";

/// The shortest interval of audits: each one reads every directory of the volumes.
pub const MIN_AUDIT_INTERVAL: Duration = Duration::from_secs(1);

/// The driver's name of the shipped manifests, `volumes.nodekeel`.
pub fn default_driver() -> DriverName {
    DriverName::try_new("volumes.nodekeel").expect("a valid domain")
}

/// `capacity`: how much of a file system may be promised to volumes.
///
/// The default promises each byte once and reserves none.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CapacitySettings {
    /// Number of times that each byte is promised, from 0.001 to 1000. Above 1, volumes can be full before their limits.
    pub ratio: f64,
    /// Bytes that are kept for other data; at least what they occupy.
    pub reserve: Bytes,
}

impl Default for CapacitySettings {
    fn default() -> Self {
        Self { ratio: 1.0, reserve: Bytes(0) }
    }
}

impl CapacitySettings {
    /// The policy with these settings.
    ///
    /// # Errors
    /// [`InvalidRatio`]. The ratio is not checked before, as flags may override the file.
    pub fn policy(self) -> Result<CapacityPolicy, InvalidRatio> {
        CapacityPolicy::try_new(self.ratio, self.reserve)
    }
}

/// The directory of a store is that of another one, or below it: they would share a disk, and one would find the other among its
/// files.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{store} has the directory {}, which is that of {other}, {}, or below it: give each store a directory of its own, on a file \
     system of its own",
    path.display(), other_path.display()
)]
#[allow(clippy::exhaustive_structs, reason = "complete by nature: the two stores")]
pub struct OverlappingStores {
    /// The store, such as `store fast`.
    pub store: String,
    /// Its directory.
    pub path: PathBuf,
    /// The other store.
    pub other: String,
    /// The directory of that.
    pub other_path: PathBuf,
}

/// Checks that no store has its directory in that of another one. `directory` is that of the store without a name.
///
/// # Errors
/// [`OverlappingStores`], by the paths alone: links are not followed.
pub fn check_store_directories(
    directory: Option<&Path>,
    stores: &BTreeMap<StoreName, PathBuf>,
) -> Result<(), OverlappingStores> {
    let named = stores.iter().map(|(name, path)| (format!("store {name}"), path.as_path()));
    let unnamed = directory.map(|path| ("the store without a name".to_owned(), path));
    let all: Vec<_> = named.chain(unnamed).collect();
    for (at, (store, path)) in all.iter().enumerate() {
        let mut others = all.iter().enumerate().filter(|(other, _)| *other != at);
        if let Some((_, (other, other_path))) = others.find(|(_, (_, it))| path.starts_with(it)) {
            return Err(OverlappingStores {
                store: store.clone(),
                path: path.to_path_buf(),
                other: other.clone(),
                other_path: other_path.to_path_buf(),
            });
        }
    }
    Ok(())
}

/// `audit`: how the limits of volumes are audited.
///
/// The default audits every six hours, and inspects 1000 entries in a second at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AuditSettings {
    /// The time between two audits, at least [`MIN_AUDIT_INTERVAL`]: files that left their limits are reported
    /// by then.
    #[serde(deserialize_with = "deserialize_audit_interval")]
    pub interval: Duration,
    /// Files and directories that an audit inspects in a second, at most.
    pub rate: NonZeroU32,
}

impl Default for AuditSettings {
    fn default() -> Self {
        Self { interval: Duration::from_secs(6 * 60 * 60), rate: NonZeroU32::MIN.saturating_add(999) }
    }
}

/// The text is not a duration of at least [`MIN_AUDIT_INTERVAL`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid interval {0:?}: use a duration of at least a second, such as \"30m\"")]
pub struct InvalidInterval(String);

/// Parses the time between two audits.
///
/// # Errors
/// [`InvalidInterval`].
pub fn parse_audit_interval(text: &str) -> Result<Duration, InvalidInterval> {
    let interval = parse_duration(text).filter(|interval| *interval >= MIN_AUDIT_INTERVAL);
    interval.ok_or_else(|| InvalidInterval(text.to_owned()))
}

/// Reads a duration from text in [jiff's friendly format](jiff::fmt::friendly), such as `500ms`, `10s`, `30m`
/// or `1h 30m`, for `#[serde(deserialize_with)]`.
///
/// # Errors
/// Another text, a negative duration, or a unit longer than an hour.
pub fn deserialize_duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    deserializer.deserialize_str(DurationVisitor)
}

struct DurationVisitor;

impl Visitor<'_> for DurationVisitor {
    type Value = Duration;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(r#"a duration with its unit in quotes, like "500ms", "10s", "2m" or "1h 30m""#)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Duration, E> {
        parse_duration(text).ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
    }
}

fn parse_duration(text: &str) -> Option<Duration> {
    Duration::try_from(text.parse::<SignedDuration>().ok()?).ok()
}

fn deserialize_audit_interval<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    parse_audit_interval(&String::deserialize(deserializer)?).map_err(D::Error::custom)
}

/// Reads the mode of a file from the text of an octal number, for `#[serde(deserialize_with)]`.
///
/// # Errors
/// The text is not a number from `0` to `7777` in octal digits.
pub fn deserialize_mode<'de, D: Deserializer<'de>>(deserializer: D) -> Result<FileMode, D::Error> {
    let text = String::deserialize(deserializer)?;
    match u16::from_str_radix(&text, 8) {
        Ok(mode) if mode <= 0o7777 => Ok(FileMode::new(mode.into())),
        _ => Err(D::Error::custom(format!("invalid mode {text:?}: use octal digits, as in \"0777\""))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Config {
        capacity: CapacitySettings,
        audit: AuditSettings,
        #[serde(deserialize_with = "deserialize_duration")]
        delay: Duration,
        #[serde(deserialize_with = "deserialize_mode")]
        mode: FileMode,
        node: Option<crate::NodeName>,
    }

    impl Default for Config {
        fn default() -> Self {
            Self {
                capacity: CapacitySettings::default(),
                audit: AuditSettings::default(),
                delay: Duration::ZERO,
                mode: FileMode::new(0o777),
                node: None,
            }
        }
    }

    #[test]
    fn a_duration_needs_units_and_no_sign() {
        for (text, millis) in [
            ("500ms", Some(500)),
            ("1.5s", Some(1500)),
            ("2 m", Some(120_000)),
            ("1h", Some(3_600_000)),
            ("1h 30m", Some(5_400_000)),
        ]
        .into_iter()
        .chain(["", "10", "s", "-1s", "1 day", "1..5s", "ms", "1e3s"].map(|text| (text, None)))
        {
            assert_eq!(parse_duration(text), millis.map(Duration::from_millis), "{text:?}");
        }
    }

    #[test]
    fn missing_keys_have_defaults_and_the_others_are_independent() {
        assert_eq!(toml::from_str(""), Ok(Config::default()));
        let config: Config = toml::from_str(
            "delay = \"10s\"\nmode = \"0750\"\nnode = \"node-a\"\ncapacity.reserve = 1024\naudit.rate = 5\n",
        )
        .expect("a configuration");
        assert_eq!(config.delay, Duration::from_secs(10));
        assert_eq!(config.mode, FileMode::new(0o750));
        assert_eq!(config.node.as_ref().map(crate::NodeName::as_str), Some("node-a"));
        assert_eq!(config.capacity, CapacitySettings { ratio: 1.0, reserve: Bytes(1024) });
        assert_eq!(config.audit.interval, Duration::from_secs(6 * 60 * 60));
        assert_eq!(config.audit.rate.get(), 5);
    }

    #[test]
    fn an_invalid_value_is_rejected_with_what_to_write() {
        for (text, why) in [
            ("capacity.size = 1", "unknown field `size`"),
            ("capacity.reserve = \"10Qi\"", "unknown suffix \"Qi\": use Ki"),
            ("audit.rate = 0", "expected a nonzero u32"),
            ("audit.interval = \"500ms\"", "invalid interval \"500ms\": use a duration of at least a second"),
            ("audit.interval = \"6\"", "invalid interval \"6\": use"),
            ("delay = \"6\"", "invalid value: string \"6\", expected a duration with its unit in quotes"),
            ("delay = 6", "expected a duration with its unit in quotes"),
            ("mode = \"rwx\"", "invalid mode \"rwx\": use octal digits"),
            ("mode = \"17777\"", "invalid mode \"17777\""),
            ("node = \"Node\"", "invalid node name \"Node\""),
        ] {
            let error = toml::from_str::<Config>(text).expect_err(text).to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
        let ratio = CapacitySettings { ratio: 0.0, ..CapacitySettings::default() };
        assert_eq!(ratio.policy(), Err(InvalidRatio { ratio: 0.0 }));
    }
}

//! `[[service]]`: a program of the operator.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use nodekeel_fsquota::Bytes;
use nodekeel_logtree::parse::{LogFormat, LogZone};
use nodekeel_supervisor::Backoff;
use nodekeel_supervisor::process::{Capability, Rlimit, RlimitResource, Signal};
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Unexpected, Visitor};

use crate::config::value::{deserialize_duration, deserialize_optional_duration};

/// `[[service]]`: a program of the operator.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserService {
    /// The name; the DN is `root.service.<name>`.
    pub name: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// The complete environment.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// User that runs it; `None` is noded's. Another user needs root.
    #[serde(default)]
    pub user: Option<String>,
    /// The working directory.
    #[serde(default = "root_directory")]
    pub directory: PathBuf,
    /// Services that must be ready before it starts.
    #[serde(default)]
    pub depends_on: Vec<String>,
    /// Restarts it when one of them is no longer ready; else it runs on.
    #[serde(default)]
    pub restart_with_dependencies: bool,
    /// When it is ready.
    #[serde(default)]
    pub readiness: ReadinessConfig,
    /// When it restarts; `None` is always, and on failure with readiness `"exit"`.
    #[serde(default)]
    pub restart: Option<RestartPolicy>,
    /// Delays between restarts.
    #[serde(default)]
    pub backoff: BackoffConfig,
    /// The number of restarts after failures before it stays dead; `None` is as often as it fails.
    #[serde(default)]
    pub restart_limit: Option<RestartLimitConfig>,
    /// Grace period; `None` is `node.grace`.
    #[serde(default, deserialize_with = "deserialize_optional_duration")]
    pub grace: Option<Duration>,
    /// The limit to which it can extend its grace period (sd_notify); `None` is not at all.
    #[serde(default, deserialize_with = "deserialize_optional_duration")]
    pub grace_max: Option<Duration>,
    /// The signal that asks it to stop; `None` is SIGTERM.
    #[serde(default, deserialize_with = "deserialize_optional_text")]
    pub stop_signal: Option<Signal>,
    /// Interval in which it must report to its watchdog (sd_notify).
    #[serde(default, deserialize_with = "deserialize_optional_duration")]
    pub watchdog: Option<Duration>,
    /// The probe of a service that is ready.
    #[serde(default)]
    pub liveness: Option<LivenessConfig>,
    /// The signal or command that asks it to read its configuration again.
    #[serde(default)]
    pub reload: Option<ReloadConfig>,
    /// True if it keeps running when noded is killed; the next noded adopts it.
    #[serde(default)]
    pub keep: bool,
    /// The format of its log.
    #[serde(default, deserialize_with = "deserialize_text")]
    pub log: LogFormat,
    /// The zone of the times in its log that name none, as a value of `TZ`; `None` for that of its environment, and
    /// without one that of the machine.
    #[serde(default, deserialize_with = "deserialize_optional_text")]
    pub log_zone: Option<LogZone>,
    /// The limits of what it may use.
    #[serde(default)]
    pub limits: ServiceLimits,
    /// The privileges that it has.
    #[serde(default)]
    pub privileges: ServicePrivileges,
}

fn root_directory() -> PathBuf {
    "/".into()
}

/// When a service is ready.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ReadinessConfig {
    /// `"started"`: when it runs.
    #[default]
    Started,
    /// `"notify"`: when it reports readiness to `NOTIFY_SOCKET` (sd_notify).
    Notify,
    /// `"exit"`: when it has exited with 0; a one-shot step, not a daemon.
    Exit,
    /// `{ probe = [..], timeout = ".." }`: when a command exits with 0.
    Probe {
        /// The probe's program and its arguments.
        command: Vec<String>,
        /// The time for which the probe is repeated before the incarnation has failed.
        timeout: Duration,
    },
}

/// When a service restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum RestartPolicy {
    /// After every exit.
    Always,
    /// After a failure; exit code 0 completes it.
    OnFailure,
    /// Never.
    Never,
}

/// Delay between restarts: `initial` × `factor`^n, at most `max`, plus or minus the share `jitter`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BackoffConfig {
    /// The first delay.
    #[serde(deserialize_with = "deserialize_duration")]
    pub initial: Duration,
    /// Factor of each further failure.
    pub factor: f64,
    /// The longest delay.
    #[serde(deserialize_with = "deserialize_duration")]
    pub max: Duration,
    /// Random share that is added or subtracted.
    pub jitter: f64,
}

impl BackoffConfig {
    /// The same for the supervisor.
    pub(crate) fn to_backoff(self) -> Backoff {
        let Self { initial, factor, max, jitter } = self;
        Backoff { initial, factor, max, jitter }
    }
}

impl Default for BackoffConfig {
    fn default() -> Self {
        let Backoff { initial, factor, max, jitter, .. } = Backoff::default();
        Self { initial, factor, max, jitter }
    }
}

/// `restart_limit`: how often a service restarts after failures before it stays dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RestartLimitConfig {
    /// Restarts within the period.
    pub restarts: u32,
    /// The period.
    #[serde(deserialize_with = "deserialize_duration")]
    pub period: Duration,
}

impl<'de> Deserialize<'de> for ReadinessConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ReadinessVisitor)
    }
}

struct ReadinessVisitor;

impl<'de> Visitor<'de> for ReadinessVisitor {
    type Value = ReadinessConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(r#""started", "notify", "exit" or { probe = ["command", ..], timeout = "60s" }"#)
    }

    fn visit_str<E: Error>(self, word: &str) -> Result<ReadinessConfig, E> {
        match word {
            "started" => Ok(ReadinessConfig::Started),
            "notify" => Ok(ReadinessConfig::Notify),
            "exit" => Ok(ReadinessConfig::Exit),
            other => Err(E::invalid_value(serde::de::Unexpected::Str(other), &self)),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ReadinessConfig, A::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Table {
            probe: Vec<String>,
            #[serde(default = "probe_timeout", deserialize_with = "deserialize_duration")]
            timeout: Duration,
        }
        let table = Table::deserialize(MapAccessDeserializer::new(map))?;
        Ok(ReadinessConfig::Probe { command: table.probe, timeout: table.timeout })
    }
}

fn probe_timeout() -> Duration {
    Duration::from_secs(60)
}

/// `limits`: what a service may use.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServiceLimits {
    /// Memory of all its processes.
    pub memory_max: Option<Bytes>,
    /// CPUs that it may use at a time: 1.5 is one and a half.
    pub cpu_max: Option<f64>,
    /// Number of its processes and threads.
    pub pids_max: Option<u64>,
    /// Share of disk time among other services, 1 to 10000; the kernel's default is 100.
    pub io_weight: Option<u16>,
    /// Which process the kernel kills first when memory runs out, -1000 to 1000. `None` is noded's, or 0 if that is
    /// negative.
    pub oom_score_adj: Option<i16>,
    /// Limits of each process by itself, by the name in setrlimit(2).
    #[serde(deserialize_with = "deserialize_rlimits")]
    pub rlimits: Vec<Rlimit>,
}

/// `privileges`: what a service may do, besides what its user may.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServicePrivileges {
    /// Supplementary groups, besides those of its user.
    pub groups: Vec<String>,
    /// Capabilities that it keeps; `None` is what the kernel gives its user.
    #[serde(deserialize_with = "deserialize_capabilities")]
    pub capabilities: Option<Vec<Capability>>,
    /// True if no program can gain privileges; `None` is true, unless it runs as root.
    pub no_new_privs: Option<bool>,
    /// Paths that it can't write to.
    pub read_only_paths: Vec<PathBuf>,
    /// Permissions that its files don't get, in octal.
    #[serde(deserialize_with = "deserialize_umask")]
    pub umask: Option<u32>,
}

/// `liveness`: a command that must exit with 0 for the service to be ready, and stay so.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LivenessConfig {
    /// The probe's program and its arguments.
    pub probe: Vec<String>,
    /// Pause before each probe.
    #[serde(default = "liveness_period", deserialize_with = "deserialize_duration")]
    pub period: Duration,
    /// Timeout of one probe.
    #[serde(default = "liveness_timeout", deserialize_with = "deserialize_duration")]
    pub timeout: Duration,
    /// The number of probes in a row that must fail before the service restarts.
    #[serde(default = "failure_threshold")]
    pub failure_threshold: u32,
}

fn liveness_period() -> Duration {
    Duration::from_secs(10)
}

fn liveness_timeout() -> Duration {
    Duration::from_secs(5)
}

fn failure_threshold() -> u32 {
    3
}

/// `reload`: how a service is asked to read its configuration again.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReloadConfig {
    /// `"SIGHUP"`: by a signal.
    Signal(Signal),
    /// `["program", "argument", ..]`: by a command, which finds the pid in `MAINPID`.
    Command(Vec<String>),
}

impl<'de> Deserialize<'de> for ReloadConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ReloadVisitor;
        impl<'de> Visitor<'de> for ReloadVisitor {
            type Value = ReloadConfig;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(r#"a signal like "SIGHUP", or a command like ["program", "argument"]"#)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<ReloadConfig, E> {
                text.parse().map(ReloadConfig::Signal).map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<ReloadConfig, A::Error> {
                let mut command = Vec::new();
                while let Some(item) = items.next_element()? {
                    command.push(item);
                }
                Ok(ReloadConfig::Command(command))
            }
        }
        deserializer.deserialize_any(ReloadVisitor)
    }
}

/// A value that is written as text.
fn deserialize_text<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: fmt::Display>,
{
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}

/// The same for an optional key.
fn deserialize_optional_text<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: fmt::Display>,
{
    deserialize_text(deserializer).map(Some)
}

/// An integer, or text.
#[derive(Deserialize)]
#[serde(untagged, expecting = "must be a whole number, without quotes, or text in quotes")]
enum NumberOrText {
    Number(u64),
    Text(String),
}

fn deserialize_umask<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    // Text, since TOML rejects a number with a leading zero, as modes are usually written.
    let text = String::deserialize(deserializer)?;
    match u32::from_str_radix(&text, 8) {
        Ok(mask) if mask <= 0o777 => Ok(Some(mask)),
        _ => Err(D::Error::invalid_value(Unexpected::Str(&text), &r#"an octal number, like "022""#)),
    }
}

fn deserialize_capabilities<'de, D>(deserializer: D) -> Result<Option<Vec<Capability>>, D::Error>
where
    D: Deserializer<'de>,
{
    let names = Vec::<String>::deserialize(deserializer)?;
    let capabilities = names.iter().map(|name| name.parse().map_err(D::Error::custom));
    capabilities.collect::<Result<_, _>>().map(Some)
}

fn deserialize_rlimits<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Rlimit>, D::Error> {
    let expected = &r#"a number, "unlimited", or a soft and a hard limit like "1024:4096""#;
    let limits = BTreeMap::<String, NumberOrText>::deserialize(deserializer)?;
    let parse = |(name, value): (String, NumberOrText)| {
        let resource: RlimitResource = name.parse().map_err(D::Error::custom)?;
        let (soft, hard) = match value {
            NumberOrText::Number(limit) => (Some(limit), Some(limit)),
            NumberOrText::Text(text) => parse_rlimit(&text)
                .ok_or_else(|| D::Error::invalid_value(Unexpected::Str(&text), expected))?,
        };
        Ok(Rlimit::new(resource, soft, hard))
    };
    limits.into_iter().map(parse).collect()
}

/// A soft and a hard limit; `None` is unlimited.
fn parse_rlimit(text: &str) -> Option<(Option<u64>, Option<u64>)> {
    let parse = |text: &str| match text {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    };
    // A single value is both limits.
    let (soft, hard) = text.split_once(':').unwrap_or((text, text));
    Some((parse(soft)?, parse(hard)?))
}

#[cfg(test)]
#[path = "config_test.rs"]
mod tests;

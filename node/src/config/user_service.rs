//! `[[service]]`: a program of the operator.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use nodekeel_logtree::parse::LogFormat;
use nodekeel_supervisor::process::{Capability, Rlimit, RlimitResource, Signal};
use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Unexpected, Visitor};

use super::check::{ConfigViolation, check_absolute_path, check_duration, check_no_nul, reject_field};
use super::value::{
    BackoffConfig, ReadinessConfig, RestartLimitConfig, RestartPolicy, deserialize_duration,
    deserialize_optional_duration,
};

/// `[[service]]`: a program of the operator.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UserService {
    /// Its name; its DN is `root.service.<name>`.
    pub name: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Its complete environment.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// User that runs it; `None` is noded's. Another user needs root.
    #[serde(default)]
    pub user: Option<String>,
    /// Its working directory.
    #[serde(default = "root_directory")]
    pub directory: PathBuf,
    /// Services that must be ready before it starts.
    #[serde(default)]
    pub depends_on: Vec<String>,
    /// When it is ready.
    #[serde(default)]
    pub readiness: ReadinessConfig,
    /// When it restarts; `None` is always, and on failure with readiness `"exit"`.
    #[serde(default)]
    pub restart: Option<RestartPolicy>,
    /// Delays between restarts.
    #[serde(default)]
    pub backoff: BackoffConfig,
    /// How often it restarts after failures before it stays dead; `None` is as often as it fails.
    #[serde(default)]
    pub restart_limit: Option<RestartLimitConfig>,
    /// Grace period; `None` is `node.grace`.
    #[serde(default, deserialize_with = "deserialize_optional_duration")]
    pub grace: Option<Duration>,
    /// How far it can extend its grace period (sd_notify); `None` is not at all.
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
    /// How it is asked to read its configuration again.
    #[serde(default)]
    pub reload: Option<ReloadConfig>,
    /// Whether it keeps running when noded is killed; the next noded adopts it.
    #[serde(default)]
    pub keep: bool,
    /// The format of its log.
    #[serde(default, deserialize_with = "deserialize_text")]
    pub log: LogFormat,
    /// What it may use.
    #[serde(default)]
    pub limits: ServiceLimits,
    /// What it may do.
    #[serde(default)]
    pub privileges: ServicePrivileges,
}

fn root_directory() -> PathBuf {
    "/".into()
}

/// `limits`: what a service may use.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServiceLimits {
    /// Memory of all its processes, in bytes.
    #[serde(deserialize_with = "deserialize_bytes")]
    pub memory_max: Option<u64>,
    /// CPUs that it may use at a time: 1.5 is one and a half.
    pub cpu_max: Option<f64>,
    /// Number of its processes and threads.
    pub pids_max: Option<u64>,
    /// Share of disk time beside other services, 1 to 10000; the kernel's default is 100.
    pub io_weight: Option<u16>,
    /// Which process the kernel kills first when memory runs out, -1000 to 1000. `None` is noded's, or 0 if that is
    /// negative.
    pub oom_score_adj: Option<i16>,
    /// Limits of each process by itself, by the name in setrlimit(2).
    #[serde(deserialize_with = "deserialize_rlimits")]
    pub rlimits: Vec<Rlimit>,
}

/// `privileges`: what a service may do, beside what its user may.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServicePrivileges {
    /// Supplementary groups, beside those of its user.
    pub groups: Vec<String>,
    /// Capabilities that it keeps; `None` is what the kernel gives its user.
    #[serde(deserialize_with = "deserialize_capabilities")]
    pub capabilities: Option<Vec<Capability>>,
    /// Whether no program can gain privileges; `None` is true, unless it runs as root.
    pub no_new_privs: Option<bool>,
    /// Paths that it can't write to.
    pub read_only_paths: Vec<PathBuf>,
    /// Permissions that its files don't get, in octal.
    #[serde(deserialize_with = "deserialize_umask")]
    pub umask: Option<u32>,
}

/// `liveness`: a command that must exit with 0 while the service is ready.
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
    /// How many probes in a row must fail before the service restarts.
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

fn deserialize_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let expected = &r#"bytes, like "512MiB", "2GiB" or 65536"#;
    match NumberOrText::deserialize(deserializer)? {
        NumberOrText::Number(bytes) => Ok(Some(bytes)),
        NumberOrText::Text(text) => match parse_bytes(&text) {
            Some(bytes) => Ok(Some(bytes)),
            None => Err(D::Error::invalid_value(Unexpected::Str(&text), expected)),
        },
    }
}

fn parse_bytes(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim_start() {
        "" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn deserialize_umask<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
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
    let (soft, hard) = text.split_once(':').unwrap_or((text, text));
    Some((parse(soft)?, parse(hard)?))
}

/// Checks the settings in this file.
pub(super) fn check_user_service(index: usize, service: &UserService) -> Result<(), ConfigViolation> {
    let field = |name: &str| format!("service[{index}].{name}");
    if service.keep && service.readiness == ReadinessConfig::Exit {
        let message = "can't be kept with readiness \"exit\": its exit code would be lost; remove keep";
        return reject_field(field("keep"), message);
    }
    check_limits(&field("limits"), &service.limits)?;
    check_no_nul(&field("privileges.groups"), &service.privileges.groups)?;
    for path in &service.privileges.read_only_paths {
        check_absolute_path(&field("privileges.read_only_paths"), path)?;
    }
    check_duration(&field("watchdog"), service.watchdog)?;
    if service.watchdog.is_some_and(|interval| interval.is_zero()) {
        return reject_field(field("watchdog"), "the interval must be above 0; use \"30s\"");
    }
    check_duration(&field("grace_max"), service.grace_max)?;
    if let Some(liveness) = &service.liveness {
        check_liveness(&field("liveness"), liveness)?;
    }
    if let Some(ReloadConfig::Command(command)) = &service.reload {
        check_command(&field("reload"), command)?;
    }
    Ok(())
}

fn check_limits(field: &str, limits: &ServiceLimits) -> Result<(), ConfigViolation> {
    let reject = |name: &str, message: String| reject_field(format!("{field}.{name}"), message);
    // The kernel's period is 100 ms, and its shortest share of it is 1 ms.
    if let Some(cpus) = limits.cpu_max.filter(|cpus| !(0.01..=4096.0).contains(cpus)) {
        return reject("cpu_max", format!("{cpus} is not between 0.01 and 4096 CPUs"));
    }
    if limits.pids_max == Some(0) {
        return reject("pids_max", "must be at least 1: the service itself".to_owned());
    }
    if let Some(weight) = limits.io_weight.filter(|weight| !(1..=10_000).contains(weight)) {
        return reject("io_weight", format!("{weight} is not between 1 and 10000"));
    }
    if let Some(score) = limits.oom_score_adj.filter(|score| !(-1000..=1000).contains(score)) {
        return reject("oom_score_adj", format!("{score} is not between -1000 and 1000"));
    }
    let is_inverted = |limit: &&Rlimit| match (limit.soft, limit.hard) {
        (_, None) => false,
        (None, Some(_)) => true,
        (Some(soft), Some(hard)) => soft > hard,
    };
    match limits.rlimits.iter().find(is_inverted) {
        Some(limit) => reject("rlimits", format!("the soft limit of {limit} exceeds the hard one")),
        None => Ok(()),
    }
}

fn check_liveness(field: &str, liveness: &LivenessConfig) -> Result<(), ConfigViolation> {
    check_command(field, &liveness.probe)?;
    for (name, duration) in [("period", liveness.period), ("timeout", liveness.timeout)] {
        let field = format!("{field}.{name}");
        check_duration(&field, Some(duration))?;
        if duration.is_zero() {
            return reject_field(field, "must be above 0; use \"10s\"");
        }
    }
    if liveness.failure_threshold == 0 {
        return reject_field(format!("{field}.failure_threshold"), "must be at least 1");
    }
    Ok(())
}

fn check_command(field: &str, command: &[String]) -> Result<(), ConfigViolation> {
    if command.first().is_none_or(String::is_empty) {
        return reject_field(field, "has no command; use [\"program\", \"argument\", ..]");
    }
    check_no_nul(field, command)
}

#[cfg(test)]
#[path = "user_service_test.rs"]
mod tests;

//! Rules between the keys of a `[[service]]`.

use std::time::Duration;

use nodekeel_supervisor::process::Rlimit;

use super::config::{
    LivenessConfig, ReadinessConfig, ReloadConfig, RestartLimitConfig, RestartPolicy, ServiceLimits,
    UserService,
};
use crate::config::NodedConfig;
use crate::config::check::{
    ConfigViolation, check_absolute_path, check_duration, check_no_nul, reject_field,
};
use crate::dn::is_valid_runnable_name;

/// Maximum number of restarts that a limit counts.
const MAX_RESTARTS: u32 = 1000;

/// Minimum backoff: without one, a service that can't start would use a whole core.
const MIN_BACKOFF: Duration = Duration::from_millis(1);

/// Checks the fields of a service.
pub(super) fn check_service(
    config: &NodedConfig,
    index: usize,
    service: &UserService,
) -> Result<(), ConfigViolation> {
    let field = |name: &str| format!("service[{index}].{name}");
    let name = &service.name;
    if !is_valid_runnable_name(name) {
        return reject_field(
            field("name"),
            format!("{name:?} is not a valid name; use 1 to 64 of a-z, 0-9, '_' and '-'"),
        );
    }
    if config.service[..index].iter().any(|other| other.name == *name) {
        return reject_field(field("name"), format!("duplicate service name {name:?}; use another name"));
    }
    if service.command.first().is_none_or(String::is_empty) {
        return reject_field(
            field("command"),
            format!("{name} has no command; use [\"program\", \"argument\", ..]"),
        );
    }
    if let ReadinessConfig::Probe { command, .. } = &service.readiness
        && command.first().is_none_or(String::is_empty)
    {
        return reject_field(field("readiness"), format!("the probe of {name} has no command"));
    }
    // A step that restarts after its exit would never be done.
    if service.readiness == ReadinessConfig::Exit && service.restart == Some(RestartPolicy::Always) {
        let message =
            format!("readiness \"exit\" of {name} conflicts with restart \"always\"; use \"on-failure\"");
        return reject_field(field("restart"), message);
    }
    if service.restart_with_dependencies && service.depends_on.is_empty() {
        let message = format!("{name} depends on nothing; name it in depends_on");
        return reject_field(field("restart_with_dependencies"), message);
    }
    // An environment consists of strings `NAME=value` (environ(7)).
    if let Some(key) = service.environment.keys().find(|key| key.is_empty() || key.contains(['=', '\0'])) {
        return reject_field(field("environment"), format!("{key:?} is not a valid variable name"));
    }
    if service.privileges.capabilities.is_some()
        && matches!(service.user.as_deref(), None | Some("root" | "0"))
    {
        let message = format!(
            "{name} would run as root, which owns the node's files and its control socket, with or without capabilities: \
             add `user = \"...\"`, or remove the key"
        );
        return reject_field(field("privileges.capabilities"), message);
    }
    check_strings(index, service)?;
    check_duration(&field("grace"), service.grace)?;
    check_absolute_path(&field("directory"), &service.directory)?;
    check_user_service(index, service)?;
    check_backoff(index, service)?;
    check_restart_limit(index, service)
}

fn check_strings(index: usize, service: &UserService) -> Result<(), ConfigViolation> {
    let field = |name: &str| format!("service[{index}].{name}");
    check_no_nul(&field("command"), &service.command)?;
    check_no_nul(&field("environment"), service.environment.values())?;
    check_no_nul(&field("user"), service.user.as_deref())?;
    if let ReadinessConfig::Probe { command, timeout } = &service.readiness {
        check_no_nul(&field("readiness"), command)?;
        check_duration(&field("readiness"), Some(*timeout))?;
        if timeout.is_zero() {
            return reject_field(field("readiness"), "the timeout must be above 0; use \"60s\"");
        }
    }
    Ok(())
}

fn check_backoff(index: usize, service: &UserService) -> Result<(), ConfigViolation> {
    let field = |name: &str| format!("service[{index}].backoff.{name}");
    let backoff = &service.backoff;
    // The negation also rejects NaN.
    if !(backoff.factor >= 1.0 && backoff.factor.is_finite()) {
        return reject_field(field("factor"), format!("{} is less than 1", backoff.factor));
    }
    if !(0.0..=1.0).contains(&backoff.jitter) {
        return reject_field(field("jitter"), format!("{} is not between 0 and 1", backoff.jitter));
    }
    if backoff.initial < MIN_BACKOFF {
        let message = "must be at least \"1ms\": a service that can't start would restart without a pause";
        return reject_field(field("initial"), message);
    }
    check_duration(&field("max"), Some(backoff.max))?;
    if backoff.initial > backoff.max {
        return reject_field(
            field("initial"),
            format!("{:?} exceeds max, {:?}", backoff.initial, backoff.max),
        );
    }
    Ok(())
}

/// Checks that a restart limit is reached by a service that fails at once, each time.
fn check_restart_limit(index: usize, service: &UserService) -> Result<(), ConfigViolation> {
    let field = |name: &str| format!("service[{index}].restart_limit{name}");
    let Some(RestartLimitConfig { restarts, period }) = service.restart_limit else { return Ok(()) };
    if service.restart == Some(RestartPolicy::Never) {
        return reject_field(field(""), "conflicts with restart \"never\"; remove one of them");
    }
    if restarts > MAX_RESTARTS {
        let message = format!("{restarts} restarts are too many to count; use at most {MAX_RESTARTS}");
        return reject_field(field(".restarts"), message);
    }
    check_duration(&field(".period"), Some(period))?;
    let backoff = service.backoff.to_backoff();
    // A chance of 0 gives the shortest delay that the jitter allows.
    let shortest = |failures| backoff.jittered_delay(failures, 0.0);
    let elapsed: Duration = (2..=restarts).map(shortest).sum();
    if elapsed >= period {
        reject_field(
            field(".period"),
            format!("{period:?} is too short: by its backoff, {restarts} restarts take at least {elapsed:?}"),
        )
    } else {
        Ok(())
    }
}

/// Checks the settings in this file.
fn check_user_service(index: usize, service: &UserService) -> Result<(), ConfigViolation> {
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
    // The range of `io.weight`. *Source:* Documentation/admin-guide/cgroup-v2.rst.
    if let Some(weight) = limits.io_weight.filter(|weight| !(1..=10_000).contains(weight)) {
        return reject("io_weight", format!("{weight} is not between 1 and 10000"));
    }
    // The range of proc_pid_oom_score_adj(5).
    if let Some(score) = limits.oom_score_adj.filter(|score| !(-1000..=1000).contains(score)) {
        return reject("oom_score_adj", format!("{score} is not between -1000 and 1000"));
    }
    // `None` is unlimited.
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

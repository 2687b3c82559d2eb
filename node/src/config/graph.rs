//! Rules between fields: names, ports, sizes and services.

use std::path::Path;
use std::time::Duration;

use super::check::{
    ConfigViolation, check_absolute_path, check_duration, check_no_nul, check_program, reject_field,
};
use super::health::check_health;
use super::user_service::check_user_service;
use super::{EtcdConfig, NodedConfig, ReadinessConfig, RestartLimitConfig, RestartPolicy, UserService};
use crate::dn::is_valid_runnable_name;

/// Minimum size of a log: an entry may take a quarter of it.
const MIN_LOG_BYTES: usize = 64 * 1024;

/// Maximum number of kept events; each takes some hundred bytes.
const MAX_EVENTS: usize = 1_000_000;

/// Maximum number of restarts that a limit counts.
const MAX_RESTARTS: u32 = 1000;

/// Minimum backoff: without one, a service that can't start would use a whole core.
const MIN_BACKOFF: Duration = Duration::from_millis(1);

/// Checks the rules between fields that belong to no part.
pub(super) fn check_core(config: &NodedConfig) -> Result<(), ConfigViolation> {
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

/// Checks the rules between fields of etcd.
pub(crate) fn check_etcd(etcd: &EtcdConfig) -> Result<(), ConfigViolation> {
    if etcd.client_port == etcd.peer_port {
        return reject_field(
            "services.etcd.peer_port",
            format!("{} is already client_port; use another port", etcd.peer_port),
        );
    }
    check_program("services.etcd", etcd.binary.as_deref(), &etcd.extra_args)
}

fn check_sizes(config: &NodedConfig) -> Result<(), ConfigViolation> {
    let log = &config.log;
    for (field, bytes) in [("log.bytes", log.bytes), ("log.bytes_per_dn", log.bytes_per_dn)] {
        if bytes.get() < MIN_LOG_BYTES {
            return reject_field(
                field,
                format!("{bytes} is too small for a log; use at least {MIN_LOG_BYTES}"),
            );
        }
    }
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

/// Checks the fields of a service.
pub(crate) fn check_service(
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
    if service.readiness == ReadinessConfig::Exit && service.restart == Some(RestartPolicy::Always) {
        let message =
            format!("readiness \"exit\" of {name} conflicts with restart \"always\"; use \"on-failure\"");
        return reject_field(field("restart"), message);
    }
    if let Some(key) = service.environment.keys().find(|key| key.is_empty() || key.contains(['=', '\0'])) {
        return reject_field(field("environment"), format!("{key:?} is not a valid variable name"));
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
    let shortest = |failures| backoff.jittered_delay(failures, 0.0);
    let elapsed: Duration = (2..=restarts).map(shortest).sum();
    match elapsed >= period {
        true => reject_field(
            field(".period"),
            format!("{period:?} is too short: by its backoff, {restarts} restarts take at least {elapsed:?}"),
        ),
        false => Ok(()),
    }
}

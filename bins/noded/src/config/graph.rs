//! Rules between fields: names, ports, and dependencies of services.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use super::check::{
    ConfigViolation, check_absolute_path, check_duration, check_no_nul, check_program, reject_field,
};
use super::{
    BUILT_IN_SERVICES, NodedConfig, PRESEED, ReadinessConfig, RestartPolicy, UserService, cluster,
    containerd, provisioner,
};

/// Minimum size of a log: an entry may take a quarter of it.
const MIN_LOG_BYTES: usize = 64 * 1024;

/// Maximum number of kept events; each takes some hundred bytes.
const MAX_EVENTS: usize = 1_000_000;

/// Minimum backoff: without one, a service that can't start would use a whole core.
const MIN_BACKOFF: Duration = Duration::from_millis(1);

/// Checks the rules between fields of the whole configuration.
pub(super) fn check_config(config: &NodedConfig) -> Result<(), ConfigViolation> {
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
    let etcd = &config.services.etcd;
    if etcd.client_port == etcd.peer_port {
        return reject_field(
            "services.etcd.peer_port",
            format!("{} is already client_port; use another port", etcd.peer_port),
        );
    }
    check_program("services.etcd", etcd.binary.as_deref(), &etcd.extra_args)?;
    containerd::check_containerd(&config.services.containerd)?;
    check_duration("node.grace", Some(config.node.grace))?;
    check_sizes(config)?;
    cluster::check_cluster(config)?;
    provisioner::check_provisioner(config)?;
    for (index, service) in config.service.iter().enumerate() {
        check_service(config, index, service)?;
    }
    check_cycles(&config.service)
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

/// Whether the name of a service or of an additional runnable is valid: 1 to 64 of `a-z`, `0-9`, `_` and `-`. It becomes a part of a DN.
pub fn is_valid_runnable_name(name: &str) -> bool {
    let valid = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b'-';
    (1..=64).contains(&name.len()) && name.bytes().all(valid)
}

fn check_service(config: &NodedConfig, index: usize, service: &UserService) -> Result<(), ConfigViolation> {
    let field = |name: &str| format!("service[{index}].{name}");
    let name = &service.name;
    if !is_valid_runnable_name(name) {
        return reject_field(
            field("name"),
            format!("{name:?} is not a valid name; use 1 to 64 of a-z, 0-9, '_' and '-'"),
        );
    }
    if BUILT_IN_SERVICES.contains(&name.as_str()) {
        return reject_field(field("name"), format!("{name:?} is a built-in service; use another name"));
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
    check_backoff(index, service)?;
    check_dependencies(config, index, service)
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

fn check_dependencies(
    config: &NodedConfig,
    index: usize,
    service: &UserService,
) -> Result<(), ConfigViolation> {
    let services = &config.services;
    for (at, dependency) in service.depends_on.iter().enumerate() {
        let field = format!("service[{index}].depends_on[{at}]");
        if service.depends_on[..at].contains(dependency) {
            return reject_field(field, format!("duplicate dependency {dependency:?}; remove one"));
        }
        let enabled = match dependency.as_str() {
            "etcd" if config.cluster.is_some() => {
                let message = "etcd is a part of [cluster]; depend on \"cluster\"";
                return reject_field(field, message);
            }
            "etcd" => services.etcd.enable,
            "cluster" => config.cluster.is_some(),
            "containerd" => services.containerd.enable,
            PRESEED => services.containerd.enable && services.containerd.preseed.is_some(),
            "provisioner" => config.provisioner.is_some(),
            other if config.service.iter().any(|known| known.name == other) => true,
            other => {
                let known: Vec<_> = BUILT_IN_SERVICES
                    .into_iter()
                    .chain([PRESEED])
                    .chain(config.service.iter().map(|s| s.name.as_str()))
                    .collect();
                let message = format!("unknown service {other:?} in depends_on; known: {}", known.join(", "));
                return reject_field(field, message);
            }
        };
        if !enabled {
            let hint = match dependency.as_str() {
                "provisioner" => "set provisioner.kubeconfig".to_owned(),
                "cluster" => "set cluster.address".to_owned(),
                PRESEED if services.containerd.enable => "set services.containerd.preseed".to_owned(),
                PRESEED => "set services.containerd.enable = true".to_owned(),
                _ => format!("set services.{dependency}.enable = true"),
            };
            let message = format!("{} depends on {dependency}, which is disabled; {hint}", service.name);
            return reject_field(field, message);
        }
    }
    Ok(())
}

fn check_cycles(services: &[UserService]) -> Result<(), ConfigViolation> {
    match order_services(services) {
        Ok(_) => Ok(()),
        Err(cycle) => {
            let first =
                services.iter().position(|s| s.name == cycle[0]).expect("the cycle is made of services");
            reject_field(
                format!("service[{first}].depends_on"),
                format!("dependency cycle: {}", cycle.join(" -> ")),
            )
        }
    }
}

/// Sorts services after their dependencies, and otherwise in the order of the file.
///
/// # Errors
/// The names of a dependency cycle; the first name is repeated at the end.
pub fn order_services(services: &[UserService]) -> Result<Vec<&UserService>, Vec<&str>> {
    let by_name: BTreeMap<_, _> = services.iter().map(|service| (service.name.as_str(), service)).collect();
    let mut visit = DependencyVisit { by_name, path: Vec::new(), ordered: Vec::new() };
    for service in services {
        visit.visit_service(service)?;
    }
    Ok(visit.ordered)
}

struct DependencyVisit<'a> {
    by_name: BTreeMap<&'a str, &'a UserService>,
    /// Path from the first visited service to the current one.
    path: Vec<&'a str>,
    ordered: Vec<&'a UserService>,
}

impl<'a> DependencyVisit<'a> {
    fn visit_service(&mut self, service: &'a UserService) -> Result<(), Vec<&'a str>> {
        if self.ordered.iter().any(|done| done.name == service.name) {
            return Ok(());
        }
        if let Some(start) = self.path.iter().position(|name| *name == service.name) {
            let mut cycle = self.path.split_off(start);
            cycle.push(&service.name);
            return Err(cycle);
        }
        self.path.push(&service.name);
        for dependency in &service.depends_on {
            if let Some(dependency) = self.by_name.get(dependency.as_str()) {
                self.visit_service(dependency)?;
            }
        }
        self.path.pop();
        self.ordered.push(service);
        Ok(())
    }
}

//! Rules between fields: names, ports, and who waits for whom.

use std::collections::BTreeMap;

use super::{BUILT_IN, Config, Readiness, Restart, UserService};

/// What is wrong with which field.
#[derive(Debug)]
pub(super) struct Wrong {
    pub(super) field: String,
    pub(super) message: String,
}

fn wrong(field: impl Into<String>, message: impl Into<String>) -> Result<(), Wrong> {
    Err(Wrong { field: field.into(), message: message.into() })
}

/// Checks what no field can know alone.
pub(super) fn check(config: &Config) -> Result<(), Wrong> {
    if config.node.name.is_empty() || config.node.name.chars().any(char::is_control) {
        return wrong("node.name", "must not be empty or hold control characters");
    }
    if config.node.data.as_os_str().is_empty() {
        return wrong("node.data", "must name a directory");
    }
    let etcd = &config.services.etcd;
    if etcd.client_port == etcd.peer_port {
        return wrong(
            "services.etcd.peer_port",
            format!("{} is the client port too; give one of them another", etcd.peer_port),
        );
    }
    if config.log.bytes_per_dn > config.log.bytes {
        return wrong(
            "log.bytes_per_dn",
            format!("is more than log.bytes, {}; lower it or raise that", config.log.bytes),
        );
    }
    for (index, service) in config.service.iter().enumerate() {
        check_service(config, index, service)?;
    }
    check_cycles(&config.service)
}

/// Whether a service can be called so: it becomes a part of a DN.
pub fn valid_name(name: &str) -> bool {
    let valid = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b'-';
    (1..=64).contains(&name.len()) && name.bytes().all(valid)
}

fn check_service(config: &Config, index: usize, service: &UserService) -> Result<(), Wrong> {
    let field = |name: &str| format!("service[{index}].{name}");
    let name = &service.name;
    if !valid_name(name) {
        return wrong(field("name"), format!("{name:?} is no name: use 1 to 64 of a-z, 0-9, '_' and '-'"));
    }
    if BUILT_IN.contains(&name.as_str()) {
        return wrong(field("name"), format!("{name:?} is a service of the node itself; use another name"));
    }
    if config.service[..index].iter().any(|other| other.name == *name) {
        return wrong(
            field("name"),
            format!("{name:?} is the name of an earlier service; names must differ"),
        );
    }
    if service.command.first().is_none_or(String::is_empty) {
        return wrong(
            field("command"),
            format!("{name} has no program to run; give [\"program\", \"argument\", ..]"),
        );
    }
    if let Readiness::Probe { command, .. } = &service.readiness
        && command.first().is_none_or(String::is_empty)
    {
        return wrong(field("readiness"), format!("the probe of {name} has no program to run"));
    }
    if service.readiness == Readiness::Exit && service.restart == Some(Restart::Always) {
        let message = format!(
            "{name} is ready when it has exited, so it can't be restarted always; use \"on-failure\""
        );
        return wrong(field("restart"), message);
    }
    if let Some(key) = service.environment.keys().find(|key| key.is_empty() || key.contains(['=', '\0'])) {
        return wrong(field("environment"), format!("{key:?} can't be a variable's name"));
    }
    if !service.directory.is_absolute() {
        return wrong(field("directory"), format!("{} is not absolute", service.directory.display()));
    }
    check_backoff(index, service)?;
    check_dependencies(config, index, service)
}

fn check_backoff(index: usize, service: &UserService) -> Result<(), Wrong> {
    let field = |name: &str| format!("service[{index}].backoff.{name}");
    let backoff = &service.backoff;
    if !(backoff.factor >= 1.0 && backoff.factor.is_finite()) {
        return wrong(field("factor"), format!("{} is less than 1", backoff.factor));
    }
    if !(0.0..=1.0).contains(&backoff.jitter) {
        return wrong(field("jitter"), format!("{} is not between 0 and 1", backoff.jitter));
    }
    if backoff.initial > backoff.max {
        return wrong(field("initial"), format!("{:?} is more than max, {:?}", backoff.initial, backoff.max));
    }
    Ok(())
}

fn check_dependencies(config: &Config, index: usize, service: &UserService) -> Result<(), Wrong> {
    let services = &config.services;
    for (at, dependency) in service.depends_on.iter().enumerate() {
        let field = format!("service[{index}].depends_on[{at}]");
        let enabled = match dependency.as_str() {
            "etcd" => services.etcd.enable,
            "containerd" => services.containerd.enable,
            other if config.service.iter().any(|known| known.name == other) => true,
            other => {
                let known: Vec<_> =
                    BUILT_IN.into_iter().chain(config.service.iter().map(|s| s.name.as_str())).collect();
                let message = format!(
                    "{} depends on {other:?}, which is no service; there are {}",
                    service.name,
                    known.join(", ")
                );
                return wrong(field, message);
            }
        };
        if !enabled {
            let message =
                format!("{} depends on {dependency}; set services.{dependency}.enable = true", service.name);
            return wrong(field, message);
        }
    }
    Ok(())
}

fn check_cycles(services: &[UserService]) -> Result<(), Wrong> {
    match order(services) {
        Ok(_) => Ok(()),
        Err(cycle) => {
            let first =
                services.iter().position(|s| s.name == cycle[0]).expect("the cycle is made of services");
            wrong(
                format!("service[{first}].depends_on"),
                format!("services wait for each other: {}", cycle.join(" -> ")),
            )
        }
    }
}

/// The services in an order in which each comes after those that it depends on; otherwise the order of the file.
///
/// # Errors
/// The names of a cycle, the first again at the end.
pub fn order(services: &[UserService]) -> Result<Vec<&UserService>, Vec<&str>> {
    let by_name: BTreeMap<_, _> = services.iter().map(|service| (service.name.as_str(), service)).collect();
    let mut visit = Visit { by_name, path: Vec::new(), ordered: Vec::new() };
    for service in services {
        visit.service(service)?;
    }
    Ok(visit.ordered)
}

struct Visit<'a> {
    by_name: BTreeMap<&'a str, &'a UserService>,
    /// From the service that the visit began with to the one it is at.
    path: Vec<&'a str>,
    ordered: Vec<&'a UserService>,
}

impl<'a> Visit<'a> {
    fn service(&mut self, service: &'a UserService) -> Result<(), Vec<&'a str>> {
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
                self.service(dependency)?;
            }
        }
        self.path.pop();
        self.ordered.push(service);
        Ok(())
    }
}

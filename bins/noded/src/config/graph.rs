//! Rules between fields: names, ports, and who waits for whom.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use super::{BUILT_IN, Config, Readiness, Restart, UserService, cluster, containerd, volumes};

/// The least that a log can do with: an entry may take a quarter of it.
const MIN_LOG_BYTES: usize = 64 * 1024;

/// More events than anybody reads; each takes some hundred bytes.
const MAX_EVENTS: usize = 1_000_000;

/// Longer spans are mistakes: nobody waits for a day.
const MAX_SPAN: Duration = Duration::from_secs(24 * 60 * 60);

/// The shortest backoff: without one, a service that can't start would take a whole core.
const MIN_BACKOFF: Duration = Duration::from_millis(1);

/// What is wrong with which field.
#[derive(Debug)]
pub(super) struct Wrong {
    pub(super) field: String,
    pub(super) message: String,
}

pub(super) fn wrong(field: impl Into<String>, message: impl Into<String>) -> Result<(), Wrong> {
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
    check_nul("node.data", config.node.data.to_str())?;
    check_nul("control.socket", config.control.socket.as_deref().and_then(Path::to_str))?;
    if config.control.socket.as_ref().is_some_and(|socket| socket.as_os_str().is_empty()) {
        return wrong(
            "control.socket",
            "must be a path, or left out for run/control.sock below the data directory",
        );
    }
    let etcd = &config.services.etcd;
    if etcd.client_port == etcd.peer_port {
        return wrong(
            "services.etcd.peer_port",
            format!("{} is the client port too; give one of them another", etcd.peer_port),
        );
    }
    check_program("services.etcd", etcd.binary.as_deref(), &etcd.extra_args)?;
    containerd::check(&config.services.containerd)?;
    check_span("node.grace", Some(config.node.grace))?;
    check_sizes(config)?;
    cluster::check(config)?;
    volumes::check(config)?;
    for (index, service) in config.service.iter().enumerate() {
        check_service(config, index, service)?;
    }
    check_cycles(&config.service)
}

/// Checks what a daemon of the node's own is run with.
pub(super) fn check_program(table: &str, binary: Option<&Path>, extra_args: &[String]) -> Result<(), Wrong> {
    if binary.is_some_and(|path| path.as_os_str().is_empty()) {
        return wrong(format!("{table}.binary"), "must name a program, or be left out to have it searched");
    }
    check_nul(&format!("{table}.binary"), binary.and_then(Path::to_str))?;
    check_nul(&format!("{table}.extra_args"), extra_args)
}

/// A path that means the same wherever noded was started.
pub(super) fn check_absolute(field: &str, path: &Path) -> Result<(), Wrong> {
    check_nul(field, path.to_str())?;
    match path.is_absolute() {
        true => Ok(()),
        false => wrong(field, format!("{:?} is not absolute", path.display().to_string())),
    }
}

/// The kernel takes no text that holds a NUL.
pub(super) fn check_nul<'a, T: AsRef<str> + ?Sized + 'a>(
    field: &str,
    texts: impl IntoIterator<Item = &'a T>,
) -> Result<(), Wrong> {
    match texts.into_iter().any(|text| text.as_ref().contains('\0')) {
        true => wrong(field, "holds a NUL character, which no program can be given; remove it"),
        false => Ok(()),
    }
}

pub(super) fn check_span(field: &str, span: Option<Duration>) -> Result<(), Wrong> {
    match span.filter(|span| *span > MAX_SPAN) {
        Some(span) => wrong(field, format!("{span:?} is more than a day; give at most \"24h\"")),
        None => Ok(()),
    }
}

fn check_sizes(config: &Config) -> Result<(), Wrong> {
    let log = &config.log;
    for (field, bytes) in [("log.bytes", log.bytes), ("log.bytes_per_dn", log.bytes_per_dn)] {
        if bytes.get() < MIN_LOG_BYTES {
            return wrong(field, format!("{bytes} is too little for a log; give at least {MIN_LOG_BYTES}"));
        }
    }
    if log.bytes_per_dn > log.bytes {
        let message = format!("is more than log.bytes, {}; lower it or raise that", log.bytes);
        return wrong("log.bytes_per_dn", message);
    }
    let keep = config.events.keep;
    if keep.get() > MAX_EVENTS {
        return wrong(
            "events.keep",
            format!("{keep} is too much to keep in memory; give at most {MAX_EVENTS}"),
        );
    }
    Ok(())
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
    check_texts(index, service)?;
    check_span(&field("grace"), service.grace)?;
    check_absolute(&field("directory"), &service.directory)?;
    check_backoff(index, service)?;
    check_dependencies(config, index, service)
}

fn check_texts(index: usize, service: &UserService) -> Result<(), Wrong> {
    let field = |name: &str| format!("service[{index}].{name}");
    check_nul(&field("command"), &service.command)?;
    check_nul(&field("environment"), service.environment.values())?;
    check_nul(&field("user"), service.user.as_deref())?;
    if let Readiness::Probe { command, timeout } = &service.readiness {
        check_nul(&field("readiness"), command)?;
        check_span(&field("readiness"), Some(*timeout))?;
        if timeout.is_zero() {
            return wrong(field("readiness"), "a timeout of nothing would always have passed; give \"60s\"");
        }
    }
    Ok(())
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
    if backoff.initial < MIN_BACKOFF {
        let message = "a service that can't start would be started without pause; give at least \"1ms\"";
        return wrong(field("initial"), message);
    }
    check_span(&field("max"), Some(backoff.max))?;
    if backoff.initial > backoff.max {
        return wrong(field("initial"), format!("{:?} is more than max, {:?}", backoff.initial, backoff.max));
    }
    Ok(())
}

fn check_dependencies(config: &Config, index: usize, service: &UserService) -> Result<(), Wrong> {
    let services = &config.services;
    for (at, dependency) in service.depends_on.iter().enumerate() {
        let field = format!("service[{index}].depends_on[{at}]");
        if service.depends_on[..at].contains(dependency) {
            return wrong(field, format!("{} depends on {dependency} already; remove one", service.name));
        }
        let enabled = match dependency.as_str() {
            "etcd" if config.cluster.is_some() => {
                let message =
                    format!("{} depends on etcd, which [cluster] runs; depend on \"cluster\"", service.name);
                return wrong(field, message);
            }
            "etcd" => services.etcd.enable,
            "cluster" => config.cluster.is_some(),
            "containerd" => services.containerd.enable,
            "provisioner" => config.provisioner.is_some(),
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
            let remedy = match dependency.as_str() {
                "provisioner" => "give provisioner.kubeconfig".to_owned(),
                "cluster" => "give cluster.address".to_owned(),
                _ => format!("set services.{dependency}.enable = true"),
            };
            let message = format!("{} depends on {dependency}; {remedy}", service.name);
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

//! What a configuration comes to on this machine, found out without touching anything.

mod cluster;
mod show;
mod volumes;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use nodekeel_containerd_svc::{Config as Told, Place, Settings};
use nodekeel_localstorage::Dir;

use crate::config::{Config, ContainerdConfig, EtcdConfig, Readiness, UserService, order};
use crate::control;
use crate::data::{self, DataError};
use crate::layout::{self, OfContainerd, OfEtcd, Part, Root, RunOfContainerd};
use crate::ports;
use crate::search::Search;

pub use cluster::{Cluster, Member};
pub use volumes::{Limits, Volumes};
pub(crate) use volumes::{chain, no_limits};

/// Longest path of a unix socket: `sun_path` less its closing zero (unix(7)).
pub const MAX_SOCKET_BYTES: usize = 107;

/// Room that the node itself must find on its disk.
const NODE_BYTES: u64 = 1 << 20;

/// Room that a new etcd must find: it allocates its first two log segments of 64 MB at its start.
const ETCD_BYTES: u64 = 128 << 20;

/// What a node is going to run.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The configuration, with an absolute data directory.
    pub config: Config,
    /// Where the control API will be served.
    pub socket: PathBuf,
    /// All services in the order of their start, those that are skipped too.
    pub services: Vec<Planned>,
    /// Where programs are searched.
    pub search: Search,
}

/// One service.
#[derive(Debug, Clone)]
pub struct Planned {
    /// Its name in the tree.
    pub dn: String,
    /// What it runs.
    pub service: Service,
    /// Why it will not be run, if so.
    pub skipped: Option<String>,
}

/// What a service runs.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Service {
    /// The node's etcd.
    Etcd(Etcd),
    /// The node's place in a cluster.
    Cluster(Box<Cluster>),
    /// The node's containerd.
    Containerd(Box<Containerd>),
    /// Volumes of a Kubernetes cluster.
    Provisioner(Box<Volumes>),
    /// One of the operator's.
    User(Box<User>),
}

/// An etcd of one member.
#[derive(Debug, Clone)]
pub struct Etcd {
    /// The program.
    pub binary: PathBuf,
    /// Its data directory.
    pub data: PathBuf,
    /// Its settings.
    pub config: EtcdConfig,
}

/// A containerd with everything of its own.
#[derive(Debug, Clone)]
pub struct Containerd {
    /// The program.
    pub binary: PathBuf,
    /// Where it keeps what it has, and where it serves its API.
    pub place: Place,
    /// Its settings.
    pub config: ContainerdConfig,
    /// What its own configuration says.
    pub told: Told,
}

/// A program of the operator's.
#[derive(Debug, Clone)]
pub struct User {
    /// The program.
    pub binary: PathBuf,
    /// Its settings.
    pub config: UserService,
    /// The DNs that must have become ready before.
    pub after: Vec<String>,
    /// The probe of its readiness and its arguments, if it has one.
    pub probe: Option<(PathBuf, Vec<String>)>,
    /// The uid and gid that it runs with; `None` is noded's own.
    pub account: Option<(u32, u32)>,
}

/// Why a node can't be run: everything that was found, a line each.
#[derive(Debug)]
pub struct Problems {
    lines: Vec<String>,
    /// Another instance has the data directory: nothing else was looked at.
    pub in_use: bool,
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines.join("\n"))
    }
}

impl std::error::Error for Problems {}

impl Plan {
    /// Plans. With `dev`, what is missing is skipped, and with it what depends on it.
    ///
    /// # Errors
    /// What is missing without `dev`, and what stands in the way: see [`Problems`].
    pub fn make(mut config: Config, search: Search, dev: bool) -> Result<Self, Problems> {
        let in_the_way = |error: String| Problems { lines: vec![error], in_use: false };
        let absolute = |path: &Path| {
            std::path::absolute(path).map_err(|error| in_the_way(format!("{}: {error}", path.display())))
        };
        config.node.data = absolute(&config.node.data)?;
        let socket = absolute(&config.socket())?;
        let unplaced = |error| in_the_way(data::placed(&config.node.data, error).to_string());
        let root = layout::planned(&config.node.data).map_err(unplaced)?;
        let mut planner = Planner { dev, search: &search, root, problems: Vec::new(), services: Vec::new() };
        match &config.cluster {
            Some(cluster) => planner.cluster(cluster, &config.services.etcd),
            None => planner.etcd(&config),
        }
        planner.containerd(&config);
        planner.provisioner(&config);
        planner.user_services(&config);
        let Planner { mut problems, services, .. } = planner;

        let data = &config.node.data;
        let (parts, needed) = needs(data, &services);
        let below: Vec<String> = parts.into_iter().flat_map(Part::directories).collect();
        match data::probe(data, &below, needed) {
            Ok(()) => {}
            Err(error @ DataError::InUse { .. }) => {
                return Err(Problems { lines: vec![error.to_string()], in_use: true });
            }
            Err(error) => problems.push(error.to_string()),
        }
        problems.extend(too_much(config.log.bytes.get()));
        problems.extend(too_long(&socket, "set control.socket to a shorter path, or give a shorter --data"));
        problems.extend(control::probe(&socket, data).err().map(|error| error.to_string()));
        if !problems.is_empty() {
            return Err(Problems { lines: problems, in_use: false });
        }
        Ok(Self { config, socket, services, search })
    }
}

/// The parts of the layout that will be placed, and the bytes that have to be free.
fn needs(data: &Path, services: &[Planned]) -> (Vec<Part>, u64) {
    let mut parts = vec![Part::Root];
    let mut bytes = NODE_BYTES;
    for planned in services.iter().filter(|planned| planned.skipped.is_none()) {
        match &planned.service {
            Service::Etcd(_) => {
                parts.push(Part::Etcd);
                bytes += etcd_needs(data, "etcd/data/member");
            }
            Service::Cluster(cluster) if matches!(cluster.member, Member::Etcd { .. }) => {
                parts.push(Part::Cluster);
                bytes += etcd_needs(data, "cluster/volume/etcd/data/member");
            }
            Service::Cluster(_) => {}
            Service::Containerd(_) => parts.push(Part::Containerd),
            Service::Provisioner(volumes) if volumes.is_own => parts.push(Part::Volumes),
            Service::Provisioner(_) | Service::User(_) => {}
        }
    }
    (parts, bytes)
}

/// The room for an etcd that keeps its data there: one that has run has its segments already.
fn etcd_needs(data: &Path, member: &str) -> u64 {
    let has_run = Dir::open(data).and_then(|dir| dir.exists(member)).unwrap_or_default();
    if has_run { 0 } else { ETCD_BYTES }
}

/// Why a part can be placed in memory: there, nothing is in its way, and there is no socket whose path may be too long.
const SHORT: &str = "a part without sockets is placed in memory";

struct Planner<'a> {
    dev: bool,
    search: &'a Search,
    /// The layout in memory, for its paths.
    root: Root,
    problems: Vec<String>,
    services: Vec<Planned>,
}

impl Planner<'_> {
    fn etcd(&mut self, config: &Config) {
        let etcd = &config.services.etcd;
        if !etcd.enable {
            return;
        }
        let (binary, skipped) =
            self.binary("etcd", etcd.binary.as_deref(), "Debian: apt-get install etcd-server");
        if skipped.is_none() {
            self.ports(Ipv4Addr::LOCALHOST.into(), etcd);
        }
        let data = self.root.extend::<OfEtcd>().expect(SHORT).etcd.data.path().to_owned();
        let service = Service::Etcd(Etcd { binary, data, config: etcd.clone() });
        self.services.push(Planned { dn: "root.etcd".into(), service, skipped });
    }

    fn containerd(&mut self, config: &Config) {
        let containerd = &config.services.containerd;
        if !containerd.enable {
            return;
        }
        let (binary, mut skipped) =
            self.binary("containerd", containerd.binary.as_deref(), "Debian: apt-get install containerd");
        if skipped.is_none() && !nix::unistd::geteuid().is_root() {
            let reason = "needs root: run noded as root, or set services.containerd.enable = false";
            skipped = self.missing("containerd", reason.into());
        }
        let told = match told(containerd) {
            Ok(told) => told,
            Err(reason) => {
                skipped = skipped.or_else(|| self.missing("containerd", reason));
                Told::Settings(Settings::default())
            }
        };
        let data = self.root.extend::<OfContainerd>().expect(SHORT).containerd.path().to_owned();
        let run = self.root.run.extend::<RunOfContainerd>().expect(SHORT).containerd.path().to_owned();
        let place = match Place::new(data, run) {
            Ok(place) => place,
            // Whoever skips it needs no place for it.
            Err(_) if skipped.is_some() => return,
            Err(error) => return self.problems.push(format!("{error}; give a shorter --data")),
        };
        let planned = Containerd { binary, place, config: containerd.clone(), told };
        self.services.push(Planned {
            dn: "root.containerd".into(),
            service: Service::Containerd(Box::new(planned)),
            skipped,
        });
    }

    fn user_services(&mut self, config: &Config) {
        let ordered = order(&config.service).expect("a parsed configuration has no cycles");
        for service in ordered {
            let dn = format!("root.service.{}", service.name);
            let program = Path::new(&service.command[0]);
            let (binary, mut skipped) =
                self.binary(&service.name, Some(program), "install it, or correct its command");
            let mut probe = None;
            if let (None, Readiness::Probe { command, .. }) = (&skipped, &service.readiness) {
                let found = self.binary(
                    &service.name,
                    Some(Path::new(&command[0])),
                    "install its probe, or correct it",
                );
                skipped = found.1;
                probe = Some((found.0, command[1..].to_vec()));
            }
            let account = match (&skipped, &service.user) {
                (None, Some(name)) => self.account(&service.name, name).unwrap_or_else(|reason| {
                    skipped = reason;
                    None
                }),
                _ => None,
            };
            if skipped.is_none() && !service.directory.is_dir() {
                let directory = service.directory.display();
                let reason =
                    format!("there is no directory {directory}: create it, or correct its directory");
                skipped = self.missing(&service.name, reason);
            }
            let after: Vec<_> = service.depends_on.iter().map(|name| dn_of(name)).collect();
            let gone =
                |dn: &&String| self.services.iter().any(|known| known.dn == **dn && known.skipped.is_some());
            if let (None, Some(missing)) = (&skipped, after.iter().find(gone)) {
                skipped = Some(format!("depends on {missing}, which is skipped"));
            }
            let user = User { binary, config: service.clone(), after, probe, account };
            self.services.push(Planned { dn, service: Service::User(Box::new(user)), skipped });
        }
    }

    /// The program of a service, or why the service is skipped, or neither and a problem.
    fn binary(&mut self, service: &str, given: Option<&Path>, remedy: &str) -> (PathBuf, Option<String>) {
        let program = given.unwrap_or(Path::new(service));
        match self.search.find(program) {
            Ok(binary) => (binary, None),
            Err(not_found) => {
                let found = self.missing(service, format!("{not_found}; {remedy}"));
                (program.to_owned(), found)
            }
        }
    }

    /// The uid and gid of a service's user, `None` if that is noded's own; or why the service is skipped.
    fn account(&mut self, service: &str, name: &str) -> Result<Option<(u32, u32)>, Option<String>> {
        let own = nix::unistd::geteuid();
        let reason = match nix::unistd::User::from_name(name) {
            Ok(Some(user)) if user.uid == own => return Ok(None),
            Ok(Some(user)) if own.is_root() => return Ok(Some((user.uid.as_raw(), user.gid.as_raw()))),
            Ok(Some(_)) => format!("running as {name} needs root: run noded as root"),
            _ => format!("there is no user {name}: create it, or correct its user"),
        };
        Err(self.missing(service, reason))
    }

    /// Something that a service needs is missing: the reason to skip it, or a problem.
    fn missing(&mut self, service: &str, reason: String) -> Option<String> {
        if self.dev {
            return Some(reason);
        }
        self.problems.push(format!("{service}: {reason}, or run with --dev to skip it"));
        None
    }

    /// Notes which ports of an etcd at this address are taken.
    fn ports(&mut self, address: IpAddr, etcd: &EtcdConfig) {
        let fields =
            [(etcd.client_port, "services.etcd.client_port"), (etcd.peer_port, "services.etcd.peer_port")];
        for (port, field) in fields {
            if let Some(holder) = ports::holder(address, port.get()) {
                self.problems.push(format!("port {port} is taken by {}; set {field} to another", holder.0));
            }
        }
    }
}

/// How the tree calls a service that `depends_on` calls so.
fn dn_of(name: &str) -> String {
    if crate::config::BUILT_IN.contains(&name) {
        format!("root.{name}")
    } else {
        format!("root.service.{name}")
    }
}

/// A log for which this machine has no memory.
fn too_much(log_bytes: usize) -> Option<String> {
    let memory = memory(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
    (log_bytes as u64 > memory).then(|| {
        format!("log.bytes is {log_bytes}, and this machine has {memory} bytes of memory; set it to less")
    })
}

/// *Source:* proc_meminfo(5): `MemTotal: 16384000 kB`, where kB are 1024 bytes.
fn memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

fn too_long(socket: &Path, remedy: &str) -> Option<String> {
    let bytes = socket.as_os_str().len();
    (bytes > MAX_SOCKET_BYTES).then(|| {
        let path = socket.display();
        format!(
            "socket path {path} has {bytes} bytes, and a unix socket's has at most {MAX_SOCKET_BYTES}; {remedy}"
        )
    })
}

/// What containerd is told: the operator's file as it is, or noded's settings.
fn told(containerd: &ContainerdConfig) -> Result<Told, String> {
    let Some(file) = &containerd.config else {
        let cri = containerd.cri.clone();
        return Ok(Told::Settings(Settings { cri, ..Settings::default() }));
    };
    let remedy = "correct it, or services.containerd.config";
    let wrong = |why: String| format!("containerd's configuration {}: {why}; {remedy}", file.display());
    let text = std::fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
    let parsed = text.parse::<toml::Table>();
    parsed.map_err(|error| wrong(format!("is no TOML: {}", error.message())))?;
    Ok(Told::Given { text, runsc: false })
}

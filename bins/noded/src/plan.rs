//! The plan of a node: its configuration applied to this machine, without changing anything.

mod cluster;
mod display;
mod provisioner;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use nodekeel_containerd_svc::{ContainerdConfig as DaemonConfig, ContainerdSettings, DirectoryLayout};
use nodekeel_localstorage::Dir;

use crate::config::{
    ContainerdConfig, EtcdConfig, NodedConfig, PRESEED, ReadinessConfig, UserService, order_services,
};
use crate::control;
use crate::data::{self, DataError};
use crate::layout::{self, ContainerdLayout, ContainerdRunLayout, DataLayout, EtcdLayout, LayoutPart};
use crate::ports;
use crate::search_path::SearchPath;

pub use cluster::{ClusterPlan, ConsensusBackend};
pub use provisioner::{LimitEnforcement, ProvisionerPlan};
pub(crate) use provisioner::{error_chain, quota_error_with_hint};

/// Maximum length of a unix socket's path: `sun_path` without its terminating NUL (unix(7)).
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// Free disk space that the node itself requires.
const MIN_NODE_BYTES: u64 = 1 << 20;

/// Free disk space that a new etcd requires: it allocates its first two WAL segments of 64 MB at its start.
const MIN_ETCD_BYTES: u64 = 128 << 20;

/// What a node will run.
#[derive(Debug, Clone)]
pub struct NodePlan {
    /// The configuration, with an absolute data directory.
    pub config: NodedConfig,
    /// The path of the control API's socket.
    pub socket: PathBuf,
    /// All services in the order of their start, including skipped ones.
    pub services: Vec<PlannedService>,
    /// The directories of programs.
    pub search: SearchPath,
}

/// One service of the plan.
#[derive(Debug, Clone)]
pub struct PlannedService {
    /// Its DN.
    pub dn: String,
    /// What it runs.
    pub service: ServicePlan,
    /// Why the service is skipped; `None` if it will run.
    pub skip_reason: Option<String>,
}

/// What a service runs.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ServicePlan {
    /// The etcd of a node without a cluster.
    Etcd(EtcdPlan),
    /// Cluster membership.
    Cluster(Box<ClusterPlan>),
    /// The node's containerd.
    Containerd(Box<ContainerdPlan>),
    /// Volumes of a Kubernetes cluster.
    Provisioner(Box<ProvisionerPlan>),
    /// A `[[service]]`.
    User(Box<UserServicePlan>),
}

/// An etcd of one member.
#[derive(Debug, Clone)]
pub struct EtcdPlan {
    /// The program.
    pub binary: PathBuf,
    /// Its data directory.
    pub data: PathBuf,
    /// Its settings.
    pub config: EtcdConfig,
}

/// A containerd with private root, state and socket.
#[derive(Debug, Clone)]
pub struct ContainerdPlan {
    /// The program.
    pub binary: PathBuf,
    /// Its directories and its socket.
    pub directories: DirectoryLayout,
    /// Its settings.
    pub config: ContainerdConfig,
    /// The configuration of the daemon.
    pub daemon_config: DaemonConfig,
}

/// A program of the operator.
#[derive(Debug, Clone)]
pub struct UserServicePlan {
    /// The program.
    pub binary: PathBuf,
    /// Its settings.
    pub config: UserService,
    /// DNs that must be ready before it starts.
    pub start_after: Vec<String>,
    /// Program and arguments of its readiness probe, if it has one.
    pub probe: Option<(PathBuf, Vec<String>)>,
    /// Uid and gid of its process; `None` is noded's.
    pub account: Option<(u32, u32)>,
}

/// Why a node can't run: all problems, one line each.
#[derive(Debug)]
pub struct PlanError {
    lines: Vec<String>,
    /// Another instance uses the data directory: nothing else was checked.
    pub in_use: bool,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines.join("\n"))
    }
}

impl std::error::Error for PlanError {}

impl NodePlan {
    /// Plans the node. With `dev`, skips services with missing requirements, and the services that depend on
    /// them.
    ///
    /// # Errors
    /// Missing requirements without `dev`, and conflicts: see [`PlanError`].
    pub fn from_config(mut config: NodedConfig, search: SearchPath, dev: bool) -> Result<Self, PlanError> {
        let conflict = |error: String| PlanError { lines: vec![error], in_use: false };
        let absolute = |path: &Path| {
            std::path::absolute(path).map_err(|error| conflict(format!("{}: {error}", path.display())))
        };
        config.node.data = absolute(&config.node.data)?;
        let socket = absolute(&config.control_socket())?;
        let layout_error = |error| conflict(data::placement_error(&config.node.data, error).to_string());
        let root = layout::layout_in_memory(&config.node.data).map_err(layout_error)?;
        let mut planner = Planner { dev, search: &search, root, problems: Vec::new(), services: Vec::new() };
        match &config.cluster {
            Some(cluster) => planner.plan_cluster(cluster, &config.services.etcd),
            None => planner.plan_etcd(&config),
        }
        planner.plan_containerd(&config);
        planner.plan_provisioner(&config);
        planner.plan_user_services(&config);
        let Planner { mut problems, services, .. } = planner;

        let data = &config.node.data;
        let (parts, needed) = required_parts(data, &services);
        let below: Vec<String> = parts.into_iter().flat_map(LayoutPart::directories).collect();
        match data::check_data_dir(data, &below, needed) {
            Ok(()) => {}
            Err(error @ DataError::InUse { .. }) => {
                return Err(PlanError { lines: vec![error.to_string()], in_use: true });
            }
            Err(error) => problems.push(error.to_string()),
        }
        problems.extend(check_log_size(config.log.bytes.get()));
        problems.extend(check_socket_path(
            &socket,
            "set control.socket to a shorter path, or use a shorter --data",
        ));
        problems.extend(control::check_socket(&socket, data).err().map(|error| error.to_string()));
        if !problems.is_empty() {
            return Err(PlanError { lines: problems, in_use: false });
        }
        Ok(Self { config, socket, services, search })
    }
}

/// The parts of the layout that will be placed, and the bytes that must be free.
fn required_parts(data: &Path, services: &[PlannedService]) -> (Vec<LayoutPart>, u64) {
    let mut parts = vec![LayoutPart::Root];
    let mut bytes = MIN_NODE_BYTES;
    for planned in services.iter().filter(|planned| planned.skip_reason.is_none()) {
        match &planned.service {
            ServicePlan::Etcd(_) => {
                parts.push(LayoutPart::Etcd);
                bytes += required_etcd_bytes(data, "etcd/data/member");
            }
            ServicePlan::Cluster(cluster) if matches!(cluster.consensus, ConsensusBackend::Etcd { .. }) => {
                parts.push(LayoutPart::Cluster);
                bytes += required_etcd_bytes(data, "cluster/volume/etcd/data/member");
            }
            ServicePlan::Cluster(_) => {}
            ServicePlan::Containerd(_) => parts.push(LayoutPart::Containerd),
            ServicePlan::Provisioner(volumes) if volumes.is_in_data_dir => parts.push(LayoutPart::Volumes),
            ServicePlan::Provisioner(_) | ServicePlan::User(_) => {}
        }
    }
    (parts, bytes)
}

/// The free space for an etcd with this data: one that has run has allocated its segments already.
fn required_etcd_bytes(data: &Path, member: &str) -> u64 {
    let has_run = Dir::open(data).and_then(|dir| dir.exists(member)).unwrap_or_default();
    if has_run { 0 } else { MIN_ETCD_BYTES }
}

/// Why a part can be placed in memory: nothing conflicts there, and a part without a socket has no path that
/// is too long.
const PLACED_IN_MEMORY: &str = "a part without sockets can be placed in memory";

struct Planner<'a> {
    dev: bool,
    search: &'a SearchPath,
    /// The layout in memory, for its paths.
    root: DataLayout,
    problems: Vec<String>,
    services: Vec<PlannedService>,
}

impl Planner<'_> {
    fn plan_etcd(&mut self, config: &NodedConfig) {
        let etcd = &config.services.etcd;
        if !etcd.enable {
            return;
        }
        let (binary, skipped) =
            self.find_binary("etcd", etcd.binary.as_deref(), "Debian: apt-get install etcd-server");
        if skipped.is_none() {
            self.check_ports(Ipv4Addr::LOCALHOST.into(), etcd);
        }
        let data = self.root.add_layout::<EtcdLayout>().expect(PLACED_IN_MEMORY).etcd.data.path().to_owned();
        let service = ServicePlan::Etcd(EtcdPlan { binary, data, config: etcd.clone() });
        self.services.push(PlannedService { dn: "root.etcd".into(), service, skip_reason: skipped });
    }

    fn plan_containerd(&mut self, config: &NodedConfig) {
        let containerd = &config.services.containerd;
        if !containerd.enable {
            return;
        }
        let (binary, mut skipped) = self.find_binary(
            "containerd",
            containerd.binary.as_deref(),
            "Debian: apt-get install containerd",
        );
        if skipped.is_none() && !nix::unistd::geteuid().is_root() {
            let reason = "needs root: run noded as root, or set services.containerd.enable = false";
            skipped = self.skip_or_report("containerd", reason.into());
        }
        let daemon_config = match read_daemon_config(containerd) {
            Ok(daemon_config) => daemon_config,
            Err(reason) => {
                skipped = skipped.or_else(|| self.skip_or_report("containerd", reason));
                DaemonConfig::Settings(ContainerdSettings::default())
            }
        };
        let data =
            self.root.add_layout::<ContainerdLayout>().expect(PLACED_IN_MEMORY).containerd.path().to_owned();
        let run = self
            .root
            .run
            .add_layout::<ContainerdRunLayout>()
            .expect(PLACED_IN_MEMORY)
            .containerd
            .path()
            .to_owned();
        let directories = match DirectoryLayout::new(data, run) {
            Ok(directories) => directories,
            // A skipped service needs no directories.
            Err(_) if skipped.is_some() => return,
            Err(error) => return self.problems.push(format!("{error}; use a shorter --data")),
        };
        let planned = ContainerdPlan { binary, directories, config: containerd.clone(), daemon_config };
        self.services.push(PlannedService {
            dn: "root.containerd".into(),
            service: ServicePlan::Containerd(Box::new(planned)),
            skip_reason: skipped,
        });
    }

    fn plan_user_services(&mut self, config: &NodedConfig) {
        let ordered = order_services(&config.service).expect("a parsed configuration has no cycles");
        for service in ordered {
            let dn = format!("root.service.{}", service.name);
            let program = Path::new(&service.command[0]);
            let (binary, mut skipped) =
                self.find_binary(&service.name, Some(program), "install it, or correct its key command");
            let mut probe = None;
            if let (None, ReadinessConfig::Probe { command, .. }) = (&skipped, &service.readiness) {
                let found = self.find_binary(
                    &service.name,
                    Some(Path::new(&command[0])),
                    "install its probe, or correct its key readiness",
                );
                skipped = found.1;
                probe = Some((found.0, command[1..].to_vec()));
            }
            let account = match (&skipped, &service.user) {
                (None, Some(name)) => self.find_account(&service.name, name).unwrap_or_else(|reason| {
                    skipped = reason;
                    None
                }),
                _ => None,
            };
            if skipped.is_none() && !service.directory.is_dir() {
                let directory = service.directory.display();
                let reason =
                    format!("directory {directory} does not exist: create it, or correct its key directory");
                skipped = self.skip_or_report(&service.name, reason);
            }
            let mut start_after: Vec<_> =
                service.depends_on.iter().flat_map(|name| dependency_dns(name)).collect();
            start_after.dedup();
            let is_skipped = |dn: &&String| {
                self.services.iter().any(|known| known.dn == **dn && known.skip_reason.is_some())
            };
            if let (None, Some(missing)) = (&skipped, start_after.iter().find(is_skipped)) {
                skipped = Some(format!("depends on {missing}, which is skipped"));
            }
            let user = UserServicePlan { binary, config: service.clone(), start_after, probe, account };
            self.services.push(PlannedService {
                dn,
                service: ServicePlan::User(Box::new(user)),
                skip_reason: skipped,
            });
        }
    }

    /// Finds the program of a service. Returns a reason to skip it, or records a problem, if it is missing.
    fn find_binary(&mut self, service: &str, given: Option<&Path>, hint: &str) -> (PathBuf, Option<String>) {
        let program = given.unwrap_or(Path::new(service));
        match self.search.find_program(program) {
            Ok(binary) => (binary, None),
            Err(not_found) => {
                let found = self.skip_or_report(service, format!("{not_found}; {hint}"));
                (program.to_owned(), found)
            }
        }
    }

    /// Uid and gid of a service's user, `None` if it is noded's; or the reason to skip the service.
    fn find_account(&mut self, service: &str, name: &str) -> Result<Option<(u32, u32)>, Option<String>> {
        let noded_uid = nix::unistd::geteuid();
        let reason = match nix::unistd::User::from_name(name) {
            Ok(Some(user)) if user.uid == noded_uid => return Ok(None),
            Ok(Some(user)) if noded_uid.is_root() => return Ok(Some((user.uid.as_raw(), user.gid.as_raw()))),
            Ok(Some(_)) => format!("running as {name} needs root: run noded as root"),
            _ => format!("user {name} does not exist: create it, or correct its key user"),
        };
        Err(self.skip_or_report(service, reason))
    }

    /// Handles a missing requirement of a service: returns the reason to skip it, or records a problem.
    fn skip_or_report(&mut self, service: &str, reason: String) -> Option<String> {
        if self.dev {
            return Some(reason);
        }
        self.problems.push(format!("{service}: {reason}, or run with --dev to skip it"));
        None
    }

    /// Records a problem for each port of an etcd that is in use at this address.
    fn check_ports(&mut self, address: IpAddr, etcd: &EtcdConfig) {
        let fields =
            [(etcd.client_port, "services.etcd.client_port"), (etcd.peer_port, "services.etcd.peer_port")];
        for (port, field) in fields {
            if let Some(holder) = ports::lasting_holder(address, port.get()) {
                self.problems
                    .push(format!("port {port} is in use by {}: set {field} to another port", holder.0));
            }
        }
    }
}

/// The DNs of a service that `depends_on` names, in the order in which they become ready.
fn dependency_dns(name: &str) -> Vec<String> {
    if name == PRESEED {
        // It is in the tree once containerd runs.
        vec!["root.containerd".to_owned(), format!("root.{name}")]
    } else if crate::config::BUILT_IN_SERVICES.contains(&name) {
        vec![format!("root.{name}")]
    } else {
        vec![format!("root.service.{name}")]
    }
}

/// The problem of a log that exceeds this machine's memory.
fn check_log_size(log_bytes: usize) -> Option<String> {
    let memory = total_memory(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
    (log_bytes as u64 > memory).then(|| {
        format!("log.bytes is {log_bytes}, but this machine has {memory} bytes of memory: use a lower value")
    })
}

/// *Source:* proc_meminfo(5): `MemTotal: 16384000 kB`, where kB are 1024 bytes.
fn total_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

fn check_socket_path(socket: &Path, hint: &str) -> Option<String> {
    let bytes = socket.as_os_str().len();
    (bytes > MAX_SOCKET_PATH_BYTES).then(|| {
        let path = socket.display();
        format!(
            "socket path {path} has {bytes} bytes, but the limit of a unix socket is {MAX_SOCKET_PATH_BYTES}; {hint}"
        )
    })
}

/// Reads the configuration of containerd: the operator's file unchanged, or noded's settings.
fn read_daemon_config(containerd: &ContainerdConfig) -> Result<DaemonConfig, String> {
    let Some(file) = &containerd.config else {
        let cri = containerd.cri.clone();
        return Ok(DaemonConfig::Settings(ContainerdSettings { cri, ..ContainerdSettings::default() }));
    };
    let hint = "correct it, or services.containerd.config";
    let invalid = |reason: String| format!("containerd's configuration {}: {reason}; {hint}", file.display());
    let text = std::fs::read_to_string(file).map_err(|error| invalid(error.to_string()))?;
    let parsed = text.parse::<toml::Table>();
    parsed.map_err(|error| invalid(format!("invalid TOML: {}", error.message())))?;
    Ok(DaemonConfig::Verbatim { text, runsc: false })
}

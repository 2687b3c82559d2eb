//! Cluster membership.

mod backup;
mod check;
pub(crate) mod config;
pub(crate) mod control;
mod health;
pub(crate) mod join_tickets;
mod metrics;
mod volume;
mod warnings;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nodekeel_cluster::consensus::etcd::EtcdConfig as MemberConfig;
use nodekeel_cluster::consensus::memory::MemoryConsensus;
use nodekeel_cluster::enrolment::{BootstrapRecord, ClusterNode, ConsensusFactory, Deps, EnrolmentSettings};
use nodekeel_cluster::network::{Network, NodeAddress, StaticNetwork};
use nodekeel_cluster::node::{EnrolmentSource, EnrolmentSources, EspEnrolment, LocalNames, LocalNamesDir};
use nodekeel_localstorage::tree::LayoutDir;
use nodekeel_localstorage::volume::{DataVolume, DirectoryVolume};
use nodekeel_logtree::parse::LogFormat;

use self::backup::{BackupService, BackupState, Schedule};
use self::check::check_cluster;
use self::control::StagedSnapshot;
use self::volume::{ClusterOnVolume, ClusterVolume};
use super::PartDeps;
use super::api::ApiEnroller;
use super::etcd::{PEER_PORT_KEY, required_etcd_bytes};
use super::network::check_reachable;
use super::storage::keys::VolumeKeys;
use crate::config::{ClusterConfig, ConfigSection, ConfigViolation, EtcdConfig, NodedConfig};
use crate::dn::CLUSTER as DN;
use crate::health::NodeSnapshot;
use crate::layout::PLACED_IN_MEMORY;
use crate::layout::{
    CLUSTER_DIR, ClusterLayout, MemoryClusterLayout, NamesLayout, RESTORE_FILE, StorageLayout,
};
use crate::part::PartPlanner;
use crate::part::{
    DependencyEntry, NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable,
};
use crate::program_name::program_name;

/// The part of a node with `[cluster]`.
pub(super) struct ClusterPart {
    deps: PartDeps,
}

impl ClusterPart {
    pub(super) fn new(deps: PartDeps) -> Self {
        Self { deps }
    }
}

impl Part for ClusterPart {
    fn name(&self) -> &str {
        "cluster"
    }

    fn sections(&self) -> Vec<ConfigSection> {
        // The cluster's etcd has the ports of the part without a cluster, which a program may have removed.
        vec![ConfigSection::field("cluster"), ConfigSection::field("services.etcd")]
    }

    fn check(&self, config: &NodedConfig) -> Result<(), ConfigViolation> {
        check_cluster(config, &self.deps)
    }

    fn dependencies(&self, config: &NodedConfig) -> Vec<DependencyEntry> {
        let unavailable = config.cluster.is_none().then_some("which is disabled; set cluster.address");
        vec![DependencyEntry::of_part(self, config).unavailable(unavailable)]
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let Some(cluster) = &planner.config().cluster else { return };
        let etcd = &planner.config().services.etcd;
        let consensus = self.plan_consensus(planner, etcd);
        // An address that the program provides is its own affair.
        let unreachable = check_reachable(cluster).filter(|_| self.deps.network.is_none());
        // The address of an interface is known when the node runs.
        if let (None, Some(address), ConsensusBackend::Etcd { .. }) =
            (&unreachable, cluster.address, &consensus)
        {
            planner.check_port(address, etcd.peer_port.get(), PEER_PORT_KEY);
        }
        if let (None, ConsensusBackend::Etcd { .. }) = (&unreachable, &consensus) {
            planner.check_notify_socket("cluster");
        }
        let skipped = unreachable.and_then(|reason| planner.skip_or_report("cluster", reason));
        let skipped = skipped.or_else(|| {
            let needs_root = cluster.hostname && !nix::unistd::geteuid().is_root();
            let reason = format!(
                "setting the hostname needs root: run {} as root, or set cluster.hostname = false",
                program_name()
            );
            needs_root.then(|| planner.skip_or_report("cluster", reason)).flatten()
        });
        let root = planner.root();
        let (directory, bootstrap_record) = if consensus.is_in_memory() {
            let placed: MemoryClusterLayout = root.run.add_layout().expect(PLACED_IN_MEMORY);
            (placed.cluster.path().to_owned(), placed.cluster.state.path().join("bootstrapped"))
        } else {
            let placed: ClusterLayout = planner.volume().add_layout().expect(PLACED_IN_MEMORY);
            (placed.cluster.path().to_owned(), bootstrap_record(cluster, root.path()))
        };
        // The check of the configuration compares with `node.data`, which `--data` may have replaced since.
        if cluster.bootstrap_record.is_some() && bootstrap_record.starts_with(root.path()) {
            planner.report(format!(
                "cluster.bootstrap_record: {} is in the data directory and would be lost with it: use a file outside",
                bootstrap_record.display()
            ));
        }
        let bytes = match &consensus {
            ConsensusBackend::Etcd { .. } => {
                required_etcd_bytes(&planner.config().node.data, "data/cluster/etcd")
            }
            _ => 0,
        };
        let is_in_memory = consensus.is_in_memory();
        let config = cluster.clone();
        let deps = self.deps.clone();
        let plan = ClusterPlan { consensus, directory, bootstrap_record, config, deps };
        let service = PlannedService::new(DN, plan).disk_bytes(bytes).skip(skipped);
        let service = service.log_format("root.cluster.consensus.etcd", LogFormat::Etcd);
        // A cluster in memory needs no volume, and so does not wait for root.storage.
        planner.add(if is_in_memory {
            service.run_layout::<MemoryClusterLayout>()
        } else {
            service.layout::<ClusterLayout>().node_layout::<NamesLayout>()
        });
    }
}

impl ClusterPart {
    fn plan_consensus(&self, planner: &mut PartPlanner<'_>, etcd: &EtcdConfig) -> ConsensusBackend {
        if let Some(consensus) = &self.deps.consensus {
            return ConsensusBackend::Provided(consensus.clone());
        }
        let given = etcd.binary.as_deref().unwrap_or(Path::new("etcd"));
        let hint = "Debian: apt-get install etcd-server";
        match planner.find_program("cluster", Some(given), hint) {
            // With --dev, a machine without etcd runs the cluster in memory instead of skipping it.
            (_, Some(reason)) => ConsensusBackend::Memory { reason },
            (binary, None) => ConsensusBackend::Etcd { binary, config: etcd.clone() },
        }
    }
}

/// Cluster membership of the node.
#[derive(Debug)]
struct ClusterPlan {
    consensus: ConsensusBackend,
    /// The directory of the cluster.
    directory: PathBuf,
    /// The file that records that the node has been in a cluster. A cluster in memory has its own.
    bootstrap_record: PathBuf,
    config: ClusterConfig,
    deps: PartDeps,
}

/// Consensus with the other members of a cluster.
#[derive(Debug)]
enum ConsensusBackend {
    /// An etcd.
    Etcd { binary: PathBuf, config: EtcdConfig },
    /// In the memory of this process, for development without etcd; lost when noded exits.
    Memory { reason: String },
    /// The program's.
    Provided(ConsensusFactory),
}

impl ConsensusBackend {
    fn is_in_memory(&self) -> bool {
        matches!(self, Self::Memory { .. })
    }
}

/// The configured record of the bootstrap, or the one next to the data directory.
pub(crate) fn bootstrap_record(cluster: &ClusterConfig, data: &Path) -> PathBuf {
    cluster.bootstrap_record.clone().unwrap_or_else(|| {
        let mut beside = data.as_os_str().to_owned();
        beside.push(".bootstrapped");
        beside.into()
    })
}

impl fmt::Display for ClusterPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.config.address, &self.config.interface) {
            (Some(address), _) if self.deps.network.is_none() => write!(f, "a member at {address}, ")?,
            (None, Some(interface)) if self.deps.network.is_none() => {
                write!(f, "a member at the address of {interface}, ")?;
            }
            _ => f.write_str("a member at the address that the program provides, ")?,
        }
        if self.config.bootstrap {
            f.write_str("bootstraps a cluster once if it has no ticket, ")?;
        }
        match &self.consensus {
            ConsensusBackend::Etcd { binary, config } => write!(
                f,
                "by {}, peers on port {}, data in {}",
                binary.display(),
                config.peer_port,
                self.directory.display()
            ),
            ConsensusBackend::Memory { reason } => {
                write!(f, "in memory, lost when {} exits: {reason}", program_name())
            }
            ConsensusBackend::Provided(_) => {
                write!(f, "by the consensus that the program provides, data in {}", self.directory.display())
            }
        }
    }
}

impl PlannedRunnable for ClusterPlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        let prepared = if self.consensus.is_in_memory() {
            self.prepare_in_memory(node)?
        } else {
            self.prepare_on_volume(node)?
        };
        // The cluster needs its address until it has stopped.
        Ok(prepared.stop_before("root.network"))
    }
}

impl ClusterPlan {
    fn prepare_on_volume(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        let esp = node.create_node_layout::<StorageLayout>()?.esp;
        let names = node.create_node_layout::<NamesLayout>()?.names;
        let volume = Arc::<ClusterVolume>::default();
        let cluster = self.new_cluster(node, &esp, names, Arc::clone(&volume) as _)?;
        // root.storage is prepared before.
        let keys = node.extensions().get::<Arc<VolumeKeys>>().cloned();
        // The volume is attached at each start: the service outlives a closed volume, and its directory does not.
        let backup = self.backup_service(node, &cluster);
        Ok(node.on_volume(move |data| {
            data.create_layout::<ClusterLayout>()?;
            volume.attach(data.dir().open_dir(CLUSTER_DIR)?);
            let keys = keys.clone().filter(|keys| keys.may_be_in_cluster());
            let backup = backup.clone();
            Ok(ClusterOnVolume { cluster: cluster.clone(), volume: Arc::clone(&volume), keys, backup })
        }))
    }

    /// The service that saves snapshots by a schedule, if one is configured.
    fn backup_service(&self, node: &mut NodePreparation<'_>, cluster: &ClusterNode) -> Option<BackupService> {
        let schedule = Schedule::from_config(self.config.backup.as_ref()?)?;
        let state = Arc::new(BackupState::new(schedule.every, SystemTime::now()));
        let known = Arc::clone(&state);
        let source = move |_: &NodeSnapshot| known.warning(SystemTime::now()).into_iter().collect::<Vec<_>>();
        node.health_sources().add("cluster.backup", source);
        let health = node.health_sources().changes();
        Some(BackupService { cluster: cluster.clone(), schedule, state, health })
    }

    fn prepare_in_memory(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        // The keys of a cluster in memory are lost with the process, so files of the former one are stale.
        node.data().run.open()?.remove_tree("cluster")?;
        let placed = node.create_run_layout::<MemoryClusterLayout>()?.cluster;
        let volume = Arc::new(DirectoryVolume::new(placed.volume.open()?));
        Ok(PreparedRunnable::new(self.new_cluster(node, &placed.state, placed.names, volume)?))
    }

    /// The cluster service, which the control API finds too. `state` has its ticket and its step journal.
    fn new_cluster(
        &self,
        node: &mut NodePreparation<'_>,
        state: &LayoutDir,
        names: LocalNamesDir,
        volume: Arc<dyn DataVolume>,
    ) -> Result<ClusterNode, PrepareError> {
        let deps = Deps {
            journal_dir: state.open()?,
            enrolment: enrolment_sources(state),
            network: self.network(node)?,
            volume,
            consensus: self.new_consensus(node.config().node.grace, state.path()),
            local_names: LocalNames {
                hosts: Some(names.hosts),
                machine_id: Some(names.machine_id),
                set_hostname: self.config.hostname,
            },
            enroller: Some(Arc::new(ApiEnroller(Arc::clone(node.running())))),
        };
        let mut settings = EnrolmentSettings::default();
        settings.deadline = self.config.deadline;
        settings.golden_tickets = self.config.golden_tickets;
        settings.bootstrap = self.config.bootstrap;
        if !self.consensus.is_in_memory() {
            let snapshot = self.directory.with_file_name(RESTORE_FILE);
            settings.snapshot = Some(snapshot.clone());
            node.extensions().insert(StagedSnapshot(snapshot));
        }
        settings.bootstrap_record = Some(BootstrapRecord::new(&self.bootstrap_record));
        let cluster = ClusterNode::new(deps, settings);
        // The control API, and a program that embeds the node, find the cluster by its type.
        node.extensions().insert(cluster.clone());
        let ticket = state.path().join("enrolment.pb");
        node.health_sources().add("cluster", health::health_source(cluster.clone(), ticket));
        node.metrics().add("cluster", metrics::cluster_registry(cluster.clone()));
        Ok(cluster)
    }

    fn new_consensus(&self, grace: Duration, state: &Path) -> ConsensusFactory {
        match &self.consensus {
            ConsensusBackend::Memory { .. } => {
                ConsensusFactory::without_volume(Arc::new(MemoryConsensus::new()))
            }
            ConsensusBackend::Etcd { binary, config } => {
                let mut etcd = MemberConfig::new(binary);
                etcd.peer_port = config.peer_port.get();
                etcd.extra_args.clone_from(&config.extra_args);
                etcd.grace = grace;
                etcd.progress_period = self.config.progress_period;
                etcd.start_record = Some(state.join(START_RECORD));
                etcd.recovery_recipient = self.config.backup.as_ref().map(|backup| backup.recipient.clone());
                ConsensusFactory::etcd_on_volume(etcd)
            }
            ConsensusBackend::Provided(consensus) => consensus.clone(),
        }
    }

    /// The program's network, that of a part before this one, or the configured address.
    fn network(&self, node: &mut NodePreparation<'_>) -> Result<Arc<dyn Network>, PrepareError> {
        if let Some(network) = self.deps.network.clone().or_else(|| node.extensions().get().cloned()) {
            return Ok(network);
        }
        let address = self.config.address.ok_or(
            "the cluster has no network: set cluster.address, or use a node program with a part that provides one",
        )?;
        Ok(Arc::new(StaticNetwork::new(NodeAddress::try_new(address)?)))
    }
}

/// The places of the ticket. If a directory, for example, is at its path, only a node that reads the ticket is
/// concerned: a node that is in its cluster does not.
pub(super) fn enrolment_sources(state: &LayoutDir) -> EnrolmentSources {
    match state.add_layout::<EspEnrolment>() {
        Ok(placed) => EnrolmentSources::default_sources(placed.enrolment),
        // This source opens the path only when the node needs a ticket, and then reports the error.
        Err(_) => EnrolmentSources::new([EnrolmentSource::FwCfg(state.path().join("enrolment.pb"))]),
    }
}

/// The count of the member's starts in `esp/`: outside of the volume, which has a count, too. A reset removes it with the
/// other files of the enrolment.
const START_RECORD: &str = "enrolment.starts";

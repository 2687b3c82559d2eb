//! etcd as a cluster of one member on the loopback interface.

pub(crate) mod config;

use std::fmt;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nodekeel_localstorage::Dir;
use nodekeel_logtree::parse::LogFormat;
use nodekeel_supervisor::Failure;
use nodekeel_supervisor::process::{Liveness, Process, Readiness, Unready};
use tokio::time::timeout;

use self::config::check_etcd;
use super::worker::is_worker;
use crate::config::{ConfigSection, ConfigViolation, EtcdConfig, NodedConfig};
use crate::layout::EtcdLayout;
use crate::layout::PLACED_IN_MEMORY;
use crate::part::PartPlanner;
use crate::part::{
    DependencyEntry, NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable,
    is_equal,
};

/// Free disk space that a new etcd requires: it allocates its first two WAL segments of 64 MB at its start.
pub(super) const MIN_ETCD_BYTES: u64 = 128 << 20;

/// The key that probes read. It need not exist.
const PROBED_KEY: &str = "nodekeel/ready";

/// The pause between two probes of a running etcd.
const PROBE_PERIOD: Duration = Duration::from_secs(2);
/// Timeout of a probe: together with the pause, an operator knows of a frozen etcd within five seconds.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// The time for a read in a probe, which leaves some for the answer of etcd itself.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// The failed probes in a row, half a minute, after which an etcd is restarted.
const MAX_PROBE_FAILURES: u32 = 8;

/// The member's name. etcd stores it in its data, so it does not follow the node's.
const MEMBER_NAME: &str = "node";

const DN: &str = "root.etcd";

/// The port for other members, also of the etcd of a cluster.
pub(super) const PEER_PORT_KEY: &str = "services.etcd.peer_port";

/// The part of a node without a cluster.
pub(super) struct EtcdPart;

impl Part for EtcdPart {
    fn name(&self) -> &str {
        "etcd"
    }

    fn sections(&self) -> Vec<ConfigSection> {
        vec![ConfigSection::field("services.etcd")]
    }

    fn check(&self, config: &NodedConfig) -> Result<(), ConfigViolation> {
        check_etcd(&config.services.etcd)
    }

    fn dependencies(&self, config: &NodedConfig) -> Vec<DependencyEntry> {
        let unavailable = if config.cluster.is_some() {
            Some("which is a part of [cluster]; depend on \"cluster\"")
        } else if is_worker(config) {
            Some("which a worker does not have")
        } else {
            (!config.services.etcd.enable).then_some("which is disabled; set services.etcd.enable = true")
        };
        vec![DependencyEntry::of_part(self, config).unavailable(unavailable)]
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let etcd = &planner.config().services.etcd;
        // A cluster runs an etcd of its own, and a worker has none.
        if !etcd.enable || planner.config().cluster.is_some() || is_worker(planner.config()) {
            return;
        }
        let hint = "Debian: apt-get install etcd-server";
        let (binary, skipped) = planner.find_program("etcd", etcd.binary.as_deref(), hint);
        if skipped.is_none() {
            let address = Ipv4Addr::LOCALHOST.into();
            planner.check_port(address, etcd.client_port.get(), "services.etcd.client_port");
            planner.check_port(address, etcd.peer_port.get(), PEER_PORT_KEY);
            planner.check_notify_socket("etcd");
        }
        let placed: EtcdLayout = planner.volume().add_layout().expect(PLACED_IN_MEMORY);
        let data = placed.etcd.data.path().to_owned();
        let bytes = required_etcd_bytes(&planner.config().node.data, "data/etcd");
        let plan = EtcdPlan { binary, data, config: etcd.clone() };
        let service = PlannedService::new(DN, plan).layout::<EtcdLayout>().disk_bytes(bytes);
        planner.add(service.log_format(DN, LogFormat::Etcd).skip(skipped));
    }
}

/// An etcd of one member.
#[derive(Debug, Clone, PartialEq)]
struct EtcdPlan {
    binary: PathBuf,
    /// The data directory, as planned.
    data: PathBuf,
    config: EtcdConfig,
}

impl fmt::Display for EtcdPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, clients on 127.0.0.1:{}, peers on 127.0.0.1:{}, data in {}",
            self.binary.display(),
            self.config.client_port,
            self.config.peer_port,
            self.data.display()
        )
    }
}

impl PlannedRunnable for EtcdPlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        let (plan, grace) = (self.clone(), node.config().node.grace);
        Ok(node.on_volume(move |volume| {
            let placed: EtcdLayout = volume.create_layout()?;
            Ok(etcd_process(&plan, placed.etcd.data.path(), grace))
        }))
    }

    fn is_same(&self, new: &dyn PlannedRunnable) -> Option<bool> {
        is_equal(self, new)
    }
}

/// The free space for an etcd with this directory below the data directory: one that has run has allocated its segments
/// already.
pub(super) fn required_etcd_bytes(data: &Path, directory: &str) -> u64 {
    let has_run = Dir::open(data).and_then(|data| data.exists(format!("{directory}/data/member")));
    if has_run.unwrap_or_default() { 0 } else { MIN_ETCD_BYTES }
}

/// etcd as a process; ready when it has reported readiness (sd_notify) and answers a linearizable read.
fn etcd_process(etcd: &EtcdPlan, data: &Path, grace: Duration) -> Process {
    let client = format!("http://127.0.0.1:{}", etcd.config.client_port);
    let peer = format!("http://127.0.0.1:{}", etcd.config.peer_port);
    let (started, running) = (client.clone(), client.clone());
    Process::new(&etcd.binary)
        .args(["--name", MEMBER_NAME])
        .arg("--data-dir")
        .arg(data)
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        // etcd bootstraps only if this list contains its own peer URL.
        .args(["--initial-cluster", &format!("{MEMBER_NAME}={peer}")])
        // JSON lines, which keep levels and fields; etcd 3.4 writes another format by default.
        .args(["--logger", "zap"])
        // The operator's arguments come last: of a repeated flag, Go uses the last value.
        .args(&etcd.config.extra_args)
        .ready_when(Readiness::on_notify().and_probe(move || probe_read(started.clone())))
        .liveness(
            Liveness::probe(move || probe_serving(running.clone()))
                .with_period(PROBE_PERIOD)
                .with_timeout(PROBE_TIMEOUT)
                .with_failure_threshold(MAX_PROBE_FAILURES),
        )
        .grace_period(grace)
}

/// Asks whether it serves: one that answers by itself, and does no linearizable read in time, is alive.
async fn probe_serving(url: String) -> Result<(), Failure> {
    // From its memory, without its log or its disk.
    let mut client = etcd_client::Client::connect([url], None).await?;
    client.status().await?;
    match timeout(READ_TIMEOUT, client.get(PROBED_KEY, None)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(Unready::new(format!("it answers, and serves no reads: {error}")).into()),
        Err(_) => Err(Unready::new(format!("it answers, and does no read within {READ_TIMEOUT:?}")).into()),
    }
}

/// Reads a key. The read is linearizable: etcd answers only after the member is the
/// leader.
async fn probe_read(url: String) -> Result<(), Failure> {
    let mut client = etcd_client::Client::connect([url], None).await?;
    client.get(PROBED_KEY, None).await?;
    Ok(())
}

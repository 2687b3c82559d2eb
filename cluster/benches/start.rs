//! Time of a node from nothing to its cluster, and back to it, beside its etcd alone: the same program under
//! the same supervisor, without certificates, until it answers one read. Both take turns; every figure is the
//! median of the rounds. And the time of a joiner from its start to its vote, while a cluster grows to five voters.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nodekeel_cluster::consensus::PeerUrl;
use nodekeel_cluster::consensus::etcd::EtcdConfig;
use nodekeel_cluster::enrolment::{ClusterNode, ConsensusFactory, Deps, EnrolmentSettings};
use nodekeel_cluster::network::{NodeAddress, StaticNetwork};
use nodekeel_cluster::node::{EnrolmentSource, EnrolmentSources, EspEnrolment, LocalNames};
use nodekeel_localstorage::tree::{LayoutFile, LayoutTarget};
use nodekeel_localstorage::volume::DirectoryVolume;
use nodekeel_localstorage::{Dir, FileMode, OsFileStore};
use nodekeel_supervisor::process::{Process, Readiness};
use nodekeel_supervisor::{Context, Failure, Runnable, RunnableState, Supervisor};
use tempfile::TempDir;
use testbed::bench::{BenchRow, RowWriter, etcd_version, measure_interleaved, median};
use testbed::{ReservedPort, ScratchDir, reserve_port, tools};
use tokio::runtime::Runtime;
use tokio::time::sleep;

const ROUNDS: usize = 30;
const JOINS: usize = 4;
const TICKET_WITHIN: Duration = Duration::from_secs(30);
/// What a cluster may add to its etcd at a start, and take for a join, in milliseconds.
const START_GOAL: f64 = 50.0;
const JOIN_GOAL: f64 = 2000.0;

/// The disk and the ports of one round.
struct BenchNode {
    scratch: ScratchDir,
    client: ReservedPort,
    peer: ReservedPort,
    etcd: PathBuf,
}

fn main() -> Result<()> {
    let etcd = tools::find_tool(tools::ETCD)?;
    let version = etcd_version(&etcd)?;
    let runtime = Runtime::new().context("start the runtime")?;
    let ours = |site: &BenchNode| time_to_ready(&runtime, || site.enrolled_node());
    let bare = |site: &BenchNode| time_to_ready(&runtime, || site.bare_etcd());
    let mut rows = RowWriter::new("cluster-start");
    let bootstrapped =
        measure_interleaved(ROUNDS, || ours(&BenchNode::new(&etcd)?), || bare(&BenchNode::new(&etcd)?))?;
    let row =
        BenchRow::new("found", "New to Running: a cluster bootstrapped", "ms", median(&bootstrapped.ours));
    let row = row.goal_at_most(median(&bootstrapped.peer) + START_GOAL);
    rows.add_rows([row.peer("etcd alone, to its first read", &version, median(&bootstrapped.peer))])?;
    let (node, alone) = (BenchNode::new(&etcd)?, BenchNode::new(&etcd)?);
    // The clusters that the restarts return to.
    ours(&node)?;
    bare(&alone)?;
    let again = measure_interleaved(ROUNDS, || ours(&node), || bare(&alone))?;
    let row = BenchRow::new("restart", "New to Running: back to its cluster", "ms", median(&again.ours));
    let row = row.goal_at_most(median(&again.peer) + START_GOAL);
    rows.add_rows([row.peer("etcd alone, to its first read", &version, median(&again.peer))])?;
    let joins = runtime.block_on(join_times(&etcd))?;
    let row = BenchRow::new("join", "start to Running, with a vote: a ticket's node", "ms", median(&joins));
    rows.add_rows([row.goal_at_most(JOIN_GOAL)])?;
    rows.finish().map(drop)
}

/// Runs it until it is ready, and stops it; returns the time until ready.
fn time_to_ready<R: Runnable>(runtime: &Runtime, make: impl Fn() -> Result<R>) -> Result<f64> {
    runtime.block_on(async {
        let Run { took, supervisor, .. } = start(make()?).await?;
        supervisor.shutdown().await;
        Ok(took)
    })
}

/// What has been started.
struct Run {
    /// The time until it was ready, in milliseconds.
    took: f64,
    supervisor: Supervisor,
    _sockets: TempDir,
}

/// Starts it, and waits until it is ready.
async fn start(runnable: impl Runnable) -> Result<Run> {
    let runnable = Arc::new(std::sync::Mutex::new(Some(runnable)));
    let started_at = Instant::now();
    let sockets = tempfile::tempdir()?;
    let builder = Supervisor::builder().notify_directory(sockets.path());
    let supervisor = builder.start(move |ctx: Context| {
        let runnable = runnable.lock().ok().and_then(|mut runnable| runnable.take());
        async move {
            ctx.run_child("it", runnable.ok_or("the first run has failed")?)?;
            ctx.wait_ready("root.it").await?;
            ctx.signal_ready()?;
            Err::<(), Failure>(ctx.canceled().await.into())
        }
    });
    let mut tree = supervisor.watch_changes();
    while !supervisor.snapshot().iter().any(|node| &*node.dn == "root" && node.state == RunnableState::Ready)
    {
        tree.changed().await?;
    }
    Ok(Run { took: started_at.elapsed().as_secs_f64() * 1e3, supervisor, _sockets: sockets })
}

/// The times of nodes that join one after the other.
async fn join_times(etcd: &Path) -> Result<Vec<f64>> {
    let first = BenchNode::new(etcd)?;
    let node = first.enrolled_node()?;
    let (mut sites, mut runs, mut times) = (Vec::new(), vec![start(node.clone()).await?], Vec::new());
    for _ in 0..JOINS {
        let site = BenchNode::new(etcd)?;
        let url = PeerUrl::new(Ipv4Addr::LOCALHOST.into(), site.peer.number());
        // etcd takes no member in the first seconds after another one has joined.
        let asked_at = Instant::now();
        let ticket = loop {
            match node.ticket_issuer()?.issue_ticket(&url).await {
                Ok(ticket) => break ticket,
                Err(_) if asked_at.elapsed() < TICKET_WITHIN => sleep(Duration::from_millis(100)).await,
                Err(error) => return Err(error.into()),
            }
        };
        site.ticket_file()?.write(&ticket.to_config())?;
        let run = start(site.enrolled_node()?).await?;
        times.push(run.took);
        runs.push(run);
        sites.push(site);
    }
    for run in runs {
        run.supervisor.shutdown().await;
    }
    Ok(times)
}

impl BenchNode {
    fn new(etcd: &Path) -> Result<Self> {
        Ok(Self {
            scratch: ScratchDir::new()?,
            client: reserve_port()?,
            peer: reserve_port()?,
            etcd: etcd.to_owned(),
        })
    }

    fn enrolled_node(&self) -> Result<ClusterNode> {
        let top = Dir::open(self.scratch.path())?;
        let mut etcd = EtcdConfig::new(&self.etcd);
        etcd.peer_port = self.peer.number();
        let deps = Deps {
            journal_dir: top.ensure_dir("esp", FileMode::PRIVATE_DIR)?,
            enrolment: EnrolmentSources::new([EnrolmentSource::EspFile(self.ticket_file()?)]),
            network: Arc::new(StaticNetwork::new(NodeAddress::try_new([127, 0, 0, 1].into())?)),
            volume: Arc::new(DirectoryVolume::new(top.ensure_dir("data", FileMode::PRIVATE_DIR)?)),
            consensus: ConsensusFactory::etcd_on_volume(etcd),
            local_names: LocalNames::default(),
            enroller: None,
        };
        let mut settings = EnrolmentSettings::default();
        // With a ticket it joins.
        (settings.bootstrap, settings.golden_tickets) = (true, true);
        Ok(ClusterNode::new(deps, settings))
    }

    /// Where the node looks for its ticket.
    fn ticket_file(&self) -> Result<LayoutFile> {
        let esp = Dir::open(self.scratch.path())?.ensure_dir("esp", FileMode::PRIVATE_DIR)?;
        let target = LayoutTarget::new(Arc::new(OsFileStore::new(esp)), self.scratch.path().join("esp"));
        let placed: EspEnrolment = target.create_layout()?;
        Ok(placed.enrolment.clone())
    }

    fn bare_etcd(&self) -> Result<Process> {
        let url = |port: &ReservedPort| format!("http://127.0.0.1:{}", port.number());
        let (client, peer) = (url(&self.client), url(&self.peer));
        let client_url = client.clone();
        let read = move || {
            let url = client_url.clone();
            async move {
                etcd_client::Client::connect([url], None).await?.get("ready", None).await?;
                Ok::<(), Failure>(())
            }
        };
        Ok(Process::new(&self.etcd)
            .args(["--name", "bare", "--logger", "zap", "--log-outputs", "stderr"])
            .arg("--data-dir")
            .arg(self.scratch.path().join("data"))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("bare={peer}")])
            .ready_when(Readiness::on_notify().and_probe(read)))
    }
}

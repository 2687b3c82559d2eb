//! Time of a node from nothing to its cluster, and back to it, beside its etcd alone: the same program under
//! the same supervisor, without certificates, until it answers one read. Both take turns; every figure is the
//! median of the rounds.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result};
use nodekeel_cluster::consensus::etcd::EtcdConfig;
use nodekeel_cluster::enrolment::{ClusterNode, ConsensusFactory, Deps, EnrolmentSettings};
use nodekeel_cluster::network::{NodeAddress, StaticNetwork};
use nodekeel_cluster::node::{EnrolmentSources, LocalNames};
use nodekeel_localstorage::volume::DirectoryVolume;
use nodekeel_localstorage::{Dir, FileMode};
use nodekeel_supervisor::process::{Process, Readiness};
use nodekeel_supervisor::{Context, Failure, Runnable, RunnableState, Supervisor};
use testbed::bench::{BenchRow, RowWriter, measure_interleaved, median};
use testbed::{ReservedPort, ScratchDir, command_output, reserve_port, tools};
use tokio::runtime::Runtime;

const ROUNDS: usize = 30;

/// The disk and the ports of one round.
struct BenchNode {
    scratch: ScratchDir,
    client: ReservedPort,
    peer: ReservedPort,
    etcd: PathBuf,
}

fn main() -> Result<()> {
    let etcd = tools::find_tool(tools::ETCD)?;
    let output = command_output(Command::new(&etcd).arg("--version"))?;
    let version = output.lines().next().and_then(|line| line.split(": ").nth(1)).unwrap_or("?").to_owned();
    let runtime = Runtime::new().context("start the runtime")?;
    let ours = |site: &BenchNode| time_to_ready(&runtime, || site.enrolled_node());
    let bare = |site: &BenchNode| time_to_ready(&runtime, || site.bare_etcd());
    let mut rows = RowWriter::new("cluster-start");
    let bootstrapped =
        measure_interleaved(ROUNDS, || ours(&BenchNode::new(&etcd)?), || bare(&BenchNode::new(&etcd)?))?;
    let row =
        BenchRow::new("found", "New to Running: a cluster bootstrapped", "ms", median(&bootstrapped.ours));
    rows.add_rows([row.peer("etcd alone, to its first read", &version, median(&bootstrapped.peer))])?;
    let (node, alone) = (BenchNode::new(&etcd)?, BenchNode::new(&etcd)?);
    // The clusters that the restarts return to.
    ours(&node)?;
    bare(&alone)?;
    let again = measure_interleaved(ROUNDS, || ours(&node), || bare(&alone))?;
    let row = BenchRow::new("restart", "New to Running: back to its cluster", "ms", median(&again.ours));
    rows.add_rows([row.peer("etcd alone, to its first read", &version, median(&again.peer))])?;
    rows.finish().map(drop)
}

/// Runs it until it is ready, and stops it; returns the time until ready.
fn time_to_ready<R: Runnable>(runtime: &Runtime, make: impl Fn() -> Result<R>) -> Result<f64> {
    runtime.block_on(async {
        let runnable = Arc::new(std::sync::Mutex::new(Some(make()?)));
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
        while !supervisor
            .snapshot()
            .iter()
            .any(|node| &*node.dn == "root" && node.state == RunnableState::Ready)
        {
            tree.changed().await?;
        }
        let took = started_at.elapsed().as_secs_f64() * 1e3;
        supervisor.shutdown().await;
        Ok(took)
    })
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
        (etcd.client_port, etcd.peer_port) = (self.client.number(), self.peer.number());
        let deps = Deps {
            journal_dir: top.ensure_dir("esp", FileMode::PRIVATE_DIR)?,
            enrolment: EnrolmentSources::default(),
            network: Arc::new(StaticNetwork::new(NodeAddress::try_new([127, 0, 0, 1].into())?)),
            volume: Arc::new(DirectoryVolume::new(top.ensure_dir("data", FileMode::PRIVATE_DIR)?)),
            consensus: ConsensusFactory::etcd_on_volume(etcd),
            local_names: LocalNames::default(),
        };
        let mut settings = EnrolmentSettings::default();
        settings.bootstrap = true;
        Ok(ClusterNode::new(deps, settings))
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

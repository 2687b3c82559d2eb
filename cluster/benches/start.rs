//! How long a node takes from nothing to its cluster, and back to it, beside its etcd alone: the same program under the same
//! supervisor, without certificates, until it answers one read. Both take turns; every figure is the median of the rounds.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result};
use nodekeel_cluster::consensus::etcd::EtcdConfig;
use nodekeel_cluster::machine::{Cluster, ConsensusSource, Deps, Settings};
use nodekeel_cluster::network::{Address, StaticNetwork};
use nodekeel_cluster::node::{Enrolment, LocalNames};
use nodekeel_localstorage::volume::Directory;
use nodekeel_localstorage::{Dir, Mode};
use nodekeel_supervisor::process::{Process, Readiness};
use nodekeel_supervisor::{Context, Failure, Runnable, State, Supervisor};
use testbed::bench::{BenchRow, Rows, interleave, median};
use testbed::{Port, Scratch, free_port, output, tools};
use tokio::runtime::Runtime;

const ROUNDS: usize = 30;

/// What one round has on its disk, and where it is reached.
struct Site {
    scratch: Scratch,
    client: Port,
    peer: Port,
    etcd: PathBuf,
}

fn main() -> Result<()> {
    let etcd = tools::find(tools::ETCD)?;
    let told = output(Command::new(&etcd).arg("--version"))?;
    let version = told.lines().next().and_then(|line| line.split(": ").nth(1)).unwrap_or("?").to_owned();
    let runtime = Runtime::new().context("start the runtime")?;
    let ours = |site: &Site| milliseconds(&runtime, || site.node());
    let bare = |site: &Site| milliseconds(&runtime, || site.bare());
    let mut rows = Rows::new("cluster-start");
    let founded = interleave(ROUNDS, || ours(&Site::new(&etcd)?), || bare(&Site::new(&etcd)?))?;
    let row = BenchRow::new("found", "New to Running: a cluster founded", "ms", median(&founded.ours));
    rows.add([row.peer("etcd alone, to its first read", &version, median(&founded.peer))])?;
    let (node, alone) = (Site::new(&etcd)?, Site::new(&etcd)?);
    // What they go back to.
    ours(&node)?;
    bare(&alone)?;
    let again = interleave(ROUNDS, || ours(&node), || bare(&alone))?;
    let row = BenchRow::new("restart", "New to Running: back to its cluster", "ms", median(&again.ours));
    rows.add([row.peer("etcd alone, to its first read", &version, median(&again.peer))])?;
    rows.finish().map(drop)
}

/// Runs it until it is ready, and stops it; how long the first took.
fn milliseconds<R: Runnable>(runtime: &Runtime, make: impl Fn() -> Result<R>) -> Result<f64> {
    runtime.block_on(async {
        let runnable = Arc::new(std::sync::Mutex::new(Some(make()?)));
        let begun = Instant::now();
        let supervisor = Supervisor::builder().start(move |ctx: Context| {
            let runnable = runnable.lock().ok().and_then(|mut runnable| runnable.take());
            async move {
                ctx.run("it", runnable.ok_or("it has failed")?)?;
                ctx.wait_ready("root.it").await?;
                ctx.ready()?;
                Err::<(), Failure>(ctx.cancelled().await.into())
            }
        });
        let mut tree = supervisor.watch();
        while !supervisor.snapshot().iter().any(|node| &*node.dn == "root" && node.state == State::Ready) {
            tree.changed().await?;
        }
        let took = begun.elapsed().as_secs_f64() * 1e3;
        supervisor.shutdown().await;
        Ok(took)
    })
}

impl Site {
    fn new(etcd: &Path) -> Result<Self> {
        Ok(Self { scratch: Scratch::new()?, client: free_port()?, peer: free_port()?, etcd: etcd.to_owned() })
    }

    fn node(&self) -> Result<Cluster> {
        let top = Dir::open(self.scratch.path())?;
        let mut etcd = EtcdConfig::new(&self.etcd);
        (etcd.client_port, etcd.peer_port) = (self.client.number(), self.peer.number());
        let deps = Deps {
            state: top.ensure_dir("esp", Mode::PRIVATE_DIR)?,
            enrolment: Enrolment::default(),
            network: Arc::new(StaticNetwork::new(Address::try_new([127, 0, 0, 1].into())?)),
            volume: Arc::new(Directory::new(top.ensure_dir("data", Mode::PRIVATE_DIR)?)),
            consensus: ConsensusSource::etcd(etcd),
            local: LocalNames::default(),
        };
        Ok(Cluster::new(deps, Settings::default()))
    }

    fn bare(&self) -> Result<Process> {
        let url = |port: &Port| format!("http://127.0.0.1:{}", port.number());
        let (client, peer) = (url(&self.client), url(&self.peer));
        let asked = client.clone();
        let read = move || {
            let url = asked.clone();
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
            .ready(Readiness::notify().and_probe(read)))
    }
}

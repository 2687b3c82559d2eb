//! A custom node on nodekeel-node: its own volume and network, its own part with a section of the configuration, its
//! own runnable, and a program of the configuration that depends on them.
//!
//! `cargo run -p examples --features node --example own_node`; with `-- --wait` it runs until it is interrupted, so that
//! you can type `nodectl` commands.
//!
//! It boots twice from the same disk: it bootstraps a cluster, and rejoins it.
//! A real node would open an encrypted disk instead of a directory, request its address from a DHCP server, and use
//! etcd instead of a cluster in memory; nothing else would change.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use nodekeel_cluster::consensus::memory::MemoryConsensus;
use nodekeel_cluster::enrolment::{ClusterNode, ConsensusFactory};
use nodekeel_cluster::network::{Network, NodeAddress};
use nodekeel_localstorage::volume::{DataVolume, DirectoryVolume, ErasePolicy, MountState, VolumeError};
use nodekeel_localstorage::{Dir, FileMode};
use nodekeel_node::client;
use nodekeel_node::config::ConfigSection;
use nodekeel_node::node::{ExtraRunnable, NodeHandle};
use nodekeel_node::part::{Part, PlannedService};
use nodekeel_node::plan::PartPlanner;
use nodekeel_node::v1::{LogsRequest, TreeRequest};
use nodekeel_supervisor::{Context, Failure, StopSignals};
use serde::Deserialize;
use tokio::sync::watch;

const CONFIG: &str = r#"
[cluster]
bootstrap = true
# It keeps its address until it has stopped.
depends_on = ["lease"]

[greeter]
text = "good morning"
depends_on = ["cluster"]

[[service]]
name = "listener"
command = ["/bin/sleep", "1000"]
depends_on = ["greeter"]
"#;

/// Storage: a volume that prints its mounts.
#[derive(Debug)]
struct PrintingVolume(DirectoryVolume);

impl DataVolume for PrintingVolume {
    fn mount_new(&self, erase: ErasePolicy) -> Result<Dir, VolumeError> {
        self.0.mount_new(erase).inspect(|_| println!("volume: created"))
    }

    fn mount_existing(&self) -> Result<Dir, VolumeError> {
        self.0.mount_existing().inspect(|_| println!("volume: mounted"))
    }

    fn unmount(&self) -> Result<(), VolumeError> {
        self.0.unmount()
    }

    fn state(&self) -> MountState {
        self.0.state()
    }
}

/// Network: an address that a runnable of the node obtains.
#[derive(Debug, Clone, Default)]
struct LeasedNetwork(watch::Sender<Option<NodeAddress>>);

impl Network for LeasedNetwork {
    fn watch_address(&self) -> watch::Receiver<Option<NodeAddress>> {
        self.0.subscribe()
    }
}

impl LeasedNetwork {
    async fn run_lease(self, ctx: Context) -> Result<(), Failure> {
        self.0.send_replace(Some(NodeAddress::try_new([192, 0, 2, 7].into())?));
        ctx.signal_ready()?;
        ctx.until_canceled().await
    }
}

/// A part: `[greeter]` of the configuration, and a runnable that writes its text to the log.
struct GreeterPart;

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct GreeterConfig {
    text: String,
}

impl Part for GreeterPart {
    fn name(&self) -> &str {
        "greeter"
    }

    fn sections(&self) -> Vec<ConfigSection> {
        vec![ConfigSection::new::<GreeterConfig>("greeter")]
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let Some(config) = planner.config().section::<GreeterConfig>("greeter").cloned() else { return };
        let summary = format!("says {:?}", config.text);
        let greet = move |ctx: Context| greet(config.text.clone(), ctx);
        planner.add(PlannedService::from_runnable("root.greeter", summary, greet));
    }
}

async fn greet(text: String, ctx: Context) -> Result<(), Failure> {
    use std::io::Write as _;
    writeln!(ctx.open_raw_output(), "{text}")?;
    ctx.signal_ready()?;
    ctx.until_canceled().await
}

/// Starts a node on the disk in this directory, and waits until everything runs.
async fn boot(scratch: &Path, consensus: Arc<MemoryConsensus>) -> anyhow::Result<NodeHandle> {
    let disk = Dir::open(scratch)?.ensure_dir("disk", FileMode::PRIVATE_DIR)?;
    let lease = LeasedNetwork::default();
    let node = NodeHandle::builder("own_node.toml", CONFIG)
        .data(scratch.join("data"))
        .volume(PrintingVolume(DirectoryVolume::new(disk)))
        .network(lease.clone())
        .consensus(ConsensusFactory::without_volume(consensus))
        .without("containerd")
        .with(ExtraRunnable::new("lease", move |ctx| lease.clone().run_lease(ctx)))
        .with(GreeterPart)
        .start()?;
    node.wait_ready("root.service.listener").await;
    Ok(node)
}

/// Counts this boot in a key of the cluster.
async fn count_boots(cluster: &ClusterNode) -> anyhow::Result<i64> {
    let kv = cluster.namespaced_kv("example", "boots")?;
    kv.put(b"/last", cluster.cluster_identity()?.node_id.as_str().as_bytes()).await?;
    Ok(kv.get(b"/last").await?.map_or(0, |kv| kv.version))
}

async fn print_state(node: &NodeHandle) -> anyhow::Result<()> {
    let cluster: ClusterNode = node.extension().context("the node has a cluster")?;
    let phases: Vec<_> = cluster.phase_history().iter().map(ToString::to_string).collect();
    println!("cluster: {}", phases.join(" → "));
    println!("boots in the cluster: {}", count_boots(&cluster).await?);
    let mut client = client::connect(node.control_socket()).await?;
    for runnable in client.tree(TreeRequest {}).await?.into_inner().nodes {
        println!("{:<24} {:?}", runnable.dn, runnable.state());
    }
    let request = LogsRequest { dn: "root.greeter".into(), ..LogsRequest::default() };
    let log = client.logs(request).await?.into_inner().message().await?;
    println!("the log of root.greeter: {} line", log.map_or(0, |log| log.entries.len()));
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let scratch = tempfile::tempdir()?;
    let consensus = Arc::new(MemoryConsensus::new());
    let waits = std::env::args().any(|argument| argument == "--wait");
    for name in ["first", "second"] {
        println!("{name} boot");
        let node = boot(scratch.path(), consensus.clone()).await?;
        print_state(&node).await?;
        if waits && name == "second" {
            println!("type: nodectl --socket {} tree", node.control_socket().display());
            StopSignals::listen()?.wait_for_stop().await;
        }
        let report = node.shutdown().await;
        println!("stopped, {} stragglers", report.stragglers.len());
    }
    Ok(())
}

//! A custom node on nodekeel-node: its own volume and network, its own part with a section of the configuration, its
//! own runnable, and a program of the configuration that depends on them.
//!
//! `cargo run -p examples --features node --example own_node`, or with `-- --wait` to type `nodectl` commands
//! meanwhile.
//!
//! A real node would open an encrypted disk instead of a directory, request its address from a DHCP server, and use
//! etcd instead of a cluster in memory; nothing else would change.

use std::sync::Arc;

use nodekeel_cluster::consensus::memory::MemoryConsensus;
use nodekeel_cluster::enrolment::ConsensusFactory;
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

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let scratch = tempfile::tempdir()?;
    let disk = Dir::open(scratch.path())?.ensure_dir("disk", FileMode::PRIVATE_DIR)?;
    let lease = LeasedNetwork::default();
    let network = lease.clone();

    let node = NodeHandle::builder("own_node.toml", CONFIG)
        .data(scratch.path().join("data"))
        .volume(PrintingVolume(DirectoryVolume::new(disk)))
        .network(network)
        .consensus(ConsensusFactory::without_volume(Arc::new(MemoryConsensus::new())))
        .without("containerd")
        .with(ExtraRunnable::new("lease", move |ctx| lease.clone().run_lease(ctx)))
        .with(GreeterPart)
        .start()?;
    node.wait_ready("root.service.listener").await;

    let mut client = client::connect(node.control_socket()).await?;
    for runnable in client.tree(TreeRequest {}).await?.into_inner().nodes {
        println!("{:<24} {:?}", runnable.dn, runnable.state());
    }
    let request = LogsRequest { dn: "root.greeter".into(), ..LogsRequest::default() };
    let log = client.logs(request).await?.into_inner().message().await?;
    println!("the log of root.greeter: {} line", log.map_or(0, |log| log.entries.len()));

    if std::env::args().any(|argument| argument == "--wait") {
        println!("type: nodectl --socket {} tree", node.control_socket().display());
        StopSignals::listen()?.wait_for_stop().await;
    }
    let report = node.shutdown().await;
    println!("stopped, {} stragglers", report.stragglers.len());
    Ok(())
}

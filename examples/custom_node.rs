//! A custom node: custom storage and network, cluster membership, and a service that needs the cluster.
//!
//! `cargo run -p examples --example custom_node`
//!
//! It boots twice from the same disks: it bootstraps a cluster, and rejoins it. A real node would open an
//! encrypted partition instead of a directory, request its address from a DHCP server instead of setting it,
//! and use etcd instead of a cluster in memory; nothing else would change.

use std::sync::Arc;

use nodekeel_cluster::consensus::memory::MemoryConsensus;
use nodekeel_cluster::enrolment::{ClusterNode, ConsensusFactory, Deps, EnrolmentSettings};
use nodekeel_cluster::network::{Network, NodeAddress};
use nodekeel_cluster::node::{EnrolmentSources, LocalNames};
use nodekeel_localstorage::volume::{DataVolume, DirectoryVolume, ErasePolicy, MountState, VolumeError};
use nodekeel_localstorage::{Dir, FileMode};
use nodekeel_supervisor::{Context, Failure, Supervisor};
use tokio::sync::watch;

/// Storage: a volume that logs its mounts.
#[derive(Debug)]
struct LoggingVolume(DirectoryVolume);

impl DataVolume for LoggingVolume {
    fn mount_new(&self, erase: ErasePolicy) -> Result<Dir, VolumeError> {
        println!("  storage: a new volume, erasing {erase:?}");
        self.0.mount_new(erase)
    }

    fn mount_existing(&self) -> Result<Dir, VolumeError> {
        self.0.mount_existing().inspect(|_| println!("  storage: the existing volume"))
    }

    fn unmount(&self) -> Result<(), VolumeError> {
        self.0.unmount()
    }

    fn state(&self) -> MountState {
        self.0.state()
    }
}

/// Network: an address that a runnable of the tree obtains.
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
        Err(ctx.canceled().await.into())
    }
}

/// A service that counts its boots in a key of the cluster.
async fn count_boots(cluster: ClusterNode, ctx: Context) -> Result<(), Failure> {
    let kv = cluster.namespaced_kv("example", "boots")?;
    let boots = kv.get(b"/count").await?.map_or(0, |kv| kv.version) + 1;
    kv.put(b"/count", cluster.cluster_identity()?.node_id.as_str().as_bytes()).await?;
    println!("  service: boot {boots}");
    ctx.signal_ready()?;
    Err(ctx.canceled().await.into())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let scratch = tempfile::tempdir()?;
    let disks = Dir::open(scratch.path())?;
    let consensus = Arc::new(MemoryConsensus::new());
    for boot in ["first", "second"] {
        println!("{boot} boot");
        let lease = LeasedNetwork::default();
        let deps = Deps {
            journal_dir: disks.ensure_dir("esp", FileMode::PRIVATE_DIR)?,
            enrolment: EnrolmentSources::default(),
            network: Arc::new(lease.clone()),
            volume: Arc::new(LoggingVolume(DirectoryVolume::new(
                disks.ensure_dir("data", FileMode::PRIVATE_DIR)?,
            ))),
            consensus: ConsensusFactory::without_volume(consensus.clone()),
            local_names: LocalNames::default(),
        };
        let mut settings = EnrolmentSettings::default();
        settings.bootstrap = true;
        let cluster = ClusterNode::new(deps, settings);
        let node = cluster.clone();
        let supervisor = Supervisor::builder().start(move |ctx: Context| {
            let (lease, node) = (lease.clone(), node.clone());
            async move {
                ctx.run_child("network", move |ctx| lease.clone().run_lease(ctx))?;
                ctx.run_child("cluster", node.clone())?;
                ctx.wait_ready("root.cluster").await?;
                ctx.run_child("count", move |ctx| count_boots(node.clone(), ctx))?;
                ctx.wait_ready("root.count").await?;
                ctx.signal_ready()?;
                Err::<(), Failure>(ctx.canceled().await.into())
            }
        });
        let mut tree = supervisor.watch_changes();
        while supervisor.snapshot().iter().any(|node| node.state != nodekeel_supervisor::RunnableState::Ready)
        {
            tree.changed().await?;
        }
        let membership = cluster.wait_finished().await?;
        let phases: Vec<_> = cluster.phase_history().iter().map(ToString::to_string).collect();
        println!(
            "  cluster: {}, node id derived from its key: {}",
            phases.join(" → "),
            membership.node_id.as_str().len() > 32
        );
        supervisor.shutdown().await;
    }
    Ok(())
}

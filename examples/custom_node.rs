//! A node of your own: storage and network of its own making, its place in a cluster, and a service that needs it.
//!
//! `cargo run -p examples --example custom_node`
//!
//! It boots twice from the same disks: it founds a cluster, and goes back to it. A real one would open an encrypted
//! partition where this one opens a directory, ask a DHCP server where this one lends itself an address, and give etcd
//! where this one keeps its cluster in memory; nothing else of it would change.

use std::sync::Arc;

use nodekeel_cluster::consensus::memory::MemoryConsensus;
use nodekeel_cluster::machine::{Cluster, ConsensusSource, Deps, Settings};
use nodekeel_cluster::network::{Address, Network};
use nodekeel_cluster::node::{Enrolment, LocalNames};
use nodekeel_localstorage::volume::{DataVolume, Directory, Erase, State, VolumeError};
use nodekeel_localstorage::{Dir, Mode};
use nodekeel_supervisor::{Context, Failure, Supervisor};
use tokio::sync::watch;

/// Storage: a volume that tells what is done with it.
#[derive(Debug)]
struct Told(Directory);

impl DataVolume for Told {
    fn mount_new(&self, erase: Erase) -> Result<Dir, VolumeError> {
        println!("  storage: a new volume, giving up {erase:?}");
        self.0.mount_new(erase)
    }

    fn mount_existing(&self) -> Result<Dir, VolumeError> {
        self.0.mount_existing().inspect(|_| println!("  storage: the volume that is there"))
    }

    fn unmount(&self) -> Result<(), VolumeError> {
        self.0.unmount()
    }

    fn state(&self) -> State {
        self.0.state()
    }
}

/// Network: an address that a runnable of the tree finds out.
#[derive(Debug, Clone, Default)]
struct Lease(watch::Sender<Option<Address>>);

impl Network for Lease {
    fn address(&self) -> watch::Receiver<Option<Address>> {
        self.0.subscribe()
    }
}

impl Lease {
    async fn keep(self, ctx: Context) -> Result<(), Failure> {
        self.0.send_replace(Some(Address::try_new([192, 0, 2, 7].into())?));
        ctx.ready()?;
        Err(ctx.cancelled().await.into())
    }
}

/// A service that keeps how often it was run where every node of the cluster finds it.
async fn count(cluster: Cluster, ctx: Context) -> Result<(), Failure> {
    let kv = cluster.kv("example", "boots")?;
    let boots = kv.get(b"/count").await?.map_or(0, |kv| kv.version) + 1;
    kv.put(b"/count", cluster.node()?.node.as_str().as_bytes()).await?;
    println!("  service: boot {boots}");
    ctx.ready()?;
    Err(ctx.cancelled().await.into())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let scratch = tempfile::tempdir()?;
    let disks = Dir::open(scratch.path())?;
    let consensus = Arc::new(MemoryConsensus::new());
    for boot in ["first", "second"] {
        println!("{boot} boot");
        let lease = Lease::default();
        let deps = Deps {
            state: disks.ensure_dir("esp", Mode::PRIVATE_DIR)?,
            enrolment: Enrolment::default(),
            network: Arc::new(lease.clone()),
            volume: Arc::new(Told(Directory::new(disks.ensure_dir("data", Mode::PRIVATE_DIR)?))),
            consensus: ConsensusSource::anywhere(consensus.clone()),
            local: LocalNames::default(),
        };
        let cluster = Cluster::new(deps, Settings::default());
        let node = cluster.clone();
        let supervisor = Supervisor::builder().start(move |ctx: Context| {
            let (lease, node) = (lease.clone(), node.clone());
            async move {
                ctx.run("network", move |ctx| lease.clone().keep(ctx))?;
                ctx.run("cluster", node.clone())?;
                ctx.wait_ready("root.cluster").await?;
                ctx.run("count", move |ctx| count(node.clone(), ctx))?;
                ctx.wait_ready("root.count").await?;
                ctx.ready()?;
                Err::<(), Failure>(ctx.cancelled().await.into())
            }
        });
        let mut tree = supervisor.watch();
        while supervisor.snapshot().iter().any(|node| node.state != nodekeel_supervisor::State::Ready) {
            tree.changed().await?;
        }
        let place = cluster.wait_finished().await?;
        let way: Vec<_> = cluster.history().iter().map(ToString::to_string).collect();
        println!(
            "  cluster: {}, as a node named by its key: {}",
            way.join(" → "),
            place.node.as_str().len() > 32
        );
        supervisor.shutdown().await;
    }
    Ok(())
}

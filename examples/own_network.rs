//! A network of your own: a node that learns its address late, loses it, and gets another.
//!
//! `cargo run -p examples --example own_network`
//!
//! This one is told by a channel. A real one would ask a DHCP client or a cloud's metadata where this one listens; the
//! node's way into its cluster waits for the address, whoever tells it, and keeps the node's record up to date.

use std::sync::Arc;

use nodekeel_cluster::consensus::memory::MemoryConsensus;
use nodekeel_cluster::machine::{Cluster, ConsensusSource, Deps, Kind, Settings};
use nodekeel_cluster::network::{Address, Network};
use nodekeel_cluster::node::{Enrolment, LocalNames};
use nodekeel_localstorage::volume::Directory;
use nodekeel_localstorage::{Dir, Mode};
use nodekeel_supervisor::{Context, Failure, Supervisor};
use tokio::sync::watch;

/// An address that somebody else finds out.
#[derive(Debug)]
struct Told(watch::Receiver<Option<Address>>);

impl Network for Told {
    fn address(&self) -> watch::Receiver<Option<Address>> {
        self.0.clone()
    }

    fn trouble(&self) -> Option<String> {
        self.0.borrow().is_none().then(|| "nobody has lent this node an address".to_owned())
    }
}

fn at(address: &str) -> anyhow::Result<Option<Address>> {
    Ok(Some(Address::try_new(address.parse()?)?))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let scratch = tempfile::tempdir()?;
    let disks = Dir::open(scratch.path())?;
    let (lender, told) = watch::channel(None);
    let deps = Deps {
        state: disks.ensure_dir("state", Mode::PRIVATE_DIR)?,
        enrolment: Enrolment::default(),
        network: Arc::new(Told(told)),
        volume: Arc::new(Directory::new(disks.ensure_dir("data", Mode::PRIVATE_DIR)?)),
        consensus: ConsensusSource::anywhere(Arc::new(MemoryConsensus::new())),
        local: LocalNames::default(),
    };
    let cluster = Cluster::new(deps, Settings::default());
    let node = cluster.clone();
    let supervisor = Supervisor::builder().start(move |ctx: Context| {
        let node = node.clone();
        async move {
            ctx.run("cluster", node)?;
            ctx.ready()?;
            Err::<(), Failure>(ctx.cancelled().await.into())
        }
    });

    println!("without an address it is {}", cluster.changed_from(Kind::New).await.kind());
    lender.send(at("192.0.2.7")?)?;
    let membership = cluster.wait_finished().await?;
    println!("with one it is {}", cluster.state().kind());

    lender.send(None)?;
    lender.send(at("192.0.2.8")?)?;
    // Its run ends, and the next one has its member at the new address.
    cluster.changed_from(Kind::Running).await;
    cluster.changed_from(Kind::Failed).await;
    cluster.wait_finished().await?;
    let record = cluster.nodes()?.load(&membership.node).await?.map(|stored| stored.record);
    println!("its record has {:?}", record.and_then(|record| record.address));
    supervisor.shutdown().await;
    Ok(())
}

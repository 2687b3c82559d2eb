//! A custom network: a node that gets its address late, loses it, and gets another.
//!
//! `cargo run -p examples --example own_network`
//!
//! This one reads the address from a channel. A real one would query a DHCP client or the metadata service of
//! a cloud. The enrolment of the node waits for the address of any network, and updates the node's record.

use std::sync::Arc;

use nodekeel_cluster::consensus::memory::MemoryConsensus;
use nodekeel_cluster::enrolment::{ClusterNode, ConsensusFactory, Deps, EnrolmentPhase, EnrolmentSettings};
use nodekeel_cluster::network::{Network, NodeAddress};
use nodekeel_cluster::node::{EnrolmentSources, LocalNames};
use nodekeel_localstorage::volume::DirectoryVolume;
use nodekeel_localstorage::{Dir, FileMode};
use nodekeel_supervisor::{Context, Failure, Supervisor};
use tokio::sync::watch;

/// An address that another part of the program sets.
#[derive(Debug)]
struct ChannelNetwork(watch::Receiver<Option<NodeAddress>>);

impl Network for ChannelNetwork {
    fn watch_address(&self) -> watch::Receiver<Option<NodeAddress>> {
        self.0.clone()
    }

    fn no_address_reason(&self) -> Option<String> {
        self.0.borrow().is_none().then(|| "no address was set".to_owned())
    }
}

fn parse_address(address: &str) -> anyhow::Result<Option<NodeAddress>> {
    Ok(Some(NodeAddress::try_new(address.parse()?)?))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let scratch = tempfile::tempdir()?;
    let disks = Dir::open(scratch.path())?;
    let (sender, receiver) = watch::channel(None);
    let deps = Deps {
        journal_dir: disks.ensure_dir("state", FileMode::PRIVATE_DIR)?,
        enrolment: EnrolmentSources::default(),
        network: Arc::new(ChannelNetwork(receiver)),
        volume: Arc::new(DirectoryVolume::new(disks.ensure_dir("data", FileMode::PRIVATE_DIR)?)),
        consensus: ConsensusFactory::without_volume(Arc::new(MemoryConsensus::new())),
        local_names: LocalNames::default(),
        enroller: None,
    };
    let mut settings = EnrolmentSettings::default();
    settings.bootstrap = true;
    let cluster = ClusterNode::new(deps, settings);
    let node = cluster.clone();
    let supervisor = Supervisor::builder().start(move |ctx: Context| {
        let node = node.clone();
        async move {
            ctx.run_child("cluster", node)?;
            ctx.signal_ready()?;
            Err::<(), Failure>(ctx.canceled().await.into())
        }
    });

    println!("without an address: {}", cluster.wait_phase_left(EnrolmentPhase::New).await.phase());
    sender.send(parse_address("192.0.2.7")?)?;
    let membership = cluster.wait_finished().await?;
    println!("with an address: {}", cluster.current_state().phase());

    sender.send(None)?;
    sender.send(parse_address("192.0.2.8")?)?;
    // Its incarnation exits, and the next one has its member at the new address.
    cluster.wait_phase_left(EnrolmentPhase::Running).await;
    cluster.wait_phase_left(EnrolmentPhase::Failed).await;
    cluster.wait_finished().await?;
    let record = cluster.node_store()?.load_record(&membership.node_id).await?.map(|stored| stored.record);
    println!("address in its record: {:?}", record.and_then(|record| record.address));
    supervisor.shutdown().await;
    Ok(())
}

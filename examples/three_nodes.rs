//! A cluster of two voters and a worker in one program: each is a node as noded runs it, with an API of its own.
//!
//! `cargo run -p examples --features node --example three_nodes`
//!
//! The second voter and the worker join by tickets, and an operator of the cluster calls the worker, also when no voter is there
//! any more. Real nodes have etcd in the place of a cluster in memory, and addresses of their own; nothing else would change.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_cluster::consensus::memory::{MemoryConsensus, MemoryNetwork};
use nodekeel_cluster::enrolment::ConsensusFactory;
use nodekeel_node::access::{PrivateKey, PublicKey, RemoteNode};
use nodekeel_node::client;
use nodekeel_node::node::NodeHandle;
use nodekeel_node::v1::{
    AddOperatorRequest, ClusterRequest, CreateJoinTicketRequest, MembersRequest, OperatorsRequest,
};

/// A node, and how it is started.
struct Machine {
    data: PathBuf,
    config: String,
    api: SocketAddr,
}

impl Machine {
    /// A machine with this section of the configuration in a directory. Its API admits the operators of the cluster.
    fn new(scratch: &Path, name: &str, section: &str) -> anyhow::Result<Self> {
        let api = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let config = format!("{section}\n[api]\naddress = \"{api}\"\ncluster_operators = true\n");
        Ok(Self { data: scratch.join(name), config, api })
    }

    /// Starts it by a ticket of a voter, or without one.
    async fn start(&self, cluster: &MemoryNetwork, ticket: Option<String>) -> anyhow::Result<NodeHandle> {
        if let Some(ticket) = ticket {
            fs::create_dir_all(self.data.join("esp"))?;
            fs::write(self.data.join("esp/enrolment.pb"), ticket)?;
        }
        let consensus = Arc::new(MemoryConsensus::on_network(cluster));
        let node = NodeHandle::builder("three_nodes.toml", &*self.config)
            .data(&self.data)
            .consensus(ConsensusFactory::without_volume(consensus))
            .without("containerd")
            .start()?;
        let joined = if self.config.contains("[worker]") { "root.api.worker" } else { "root.api.records" };
        node.wait_ready(joined).await;
        Ok(node)
    }
}

async fn create_ticket(voter: &NodeHandle, role: &str) -> anyhow::Result<String> {
    let request = CreateJoinTicketRequest { role: role.into(), ..Default::default() };
    let ticket = client::connect(voter.control_socket()).await?.create_join_ticket(request).await?;
    Ok(ticket.into_inner().ticket)
}

async fn print_nodes(voter: &NodeHandle) -> anyhow::Result<()> {
    let nodes = client::connect(voter.control_socket()).await?.members(MembersRequest {}).await?.into_inner();
    println!("the cluster has {} voters and {} worker", nodes.members.len(), nodes.workers.len());
    Ok(())
}

/// The state of a node, as an operator on another machine sees it.
async fn ask_remotely(machine: &Machine, node_key: PublicKey, operator: &[u8]) -> anyhow::Result<String> {
    let operator_key = PrivateKey::from_pem(operator)?;
    let node = RemoteNode { address: machine.api.to_string(), node_key, operator_key };
    let status = client::connect_remote(&node).await?.cluster(ClusterRequest {}).await?.into_inner();
    Ok(status.state)
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let (scratch, cluster) = (tempfile::tempdir()?, MemoryNetwork::new());
    let voter = |name, address: &str, more: &str| {
        let section = format!("[cluster]\naddress = \"{address}\"\n{more}");
        Machine::new(scratch.path(), name, &section)
    };
    // Addresses of one machine: in memory, nobody listens there.
    let first = voter("first", "127.0.0.1", "bootstrap = true")?.start(&cluster, None).await?;
    println!("the first voter has made a cluster");
    let ticket = create_ticket(&first, "voter").await?;
    let second = voter("second", "127.0.0.2", "")?.start(&cluster, Some(ticket)).await?;
    println!("the second voter has joined");
    let third = Machine::new(scratch.path(), "third", "[worker]")?;
    let worker = third.start(&cluster, Some(create_ticket(&second, "worker").await?)).await?;
    println!("the worker has joined");
    print_nodes(&first).await?;

    // A person on another machine, whom any voter records.
    let operator = PrivateKey::generate()?;
    let (name, key, role) = ("alice".into(), operator.public_key().to_string(), "reader".into());
    let mut voter = client::connect(second.control_socket()).await?;
    voter.add_operator(AddOperatorRequest { name, key, role }).await?;
    let mut local = client::connect(worker.control_socket()).await?;
    let node_key = loop {
        let known = local.operators(OperatorsRequest {}).await?.into_inner();
        if !known.operators.is_empty() {
            break known.node_key.parse()?;
        }
    };
    let pem = operator.to_pem();
    println!("alice asks the worker: {}", ask_remotely(&third, node_key, pem.as_bytes()).await?);

    for voter in [first, second] {
        voter.shutdown().await;
    }
    println!("no voter is left");
    while ask_remotely(&third, node_key, pem.as_bytes()).await? != "Unhealthy" {}
    println!("alice asks the worker: Unhealthy");
    let status = local.cluster(ClusterRequest {}).await?.into_inner();
    println!("{}", status.detail.split(':').next().unwrap_or_default());
    worker.shutdown().await;
    Ok(())
}

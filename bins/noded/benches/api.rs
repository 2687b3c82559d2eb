//! What the cluster's records cost by the API of a node, over TLS from another machine, beside a client of its etcd at the socket on
//! the node itself: a read, a change, and a change until a worker is told. Both take turns; every figure is the median of the calls.

mod daemon;

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};
use etcd_client::{Client, Compare, CompareOp, GetOptions, Txn, TxnOp, WatchOptions, WatchStream};
use nodekeel_node::access::{PrivateKey, PublicKey, RemoteNode};
use nodekeel_node::client::{self, NodeClient};
use nodekeel_node::node_v1::{self, ClusterRecords, WatchRecordsRequest};
use nodekeel_node::v1::{AddOperatorRequest, CreateJoinTicketRequest, OperatorsRequest};
use testbed::bench::{BenchRow, RowWriter, etcd_version, measure_interleaved, median};
use testbed::noded::EtcdPorts;
use testbed::{ScratchDir, process_cost, reserve_port, tools};
use tokio::runtime::Runtime;
use tonic::Streaming;
use tonic::transport::Endpoint;

use daemon::{start_noded, wait_until_ready};

/// The calls of each side. Each change adds a record, and the reads find all of them.
const CALLS: usize = 200;
/// How many times as long as a client of etcd a call of the API may take.
const RATIO: f64 = 3.0;

struct ApiBench {
    runtime: Runtime,
    api: NodeClient,
    etcd: Client,
    etcd_version: String,
    key: PublicKey,
}

fn main() -> Result<()> {
    let (scratch, ports, port) = (ScratchDir::new()?, EtcdPorts::reserve(), reserve_port()?);
    let operator_key = PrivateKey::generate()?;
    let key = operator_key.public_key();
    let config = format!(
        "services.containerd.enable = false\n{}[cluster]\naddress = \"127.0.0.1\"\nbootstrap = true\n[api]\naddress = \"{}\"\n\
         cluster_operators = true\noperators = [{{ name = \"bench\", key = \"{key}\", role = \"admin\" }}]\n",
        ports.section(""),
        port.socket_address(),
    );
    let noded = start_noded(scratch.path(), &config)?;
    wait_until_ready(scratch.path())?;
    let runtime = Runtime::new().context("start the runtime")?;
    let socket = scratch.path().join("data/run/control.sock");
    let node_key = runtime.block_on(async {
        let listed = client::connect(&socket).await?.operators(OperatorsRequest {}).await?;
        Ok::<_, anyhow::Error>(listed.into_inner().node_key.parse()?)
    })?;
    let node = RemoteNode { address: port.socket_address().to_string(), node_key, operator_key };
    let api = runtime.block_on(client::connect_remote(&node))?;
    let etcd = runtime.block_on(connect_etcd(scratch.path()))?;
    let etcd_version = etcd_version(&tools::find_tool(tools::ETCD)?)?;
    let told = runtime.block_on(watch_as_worker(&node, api.clone()))?;
    let bench = ApiBench { runtime, api, etcd, etcd_version, key };
    let mut rows = RowWriter::new("api");
    rows.add_rows([bench.measure_changes()?])?;
    rows.add_rows([bench.measure_reads()?])?;
    rows.add_rows([bench.measure_watch(told)?])?;
    let work = format!("a member of its cluster, noded alone, after these {} calls", 3 * CALLS);
    rows.add_rows([BenchRow::new("memory", work, "KiB", process_cost::resident_kib(noded.id())? as f64)])?;
    rows.finish()?;
    noded.stop()
}

/// A client at the socket of the member's etcd, which only the node's own user may open.
async fn connect_etcd(directory: &Path) -> Result<Client> {
    let socket = directory.join("data/data/cluster/etcd/client/etcd:0");
    let channel = Endpoint::from_shared(format!("unix:{}", socket.display()))?.connect().await?;
    Ok(Client::from_channel(etcd_client::Channel::Tonic(channel), None).await?)
}

/// What the cluster tells a worker, by the key of one that has joined and stopped.
async fn watch_as_worker(voter: &RemoteNode, mut api: NodeClient) -> Result<Streaming<ClusterRecords>> {
    let (scratch, port) = (ScratchDir::new()?, reserve_port()?);
    let request = CreateJoinTicketRequest { role: "worker".into(), ..CreateJoinTicketRequest::default() };
    let ticket = api.create_join_ticket(request).await?.into_inner().ticket;
    let esp = scratch.path().join("data/esp");
    fs::create_dir_all(&esp)?;
    fs::write(esp.join("enrolment.pb"), ticket)?;
    let address = port.socket_address().to_string();
    let config = format!("services.containerd.enable = false\n[worker]\n[api]\naddress = \"{address}\"\n");
    let directory = scratch.path().to_owned();
    let joined = tokio::task::spawn_blocking(move || {
        let worker = start_noded(&directory, &config)?;
        wait_until_ready(&directory)?;
        worker.stop()
    });
    joined.await??;
    let key = PrivateKey::from_pem(&fs::read(scratch.path().join("data/api/key"))?)?;
    let channel = client::connect_channel(voter.address.clone(), voter.node_key, &key).await?;
    let mut client = node_v1::node_client::NodeClient::new(channel);
    Ok(client.watch_records(WatchRecordsRequest { address }).await?.into_inner())
}

impl ApiBench {
    fn measure_changes(&self) -> Result<BenchRow> {
        let (mut ours, mut theirs) = (0, 0);
        let samples = measure_interleaved(
            CALLS,
            || {
                ours += 1;
                let key = PrivateKey::generate()?.public_key().to_string();
                let request = AddOperatorRequest { name: format!("n{ours}"), key, role: "reader".into() };
                self.time(async {
                    self.api.clone().add_operator(request).await.map(drop).map_err(Into::into)
                })
            },
            || {
                theirs += 1;
                let (key, value) = (format!("bench/{theirs}"), self.key.to_string());
                let absent = Compare::create_revision(&*key, CompareOp::Equal, 0);
                let txn = Txn::new().when([absent]).and_then([TxnOp::put(&*key, value, None)]);
                self.time(async { self.etcd.clone().txn(txn).await.map(drop).map_err(Into::into) })
            },
        )?;
        let work =
            "a record of an operator is added: the records are read, and one is put unless they changed";
        let (ours, theirs) = (median(&samples.ours), median(&samples.peer));
        let row = BenchRow::new("put", work, "ms", ours).goal_at_most(theirs * RATIO);
        Ok(row.peer("etcd-client, one transaction", &self.etcd_version, theirs))
    }

    fn measure_reads(&self) -> Result<BenchRow> {
        let samples = measure_interleaved(
            CALLS,
            || {
                self.time(async {
                    self.api.clone().operators(OperatorsRequest {}).await.map(drop).map_err(Into::into)
                })
            },
            || {
                let options = GetOptions::new().with_prefix();
                self.time(async {
                    self.etcd.clone().get("bench/", Some(options)).await.map(drop).map_err(Into::into)
                })
            },
        )?;
        let work = format!("all {CALLS} records are read");
        let (ours, theirs) = (median(&samples.ours), median(&samples.peer));
        let row = BenchRow::new("get", work, "ms", ours).goal_at_most(theirs * RATIO);
        Ok(row.peer("etcd-client", &self.etcd_version, theirs))
    }

    /// From a change until it is told.
    fn measure_watch(&self, mut told: Streaming<ClusterRecords>) -> Result<BenchRow> {
        let watch =
            async { self.etcd.clone().watch("watch/", Some(WatchOptions::new().with_prefix())).await };
        let mut seen = self.runtime.block_on(watch)?;
        let (mut ours, mut theirs) = (0, 0);
        let samples = measure_interleaved(
            CALLS,
            || {
                ours += 1;
                let (name, key) = (format!("w{ours}"), PrivateKey::generate()?.public_key().to_string());
                let request = AddOperatorRequest { name: name.clone(), key, role: "reader".into() };
                self.time(async {
                    self.api.clone().add_operator(request).await?;
                    wait_told(&mut told, &name).await
                })
            },
            || {
                theirs += 1;
                self.time(async {
                    self.etcd.clone().put(format!("watch/{theirs}"), self.key.to_string(), None).await?;
                    wait_seen(&mut seen).await
                })
            },
        )?;
        let work = "a record is added until a worker is told all of them";
        let (ours, theirs) = (median(&samples.ours), median(&samples.peer));
        let row = BenchRow::new("watch", work, "ms", ours).goal_at_most(theirs * RATIO);
        Ok(row.peer("etcd-client, a put until its watch", &self.etcd_version, theirs))
    }

    /// The milliseconds of a call.
    fn time(&self, call: impl Future<Output = Result<()>>) -> Result<f64> {
        let began = Instant::now();
        self.runtime.block_on(call)?;
        Ok(began.elapsed().as_secs_f64() * 1e3)
    }
}

/// Waits until a worker is told of this operator.
async fn wait_told(told: &mut Streaming<ClusterRecords>, name: &str) -> Result<()> {
    loop {
        let records = told.message().await?.context("the node tells no more")?;
        if records.operators.iter().any(|operator| operator.name == name) {
            return Ok(());
        }
    }
}

/// Waits for an event of etcd.
async fn wait_seen(seen: &mut WatchStream) -> Result<()> {
    loop {
        let response = seen.message().await?.context("etcd ended the watch")?;
        if !response.events().is_empty() {
            return Ok(());
        }
    }
}

//! What the cluster's records cost by the API of a node, over TLS from another machine, beside a client of its etcd at the socket on
//! the node itself: a read, and a change. Both take turns; every figure is the median of the calls.

mod daemon;

use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};
use etcd_client::{Client, Compare, CompareOp, GetOptions, Txn, TxnOp};
use nodekeel_node::access::{PrivateKey, PublicKey, RemoteNode};
use nodekeel_node::client::{self, NodeClient};
use nodekeel_node::v1::{AddOperatorRequest, OperatorsRequest};
use testbed::bench::{BenchRow, RowWriter, measure_interleaved, median};
use testbed::noded::EtcdPorts;
use testbed::{ScratchDir, command_output, process_cost, reserve_port, tools};
use tokio::runtime::Runtime;
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
    let version =
        command_output(std::process::Command::new(tools::find_tool(tools::ETCD)?).arg("--version"))?;
    let etcd_version =
        version.lines().next().and_then(|line| line.split(": ").nth(1)).unwrap_or("?").to_owned();
    let bench = ApiBench { runtime, api, etcd, etcd_version, key };
    let mut rows = RowWriter::new("api");
    rows.add_rows([bench.measure_changes()?])?;
    rows.add_rows([bench.measure_reads()?])?;
    let work = format!("a member of its cluster, noded alone, after these {} calls", 2 * CALLS);
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

    /// The milliseconds of a call.
    fn time(&self, call: impl Future<Output = Result<()>>) -> Result<f64> {
        let began = Instant::now();
        self.runtime.block_on(call)?;
        Ok(began.elapsed().as_secs_f64() * 1e3)
    }
}

//! etcd as a cluster of one member on the loopback interface.

use std::time::Duration;

use nodekeel_supervisor::Failure;
use nodekeel_supervisor::process::{Process, Readiness};

use crate::plan::EtcdPlan;

/// The member's name. etcd stores it in its data, so it does not follow the node's.
const MEMBER_NAME: &str = "node";

/// etcd as a process; ready when it has reported readiness (sd_notify) and answers a linearizable read.
pub(crate) fn etcd_process(etcd: &EtcdPlan, grace: Duration) -> Process {
    let client = format!("http://127.0.0.1:{}", etcd.config.client_port);
    let peer = format!("http://127.0.0.1:{}", etcd.config.peer_port);
    let probed = client.clone();
    Process::new(&etcd.binary)
        .args(["--name", MEMBER_NAME])
        .arg("--data-dir")
        .arg(&etcd.data)
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("{MEMBER_NAME}={peer}")])
        // JSON lines, which keep levels and fields; etcd 3.4 writes another format by default.
        .args(["--logger", "zap"])
        .args(&etcd.config.extra_args)
        .ready_when(Readiness::on_notify().and_probe(move || probe_read(probed.clone())))
        .grace_period(grace)
}

/// Reads a key that need not exist. The read is linearizable: etcd answers only after the member is the
/// leader.
async fn probe_read(url: String) -> Result<(), Failure> {
    let mut client = etcd_client::Client::connect([url], None).await?;
    client.get("nodekeel/ready", None).await?;
    Ok(())
}

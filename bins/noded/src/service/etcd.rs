//! etcd, as a cluster of one on the loopback interface.

use std::time::Duration;

use nodekeel_supervisor::Failure;
use nodekeel_supervisor::process::{Process, Readiness};

use crate::plan::Etcd;

/// The member's name. It is written into etcd's data, so it does not follow the node's.
const MEMBER: &str = "node";

/// etcd as a process; it is ready when it has said so and answers a read that needs its leader.
pub(crate) fn process(etcd: &Etcd, grace: Duration) -> Process {
    let client = format!("http://127.0.0.1:{}", etcd.config.client_port);
    let peer = format!("http://127.0.0.1:{}", etcd.config.peer_port);
    let asked = client.clone();
    Process::new(&etcd.binary)
        .args(["--name", MEMBER])
        .arg("--data-dir")
        .arg(&etcd.data)
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
        .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
        .args(["--initial-cluster", &format!("{MEMBER}={peer}")])
        // JSON lines, which keep their levels and fields; 3.4 would write another format by itself.
        .args(["--logger", "zap"])
        .args(&etcd.config.extra_args)
        .ready(Readiness::notify().and_probe(move || read(asked.clone())))
        .grace(grace)
}

/// Reads a key that need not exist. The read is linearizable: it is answered only when the member leads.
async fn read(url: String) -> Result<(), Failure> {
    let mut client = etcd_client::Client::connect([url], None).await?;
    client.get("nodekeel/ready", None).await?;
    Ok(())
}

//! The port of metrics and health among strangers.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use testbed::{ConnectionFlood, ScratchDir, Stranger, reserve_port};

use crate::harness::{NO_DAEMONS, NO_DISKS, NodedProcess, with_ulimit};

#[test]
fn probes_are_answered_within_a_second_among_10000_strangers_at_1024_open_files() {
    let port = reserve_port().unwrap();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port.number()));
    let config = format!("{NO_DAEMONS}{NO_DISKS}[metrics]\naddress = \"{address}\"\n");
    let mut noded = NodedProcess::spawn(ScratchDir::new().unwrap(), &config, &[], |command| {
        *command = with_ulimit("-n 1024", command);
    });
    noded.wait_for_line("control socket at");
    noded.wait_ready("root.metrics");
    // Until then, /readyz says so.
    noded.wait_ready("root.storage");
    for stranger in Stranger::ALL {
        let flood = ConnectionFlood::start(address, stranger, 10_000);
        flood.probe_meanwhile(&["/healthz", "/readyz", "/metrics"], Duration::from_secs(1), || {
            noded.ask(&["status", "root.metrics"]);
        });
    }
    noded.stop();
}

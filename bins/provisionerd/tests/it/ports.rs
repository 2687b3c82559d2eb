//! The port of metrics and health, and the CSI socket, among strangers.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use nodekeel_provisioner::csi::proto::csi::NodeGetInfoRequest;
use nodekeel_provisioner::csi::proto::csi::node_client::NodeClient;
use nodekeel_provisioner::csi::testing::connect_socket;
use testbed::{ConnectionFlood, Daemon, ScratchDir, Stranger, reserve_port};
use tokio::runtime::Runtime;
use tokio::time::timeout;

/// The timeout of the kubelet's probes, unless a manifest has another.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

fn test_runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// provisionerd with these arguments, which may open 1,024 files.
fn limited_provisionerd(args: &[&str]) -> Command {
    let mut command = Command::new("/bin/sh");
    command
        .args(["-c", "ulimit -n 1024 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_provisionerd")])
        .args(args);
    command.env_clear();
    command
}

#[test]
fn probes_and_csi_calls_are_answered_within_a_second_among_10000_strangers_at_1024_open_files() {
    // One after the other: the strangers take half of the files that this process may open.
    assert_daemon_answers();
    assert_agent_answers();
}

fn assert_daemon_answers() {
    let [kubelet, directory, quota_dir] = [(); 3].map(|()| tempfile::tempdir().expect("a directory"));
    for below in ["pods", "plugins_registry"] {
        fs::create_dir(kubelet.path().join(below)).expect("a directory");
    }
    let kubeconfig = crate::messages::unreachable_kubeconfig();
    let port = reserve_port().expect("a port");
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port.number()));
    let mut command =
        limited_provisionerd(&["run", "--node=node-a", &format!("--listen={address}"), "--kubelet"]);
    command
        .arg(kubelet.path())
        .arg("--directory")
        .arg(directory.path())
        .arg("--kubeconfig")
        .arg(kubeconfig.path());
    command.env("PROVISIONERD_BOOKS", quota_dir.path());
    let socket = kubelet.path().join("plugins/volumes.nodekeel/csi.sock");
    let runtime = test_runtime();
    let get_info = || {
        runtime.block_on(async {
            let call = async {
                let mut node = NodeClient::new(connect_socket(&socket).await?);
                anyhow::Ok(node.node_get_info(NodeGetInfoRequest {}).await.map(drop)?)
            };
            timeout(PROBE_TIMEOUT, call).await?
        })
    };
    let scratch = ScratchDir::new().expect("a directory");
    let _running = Daemon::start(command, scratch, get_info).expect("the plugin answers");
    for stranger in Stranger::ALL {
        let flood = ConnectionFlood::start(address, stranger, 10_000);
        flood.probe_meanwhile(&["/healthz", "/metrics"], PROBE_TIMEOUT, || {
            get_info().unwrap_or_else(|error| panic!("NodeGetInfo, {stranger:?}: {error:#}"));
        });
    }
}

fn assert_agent_answers() {
    let kubeconfig = crate::messages::unreachable_kubeconfig();
    let port = reserve_port().expect("a port");
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port.number()));
    let mut command = limited_provisionerd(&["agent", &format!("--listen={address}"), "--kubeconfig"]);
    command.arg(kubeconfig.path());
    let connect = || Ok(TcpStream::connect(address).map(drop)?);
    let scratch = ScratchDir::new().expect("a directory");
    let _running = Daemon::start(command, scratch, connect).expect("the agent listens");
    for stranger in Stranger::ALL {
        ConnectionFlood::start(address, stranger, 10_000).probe_meanwhile(
            &["/healthz", "/metrics"],
            PROBE_TIMEOUT,
            || {},
        );
    }
}

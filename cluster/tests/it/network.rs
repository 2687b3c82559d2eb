//! The address of an interface, in the test's private network namespace.

use std::process::Command;
use std::thread;
use std::time::Duration;

use nix::sched::{CloneFlags, unshare};
use nodekeel_cluster::network::{InterfaceNetwork, Network as _, NodeAddress};
use nodekeel_supervisor::{Context, Failure, Supervisor};
use tokio::sync::watch;

const TIMEOUT: Duration = Duration::from_secs(10);

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().expect("started");
    assert!(status.success(), "ip {arguments}: {status}");
}

/// Runs a test on a thread with a private network namespace, which child processes inherit.
fn in_private_network(test: impl AsyncFn(InterfaceNetwork) + Send + 'static) {
    let thread = thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("needs root");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("started");
        runtime.block_on(async {
            let network = InterfaceNetwork::new("up0");
            let service = network.watch_service();
            let supervisor = Supervisor::builder().start(move |ctx: Context| {
                let service = service.clone();
                async move {
                    ctx.run_child("network", service)?;
                    ctx.signal_ready()?;
                    Err::<(), Failure>(ctx.canceled().await.into())
                }
            });
            test(network).await;
            assert!(supervisor.shutdown().await.stragglers.is_empty());
        });
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

async fn expect_address(watch: &mut watch::Receiver<Option<NodeAddress>>, expected: Option<&str>) {
    let expected = expected
        .map(|text| NodeAddress::try_new(text.parse().expect("an address")).expect("a unicast address"));
    let changed = tokio::time::timeout(TIMEOUT, watch.wait_for(|now| *now == expected)).await;
    changed.unwrap_or_else(|_| panic!("{expected:?} is not reported")).expect("an open watch");
}

/// The address is lost before the interface is, so the reason may follow later.
async fn expect_reason(
    network: &InterfaceNetwork,
    watch: &mut watch::Receiver<Option<NodeAddress>>,
    expected: &str,
) {
    let reason = || network.no_address_reason().unwrap_or_default();
    let changed = async {
        while !reason().contains(expected) {
            watch.changed().await.expect("an open watch");
        }
    };
    let changed = tokio::time::timeout(TIMEOUT, changed).await;
    changed.unwrap_or_else(|_| panic!("{:?} does not contain {expected:?}", reason()));
}

#[test]
#[ignore = "needs root"]
fn address_changes_and_the_reason_for_a_missing_address_are_reported() {
    in_private_network(async |network| {
        let mut watch = network.watch_address();
        ip("link add other0 type veth peer name peer0");
        ip("link add up0 type veth peer name peer1");
        ip("addr add 192.0.2.7/24 dev up0");
        assert!(watch.borrow().is_none(), "the interface is down");
        ip("link set peer1 up");
        ip("link set up0 up");
        expect_address(&mut watch, Some("192.0.2.7")).await;
        assert_eq!(network.no_address_reason(), None);
        // An address of another interface, and a second address, change nothing; the loss of the first
        // address does.
        ip("addr add 192.0.2.66/24 dev other0");
        ip("addr add 198.51.100.7/24 dev up0");
        ip("addr del 192.0.2.7/24 dev up0");
        expect_address(&mut watch, Some("198.51.100.7")).await;
        ip("link set up0 down");
        expect_address(&mut watch, None).await;
        expect_reason(&network, &mut watch, "interface up0 is down").await;
        ip("link set up0 up");
        expect_address(&mut watch, Some("198.51.100.7")).await;
        ip("addr add 2001:db8::7/64 dev up0 nodad");
        ip("addr del 198.51.100.7/24 dev up0");
        expect_address(&mut watch, Some("2001:db8::7")).await;
        ip("link del up0");
        expect_address(&mut watch, None).await;
        expect_reason(&network, &mut watch, "interface up0 does not exist").await;
        ip("link add up0 type veth peer name peer1");
        ip("addr add 192.0.2.8/24 dev up0");
        ip("link set peer1 up");
        ip("link set up0 up");
        expect_address(&mut watch, Some("192.0.2.8")).await;
    });
}

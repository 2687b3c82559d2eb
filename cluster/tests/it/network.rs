//! The address of an interface, in a network namespace of the test's own.

use std::process::Command;
use std::thread;
use std::time::Duration;

use nix::sched::{CloneFlags, unshare};
use nodekeel_cluster::network::{Address, InterfaceNetwork, Network as _};
use nodekeel_supervisor::{Context, Failure, Supervisor};
use tokio::sync::watch;

const SOON: Duration = Duration::from_secs(10);

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().expect("it starts");
    assert!(status.success(), "ip {arguments}: {status}");
}

/// Runs a test on a thread with a network of its own: programs that it starts have the same.
fn in_a_network_of_its_own(test: impl AsyncFn(InterfaceNetwork) + Send + 'static) {
    let thread = thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("it takes root");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("it starts");
        runtime.block_on(async {
            let network = InterfaceNetwork::new("up0");
            let service = network.service();
            let supervisor = Supervisor::builder().start(move |ctx: Context| {
                let service = service.clone();
                async move {
                    ctx.run("network", service)?;
                    ctx.ready()?;
                    Err::<(), Failure>(ctx.cancelled().await.into())
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

async fn becomes(watch: &mut watch::Receiver<Option<Address>>, expected: Option<&str>) {
    let expected =
        expected.map(|text| Address::try_new(text.parse().expect("an address")).expect("of one host"));
    let told = tokio::time::timeout(SOON, watch.wait_for(|now| *now == expected)).await;
    told.unwrap_or_else(|_| panic!("{expected:?} is not told")).expect("it is still told");
}

/// The address is lost before the interface is, so this may be said only later.
async fn trouble(network: &InterfaceNetwork, watch: &mut watch::Receiver<Option<Address>>, expected: &str) {
    let said = || network.trouble().unwrap_or_default();
    let told = async {
        while !said().contains(expected) {
            watch.changed().await.expect("it is still told");
        }
    };
    let told = tokio::time::timeout(SOON, told).await;
    told.unwrap_or_else(|_| panic!("{:?} is not {expected:?}", said()));
}

#[test]
#[ignore = "needs root"]
fn an_address_that_comes_goes_and_changes_is_told_and_so_is_why_there_is_none() {
    in_a_network_of_its_own(async |network| {
        let mut watch = network.address();
        ip("link add other0 type veth peer name peer0");
        ip("link add up0 type veth peer name peer1");
        ip("addr add 192.0.2.7/24 dev up0");
        assert!(watch.borrow().is_none(), "it is down");
        ip("link set peer1 up");
        ip("link set up0 up");
        becomes(&mut watch, Some("192.0.2.7")).await;
        assert_eq!(network.trouble(), None);
        // One of another interface, and a second one, change nothing; the loss of the first one does.
        ip("addr add 192.0.2.66/24 dev other0");
        ip("addr add 198.51.100.7/24 dev up0");
        ip("addr del 192.0.2.7/24 dev up0");
        becomes(&mut watch, Some("198.51.100.7")).await;
        ip("link set up0 down");
        becomes(&mut watch, None).await;
        trouble(&network, &mut watch, "interface up0 is down").await;
        ip("link set up0 up");
        becomes(&mut watch, Some("198.51.100.7")).await;
        ip("addr add 2001:db8::7/64 dev up0 nodad");
        ip("addr del 198.51.100.7/24 dev up0");
        becomes(&mut watch, Some("2001:db8::7")).await;
        ip("link del up0");
        becomes(&mut watch, None).await;
        trouble(&network, &mut watch, "there is no interface up0").await;
        ip("link add up0 type veth peer name peer1");
        ip("addr add 192.0.2.8/24 dev up0");
        ip("link set peer1 up");
        ip("link set up0 up");
        becomes(&mut watch, Some("192.0.2.8")).await;
    });
}

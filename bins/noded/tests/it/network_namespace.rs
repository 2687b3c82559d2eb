//! Network namespaces with a link to this one, created by ip(8).

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use testbed::{command_output, tools};

/// A private network namespace with a link to this one. Dropping the value deletes it.
pub(crate) struct TestNetwork {
    pub(crate) name: String,
    /// The addresses of the link: in this namespace and in the private one.
    pub(crate) link: [String; 2],
    /// An unused address of that network.
    pub(crate) spare_address: String,
}

impl TestNetwork {
    pub(crate) fn new() -> Self {
        static SITES: AtomicU32 = AtomicU32::new(0);
        let (pid, number) = (std::process::id(), SITES.fetch_add(1, Ordering::Relaxed));
        let name = format!("nk{pid}-{number}");
        // One of the 16,384 networks of eight addresses in the block for tests of networks (RFC 2544).
        let network = u32::from(Ipv4Addr::new(198, 18, 0, 0)) + (pid * 16 + number) % (1 << 14) * 8;
        let address = |last| Ipv4Addr::from(network + last).to_string();
        let site = Self { link: [address(1), address(2)], spare_address: address(3), name };
        let (name, [here, there]) = (&site.name, &site.link);
        run_ip(&["netns", "add", name]);
        run_ip(&["link", "add", name, "type", "veth", "peer", "name", "uplink0", "netns", name]);
        run_ip(&["address", "add", &format!("{here}/29"), "dev", name]);
        run_ip(&["link", "set", name, "up"]);
        site.change_address("add", there);
        for link in ["lo", "uplink0"] {
            run_ip(&["-n", name, "link", "set", link, "up"]);
        }
        site
    }

    /// Adds an address to its end of the link, or deletes it.
    pub(crate) fn change_address(&self, change: &str, address: &str) {
        run_ip(&["-n", &self.name, "address", change, &format!("{address}/29"), "dev", "uplink0"]);
    }
}

impl Drop for TestNetwork {
    fn drop(&mut self) {
        run_ip(&["link", "delete", &self.name]);
        run_ip(&["netns", "delete", &self.name]);
    }
}

fn run_ip(arguments: &[&str]) {
    command_output(Command::new(tools::find_tool(tools::IP).unwrap()).args(arguments)).unwrap();
}

/// Runs the command in a network namespace, with the same pid.
pub(crate) fn in_namespace(network: &str, command: &Command) -> Command {
    let mut within = Command::new(tools::find_tool(tools::IP).unwrap());
    within.args(["netns", "exec", network]).arg(command.get_program()).args(command.get_args());
    within.env_clear().env("PATH", "/usr/bin:/bin").stdin(Stdio::null()).stderr(Stdio::piped());
    within
}

#[test]
#[ignore = "needs ip and root: it makes network namespaces"]
fn each_test_has_a_private_network() {
    // One more than the tests that run in parallel.
    let sites: [TestNetwork; 4] = std::array::from_fn(|_| TestNetwork::new());
    let networks: BTreeSet<_> =
        sites.iter().flat_map(|site| [&site.link[0], &site.link[1], &site.spare_address]).collect();
    assert_eq!(networks.len(), 12, "{networks:?}");
}

//! Network namespaces with a link to this one, by ip(8).

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use testbed::{output, tools};

/// A network of its own, with a link to this one. It goes with the value.
pub(crate) struct Site {
    pub(crate) name: String,
    /// The addresses of the link's ends: here and there.
    pub(crate) link: [String; 2],
    /// One more of that network, which nobody has.
    pub(crate) spare: String,
}

impl Site {
    pub(crate) fn new() -> Self {
        static SITES: AtomicU32 = AtomicU32::new(0);
        let (pid, number) = (std::process::id(), SITES.fetch_add(1, Ordering::Relaxed));
        let name = format!("nk{pid}-{number}");
        // One of the 16,384 networks of eight addresses in the block for tests of networks (RFC 2544).
        let network = u32::from(Ipv4Addr::new(198, 18, 0, 0)) + (pid * 16 + number) % (1 << 14) * 8;
        let address = |last| Ipv4Addr::from(network + last).to_string();
        let site = Self { link: [address(1), address(2)], spare: address(3), name };
        let (name, [here, there]) = (&site.name, &site.link);
        ip(&["netns", "add", name]);
        ip(&["link", "add", name, "type", "veth", "peer", "name", "uplink0", "netns", name]);
        ip(&["address", "add", &format!("{here}/29"), "dev", name]);
        ip(&["link", "set", name, "up"]);
        site.address("add", there);
        for link in ["lo", "uplink0"] {
            ip(&["-n", name, "link", "set", link, "up"]);
        }
        site
    }

    /// Gives its end of the link an address, or takes it away.
    pub(crate) fn address(&self, change: &str, address: &str) {
        ip(&["-n", &self.name, "address", change, &format!("{address}/29"), "dev", "uplink0"]);
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        ip(&["link", "delete", &self.name]);
        ip(&["netns", "delete", &self.name]);
    }
}

fn ip(arguments: &[&str]) {
    output(Command::new(tools::find(tools::IP).unwrap()).args(arguments)).unwrap();
}

/// The command in a network namespace; its pid stays the command's.
pub(crate) fn within(network: &str, command: &Command) -> Command {
    let mut within = Command::new(tools::find(tools::IP).unwrap());
    within.args(["netns", "exec", network]).arg(command.get_program()).args(command.get_args());
    within.env_clear().env("PATH", "/usr/bin:/bin").stdin(Stdio::null()).stderr(Stdio::piped());
    within
}

#[test]
#[ignore = "needs ip and root: it makes network namespaces"]
fn each_test_has_a_network_of_its_own() {
    // As many as the tests beside each other, and one more.
    let sites: [Site; 4] = std::array::from_fn(|_| Site::new());
    let networks: BTreeSet<_> =
        sites.iter().flat_map(|site| [&site.link[0], &site.link[1], &site.spare]).collect();
    assert_eq!(networks.len(), 12, "{networks:?}");
}

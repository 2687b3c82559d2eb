//! Hosts on a private network, made by ip(8).

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Result;

use crate::{command_output, tools};

/// A bridge, and hosts on it: a network namespace each, whose interface is `up0`. Dropping it deletes them all.
#[derive(Debug)]
pub struct PrivateNetwork {
    bridge: String,
    /// The first three bytes of its addresses: a network of 256.
    prefix: [u8; 3],
    hosts: usize,
}

impl PrivateNetwork {
    /// A network with this many hosts, which is no other test's.
    ///
    /// # Errors
    /// ip(8) is missing, or the caller is not root.
    pub fn new(hosts: usize) -> Result<Self> {
        static NETWORKS: AtomicU32 = AtomicU32::new(0);
        let (pid, number) = (std::process::id(), NETWORKS.fetch_add(1, Ordering::Relaxed));
        // One of the 16,384 networks of 256 addresses in the block that is shared by carriers (RFC 6598).
        let [_, high, low, _] = (((pid * 16 + number) % (1 << 14)) << 8).to_be_bytes();
        let network = Self { bridge: format!("nv{pid}x{number}"), prefix: [100, 64 + high, low], hosts };
        let bridge = &network.bridge;
        run_ip(&format!("link add {bridge} type bridge forward_delay 0"))?;
        run_ip(&format!("address add {}/24 dev {bridge}", network.own_address()))?;
        run_ip(&format!("link set {bridge} up"))?;
        for host in 0..hosts {
            let (name, port) = (network.namespace(host), network.port(host));
            run_ip(&format!("netns add {name}"))?;
            run_ip(&format!("link add {port} type veth peer name up0 netns {name}"))?;
            run_ip(&format!("link set {port} master {bridge} up"))?;
            network.change_address(host, "add", network.address(host))?;
            for link in ["lo", "up0"] {
                run_ip(&format!("-n {name} link set {link} up"))?;
            }
        }
        Ok(network)
    }

    /// The address at which the hosts reach this namespace.
    pub fn own_address(&self) -> Ipv4Addr {
        self.address(253)
    }

    /// The address of a host. Those from the number of hosts to 252 are unused.
    ///
    /// # Panics
    /// If the network has no address for it.
    pub fn address(&self, host: usize) -> Ipv4Addr {
        let [first, second, third] = self.prefix;
        [first, second, third, u8::try_from(host + 1).expect("one of 256 addresses")].into()
    }

    /// Adds an address to a host (`add`), or deletes it (`del`).
    ///
    /// # Errors
    /// It is there already, or is not there.
    pub fn change_address(&self, host: usize, change: &str, address: Ipv4Addr) -> Result<()> {
        run_ip(&format!("-n {} address {change} {address}/24 dev up0", self.namespace(host)))
    }

    /// Connects a host, or cuts it off, as a drawn cable does; its own processes still reach each other.
    ///
    /// # Errors
    /// ip(8) fails.
    pub fn set_connected(&self, host: usize, is_connected: bool) -> Result<()> {
        run_ip(&format!("link set {} {}", self.port(host), if is_connected { "up" } else { "down" }))
    }

    /// Lets nothing arrive on a host any more but connections to or from this TCP port.
    ///
    /// # Errors
    /// iptables(8) fails.
    pub fn pass_only(&self, host: usize, port: u16) -> Result<()> {
        for rule in
            [format!("--sport {port} -j ACCEPT"), format!("--dport {port} -j ACCEPT"), "-j DROP".into()]
        {
            let mut iptables = Command::new(tools::find_tool(tools::NSENTER)?);
            iptables.arg(format!("--net={}", self.namespace_path(host).display()));
            iptables.arg(tools::find_tool(tools::IPTABLES)?).args(["--wait", "-A", "INPUT", "-p", "tcp"]);
            command_output(iptables.args(rule.split(' ')))?;
        }
        Ok(())
    }

    /// The name of a host's network namespace.
    pub fn namespace(&self, host: usize) -> String {
        format!("{}-{host}", self.bridge)
    }

    /// The file of a host's network namespace.
    pub fn namespace_path(&self, host: usize) -> PathBuf {
        Path::new("/run/netns").join(self.namespace(host))
    }

    fn port(&self, host: usize) -> String {
        format!("{}p{host}", self.bridge)
    }
}

impl Drop for PrivateNetwork {
    fn drop(&mut self) {
        for host in 0..self.hosts {
            let _ = run_ip(&format!("link delete {}", self.port(host)));
            let _ = run_ip(&format!("netns delete {}", self.namespace(host)));
        }
        let _ = run_ip(&format!("link delete {}", self.bridge));
    }
}

fn run_ip(arguments: &str) -> Result<()> {
    command_output(Command::new(tools::find_tool(tools::IP)?).args(arguments.split(' '))).map(drop)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    #[ignore = "needs ip and root: it makes network namespaces"]
    fn each_test_has_a_private_network() {
        // One more than the tests that run in parallel.
        let networks: [PrivateNetwork; 4] = std::array::from_fn(|_| PrivateNetwork::new(1).unwrap());
        let addresses = networks.iter().flat_map(|one| [one.own_address(), one.address(0), one.address(1)]);
        assert_eq!(addresses.collect::<BTreeSet<_>>().len(), 12, "{networks:?}");
    }
}

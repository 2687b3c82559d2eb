//! Hosts on a private network: a network namespace each, joined by a bridge in this one.

use std::fs::File;
use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sched::{CloneFlags, setns};
use testbed::{command_output, tools};
use tokio::runtime::{Builder, Runtime};

/// A bridge, and the hosts on it. Dropping it deletes both.
pub(crate) struct Site {
    bridge: String,
    /// The first three bytes of its addresses: a network of 256.
    network: [u8; 3],
    hosts: usize,
}

impl Site {
    /// A network with this many hosts.
    pub(crate) fn new(hosts: usize) -> Site {
        static SITES: AtomicU32 = AtomicU32::new(0);
        let (pid, number) = (std::process::id(), SITES.fetch_add(1, Ordering::Relaxed));
        // One of the 16,384 networks of 256 addresses in the block that is shared by carriers (RFC 6598).
        let [_, high, low, _] = (((pid * 16 + number) % (1 << 14)) << 8).to_be_bytes();
        let site = Site { bridge: format!("nv{pid}x{number}"), network: [100, 64 + high, low], hosts };
        run_ip(&format!("link add {} type bridge forward_delay 0", site.bridge));
        run_ip(&format!("address add {}/24 dev {}", site.address_of(254), site.bridge));
        run_ip(&format!("link set {} up", site.bridge));
        (0..hosts).for_each(|host| site.add_host(host));
        site
    }

    fn add_host(&self, host: usize) {
        let (name, port) = (self.namespace(host), self.port(host));
        run_ip(&format!("netns add {name}"));
        run_ip(&format!("link add {port} type veth peer name up0 netns {name}"));
        run_ip(&format!("link set {port} master {} up", self.bridge));
        run_ip(&format!("-n {name} address add {}/24 dev up0", self.address(host)));
        for link in ["lo", "up0"] {
            run_ip(&format!("-n {name} link set {link} up"));
        }
    }

    /// The address of a host.
    pub(crate) fn address(&self, host: usize) -> Ipv4Addr {
        self.address_of(u8::try_from(host + 1).unwrap())
    }

    fn address_of(&self, last: u8) -> Ipv4Addr {
        let [first, second, third] = self.network;
        [first, second, third, last].into()
    }

    /// Cuts a host off, as a drawn cable does; its own processes still reach each other.
    pub(crate) fn cut_off(&self, host: usize) {
        run_ip(&format!("link set {} down", self.port(host)));
    }

    /// Connects a host again.
    pub(crate) fn connect(&self, host: usize) {
        run_ip(&format!("link set {} up", self.port(host)));
    }

    /// A runtime whose threads, and the processes that they start, are on this host.
    pub(crate) fn runtime(&self, host: usize) -> Runtime {
        let namespace = Arc::new(File::open(format!("/run/netns/{}", self.namespace(host))).unwrap());
        let enter = move || setns(&*namespace, CloneFlags::CLONE_NEWNET).unwrap();
        Builder::new_multi_thread().worker_threads(1).on_thread_start(enter).enable_all().build().unwrap()
    }

    fn namespace(&self, host: usize) -> String {
        format!("{}-{host}", self.bridge)
    }

    fn port(&self, host: usize) -> String {
        format!("{}p{host}", self.bridge)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for host in 0..self.hosts {
            run_ip(&format!("link delete {}", self.port(host)));
            run_ip(&format!("netns delete {}", self.namespace(host)));
        }
        run_ip(&format!("link delete {}", self.bridge));
    }
}

fn run_ip(arguments: &str) {
    command_output(Command::new(tools::find_tool(tools::IP).unwrap()).args(arguments.split(' '))).unwrap();
}

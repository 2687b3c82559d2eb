//! The network of the nodes: a namespace each, and one with a bridge between them.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use anyhow::{Context as _, Result, anyhow};
use serde_json::Value;
use testbed::{command_output, tools};

use super::node::Name;

const HUB: &str = "hub";
const BRIDGE: &str = "br0";
/// The interface of each host.
const LINK: &str = "eth0";
/// The hardware address of no host: the bridge hands frames to it to all hosts, and each drops them.
const NOWHERE: &str = "02:00:00:00:00:00";
/// The shortest queue of a slow link: two of the largest packets that a host sends in one piece.
const QUEUE_BYTES: u64 = 128 << 10;

/// How fast a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Speed {
    /// At most so many bits in a second, more than 0.
    Limit(u64),
    /// As fast as the machine is.
    Off,
}

impl FromStr for Speed {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "off" {
            return Ok(Self::Off);
        }
        let units = [("kbit", 1_000), ("mbit", 1_000_000), ("gbit", 1_000_000_000)];
        let parse = |(unit, bits): (&str, u64)| {
            let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
            number.checked_mul(bits).filter(|bits| *bits > 0).map(Self::Limit)
        };
        let found = units.into_iter().find_map(parse);
        found.ok_or_else(|| anyhow!("not a speed: type a whole number with kbit, mbit or gbit, or off"))
    }
}

impl fmt::Display for Speed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limit(bits) => write!(f, "at most {bits} bits in a second"),
            Self::Off => f.write_str("without a limit"),
        }
    }
}

/// The network of a state directory. The names of its namespaces have the directory's path, so that it is found without it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Network<'a>(pub(super) &'a Path);

impl Network<'_> {
    fn namespace(self, host: &str) -> String {
        format!("{}:{host}", self.0.to_string_lossy().trim_start_matches('/').replace('/', ":"))
    }

    /// The file of a node's namespace.
    pub(super) fn namespace_path(self, node: Name) -> PathBuf {
        self.namespace_file(&node.to_string())
    }

    fn namespace_file(self, host: &str) -> PathBuf {
        Path::new("/run/netns").join(self.namespace(host))
    }

    pub(super) fn has_host(self, node: Name) -> bool {
        self.namespace_path(node).exists()
    }

    pub(super) fn create_hub(self) -> Result<()> {
        self.create_namespace(HUB)?;
        if self.ip(HUB, &format!("link show {BRIDGE}")).is_err() {
            self.ip(HUB, &format!("link add {BRIDGE} type bridge forward_delay 0"))?;
        }
        self.ip(HUB, &format!("link set {BRIDGE} up")).map(drop)
    }

    pub(super) fn create_host(self, node: Name) -> Result<()> {
        let host = node.to_string();
        self.create_namespace(&host)?;
        if self.ip(&host, &format!("link show {LINK}")).is_err() {
            let hub = self.namespace(HUB);
            self.ip(&host, &format!("link add {LINK} type veth peer name {host} netns {hub}"))?;
        }
        self.ip(HUB, &format!("link set {host} master {BRIDGE} up"))?;
        self.ip(&host, &format!("address replace {}/24 dev {LINK}", node.address()))?;
        ["lo", LINK].iter().try_for_each(|link| self.ip(&host, &format!("link set {link} up")).map(drop))
    }

    fn create_namespace(self, host: &str) -> Result<()> {
        if self.ip(host, "link show lo").is_ok() {
            return Ok(());
        }
        let name = self.namespace(host);
        if self.namespace_file(host).exists() {
            // An earlier ip(8) was killed between the file and the namespace.
            run(tools::IP, &["netns", "delete", &name])?;
        }
        run(tools::IP, &["netns", "add", &name]).map(drop)
    }

    /// Removes every namespace, and with it its links.
    pub(super) fn remove(self) -> Result<()> {
        for host in Name::all().map(|name| name.to_string()).chain([HUB.to_owned()]) {
            if self.namespace_file(&host).exists() {
                run(tools::IP, &["netns", "delete", &self.namespace(&host)])?;
            }
        }
        Ok(())
    }

    /// Sends what each node has for the other to nowhere, as a lost frame is: neither gets an error.
    pub(super) fn cut(self, a: Name, b: Name) -> Result<()> {
        [(a, b), (b, a)].into_iter().try_for_each(|(from, to)| {
            let address = to.address();
            let cut = format!("neighbor replace {address} lladdr {NOWHERE} nud permanent dev {LINK}");
            self.ip(&from.to_string(), &cut).map(drop)
        })
    }

    pub(super) fn heal(self, a: Name, b: Name) -> Result<()> {
        for (from, to) in [(a, b), (b, a)] {
            if self.cuts(from)?.contains(&to) {
                self.ip(&from.to_string(), &format!("neighbor delete {} dev {LINK}", to.address()))?;
            }
        }
        Ok(())
    }

    /// The nodes to which this one is cut off.
    pub(super) fn cuts(self, node: Name) -> Result<Vec<Name>> {
        let listed = self.ip(&node.to_string(), &format!("-json neighbor show nud permanent dev {LINK}"))?;
        let listed: Value = serde_json::from_str(&listed).context("ip prints JSON")?;
        let cuts = listed.as_array().into_iter().flatten().filter(|entry| entry["lladdr"] == NOWHERE);
        let addresses: Vec<_> = cuts.filter_map(|entry| entry["dst"].as_str()).collect();
        Ok(Name::all().filter(|name| addresses.contains(&&*name.address())).collect())
    }

    /// Gives what each node sends to the other a queue with this speed.
    pub(super) fn slow(self, a: Name, b: Name, speed: Speed) -> Result<()> {
        [(a, b), (b, a)].into_iter().try_for_each(|(from, to)| {
            self.limit(from, to, speed).context(
                "limit a link: it needs the kernel's htb, u32 and bfifo (CONFIG_NET_SCH_HTB, CONFIG_NET_CLS_U32, \
                 CONFIG_NET_SCH_FIFO; as modules: `modprobe -a sch_htb cls_u32`)",
            )
        })
    }

    fn limit(self, from: Name, to: Name, speed: Speed) -> Result<()> {
        let tc = |line: String| self.tc(from, &line);
        let (address, class) = (to.address(), to.number());
        let is_limited = self.speeds(from)?.iter().any(|(name, _)| *name == to);
        if is_limited {
            // What sends a packet to the class may be missing, where an earlier one was killed.
            let _ = tc(format!("filter del dev {LINK} parent 1: prio {class}"));
        }
        let Speed::Limit(bits) = speed else {
            return if is_limited {
                tc(format!("class del dev {LINK} classid 1:{class}")).map(drop)
            } else {
                Ok(())
            };
        };
        if !tc(format!("qdisc show dev {LINK}"))?.contains("qdisc htb 1:") {
            tc(format!("qdisc replace dev {LINK} root handle 1: htb"))?;
        }
        tc(format!("class replace dev {LINK} parent 1: classid 1:{class} htb rate {bits}bit"))?;
        // A tenth of a second: a longer queue would keep etcd's heartbeats behind its snapshot.
        let queue = (bits / 80).max(QUEUE_BYTES);
        tc(format!("qdisc replace dev {LINK} parent 1:{class} handle 1{class}: bfifo limit {queue}"))?;
        tc(format!(
            "filter add dev {LINK} parent 1: protocol ip prio {class} u32 match ip dst {address}/32 flowid 1:{class}"
        ))
        .map(drop)
    }

    /// The nodes to which this one sends slowly, and how fast, as tc(8) prints it.
    pub(super) fn speeds(self, node: Name) -> Result<Vec<(Name, String)>> {
        let classes = self.tc(node, &format!("class show dev {LINK}"))?;
        Ok(classes.lines().filter_map(parse_class).collect())
    }

    fn ip(self, host: &str, arguments: &str) -> Result<String> {
        let namespace = self.namespace(host);
        run(tools::IP, &[&["-n", &*namespace][..], &arguments.split(' ').collect::<Vec<_>>()].concat())
    }

    fn tc(self, node: Name, arguments: &str) -> Result<String> {
        let namespace = self.namespace(&node.to_string());
        run(tools::TC, &[&["-n", &*namespace][..], &arguments.split(' ').collect::<Vec<_>>()].concat())
    }
}

/// *Source:* tc(8) prints `class htb 1:2 root leaf 12: prio 0 rate 20Mbit ceil 20Mbit …`.
fn parse_class(line: &str) -> Option<(Name, String)> {
    let mut words = line.strip_prefix("class htb 1:")?.split(' ');
    let name = Name::new(words.next()?.parse().ok()?)?;
    words.find(|word| *word == "rate")?;
    Some((name, words.next()?.to_owned()))
}

fn run(tool: tools::Tool, arguments: &[&str]) -> Result<String> {
    command_output(Command::new(tools::find_tool(tool)?).args(arguments)).with_context(|| arguments.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_is_a_number_with_its_unit() {
        let speed = |text: &str| text.parse::<Speed>().ok();
        assert_eq!(speed("20mbit"), Some(Speed::Limit(20_000_000)));
        assert_eq!((speed("500kbit"), speed("off")), (Some(Speed::Limit(500_000)), Some(Speed::Off)));
        for wrong in ["", "20", "0mbit", "mbit", "20mb", "1.5mbit", "99999999999gbit"] {
            assert_eq!(speed(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_class_is_read_as_tc_prints_it() {
        let line = "class htb 1:2 root leaf 12: prio 0 rate 20Mbit ceil 20Mbit burst 1600b cburst 1600b ";
        assert_eq!(parse_class(line), Some((Name::new(2).unwrap(), "20Mbit".into())));
        assert_eq!(parse_class("class htb 1:ff root prio 0 rate 1Mbit"), None);
    }

    #[test]
    fn two_state_directories_have_different_namespaces() {
        let name = |path: &'static str| Network(Path::new(path)).namespace(HUB);
        assert_eq!(name("/var/lib/x"), "var:lib:x:hub");
        assert_ne!(name("/a/b"), name("/a-b"));
    }
}

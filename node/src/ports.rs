//! Checks whether a port of this machine is free, and finds the process that uses it.

use std::fs;
use std::net::{IpAddr, TcpListener};
use std::path::Path;
use std::time::{Duration, Instant};

/// A holder that was not found.
const UNKNOWN: &str = "another program";

/// The process that holds a port, as far as visible: processes of other users show their sockets only to
/// root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PortHolder {
    /// Its name and pid, for people.
    pub(crate) text: String,
    pid: Option<u32>,
}

/// The time that a killed etcd may take to end.
const EXIT_TIME: Duration = Duration::from_secs(5);
/// The pause between two looks at its port.
const PAUSE: Duration = Duration::from_millis(20);

/// The holder of a port at this address that keeps it; `None` if the port is free. An etcd that was killed with
/// its noded a moment ago has some time to end. A process that descends from `node`, a node that runs, holds none.
pub(crate) fn lasting_holder(address: IpAddr, port: u16, node: Option<u32>) -> Option<PortHolder> {
    let is_of_node = |holder: &PortHolder| {
        node.is_some_and(|node| holder.pid.is_some_and(|pid| is_or_descends_from(pid, node)))
    };
    wait_until_free(address, port, |holder| !is_of_node(holder) && holder.may_be_ending())
        .filter(|holder| !is_of_node(holder))
}

/// Returns whether a process is another one, or a descendant of it.
fn is_or_descends_from(pid: u32, ancestor: u32) -> bool {
    // A process has few ancestors; the end of one changes the parents of others meanwhile, but makes no cycle.
    std::iter::successors(Some(pid), |pid| parent_of(*pid)).take(64).any(|pid| pid == ancestor)
}

/// *Source:* proc_pid_stat(5): the parent is the second field after the name, which ends with the last parenthesis.
fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[expect(clippy::disallowed_methods, reason = "nothing notifies of the end of another program's process")]
fn wait_until_free(
    address: IpAddr,
    port: u16,
    may_be_ending: impl Fn(&PortHolder) -> bool,
) -> Option<PortHolder> {
    let until = Instant::now() + EXIT_TIME;
    loop {
        let holder = port_holder(address, port)?;
        if !may_be_ending(&holder) || Instant::now() >= until {
            return Some(holder);
        }
        std::thread::sleep(PAUSE);
    }
}

impl PortHolder {
    /// A process that is ending has closed its descriptors, so that it is not found; just before, it is an etcd.
    fn may_be_ending(&self) -> bool {
        self.text == UNKNOWN || self.text.starts_with("etcd ")
    }
}

/// Returns whether one can listen at this address.
pub(crate) fn is_of_this_machine(address: IpAddr) -> bool {
    let bound = TcpListener::bind((address, 0));
    bound.err().is_none_or(|error| error.kind() != std::io::ErrorKind::AddrNotAvailable)
}

/// The holder of a port at this address; `None` if the port is free.
fn port_holder(address: IpAddr, port: u16) -> Option<PortHolder> {
    match TcpListener::bind((address, port)) {
        // The listener is closed at once. std sets SO_REUSEADDR, so that ended connections do not hold the port.
        Ok(_) => None,
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            Some(find_listener(port).unwrap_or_else(|| PortHolder { text: UNKNOWN.into(), pid: None }))
        }
        // As EACCES: no process holds the port, and waiting would not help.
        Err(error) => Some(PortHolder { text: format!("the system ({error})"), pid: None }),
    }
}

/// The name and pid of the process that listens on the port.
fn find_listener(port: u16) -> Option<PortHolder> {
    // A socket at `::`, which takes IPv4 connections too, is only in the second table.
    let inode = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .find_map(|table| listening_inode(&fs::read_to_string(table).ok()?, port))?;
    let link = format!("socket:[{inode}]");
    let mut entries = fs::read_dir("/proc").ok()?.flatten();
    let (pid, process) = entries.find_map(|entry| {
        // Entries that are no processes, and processes that end, are passed over.
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        holds_descriptor(&entry.path(), &link).then(|| (pid, entry.path()))
    })?;
    let name = fs::read_to_string(process.join("comm")).ok()?;
    Some(PortHolder { text: format!("{} (pid {pid})", name.trim()), pid: Some(pid) })
}

/// Returns whether one of the process's descriptors is this link.
fn holds_descriptor(process: &Path, link: &str) -> bool {
    let Ok(descriptors) = fs::read_dir(process.join("fd")) else { return false };
    descriptors.flatten().any(|fd| fs::read_link(fd.path()).is_ok_and(|target| target.as_os_str() == link))
}

/// The inode of the listening socket on a port.
///
/// *Source:* Documentation/networking/proc_net_tcp.rst: `sl local_address rem_address st ... inode` with
/// addresses and state in hex; state `0A` is `TCP_LISTEN`.
fn listening_inode(table: &str, port: u16) -> Option<u64> {
    table.lines().skip(1).find_map(|line| {
        let columns: Vec<_> = line.split_whitespace().collect();
        let (_, local_port) = columns.get(1)?.rsplit_once(':')?;
        let listens = columns.get(3) == Some(&"0A") && u16::from_str_radix(local_port, 16) == Ok(port);
        listens.then(|| columns.get(9)?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_port_is_named_at_its_address_only() {
        let [address, other]: [IpAddr; 2] = [[127, 0, 0, 2].into(), [127, 0, 0, 3].into()];
        let listener = TcpListener::bind((address, 0)).expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let PortHolder { text, .. } = port_holder(address, port).expect("the port is in use");
        assert!(text.ends_with(&format!("(pid {})", std::process::id())), "{text}");
        assert_eq!(port_holder(other, port), None);
        let parent = std::os::unix::process::parent_id();
        assert!(lasting_holder(address, port, Some(parent)).is_none(), "a process of the node");
        assert!(lasting_holder(address, port, None).is_some());
        drop(listener);
        assert_eq!(port_holder(address, port), None);
    }

    #[test]
    fn a_port_whose_holder_is_ending_is_waited_for() {
        let address: IpAddr = [127, 0, 0, 4].into();
        let listener = TcpListener::bind((address, 0)).expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        assert!(
            wait_until_free(address, port, |_| false).is_some(),
            "a holder that stays is reported at once"
        );
        let looks = std::cell::RefCell::new((0, Some(listener)));
        let ends_at_third_look = |_: &PortHolder| {
            let mut looks = looks.borrow_mut();
            looks.0 += 1;
            if looks.0 == 3 {
                looks.1 = None;
            }
            true
        };
        assert_eq!(wait_until_free(address, port, ends_at_third_look), None);
        let holder = |text: &str| PortHolder { text: text.into(), pid: Some(7) };
        assert!(holder("etcd (pid 7)").may_be_ending());
        assert!(!holder("etcdctl (pid 7)").may_be_ending());
    }

    #[test]
    fn only_listening_sockets_count() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            \x20  0: 0100007F:094B 0100007F:A0B0 01 00000000:00000000 00:00000000 00000000     0        0 11 1\n\
            \x20  1: 0100007F:094B 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 22 1\n";
        assert_eq!(listening_inode(table, 2379), Some(22));
        assert_eq!(listening_inode(table, 2380), None);
    }
}

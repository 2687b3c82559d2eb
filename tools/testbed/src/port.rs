//! Free ports of the loopback interface.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use anyhow::{Result, bail};

/// Above is the range from which the kernel takes ports for outgoing connections
/// (`net.ipv4.ip_local_port_range`), below are the well-known ports.
const RANGE: std::ops::Range<u16> = 12_000..32_768;
/// How often a start is tried where another program takes a port in between.
const TRIES: usize = 5;

/// A port that was free, and that no other testbed of this machine gets until this value is dropped.
#[derive(Debug)]
pub struct ReservedPort {
    number: u16,
    /// An abstract unix socket named after the port: exclusive in the network namespace, as the port is, and
    /// closed with its process however that ends.
    _reservation: UnixDatagram,
}

impl ReservedPort {
    /// The port's number.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// The port at the loopback interface.
    pub fn socket_address(&self) -> SocketAddrV4 {
        SocketAddrV4::new(Ipv4Addr::LOCALHOST, self.number)
    }
}

/// Finds a free TCP port of 127.0.0.1 below the ephemeral range and reserves it among all testbeds.
///
/// A program without a testbed may still take it before the caller does; the caller that starts a daemon on
/// it then retries with another one.
///
/// # Errors
/// Every port of the range is in use.
pub fn reserve_port() -> Result<ReservedPort> {
    let ports = usize::from(RANGE.end - RANGE.start);
    let first = RandomState::new().build_hasher().finish() as usize % ports;
    for number in RANGE.cycle().skip(first).take(ports) {
        if let Some(port) = try_reserve(number) {
            return Ok(port);
        }
    }
    bail!("every port of 127.0.0.1 in {RANGE:?} is in use")
}

fn try_reserve(number: u16) -> Option<ReservedPort> {
    let name = SocketAddr::from_abstract_name(format!("nodekeel-testbed-port-{number}")).ok()?;
    let reservation = UnixDatagram::bind_addr(&name).ok()?;
    TcpListener::bind((Ipv4Addr::LOCALHOST, number)).ok()?;
    Some(ReservedPort { number, _reservation: reservation })
}

/// Tries a start on new ports again where another program has taken one before its daemon did.
pub(crate) fn retry_taken_ports<T>(mut start: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 1..TRIES {
        match start() {
            Err(error) if format!("{error:#}").contains("address already in use") => {}
            result => return result,
        }
    }
    start()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_lie_below_the_ephemeral_range_and_are_never_handed_out_twice() {
        let ports: Vec<ReservedPort> = (0..50).map(|_| reserve_port().unwrap()).collect();
        let mut numbers: Vec<u16> = ports.iter().map(ReservedPort::number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 50);
        assert!(numbers.iter().all(|number| RANGE.contains(number)));
    }

    #[test]
    fn a_reserved_port_can_be_listened_on_and_is_free_again_after_drop() {
        let port = reserve_port().unwrap();
        TcpListener::bind(port.socket_address()).unwrap();
        let number = port.number();
        assert!(try_reserve(number).is_none());
        drop(port);
        assert!(try_reserve(number).is_some());
    }
}

//! The node's address, which may appear, disappear and change.
//!
//! ```text
//!  Network::watch_address ──▶ watch: none ─▶ 192.0.2.7 ─▶ none ─▶ 192.0.2.8
//! ```

#[cfg(feature = "netlink")]
mod interface_network;
mod static_network;

use std::fmt;
use std::net::IpAddr;

use thiserror::Error;
use tokio::sync::watch;

#[cfg(feature = "netlink")]
pub use interface_network::{InterfaceNetwork, InterfaceService};
pub use static_network::StaticNetwork;

/// The address at which other nodes reach this one: neither unspecified nor multicast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeAddress(IpAddr);

/// An address at which other nodes can't reach this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("invalid node address {address}: must not be unspecified or multicast")]
pub struct InvalidAddress {
    /// The address given.
    pub address: IpAddr,
}

impl NodeAddress {
    /// Checks the address. A loopback address is for clusters on one host.
    ///
    /// # Errors
    /// [`InvalidAddress`] if the address is unspecified or multicast.
    pub fn try_new(address: IpAddr) -> Result<Self, InvalidAddress> {
        if address.is_unspecified() || address.is_multicast() {
            Err(InvalidAddress { address })
        } else {
            Ok(Self(address))
        }
    }

    /// The address.
    pub fn ip_addr(self) -> IpAddr {
        self.0
    }
}

impl fmt::Display for NodeAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Reports a node's address.
///
/// # Contract
/// - A watch holds the newest address; `None` while there is none. Each change wakes waiters, and so does a
///   loss, and a changed reason for a missing address if the network reports reasons.
/// - A watch closes when no more changes will come: a waiter without an address then fails.
/// - Neither method blocks, and both can be called at any time, also before the address service runs.
pub trait Network: fmt::Debug + Send + Sync {
    /// The address, now and whenever it changes.
    fn watch_address(&self) -> watch::Receiver<Option<NodeAddress>>;

    /// The reason for a missing address, as a text for operators; `None` if unknown.
    fn no_address_reason(&self) -> Option<String> {
        None
    }
}

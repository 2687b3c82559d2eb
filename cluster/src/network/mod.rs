//! Where a node is reached: an address, which may come, go and change.
//!
//! ```text
//!  Network::address ──▶ watch: none ─▶ 192.0.2.7 ─▶ none ─▶ 192.0.2.8
//! ```

mod fixed;
#[cfg(feature = "netlink")]
mod interface;

use std::fmt;
use std::net::IpAddr;

use thiserror::Error;
use tokio::sync::watch;

pub use fixed::StaticNetwork;
#[cfg(feature = "netlink")]
pub use interface::{InterfaceNetwork, InterfaceService};

/// The address at which other nodes reach this one: neither unspecified nor multicast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address(IpAddr);

/// No other node reaches this one there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{address} is no address at which a node is reached")]
pub struct InvalidAddress {
    /// The address given.
    pub address: IpAddr,
}

impl Address {
    /// This address. One of the loopback interface is for clusters on one machine.
    ///
    /// # Errors
    /// [`InvalidAddress`] of an unspecified address, and of one of many.
    pub fn try_new(address: IpAddr) -> Result<Self, InvalidAddress> {
        match address.is_unspecified() || address.is_multicast() {
            true => Err(InvalidAddress { address }),
            false => Ok(Self(address)),
        }
    }

    /// The address.
    pub fn ip(self) -> IpAddr {
        self.0
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What tells a node its address.
///
/// # Contract
/// - A watch has the newest address; none while there is none. Each change wakes those that wait, and a loss is a change;
///   so is another reason why there is none, where the network can tell.
/// - A watch ends when there will be no more changes: who needs an address and has none then has failed.
/// - Asking does not block, and can be done at any time, also before whatever finds addresses runs.
pub trait Network: fmt::Debug + Send + Sync {
    /// The address, now and whenever it changes.
    fn address(&self) -> watch::Receiver<Option<Address>>;

    /// Why there is no address, in words for whoever waits for one; none where nothing is known.
    fn trouble(&self) -> Option<String> {
        None
    }
}

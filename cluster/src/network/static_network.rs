//! A static address.

use tokio::sync::watch;

use super::{Network, NodeAddress};

/// An address that the caller sets, and may change.
///
/// ```
/// use nodekeel_cluster::network::{Network as _, NodeAddress, StaticNetwork};
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let network = StaticNetwork::new(NodeAddress::try_new("192.0.2.7".parse()?)?);
///     let watch = network.watch_address();
///     assert!(watch.borrow().is_some());
///     network.set_address(None);
///     assert!(watch.borrow().is_none() && network.no_address_reason().is_some());
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct StaticNetwork(watch::Sender<Option<NodeAddress>>);

impl StaticNetwork {
    /// This address.
    pub fn new(address: NodeAddress) -> Self {
        Self(watch::Sender::new(Some(address)))
    }

    /// No address yet: the caller [sets](Self::set_address) it later.
    pub fn without_address() -> Self {
        Self(watch::Sender::new(None))
    }

    /// Replaces the address; `None` if it is lost.
    pub fn set_address(&self, address: Option<NodeAddress>) {
        self.0.send_if_modified(|now| std::mem::replace(now, address) != address);
    }
}

impl Network for StaticNetwork {
    fn watch_address(&self) -> watch::Receiver<Option<NodeAddress>> {
        self.0.subscribe()
    }

    fn no_address_reason(&self) -> Option<String> {
        self.0.borrow().is_none().then(|| "the address is not set".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> NodeAddress {
        NodeAddress::try_new(text.parse().expect("an address")).expect("a unicast address")
    }

    #[test]
    fn an_unspecified_or_multicast_address_is_not_a_node_address() {
        for bad in ["0.0.0.0", "::", "224.0.0.1", "ff02::1"] {
            assert!(NodeAddress::try_new(bad.parse().expect("an address")).is_err(), "{bad}");
        }
        for good in ["127.0.0.1", "192.0.2.7", "fe80::1", "2001:db8::1"] {
            assert_eq!(at(good).to_string(), good);
        }
    }

    #[tokio::test]
    async fn watchers_are_notified_of_changes_and_losses_only() {
        let network = StaticNetwork::new(at("192.0.2.7"));
        let mut watch = network.watch_address();
        network.set_address(Some(at("192.0.2.7")));
        assert!(!watch.has_changed().expect("an open watch"), "nothing has changed");
        for next in [None, Some(at("192.0.2.8"))] {
            network.set_address(next);
            watch.changed().await.expect("an open watch");
            assert_eq!(*watch.borrow_and_update(), next);
        }
        drop(network);
        assert!(watch.changed().await.is_err(), "the network is gone");
    }
}

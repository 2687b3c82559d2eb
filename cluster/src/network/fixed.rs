//! An address that is known.

use tokio::sync::watch;

use super::{Address, Network};

/// An address that somebody has told, and may tell anew.
///
/// ```
/// use nodekeel_cluster::network::{Address, Network as _, StaticNetwork};
///
/// let network = StaticNetwork::new(Address::try_new("192.0.2.7".parse()?)?);
/// let watch = network.address();
/// assert!(watch.borrow().is_some());
/// network.set(None);
/// assert!(watch.borrow().is_none() && network.trouble().is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct StaticNetwork(watch::Sender<Option<Address>>);

impl StaticNetwork {
    /// This address.
    pub fn new(address: Address) -> Self {
        Self(watch::Sender::new(Some(address)))
    }

    /// No address yet: somebody finds out, and [tells](Self::set).
    pub fn unknown() -> Self {
        Self(watch::Sender::new(None))
    }

    /// From now on it is this one, or none.
    pub fn set(&self, address: Option<Address>) {
        self.0.send_if_modified(|now| std::mem::replace(now, address) != address);
    }
}

impl Network for StaticNetwork {
    fn address(&self) -> watch::Receiver<Option<Address>> {
        self.0.subscribe()
    }

    fn trouble(&self) -> Option<String> {
        self.0.borrow().is_none().then(|| "nobody has told the address".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Address {
        Address::try_new(text.parse().expect("an address")).expect("of one host")
    }

    #[test]
    fn what_reaches_nobody_or_many_is_no_address_of_a_node() {
        for bad in ["0.0.0.0", "::", "224.0.0.1", "ff02::1"] {
            assert!(Address::try_new(bad.parse().expect("an address")).is_err(), "{bad}");
        }
        for good in ["127.0.0.1", "192.0.2.7", "fe80::1", "2001:db8::1"] {
            assert_eq!(at(good).to_string(), good);
        }
    }

    #[tokio::test]
    async fn a_loss_and_a_change_are_told_and_the_same_address_is_not() {
        let network = StaticNetwork::new(at("192.0.2.7"));
        let mut watch = network.address();
        network.set(Some(at("192.0.2.7")));
        assert!(!watch.has_changed().expect("it lives"), "nothing has changed");
        for next in [None, Some(at("192.0.2.8"))] {
            network.set(next);
            watch.changed().await.expect("it lives");
            assert_eq!(*watch.borrow_and_update(), next);
        }
        drop(network);
        assert!(watch.changed().await.is_err(), "nobody tells any more");
    }
}

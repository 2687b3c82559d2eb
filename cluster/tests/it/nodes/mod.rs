//! Who a node is, and how it is told the way into a cluster.

mod enrolment;
mod local;
mod records;
mod tickets;

use nodekeel_cluster::consensus::{MemberName, PEER_PORT, Peer, PeerUrl};
use nodekeel_cluster::node::{GoldenTicket, NodeId, TicketParts};
use nodekeel_cluster::pki::{Leaf, NewAuthority};
use nodekeel_localstorage::pki::{PrivateKey, Template};

/// A ticket of a cluster that there isn't, for a node at this address.
pub(crate) fn ticket(address: &str) -> GoldenTicket {
    GoldenTicket::try_new(parts(address)).expect("it holds together")
}

/// What goes into one.
pub(crate) fn parts(address: &str) -> TicketParts {
    let mut authority = NewAuthority::generate().expect("an authority");
    let node_key = PrivateKey::generate().expect("a key");
    let node_certificate = Template::default().self_sign(&node_key).expect("a certificate");
    let node = NodeId::new("nodekeel-", &node_key.public()).expect("a name");
    let name: MemberName = node.as_str().parse().expect("a name");
    let address = address.parse().expect("an address");
    let other = "nodekeel-first".parse().expect("a name");
    TicketParts {
        node_key,
        node_certificate,
        member: authority.issue(&Leaf::member(name.clone(), address)).expect("issued"),
        revoked: authority.none_revoked().expect("a list"),
        peers: vec![Peer::new(other, "https://192.0.2.1:9999".parse().expect("a URL"))],
        this: Peer::new(name, PeerUrl::new(address, PEER_PORT)),
    }
}

//! The node's identity and its enrolment.

mod enrolment_config;
mod local_names;
mod records;
mod removal;
mod replacement;
mod tickets;
pub(crate) mod unlock_keys;
mod workers;

pub(crate) use local_names::local_names;
use nodekeel_cluster::consensus::{DEFAULT_PEER_PORT, MemberName, Peer, PeerUrl};
use nodekeel_cluster::node::{GoldenTicket, NodeId, TicketParts};
use nodekeel_cluster::pki::{CertificateSpec, PendingCa};
use nodekeel_localstorage::pki::{CertificateTemplate, PrivateKey};

/// A ticket of a fictitious cluster, for a node at this address.
pub(crate) fn test_ticket(address: &str) -> GoldenTicket {
    GoldenTicket::from_parts(ticket_parts(address)).expect("a consistent ticket")
}

/// The content of a ticket.
pub(crate) fn ticket_parts(address: &str) -> TicketParts {
    let mut pending_ca = PendingCa::generate().expect("a CA");
    let node_key = PrivateKey::generate().expect("a key");
    let node_certificate = CertificateTemplate::default().self_sign(&node_key).expect("a certificate");
    let node = NodeId::from_key("nodekeel-", &node_key.public_key()).expect("a valid name");
    let name: MemberName = node.as_str().parse().expect("a valid name");
    let address = address.parse().expect("an address");
    let other = "nodekeel-first".parse().expect("a valid name");
    TicketParts {
        node_key,
        node_certificate,
        member_credentials: pending_ca
            .issue_credentials(&CertificateSpec::for_member(name.clone(), address))
            .expect("issued"),
        revocation_list: pending_ca.empty_revocation_list().expect("a list"),
        peers: vec![Peer::new(other, "https://192.0.2.1:9999".parse().expect("a URL"))],
        new_member: Peer::new(name, PeerUrl::new(address, DEFAULT_PEER_PORT)),
    }
}

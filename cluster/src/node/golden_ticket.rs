//! The golden ticket: everything that a node needs to join, including its private keys.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use nodekeel_localstorage::pki::{
    Certificate, Credentials, PkiEncodingError, PrivateKey, PublicKey, RevocationList,
};
use prost::Message as _;
use sha2::{Digest as _, Sha256};
use thiserror::Error;
use zeroize::Zeroizing;

use super::wire;
use super::{InvalidJoinTicket, InvalidNodeId, NodeId};
use crate::consensus::{DEFAULT_PEER_PORT, InvalidName, MemberName, Peer, PeerUrl};

/// Everything that a node needs to join a cluster, including its private keys: a stopgap for tests and small
/// clusters, since the keys are generated elsewhere. A golden ticket is a bearer credential: anyone who reads
/// it can impersonate the node.
///
/// A parsed ticket is consistent: keys match their certificates, the CA has issued the member's and has not
/// revoked it, and the names are those of the node's key. The clock is not consulted.
///
/// *Source:* `GoldenTicket` of Monogon's Smalltown of 2020, with its field numbers.
pub struct GoldenTicket {
    digest: TicketId,
    node_id: NodeId,
    node_key: PrivateKey,
    node_certificate: Certificate,
    member_credentials: Arc<Credentials>,
    revocation_list: RevocationList,
    peers: Vec<Peer>,
    new_member: Peer,
}

/// Identifies a ticket: the SHA-256 of everything that identifies its node. A ticket that is reissued for the
/// same node has the same digest, even if it lists other members and more revoked certificates. The digest
/// reveals nothing of the content.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TicketId([u8; 32]);

impl TicketId {
    pub(crate) fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The 32 bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// The first 8 bytes in hexadecimal.
impl fmt::Display for TicketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TicketId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TicketId({self}…)")
    }
}

/// A defect of a ticket. The error contains none of its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TicketError {
    /// The bytes are not a message, or are truncated.
    #[error("not an enrolment configuration, or truncated")]
    Malformed,
    /// The text of a join ticket is invalid.
    #[error("can't read the join ticket")]
    JoinTicket(#[source] InvalidJoinTicket),
    /// The configuration has no ticket. To bootstrap a cluster, remove the file.
    #[error(
        "the enrolment configuration contains no ticket: create one (`nodectl cluster ticket create` on a member), or remove the \
         file to bootstrap a cluster"
    )]
    NoTicket,
    /// A key, a certificate or the list of revoked certificates is malformed.
    #[error("malformed {field} in the enrolment configuration: issue another ticket")]
    Field {
        /// The field.
        field: &'static str,
        /// The defect.
        source: PkiEncodingError,
    },
    /// A field is missing.
    #[error("the enrolment configuration lacks its {0}: issue another ticket")]
    MissingField(&'static str),
    /// A member's name or address is invalid.
    #[error("the ticket has an invalid name or address of a member")]
    MemberName(#[source] InvalidName),
    /// The node's name is invalid.
    #[error("the ticket has an invalid node name: issue another ticket")]
    NodeName(#[source] InvalidNodeId),
    /// The name, as a node or as a member, is not that of the node's key.
    #[error("the ticket names node {named}, but contains another node's key: issue another ticket")]
    NodeMismatch {
        /// The name in the ticket.
        named: NodeId,
    },
    /// A certificate does not match its key, or has another issuer than it should have.
    #[error("the ticket's {certificate} and {other} do not match: issue another ticket")]
    Mismatch {
        /// The certificate.
        certificate: &'static str,
        /// The other part.
        other: &'static str,
    },
    /// The certificate was already revoked when the ticket was issued: issue another.
    #[error("the member's certificate in the ticket is revoked: issue another ticket")]
    Revoked,
    /// The ticket was issued for a host at another address.
    #[error(
        "the ticket was issued for {ticket}, but this host is at {here}: correct the address, or join by a ticket for \
         this one (if the node has started to join, reset it first)"
    )]
    AddressMismatch {
        /// The address in the ticket.
        ticket: String,
        /// The address of this host.
        here: IpAddr,
    },
    /// The ticket was issued for a member at another port.
    #[error(
        "the ticket was issued for a member at port {ticket}, but this host's member is at port {here}: correct \
         the peer port, or join by a ticket for this one (if the node has started to join, reset it first)"
    )]
    PortMismatch {
        /// The port in the ticket.
        ticket: u16,
        /// The port of this host's member.
        here: u16,
    },
}

/// The content of a ticket.
#[derive(Debug)]
#[expect(clippy::exhaustive_structs, reason = "the issuer of a ticket has all of it")]
pub struct TicketParts {
    /// The new node's key.
    pub node_key: PrivateKey,
    /// The node's certificate, signed with the key itself.
    pub node_certificate: Certificate,
    /// The new member's key and certificate, and the CA's certificate.
    pub member_credentials: Credentials,
    /// The certificates that are revoked.
    pub revocation_list: RevocationList,
    /// The present members.
    pub peers: Vec<Peer>,
    /// The new member: its name is the node's.
    pub new_member: Peer,
}

impl GoldenTicket {
    /// A ticket of these parts.
    ///
    /// # Errors
    /// [`TicketError`] if the parts are inconsistent.
    pub fn from_parts(parts: TicketParts) -> Result<Self, TicketError> {
        Self {
            // Replaced below: the digest is computed from the other fields.
            digest: TicketId([0; 32]),
            node_id: parts.new_member.name.as_str().parse().map_err(TicketError::NodeName)?,
            node_key: parts.node_key,
            node_certificate: parts.node_certificate,
            member_credentials: Arc::new(parts.member_credentials),
            revocation_list: parts.revocation_list,
            peers: parts.peers,
            new_member: parts.new_member,
        }
        .with_checked_digest()
    }

    /// Parses an enrolment configuration that holds a ticket.
    ///
    /// # Errors
    /// [`TicketError`].
    pub fn from_config(config: &[u8]) -> Result<Self, TicketError> {
        let mut config = wire::EnrolmentConfig::decode(config).map_err(|_| TicketError::Malformed)?;
        let mut wire = config.golden_ticket.take().ok_or(TicketError::NoTicket)?;
        let ca = parse_field("CA certificate", || Certificate::from_der(&wire.etcd_ca_cert))?;
        let certificate =
            parse_field("member's certificate", || Certificate::from_der(&wire.etcd_client_cert))?;
        let key = parse_field("member's key", || PrivateKey::from_pkcs8(&wire.etcd_client_key))?;
        let revocation_list =
            parse_field("list of revoked certificates", || RevocationList::from_der(&wire.etcd_crl, &ca))?;
        let new_member = parse_peer(&wire.this.take().ok_or(TicketError::MissingField("new member"))?)?;
        // The new member's name is also the node's, so that a ticket may leave this one out.
        if !wire.node_id.is_empty() && wire.node_id != new_member.name.as_str() {
            return Err(TicketError::NodeMismatch {
                named: wire.node_id.parse().map_err(TicketError::NodeName)?,
            });
        }
        Self::from_parts(TicketParts {
            node_key: parse_field("node's key", || PrivateKey::from_pkcs8(&wire.node_key))?,
            node_certificate: parse_field("node's certificate", || Certificate::from_der(&wire.node_cert))?,
            member_credentials: Credentials { key, certificate, ca },
            revocation_list,
            peers: wire.peers.iter().map(parse_peer).collect::<Result<_, _>>()?,
            new_member,
        })
    }

    /// The enrolment configuration that holds the ticket: a secret.
    pub fn to_config(&self) -> Zeroizing<Vec<u8>> {
        let config = wire::EnrolmentConfig {
            golden_ticket: Some(self.to_message()),
            node_id: String::new(),
            join_ticket: String::new(),
        };
        Zeroizing::new(config.encode_to_vec())
    }

    /// The same ticket with its digest, if it is consistent.
    fn with_checked_digest(mut self) -> Result<Self, TicketError> {
        self.check_consistency()?;
        let mut wire = self.to_message();
        // A reissued ticket differs in these two; the rest identifies the node.
        wire.peers.clear();
        wire.etcd_crl.clear();
        // The message includes private keys, so its copy is wiped.
        let bytes = Zeroizing::new(wire.encode_to_vec());
        self.digest = TicketId(Sha256::digest(&*bytes).into());
        Ok(self)
    }

    fn check_consistency(&self) -> Result<(), TicketError> {
        let mismatch = |certificate, other| Err(TicketError::Mismatch { certificate, other });
        let member = &*self.member_credentials;
        if member.certificate.public_key() != member.key.public_key() {
            return mismatch("member's certificate", "member's key");
        }
        if !member.certificate.is_signed_by(&member.ca) {
            return mismatch("member's certificate", "CA certificate");
        }
        if self.revocation_list.is_revoked(&member.certificate) {
            return Err(TicketError::Revoked);
        }
        if self.node_certificate.public_key() != self.node_key.public_key() {
            return mismatch("node's certificate", "node's key");
        }
        // No CA issues a node's certificate: it is signed with the node's own key.
        if !self.node_certificate.is_signed_by(&self.node_certificate) {
            return mismatch("node's certificate", "node's key");
        }
        if !self.node_id.matches_key(&self.node_key.public_key()) {
            return Err(TicketError::NodeMismatch { named: self.node_id.clone() });
        }
        Ok(())
    }

    fn to_message(&self) -> wire::GoldenTicket {
        wire::GoldenTicket {
            etcd_ca_cert: self.member_credentials.ca.der_bytes().to_vec(),
            etcd_client_cert: self.member_credentials.certificate.der_bytes().to_vec(),
            etcd_client_key: self.member_credentials.key.expose_pkcs8().to_vec(),
            etcd_crl: self.revocation_list.der_bytes().to_vec(),
            peers: self.peers.iter().map(peer_message).collect(),
            this: Some(peer_message(&self.new_member)),
            node_id: self.node_id.to_string(),
            node_cert: self.node_certificate.der_bytes().to_vec(),
            node_key: self.node_key.expose_pkcs8().to_vec(),
        }
    }

    /// The digest that identifies the ticket.
    pub fn digest(&self) -> TicketId {
        self.digest
    }

    /// The node that joins by it.
    pub fn node_id(&self) -> &NodeId {
        &self.node_id
    }

    /// The node's public key.
    pub fn joining_node_key(&self) -> PublicKey {
        self.node_key.public_key()
    }

    /// The node's credentials. Its certificate is self-signed, and so also its CA.
    ///
    /// # Errors
    /// [`PkiEncodingError`], which a parsed ticket never causes.
    pub(crate) fn node_credentials(&self) -> Result<Credentials, PkiEncodingError> {
        let key = PrivateKey::from_pkcs8(self.node_key.expose_pkcs8())?;
        let certificate = self.node_certificate.clone();
        Ok(Credentials { key, ca: certificate.clone(), certificate })
    }

    /// The member's credentials.
    pub fn member_credentials(&self) -> Arc<Credentials> {
        Arc::clone(&self.member_credentials)
    }

    /// The certificates that were revoked when the ticket was issued.
    pub fn revocation_list(&self) -> &RevocationList {
        &self.revocation_list
    }

    /// The members when the ticket was issued.
    pub fn peers(&self) -> &[Peer] {
        &self.peers
    }

    /// The new member.
    pub fn new_member(&self) -> &Peer {
        &self.new_member
    }

    /// Checks that the ticket is for a host at this address, with its member at this port if one is given.
    ///
    /// # Errors
    /// [`TicketError::AddressMismatch`], [`TicketError::PortMismatch`].
    pub fn check_address(&self, here: IpAddr, port: Option<u16>) -> Result<(), TicketError> {
        let url = &self.new_member.url;
        if url.host().parse() != Ok(here) {
            return Err(TicketError::AddressMismatch { ticket: url.host().to_owned(), here });
        }
        match port {
            Some(port) if port != url.port() => {
                Err(TicketError::PortMismatch { ticket: url.port(), here: port })
            }
            _ => Ok(()),
        }
    }
}

/// Without the keys.
impl fmt::Debug for GoldenTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GoldenTicket")
            .field("digest", &self.digest)
            .field("node", &self.node_id)
            .finish_non_exhaustive()
    }
}

pub(super) fn parse_field<T>(
    field: &'static str,
    parse: impl FnOnce() -> Result<T, PkiEncodingError>,
) -> Result<T, TicketError> {
    parse().map_err(|source| TicketError::Field { field, source })
}

/// A plain address means the default port, as it did in 2020; another port is written as `ADDRESS:PORT`.
pub(super) fn parse_peer(wire: &wire::EtcdPeer) -> Result<Peer, TicketError> {
    let name: MemberName = wire.name.parse().map_err(TicketError::MemberName)?;
    let url = match wire.address.parse::<IpAddr>() {
        Ok(address) => PeerUrl::new(address, DEFAULT_PEER_PORT),
        Err(_) => format!("https://{}", wire.address).parse().map_err(TicketError::MemberName)?,
    };
    Ok(Peer::new(name, url))
}

pub(super) fn peer_message(peer: &Peer) -> wire::EtcdPeer {
    // The default port is left out, as programs of 2020 expect a plain address.
    let authority = peer.url.as_str().trim_start_matches("https://");
    let address = match authority.parse::<SocketAddr>() {
        Ok(socket) if socket.port() == DEFAULT_PEER_PORT => socket.ip().to_string(),
        _ => authority.to_owned(),
    };
    wire::EtcdPeer { name: peer.name.to_string(), address }
}

/// Arbitrary bytes as an enrolment configuration: never panics, and a valid ticket survives a round trip.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_arbitrary_ticket(bytes: &[u8]) {
    if let Ok(ticket) = GoldenTicket::from_config(bytes) {
        let again = GoldenTicket::from_config(&ticket.to_config()).expect("a written ticket is valid");
        let is = |one: &GoldenTicket| {
            (one.digest(), one.peers().to_vec(), one.revocation_list().der_bytes().to_vec())
        };
        assert_eq!(is(&again), is(&ticket), "a ticket survives a round trip");
    }
}

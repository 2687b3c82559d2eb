//! The golden ticket: everything that a node needs to join, its keys among it.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use nodekeel_localstorage::pki::{
    Certificate, Credentials, FormatError, PrivateKey, PublicKey, RevocationList,
};
use prost::Message as _;
use sha2::{Digest as _, Sha256};
use thiserror::Error;
use zeroize::Zeroizing;

use super::wire;
use super::{InvalidNodeId, NodeId};
use crate::consensus::{InvalidName, MemberName, PEER_PORT, Peer, PeerUrl};

/// Everything that a node needs to join a cluster, its keys among it: a stopgap for tests and for small clusters, since
/// the keys are made elsewhere, and whoever has read the ticket is the node.
///
/// One that was parsed holds together: keys fit their certificates, the authority has issued the member's, and has not
/// revoked it, and the names are those of the node's key. No clock was asked.
///
/// *Source:* `GoldenTicket` of Monogon's Smalltown of 2020, with its field numbers.
pub struct GoldenTicket {
    digest: TicketDigest,
    node: NodeId,
    node_key: PrivateKey,
    node_certificate: Certificate,
    member: Arc<Credentials>,
    revoked: RevocationList,
    peers: Vec<Peer>,
    this: Peer,
}

/// Which ticket: the SHA-256 of what makes its reader the node. One that is made again for the same node has the same,
/// though the node meets other members, and knows of more certificates that are revoked. It tells nothing of what is in it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TicketDigest([u8; 32]);

impl TicketDigest {
    pub(crate) fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The sum.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// The first 8 bytes in hexadecimal.
impl fmt::Display for TicketDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TicketDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TicketDigest({self}…)")
    }
}

/// What is wrong with a ticket. None of its bytes are in the error.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TicketError {
    /// It is no message, or was cut.
    #[error("it is no enrolment configuration, or is cut off")]
    Message,
    /// There is no golden ticket in it, and there is no other way to join yet. To found a cluster, remove the file.
    #[error("it holds no golden ticket")]
    NoTicket,
    /// A key, a certificate or the list of revoked ones is none.
    #[error("its {field} is malformed")]
    Field {
        /// Which.
        field: &'static str,
        /// What is wrong with it.
        source: FormatError,
    },
    /// It has no such field.
    #[error("it has no {0}")]
    Missing(&'static str),
    /// A member's name or address is none.
    #[error("one of its members has no valid name or address")]
    Member(#[source] InvalidName),
    /// The node's name is none.
    #[error("its node has no valid name")]
    Node(#[source] InvalidNodeId),
    /// The node's name, as a node or as a member, is not that of its key.
    #[error("it names node {named}, and its key is another's")]
    OtherName {
        /// The name in it.
        named: NodeId,
    },
    /// A certificate is not that of its key, or was not issued by whom it should be.
    #[error("its {certificate} and {other} do not belong together")]
    Mismatch {
        /// The certificate.
        certificate: &'static str,
        /// What it doesn't fit.
        other: &'static str,
    },
    /// The authority had revoked the certificate when it made the ticket: have another made.
    #[error("the certificate in it was revoked")]
    Revoked,
    /// It was made for a machine at another address.
    #[error("it was made for {}, and this machine is at {here}", .ticket)]
    OtherAddress {
        /// For which it was made.
        ticket: String,
        /// Where this machine is.
        here: IpAddr,
    },
    /// It was made for a member at another port: configure that one, or have a ticket made for this one.
    #[error("it was made for a member at port {ticket}, and this machine's is at {here}")]
    OtherPort {
        /// For which it was made.
        ticket: u16,
        /// Where this machine's member is.
        here: u16,
    },
}

/// What goes into a ticket.
#[derive(Debug)]
#[expect(clippy::exhaustive_structs, reason = "whoever makes a ticket has all of it")]
pub struct TicketParts {
    /// The new node's key.
    pub node_key: PrivateKey,
    /// Its certificate, signed with the key itself.
    pub node_certificate: Certificate,
    /// The new member's key and certificate, and its authority's.
    pub member: Credentials,
    /// The certificates that are revoked.
    pub revoked: RevocationList,
    /// The members that there are.
    pub peers: Vec<Peer>,
    /// The new one: its name is the node's.
    pub this: Peer,
}

impl GoldenTicket {
    /// A ticket of these parts.
    ///
    /// # Errors
    /// [`TicketError`], where they don't hold together.
    pub fn try_new(parts: TicketParts) -> Result<Self, TicketError> {
        let TicketParts { node_key, node_certificate, member, revoked, peers, this } = parts;
        let node: NodeId = this.name.as_str().parse().map_err(TicketError::Node)?;
        let member = Arc::new(member);
        let digest = TicketDigest([0; 32]);
        Self { digest, node, node_key, node_certificate, member, revoked, peers, this }.checked()
    }

    /// Reads an enrolment configuration with a ticket in it.
    ///
    /// # Errors
    /// [`TicketError`].
    pub fn parse(config: &[u8]) -> Result<Self, TicketError> {
        let mut config = wire::EnrolmentConfig::decode(config).map_err(|_| TicketError::Message)?;
        let mut wire = config.golden_ticket.take().ok_or(TicketError::NoTicket)?;
        let ca = field("authority's certificate", || Certificate::from_der(&wire.etcd_ca_cert))?;
        let certificate = field("member's certificate", || Certificate::from_der(&wire.etcd_client_cert))?;
        let key = field("member's key", || PrivateKey::from_pkcs8(&wire.etcd_client_key))?;
        let revoked =
            field("list of revoked certificates", || RevocationList::from_der(&wire.etcd_crl, &ca))?;
        let this = wire.this.take().ok_or(TicketError::Missing("place for the new member"))?;
        let this = peer(&this)?;
        let node: NodeId = this.name.as_str().parse().map_err(TicketError::Node)?;
        if !wire.node_id.is_empty() && wire.node_id != node.as_str() {
            return Err(TicketError::OtherName { named: wire.node_id.parse().map_err(TicketError::Node)? });
        }
        let ticket = Self {
            digest: TicketDigest([0; 32]),
            node,
            node_key: field("node's key", || PrivateKey::from_pkcs8(&wire.node_key))?,
            node_certificate: field("node's certificate", || Certificate::from_der(&wire.node_cert))?,
            member: Arc::new(Credentials { key, certificate, ca }),
            revoked,
            peers: wire.peers.iter().map(peer).collect::<Result<_, _>>()?,
            this,
        };
        ticket.checked()
    }

    /// The same with these members.
    pub(super) fn with_peers(self, peers: Vec<Peer>) -> Result<Self, TicketError> {
        Self { peers, ..self }.checked()
    }

    /// The enrolment configuration that brings it: a secret.
    pub fn to_config(&self) -> Zeroizing<Vec<u8>> {
        let config = wire::EnrolmentConfig { golden_ticket: Some(self.wire()), node_id: String::new() };
        Zeroizing::new(config.encode_to_vec())
    }

    /// The same, with its digest, if it holds together.
    fn checked(mut self) -> Result<Self, TicketError> {
        self.check()?;
        let mut wire = self.wire();
        wire.peers.clear();
        wire.etcd_crl.clear();
        let bytes = Zeroizing::new(wire.encode_to_vec());
        self.digest = TicketDigest(Sha256::digest(&*bytes).into());
        Ok(self)
    }

    fn check(&self) -> Result<(), TicketError> {
        let mismatch = |certificate, other| Err(TicketError::Mismatch { certificate, other });
        let member = &*self.member;
        if member.certificate.public() != member.key.public() {
            return mismatch("member's certificate", "member's key");
        }
        if !member.certificate.is_signed_by(&member.ca) {
            return mismatch("member's certificate", "authority");
        }
        if self.revoked.revokes(&member.certificate) {
            return Err(TicketError::Revoked);
        }
        if self.node_certificate.public() != self.node_key.public() {
            return mismatch("node's certificate", "node's key");
        }
        if !self.node_certificate.is_signed_by(&self.node_certificate) {
            return mismatch("node's certificate", "node's key");
        }
        if !self.node.is_of(&self.node_key.public()) {
            return Err(TicketError::OtherName { named: self.node.clone() });
        }
        Ok(())
    }

    fn wire(&self) -> wire::GoldenTicket {
        wire::GoldenTicket {
            etcd_ca_cert: self.member.ca.der().to_vec(),
            etcd_client_cert: self.member.certificate.der().to_vec(),
            etcd_client_key: self.member.key.expose_pkcs8().to_vec(),
            etcd_crl: self.revoked.der().to_vec(),
            peers: self.peers.iter().map(to_wire).collect(),
            this: Some(to_wire(&self.this)),
            node_id: self.node.to_string(),
            node_cert: self.node_certificate.der().to_vec(),
            node_key: self.node_key.expose_pkcs8().to_vec(),
        }
    }

    /// Which ticket it is.
    pub fn digest(&self) -> TicketDigest {
        self.digest
    }

    /// The node that joins by it.
    pub fn node(&self) -> &NodeId {
        &self.node
    }

    /// Whose key the node has.
    pub fn public(&self) -> PublicKey {
        self.node_key.public()
    }

    /// The node's credentials. Its certificate is its own authority.
    ///
    /// # Errors
    /// [`FormatError`], which a ticket that was parsed does not give.
    pub(crate) fn node_credentials(&self) -> Result<Credentials, FormatError> {
        let key = PrivateKey::from_pkcs8(self.node_key.expose_pkcs8())?;
        let certificate = self.node_certificate.clone();
        Ok(Credentials { key, ca: certificate.clone(), certificate })
    }

    /// The member's credentials.
    pub fn member(&self) -> Arc<Credentials> {
        Arc::clone(&self.member)
    }

    /// The certificates that were revoked when it was made.
    pub fn revoked(&self) -> &RevocationList {
        &self.revoked
    }

    /// The members that there were.
    pub fn peers(&self) -> &[Peer] {
        &self.peers
    }

    /// The new one.
    pub fn this(&self) -> &Peer {
        &self.this
    }

    /// Whether it was made for a machine at this address, whose member the others reach at this port, where that is known.
    ///
    /// # Errors
    /// [`TicketError::OtherAddress`], [`TicketError::OtherPort`].
    pub fn check_place(&self, here: IpAddr, port: Option<u16>) -> Result<(), TicketError> {
        let url = &self.this.url;
        if url.host().parse() != Ok(here) {
            return Err(TicketError::OtherAddress { ticket: url.host().to_owned(), here });
        }
        match port {
            Some(port) if port != url.port() => {
                Err(TicketError::OtherPort { ticket: url.port(), here: port })
            }
            _ => Ok(()),
        }
    }
}

/// Nothing of the keys.
impl fmt::Debug for GoldenTicket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GoldenTicket")
            .field("digest", &self.digest)
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

fn field<T>(field: &'static str, parse: impl FnOnce() -> Result<T, FormatError>) -> Result<T, TicketError> {
    parse().map_err(|source| TicketError::Field { field, source })
}

/// An address alone is at the usual port, as it was in 2020; `ADDRESS:PORT` is at another.
fn peer(wire: &wire::EtcdPeer) -> Result<Peer, TicketError> {
    let name: MemberName = wire.name.parse().map_err(TicketError::Member)?;
    let url = match wire.address.parse::<IpAddr>() {
        Ok(address) => PeerUrl::new(address, PEER_PORT),
        Err(_) => format!("https://{}", wire.address).parse().map_err(TicketError::Member)?,
    };
    Ok(Peer::new(name, url))
}

fn to_wire(peer: &Peer) -> wire::EtcdPeer {
    let authority = peer.url.as_str().trim_start_matches("https://");
    let address = match authority.parse::<SocketAddr>() {
        Ok(socket) if socket.port() == PEER_PORT => socket.ip().to_string(),
        _ => authority.to_owned(),
    };
    wire::EtcdPeer { name: peer.name.to_string(), address }
}

/// What an enrolment configuration may hold: never panics, and a ticket is read as it was written.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn arbitrary(bytes: &[u8]) {
    if let Ok(ticket) = GoldenTicket::parse(bytes) {
        let again = GoldenTicket::parse(&ticket.to_config()).expect("what was written is a ticket");
        let is = |one: &GoldenTicket| (one.digest(), one.peers().to_vec(), one.revoked().der().to_vec());
        assert_eq!(is(&again), is(&ticket), "a ticket is read as it was written");
    }
}

//! What a new node asks of its cluster, and what it gets: the keys stay with the node.

use std::fmt;
use std::str::FromStr;

use nodekeel_localstorage::pki::{
    Certificate, CertificateTemplate, CommonName, PkiError, PrivateKey, RevocationList,
};
use prost::Message as _;
use ring::signature::{ED25519, Ed25519KeyPair, UnparsedPublicKey};
use thiserror::Error;
use zeroize::Zeroizing;

use super::golden_ticket::{parse_field, parse_peer, peer_message};
use super::{GoldenTicket, JoinSecret, JoinTicketId, NodeApi, NodeId, TicketError, wire};
use crate::consensus::{Peer, PeerUrl};
#[cfg(feature = "etcd")]
use crate::pki::has_peer_name;

/// The start of what a node that enrols signs.
const SIGNED_PREFIX: &[u8] = b"nodekeel: a node of this key enrols\0";

/// What a joining node becomes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum JoinRole {
    /// A voter of the cluster.
    #[default]
    Voter,
    /// A node of the cluster without a member: it takes part by the API of the voters.
    Worker,
}

/// A word that is no role that a node can have.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("nodes of the role {0:?} are not supported: use voter or worker")]
pub struct InvalidJoinRole(String);

impl fmt::Display for JoinRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Voter => f.write_str("voter"),
            Self::Worker => f.write_str("worker"),
        }
    }
}

impl FromStr for JoinRole {
    type Err = InvalidJoinRole;

    fn from_str(text: &str) -> Result<Self, InvalidJoinRole> {
        match text {
            "voter" => Ok(Self::Voter),
            "worker" => Ok(Self::Worker),
            _ => Err(InvalidJoinRole(text.to_owned())),
        }
    }
}

/// The request of a node that is to be a voter, to be admitted by a join ticket.
///
/// Its [signatures](Self::sign) prove that the node has both keys: a certificate proves nothing, since it is public.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "the voter that answers needs all of it")]
pub struct EnrolRequest {
    /// The ticket.
    pub ticket: JoinTicketId,
    /// Its secret.
    pub secret: JoinSecret,
    /// Where the others will reach the node's member.
    pub url: PeerUrl,
    /// The certificate of the node's key, from which it gets its name.
    pub node_certificate: Certificate,
    /// A certificate of the member's key, for which the cluster's CA issues another.
    pub member_certificate: Certificate,
    /// The signature by the node's key.
    pub node_signature: Vec<u8>,
    /// The signature by the member's key.
    pub member_signature: Vec<u8>,
}

impl EnrolRequest {
    /// Signs the request with the node's key and the member's, for a call by this key.
    pub fn sign(&mut self, caller: &str, node: &PrivateKey, member: &PrivateKey) {
        let message = self.signed_bytes(caller);
        let sign = |key: &PrivateKey| {
            let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(key.expose_pkcs8());
            pair.expect("a private key is one of Ed25519").sign(&message).as_ref().to_vec()
        };
        (self.node_signature, self.member_signature) = (sign(node), sign(member));
    }

    /// Returns whether both keys have signed the request for a call by this key, and the node's certificate is its own.
    pub(super) fn is_proved(&self, caller: &str) -> bool {
        let message = self.signed_bytes(caller);
        let is_signed = |by: &Certificate, signature: &[u8]| {
            UnparsedPublicKey::new(&ED25519, by.public_key().as_bytes()).verify(&message, signature).is_ok()
        };
        is_signed(&self.node_certificate, &self.node_signature)
            && is_signed(&self.member_certificate, &self.member_signature)
            && self.node_certificate.is_signed_by(&self.node_certificate)
    }

    /// All of the request but the secret, and the key that calls: nobody else can repeat it, nor use its parts in another.
    fn signed_bytes(&self, caller: &str) -> Vec<u8> {
        [
            SIGNED_PREFIX,
            self.ticket.as_bytes(),
            self.node_certificate.public_key().as_bytes(),
            self.member_certificate.public_key().as_bytes(),
            b"voter\0",
            self.url.as_str().as_bytes(),
            b"\0",
            caller.as_bytes(),
        ]
        .concat()
    }
}

/// The request of a node that is to be a worker, to be admitted by a join ticket.
///
/// The worker has one key: that of its API, by which it calls. The connection proves it.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "the voter that answers needs all of it")]
pub struct WorkerRequest {
    /// The ticket.
    pub ticket: JoinTicketId,
    /// Its secret.
    pub secret: JoinSecret,
    /// The certificate of its key, from which it gets its name.
    pub certificate: Certificate,
    /// The key by which it calls, and the address of its API.
    pub api: NodeApi,
}

impl WorkerRequest {
    /// Returns whether the certificate is that of the key that calls, and its own.
    pub(super) fn is_proved(&self) -> bool {
        *self.certificate.public_key().as_bytes() == self.api.key
            && self.certificate.is_signed_by(&self.certificate)
    }
}

/// The place of a new node in its cluster: its certificate, and the members. There is no private key in it, unless it was read
/// from a golden ticket.
#[derive(Clone)]
pub(crate) struct Admission {
    message: wire::GoldenTicket,
    node_id: NodeId,
    url: PeerUrl,
}

impl Admission {
    pub(super) fn new(
        node_certificate: &Certificate,
        member_certificate: &Certificate,
        ca: &Certificate,
        revoked: &RevocationList,
        this: &Peer,
    ) -> Result<Self, TicketError> {
        Self::from_message(wire::GoldenTicket {
            etcd_ca_cert: ca.der_bytes().to_vec(),
            etcd_client_cert: member_certificate.der_bytes().to_vec(),
            etcd_client_key: Vec::new(),
            etcd_crl: revoked.der_bytes().to_vec(),
            peers: Vec::new(),
            this: Some(peer_message(this)),
            node_id: this.name.to_string(),
            node_cert: node_certificate.der_bytes().to_vec(),
            node_key: Vec::new(),
        })
    }

    /// The admission in an enrolment configuration: the answer of a voter, or a ticket that the cluster has stored.
    pub(crate) fn from_config(config: &[u8]) -> Result<Self, TicketError> {
        let mut config = wire::EnrolmentConfig::decode(config).map_err(|_| TicketError::Malformed)?;
        Self::from_message(config.golden_ticket.take().ok_or(TicketError::NoTicket)?)
    }

    fn from_message(message: wire::GoldenTicket) -> Result<Self, TicketError> {
        let this = parse_peer(message.this.as_ref().ok_or(TicketError::MissingField("new member"))?)?;
        let node_id = this.name.as_str().parse().map_err(TicketError::NodeName)?;
        Ok(Self { message, node_id, url: this.url })
    }

    pub(super) fn to_config(&self) -> Zeroizing<Vec<u8>> {
        let golden_ticket = Some(self.message.clone());
        let config =
            wire::EnrolmentConfig { golden_ticket, node_id: String::new(), join_ticket: String::new() };
        Zeroizing::new(config.encode_to_vec())
    }

    /// The node that is admitted.
    pub(super) fn node_id(&self) -> &NodeId {
        &self.node_id
    }

    /// Returns whether its certificate has the name that peer ports require.
    #[cfg(feature = "etcd")]
    pub(super) fn has_peer_name(&self, name: &str) -> bool {
        let certificate = Certificate::from_der(&self.message.etcd_client_cert);
        certificate.is_ok_and(|certificate| has_peer_name(&certificate, name))
    }

    /// Where the others will reach its member.
    pub(super) fn url(&self) -> &PeerUrl {
        &self.url
    }

    /// Returns whether it has the node's private keys, as a golden ticket does.
    pub(super) fn has_keys(&self) -> bool {
        !self.message.node_key.is_empty()
    }

    /// Returns whether it admits the node of this certificate.
    pub(super) fn is_of(&self, node_certificate: &Certificate) -> bool {
        self.message.node_cert == node_certificate.der_bytes()
    }

    /// Replaces the members.
    pub(super) fn set_peers(&mut self, peers: &[Peer]) {
        self.message.peers = peers.iter().map(peer_message).collect();
    }

    /// The golden ticket of the node, from its own keys.
    pub(crate) fn into_ticket(mut self, keys: &JoinKeys) -> Result<GoldenTicket, TicketError> {
        self.message.node_key = keys.node.expose_pkcs8().to_vec();
        self.message.etcd_client_key = keys.member.expose_pkcs8().to_vec();
        GoldenTicket::from_config(&self.to_config())
    }
}

/// Without what may be secret.
impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission")
            .field("node", &self.node_id)
            .field("url", &self.url)
            .finish_non_exhaustive()
    }
}

/// The keys of a node that enrols. It makes them itself, and nobody else sees them.
#[derive(Debug)]
pub(crate) struct JoinKeys {
    pub(super) node: PrivateKey,
    pub(super) node_certificate: Certificate,
    pub(super) member: PrivateKey,
}

impl JoinKeys {
    /// New keys of a node whose name starts with this prefix.
    pub(crate) fn generate(prefix: &str) -> Result<Self, PkiError> {
        let node = PrivateKey::generate()?;
        let mut template = CertificateTemplate::default();
        template.common_name = CommonName::WithKeyId(prefix.to_owned());
        let node_certificate = template.self_sign(&node)?;
        Ok(Self { node, node_certificate, member: PrivateKey::generate()? })
    }

    /// Those in a message without the rest of a ticket.
    pub(super) fn from_message(message: &wire::GoldenTicket) -> Result<Self, TicketError> {
        Ok(Self {
            node: parse_field("node's key", || PrivateKey::from_pkcs8(&message.node_key))?,
            node_certificate: parse_field("node's certificate", || {
                Certificate::from_der(&message.node_cert)
            })?,
            member: parse_field("member's key", || PrivateKey::from_pkcs8(&message.etcd_client_key))?,
        })
    }

    pub(super) fn to_message(&self) -> wire::GoldenTicket {
        let mut message = wire::GoldenTicket::default();
        message.node_key = self.node.expose_pkcs8().to_vec();
        message.node_cert = self.node_certificate.der_bytes().to_vec();
        message.etcd_client_key = self.member.expose_pkcs8().to_vec();
        message
    }
}

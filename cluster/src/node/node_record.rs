//! The cluster's record of a node.

use std::net::IpAddr;

use nodekeel_localstorage::pki::{Certificate, PkiEncodingError};
use prost::Message as _;
use thiserror::Error;

use super::{SecretBytes, wire};
use crate::consensus::{InvalidName, MemberName};

/// The cluster's record of a node.
///
/// *Source:* `NodeMessage` of Monogon's Smalltown of 2020, with its field numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a plain record without invariants")]
pub struct NodeRecord {
    /// The node's certificate: its key determines the node's name.
    pub certificate: Certificate,
    /// A cluster unlock key in the record itself, as in 2020. Such a key stays until
    /// [`NodeStore::replace_unlock_keys`](super::NodeStore::replace_unlock_keys) moves it to a key of its own:
    /// a program that may read records need not be one that may read the keys of disks.
    pub former_unlock_key: Option<SecretBytes>,
    /// The node's address; `None` if it has not reported one.
    pub address: Option<IpAddr>,
    /// The node's roles.
    pub roles: NodeRoles,
}

/// The roles of a node. Each role is set once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeRoles {
    consensus_member: Option<MemberName>,
    kubernetes_worker: Option<String>,
}

/// The node already has that role.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the node is already registered as a {role} with the name {name}")]
pub struct RoleConflict {
    /// The role.
    pub role: &'static str,
    /// The name in that role.
    pub name: String,
}

impl NodeRoles {
    /// No roles.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Makes the node a consensus member of this name.
    ///
    /// # Errors
    /// [`RoleConflict`], with nothing changed.
    pub fn set_consensus_member(&mut self, name: MemberName) -> Result<(), RoleConflict> {
        if let Some(has) = &self.consensus_member {
            return Err(RoleConflict { role: "consensus member", name: has.to_string() });
        }
        self.consensus_member = Some(name);
        Ok(())
    }

    /// Makes the node a Kubernetes worker of this name.
    ///
    /// # Errors
    /// [`RoleConflict`], with nothing changed.
    pub fn set_kubernetes_worker(&mut self, name: impl Into<String>) -> Result<(), RoleConflict> {
        if let Some(has) = &self.kubernetes_worker {
            return Err(RoleConflict { role: "Kubernetes worker", name: has.clone() });
        }
        self.kubernetes_worker = Some(name.into());
        Ok(())
    }

    /// Returns whether the node is a worker of its cluster: without a member.
    pub fn is_worker(&self) -> bool {
        self.consensus_member.is_none() && self.kubernetes_worker.is_some()
    }

    /// The node's name as a consensus member, if it is one.
    pub fn consensus_member(&self) -> Option<&MemberName> {
        self.consensus_member.as_ref()
    }

    /// The node's name as a Kubernetes worker, if it is one.
    pub fn kubernetes_worker(&self) -> Option<&str> {
        self.kubernetes_worker.as_deref()
    }
}

/// A defect of a record.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidRecord {
    /// The bytes are not a node record.
    #[error("the value in etcd is not a node record: it is damaged")]
    Malformed,
    /// The certificate is invalid.
    #[error("can't parse the certificate in the node's record")]
    Certificate(#[source] PkiEncodingError),
    /// The address is invalid.
    #[error("invalid address {address:?} in the node's record")]
    Address {
        /// The text in the record.
        address: String,
    },
    /// The member's name is invalid.
    #[error("invalid member name in the node's record")]
    Member(#[source] InvalidName),
    /// The stored bytes are not the unlock keys of a node.
    #[error("the value in etcd is not a list of cluster unlock keys: it is damaged")]
    UnlockKeys,
    /// The stored bytes are not the API of a node.
    #[error("the value in etcd is not the API of a node: it is damaged")]
    Api,
    /// The record belongs to another node's key.
    #[error("the certificate in the node's record belongs to another node's key")]
    NodeMismatch,
}

impl NodeRecord {
    /// The record as it is stored.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let member = self.roles.consensus_member.as_ref();
        let worker = self.roles.kubernetes_worker.as_ref();
        let roles = wire::NodeRoles {
            consensus_member: member.map(|name| wire::ConsensusMember { etcd_member_name: name.to_string() }),
            kubernetes_worker: worker.map(|name| wire::KubernetesWorker { node_name: name.clone() }),
        };
        wire::NodeMessage {
            certificate: self.certificate.der_bytes().to_vec(),
            cluster_unlock_key: self
                .former_unlock_key
                .as_ref()
                .map_or_else(Vec::new, |key| key.expose_bytes().to_vec()),
            address: self.address.map(|address| address.to_string()).unwrap_or_default(),
            roles: Some(roles),
        }
        .encode_to_vec()
    }

    /// Reads a record.
    ///
    /// # Errors
    /// [`InvalidRecord`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, InvalidRecord> {
        let mut wire = wire::NodeMessage::decode(bytes).map_err(|_| InvalidRecord::Malformed)?;
        let certificate = Certificate::from_der(&wire.certificate).map_err(InvalidRecord::Certificate)?;
        let address = match wire.address.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|_| InvalidRecord::Address { address: text.to_owned() })?),
        };
        // Moved, not copied: the message wipes only what it still has when it is dropped.
        let unlock_key = std::mem::take(&mut wire.cluster_unlock_key);
        let roles = wire.roles.take().unwrap_or_default();
        let member = roles.consensus_member.map(|member| member.etcd_member_name.parse());
        Ok(Self {
            certificate,
            former_unlock_key: (!unlock_key.is_empty()).then(|| SecretBytes::new(unlock_key)),
            address,
            roles: NodeRoles {
                consensus_member: member.transpose().map_err(InvalidRecord::Member)?,
                kubernetes_worker: roles.kubernetes_worker.map(|worker| worker.node_name),
            },
        })
    }
}

/// Arbitrary bytes as a record: never panics, and a valid record survives a round trip.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_arbitrary_record(bytes: &[u8]) {
    if let Ok(record) = NodeRecord::from_bytes(bytes) {
        let again = NodeRecord::from_bytes(&record.to_bytes());
        assert_eq!(again.as_ref(), Ok(&record), "a record survives a round trip");
    }
}

//! What the cluster knows of a node.

use std::net::IpAddr;

use nodekeel_localstorage::pki::{Certificate, FormatError};
use prost::Message as _;
use thiserror::Error;

use super::{Secret, wire};
use crate::consensus::{InvalidName, MemberName};

/// What the cluster knows of a node.
///
/// *Source:* `Node` of Monogon's Smalltown of 2020, with its field numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a plain record without invariants")]
pub struct NodeRecord {
    /// By which it is known: its key names it.
    pub certificate: Certificate,
    /// The cluster's share of the key to the node's disk; none where that is not encrypted.
    pub unlock_key: Option<Secret>,
    /// Where it is reached; none where it has not told.
    pub address: Option<IpAddr>,
    /// What it does.
    pub roles: Roles,
}

/// What a node does. Each role is given once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roles {
    consensus_member: Option<MemberName>,
    kubernetes_worker: Option<String>,
}

/// The node has that role already.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the node is a {role} already, by the name {name}")]
pub struct HasRole {
    /// Which.
    pub role: &'static str,
    /// By which name.
    pub name: String,
}

impl Roles {
    /// None.
    pub fn none() -> Self {
        Self::default()
    }

    /// Of the consensus, a member by this name.
    ///
    /// # Errors
    /// [`HasRole`], with nothing changed.
    pub fn make_consensus_member(&mut self, name: MemberName) -> Result<(), HasRole> {
        if let Some(has) = &self.consensus_member {
            return Err(HasRole { role: "consensus member", name: has.to_string() });
        }
        self.consensus_member = Some(name);
        Ok(())
    }

    /// Of Kubernetes, a worker by this name.
    ///
    /// # Errors
    /// [`HasRole`], with nothing changed.
    pub fn make_kubernetes_worker(&mut self, name: impl Into<String>) -> Result<(), HasRole> {
        if let Some(has) = &self.kubernetes_worker {
            return Err(HasRole { role: "Kubernetes worker", name: has.clone() });
        }
        self.kubernetes_worker = Some(name.into());
        Ok(())
    }

    /// The name that it has as a member of the consensus, if it is one.
    pub fn consensus_member(&self) -> Option<&MemberName> {
        self.consensus_member.as_ref()
    }

    /// The name that it has as a worker of Kubernetes, if it is one.
    pub fn kubernetes_worker(&self) -> Option<&str> {
        self.kubernetes_worker.as_deref()
    }
}

/// What is wrong with the bytes of a record.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidRecord {
    /// It is no such message.
    #[error("it is no record of a node")]
    Message,
    /// Its certificate is none.
    #[error("its certificate is malformed")]
    Certificate(#[source] FormatError),
    /// Its address is none.
    #[error("{address:?} is no address")]
    Address {
        /// The text in it.
        address: String,
    },
    /// Its name as a member is none.
    #[error("its member has no valid name")]
    Member(#[source] InvalidName),
    /// It is of another node's key.
    #[error("its certificate is of another node's key")]
    OtherNode,
}

impl NodeRecord {
    /// The record as it is stored.
    pub(super) fn encode(&self) -> Vec<u8> {
        let member = self.roles.consensus_member.as_ref();
        let worker = self.roles.kubernetes_worker.as_ref();
        let roles = wire::NodeRoles {
            consensus_member: member.map(|name| wire::ConsensusMember { etcd_member_name: name.to_string() }),
            kubernetes_worker: worker.map(|name| wire::KubernetesWorker { node_name: name.clone() }),
        };
        wire::Node {
            certificate: self.certificate.der().to_vec(),
            cluster_unlock_key: self.unlock_key.as_ref().map_or_else(Vec::new, |key| key.expose().to_vec()),
            address: self.address.map(|address| address.to_string()).unwrap_or_default(),
            roles: Some(roles),
        }
        .encode_to_vec()
    }

    /// Reads a record.
    ///
    /// # Errors
    /// [`InvalidRecord`].
    pub fn parse(bytes: &[u8]) -> Result<Self, InvalidRecord> {
        let mut wire = wire::Node::decode(bytes).map_err(|_| InvalidRecord::Message)?;
        let certificate = Certificate::from_der(&wire.certificate).map_err(InvalidRecord::Certificate)?;
        let address = match wire.address.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|_| InvalidRecord::Address { address: text.to_owned() })?),
        };
        let unlock_key = std::mem::take(&mut wire.cluster_unlock_key);
        let roles = wire.roles.take().unwrap_or_default();
        let member = roles.consensus_member.map(|member| member.etcd_member_name.parse());
        Ok(Self {
            certificate,
            unlock_key: (!unlock_key.is_empty()).then(|| Secret::new(unlock_key)),
            address,
            roles: Roles {
                consensus_member: member.transpose().map_err(InvalidRecord::Member)?,
                kubernetes_worker: roles.kubernetes_worker.map(|worker| worker.node_name),
            },
        })
    }
}

/// What a record may hold: never panics, and a record is read as it was written.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn arbitrary(bytes: &[u8]) {
    if let Ok(record) = NodeRecord::parse(bytes) {
        let again = NodeRecord::parse(&record.encode());
        assert_eq!(again.as_ref(), Ok(&record), "a record is read as it was written");
    }
}

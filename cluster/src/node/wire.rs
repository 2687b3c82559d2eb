//! The messages, with the field numbers of Monogon's Smalltown of 2020 (`enrolment.proto`).
//!
//! They are written by hand: a few structs do not justify protoc. They have no `Debug`, since some fields are
//! secret.

use zeroize::Zeroize as _;

/// The way of a node into a cluster.
#[derive(Clone, PartialEq, prost::Message)]
#[prost(skip_debug)]
pub(super) struct EnrolmentConfig {
    #[prost(message, optional, tag = "1")]
    pub(super) golden_ticket: Option<GoldenTicket>,
    /// Was never filled in, and is not read.
    #[prost(string, tag = "2")]
    pub(super) node_id: String,
    /// The text of a join ticket that is not redeemed yet; the golden ticket then has the keys alone. Not of 2020.
    #[prost(string, tag = "3")]
    pub(super) join_ticket: String,
}

/// Everything that a node needs to join.
#[derive(Clone, PartialEq, prost::Message)]
#[prost(skip_debug)]
pub(super) struct GoldenTicket {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) etcd_ca_cert: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) etcd_client_cert: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    pub(super) etcd_client_key: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    pub(super) etcd_crl: Vec<u8>,
    #[prost(message, repeated, tag = "5")]
    pub(super) peers: Vec<EtcdPeer>,
    #[prost(message, optional, tag = "6")]
    pub(super) this: Option<EtcdPeer>,
    #[prost(string, tag = "7")]
    pub(super) node_id: String,
    #[prost(bytes = "vec", tag = "8")]
    pub(super) node_cert: Vec<u8>,
    #[prost(bytes = "vec", tag = "9")]
    pub(super) node_key: Vec<u8>,
}

/// A member by its name and address.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct EtcdPeer {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) address: String,
}

/// The cluster's record of a node.
#[derive(Clone, PartialEq, prost::Message)]
#[prost(skip_debug)]
pub(super) struct NodeMessage {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) certificate: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) cluster_unlock_key: Vec<u8>,
    #[prost(string, tag = "3")]
    pub(super) address: String,
    #[prost(message, optional, tag = "4")]
    pub(super) roles: Option<NodeRoles>,
}

/// The cluster unlock keys of a node. Not of 2020.
#[derive(Clone, PartialEq, prost::Message)]
#[prost(skip_debug)]
pub(super) struct UnlockKeys {
    #[prost(message, repeated, tag = "1")]
    pub(super) keys: Vec<UnlockKey>,
}

/// A cluster unlock key of a volume.
#[derive(Clone, PartialEq, prost::Message)]
#[prost(skip_debug)]
pub(super) struct UnlockKey {
    /// The UUID of the volume.
    #[prost(string, tag = "1")]
    pub(super) volume: String,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) key: Vec<u8>,
}

/// The API of a node. Not of 2020.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct NodeApi {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(string, tag = "2")]
    pub(super) address: String,
}

/// The roles of a node.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct NodeRoles {
    #[prost(message, optional, tag = "1")]
    pub(super) consensus_member: Option<ConsensusMember>,
    #[prost(message, optional, tag = "2")]
    pub(super) kubernetes_worker: Option<KubernetesWorker>,
}

/// A member of the consensus.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ConsensusMember {
    #[prost(string, tag = "1")]
    pub(super) etcd_member_name: String,
}

/// A node that runs pods.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct KubernetesWorker {
    #[prost(string, tag = "1")]
    pub(super) node_name: String,
}

impl Drop for EnrolmentConfig {
    fn drop(&mut self) {
        self.join_ticket.zeroize();
    }
}

impl Drop for GoldenTicket {
    fn drop(&mut self) {
        self.etcd_client_key.zeroize();
        self.node_key.zeroize();
    }
}

impl Drop for UnlockKey {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

impl Drop for NodeMessage {
    fn drop(&mut self) {
        self.cluster_unlock_key.zeroize();
    }
}

//! The cluster's join tickets: created by an operator, redeemed by new nodes.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroU16;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nodekeel_localstorage::pki::Certificate;
use prost::Message as _;
use thiserror::Error;

use super::admission::Admission;
use super::known_nodes::API_PREFIX;
use super::ticket_issuer::{TICKETS_NAMESPACE, place_key, root_key};
use super::workers::new_worker;
use super::{
    EnrolRequest, GoldenTicketIssuer, JoinRole, JoinSecret, JoinTicket, JoinTicketId, NODES_NAMESPACE,
    NodeId, NodeStoreError, TicketError, TicketIssueError, TicketVoter, WorkerRequest, node_store,
};
use crate::consensus::join::invitation_key;
use crate::consensus::kv::{Compare, KeyRange, KeyValue, KvError, Txn, TxnOp};
use crate::consensus::{Peer, PeerUrl};
use crate::pki::CertificateSpec;

/// Key prefix of the join tickets, in the namespace of the golden ones.
const PREFIX: &str = "/join/";

/// The number of records above which those of closed tickets are deleted: until then a holder is told why his opens nothing.
const MAX_KEPT: usize = 1000;

/// The largest number of nodes for one ticket: its record lists them all, and etcd stores no value of more than 1.5 MiB.
pub const MAX_TICKET_USES: u16 = 1000;

/// The number of times that a change is tried again after concurrent ones.
const ATTEMPTS: usize = 16;

/// The cluster's join tickets.
///
/// The cluster keeps the SHA-256 of a ticket's secret alone. A redeemed ticket of a voter leaves the same as a golden ticket, an
/// invitation at the URL of the node, but without the node's keys, which stay with the node. One of a worker leaves the worker's
/// record: the worker is in the cluster.
///
/// # Contract
/// - The same key and request are answered by the same admission until the node has joined, also after the ticket has expired.
/// - A ticket admits at most as many nodes as it has uses, and none after it has expired or was revoked.
/// - A node is admitted at one URL, or a worker at one address, and only if it has proved its keys.
#[derive(Clone, Debug)]
pub struct JoinTickets {
    issuer: GoldenTicketIssuer,
}

/// The limits of a new ticket.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct JoinTicketLimits {
    /// The time in which it can be redeemed. Default: 24 hours.
    pub valid_for: Duration,
    /// The number of nodes that it admits, [`MAX_TICKET_USES`] at most. Default: 1.
    pub uses: NonZeroU16,
    /// What they become. Default: voters.
    pub role: JoinRole,
    /// The only address of a node that it admits. Default: any.
    pub address: Option<IpAddr>,
}

impl Default for JoinTicketLimits {
    fn default() -> Self {
        let uses = const { NonZeroU16::new(1).unwrap() };
        Self { valid_for: Duration::from_secs(24 * 3600), uses, role: JoinRole::Voter, address: None }
    }
}

/// A ticket as the cluster knows it: without its secret.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredJoinTicket {
    /// Its id.
    pub id: JoinTicketId,
    /// When it was created, by the clock of the voter.
    pub created: SystemTime,
    /// When it expires.
    pub expires: SystemTime,
    /// The number of nodes that it admits.
    pub uses: u32,
    /// The name of what they become.
    pub role: String,
    /// The only address of a node that it admits, if it is limited to one.
    pub address: Option<IpAddr>,
    /// True if it was revoked.
    pub is_revoked: bool,
    /// The nodes that it has admitted.
    pub redemptions: Vec<Redemption>,
}

/// A node that a ticket has admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Redemption {
    /// The key by which it has called.
    pub key: String,
    /// The node.
    pub node: String,
    /// Where the others reach its member, or a worker's API.
    pub url: String,
    /// When it was admitted.
    pub at: SystemTime,
}

/// The reason why a node was not admitted.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EnrolError {
    /// The request does not prove its keys, or its host is no address of one machine.
    #[error("invalid request to enrol: {0}")]
    Request(&'static str),
    /// There is no ticket of this id, or its secret is another one: a guesser learns nothing.
    #[error(
        "the cluster knows no such join ticket: copy it again, or create another: `nodectl cluster ticket create --role {role}`"
    )]
    Unknown {
        /// What the node is to become.
        role: JoinRole,
    },
    /// The ticket was revoked.
    #[error("join ticket {id} was revoked: create another: `nodectl cluster ticket create --role {role}`")]
    Revoked {
        /// The ticket.
        id: JoinTicketId,
        /// Its role.
        role: String,
    },
    /// The ticket has expired, by the clock of the voter.
    #[error("join ticket {id} has expired: create another: `nodectl cluster ticket create --role {role}`")]
    Expired {
        /// The ticket.
        id: JoinTicketId,
        /// Its role.
        role: String,
    },
    /// Other nodes have used it, or this one did and was reset since.
    #[error("join ticket {id} is used: create another: `nodectl cluster ticket create --role {role}`")]
    UsedUp {
        /// The ticket.
        id: JoinTicketId,
        /// Its role.
        role: String,
    },
    /// The node has joined by the ticket, and was removed since: its disk, which has the ticket, may be stolen.
    #[error(
        "node {node} was removed from the cluster after it had joined by join ticket {id}: use another ticket, \
         `nodectl cluster ticket create --role {role}`"
    )]
    Removed {
        /// The ticket.
        id: JoinTicketId,
        /// The node.
        node: NodeId,
        /// Its role.
        role: String,
    },
    /// The ticket is for nodes that become something else.
    #[error(
        "join ticket {id} is for a {role}, and this node is a {node}: create one of its role, `nodectl cluster ticket create --role {node}`"
    )]
    OtherRole {
        /// The ticket.
        id: JoinTicketId,
        /// The role of the ticket.
        role: String,
        /// That of the node.
        node: JoinRole,
    },
    /// The ticket is for a node at another address.
    #[error(
        "join ticket {id} is for a node at {address}, and this one is at {host}: correct the address in its configuration, or create another ticket"
    )]
    OtherAddress {
        /// The ticket.
        id: JoinTicketId,
        /// The address of the ticket.
        address: IpAddr,
        /// That of the request.
        host: IpAddr,
    },
    /// Another node was admitted at the URL, and has not joined yet.
    #[error(
        "another node is admitted at {url}, and has not joined yet: use another address, or type `{}` on a member",
        .url.revoke_command()
    )]
    Taken {
        /// The URL.
        url: PeerUrl,
    },
    /// The node of these keys has joined.
    #[error(
        "node {node} is in the cluster already: if this machine is a copy of it, copy a join ticket to it once more, and it makes \
         its own keys; if the node is lost, type `nodectl cluster remove {node}` on a member"
    )]
    Joined {
        /// The node.
        node: NodeId,
    },
    /// The node of these keys was admitted at another URL, and has not joined yet.
    #[error(
        "node {node} was admitted at {url}: if this machine is a copy of it, copy a join ticket to it once more, and it makes its \
         own keys; if its address has changed, type `{}` on a member",
        .url.revoke_command()
    )]
    Elsewhere {
        /// The node.
        node: NodeId,
        /// The URL.
        url: PeerUrl,
    },
    /// The worker of this key is in the cluster, at another address.
    #[error(
        "node {node} is in the cluster at {address}: if this machine is a copy of it, remove the key of its API, api/key below its \
         data directory, and restart it; if its address has changed, type `nodectl cluster remove {node}` on a member"
    )]
    WorkerElsewhere {
        /// The node.
        node: NodeId,
        /// The address of its API.
        address: SocketAddr,
    },
    /// Others change the same ticket. A retry helps.
    #[error("the join ticket is being changed by others: try again")]
    Contended,
    /// A stored ticket is damaged.
    #[error("join ticket {id} is damaged in the cluster's store: revoke it, and create another")]
    Damaged {
        /// The ticket.
        id: JoinTicketId,
    },
    /// The tickets could not be read or written. A retry may help.
    #[error("can't read or write the join tickets in the cluster's etcd")]
    Kv(#[source] KvError),
    /// The node's place could not be made.
    #[error("can't admit the node")]
    Issue(#[source] TicketIssueError),
    /// Another node has the key of its API, or the records could not be read or written.
    #[error("can't admit the node")]
    Record(#[source] NodeStoreError),
    /// The parts of an admission are inconsistent.
    #[error("can't admit the node")]
    Admission(#[source] TicketError),
}

impl EnrolError {
    /// Returns whether the cluster refuses the node or the ticket: another voter would, too.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::Contended | Self::Kv(_) | Self::Admission(_) => false,
            Self::Issue(error) => matches!(error, TicketIssueError::MemberExists { .. }),
            Self::Record(error) => {
                matches!(error, NodeStoreError::Conflict { .. } | NodeStoreError::KeyTaken { .. })
            }
            _ => true,
        }
    }
}

/// A failure to create, list or revoke join tickets.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JoinTicketError {
    /// There are no random numbers.
    #[error("can't make a join ticket")]
    Random(#[source] std::io::Error),
    /// There is no ticket of this id.
    #[error("no join ticket has the id {id}: see `nodectl cluster ticket list`")]
    Unknown {
        /// The id.
        id: JoinTicketId,
    },
    /// The tickets could not be read or written. A retry may help.
    #[error("can't read or write the join tickets in the cluster's etcd")]
    Kv(#[source] KvError),
    /// What a node got by the ticket could not be revoked. A retry may help.
    #[error("can't revoke what a node got by the join ticket")]
    Revoke(#[source] TicketIssueError),
}

/// The record of a ticket.
#[derive(Clone, PartialEq, prost::Message)]
struct TicketRecord {
    /// The SHA-256 of the secret.
    #[prost(bytes = "vec", tag = "1")]
    secret_digest: Vec<u8>,
    /// Seconds since 1970.
    #[prost(uint64, tag = "2")]
    created: u64,
    #[prost(uint64, tag = "3")]
    expires: u64,
    #[prost(uint32, tag = "4")]
    uses: u32,
    /// The name of the role.
    #[prost(string, tag = "5")]
    role: String,
    /// Empty for any.
    #[prost(string, tag = "6")]
    address: String,
    #[prost(bool, tag = "7")]
    is_revoked: bool,
    #[prost(message, repeated, tag = "8")]
    redemptions: Vec<RedemptionRecord>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RedemptionRecord {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    node: String,
    #[prost(string, tag = "3")]
    url: String,
    #[prost(uint64, tag = "4")]
    at: u64,
    /// The serial number of the certificate that the node got.
    #[prost(bytes = "vec", tag = "5")]
    serial: Vec<u8>,
}

impl JoinTickets {
    pub(crate) fn new(issuer: GoldenTicketIssuer) -> Self {
        Self { issuer }
    }

    /// Creates a ticket that these voters redeem; at most [`MAX_TICKET_VOTERS`](super::MAX_TICKET_VOTERS) of them are named.
    ///
    /// # Errors
    /// [`JoinTicketError`]. A ticket that was recorded anyway is one that nobody has.
    pub async fn create_ticket(
        &self,
        limits: &JoinTicketLimits,
        voters: &[TicketVoter],
        now: SystemTime,
    ) -> Result<JoinTicket, JoinTicketError> {
        let ticket = JoinTicket::generate(voters).map_err(JoinTicketError::Random)?;
        let created = unix_seconds(now);
        let record = TicketRecord {
            secret_digest: ticket.secret().digest().to_vec(),
            created,
            expires: created.saturating_add(limits.valid_for.as_secs()),
            uses: limits.uses.get().into(),
            role: limits.role.to_string(),
            address: limits.address.map(|address| address.to_string()).unwrap_or_default(),
            is_revoked: false,
            redemptions: Vec::new(),
        };
        let kv = self.issuer.tickets();
        for old in surplus(self.read_all().await.map_err(JoinTicketError::Kv)?, created) {
            let delete = Txn::new()
                .when(Compare::key_unchanged(&old))
                .then(TxnOp::Delete(KeyRange::single_key(old.key)));
            kv.txn(delete).await.map_err(JoinTicketError::Kv)?;
        }
        kv.put(record_key(ticket.id()).as_bytes(), &record.encode_to_vec())
            .await
            .map_err(JoinTicketError::Kv)?;
        Ok(ticket)
    }

    /// All tickets that are known, the oldest first.
    ///
    /// # Errors
    /// [`JoinTicketError::Kv`].
    pub async fn list_tickets(&self) -> Result<Vec<StoredJoinTicket>, JoinTicketError> {
        let read = self.read_all().await.map_err(JoinTicketError::Kv)?;
        let mut tickets: Vec<_> =
            read.iter().filter_map(|(kv, record)| Some(record.to_stored(parse_key(&kv.key)?))).collect();
        tickets.sort_by_key(|ticket| (ticket.created, ticket.id));
        Ok(tickets)
    }

    /// Revokes a ticket, and what those have got by it that have not joined. Returns their URLs. It can be repeated.
    ///
    /// # Errors
    /// [`JoinTicketError`].
    pub async fn revoke_ticket(&self, id: JoinTicketId) -> Result<Vec<PeerUrl>, JoinTicketError> {
        let kv = self.issuer.tickets();
        let record = loop {
            let stored = kv.get(record_key(id).as_bytes()).await.map_err(JoinTicketError::Kv)?;
            let stored = stored.ok_or(JoinTicketError::Unknown { id })?;
            // A damaged one admits nobody, and is gone then.
            let mut record = TicketRecord::decode(&*stored.value).unwrap_or_default();
            record.is_revoked = true;
            let put = Txn::new()
                .when(Compare::key_unchanged(&stored))
                .then(TxnOp::put(record_key(id), record.encode_to_vec()));
            // Another change is a node that was admitted: there are no more than the ticket has uses.
            if kv.txn(put).await.map_err(JoinTicketError::Kv)?.succeeded {
                break record;
            }
        };
        let mut revoked = Vec::new();
        for redemption in record.redemptions {
            if let Some(url) = self.revoke_redemption(&redemption).await.map_err(JoinTicketError::Revoke)? {
                revoked.push(url);
            }
        }
        Ok(revoked)
    }

    /// Takes back what a node has got, unless it has joined. Returns its URL if there was anything.
    async fn revoke_redemption(
        &self,
        redemption: &RedemptionRecord,
    ) -> Result<Option<PeerUrl>, TicketIssueError> {
        let (Ok(node), Ok(url)) = (redemption.node.parse(), redemption.url.parse()) else { return Ok(None) };
        if self.issuer.has_joined(&node).await? {
            return Ok(None);
        }
        let place = self.issuer.load_stored(&url).await?;
        let has_place = place.is_some_and(|place| *place.node_id() == node);
        if has_place {
            match self.issuer.revoke_ticket(&url).await {
                Ok(_) => {}
                // The node has joined in this moment.
                Err(TicketIssueError::MemberExists { .. }) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        // Also without a place: the node has the certificate.
        let ca = self.issuer.running().load_ca().await.map_err(TicketIssueError::Revoke)?;
        let is_new = ca.revoke_serial(&redemption.serial).await.map_err(TicketIssueError::Revoke)?;
        Ok((has_place || is_new).then_some(url))
    }

    /// Revokes an unused golden ticket, or what a node has got by a join ticket, as
    /// [`GoldenTicketIssuer::revoke_ticket`](super::GoldenTicketIssuer::revoke_ticket) does.
    ///
    /// # Errors
    /// [`TicketIssueError`].
    pub async fn revoke_place(&self, url: &PeerUrl) -> Result<bool, TicketIssueError> {
        self.issuer.revoke_ticket(url).await
    }

    /// Refuses a voter whose API has the key of another node's. That it records its API is refused then, too; here it has used
    /// nothing yet.
    ///
    /// # Errors
    /// [`EnrolError`].
    pub async fn check_api_key(&self, key: &[u8; 32], request: &EnrolRequest) -> Result<(), EnrolError> {
        let node = self.node_name(&request.node_certificate)?;
        self.issuer.nodes().check_key(&node, key).await.map(drop).map_err(EnrolError::Record)
    }

    /// Admits a node that calls by this key, and returns the enrolment configuration of its place, which has no private key. The
    /// time is that of the voter.
    ///
    /// # Errors
    /// [`EnrolError`].
    pub async fn redeem_ticket(
        &self,
        key: &str,
        request: &EnrolRequest,
        now: SystemTime,
    ) -> Result<Vec<u8>, EnrolError> {
        if !request.is_proved(key) {
            return Err(EnrolError::Request("its keys have not signed it for the key that calls"));
        }
        let host: IpAddr =
            request.url.host().parse().map_err(|_| EnrolError::Request("the node has no address"))?;
        if !is_unicast(host) {
            return Err(EnrolError::Request("cluster.address is not the address of one machine: correct it"));
        }
        for _ in 0..ATTEMPTS {
            if let Some(admission) = self.try_redeem(key, request, host, now).await?
                && let Some(invited) = self.issuer.invite(&admission).await.map_err(EnrolError::Issue)?
            {
                return Ok(invited.to_config().to_vec());
            }
        }
        Err(EnrolError::Contended)
    }

    /// `None` if another change came in between.
    async fn try_redeem(
        &self,
        key: &str,
        request: &EnrolRequest,
        host: IpAddr,
        now: SystemTime,
    ) -> Result<Option<Admission>, EnrolError> {
        let (id, url) = (request.ticket, &request.url);
        let (stored, mut record) = self.load_record(id, &request.secret, JoinRole::Voter).await?;
        let node = self.node_name(&request.node_certificate)?;
        let is_new = self.check_new(&node, url).await?;
        self.issuer.check_free(url).await.map_err(EnrolError::Issue)?;
        let taken = self.issuer.load_stored(url).await.map_err(EnrolError::Issue)?;
        let is_recorded = record.redemptions.iter().any(|one| one.key == key && one.url == url.as_str());
        match taken {
            // A repeated call, for example after a kill.
            Some(taken) if is_recorded && taken.is_of(&request.node_certificate) => return Ok(Some(taken)),
            taken => record.check_limits(id, host, now).and_then(|()| match taken {
                Some(_) => Err(EnrolError::Taken { url: url.clone() }),
                None => Ok(()),
            })?,
        }
        let (admission, serial) = self.certify(request, &node, host).await?;
        record.redemptions.push(RedemptionRecord {
            key: key.to_owned(),
            node: node.to_string(),
            url: url.to_string(),
            at: unix_seconds(now),
            serial,
        });
        // In one step: the ticket is used exactly if the node has its place, the only one of its keys.
        let place = place_key(url);
        let mut redeem = Txn::new()
            .when(Compare::key_unchanged(&stored))
            .when(Compare::key_absent(place.as_str()))
            .then(TxnOp::put(&*stored.key, record.encode_to_vec()))
            .then(TxnOp::put(place, admission.to_config().to_vec()))
            .then(TxnOp::put(invitation_key(node.as_str()), url.as_str()));
        redeem.when.extend(is_new);
        let done = self.issuer.running().root_kv().txn(redeem).await.map_err(EnrolError::Kv)?;
        Ok(done.succeeded.then_some(admission))
    }

    /// Admits a worker that calls by the key of this name, and returns the name of the node. The time is that of the voter.
    ///
    /// # Errors
    /// [`EnrolError`].
    pub async fn redeem_worker_ticket(
        &self,
        key: &str,
        request: &WorkerRequest,
        now: SystemTime,
    ) -> Result<NodeId, EnrolError> {
        if !request.is_proved() {
            return Err(EnrolError::Request("its certificate is not that of the key that calls"));
        }
        if !is_unicast(request.api.address.ip()) {
            return Err(EnrolError::Request("its address is none of one machine: correct api.address"));
        }
        let node = self.node_name(&request.certificate)?;
        for _ in 0..ATTEMPTS {
            if self.try_redeem_worker(key, request, &node, now).await? {
                return Ok(node);
            }
        }
        Err(EnrolError::Contended)
    }

    /// False if another change came in between.
    async fn try_redeem_worker(
        &self,
        key: &str,
        request: &WorkerRequest,
        node: &NodeId,
        now: SystemTime,
    ) -> Result<bool, EnrolError> {
        let (id, address) = (request.ticket, request.api.address);
        let (stored, mut record) = self.load_record(id, &request.secret, JoinRole::Worker).await?;
        match self.issuer.nodes().find_worker(node).await.map_err(EnrolError::Record)? {
            // A repeated call, for example after a kill. It uses nothing.
            Some(known) if known == request.api => return Ok(true),
            Some(known) => {
                return Err(EnrolError::WorkerElsewhere { node: node.clone(), address: known.address });
            }
            None if record.redemptions.iter().any(|one| one.node == node.as_str()) => {
                return Err(EnrolError::Removed { id, node: node.clone(), role: record.role });
            }
            None => record.check_limits(id, address.ip(), now)?,
        }
        let read_at = self.issuer.nodes().check_key(node, &request.api.key).await;
        let read_at = read_at.map_err(EnrolError::Record)?;
        record.redemptions.push(RedemptionRecord {
            key: key.to_owned(),
            node: node.to_string(),
            url: address.to_string(),
            at: unix_seconds(now),
            serial: Vec::new(),
        });
        // In one step: the ticket is used exactly if the worker is in the cluster.
        let redeem = Txn::new()
            .when(Compare::key_unchanged(&stored))
            .when(Compare::key_absent(root_key(NODES_NAMESPACE, &node_store::record_key(node))))
            .when(Compare::prefix_not_written_since(root_key(NODES_NAMESPACE, API_PREFIX), read_at))
            .then(TxnOp::put(&*stored.key, record.encode_to_vec()));
        let redeem = new_worker(node, &request.certificate, request.api)
            .into_iter()
            .fold(redeem, |redeem, (key, value)| {
                redeem.then(TxnOp::put(root_key(NODES_NAMESPACE, &key), value))
            });
        let done = self.issuer.running().root_kv().txn(redeem).await.map_err(EnrolError::Kv)?;
        Ok(done.succeeded)
    }

    /// The stored ticket of this id and secret for this role, unless it was revoked.
    async fn load_record(
        &self,
        id: JoinTicketId,
        secret: &JoinSecret,
        role: JoinRole,
    ) -> Result<(KeyValue, TicketRecord), EnrolError> {
        let ticket = root_key(TICKETS_NAMESPACE, &record_key(id));
        let stored = self.issuer.running().root_kv().get(ticket.as_bytes()).await.map_err(EnrolError::Kv)?;
        let record = match &stored {
            Some(stored) => TicketRecord::decode(&*stored.value).map_err(|_| EnrolError::Damaged { id })?,
            None => TicketRecord::default(),
        };
        // Compared also with nothing: both are refused alike.
        let (true, Some(stored)) = (secret.matches(&record.secret_digest), stored) else {
            return Err(EnrolError::Unknown { role });
        };
        if record.is_revoked {
            return Err(EnrolError::Revoked { id, role: record.role });
        }
        if record.role != role.to_string() {
            return Err(EnrolError::OtherRole { id, role: record.role, node: role });
        }
        Ok((stored, record))
    }

    fn node_name(&self, certificate: &Certificate) -> Result<NodeId, EnrolError> {
        let node = NodeId::from_key(self.issuer.prefix(), &certificate.public_key());
        node.map_err(|error| EnrolError::Issue(TicketIssueError::NodeName(error)))
    }

    /// Refuses a node that has joined, or is invited at another URL. Returns what has to hold for that until it is invited.
    async fn check_new(&self, node: &NodeId, url: &PeerUrl) -> Result<[Compare; 2], EnrolError> {
        if self.issuer.has_joined(node).await.map_err(EnrolError::Issue)? {
            return Err(EnrolError::Joined { node: node.clone() });
        }
        let key = invitation_key(node.as_str());
        let is_same = match self.issuer.running().root_kv().get(&key).await.map_err(EnrolError::Kv)? {
            None => Compare::key_absent(key),
            Some(invitation) => match str::from_utf8(&invitation.value).ok().and_then(|url| url.parse().ok())
            {
                Some(other) if other != *url => {
                    return Err(EnrolError::Elsewhere { node: node.clone(), url: other });
                }
                // A damaged one invites nobody.
                _ => Compare::key_unchanged(&invitation),
            },
        };
        Ok([is_same, Compare::key_absent(root_key(NODES_NAMESPACE, &node_store::record_key(node)))])
    }

    /// Makes the certificate of a node's member, and returns its serial number too. If it is not used, its key's owner never gets
    /// it.
    async fn certify(
        &self,
        request: &EnrolRequest,
        node: &NodeId,
        host: IpAddr,
    ) -> Result<(Admission, Vec<u8>), EnrolError> {
        let name: crate::consensus::MemberName =
            node.as_str().parse().map_err(|error| EnrolError::Issue(TicketIssueError::MemberName(error)))?;
        let failed = |error| EnrolError::Issue(TicketIssueError::Ca(error));
        let ca = self.issuer.running().load_ca().await.map_err(failed)?;
        let spec = CertificateSpec::for_member(name.clone(), host);
        let key = request.member_certificate.public_key();
        let certificate = ca.certify_key(key, &spec).await.map_err(failed)?;
        let revoked = ca.revocation_list().await.map_err(failed)?;
        let this = Peer::new(name, request.url.clone());
        let admission =
            Admission::new(&request.node_certificate, &certificate, ca.ca_certificate(), &revoked, &this)
                .map_err(EnrolError::Admission)?;
        Ok((admission, certificate.serial_number().to_vec()))
    }

    async fn read_all(&self) -> Result<Vec<(KeyValue, TicketRecord)>, KvError> {
        let read = self.issuer.tickets().range(KeyRange::prefix(PREFIX)).await?;
        let parse = |kv: KeyValue| TicketRecord::decode(&*kv.value).ok().map(|record| (kv, record));
        Ok(read.kvs.into_iter().filter_map(parse).collect())
    }
}

/// The records to delete before another one is added: of those beyond [`MAX_KEPT`], the longest unchanged ones that admit no node
/// any more. Those that only a clock has closed go last, since that of this voter may be wrong.
fn surplus(tickets: Vec<(KeyValue, TicketRecord)>, now: u64) -> Vec<KeyValue> {
    let count = (tickets.len() + 1).saturating_sub(MAX_KEPT);
    let closed = tickets.into_iter().filter_map(|(kv, record)| {
        let is_spent = record.is_revoked || record.is_used_up();
        (is_spent || now >= record.expires).then_some((!is_spent, kv))
    });
    let mut closed: Vec<_> = closed.collect();
    closed.sort_by_key(|(is_expired, kv)| (*is_expired, kv.mod_revision));
    closed.into_iter().take(count).map(|(_, kv)| kv).collect()
}

/// Returns whether an address can be that of one machine. A loopback address is: of all nodes of a cluster on one.
fn is_unicast(address: IpAddr) -> bool {
    let address = address.to_canonical();
    !(address.is_unspecified() || address.is_multicast() || address == Ipv4Addr::BROADCAST)
}

impl TicketRecord {
    fn is_used_up(&self) -> bool {
        self.redemptions.len() as u64 >= u64::from(self.uses)
    }

    fn check_limits(&self, id: JoinTicketId, host: IpAddr, now: SystemTime) -> Result<(), EnrolError> {
        if unix_seconds(now) >= self.expires {
            return Err(EnrolError::Expired { id, role: self.role.clone() });
        }
        if self.is_used_up() {
            return Err(EnrolError::UsedUp { id, role: self.role.clone() });
        }
        match self.address.parse() {
            Ok(address) if address != host => Err(EnrolError::OtherAddress { id, address, host }),
            Err(_) if !self.address.is_empty() => Err(EnrolError::Damaged { id }),
            _ => Ok(()),
        }
    }

    fn to_stored(&self, id: JoinTicketId) -> StoredJoinTicket {
        StoredJoinTicket {
            id,
            created: from_unix(self.created),
            expires: from_unix(self.expires),
            uses: self.uses,
            role: self.role.clone(),
            address: self.address.parse().ok(),
            is_revoked: self.is_revoked,
            redemptions: self.redemptions.iter().map(RedemptionRecord::to_redemption).collect(),
        }
    }
}

impl RedemptionRecord {
    fn to_redemption(&self) -> Redemption {
        Redemption {
            key: self.key.clone(),
            node: self.node.clone(),
            url: self.url.clone(),
            at: from_unix(self.at),
        }
    }
}

fn record_key(id: JoinTicketId) -> String {
    format!("{PREFIX}{id}")
}

fn parse_key(key: &[u8]) -> Option<JoinTicketId> {
    std::str::from_utf8(key).ok()?.strip_prefix(PREFIX)?.parse().ok()
}

/// 0 before 1970, and in a clock that was never set.
fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn from_unix(seconds: u64) -> SystemTime {
    UNIX_EPOCH.checked_add(Duration::from_secs(seconds)).unwrap_or(UNIX_EPOCH)
}

/// Arbitrary bytes as the record of a ticket: never panics.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_arbitrary_record(bytes: &[u8]) {
    if let Ok(record) = TicketRecord::decode(bytes) {
        let id = JoinTicketId::from_bytes([0; 8]);
        let _ = record.to_stored(id);
        let _ = record.check_limits(id, IpAddr::from([192, 0, 2, 1]), UNIX_EPOCH);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::super::admission::JoinKeys;
    use super::super::{NodeRecord, NodeRoles};
    use super::*;
    use crate::consensus::join::INVITATIONS;
    use crate::consensus::kv::{KvStore, RangeResponse, Revision, TxnResponse, WatchStream};
    use crate::consensus::listed_voters::ListedVoters;
    use crate::consensus::memory::MemoryKv;
    use crate::consensus::{ClusterAccess, Member, MemberId};
    use crate::pki::PendingCa;
    use async_trait::async_trait;

    /// A store in which another voter writes a key before a node gets its place, or revokes its ticket before it is invited.
    #[derive(Debug, Default)]
    struct Raced {
        store: MemoryKv,
        write: Mutex<Option<(Vec<u8>, Vec<u8>)>>,
        revoke: Mutex<Option<(JoinTickets, JoinTicketId)>>,
    }

    #[async_trait]
    impl KvStore for Raced {
        async fn range(&self, keys: KeyRange) -> Result<RangeResponse, KvError> {
            self.store.range(keys).await
        }
        async fn txn(&self, txn: Txn) -> Result<TxnResponse, KvError> {
            if txn.then.len() == 3 {
                let write = self.write.lock().unwrap().take();
                if let Some((key, value)) = write {
                    self.store.put(&key, &value).await?;
                }
            } else if has_invitation(&txn) {
                let revoke = self.revoke.lock().unwrap().take();
                if let Some((tickets, id)) = revoke {
                    tickets.revoke_ticket(id).await.unwrap();
                }
            }
            self.store.txn(txn).await
        }
        async fn watch(&self, keys: KeyRange, from: Revision) -> Result<WatchStream, KvError> {
            self.store.watch(keys, from).await
        }
    }

    fn has_invitation(txn: &Txn) -> bool {
        let is_invitation =
            |op: &TxnOp| matches!(op, TxnOp::Put { key, .. } if key.starts_with(INVITATIONS.as_bytes()));
        txn.then.iter().any(is_invitation)
    }

    fn tickets_in(root: Arc<dyn KvStore>) -> JoinTickets {
        let this = Member::new(MemberId(1), None, Vec::new(), false);
        let access = ClusterAccess::new(this, root, Arc::<ListedVoters>::default());
        JoinTickets::new(GoldenTicketIssuer::new(access, "node-").unwrap())
    }

    /// The tickets of a cluster, a request for one of nine uses, and its node.
    async fn requested_ticket() -> (Arc<Raced>, JoinTickets, EnrolRequest, NodeId) {
        let store = Arc::new(Raced::default());
        PendingCa::generate().unwrap().save_to(store.clone()).await.unwrap();
        let tickets = tickets_in(store.clone());
        let limits = JoinTicketLimits { uses: 9.try_into().unwrap(), ..JoinTicketLimits::default() };
        let ticket = tickets.create_ticket(&limits, &[], UNIX_EPOCH).await.unwrap();
        let keys = JoinKeys::generate("node-").unwrap();
        let node = NodeId::from_key("node-", &keys.node.public_key()).unwrap();
        let mut request = EnrolRequest {
            ticket: ticket.id(),
            secret: ticket.secret().clone(),
            url: "https://192.0.2.2:7834".parse().unwrap(),
            node_certificate: keys.node_certificate.clone(),
            member_certificate: keys.node_certificate.clone(),
            node_signature: Vec::new(),
            member_signature: Vec::new(),
        };
        request.sign("a", &keys.node, &keys.node);
        (store, tickets, request, node)
    }

    #[tokio::test]
    async fn a_node_that_another_voter_admits_or_that_joins_in_this_moment_uses_nothing() {
        let (store, tickets, request, node) = requested_ticket().await;
        let record = NodeRecord {
            certificate: request.node_certificate.clone(),
            former_unlock_key: None,
            address: None,
            roles: NodeRoles::empty(),
        };
        let invitation = invitation_key(node.as_str());
        let joined = root_key(NODES_NAMESPACE, &node_store::record_key(&node)).into_bytes();
        for (key, value, expected) in [
            (invitation, b"https://192.0.2.3:7834".to_vec(), "was admitted at https://192.0.2.3:7834"),
            (joined, record.to_bytes(), "is in the cluster already"),
        ] {
            *store.write.lock().unwrap() = Some((key.clone(), value));
            let refused = tickets.redeem_ticket("a", &request, UNIX_EPOCH).await.unwrap_err();
            assert!(refused.to_string().contains(expected), "{refused}");
            store.store.delete(KeyRange::single_key(key)).await.unwrap();
        }
        assert_eq!(tickets.list_tickets().await.unwrap()[0].redemptions, []);
        tickets.redeem_ticket("a", &request, UNIX_EPOCH).await.unwrap();
        assert_eq!(tickets.list_tickets().await.unwrap()[0].redemptions.len(), 1);
    }

    #[tokio::test]
    async fn a_ticket_that_is_revoked_while_it_is_redeemed_leaves_no_place_and_no_invitation() {
        let (store, tickets, request, _) = requested_ticket().await;
        let other = tickets_in(Arc::new(store.store.clone()));
        *store.revoke.lock().unwrap() = Some((other, request.ticket));
        let refused = tickets.redeem_ticket("a", &request, UNIX_EPOCH).await.unwrap_err();
        assert!(matches!(refused, EnrolError::Revoked { .. }), "{refused}");
        for left in [INVITATIONS.to_owned(), place_key(&request.url)] {
            assert_eq!(store.range(KeyRange::prefix(left)).await.unwrap().kvs, []);
        }
    }

    fn record(uses: u32, redemptions: usize, expires: u64) -> TicketRecord {
        let redemptions = vec![RedemptionRecord::default(); redemptions];
        TicketRecord { uses, redemptions, expires, ..TicketRecord::default() }
    }

    #[test]
    fn records_of_closed_tickets_go_beyond_a_number_and_none_by_a_clock_alone() {
        let revoked = TicketRecord { is_revoked: true, ..record(2, 1, 100) };
        let records = [record(1, 0, 10), record(1, 1, 100), record(2, 1, 100), revoked, record(1, 1, 100)];
        let tickets = |count: usize| -> Vec<_> {
            let all = records.iter().cloned().chain(std::iter::repeat(record(1, 0, 100))).take(count);
            let kv = |at: usize| KeyValue::new(format!("{at}"), "", Revision(at as i64));
            all.enumerate().map(|(at, record)| (kv(at), record)).collect()
        };
        let deleted = |count, now| -> Vec<_> {
            surplus(tickets(count), now).into_iter().map(|kv| String::from_utf8(kv.key).unwrap()).collect()
        };
        assert_eq!(deleted(MAX_KEPT - 1, u64::MAX), [""; 0], "a wrong clock deletes nothing");
        assert_eq!(deleted(MAX_KEPT, 50), ["1"], "used up, and the longest unchanged one");
        assert_eq!(deleted(MAX_KEPT + 9, 50), ["1", "3", "4", "0"], "the expired one last, and no open one");
    }

    #[test]
    fn the_record_of_a_ticket_with_all_its_uses_fits_into_etcd() {
        let redemption = RedemptionRecord {
            key: "k".repeat(64),
            node: "n".repeat(64),
            url: "u".repeat(64),
            at: u64::MAX,
            serial: vec![0xff; 20],
        };
        let redemptions = vec![redemption; MAX_TICKET_USES.into()];
        let record = TicketRecord { redemptions, ..record(0, 0, u64::MAX) };
        assert!(record.encoded_len() < 1024 * 1024, "{} bytes", record.encoded_len());
    }

    #[test]
    fn an_address_of_no_single_machine_is_none_of_a_member() {
        for none in ["0.0.0.0", "255.255.255.255", "224.0.0.1", "::", "ff02::1", "::ffff:0.0.0.0"] {
            assert!(!is_unicast(none.parse().unwrap()), "{none}");
        }
        for one in ["192.0.2.1", "127.0.0.1", "2001:db8::1", "::1"] {
            assert!(is_unicast(one.parse().unwrap()), "{one}");
        }
    }
}

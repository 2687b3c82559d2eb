//! Issues golden tickets.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use nodekeel_localstorage::pki::{CertificateTemplate, CommonName, PkiError, PrivateKey};
use thiserror::Error;

use super::admission::Admission;
use super::{GoldenTicket, InvalidNodeId, NodeId, NodeStore, NodeStoreError, TicketError, TicketParts};
use crate::consensus::join::{INVITATIONS, invitation_key};
#[cfg(feature = "etcd")]
use crate::consensus::kv::KeyValue;
use crate::consensus::kv::{Compare, KeyRange, KvError, KvStore, Txn, TxnOp};
use crate::consensus::{ClusterAccess, ClusterMembers, InvalidName, MembershipError, Peer, PeerUrl};
use crate::pki::{CaError, CertificateSpec};

/// The namespace of unused tickets: module and namespace.
pub(super) const TICKETS_NAMESPACE: (&str, &str) = ("cluster", "tickets");

/// Key prefix of the tickets in their namespace.
const TICKETS_PREFIX: &str = "/golden/";

/// Key prefix, in the same namespace, of the nodes that are being replaced, by the URL of the successor. Such a key is
/// deleted with the successor's ticket.
const REPLACED_PREFIX: &str = "/replaces/";

/// Issues this cluster's golden tickets: one for each peer URL, however often it is requested.
///
/// An issued ticket is stored in the cluster, with its private keys, until its node has joined. A repeated
/// request for the same URL, also after a call that was killed, returns a ticket of the same node. The leader adds the node to the list
/// of members when it is there.
///
/// # Contract
/// - [`issue_ticket`](Self::issue_ticket) for a peer URL returns a ticket of the same node until that node
///   has joined.
/// - Any number of tickets may be unused. Their nodes join one after the other.
#[derive(Clone)]
pub struct GoldenTicketIssuer {
    running: ClusterAccess,
    tickets: Arc<dyn KvStore>,
    nodes: NodeStore,
    prefix: String,
}

/// A failure to issue or revoke a ticket.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TicketIssueError {
    /// The host of the URL is a name: tickets are for IP addresses.
    #[error("can't issue a ticket for peer URL {url}: it has a host name; use an IP address")]
    NoAddress {
        /// The URL given.
        url: PeerUrl,
    },
    /// A voting member is already at this URL.
    #[error(
        "a voting member is already at {url}, so its ticket is used: use another address, or remove that \
         member first"
    )]
    MemberExists {
        /// The URL given.
        url: PeerUrl,
    },
    /// A node has redeemed a join ticket for this URL, and has not joined yet.
    #[error(
        "a node has redeemed a join ticket for {url}, and has not joined yet: use another address, or type `{}`",
        .url.revoke_command()
    )]
    Redeemed {
        /// The URL.
        url: PeerUrl,
    },
    /// The configured prefix makes an invalid node name.
    #[error("the configured prefix of node names does not make a valid node name")]
    NodeName(#[source] InvalidNodeId),
    /// The name or URL of a member is invalid.
    #[error("can't parse the name or peer URL of a member of the cluster")]
    MemberName(#[source] InvalidName),
    /// A key or certificate of the node could not be created.
    #[error("can't create the new node's credentials")]
    Credentials(#[source] PkiError),
    /// The cluster's CA could not be loaded, or could not issue a certificate. A retry may help.
    #[error("can't issue the new member's certificate")]
    Ca(#[source] CaError),
    /// The cluster's CA could not be loaded, or could not revoke a certificate. A retry may help.
    #[error("can't revoke the member's certificate")]
    Revoke(#[source] CaError),
    /// The list of members could not be read or changed. If [retryable](MembershipError::is_retryable), a later retry
    /// helps.
    #[error("can't read or change the cluster's list of members")]
    Membership(#[source] MembershipError),
    /// The tickets in the cluster could not be read or written. A retry may help.
    #[error("can't read or write the issued ticket in the cluster's etcd")]
    Kv(#[source] KvError),
    /// The stored ticket is invalid: [revoke](GoldenTicketIssuer::revoke_ticket) it, and issue another.
    #[error(
        "the ticket that the cluster stored for {url} is invalid: type `{}`, and create another",
        .url.revoke_command()
    )]
    StoredTicket {
        /// The URL that it was issued for.
        url: PeerUrl,
        /// The defect.
        source: TicketError,
    },
    /// The parts of a new ticket are inconsistent.
    #[error("can't create the new node's ticket")]
    NewTicket(#[source] TicketError),
    /// The nodes' records could not be read.
    #[error("can't check whether the earlier ticket's node has joined")]
    Record(#[source] NodeStoreError),
}

impl TicketIssueError {
    /// Returns whether the same call may succeed later without any other change.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Ca(error) | Self::Revoke(error) => error.is_retryable(),
            Self::Membership(error) => error.is_retryable(),
            Self::Kv(error) => error.is_retryable(),
            Self::Record(error) => error.is_retryable(),
            _ => false,
        }
    }
}

impl GoldenTicketIssuer {
    /// Issues tickets of the cluster in which this member takes part. Nodes' names start with `prefix`.
    ///
    /// # Errors
    /// [`TicketIssueError::MemberName`], which these namespaces never cause.
    pub fn new(running: ClusterAccess, prefix: impl Into<String>) -> Result<Self, TicketIssueError> {
        Self::with_prefix(running, prefix).map_err(TicketIssueError::MemberName)
    }

    pub(super) fn with_prefix(
        running: ClusterAccess,
        prefix: impl Into<String>,
    ) -> Result<Self, InvalidName> {
        let kv = |(module, namespace)| running.namespaced_kv(module, namespace);
        let (tickets, nodes) = (kv(TICKETS_NAMESPACE)?, NodeStore::new(kv(super::NODES_NAMESPACE)?));
        Ok(Self { running, tickets, nodes, prefix: prefix.into() })
    }

    pub(super) fn running(&self) -> &ClusterAccess {
        &self.running
    }

    pub(super) fn nodes(&self) -> &NodeStore {
        &self.nodes
    }

    pub(super) fn tickets(&self) -> &dyn KvStore {
        &*self.tickets
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Issues a ticket for a node that the others will reach at this URL, and invites its member.
    ///
    /// # Errors
    /// [`TicketIssueError`]. A failed call can be repeated: the next one finds everything that it left.
    pub async fn issue_ticket(&self, url: &PeerUrl) -> Result<GoldenTicket, TicketIssueError> {
        let address: IpAddr =
            url.host().parse().map_err(|_| TicketIssueError::NoAddress { url: url.clone() })?;
        loop {
            self.check_free(url).await?;
            // Stored before its member is invited: a kill in between leaves a ticket that the next call finds.
            let stored = match self.load_stored(url).await? {
                Some(stored) => stored,
                None => self.create_ticket(url, address).await?,
            };
            // The keys of a node that has redeemed a join ticket are its own.
            if !stored.has_keys() {
                return Err(TicketIssueError::Redeemed { url: url.clone() });
            }
            if let Some(invited) = self.invite(&stored).await? {
                return parse_ticket(url, &invited.to_config());
            }
        }
    }

    /// Invites the member of a stored ticket, and returns the ticket with the present members; `None` if the ticket was revoked
    /// or replaced in between.
    pub(super) async fn invite(&self, ticket: &Admission) -> Result<Option<Admission>, TicketIssueError> {
        let (root, url) = (self.running.root_kv(), ticket.url());
        loop {
            // A joining etcd must know exactly the present members.
            let members = list_members(&*self.running.cluster_members()).await?;
            let peers = Peer::others_of(&members, url).map_err(TicketIssueError::MemberName)?;
            let stored = root.get(place_key(url).as_bytes()).await.map_err(TicketIssueError::Kv)?;
            let Some(stored) = stored else { return Ok(None) };
            let mut place = parse_stored(url, &stored.value)?;
            if place.node_id() != ticket.node_id() {
                return Ok(None);
            }
            place.set_peers(&peers);
            // Both are written, also unchanged: a deletion in this moment finds that out, and deletes both.
            let invite = Txn::new()
                .when(Compare::key_unchanged(&stored))
                .then(TxnOp::put(stored.key, place.to_config().to_vec()))
                .then(TxnOp::put(invitation_key(place.node_id().as_str()), url.as_str()));
            if root.txn(invite).await.map_err(TicketIssueError::Kv)?.succeeded {
                return Ok(Some(place));
            }
        }
    }

    /// Returns whether a node has a record, and so has joined.
    pub(super) async fn has_joined(&self, node: &NodeId) -> Result<bool, TicketIssueError> {
        let record = self.nodes.load_record(node).await.map_err(TicketIssueError::Record)?;
        Ok(record.is_some())
    }

    /// Refuses a URL at which there is a voter.
    pub(super) async fn check_free(&self, url: &PeerUrl) -> Result<(), TicketIssueError> {
        let members = list_members(&*self.running.cluster_members()).await?;
        if members.iter().any(|member| !member.is_learner && member.has_peer_url(url)) {
            return Err(TicketIssueError::MemberExists { url: url.clone() });
        }
        Ok(())
    }

    /// Revokes an unused ticket: removes its learner, if it has started to join, and revokes its certificate. Returns whether a
    /// ticket or learner existed.
    ///
    /// # Errors
    /// [`TicketIssueError`]; the call can be repeated. [`TicketIssueError::MemberExists`] if the node takes
    /// part already.
    pub async fn revoke_ticket(&self, url: &PeerUrl) -> Result<bool, TicketIssueError> {
        let members = self.running.cluster_members();
        let listed = list_members(&*members).await?;
        let at_url: Vec<_> = listed.into_iter().filter(|member| member.has_peer_url(url)).collect();
        if at_url.iter().any(|member| !member.is_learner) {
            return Err(TicketIssueError::MemberExists { url: url.clone() });
        }
        // The invitation and the learner first: without them, a host with this ticket is not admitted any more.
        let withdraw = delete_all(self.list_invitations(url).await?);
        self.running.root_kv().txn(withdraw).await.map_err(TicketIssueError::Kv)?;
        let has_learner = !at_url.is_empty();
        for learner in at_url {
            members.remove_member(learner.id).await.map_err(TicketIssueError::Membership)?;
        }
        // The ticket goes last: it names the certificate that a repeated call has to revoke.
        let stored = self.load_stored(url).await;
        // A damaged ticket does not name its certificate.
        let is_damaged = matches!(stored, Err(TicketIssueError::StoredTicket { .. }));
        let stored = if is_damaged { None } else { stored? };
        if let Some(ticket) = &stored {
            let cluster_ca = self.running.load_ca().await.map_err(TicketIssueError::Revoke)?;
            cluster_ca.revoke_name(ticket.node_id().as_str()).await.map_err(TicketIssueError::Revoke)?;
        }
        self.delete_ticket(url).await?;
        Ok(has_learner || is_damaged || stored.is_some())
    }

    /// Deletes the ticket of a node that takes part, with its invitation, and whom it replaces.
    pub(crate) async fn delete_ticket(&self, url: &PeerUrl) -> Result<(), TicketIssueError> {
        let (root, place) = (self.running.root_kv(), place_key(url));
        loop {
            // In one step: otherwise its node could be invited again in between.
            let stored = root.get(place.as_bytes()).await.map_err(TicketIssueError::Kv)?;
            let is_same = stored.map_or_else(
                || Compare::key_absent(place.as_str()),
                |stored| Compare::key_unchanged(&stored),
            );
            let mut keys = self.list_invitations(url).await?;
            let replaced = root_key(TICKETS_NAMESPACE, &replaced_key(url));
            keys.extend([place.clone().into_bytes(), replaced.into_bytes()]);
            let delete = delete_all(keys).when(is_same);
            if root.txn(delete).await.map_err(TicketIssueError::Kv)?.succeeded {
                return Ok(());
            }
        }
    }

    /// The keys of the invitations of all members at a URL. A damaged ticket names no member, but has a URL.
    async fn list_invitations(&self, url: &PeerUrl) -> Result<Vec<Vec<u8>>, TicketIssueError> {
        let invited = self.running.root_kv().range(KeyRange::prefix(INVITATIONS)).await;
        let at_url = invited.map_err(TicketIssueError::Kv)?.kvs.into_iter();
        Ok(at_url.filter(|kv| kv.value == url.as_str().as_bytes()).map(|kv| kv.key).collect())
    }

    /// Deletes the invitation of a node: the leader does not add it to the list of members any more.
    pub(super) async fn withdraw_invitation_of(&self, node: &NodeId) -> Result<(), TicketIssueError> {
        let key = KeyRange::single_key(invitation_key(node.as_str()));
        self.running.root_kv().delete(key).await.map(drop).map_err(TicketIssueError::Kv)
    }

    /// Deletes the tickets of a node, at whatever URL, and its invitation with them. Damaged tickets stay: they name no node.
    pub(super) async fn delete_tickets_of(&self, node: &NodeId) -> Result<(), TicketIssueError> {
        for url in self.list_tickets_of(node).await? {
            // Whom it replaces stays recorded: its successor may get the same URL.
            let delete = delete_all([place_key(&url).into_bytes(), invitation_key(node.as_str())]);
            self.running.root_kv().txn(delete).await.map_err(TicketIssueError::Kv)?;
        }
        Ok(())
    }

    /// Records that a node is being replaced by the one at this URL, as long as that one has not joined.
    pub(super) async fn record_replacement(
        &self,
        node: &NodeId,
        successor: &PeerUrl,
    ) -> Result<(), TicketIssueError> {
        let put = self.tickets.put(replaced_key(successor).as_bytes(), node.as_str().as_bytes()).await;
        put.map(drop).map_err(TicketIssueError::Kv)
    }

    /// The URL of the successor of a node that is being replaced.
    pub(super) async fn find_replacement(&self, node: &NodeId) -> Result<Option<PeerUrl>, TicketIssueError> {
        let all =
            self.tickets.range(KeyRange::prefix(REPLACED_PREFIX)).await.map_err(TicketIssueError::Kv)?;
        let of_node = all.kvs.into_iter().find(|kv| kv.value == node.as_str().as_bytes());
        let host = of_node.and_then(|kv| String::from_utf8(kv.key).ok());
        Ok(host.and_then(|key| format!("https://{}", key.strip_prefix(REPLACED_PREFIX)?).parse().ok()))
    }

    /// Forgets that a node is being replaced.
    pub(super) async fn forget_replacement(&self, node: &NodeId) -> Result<(), TicketIssueError> {
        let Some(successor) = self.find_replacement(node).await? else { return Ok(()) };
        let key = KeyRange::single_key(replaced_key(&successor));
        self.tickets.delete(key).await.map(drop).map_err(TicketIssueError::Kv)
    }

    /// The URLs of the tickets of a node that are still stored.
    pub(super) async fn list_tickets_of(&self, node: &NodeId) -> Result<Vec<PeerUrl>, TicketIssueError> {
        let stored = self.tickets.range(KeyRange::prefix(TICKETS_PREFIX)).await;
        let kvs = stored.map_err(TicketIssueError::Kv)?.kvs;
        let tickets = kvs.iter().filter_map(|kv| Admission::from_config(&kv.value).ok());
        Ok(tickets.filter(|ticket| ticket.node_id() == node).map(|ticket| ticket.url().clone()).collect())
    }

    /// The ticket issued for this URL before, unless its node has joined.
    pub(super) async fn load_stored(&self, url: &PeerUrl) -> Result<Option<Admission>, TicketIssueError> {
        let stored = self.tickets.get(ticket_key(url).as_bytes()).await.map_err(TicketIssueError::Kv)?;
        let Some(stored) = stored else { return Ok(None) };
        let ticket = parse_stored(url, &stored.value)?;
        // A record shows that the node has joined, and was killed before it could delete its ticket.
        if self.has_joined(ticket.node_id()).await? {
            self.delete_ticket(url).await?;
            return Ok(None);
        }
        Ok(Some(ticket))
    }

    /// Creates a ticket; if another call creates one at the same time, returns that one.
    async fn create_ticket(&self, url: &PeerUrl, address: IpAddr) -> Result<Admission, TicketIssueError> {
        let node_key = PrivateKey::generate().map_err(TicketIssueError::Credentials)?;
        let node =
            NodeId::from_key(&self.prefix, &node_key.public_key()).map_err(TicketIssueError::NodeName)?;
        let mut template = CertificateTemplate::default();
        template.common_name = CommonName::Exact(node.to_string());
        let node_certificate = template.self_sign(&node_key).map_err(TicketIssueError::Credentials)?;
        let name: crate::consensus::MemberName =
            node.as_str().parse().map_err(TicketIssueError::MemberName)?;
        let cluster_ca = self.running.load_ca().await.map_err(TicketIssueError::Ca)?;
        let spec = CertificateSpec::for_member(name.clone(), address);
        let member = cluster_ca.issue_credentials(&spec).await.map_err(TicketIssueError::Ca)?;
        let revoked = cluster_ca.revocation_list().await.map_err(TicketIssueError::Ca)?;
        let this = Peer::new(name, url.clone());
        let parts = TicketParts {
            node_key,
            node_certificate,
            member_credentials: member,
            revocation_list: revoked,
            peers: Vec::new(),
            new_member: this,
        };
        let ticket = GoldenTicket::from_parts(parts).map_err(TicketIssueError::NewTicket)?;
        // The first call wins. The other's ticket is never handed out, so its certificate stays without a
        // holder.
        let keep = Txn::new()
            .when(Compare::key_absent(ticket_key(url)))
            .then(TxnOp::put(ticket_key(url), ticket.to_config().to_vec()))
            .or_else(TxnOp::get(ticket_key(url)));
        let done = self.tickets.txn(keep).await.map_err(TicketIssueError::Kv)?;
        match done.into_first() {
            None => parse_stored(url, &ticket.to_config()),
            Some(first) => parse_stored(url, &first.value),
        }
    }
}

impl fmt::Debug for GoldenTicketIssuer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GoldenTicketIssuer").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

async fn list_members(
    members: &dyn ClusterMembers,
) -> Result<Vec<crate::consensus::Member>, TicketIssueError> {
    members.list_members().await.map_err(TicketIssueError::Membership)
}

/// A stored ticket, which may be without keys.
fn parse_stored(url: &PeerUrl, config: &[u8]) -> Result<Admission, TicketIssueError> {
    let invalid = |source| TicketIssueError::StoredTicket { url: url.clone(), source };
    Admission::from_config(config).map_err(invalid)
}

fn parse_ticket(url: &PeerUrl, config: &[u8]) -> Result<GoldenTicket, TicketIssueError> {
    let invalid = |source| TicketIssueError::StoredTicket { url: url.clone(), source };
    GoldenTicket::from_config(config).map_err(invalid)
}

/// The full key, in the root store, of a namespace's key.
pub(super) fn root_key((module, namespace): (&str, &str), key: &str) -> String {
    format!("{module}:{namespace}{key}")
}

/// The full keys, in the root store, of the unused tickets.
#[cfg(feature = "etcd")]
pub(crate) fn unused_tickets() -> KeyRange {
    KeyRange::prefix(root_key(TICKETS_NAMESPACE, TICKETS_PREFIX))
}

/// The URL of a stored ticket if its certificate does not have the name that peer ports require. No node joins by a damaged one.
#[cfg(feature = "etcd")]
pub(crate) fn find_unnamed_ticket(stored: &KeyValue, name: &str) -> Option<PeerUrl> {
    let ticket = Admission::from_config(&stored.value).ok()?;
    (!ticket.has_peer_name(name)).then(|| ticket.url().clone())
}

/// The full key of the ticket for a URL.
pub(super) fn place_key(url: &PeerUrl) -> String {
    root_key(TICKETS_NAMESPACE, &ticket_key(url))
}

fn ticket_key(url: &PeerUrl) -> String {
    format!("{TICKETS_PREFIX}{}", url.as_str().trim_start_matches("https://"))
}

fn delete_all(keys: impl IntoIterator<Item = Vec<u8>>) -> Txn {
    keys.into_iter().map(|key| TxnOp::Delete(KeyRange::single_key(key))).fold(Txn::new(), Txn::then)
}

fn replaced_key(successor: &PeerUrl) -> String {
    format!("{REPLACED_PREFIX}{}", successor.as_str().trim_start_matches("https://"))
}

//! Golden tickets as the cluster makes them.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use nodekeel_localstorage::pki::{CommonName, PkiError, PrivateKey, Template};
use thiserror::Error;

use super::{GoldenTicket, InvalidNodeId, NodeId, NodeStore, RecordError, TicketError, TicketParts};
use crate::consensus::kv::{Compare, KvError, KvStore, Op, Txn};
use crate::consensus::{InvalidName, Membership, MembershipError, NewMember, Peer, PeerUrl, Running};
use crate::pki::{Authority, AuthorityError, Leaf};

/// Where the tickets are that nobody has used yet: module and space.
const TICKETS: (&str, &str) = ("cluster", "tickets");

/// Golden tickets as this cluster makes them: one for each place, however often it is asked for.
///
/// A ticket that was made is kept in the cluster, with its keys, until the node has joined: whoever asks for the same
/// place again, also after a call that was killed, gets the same node's, and the cluster has one learner for it. The
/// authority's own key lies beside it.
///
/// # Contract
/// - The place is a peer URL. [`issue`](Self::issue) for it gives a ticket of the same node until that node has joined.
/// - Of all tickets that are not used, one is at a time: the cluster takes one learner.
#[derive(Clone)]
pub struct GoldenTickets {
    running: Running,
    tickets: Arc<dyn KvStore>,
    nodes: NodeStore,
    prefix: String,
}

/// Why there is no ticket.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum IssueError {
    /// The host of the URL is no address: tickets are for addresses.
    #[error("{url} is not at an address")]
    NoAddress {
        /// The URL given.
        url: PeerUrl,
    },
    /// A member that takes part is there already.
    #[error("there is a member at {url}")]
    Taken {
        /// The URL given.
        url: PeerUrl,
    },
    /// The node's name is none, with the prefix that was configured.
    #[error("name the node")]
    Name(#[source] InvalidNodeId),
    /// A member's name or URL is none.
    #[error("name the member")]
    Member(#[source] InvalidName),
    /// No key or certificate of the node could be made.
    #[error("make the node's credentials")]
    Credentials(#[source] PkiError),
    /// The cluster's authority could not be asked, or issue a certificate. A retry may help.
    #[error("have the member's certificate issued")]
    Authority(#[source] AuthorityError),
    /// The list of members could not be read or changed. Where it is [retryable](MembershipError::is_retryable), as
    /// while there is another learner, a retry helps later.
    #[error("add the member")]
    Membership(#[source] MembershipError),
    /// The tickets in the cluster could not be read or written. A retry may help.
    #[error("keep the ticket")]
    Kv(#[source] KvError),
    /// What is kept is no ticket: [withdraw](GoldenTickets::withdraw) it.
    #[error("read the ticket that was made before")]
    Kept(#[source] TicketError),
    /// The nodes' records could not be read.
    #[error("look for the node's record")]
    Record(#[source] RecordError),
}

impl GoldenTickets {
    /// Of the cluster in which this member takes part. Nodes' names begin with `prefix`.
    ///
    /// # Errors
    /// [`IssueError::Member`], which these namespaces do not give.
    pub fn new(running: Running, prefix: impl Into<String>) -> Result<Self, IssueError> {
        let kv = |(module, space)| running.kv(module, space).map_err(IssueError::Member);
        let (tickets, nodes) = (kv(TICKETS)?, NodeStore::new(kv(super::NODES)?));
        Ok(Self { running, tickets, nodes, prefix: prefix.into() })
    }

    /// A ticket for a node that the others will reach at this URL, whose learner the cluster expects from now on.
    ///
    /// # Errors
    /// [`IssueError`]. A call that failed can be made again, and leaves nothing that the next one doesn't find.
    pub async fn issue(&self, url: &PeerUrl) -> Result<GoldenTicket, IssueError> {
        let address: IpAddr = url.host().parse().map_err(|_| IssueError::NoAddress { url: url.clone() })?;
        let members = self.running.members();
        let is_taken = |member: &crate::consensus::Member| !member.is_learner && is_at(member, url);
        if list(&*members).await?.iter().any(is_taken) {
            return Err(IssueError::Taken { url: url.clone() });
        }
        let ticket = match self.kept(url).await? {
            Some(ticket) => ticket,
            None => self.make(url, address).await?,
        };
        let this = NewMember::new(ticket.this().name.clone(), url.clone());
        members.add_learner(&this).await.map_err(IssueError::Membership)?;
        // Whoever joins has to know exactly those that are members then.
        let peers = peers(&list(&*members).await?, url)?;
        if peers == ticket.peers() {
            return Ok(ticket);
        }
        let ticket = ticket.with_peers(peers).map_err(IssueError::Kept)?;
        let config = ticket.to_config();
        self.tickets.put(key(url).as_bytes(), &config).await.map_err(IssueError::Kv)?;
        Ok(ticket)
    }

    /// Takes a ticket back that nobody has used: its learner is removed, and its certificate revoked. Tells whether there
    /// was anything of it.
    ///
    /// # Errors
    /// [`IssueError`]; the call can be made again. [`IssueError::Taken`] where the node takes part already.
    pub async fn withdraw(&self, url: &PeerUrl) -> Result<bool, IssueError> {
        let members = self.running.members();
        let listed = list(&*members).await?;
        let there: Vec<_> = listed.into_iter().filter(|member| is_at(member, url)).collect();
        if there.iter().any(|member| !member.is_learner) {
            return Err(IssueError::Taken { url: url.clone() });
        }
        let has_learner = !there.is_empty();
        for learner in there {
            members.remove(learner.id).await.map_err(IssueError::Membership)?;
        }
        let kept = self.kept(url).await;
        // Then it does not tell whose certificate it had.
        let is_damaged = matches!(kept, Err(IssueError::Kept(_)));
        let kept = if is_damaged { None } else { kept? };
        if let Some(ticket) = &kept {
            let authority = Authority::load(self.running.root()).await.map_err(IssueError::Authority)?;
            authority.revoke(ticket.this().name.as_str()).await.map_err(IssueError::Authority)?;
        }
        self.forget(url).await?;
        Ok(has_learner || is_damaged || kept.is_some())
    }

    /// The node at this URL takes part: its ticket is of no use any more.
    pub(crate) async fn forget(&self, url: &PeerUrl) -> Result<(), IssueError> {
        let keys = crate::consensus::kv::KeyRange::key(key(url));
        self.tickets.delete(keys).await.map(drop).map_err(IssueError::Kv)
    }

    /// The ticket for this place that was made before, unless its node has joined.
    async fn kept(&self, url: &PeerUrl) -> Result<Option<GoldenTicket>, IssueError> {
        let kept = self.tickets.get(key(url).as_bytes()).await.map_err(IssueError::Kv)?;
        let Some(kept) = kept else { return Ok(None) };
        let ticket = GoldenTicket::parse(&kept.value).map_err(IssueError::Kept)?;
        match self.nodes.load(ticket.node()).await.map_err(IssueError::Record)? {
            None => Ok(Some(ticket)),
            Some(_) => {
                self.forget(url).await?;
                Ok(None)
            }
        }
    }

    /// A new one, unless somebody else makes one at the same time: then that one.
    async fn make(&self, url: &PeerUrl, address: IpAddr) -> Result<GoldenTicket, IssueError> {
        let node_key = PrivateKey::generate().map_err(IssueError::Credentials)?;
        let node = NodeId::new(&self.prefix, &node_key.public()).map_err(IssueError::Name)?;
        let mut template = Template::default();
        template.common_name = CommonName::Is(node.to_string());
        let node_certificate = template.self_sign(&node_key).map_err(IssueError::Credentials)?;
        let name: crate::consensus::MemberName = node.as_str().parse().map_err(IssueError::Member)?;
        let authority = Authority::load(self.running.root()).await.map_err(IssueError::Authority)?;
        let leaf = Leaf::member(name.clone(), address);
        let member = authority.issue(&leaf).await.map_err(IssueError::Authority)?;
        let revoked = authority.revoked().await.map_err(IssueError::Authority)?;
        let this = Peer::new(name, url.clone());
        let parts = TicketParts { node_key, node_certificate, member, revoked, peers: Vec::new(), this };
        let ticket = GoldenTicket::try_new(parts).map_err(IssueError::Kept)?;
        let keep = Txn::new()
            .when(Compare::absent(key(url)))
            .then(Op::put(key(url), ticket.to_config().to_vec()))
            .otherwise(Op::get(key(url)));
        let done = self.tickets.txn(keep).await.map_err(IssueError::Kv)?;
        match done.read().next() {
            None => Ok(ticket),
            Some(first) => GoldenTicket::parse(&first.value).map_err(IssueError::Kept),
        }
    }
}

impl fmt::Debug for GoldenTickets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GoldenTickets").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

async fn list(members: &dyn Membership) -> Result<Vec<crate::consensus::Member>, IssueError> {
    members.list().await.map_err(IssueError::Membership)
}

fn is_at(member: &crate::consensus::Member, url: &PeerUrl) -> bool {
    member.peer_urls.iter().any(|one| one == url.as_str())
}

/// All but the one at this URL. Members that have never started have no name, and there is at most one learner.
fn peers(members: &[crate::consensus::Member], but: &PeerUrl) -> Result<Vec<Peer>, IssueError> {
    let others = members.iter().filter(|member| !is_at(member, but));
    let named = others.flat_map(|member| {
        let name = member.name.clone().unwrap_or_default();
        member.peer_urls.iter().map(move |url| (name.clone(), url))
    });
    let peer = |(name, url): (String, &String)| Ok(Peer::new(name.parse()?, url.parse()?));
    named.map(peer).collect::<Result<_, _>>().map_err(IssueError::Member)
}

fn key(url: &PeerUrl) -> String {
    format!("/golden/{}", url.as_str().trim_start_matches("https://"))
}

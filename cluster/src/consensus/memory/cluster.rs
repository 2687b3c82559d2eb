//! Clusters in memory, and the rules for their members.

use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

use super::kv::MemoryKv;
use crate::consensus::{
    ClusterMembers, DEFAULT_PEER_PORT, Member, MemberId, MemberName, MembershipError, NewMember, Peer,
    PeerUrl,
};

/// A network of members in memory: members on one network can join each other's clusters. Clones share the
/// network.
#[derive(Clone, Debug, Default)]
pub struct MemoryNetwork(Arc<Mutex<Vec<Arc<MemoryCluster>>>>);

impl MemoryNetwork {
    /// An empty network.
    pub fn new() -> MemoryNetwork {
        MemoryNetwork::default()
    }

    /// The number of clusters that were ever created on it.
    pub fn created_count(&self) -> usize {
        self.lock().len()
    }

    pub(super) fn create_cluster(&self, name: &MemberName, url: PeerUrl) -> (Arc<MemoryCluster>, MemberId) {
        let first = MemberId(1);
        let member = Member::new(first, Some(name.to_string()), vec![url.to_string()], false);
        let entry = MemberEntry { member, has_started: true, removed: CancellationToken::new() };
        let cluster = Arc::new(MemoryCluster { kv: MemoryKv::new(), entries: Mutex::new(vec![entry]) });
        self.lock().push(Arc::clone(&cluster));
        (cluster, first)
    }

    /// The cluster in which one of these is a member.
    pub(super) fn find_cluster(&self, peers: &[Peer]) -> Option<Arc<MemoryCluster>> {
        let has = |cluster: &MemoryCluster| {
            let entries = cluster.lock();
            peers.iter().any(|peer| entries.iter().any(|entry| entry.has_peer_url(peer.url.as_str())))
        };
        self.lock().iter().find(|cluster| has(cluster)).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<MemoryCluster>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A store, and the members that share it.
pub(super) struct MemoryCluster {
    pub(super) kv: MemoryKv,
    entries: Mutex<Vec<MemberEntry>>,
}

struct MemberEntry {
    member: Member,
    has_started: bool,
    removed: CancellationToken,
}

impl MemberEntry {
    fn has_peer_url(&self, url: &str) -> bool {
        self.member.peer_urls.iter().any(|known| known == url)
    }

    /// Returns whether it is at this address, with any port.
    fn has_address(&self, address: IpAddr) -> bool {
        let host = address.to_string();
        let is_there = |url: &String| url.parse::<PeerUrl>().is_ok_and(|url| url.host() == host);
        self.member.peer_urls.iter().any(is_there)
    }
}

impl MemoryCluster {
    fn lock(&self) -> MutexGuard<'_, Vec<MemberEntry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The members, and the URL of the one that was added at this address.
    pub(super) fn members_at(&self, address: IpAddr) -> (PeerUrl, Vec<Member>) {
        let entries = self.lock();
        let added = entries.iter().find(|entry| entry.has_address(address));
        let url = added.and_then(|entry| entry.member.peer_urls.first()?.parse().ok());
        let members = entries.iter().map(|entry| entry.member.clone()).collect();
        (url.unwrap_or_else(|| PeerUrl::new(address, DEFAULT_PEER_PORT)), members)
    }

    /// Starts a member: in memory it is in sync at once, so it is promoted, and it is listed at its present
    /// address. `None` if it was removed; otherwise returns a token that is canceled when it is removed.
    pub(super) fn start_member(
        &self,
        id: MemberId,
        name: &MemberName,
        address: IpAddr,
    ) -> Option<(Member, CancellationToken)> {
        let mut entries = self.lock();
        let entry = entries.iter_mut().find(|entry| entry.member.id == id)?;
        if !entry.has_address(address) {
            entry.member.peer_urls = vec![PeerUrl::new(address, DEFAULT_PEER_PORT).to_string()];
        }
        entry.has_started = true;
        entry.member.is_learner = false;
        entry.member.name = Some(name.to_string());
        Some((entry.member.clone(), entry.removed.clone()))
    }
}

/// Without the values, which may be secrets.
impl fmt::Debug for MemoryCluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryCluster").field("members", &self.lock().len()).finish_non_exhaustive()
    }
}

/// The list of members, for the run of one of them.
#[derive(Debug)]
pub(super) struct MemoryMembers {
    pub(super) cluster: Arc<MemoryCluster>,
    pub(super) stopped: CancellationToken,
}

impl MemoryMembers {
    fn entries(&self) -> Result<MutexGuard<'_, Vec<MemberEntry>>, MembershipError> {
        if self.stopped.is_cancelled() {
            return Err(MembershipError::Stopped);
        }
        Ok(self.cluster.lock())
    }
}

#[async_trait]
impl ClusterMembers for MemoryMembers {
    async fn list_members(&self) -> Result<Vec<Member>, MembershipError> {
        Ok(self.entries()?.iter().map(|entry| entry.member.clone()).collect())
    }

    async fn add_learner(&self, new: &NewMember) -> Result<Member, MembershipError> {
        let mut entries = self.entries()?;
        if let Some(existing) = entries.iter().find(|entry| entry.has_peer_url(new.peer_url.as_str())) {
            return Ok(existing.member.clone());
        }
        // One learner at a time, as etcd.
        if entries.iter().any(|entry| entry.member.is_learner) {
            return Err(MembershipError::TooManyLearners);
        }
        let id = entries.iter().map(|entry| entry.member.id.0).max().map_or(1, |last| last + 1);
        let member = Member::new(MemberId(id), None, vec![new.peer_url.to_string()], true);
        let removed = CancellationToken::new();
        entries.push(MemberEntry { member: member.clone(), has_started: false, removed });
        Ok(member)
    }

    async fn promote_member(&self, id: MemberId) -> Result<(), MembershipError> {
        let mut entries = self.entries()?;
        let entry = entries.iter_mut().find(|entry| entry.member.id == id);
        let entry = entry.ok_or(MembershipError::MemberNotFound { id })?;
        if entry.member.is_learner && !entry.has_started {
            return Err(MembershipError::LearnerNotReady { id });
        }
        entry.member.is_learner = false;
        Ok(())
    }

    async fn remove_member(&self, id: MemberId) -> Result<(), MembershipError> {
        let mut entries = self.entries()?;
        let Some(at) = entries.iter().position(|entry| entry.member.id == id) else { return Ok(()) };
        let voters = entries.iter().filter(|entry| !entry.member.is_learner).count();
        // A cluster without a voter could never decide anything again.
        if !entries[at].member.is_learner && voters == 1 {
            return Err(MembershipError::QuorumLoss);
        }
        // The store continues; a removed member leaves only its disk.
        entries.remove(at).removed.cancel();
        Ok(())
    }

    /// In memory nobody leads.
    async fn prepare_leave(&self) -> Result<(), MembershipError> {
        let voters = |entry: &&MemberEntry| !entry.member.is_learner;
        let count = self.entries()?.iter().filter(voters).count();
        if count > 1 { Ok(()) } else { Err(MembershipError::QuorumLoss) }
    }
}

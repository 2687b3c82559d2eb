//! Clusters in memory, and the rules for their members.

use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

use super::store::MemoryKv;
use crate::consensus::{
    Member, MemberId, MemberName, Membership, MembershipError, NewMember, PEER_PORT, Peer, PeerUrl,
};

/// Where members in memory find each other: all that are on one net can join each other's clusters. Clones are the same
/// net.
#[derive(Clone, Debug, Default)]
pub struct MemoryNet(Arc<Mutex<Vec<Arc<Cluster>>>>);

impl MemoryNet {
    /// A net on which nobody is.
    pub fn new() -> MemoryNet {
        MemoryNet::default()
    }

    /// How many clusters were ever made on it.
    pub fn clusters(&self) -> usize {
        self.lock().len()
    }

    pub(super) fn create(&self, name: &MemberName, url: PeerUrl) -> (Arc<Cluster>, MemberId) {
        let first = MemberId(1);
        let member = Member::new(first, Some(name.to_string()), vec![url.to_string()], false);
        let entry = Entry { member, has_started: true, removed: CancellationToken::new() };
        let cluster = Arc::new(Cluster { kv: MemoryKv::new(), entries: Mutex::new(vec![entry]) });
        self.lock().push(Arc::clone(&cluster));
        (cluster, first)
    }

    /// The cluster in which one of these is a member.
    pub(super) fn find(&self, peers: &[Peer]) -> Option<Arc<Cluster>> {
        let has = |cluster: &Cluster| {
            let entries = cluster.lock();
            peers.iter().any(|peer| entries.iter().any(|entry| entry.is_at(peer.url.as_str())))
        };
        self.lock().iter().find(|cluster| has(cluster)).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Cluster>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keys, and the members that share them.
pub(super) struct Cluster {
    pub(super) kv: MemoryKv,
    entries: Mutex<Vec<Entry>>,
}

struct Entry {
    member: Member,
    has_started: bool,
    removed: CancellationToken,
}

impl Entry {
    fn is_at(&self, url: &str) -> bool {
        self.member.peer_urls.iter().any(|known| known == url)
    }

    /// Whether it is at this address, whatever the port.
    fn is_on(&self, address: IpAddr) -> bool {
        let host = address.to_string();
        let is_there = |url: &String| url.parse::<PeerUrl>().is_ok_and(|url| url.host() == host);
        self.member.peer_urls.iter().any(is_there)
    }
}

impl Cluster {
    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The member that was added at this address, if any.
    pub(super) fn expected(&self, address: IpAddr) -> Option<MemberId> {
        let entries = self.lock();
        entries.iter().find(|entry| entry.is_on(address)).map(|entry| entry.member.id)
    }

    /// A member starts: in memory it is in sync at once, and so it is promoted; and it is listed where it is now. None where
    /// it was removed; else what tells that it is.
    pub(super) fn started(
        &self,
        id: MemberId,
        name: &MemberName,
        address: IpAddr,
    ) -> Option<(Member, CancellationToken)> {
        let mut entries = self.lock();
        let entry = entries.iter_mut().find(|entry| entry.member.id == id)?;
        if !entry.is_on(address) {
            entry.member.peer_urls = vec![PeerUrl::new(address, PEER_PORT).to_string()];
        }
        entry.has_started = true;
        entry.member.is_learner = false;
        entry.member.name = Some(name.to_string());
        Some((entry.member.clone(), entry.removed.clone()))
    }
}

/// Without the members' values, which may be secrets.
impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("members", &self.lock().len()).finish_non_exhaustive()
    }
}

/// The list of members, for the run of one of them.
#[derive(Debug)]
pub(super) struct MemoryMembership {
    pub(super) cluster: Arc<Cluster>,
    pub(super) stopped: CancellationToken,
}

impl MemoryMembership {
    fn entries(&self) -> Result<MutexGuard<'_, Vec<Entry>>, MembershipError> {
        match self.stopped.is_cancelled() {
            true => Err(MembershipError::Stopped),
            false => Ok(self.cluster.lock()),
        }
    }
}

#[async_trait]
impl Membership for MemoryMembership {
    async fn list(&self) -> Result<Vec<Member>, MembershipError> {
        Ok(self.entries()?.iter().map(|entry| entry.member.clone()).collect())
    }

    async fn add_learner(&self, new: &NewMember) -> Result<Member, MembershipError> {
        let mut entries = self.entries()?;
        if let Some(there) = entries.iter().find(|entry| entry.is_at(new.peer_url.as_str())) {
            return Ok(there.member.clone());
        }
        if entries.iter().any(|entry| entry.member.is_learner) {
            return Err(MembershipError::TooManyLearners);
        }
        let id = entries.iter().map(|entry| entry.member.id.0).max().map_or(1, |last| last + 1);
        let member = Member::new(MemberId(id), None, vec![new.peer_url.to_string()], true);
        let removed = CancellationToken::new();
        entries.push(Entry { member: member.clone(), has_started: false, removed });
        Ok(member)
    }

    async fn promote(&self, id: MemberId) -> Result<(), MembershipError> {
        let mut entries = self.entries()?;
        let entry = entries.iter_mut().find(|entry| entry.member.id == id);
        let entry = entry.ok_or(MembershipError::Unknown { id })?;
        if entry.member.is_learner && !entry.has_started {
            return Err(MembershipError::NotInSync { id });
        }
        entry.member.is_learner = false;
        Ok(())
    }

    async fn remove(&self, id: MemberId) -> Result<(), MembershipError> {
        let mut entries = self.entries()?;
        let Some(at) = entries.iter().position(|entry| entry.member.id == id) else { return Ok(()) };
        let voters = entries.iter().filter(|entry| !entry.member.is_learner).count();
        if !entries[at].member.is_learner && voters == 1 {
            return Err(MembershipError::NoQuorum);
        }
        // The keys go on; what is left of a member that was removed is its disk.
        entries.remove(at).removed.cancel();
        Ok(())
    }
}

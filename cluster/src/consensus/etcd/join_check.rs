//! The question of a joining member to its cluster, before it starts.

use std::io::{self, ErrorKind};
use std::net::IpAddr;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use nodekeel_localstorage::pki::{Credentials, RevocationList};
use tokio_util::sync::CancellationToken;

use super::client::{WithoutLeader, connect_from};
use super::join_claim::{JoinQuestion, check_claim, read_claim_at, record_claim};
use super::kv::EtcdKv;
use super::members::EtcdMembers;
use super::peer_client::{ListedMember, PeerClient};
use super::retry_pause::RetryPause;
use crate::BoxError;
use crate::consensus::join::{check_join, find_listed, find_started, find_voter};
use crate::consensus::kv::KvStore;
use crate::consensus::{ClusterMembers, ConsensusError, JoinRefusal, Member, MemberId, Peer, StatusReporter};
use crate::pki::CRL_PATH;

/// What a member that has not joined yet needs to ask its cluster whether it may start: another host may have used its
/// ticket.
pub(super) struct JoinCheck<'a> {
    pub(super) question: &'a JoinQuestion,
    pub(super) this: Peer,
    pub(super) address: IpAddr,
    pub(super) credentials: &'a Credentials,
    /// The other members, as the ticket lists them.
    pub(super) peers: &'a [Peer],
}

impl JoinCheck<'_> {
    /// Asks until the cluster admits or refuses the member, and announces an admitted one to the promoter.
    /// Returns the other members, as they are listed now.
    ///
    /// Only a majority admits it: one member may have missed that this one has started, or got its vote, or is
    /// another host's. Any member refuses a first start that knows of one, and any that knows this one as a voter
    /// knows whether it is another host's: the majority may need its vote.
    pub(super) async fn wait_admitted(
        &self,
        reporter: &StatusReporter<'_>,
    ) -> Result<Vec<Peer>, ConsensusError> {
        let client = PeerClient::new(self.credentials)
            .map_err(ConsensusError::backend("use the ticket's credentials"))?;
        let mut pause = RetryPause::default();
        loop {
            match self.ask_peers(&client).await {
                Ok(Ok(members)) => return self.initial_peers(&members),
                Ok(Err(refusal)) => {
                    reporter.report_refused(&refusal);
                    return Err(ConsensusError::JoinRefused(refusal));
                }
                Err(reasons) => reporter.report_waiting(&format!(
                    "no majority of the cluster answers whether {} may join: {reasons}{}",
                    self.this.name,
                    self.question.advice()
                )),
            }
            // No member notifies a host that is not one itself, and there may be none yet that could.
            pause.wait().await;
        }
    }

    /// Asks all at once. The first decision counts; without any, the reasons.
    async fn ask_peers(&self, client: &PeerClient) -> Result<Result<Vec<Member>, JoinRefusal>, String> {
        let ask = |peer| async move {
            let decision = self.ask_peer(client, peer).await;
            decision.map_err(|error| {
                format!("{} at {}: {}", peer.name, peer.url, nodekeel_supervisor::Failure::new(error))
            })
        };
        let mut asking: FuturesUnordered<_> = self.peers.iter().map(ask).collect();
        let mut reasons = Vec::new();
        while let Some(decision) = asking.next().await {
            match decision {
                Ok(decision) => return Ok(decision),
                Err(reason) => reasons.push(reason),
            }
        }
        // In a fixed order: answers that arrive in another order are not another status.
        reasons.sort();
        Err(reasons.join("; "))
    }

    async fn ask_peer(
        &self,
        client: &PeerClient,
        peer: &Peer,
    ) -> Result<Result<Vec<Member>, JoinRefusal>, BoxError> {
        let known = client.list_entries(peer.name.as_str(), &peer.url).await.map_err(explain_rejection)?;
        let members: Vec<_> = known.iter().map(ListedMember::to_member).collect();
        // Any list proves a start, however old it is, so that a refusal needs no majority.
        if let (JoinQuestion::MayStart(_), Some(refusal)) =
            (self.question, find_started(&members, &self.this))
        {
            return Ok(Err(refusal));
        }
        // The ticket has only the peer URLs; the entry of this peer has the URL for clients.
        let is_peer = |entry: &&ListedMember| entry.peer_urls.iter().any(|url| url == peer.url.as_str());
        let url = known.iter().find(is_peer).and_then(|entry| entry.client_urls.first());
        let url = url.ok_or("it has no URL for clients yet")?;
        // Read from this peer's own data: the majority may be waiting for this member's vote.
        if let (JoinQuestion::MayResume(_), Some(voter)) = (self.question, find_voter(&members, &self.this)) {
            let client =
                connect_from(self.address, url, &peer.name, self.credentials, WithoutLeader::IsAnswered)
                    .await?;
            let recorded = read_claim_at(&client, voter.id).await?;
            return Ok(check_claim(recorded.as_deref(), None, voter.id, &self.this.name).map(|()| members));
        }
        // Everything from here on needs the answer of a majority.
        let keys =
            connect_from(self.address, url, &peer.name, self.credentials, WithoutLeader::Fails).await?;
        let cluster = EtcdMembers::new(EtcdKv::new(keys, CancellationToken::new()));
        match self.claim_member(&cluster.kv, &cluster).await? {
            Ok((id, listed)) => {
                // Before its etcd starts: the promoter then tries until the learner is in sync.
                cluster.announce_learner(id, &self.this.url).await?;
                Ok(Ok(listed))
            }
            Err(refusal) => Ok(Err(refusal)),
        }
    }

    /// Decides by the list and the recorded claim, and records this host's. Returns the member and the list.
    async fn claim_member(
        &self,
        kv: &dyn KvStore,
        cluster: &dyn ClusterMembers,
    ) -> Result<Result<(MemberId, Vec<Member>), JoinRefusal>, BoxError> {
        let id = match self.find_member(&cluster.list_members().await?) {
            Ok(id) => id,
            Err(refusal) => return Ok(Err(refusal)),
        };
        // After the list: a ticket is revoked before its URL gets another learner.
        if self.is_revoked(kv).await? {
            return Ok(Err(JoinRefusal::TicketRevoked { name: self.this.name.to_string() }));
        }
        let claim = self.question.claim();
        let recorded = record_claim(kv, id, claim).await?;
        if let Err(refusal) = check_claim(recorded.as_deref(), claim, id, &self.this.name) {
            return Ok(Err(refusal));
        }
        // Another host may have started it before the claim, by an earlier release.
        let listed = cluster.list_members().await?;
        match self.find_member(&listed) {
            Ok(still) if still == id => Ok(Ok((id, listed))),
            Ok(_) => Err("its member was replaced while it was claimed".into()),
            Err(refusal) => Ok(Err(refusal)),
        }
    }

    /// The member that this host may become.
    fn find_member(&self, listed: &[Member]) -> Result<MemberId, JoinRefusal> {
        match self.question {
            JoinQuestion::MayStart(_) => check_join(listed, &self.this),
            JoinQuestion::MayResume(_) => find_listed(listed, &self.this).map(|member| member.id),
        }
    }

    /// Returns whether the cluster has revoked this member's certificate; the members themselves may not know it yet.
    async fn is_revoked(&self, kv: &dyn KvStore) -> Result<bool, BoxError> {
        let stored =
            kv.get(CRL_PATH.as_bytes()).await?.ok_or("the cluster has no list of revoked certificates")?;
        let list = RevocationList::from_der(&stored.value, &self.credentials.ca)?;
        Ok(list.is_revoked(&self.credentials.certificate))
    }

    /// The members but this one. A joining etcd must know exactly the present members; one that resumes has its
    /// own list.
    fn initial_peers(&self, members: &[Member]) -> Result<Vec<Peer>, ConsensusError> {
        if let JoinQuestion::MayResume(_) = self.question {
            return Ok(self.peers.to_vec());
        }
        Peer::others_of(members, &self.this.url).map_err(ConsensusError::backend("list the members"))
    }
}

/// etcd closes a connection whose certificate it rejects, without a word.
pub(super) fn explain_rejection(error: io::Error) -> BoxError {
    if is_rejection(&error) {
        format!("it rejects this node's certificate, which may be revoked ({error})").into()
    } else {
        error.into()
    }
}

/// Returns whether the error is as after a rejected certificate, and not that of a host or a process that is down.
pub(super) fn is_rejection(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset)
}

#[cfg(test)]
#[path = "join_check_test.rs"]
mod tests;

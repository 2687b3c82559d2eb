//! The question of a joining member to its cluster, before it starts.

use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use nodekeel_localstorage::pki::{Credentials, RevocationList};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::client::{WithoutLeader, connect_from};
use super::join_claim::{JoinQuestion, check_claim, read_claim_at, record_claim};
use super::kv::EtcdKv;
use super::members::EtcdMembers;
use super::peer_client::{ListedMember, PeerClient, is_denial};
use super::retry_pause::RetryPause;
use crate::BoxError;
use crate::consensus::join::{check_join, find_listed, find_started, find_voter, invitation_key};
use crate::consensus::kv::KvStore;
use crate::consensus::{
    ClusterMembers, ConsensusError, JoinRefusal, Member, MemberId, MembershipError, NewMember, Peer,
    StatusReporter,
};
use crate::pki::CRL_PATH;

/// The time after which a learner that a host has claimed, and has never started, gives its place to another. etcd publishes
/// that it has started within two seconds. The host that loses the place takes another one when it starts.
const CLAIM_PATIENCE: Duration = Duration::from_secs(20);

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

/// The answer of the cluster.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// As this member, in this list.
    Admitted(MemberId, Vec<Member>),
    Refused(JoinRefusal),
    /// Not yet: for this, as a clause.
    Waits(String),
    /// Another learner has the place of the cluster for one, and has not started.
    WaitsFor(Member),
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
        // A learner that was claimed, and when this was first seen.
        let mut before: Option<(MemberId, Instant)> = None;
        loop {
            let overdue = before.filter(|(_, since)| since.elapsed() >= CLAIM_PATIENCE).map(|(id, _)| id);
            match self.ask_peers(&client, overdue).await {
                Ok(Admission::Admitted(_, members)) => return self.initial_peers(&members),
                Ok(Admission::Refused(refusal)) => {
                    reporter.report_refused(&refusal);
                    return Err(ConsensusError::JoinRefused(refusal));
                }
                Ok(Admission::Waits(reason)) => {
                    before = None;
                    reporter.report_waiting(&reason);
                }
                Ok(Admission::WaitsFor(learner)) => {
                    if before.is_none_or(|(id, _)| id != learner.id) {
                        before = Some((learner.id, Instant::now()));
                    }
                    reporter.report_waiting(&turn_reason(&learner));
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
    async fn ask_peers(&self, client: &PeerClient, overdue: Option<MemberId>) -> Result<Admission, String> {
        let ask = |peer| async move {
            let decision = self.ask_peer(client, peer, overdue).await;
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
        overdue: Option<MemberId>,
    ) -> Result<Admission, BoxError> {
        let known = client.list_entries(peer.name.as_str(), &peer.url).await.map_err(explain_rejection)?;
        let members: Vec<_> = known.iter().map(ListedMember::to_member).collect();
        // Any list proves a start, however old it is, so that a refusal needs no majority.
        if let (JoinQuestion::MayStart(_), Some(refusal)) =
            (self.question, find_started(&members, &self.this))
        {
            return Ok(Admission::Refused(refusal));
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
            return Ok(match check_claim(recorded.as_deref(), None, voter.id, &self.this.name) {
                Ok(()) => Admission::Admitted(voter.id, members),
                Err(refusal) => Admission::Refused(refusal),
            });
        }
        // Everything from here on needs the answer of a majority.
        let keys =
            connect_from(self.address, url, &peer.name, self.credentials, WithoutLeader::Fails).await?;
        let cluster = EtcdMembers::new(EtcdKv::new(keys, CancellationToken::new()));
        let cluster = cluster.with_peer_client(client.clone());
        let admission = self.claim_member(&cluster.kv, &cluster, overdue).await?;
        if let Admission::Admitted(id, _) = admission {
            // Before its etcd starts: the promoter then tries until the learner is in sync.
            cluster.announce_learner(id, &self.this.url).await?;
        }
        Ok(admission)
    }

    /// Decides by the list and the recorded claim, and records this host's.
    async fn claim_member(
        &self,
        kv: &dyn KvStore,
        cluster: &dyn ClusterMembers,
        overdue: Option<MemberId>,
    ) -> Result<Admission, BoxError> {
        let listed = cluster.list_members().await?;
        let found = self.find_member(&listed);
        // After the list: a ticket is revoked before its URL gets another learner.
        if !matches!(found, Err(JoinRefusal::AlreadyStarted { .. })) && self.is_revoked(kv).await? {
            let name = self.this.name.to_string();
            return Ok(Admission::Refused(JoinRefusal::TicketRevoked { name }));
        }
        let id = match found {
            Ok(id) => id,
            // Its ticket is unused: it takes its place in the list now.
            Err(JoinRefusal::NotListed { .. }) if self.is_invited(kv).await? => {
                match self.add_member(kv, cluster, &listed, overdue).await? {
                    Ok(id) => id,
                    Err(admission) => return Ok(admission),
                }
            }
            Err(refusal) => return Ok(Admission::Refused(refusal)),
        };
        let claim = self.question.claim();
        let recorded = record_claim(kv, id, claim).await?;
        if let Err(refusal) = check_claim(recorded.as_deref(), claim, id, &self.this.name) {
            return Ok(Admission::Refused(refusal));
        }
        // Another host may have started it before the claim, by an earlier release.
        let listed = cluster.list_members().await?;
        match self.find_member(&listed) {
            Ok(still) if still == id => Ok(Admission::Admitted(id, listed)),
            Ok(_) => Err("its member was replaced while it was claimed".into()),
            Err(refusal) => Ok(Admission::Refused(refusal)),
        }
    }

    /// Adds this member to the list, as a learner. The cluster has one learner at a time.
    async fn add_member(
        &self,
        kv: &dyn KvStore,
        cluster: &dyn ClusterMembers,
        listed: &[Member],
        overdue: Option<MemberId>,
    ) -> Result<Result<MemberId, Admission>, BoxError> {
        let learner = listed.iter().find(|member| member.is_learner);
        if let Some(learner) = learner.filter(|learner| learner.name.is_none() && overdue == Some(learner.id))
        {
            cluster.remove_member(learner.id).await?;
        }
        let new = NewMember::new(self.this.name.clone(), self.this.url.clone());
        let added = match cluster.add_learner(&new).await {
            Ok(added) => added.id,
            Err(MembershipError::TooManyLearners) => return Ok(Err(self.wait_turn(kv, learner).await?)),
            Err(MembershipError::UnhealthyCluster { condition, .. }) => {
                return Ok(Err(Admission::Waits(format!(
                    "waits for the voters of its cluster: {condition}"
                ))));
            }
            Err(other) => return Err(other.into()),
        };
        if self.is_invited(kv).await? {
            return Ok(Ok(added));
        }
        // The ticket was revoked before the learner was there to be removed.
        cluster.remove_member(added).await?;
        Ok(Err(Admission::Refused(JoinRefusal::NotListed { url: self.this.url.clone() })))
    }

    /// What it waits for while another learner has the place.
    async fn wait_turn(&self, kv: &dyn KvStore, learner: Option<&Member>) -> Result<Admission, BoxError> {
        // It was added since the list was read.
        let Some(learner) = learner else {
            return Ok(Admission::Waits("waits for its turn: another node is joining".to_owned()));
        };
        // Without a claim it is that of a ticket of an earlier release, whose node could not add it again.
        if learner.name.is_none() && record_claim(kv, learner.id, None).await?.is_some() {
            return Ok(Admission::WaitsFor(learner.clone()));
        }
        Ok(Admission::Waits(turn_reason(learner)))
    }

    async fn is_invited(&self, kv: &dyn KvStore) -> Result<bool, BoxError> {
        let invitation = kv.get(&invitation_key(self.this.name.as_str())).await?;
        Ok(invitation.is_some_and(|kv| kv.value == self.this.url.as_str().as_bytes()))
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

/// The reason for which a node waits for a learner before it.
fn turn_reason(learner: &Member) -> String {
    let url = learner.peer_urls.first().map_or("", String::as_str);
    match &learner.name {
        Some(name) => format!(
            "waits for its turn: {name} at {url} is joining; if that node is lost: `nodectl cluster remove {name}` on a member"
        ),
        None => format!(
            "waits for its turn: the node at {url} is joining; if it is lost, revoke its ticket: `nodectl cluster ticket revoke` on a member"
        ),
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
    is_denial(error)
        || matches!(
            error.kind(),
            ErrorKind::InvalidData | ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset
        )
}

#[cfg(test)]
#[path = "join_check_test.rs"]
mod tests;

//! Admits nodes that join. They reach the cluster at the peer ports of its voters, at which etcd answers for the list of members
//! alone, and write nothing into the cluster: the leader asks each node with an unused ticket, and each learner that has not
//! started, at its own peer port for its claim, decides, and tells it the verdict there. See [`join_check`](super::join_check).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use nodekeel_localstorage::pki::{Certificate, RevocationList};
use nodekeel_supervisor::{Context, Failure};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::join_claim::{JoinClaim, check_claim, read_claim, record_claim};
use super::join_verdict::{ASK_CLAIM, TELL_VERDICT, Verdict};
use super::members::EtcdMembers;
use super::peer_name::is_required;
use crate::BoxError;
use crate::consensus::join::{INVITATIONS, check_join, invitation_key};
use crate::consensus::kv::{KeyRange, KvStore, ListWatcher};
use crate::consensus::{
    ClusterMembers, ClusterReport, JoinRefusal, Member, MemberId, MembershipError, NewMember, Peer, PeerUrl,
};
use crate::pki::{CRL_PATH, has_peer_name, peer_name};

/// The pause between two questions to the nodes with unused tickets, which notify nobody that they have been started.
const PAUSE: Duration = Duration::from_millis(500);
/// The timeout of a question: a node that is off must not hold up another.
const ASK_TIMEOUT: Duration = Duration::from_millis(1500);
/// The time after which a learner that a host has claimed, and has never started, gives its place to another. etcd publishes
/// that it has started within two seconds. The host that loses the place takes another one when it starts.
const CLAIM_PATIENCE: Duration = Duration::from_secs(20);

/// A runnable that admits nodes. Every voter runs it, and the leader's alone acts. It sleeps while no ticket is unused.
pub(super) async fn admit_joiners(
    ctx: Context,
    members: EtcdMembers,
    ca: Certificate,
    report: watch::Receiver<ClusterReport>,
) -> Result<(), Failure> {
    let follow = ListWatcher::new(Arc::new(members.kv.clone()), KeyRange::prefix(INVITATIONS));
    ctx.signal_ready()?;
    let admissions = Admissions { members, ca, before: Mutex::default() };
    tokio::select! {
        biased;
        canceled = ctx.canceled() => Err(canceled.into()),
        failed = admissions.run(follow, report) => failed,
    }
}

struct Admissions {
    members: EtcdMembers,
    ca: Certificate,
    /// A learner that was claimed and has not started, and when another node first waited for it.
    before: Mutex<Option<(MemberId, Instant)>>,
}

impl Admissions {
    async fn run(
        &self,
        mut follow: ListWatcher,
        mut report: watch::Receiver<ClusterReport>,
    ) -> Result<(), Failure> {
        let (mut invited, mut expected) = (BTreeMap::new(), BTreeMap::new());
        loop {
            tokio::select! {
                biased;
                update = follow.next_update() => update?.apply_to(&mut invited),
                Ok(()) = report.changed() => {}
                () = sleep(PAUSE), if !expected.is_empty() => {}
            }
            expected = expected_nodes(&invited, &report.borrow_and_update());
            if !expected.is_empty() && self.members.is_leader().await.unwrap_or(false) {
                join_all(expected.iter().map(|(url, server)| self.attend(server, url))).await;
            }
        }
    }

    /// Asks a node for its claim, if it is there, and tells it the verdict.
    async fn attend(&self, server: &str, url: &PeerUrl) {
        let asked = async {
            let connection = self.members.peers.connect(server, url).await?;
            let certificate = connection.certificate();
            Ok::<_, std::io::Error>((certificate, connection.ask(ASK_CLAIM, "", b"").await?))
        };
        // It is off, or has started.
        let Ok(Ok((Some(certificate), line))) = timeout(ASK_TIMEOUT, asked).await else { return };
        let name = certificate.common_name().and_then(|name| name.parse().ok());
        let Some((claim, name)) = JoinClaim::parse(&line).zip(name) else { return };
        let joiner = Joiner { this: Peer::new(name, url.clone()), claim, certificate, ca: self.ca.clone() };
        let verdict = self.decide(&joiner).await.and_then(|verdict| Ok(serde_json::to_vec(&verdict)?));
        match verdict {
            // A lost verdict is decided again.
            Ok(verdict) => drop(self.members.peers.ask(server, url, TELL_VERDICT, "", &verdict).await),
            // The node sees by itself that there is no majority.
            Err(error) => tracing::debug!("can't admit the node at {url} yet: {}", Failure::new(error)),
        }
    }

    async fn decide(&self, joiner: &Joiner) -> Result<Verdict, BoxError> {
        let is_name_required = is_required(&self.members.kv, &self.ca).await?;
        if is_name_required && !has_peer_name(&joiner.certificate, &peer_name(&self.ca)) {
            // The others would refuse its connections: as a learner it would only block the next one.
            return Ok(Verdict::Waits(format!(
                "its ticket was created by an earlier release, and opens no peer port any more: `{}` on a member, and join it by \
                 another ticket",
                joiner.this.url.revoke_command()
            )));
        }
        let before = *self.before.lock().unwrap_or_else(PoisonError::into_inner);
        let overdue = before.filter(|(_, since)| since.elapsed() >= CLAIM_PATIENCE).map(|(id, _)| id);
        Ok(match joiner.claim_member(&self.members.kv, &self.members, overdue).await? {
            Admission::Admitted(id, members) => {
                // Before its etcd starts: the promoter then tries until the learner is in sync.
                self.members.announce_learner(id, &joiner.this.url).await?;
                // A joining etcd must know exactly the present members.
                let peers = Peer::others_of(&members, &joiner.this.url)?;
                Verdict::admitted(&peers, self.members.store_bytes().await?, is_name_required)
            }
            Admission::Refused(refusal) => Verdict::refused(refusal),
            Admission::Waits(reason) => Verdict::Waits(reason),
            Admission::WaitsFor(learner) => {
                let mut before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
                if before.is_none_or(|(id, _)| id != learner.id) {
                    *before = Some((learner.id, Instant::now()));
                }
                Verdict::Waits(turn_reason(&learner))
            }
        })
    }
}

/// The nodes that may come, by URL: each with a name of its certificate, of which one without an invitation is only known to
/// have its address.
fn expected_nodes(invited: &BTreeMap<Vec<u8>, Vec<u8>>, report: &ClusterReport) -> BTreeMap<PeerUrl, String> {
    let text = |bytes| std::str::from_utf8(bytes).ok();
    let unstarted = report.members.iter().map(|report| &report.member).filter(|member| member.name.is_none());
    let unstarted =
        unstarted.flat_map(|member| &member.peer_urls).filter_map(|url| url.parse::<PeerUrl>().ok());
    let mut expected: BTreeMap<_, _> = unstarted.map(|url| (url.clone(), url.host().to_owned())).collect();
    expected.extend(invited.iter().filter_map(|(key, url)| {
        Some((text(url)?.parse().ok()?, text(key)?.strip_prefix(INVITATIONS)?.to_owned()))
    }));
    expected
}

/// The decision about a node.
#[derive(Debug, PartialEq, Eq)]
enum Admission {
    /// As this member, in this list.
    Admitted(MemberId, Vec<Member>),
    Refused(JoinRefusal),
    /// Not yet: for this, as a clause.
    Waits(String),
    /// Another learner has the place of the cluster for one, and has not started.
    WaitsFor(Member),
}

/// A node that joins.
struct Joiner {
    /// As its ticket names it.
    this: Peer,
    claim: JoinClaim,
    certificate: Certificate,
    ca: Certificate,
}

impl Joiner {
    /// Decides by the list and the recorded claim, and records the node's.
    async fn claim_member(
        &self,
        kv: &dyn KvStore,
        cluster: &dyn ClusterMembers,
        overdue: Option<MemberId>,
    ) -> Result<Admission, BoxError> {
        let listed = cluster.list_members().await?;
        let found = check_join(&listed, &self.this);
        // After the list: a ticket is revoked before its URL gets another learner.
        if !matches!(found, Err(JoinRefusal::AlreadyStarted { .. })) && self.is_revoked(kv).await? {
            let name = self.this.name.to_string();
            return Ok(Admission::Refused(JoinRefusal::TicketRevoked { name }));
        }
        let id = match found {
            Ok(id) => id,
            // Its ticket is unused: it gets its place in the list now.
            Err(JoinRefusal::NotListed { .. }) if self.is_invited(kv).await? => {
                match self.add_member(kv, cluster, &listed, overdue).await? {
                    Ok(id) => id,
                    Err(admission) => return Ok(admission),
                }
            }
            Err(refusal) => return Ok(Admission::Refused(refusal)),
        };
        let recorded = record_claim(kv, id, &self.claim).await?;
        if let Err(refusal) = check_claim(&recorded, &self.claim, id, &self.this.name) {
            return Ok(Admission::Refused(refusal));
        }
        // Another host may have started it before the claim, by an earlier release.
        let listed = cluster.list_members().await?;
        match check_join(&listed, &self.this) {
            Ok(still) if still == id => Ok(Admission::Admitted(id, listed)),
            Ok(_) => Err("its member was replaced while it was claimed".into()),
            Err(refusal) => Ok(Admission::Refused(refusal)),
        }
    }

    /// Adds the node to the list, as a learner. The cluster has one learner at a time.
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
        if learner.name.is_none() && read_claim(kv, learner.id).await?.is_some() {
            return Ok(Admission::WaitsFor(learner.clone()));
        }
        Ok(Admission::Waits(turn_reason(learner)))
    }

    async fn is_invited(&self, kv: &dyn KvStore) -> Result<bool, BoxError> {
        let invitation = kv.get(&invitation_key(self.this.name.as_str())).await?;
        Ok(invitation.is_some_and(|kv| kv.value == self.this.url.as_str().as_bytes()))
    }

    /// Returns whether the cluster has revoked this member's certificate; the members themselves may not know it yet.
    async fn is_revoked(&self, kv: &dyn KvStore) -> Result<bool, BoxError> {
        let stored =
            kv.get(CRL_PATH.as_bytes()).await?.ok_or("the cluster has no list of revoked certificates")?;
        let list = RevocationList::from_der(&stored.value, &self.ca)?;
        Ok(list.is_revoked(&self.certificate))
    }
}

/// The reason for which a node waits for a learner before it.
fn turn_reason(learner: &Member) -> String {
    let Some(url) = learner.peer_urls.iter().find_map(|url| url.parse::<PeerUrl>().ok()) else {
        return "waits for its turn: another node is joining".to_owned();
    };
    let (node, command) = match &learner.name {
        Some(name) => (name.as_str(), format!("nodectl cluster remove {name}")),
        None => ("the node", url.revoke_command()),
    };
    format!("waits for its turn: {node} at {url} is joining; if it is lost: `{command}` on a member")
}

#[cfg(test)]
#[path = "admission_test.rs"]
mod tests;

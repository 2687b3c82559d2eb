//! A joining member before it starts: its cluster decides whether it may, since another host may have used its ticket.
//!
//! The leader asks it at its own peer port, and tells it the verdict there: see [`admission`](super::admission). Only the leader
//! decides, with a majority: any other member may have missed that this one has started, or got its vote, or is another
//! host's. Until then the member asks the others for their lists: any list that shows that it has started refuses it, however old
//! that is, and most of them name the voters from which it takes a verdict: the ticket may name one that was removed since.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use nodekeel_localstorage::pki::Credentials;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use super::join_claim::JoinClaim;
use super::join_verdict::{ASK_CLAIM, Admitted, JoinAnswer, TELL_VERDICT, Verdict};
use super::local_member::LocalMember;
use super::peer_client::{PeerClient, is_denial};
use super::peer_server::{PeerQuestion, PeerServer};
use super::retry_pause::RetryPause;
use super::version::{EtcdVersion, check_join_version};
use crate::BoxError;
use crate::consensus::join::find_started;
use crate::consensus::{ConsensusError, Member, Peer, StatusReporter};

/// The time in which a leader asks: after it, the member reports that it waits.
const EXPECTED_WITHIN: Duration = Duration::from_secs(2);
/// The age at which the last verdict counts no more: the leader has been lost.
const VERDICT_AGE: Duration = Duration::from_secs(15);

/// A member that may start once its cluster admits it.
pub(super) struct JoinCheck<'a> {
    pub(super) member: LocalMember<'a>,
    pub(super) claim: &'a JoinClaim,
    pub(super) credentials: &'a Credentials,
    /// The other members, as the ticket lists them.
    pub(super) peers: &'a [Peer],
    /// That of its etcd, if it is known.
    pub(super) version: Option<EtcdVersion>,
}

/// What the member waits for.
enum Event {
    Answer(JoinAnswer),
    /// The others were asked for their lists.
    Asked(Asked),
}

/// Whether the others have given their lists.
#[derive(Debug)]
struct Asked {
    by_majority: bool,
    /// Why the others gave none.
    silent: Vec<String>,
}

/// The voters, as the newest list of each other member has them.
#[derive(Debug, Default)]
struct KnownVoters(BTreeMap<String, BTreeSet<String>>);

impl KnownVoters {
    fn learn(&mut self, from: &Peer, members: Vec<Member>) {
        let voters = members.into_iter().filter(|member| !member.is_learner);
        self.0.insert(from.name.to_string(), voters.filter_map(|member| member.name).collect());
    }

    /// All that most of the lists have: one that was removed since may still have a list of its own.
    fn names(&self) -> impl Iterator<Item = &String> {
        let all: BTreeSet<_> = self.0.values().flatten().collect();
        let lists = self.0.len();
        all.into_iter()
            .filter(move |name| self.0.values().filter(|voters| voters.contains(*name)).count() * 2 > lists)
    }
}

impl JoinCheck<'_> {
    /// Waits until the cluster admits or refuses the member.
    ///
    /// # Errors
    /// [`ConsensusError::JoinRefused`].
    pub(super) async fn wait_admitted(
        &self,
        reporter: &StatusReporter<'_>,
    ) -> Result<Admitted, ConsensusError> {
        // Whether the name is required is known only then.
        let server = PeerServer::new(self.member, self.credentials, None)?;
        let client = PeerClient::new(self.credentials, None)
            .map_err(ConsensusError::backend("use the ticket's credentials"))?;
        let (events, mut received) = mpsc::unbounded_channel();
        let voters = Mutex::new(KnownVoters::default());
        let unstarted = Notify::new();
        let serving = async {
            // The others would take the end of a connection for a rejection by the member of this name that they know.
            unstarted.notified().await;
            server.serve(|question| self.answer(question, &voters, &events)).await;
        };
        let asking = self.ask_peers(&client, &voters, &events, &unstarted);
        let deciding = self.wait_verdict(&mut received, reporter);
        tokio::select! {
            biased;
            decided = deciding => decided,
            () = serving => std::future::pending().await,
            () = asking => std::future::pending().await,
        }
    }

    async fn wait_verdict(
        &self,
        received: &mut mpsc::UnboundedReceiver<Event>,
        reporter: &StatusReporter<'_>,
    ) -> Result<Admitted, ConsensusError> {
        let started_at = Instant::now();
        let mut last_verdict: Option<Instant> = None;
        loop {
            match received.recv().await {
                Some(Event::Answer(JoinAnswer::Admitted(admitted))) => return Ok(admitted),
                Some(Event::Answer(JoinAnswer::Refused(refusal))) => {
                    reporter.report_refused(&refusal);
                    return Err(ConsensusError::JoinRefused(refusal));
                }
                Some(Event::Answer(JoinAnswer::Waits(reason))) => {
                    last_verdict = Some(Instant::now());
                    reporter.report_waiting(&reason);
                }
                Some(Event::Asked(asked)) => {
                    let is_fresh = last_verdict.is_some_and(|last| last.elapsed() < VERDICT_AGE);
                    if !is_fresh && started_at.elapsed() >= EXPECTED_WITHIN {
                        reporter.report_waiting(&self.silence_reason(&asked));
                    }
                }
                // The senders live longer.
                None => return std::future::pending().await,
            }
        }
    }

    /// Why no leader has asked, as far as it is known.
    fn silence_reason(&self, asked: &Asked) -> String {
        let Peer { name, url } = self.member.peer();
        let silent = asked.silent.join("; ");
        if !asked.by_majority {
            return format!("no majority of the cluster answers whether {name} may join: {silent}");
        }
        let besides = if silent.is_empty() { silent } else { format!(" ({silent})") };
        format!(
            "no leader of the cluster asks whether {name} may join: it must reach {url}, and its ticket must be unused; \
             upgrade the voters first if they run an earlier release{besides}"
        )
    }

    /// The answer to a voter.
    fn answer(
        &self,
        question: &PeerQuestion,
        voters: &Mutex<KnownVoters>,
        events: &mpsc::UnboundedSender<Event>,
    ) -> Option<Vec<u8>> {
        // Another holder of a certificate could lead it into another cluster.
        let known = voters.lock().unwrap_or_else(PoisonError::into_inner);
        let is_voter = known.names().any(|name| question.names.is_named(name));
        drop(known);
        if !is_voter {
            return None;
        }
        if question.is(ASK_CLAIM) {
            return Some(self.claim.to_line());
        }
        if !question.is(TELL_VERDICT) {
            return None;
        }
        let verdict: Verdict = serde_json::from_slice(&question.body).ok()?;
        let _ = events.send(Event::Answer(verdict.into_answer(&self.member.peer()).ok()?));
        Some(Vec::new())
    }

    /// Asks all others for their lists, again and again. Notifies once one shows that this member has not started.
    async fn ask_peers(
        &self,
        client: &PeerClient,
        voters: &Mutex<KnownVoters>,
        events: &mpsc::UnboundedSender<Event>,
        unstarted: &Notify,
    ) {
        let this = self.member.peer();
        let mut pause = RetryPause::default();
        loop {
            let asked = join_all(self.peers.iter().map(|peer| self.ask_peer(client, peer))).await;
            let mut silent = Vec::new();
            for (peer, asked) in self.peers.iter().zip(asked) {
                match asked {
                    Ok((members, fit)) => {
                        let answer = match (find_started(&members, &this), fit) {
                            (Some(refusal), _) => Some(JoinAnswer::Refused(refusal)),
                            (None, Some(Err(unfit))) => Some(JoinAnswer::Waits(unfit)),
                            (None, Some(Ok(()))) => {
                                unstarted.notify_one();
                                None
                            }
                            // Its etcd does not run.
                            (None, None) => None,
                        };
                        if let Some(answer) = answer {
                            let _ = events.send(Event::Answer(answer));
                        }
                        voters.lock().unwrap_or_else(PoisonError::into_inner).learn(peer, members);
                    }
                    Err(reason) => silent.push(reason),
                }
            }
            let by_majority = silent.len() * 2 < self.peers.len();
            let _ = events.send(Event::Asked(Asked { by_majority, silent }));
            pause.wait().await;
        }
    }
}

impl JoinCheck<'_> {
    /// The members that another one lists, and whether this one's etcd fits to theirs, if that is known; otherwise the reason.
    async fn ask_peer(
        &self,
        client: &PeerClient,
        peer: &Peer,
    ) -> Result<(Vec<Member>, Option<Result<(), String>>), String> {
        let asked = async {
            let members = client.list_members(peer.name.as_str(), &peer.url).await?;
            let cluster = client.read_cluster_version(peer.name.as_str(), &peer.url).await;
            let fit = cluster.ok().flatten().map(|cluster| match self.version {
                Some(version) => check_join_version(version, cluster),
                // It fails by itself.
                None => Ok(()),
            });
            Ok((members, fit))
        };
        asked.await.map_err(|error| {
            let error = nodekeel_supervisor::Failure::new(explain_rejection(error));
            format!("{} at {}: {error}", peer.name, peer.url)
        })
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
mod tests {
    use super::*;
    use crate::consensus::MemberId;

    #[test]
    fn a_voter_that_was_removed_since_the_ticket_gives_no_verdict() {
        let peer = |name: &str| Peer::new(name.parse().unwrap(), "https://192.0.2.1:7834".parse().unwrap());
        let list = |names: &[&str]| -> Vec<Member> {
            let member = |name: &&str| Member::new(MemberId(1), Some((*name).to_owned()), Vec::new(), false);
            names.iter().map(member).collect()
        };
        let mut voters = KnownVoters::default();
        assert_eq!(voters.names().count(), 0, "the ticket alone names none");
        voters.learn(&peer("one"), list(&["one", "two", "five"]));
        voters.learn(&peer("two"), list(&["one", "two", "five"]));
        // It stands at the address that the ticket has, and lists itself.
        voters.learn(&peer("three"), list(&["three", "four"]));
        assert_eq!(voters.names().collect::<Vec<_>>(), ["five", "one", "two"]);
        // One that was removed later, too.
        voters.learn(&peer("one"), list(&["one", "two"]));
        voters.learn(&peer("two"), list(&["one", "two"]));
        assert_eq!(voters.names().collect::<Vec<_>>(), ["one", "two"]);
    }
}

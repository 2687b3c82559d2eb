//! How a worker joins its cluster, and follows it.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nodekeel_cluster::enrolment::EnrolCallError;
use nodekeel_cluster::node::{EnrolmentConfigError, EnrolmentTicket, JoinTicket, TicketError};
use nodekeel_localstorage::pki::{Certificate, CertificateTemplate, PrivateKey};
use nodekeel_supervisor::{Backoff, Context, Failure};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tonic::{Code, Status};

use super::membership::{Membership, RESET_AND_JOIN};
use super::{REMOVED, Worker, WorkerStatus};
use crate::blocking::run_blocking;
use crate::error_chain::error_chain;
use crate::node_v1::node_client::NodeClient;
use crate::node_v1::{WatchRecordsRequest, WhoAmIRequest};
use crate::parts::api::Api;
use crate::parts::api::cluster_records::{InvalidRecords, ToldRecords};
use crate::parts::api::enrol::{call_voter, connect, worker_message};
use crate::parts::api::identities::Source;
use crate::parts::api::peer_client::{CALL_TIMEOUT, PeerError, PeerProblem, describe_all};
use crate::parts::api::peers::Peer;
use crate::parts::storage::unlock::random_fraction;

/// The pause between two looks for a ticket, while the node waits for one.
const TICKET_PAUSE: Duration = Duration::from_secs(2);

/// The pauses between two calls of the voters that a join ticket names.
const REDEMPTION_BACKOFF: Backoff =
    Backoff { initial: Duration::from_millis(500), factor: 1.5, max: Duration::from_secs(10), jitter: 0.5 };

/// The pauses after all voters were asked, and none can be followed.
const VOTERS_BACKOFF: Backoff =
    Backoff { initial: Duration::from_millis(200), factor: 2.0, max: Duration::from_secs(5), jitter: 0.5 };

/// A voter that was followed for this long was a good one.
const STABLE: Duration = Duration::from_secs(10);

/// One run of the worker.
pub(super) struct Follower {
    pub(super) api: Arc<Api>,
    pub(super) worker: Arc<Worker>,
    pub(super) ctx: Context,
}

/// A voter is not followed any more.
struct Ended {
    /// True if it had told anything.
    has_told: bool,
    why: PeerProblem,
}

impl Follower {
    /// Returns an error alone: that of a file.
    pub(super) async fn follow(&self) -> Result<Infallible, Failure> {
        let file = self.worker.membership.clone();
        let mut known = run_blocking(move || file.read()).await?;
        loop {
            let (member, is_told) = match known {
                Some(member) if !member.is_removed => (member, false),
                former => (self.join(former.as_ref()).await?, true),
            };
            known = Some(self.follow_voters(member, is_told).await?);
        }
    }

    /// Waits for a ticket, and redeems it: not that by which the node has joined before it was removed.
    async fn join(&self, former: Option<&Membership>) -> Result<Membership, Failure> {
        // Also of a worker that was reset.
        self.api.identities.replace(Source::Cluster, Vec::new());
        let certificate = self.certify()?;
        let (mut last, mut failures, mut next_call) = (None, 0, Instant::now());
        let mut waits_for = (String::new(), String::new());
        loop {
            let tickets = self.worker.tickets.clone();
            let (awaited, hint) = match run_blocking(move || tickets.load_ticket()).await {
                Ok(Some(EnrolmentTicket::Join(pending))) => {
                    let ticket = pending.ticket();
                    if last != Some(ticket.id()) {
                        (last, failures, next_call) = (Some(ticket.id()), 0, Instant::now());
                    }
                    if former.is_some_and(|former| former.ticket == ticket.id().to_string()) {
                        ("another ticket".to_owned(), WORKER_TICKET.to_owned())
                    } else if next_call > Instant::now() {
                        waits_for.clone()
                    } else {
                        let why = match self.redeem(ticket, &certificate).await {
                            Ok(member) => return Ok(member),
                            Err(why) => why,
                        };
                        failures += 1;
                        let pause = REDEMPTION_BACKOFF.jittered_delay(failures, random_fraction());
                        next_call = Instant::now() + pause;
                        ("a voter that redeems its join ticket".to_owned(), why)
                    }
                }
                Ok(Some(_)) => {
                    ("a join ticket: a golden ticket is for a voter".to_owned(), WORKER_TICKET.to_owned())
                }
                // Of no ticket, the error says how to bootstrap a cluster.
                Ok(None) | Err(EnrolmentConfigError::Malformed { source: TicketError::NoTicket, .. }) => {
                    ("a ticket".to_owned(), WORKER_TICKET.to_owned())
                }
                Err(error) => ("a ticket".to_owned(), error_chain(&error)),
            };
            if waits_for != (awaited.clone(), hint.clone()) {
                self.ctx.signal_not_ready(format!("waits for {awaited}; {hint}"))?;
                waits_for = (awaited.clone(), hint.clone());
                self.worker.set_status(match former {
                    Some(member) => WorkerStatus::Removed { member: member.clone(), awaited, hint },
                    None => WorkerStatus::Waiting { awaited, hint },
                });
            }
            let look = Instant::now() + TICKET_PAUSE;
            // A call that is due is not delayed by the next look.
            sleep_until(if next_call > Instant::now() { look.min(next_call) } else { look }).await;
        }
    }

    /// The certificate of the key of the API, which is that of the node.
    fn certify(&self) -> Result<Certificate, Failure> {
        let key = PrivateKey::from_pkcs8(self.api.key.pkcs8())?;
        Ok(CertificateTemplate::default().self_sign(&key)?)
    }

    /// Redeems a ticket at the first of its voters that admits the node. An error says why none does.
    async fn redeem(&self, ticket: &JoinTicket, certificate: &Certificate) -> Result<Membership, String> {
        let mut errors = Vec::new();
        for voter in ticket.voters() {
            let request = worker_message(ticket, certificate, self.api.address);
            let told = match call_voter(voter, &self.api.key, request).await {
                Ok(answer) => ToldRecords::parse(&answer.records.unwrap_or_default())
                    .map_err(|error| error_chain(&error)),
                // Another one would, too.
                Err(EnrolCallError::Refused(why)) => return Err(why),
                Err(error) => Err(error_chain(&error)),
            };
            match told {
                Ok(told) => {
                    let member = self.apply(&ticket.id().to_string(), told).await;
                    return member.map_err(|error| format!("can't keep the answer of a voter: {error}"));
                }
                Err(error) => errors.push(error),
            }
        }
        Err(errors.join("; "))
    }

    /// Serves what a voter has told, and keeps it.
    async fn apply(&self, ticket: &str, told: ToldRecords) -> io::Result<Membership> {
        let ToldRecords { node, cluster, voters, operators } = told;
        let ticket = ticket.to_owned();
        let member = Membership { node, cluster, ticket, is_removed: false, operators, cut_off_since: None };
        self.serve(&member);
        let (peers, kept) = (self.api.peers.clone(), member.clone());
        let file = self.worker.membership.clone();
        // The voters first: a member without voters could never ask one.
        run_blocking(move || peers.write(&voters).and_then(|()| file.write(&kept))).await?;
        Ok(member)
    }

    /// Admits the operators of the cluster, if the configuration says so.
    fn serve(&self, member: &Membership) {
        if self.api.cluster_operators {
            self.api.identities.replace(Source::Cluster, member.operators.clone());
        }
    }

    /// Follows one voter after the other, until the cluster has removed the node. Returns what is kept then. `is_told` is true if a
    /// voter has told what is known just now.
    async fn follow_voters(&self, mut member: Membership, is_told: bool) -> Result<Membership, Failure> {
        self.serve(&member);
        let mut since = member.cut_off_since.unwrap_or_else(SystemTime::now);
        if is_told {
            self.worker.set_status(WorkerStatus::Following(member.clone()));
        } else {
            self.cut_off(&member, since, &[]);
        }
        self.ctx.signal_ready()?;
        let (mut errors, mut failures) = (Vec::<PeerError>::new(), 0);
        // The workers of a cluster begin with different ones.
        let mut turn = usize::from(self.api.key.public_key().to_bytes()[0]);
        loop {
            let file = self.api.peers.clone();
            let damaged =
                |error: io::Error| io::Error::new(error.kind(), format!("{error}: {RESET_AND_JOIN}"));
            let voters = run_blocking(move || file.read().map_err(damaged)).await?;
            let Some(voter) = voters.get(turn % voters.len().max(1)).cloned() else {
                return Err(Failure::new(format!("no voter of the cluster is known: {RESET_AND_JOIN}")));
            };
            turn += 1;
            let began = Instant::now();
            let Ended { has_told, why } = self.follow_voter(&voter, &mut member).await?;
            if matches!(why, PeerProblem::Removed) && self.is_removed(&voter, &member.cluster).await {
                return self.leave(member, &voter).await;
            }
            if has_told {
                tracing::warn!("follows node {} no more: {}", voter.id, error_chain(&why));
                since = SystemTime::now();
                errors.clear();
            }
            if began.elapsed() >= STABLE {
                failures = 0;
            }
            errors.push(PeerError { peer: voter, problem: why });
            let is_cut_off = errors.len() >= voters.len();
            if is_cut_off && member.cut_off_since.is_none() {
                member.cut_off_since = Some(since);
                let (file, kept) = (self.worker.membership.clone(), member.clone());
                run_blocking(move || file.write(&kept)).await?;
            }
            self.cut_off(&member, since, &errors);
            if is_cut_off {
                failures += 1;
                sleep(VOTERS_BACKOFF.jittered_delay(failures, random_fraction())).await;
                errors.clear();
            }
        }
    }

    fn cut_off(&self, member: &Membership, since: SystemTime, errors: &[PeerError]) {
        let asked = describe_all(errors);
        self.worker.set_status(WorkerStatus::CutOff { member: member.clone(), since, asked });
    }

    /// Follows a voter as long as it tells anything. An error is that of a file.
    async fn follow_voter(&self, voter: &Peer, member: &mut Membership) -> Result<Ended, Failure> {
        let mut has_told = false;
        let ended = |has_told, why| Ok(Ended { has_told, why });
        let request = WatchRecordsRequest { address: self.api.address.to_string() };
        let connected = timeout(CALL_TIMEOUT, async {
            let mut client = self.api.connect_peer(voter).await?;
            let answer = client.watch_records(request).await.map_err(PeerProblem::Refused)?;
            Ok((client, answer.into_inner()))
        });
        // Without its client, a connection counts as idle, and does not notice that its voter is gone.
        let (_client, mut records) = match connected.await.unwrap_or(Err(PeerProblem::Timeout)) {
            Ok(connected) => connected,
            Err(why) => return ended(has_told, why),
        };
        loop {
            // It tells what it knows at once, and then what changes.
            let within = if has_told { Duration::MAX } else { CALL_TIMEOUT };
            let Ok(message) = timeout(within, records.message()).await else {
                return ended(has_told, PeerProblem::Timeout);
            };
            let told = match message {
                Ok(Some(message)) => ToldRecords::parse(&message),
                Ok(None) => {
                    return ended(has_told, PeerProblem::Refused(Status::unavailable("it has stopped")));
                }
                Err(status) => return ended(has_told, PeerProblem::Refused(status)),
            };
            match told {
                Ok(told) if told.cluster != member.cluster => {
                    return ended(has_told, PeerProblem::Records(InvalidRecords::OtherCluster));
                }
                Ok(told) => *member = self.apply(&member.ticket, told).await?,
                Err(error) => return ended(has_told, PeerProblem::Records(error)),
            }
            if !has_told {
                tracing::info!("follows node {} at {}", voter.id, voter.address);
            }
            has_told = true;
            self.worker.set_status(WorkerStatus::Following(member.clone()));
        }
    }

    /// Asks a voter that does not admit the node whether the cluster has removed it: the voter alone may not know it yet, or not
    /// know that it is back.
    async fn is_removed(&self, voter: &Peer, cluster: &str) -> bool {
        let (expected, request) = (voter.key, WhoAmIRequest { cluster: cluster.to_owned() });
        let asked = timeout(CALL_TIMEOUT, async {
            let channel = connect(voter.address, move |key| *key == expected, &self.api.key).await;
            let channel = channel.map_err(|error| Status::unavailable(error.to_string()))?;
            NodeClient::new(channel).who_am_i(request).await
        });
        matches!(asked.await, Ok(Err(status)) if status.code() == Code::NotFound)
    }

    /// Admits nobody of the cluster any more.
    async fn leave(&self, member: Membership, voter: &Peer) -> Result<Membership, Failure> {
        tracing::error!("the node {REMOVED}, as node {} at {} says", voter.id, voter.address);
        let member = Membership { is_removed: true, operators: Vec::new(), cut_off_since: None, ..member };
        self.serve(&member);
        let (file, kept) = (self.worker.membership.clone(), member.clone());
        run_blocking(move || file.write(&kept)).await?;
        Ok(member)
    }
}

/// What to do on a node that waits for a ticket.
const WORKER_TICKET: &str = "`nodectl cluster ticket create --role worker` on a voter, and copy it to esp/enrolment.pb below the data directory";

//! What a joining member asks its cluster before it starts: whether it may.

use std::io::{self, ErrorKind};
use std::net::IpAddr;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use nodekeel_localstorage::pki::Credentials;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::client::connect_from;
use super::join_claim::{JoinQuestion, check_claim, record_claim};
use super::kv::EtcdKv;
use super::members::EtcdMembers;
use super::peer_client::{ListedMember, PeerClient};
use super::{FIRST_PAUSE, LONGEST_PAUSE, backend_error};
use crate::BoxError;
use crate::consensus::join::{check_join, find_listed, find_started};
use crate::consensus::{
    ClusterMembers as _, ConsensusError, JoinRefusal, Member, MemberId, Peer, StatusReporter,
};

/// A member that has not joined yet and is about to start.
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
    /// another host's. Any member refuses a first start that knows of one.
    pub(super) async fn wait_admitted(
        &self,
        reporter: &StatusReporter<'_>,
    ) -> Result<Vec<Peer>, ConsensusError> {
        let client =
            PeerClient::new(self.credentials).map_err(backend_error("use the ticket's credentials"))?;
        let mut pause = FIRST_PAUSE;
        loop {
            match self.ask_peers(&client).await {
                Ok(Ok(members)) => return self.initial_peers(&members),
                Ok(Err(refusal)) => {
                    reporter.report_refused(&refusal);
                    return Err(ConsensusError::JoinRefused(refusal));
                }
                Err(reasons) => reporter.report_waiting(&format!(
                    "no majority of the cluster answers whether {} may join: {reasons}",
                    self.this.name
                )),
            }
            // No member notifies a host that is not one itself, and there may be none yet that could.
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
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
        if let (JoinQuestion::MayStart(_), Some(refusal)) =
            (self.question, find_started(&members, &self.this))
        {
            return Ok(Err(refusal));
        }
        let is_peer = |entry: &&ListedMember| entry.peer_urls.iter().any(|url| url == peer.url.as_str());
        let url = known.iter().find(is_peer).and_then(|entry| entry.client_urls.first());
        let url = url.ok_or("it has no URL for clients yet")?;
        let keys = connect_from(self.address, url, &peer.name, self.credentials, true).await?;
        let cluster = EtcdMembers::new(EtcdKv::new(keys, CancellationToken::new()));
        let listed = cluster.list_members().await?;
        match self.claim_member(&cluster, &listed).await? {
            Ok(id) => {
                cluster.announce_learner(id, &self.this.url).await?;
                Ok(Ok(listed))
            }
            Err(refusal) => Ok(Err(refusal)),
        }
    }

    /// Decides by the list and the recorded claim, and records this host's.
    async fn claim_member(
        &self,
        cluster: &EtcdMembers,
        listed: &[Member],
    ) -> Result<Result<MemberId, JoinRefusal>, BoxError> {
        let (found, claim) = match self.question {
            JoinQuestion::MayStart(claim) => (check_join(listed, &self.this), Some(claim)),
            JoinQuestion::MayResume => (find_listed(listed, &self.this).map(|member| member.id), None),
        };
        let id = match found {
            Ok(id) => id,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let recorded = record_claim(&cluster.kv, id, claim).await?;
        Ok(check_claim(recorded.as_deref(), claim, (id, &self.this.name)).map(|()| id))
    }

    /// The members but this one. A joining etcd must know exactly the present members; one that resumes has its
    /// own list.
    fn initial_peers(&self, members: &[Member]) -> Result<Vec<Peer>, ConsensusError> {
        if let JoinQuestion::MayResume = self.question {
            return Ok(self.peers.to_vec());
        }
        let others = members.iter().filter(|member| !member.has_peer_url(&self.this.url));
        let named = others.flat_map(|member| {
            let name = member.name.clone().unwrap_or_default();
            member.peer_urls.iter().map(move |url| (name.clone(), url))
        });
        let peers = named.map(|(name, url)| Ok(Peer::new(name.parse()?, url.parse()?)));
        peers.collect::<Result<_, crate::consensus::InvalidName>>().map_err(backend_error("list the members"))
    }
}

/// etcd closes a connection whose certificate it rejects, without a word.
fn explain_rejection(error: io::Error) -> BoxError {
    match error.kind() {
        ErrorKind::InvalidData | ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => {
            format!("it rejects this node's certificate, which may be revoked ({error})").into()
        }
        _ => error.into(),
    }
}

//! The list of members, from etcd.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use etcd_client as api;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};

use super::convert::{self, CALL_TIMEOUT, membership_error};
use super::health::name_and_url;
use super::kv::EtcdKv;
use super::peer_client::PeerClient;
use crate::consensus::kv::{KeyRange, KvError, KvStore as _};
use crate::consensus::{ClusterMembers, Member, MemberId, MembershipError, NewMember, PeerUrl};

/// Key prefix of learners that have announced their start, by id. A key is deleted with the promotion.
pub(super) const LEARNERS: &str = "/etcd-learners/";

/// The time for which a change of members is retried while etcd finds the cluster unhealthy. etcd requires connections
/// that are five seconds old, and a member that has just joined, or restarted, has younger ones.
const HEALTH_WAIT: Duration = Duration::from_secs(8);
/// The pause between these attempts.
const HEALTH_PAUSE: Duration = Duration::from_millis(200);

/// The list of members, over one member's client.
#[derive(Clone)]
pub(super) struct EtcdMembers {
    pub(super) kv: EtcdKv,
    /// Asks the members at their peer ports.
    pub(super) peers: PeerClient,
}

impl EtcdMembers {
    /// Makes a call with a timeout, until the store is stopped. etcd's rejections are returned for their
    /// text.
    async fn call<T>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<T, api::Error>>,
    ) -> Result<Result<T, api::Error>, MembershipError> {
        tokio::select! {
            biased;
            () = self.kv.stop_token.cancelled() => Err(MembershipError::Stopped),
            answer = timeout(CALL_TIMEOUT, call) => {
                answer.map_err(|late| MembershipError::Unavailable { operation, source: late.into() })
            }
        }
    }

    /// Waits until this member knows everything that the cluster has agreed on. etcd 3.4 lists what the
    /// queried member knows.
    async fn catch_up(&self) -> Result<(), MembershipError> {
        let operation = "list the members";
        // A linearizable read of any key waits until the member has applied all that was committed before.
        match self.kv.range(KeyRange::single_key(LEARNERS)).await {
            Ok(_) => Ok(()),
            Err(KvError::Stopped) => Err(MembershipError::Stopped),
            Err(error) => Err(MembershipError::Unavailable { operation, source: error.into() }),
        }
    }

    /// Changes the peer URL of a member to this one alone. It can be repeated.
    pub(super) async fn update_peer_url(&self, id: MemberId, url: &PeerUrl) -> Result<(), MembershipError> {
        const OPERATION: &str = "update the member's peer URL";
        let mut client = self.kv.client.cluster_client();
        let answer = self.call(OPERATION, client.member_update(id.0, [url.to_string()])).await?;
        answer.map(drop).map_err(|error| membership_error(OPERATION, error))
    }

    /// Announces that a learner starts: etcd itself does not report it.
    pub(super) async fn announce_learner(&self, id: MemberId, url: &PeerUrl) -> Result<(), MembershipError> {
        let put = self.kv.put(&announcement_key(id), url.as_str().as_bytes()).await;
        put.map(drop).map_err(|error| MembershipError::Unavailable {
            operation: "announce a learner",
            source: error.into(),
        })
    }

    /// Returns whether this node's member leads the cluster, as far as it knows.
    pub(super) async fn is_leader(&self) -> Result<bool, MembershipError> {
        let (this, leader) = self.this_and_leader().await?;
        Ok(this == leader)
    }

    /// The size of the cluster's data, as this node's member has it.
    pub(super) async fn store_bytes(&self) -> Result<u64, MembershipError> {
        const OPERATION: &str = "read the size of the store";
        let mut client = self.kv.client.maintenance_client();
        let status = self.call(OPERATION, client.status()).await?;
        let status = status.map_err(|error| membership_error(OPERATION, error))?;
        Ok(u64::try_from(status.db_size()).unwrap_or_default())
    }

    /// The ids of this node's member and of the leader, as far as it knows.
    async fn this_and_leader(&self) -> Result<(MemberId, MemberId), MembershipError> {
        const OPERATION: &str = "read the member's status";
        let mut client = self.kv.client.maintenance_client();
        let status = self.call(OPERATION, client.status()).await?;
        let status = status.map_err(|error| membership_error(OPERATION, error))?;
        let this = status.header().map_or(0, api::ResponseHeader::member_id);
        Ok((MemberId(this), MemberId(status.leader())))
    }

    /// The voters but this member, and those of them that answer.
    async fn other_voters(&self, this: MemberId) -> Result<(usize, Vec<Member>), MembershipError> {
        let mut others = self.list_members().await?;
        others.retain(|member| !member.is_learner && member.id != this);
        let asked = others.iter().map(async |member| {
            let (name, url) = name_and_url(member)?;
            self.peers.is_answering(&name, &url).await.then(|| member.clone())
        });
        let answering = join_all(asked).await.into_iter().flatten().collect();
        Ok((others.len(), answering))
    }

    /// Makes a change of members, again and again while etcd finds the cluster unhealthy.
    async fn change<T, Answer>(
        &self,
        operation: &'static str,
        change: impl Fn(api::ClusterClient) -> Answer,
    ) -> Result<Result<T, api::Error>, MembershipError>
    where
        Answer: Future<Output = Result<T, api::Error>>,
    {
        let started_at = Instant::now();
        loop {
            let answer = self.call(operation, change(self.kv.client.cluster_client())).await?;
            match &answer {
                Err(error) if !convert::is_unhealthy(error) => return Ok(answer),
                Ok(_) => return Ok(answer),
                // etcd compares the age of connections when it is asked, and notifies of none.
                Err(_) if started_at.elapsed() < HEALTH_WAIT => sleep(HEALTH_PAUSE).await,
                Err(_) => {
                    let condition = self.describe_unhealthy().await;
                    return Err(MembershipError::UnhealthyCluster { operation, condition });
                }
            }
        }
    }

    /// The members that do not answer, and the remedy.
    async fn describe_unhealthy(&self) -> String {
        let Ok(members) = self.list_members().await else {
            return "not all voting members are connected to each other: start those that are down, then try again".to_owned();
        };
        // A learner has no vote, and does not make the cluster unhealthy.
        let asking = members.iter().filter(|member| !member.is_learner).map(|member| async move {
            let (name, url) = (member.name.as_deref()?, member.peer_urls.first()?);
            let is_answering = self.peers.is_answering(name, &url.parse().ok()?).await;
            (!is_answering).then(|| format!("{name} ({}) at {url} does not answer", member.id))
        });
        let silent: Vec<_> = join_all(asking).await.into_iter().flatten().collect();
        if silent.is_empty() {
            return "the voting members have not been connected for five seconds: try again".to_owned();
        }
        format!("{}: start it, or remove it from the cluster first", silent.join(", "))
    }
}

#[async_trait]
impl ClusterMembers for EtcdMembers {
    async fn list_members(&self) -> Result<Vec<Member>, MembershipError> {
        const OPERATION: &str = "list the members";
        self.catch_up().await?;
        let mut client = self.kv.client.cluster_client();
        let answer = self.call(OPERATION, client.member_list()).await?;
        let answer = answer.map_err(|error| membership_error(OPERATION, error))?;
        let mut members: Vec<_> = answer.members().iter().map(list_entry).collect();
        members.sort_by_key(|member| member.id);
        Ok(members)
    }

    async fn add_learner(&self, new: &NewMember) -> Result<Member, MembershipError> {
        const OPERATION: &str = "add a learner";
        let url = new.peer_url.to_string();
        // A repeated call, also after a lost answer, adds no second member.
        let existing = self.list_members().await?.into_iter().find(|member| member.peer_urls.contains(&url));
        match existing {
            Some(existing) => Ok(existing),
            None => {
                let add = |mut client: api::ClusterClient| {
                    let (url, options) = (url.clone(), api::MemberAddOptions::new().with_is_learner());
                    async move { client.member_add([url], Some(options)).await }
                };
                let answer = self.change(OPERATION, add).await?;
                let answer = answer.map_err(|error| membership_error(OPERATION, error))?;
                let empty = || MembershipError::Rejected {
                    operation: OPERATION,
                    source: "the response names no member".into(),
                };
                Ok(list_entry(answer.member().ok_or_else(empty)?))
            }
        }
    }

    async fn promote_member(&self, id: MemberId) -> Result<(), MembershipError> {
        const OPERATION: &str = "promote a learner";
        let mut client = self.kv.client.cluster_client();
        let Err(error) = self.call(OPERATION, client.member_promote(id.0)).await? else { return Ok(()) };
        let text = convert::error_message(&error);
        if text.contains("in sync with leader") {
            Err(MembershipError::LearnerNotReady { id })
        } else if text.contains("can only promote a learner") {
            // A voter already, for example by an earlier call whose answer was lost.
            Ok(())
        } else if text.contains("member not found") {
            Err(MembershipError::MemberNotFound { id })
        } else {
            Err(membership_error(OPERATION, error))
        }
    }

    async fn remove_member(&self, id: MemberId) -> Result<(), MembershipError> {
        const OPERATION: &str = "remove a member";
        let members = self.list_members().await?;
        let Some(existing) = members.iter().find(|member| member.id == id) else { return Ok(()) };
        if !existing.is_learner && members.iter().filter(|member| !member.is_learner).count() == 1 {
            return Err(MembershipError::QuorumLoss);
        }
        let remove = |mut client: api::ClusterClient| async move { client.member_remove(id.0).await };
        match self.change(OPERATION, remove).await? {
            // Another call may have removed it since the list was read: that is a success.
            Err(error) if !convert::error_message(&error).contains("member not found") => {
                Err(membership_error(OPERATION, error))
            }
            _ => Ok(()),
        }
    }

    async fn prepare_leave(&self) -> Result<(), MembershipError> {
        const OPERATION: &str = "move the leadership to another member";
        let (this, leader) = self.this_and_leader().await?;
        let (others, answering) = self.other_voters(this).await?;
        if others == 0 {
            return Err(MembershipError::QuorumLoss);
        }
        if answering.len() <= others / 2 {
            let condition = self.describe_unhealthy().await;
            return Err(MembershipError::UnhealthyCluster { operation: OPERATION, condition });
        }
        if this != leader {
            return Ok(());
        }
        let mut maintenance = self.kv.client.maintenance_client();
        let mut last = None;
        for successor in answering {
            // etcd waits until it has what this member has, and gives up if that takes too long.
            match self.call(OPERATION, maintenance.move_leader(successor.id.0)).await? {
                Ok(_) => return Ok(()),
                Err(error) => last = Some(error),
            }
        }
        let source = last.map_or_else(|| "none answers".into(), Into::into);
        Err(MembershipError::Unavailable { operation: OPERATION, source })
    }
}

/// The key by which the start of a learner is announced.
pub(super) fn announcement_key(id: MemberId) -> Vec<u8> {
    format!("{LEARNERS}{id}").into_bytes()
}

pub(super) fn list_entry(member: &api::Member) -> Member {
    let name = Some(member.name()).filter(|name| !name.is_empty()).map(str::to_owned);
    Member::new(MemberId(member.id()), name, member.peer_urls().to_vec(), member.is_learner())
}

impl fmt::Debug for EtcdMembers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdMembers").finish_non_exhaustive()
    }
}

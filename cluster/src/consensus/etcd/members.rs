//! The list of members, from etcd.

use std::fmt;

use async_trait::async_trait;
use etcd_client as api;
use tokio::time::timeout;

use super::convert::{self, CALL_TIMEOUT, membership_error};
use super::kv::EtcdKv;
use super::promote::LEARNERS;
use crate::consensus::kv::{KeyRange, KvError, KvStore as _, RangeRequest};
use crate::consensus::{ClusterMembers, Member, MemberId, MembershipError, NewMember, PeerUrl};

/// The list of members, over one member's client.
#[derive(Clone)]
pub(super) struct EtcdMembers(pub(super) EtcdKv);

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
            () = self.0.stop_token.cancelled() => Err(MembershipError::Stopped),
            answer = timeout(CALL_TIMEOUT, call) => {
                answer.map_err(|late| MembershipError::Unavailable { operation, source: late.into() })
            }
        }
    }

    /// Waits until this member knows everything that the cluster has agreed on. etcd 3.4 lists what the
    /// queried member knows.
    async fn catch_up(&self) -> Result<(), MembershipError> {
        let operation = "list the members";
        match self.0.range(RangeRequest::new(KeyRange::single_key(LEARNERS))).await {
            Ok(_) => Ok(()),
            Err(KvError::Stopped) => Err(MembershipError::Stopped),
            Err(error) => Err(MembershipError::Unavailable { operation, source: error.into() }),
        }
    }

    /// Changes the peer URL of a member to this one alone. It can be repeated.
    pub(super) async fn update_peer_url(&self, id: MemberId, url: &PeerUrl) -> Result<(), MembershipError> {
        const OPERATION: &str = "update the member's peer URL";
        let mut client = self.0.client.cluster_client();
        let answer = self.call(OPERATION, client.member_update(id.0, [url.to_string()])).await?;
        answer.map(drop).map_err(|error| membership_error(OPERATION, error))
    }

    /// Announces a learner to the promoters: etcd itself reports no new learner to anyone.
    async fn announce_learner(&self, learner: &Member) -> Result<(), MembershipError> {
        let key = format!("{LEARNERS}{}", learner.id);
        let put = self.0.put(key.as_bytes(), learner.peer_urls.join(",").as_bytes()).await;
        put.map(drop).map_err(|error| MembershipError::Unavailable {
            operation: "announce a learner",
            source: error.into(),
        })
    }
}

#[async_trait]
impl ClusterMembers for EtcdMembers {
    async fn list_members(&self) -> Result<Vec<Member>, MembershipError> {
        const OPERATION: &str = "list the members";
        self.catch_up().await?;
        let mut client = self.0.client.cluster_client();
        let answer = self.call(OPERATION, client.member_list()).await?;
        let answer = answer.map_err(|error| membership_error(OPERATION, error))?;
        let mut members: Vec<_> = answer.members().iter().map(list_entry).collect();
        members.sort_by_key(|member| member.id);
        Ok(members)
    }

    async fn add_learner(&self, new: &NewMember) -> Result<Member, MembershipError> {
        const OPERATION: &str = "add a learner";
        let url = new.peer_url.to_string();
        let existing = self.list_members().await?.into_iter().find(|member| member.peer_urls.contains(&url));
        let added = match existing {
            Some(existing) if existing.is_learner => existing,
            Some(voter) => return Ok(voter),
            None => {
                let mut client = self.0.client.cluster_client();
                let options = api::MemberAddOptions::new().with_is_learner();
                let answer = self.call(OPERATION, client.member_add([url], Some(options))).await?;
                let answer = answer.map_err(|error| membership_error(OPERATION, error))?;
                let empty = || MembershipError::Rejected {
                    operation: OPERATION,
                    source: "the response names no member".into(),
                };
                list_entry(answer.member().ok_or_else(empty)?)
            }
        };
        self.announce_learner(&added).await?;
        Ok(added)
    }

    async fn promote_member(&self, id: MemberId) -> Result<(), MembershipError> {
        const OPERATION: &str = "promote a learner";
        let mut client = self.0.client.cluster_client();
        let Err(error) = self.call(OPERATION, client.member_promote(id.0)).await? else { return Ok(()) };
        let text = convert::error_message(&error);
        match () {
            () if text.contains("in sync with leader") => Err(MembershipError::LearnerNotReady { id }),
            () if text.contains("can only promote a learner") => Ok(()),
            () if text.contains("member not found") => Err(MembershipError::MemberNotFound { id }),
            () => Err(membership_error(OPERATION, error)),
        }
    }

    async fn remove_member(&self, id: MemberId) -> Result<(), MembershipError> {
        const OPERATION: &str = "remove a member";
        let members = self.list_members().await?;
        let Some(existing) = members.iter().find(|member| member.id == id) else { return Ok(()) };
        if !existing.is_learner && members.iter().filter(|member| !member.is_learner).count() == 1 {
            return Err(MembershipError::QuorumLoss);
        }
        let mut client = self.0.client.cluster_client();
        match self.call(OPERATION, client.member_remove(id.0)).await? {
            Err(error) if !convert::error_message(&error).contains("member not found") => {
                Err(membership_error(OPERATION, error))
            }
            _ => Ok(()),
        }
    }
}

fn list_entry(member: &api::Member) -> Member {
    let name = Some(member.name()).filter(|name| !name.is_empty()).map(str::to_owned);
    Member::new(MemberId(member.id()), name, member.peer_urls().to_vec(), member.is_learner())
}

impl fmt::Debug for EtcdMembers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdMembers").finish_non_exhaustive()
    }
}

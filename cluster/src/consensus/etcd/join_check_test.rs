use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;

use super::super::join_claim::JoinClaim;
use super::*;
use crate::consensus::kv::KeyRange;
use crate::consensus::memory::MemoryKv;
use crate::consensus::{ClusterAccess, MembershipError, NewMember};
use crate::pki::{CertificateSpec, ClusterCa, PendingCa};

const ADDRESS: &str = "192.0.2.3";
const URL: &str = "https://192.0.2.3:7834";

/// A cluster that lists these members, one list after the other.
#[derive(Debug)]
struct ListedCluster(Mutex<VecDeque<Vec<Member>>>);

#[async_trait]
impl ClusterMembers for ListedCluster {
    async fn list_members(&self) -> Result<Vec<Member>, MembershipError> {
        Ok(self.0.lock().unwrap().pop_front().expect("another list"))
    }

    async fn add_learner(&self, _: &NewMember) -> Result<Member, MembershipError> {
        unreachable!("a joining member adds none")
    }

    async fn promote_member(&self, _: MemberId) -> Result<(), MembershipError> {
        unreachable!("a joining member promotes none")
    }

    async fn hand_over(&self) -> Result<ClusterAccess, MembershipError> {
        unreachable!()
    }

    async fn remove_member(&self, _: MemberId) -> Result<(), MembershipError> {
        unreachable!("a joining member removes none")
    }
}

fn listed(id: u64, name: Option<&str>, is_learner: bool) -> Vec<Member> {
    vec![Member::new(MemberId(id), name.map(str::to_owned), vec![URL.into()], is_learner)]
}

/// A cluster, and the credentials of a ticket.
async fn ticket() -> (Arc<MemoryKv>, ClusterCa, Credentials) {
    let kv = Arc::new(MemoryKv::new());
    let ca = PendingCa::generate().unwrap().save_to(Arc::clone(&kv) as Arc<dyn KvStore>).await.unwrap();
    let spec = CertificateSpec::for_member("three".parse().unwrap(), ADDRESS.parse().unwrap());
    let credentials = ca.issue_credentials(&spec).await.unwrap();
    (kv, ca, credentials)
}

/// The decision by these lists.
async fn decide(
    kv: &MemoryKv,
    credentials: &Credentials,
    lists: &[Vec<Member>],
) -> Result<Result<MemberId, JoinRefusal>, BoxError> {
    let check = JoinCheck {
        question: &JoinQuestion::MayStart(
            JoinClaim::parse(format!("{}\n", "1".repeat(32)).as_bytes()).unwrap(),
        ),
        this: Peer::new("three".parse().unwrap(), URL.parse().unwrap()),
        address: ADDRESS.parse().unwrap(),
        credentials,
        peers: &[],
    };
    let cluster = ListedCluster(Mutex::new(lists.to_vec().into()));
    Ok(check.claim_member(kv, &cluster).await?.map(|(id, _)| id))
}

#[tokio::test]
async fn a_learner_that_stays_one_is_claimed() {
    let (kv, _, credentials) = ticket().await;
    let lists = [listed(3, None, true), listed(3, None, true)];
    assert_eq!(decide(&kv, &credentials, &lists).await.unwrap(), Ok(MemberId(3)));
    assert!(kv.get(b"/etcd-joins/3").await.unwrap().is_some());
}

/// The learner at the URL is that of another ticket.
#[tokio::test]
async fn a_host_whose_ticket_was_revoked_claims_nothing() {
    let (kv, ca, credentials) = ticket().await;
    ca.revoke_name("three").await.unwrap();
    let decision = decide(&kv, &credentials, &[listed(4, None, true)]).await.unwrap();
    assert_eq!(decision, Err(JoinRefusal::TicketRevoked { name: "three".into() }));
    let claims = kv.range(KeyRange::prefix("/etcd-joins/")).await.unwrap();
    assert!(claims.kvs.is_empty(), "{claims:?}");
}

/// By another host and an earlier release, which makes no claim.
#[tokio::test]
async fn a_member_that_starts_or_gets_its_vote_while_it_is_claimed_is_refused() {
    for after in [listed(3, Some("three"), true), listed(3, None, false)] {
        let (kv, _, credentials) = ticket().await;
        let decision = decide(&kv, &credentials, &[listed(3, None, true), after]).await.unwrap();
        assert_eq!(decision, Err(JoinRefusal::AlreadyStarted { id: MemberId(3), name: "three".into() }));
    }
}

#[tokio::test]
async fn a_member_that_is_replaced_while_it_is_claimed_is_asked_for_again() {
    let (kv, _, credentials) = ticket().await;
    let replaced = decide(&kv, &credentials, &[listed(3, None, true), listed(4, None, true)]).await;
    assert!(replaced.unwrap_err().to_string().contains("was replaced"));
}

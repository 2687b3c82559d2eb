use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;

use nodekeel_localstorage::pki::Credentials;

use super::*;
use crate::consensus::MemberReport;
use crate::consensus::kv::KeyRange;
use crate::consensus::memory::MemoryKv;
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

    async fn add_learner(&self, new: &NewMember) -> Result<Member, MembershipError> {
        let added = Member::new(MemberId(9), None, vec![new.peer_url.to_string()], true);
        let lists = self.0.lock().unwrap();
        match lists.front() {
            Some(listed) if listed.contains(&added) => Ok(added),
            _ => Err(MembershipError::TooManyLearners),
        }
    }

    async fn promote_member(&self, _: MemberId) -> Result<(), MembershipError> {
        unreachable!("a joining member promotes none")
    }

    async fn prepare_leave(&self) -> Result<(), MembershipError> {
        unreachable!()
    }

    async fn remove_member(&self, id: MemberId) -> Result<(), MembershipError> {
        // The next list shows it.
        assert!(self.0.lock().unwrap().iter().flatten().all(|member| member.id != id));
        Ok(())
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
    match admit(kv, credentials, lists, None).await? {
        Admission::Admitted(id, _) => Ok(Ok(id)),
        Admission::Refused(refusal) => Ok(Err(refusal)),
        waits => panic!("{waits:?}"),
    }
}

async fn admit(
    kv: &MemoryKv,
    credentials: &Credentials,
    lists: &[Vec<Member>],
    overdue: Option<MemberId>,
) -> Result<Admission, BoxError> {
    let joiner = Joiner {
        this: Peer::new("three".parse().unwrap(), URL.parse().unwrap()),
        claim: JoinClaim::parse(format!("{}\n", "1".repeat(32)).as_bytes()).unwrap(),
        certificate: credentials.certificate.clone(),
        ca: credentials.ca.clone(),
    };
    let cluster = ListedCluster(Mutex::new(lists.to_vec().into()));
    joiner.claim_member(kv, &cluster, overdue).await
}

/// Of another ticket.
fn other_learner(id: u64, name: Option<&str>) -> Vec<Member> {
    let url = "https://192.0.2.4:7834".to_owned();
    vec![Member::new(MemberId(id), name.map(str::to_owned), vec![url], true)]
}

#[tokio::test]
async fn an_invited_member_is_added_and_one_whose_ticket_is_used_is_not() {
    let (kv, _, credentials) = ticket().await;
    let refused = decide(&kv, &credentials, &[vec![]]).await.unwrap();
    assert_eq!(refused, Err(JoinRefusal::NotListed { url: URL.parse().unwrap() }));
    kv.put(&invitation_key("three"), URL.as_bytes()).await.unwrap();
    let lists = [vec![], listed(9, None, true)];
    assert_eq!(decide(&kv, &credentials, &lists).await.unwrap(), Ok(MemberId(9)));
}

#[tokio::test]
async fn a_learner_that_was_claimed_and_never_started_gives_its_place_to_another_in_the_end() {
    let (kv, _, credentials) = ticket().await;
    kv.put(&invitation_key("three"), URL.as_bytes()).await.unwrap();
    // That of an earlier release's ticket could not come back.
    let unclaimed = admit(&kv, &credentials, &[other_learner(4, None)], None).await.unwrap();
    let Admission::Waits(reason) = unclaimed else { panic!("{unclaimed:?}") };
    assert!(
        reason.ends_with("`nodectl cluster ticket revoke --address 192.0.2.4 --port 7834` on a member"),
        "{reason}"
    );
    kv.put(b"/etcd-joins/4", b"claimed").await.unwrap();
    let waits = admit(&kv, &credentials, &[other_learner(4, None)], None).await.unwrap();
    assert_eq!(waits, Admission::WaitsFor(other_learner(4, None).remove(0)));
    // One that has started keeps it, however long that takes.
    let waits = admit(&kv, &credentials, &[other_learner(4, Some("four"))], Some(MemberId(4))).await.unwrap();
    let Admission::Waits(reason) = waits else { panic!("{waits:?}") };
    assert!(reason.contains("`nodectl cluster remove four`"), "{reason}");
    let lists = [other_learner(4, None), listed(9, None, true)];
    let admitted = admit(&kv, &credentials, &lists, Some(MemberId(4))).await.unwrap();
    assert!(matches!(admitted, Admission::Admitted(MemberId(9), _)), "{admitted:?}");
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

#[test]
fn nodes_with_tickets_and_learners_that_have_not_started_are_expected() {
    let learner = |id, name: Option<&str>, host| {
        let url = format!("https://192.0.2.{host}:7834");
        MemberReport::new(Member::new(MemberId(id), name.map(str::to_owned), vec![url], true), None)
    };
    let report =
        ClusterReport::new(vec![learner(1, Some("one"), 1), learner(2, None, 2), learner(3, None, 3)]);
    let invited = [("/etcd-invitations/three", "https://192.0.2.3:7834"), ("/etcd-invitations/x", "x")];
    let invited = invited.map(|(key, url)| (key.into(), url.into())).into();
    let expected: Vec<_> = expected_nodes(&invited, &report).into_iter().collect();
    let node = |host: u8, server: &str| (PeerUrl::new([192, 0, 2, host].into(), 7834), server.to_owned());
    assert_eq!(expected, [node(2, "192.0.2.2"), node(3, "three")]);
}

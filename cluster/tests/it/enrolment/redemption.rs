//! Nodes that join by a join ticket.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use nodekeel_cluster::consensus::kv::KeyRange;
use nodekeel_cluster::enrolment::{Enroller, EnrolmentState, WaitCause};
use nodekeel_cluster::node::{
    DEFAULT_NODE_PREFIX, EnrolError, EnrolRequest, GoldenTicket, JoinTicket, JoinTicketLimits, JoinTickets,
    NodeId, NodeRecord, NodeRoles,
};
use nodekeel_cluster::pki::ClusterCa;
use nodekeel_localstorage::pki::{Certificate, CertificateTemplate, PrivateKey};

use super::node_fixture::{
    InProcessVoter, MemoryCluster, NodeFixture, error_chain, parse_ip, peer_url, wait_condition,
};
use super::rejections::interrupt;

/// The bytes before the secret ones of each Ed25519 private key. *Source:* RFC 8410, section 7.
const PKCS8_PREFIX: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// The keys of a node that is new.
struct NewNode {
    node: PrivateKey,
    certificate: Certificate,
    member: PrivateKey,
}

impl NewNode {
    fn new() -> Self {
        let (node, member) = (PrivateKey::generate().expect("a key"), PrivateKey::generate().expect("a key"));
        Self { certificate: self_sign(&node), node, member }
    }

    fn id(&self) -> NodeId {
        NodeId::from_key(DEFAULT_NODE_PREFIX, &self.node.public_key()).expect("a name")
    }

    /// Its request by this ticket, for a call by this key.
    fn request(&self, caller: &str, ticket: &JoinTicket, address: &str) -> EnrolRequest {
        let mut request = EnrolRequest {
            ticket: ticket.id(),
            secret: ticket.secret().clone(),
            url: peer_url(address),
            node_certificate: self.certificate.clone(),
            member_certificate: self_sign(&self.member),
            node_signature: Vec::new(),
            member_signature: Vec::new(),
        };
        request.sign(caller, &self.node, &self.member);
        request
    }
}

fn self_sign(key: &PrivateKey) -> Certificate {
    CertificateTemplate::default().self_sign(key).expect("a certificate")
}

/// The number of uses of all tickets.
async fn count_uses(tickets: &JoinTickets) -> usize {
    let listed = tickets.list_tickets().await.expect("listed");
    listed.iter().map(|ticket| ticket.redemptions.len()).sum()
}

fn uses(uses: u16) -> JoinTicketLimits {
    let mut limits = JoinTicketLimits::default();
    limits.uses = uses.try_into().expect("more than none");
    limits
}

/// A node with this ticket, which calls a voter of the cluster.
fn enrolling(
    cluster: &MemoryCluster,
    address: &str,
    ticket: &JoinTicket,
) -> (NodeFixture, Arc<InProcessVoter>) {
    let mut fixture = cluster.node(address);
    fixture.settings.bootstrap = false;
    fixture.give_join_ticket(ticket);
    let voter = Arc::new(InProcessVoter::new(&cluster.first.node, address));
    fixture.enroller = Some(Arc::clone(&voter) as Arc<dyn Enroller>);
    (fixture, voter)
}

#[tokio::test]
async fn nodes_join_by_one_ticket_with_as_many_uses_and_no_further_one_does() {
    let cluster = MemoryCluster::start().await;
    let voter = InProcessVoter::new(&cluster.first.node, "");
    let ticket = voter.create_ticket(&uses(2)).await;
    let mut runs = Vec::new();
    for address in ["192.0.2.2", "192.0.2.3"] {
        let (fixture, _) = enrolling(&cluster, address, &ticket);
        let (run, membership) = fixture.run_to_running().await;
        assert_eq!(membership.cluster_id, cluster.first.node.cluster_identity().expect("running").cluster_id);
        assert_eq!(run.phases(), "New Waiting Joining Running");
        // It restarts without the ticket, and without a voter.
        run.stop().await;
        fixture.ticket_file().remove().expect("removed");
        let (run, again) = fixture.run_to_running().await;
        assert_eq!(again, membership);
        runs.push((fixture, run));
    }
    let (third, _) = enrolling(&cluster, "192.0.2.4", &ticket);
    let refused = error_chain(third.run_to_failure().await);
    assert!(refused.contains(&format!("join ticket {} is used: create another", ticket.id())), "{refused}");
    // What was redeemed is gone with the join.
    let root = cluster.first.node.root_kv().expect("a running node");
    let kvs = root.range(KeyRange::all_keys()).await.expect("read").kvs;
    let left: Vec<_> =
        kvs.iter().map(|kv| String::from_utf8_lossy(&kv.key)).filter(|key| key.contains("golden")).collect();
    assert!(left.is_empty(), "{left:?}");
    for (_fixture, run) in runs {
        run.stop().await;
    }
    cluster.stop().await;
}

#[tokio::test]
async fn the_same_key_gets_the_same_answer_and_another_key_none() {
    let cluster = MemoryCluster::start().await;
    let voter = InProcessVoter::new(&cluster.first.node, "");
    let ticket = voter.create_ticket(&uses(1)).await;
    let tickets = cluster.first.node.join_tickets().expect("a running node");
    let (now, node) = (SystemTime::now(), NewNode::new());
    let request = node.request("a", &ticket, "192.0.2.2");
    let first = tickets.redeem_ticket("a", &request, now).await.expect("admitted");
    // Neither the answer nor what the cluster has stored of it contains a private key.
    GoldenTicket::from_config(&first).expect_err("the keys are the node's");
    let stored = cluster.first.node.namespaced_kv("cluster", "tickets").expect("a running node");
    let stored = stored.range(KeyRange::all_keys()).await.expect("read").kvs;
    assert_eq!(stored.len(), 2, "the ticket and the place");
    let has_key = |bytes: &[u8]| bytes.windows(PKCS8_PREFIX.len()).any(|window| window == PKCS8_PREFIX);
    assert!(!has_key(&first) && !stored.iter().any(|kv| has_key(&kv.value)));
    assert!(has_key(&cluster.issue("192.0.2.8").await.to_config()), "a golden ticket has them");
    let expired = now + Duration::from_secs(25 * 3600);
    for later in [now, expired] {
        assert_eq!(tickets.redeem_ticket("a", &request, later).await.expect("admitted"), first);
    }
    let one = ticket.id();
    let refused = async |key: &str, request: &EnrolRequest| {
        tickets.redeem_ticket(key, request, now).await.expect_err("refused")
    };
    let by_b = node.request("b", &ticket, "192.0.2.2");
    assert!(matches!(refused("b", &by_b).await, EnrolError::UsedUp { id, .. } if id == one));
    // The same key with another key of the node: it was reset.
    let other = NewNode::new();
    let reset = other.request("a", &ticket, "192.0.2.2");
    assert!(matches!(refused("a", &reset).await, EnrolError::UsedUp { .. }));
    let elsewhere = other.request("a", &ticket, "192.0.2.3");
    assert!(matches!(refused("a", &elsewhere).await, EnrolError::UsedUp { .. }));
    // The place of a node that has not joined is not given to another.
    let more = voter.create_ticket(&uses(9)).await;
    let at_taken = other.request("b", &more, "192.0.2.2");
    assert!(matches!(refused("b", &at_taken).await, EnrolError::Taken { .. }));
    let golden = cluster.issuer().issue_ticket(&peer_url("192.0.2.2")).await.expect_err("a node's own keys");
    assert!(golden.to_string().contains("a node has redeemed a join ticket"), "{golden}");
    // A voter is at the address.
    let at_voter = other.request("b", &more, "192.0.2.1");
    assert!(refused("b", &at_voter).await.to_string().contains("can't admit the node"));
    // A guessed secret, and an unknown ticket, are refused alike.
    let guessed = EnrolRequest { secret: more.secret().clone(), ..request.clone() };
    let mut unknown = EnrolRequest { ticket: "0123456789abcdef".parse().expect("an id"), ..request.clone() };
    unknown.sign("a", &node.node, &node.member);
    let texts = [refused("a", &guessed).await.to_string(), refused("a", &unknown).await.to_string()];
    assert_eq!(texts[0], texts[1]);
    assert!(texts[0].contains("knows no such join ticket"), "{texts:?}");
    cluster.stop().await;
}

#[tokio::test]
async fn who_has_not_the_keys_or_no_address_of_a_machine_is_not_admitted_and_uses_nothing() {
    let cluster = MemoryCluster::start().await;
    let ticket = InProcessVoter::new(&cluster.first.node, "").create_ticket(&uses(9)).await;
    let tickets = cluster.first.node.join_tickets().expect("a running node");
    let (node, thief) = (NewNode::new(), NewNode::new());
    let good = node.request("a", &ticket, "192.0.2.2");
    let golden = cluster.issue("192.0.2.9").await.member_credentials();
    // The certificates of others are public.
    let forged = |change: &dyn Fn(&mut EnrolRequest)| {
        let mut request = thief.request("thief", &ticket, "192.0.2.2");
        change(&mut request);
        request.sign("thief", &thief.node, &thief.member);
        ("thief", request)
    };
    let replayed = |change: &dyn Fn(&mut EnrolRequest)| {
        let mut request = good.clone();
        change(&mut request);
        ("a", request)
    };
    for (caller, request) in [
        forged(&|it| it.node_certificate = good.node_certificate.clone()),
        forged(&|it| it.member_certificate = good.member_certificate.clone()),
        forged(&|it| it.member_certificate = golden.certificate.clone()),
        ("thief", good.clone()),
        replayed(&|it| it.url = peer_url("192.0.2.3")),
        replayed(&|it| it.member_certificate = self_sign(&thief.member)),
        replayed(&|it| it.member_signature = it.node_signature.clone()),
        replayed(&|it| it.node_signature.clear()),
        ("a", node.request("a", &ticket, "0.0.0.0")),
        ("a", node.request("a", &ticket, "ff02::1")),
    ] {
        let refused = tickets.redeem_ticket(caller, &request, SystemTime::now()).await;
        assert!(matches!(refused, Err(EnrolError::Request(_))), "{request:?}: {refused:?}");
    }
    // Its own key has not signed the certificate.
    let mut foreign = node.request("a", &ticket, "192.0.2.2");
    foreign.node_certificate = golden.certificate.clone();
    foreign.sign("a", &golden.key, &node.member);
    let refused = tickets.redeem_ticket("a", &foreign, SystemTime::now()).await;
    assert!(matches!(refused, Err(EnrolError::Request(_))), "{refused:?}");
    assert_eq!(count_uses(&tickets).await, 0);
    tickets.redeem_ticket("a", &good, SystemTime::now()).await.expect("admitted");
    cluster.stop().await;
}

#[tokio::test]
async fn a_node_is_admitted_at_one_address_until_it_has_joined_and_then_at_none() {
    let cluster = MemoryCluster::start().await;
    let voter = InProcessVoter::new(&cluster.first.node, "");
    let ticket = voter.create_ticket(&uses(9)).await;
    let tickets = cluster.first.node.join_tickets().expect("a running node");
    let (now, node) = (SystemTime::now(), NewNode::new());
    // Two copies of one machine.
    let copies = ["192.0.2.2", "192.0.2.3"].map(|address| node.request("a", &ticket, address));
    let (one, two) = tokio::join!(
        tickets.redeem_ticket("a", &copies[0], now),
        tickets.redeem_ticket("a", &copies[1], now)
    );
    let refused = [&one, &two].into_iter().filter_map(|answer| answer.as_ref().err()).collect::<Vec<_>>();
    assert!(matches!(refused[..], [EnrolError::Elsewhere { .. }]), "{refused:?}");
    let admitted = &copies[usize::from(one.is_err())];
    assert!(refused[0].to_string().contains(admitted.url.as_str()), "{}", refused[0]);
    assert_eq!(count_uses(&tickets).await, 1);
    let record = NodeRecord {
        certificate: node.certificate.clone(),
        former_unlock_key: None,
        address: None,
        roles: NodeRoles::empty(),
    };
    let nodes = cluster.first.node.node_store().expect("a running node");
    nodes.create_record(&node.id(), &record).await.expect("it has joined");
    let more = voter.create_ticket(&uses(1)).await;
    for request in [admitted, &node.request("a", &more, "192.0.2.4")] {
        let refused = tickets.redeem_ticket("a", request, now).await.expect_err("it has joined");
        assert!(matches!(refused, EnrolError::Joined { .. }), "{refused}");
    }
    assert_eq!(count_uses(&tickets).await, 1);
    cluster.stop().await;
}

#[tokio::test]
async fn a_revoked_ticket_takes_its_certificates_back_also_if_no_place_is_stored() {
    let cluster = MemoryCluster::start().await;
    let ticket = InProcessVoter::new(&cluster.first.node, "").create_ticket(&uses(2)).await;
    let tickets = cluster.first.node.join_tickets().expect("a running node");
    let (joined, _) = enrolling(&cluster, "192.0.2.2", &ticket);
    let (run, _) = joined.run_to_running().await;
    let thief = NewNode::new();
    let request = thief.request("thief", &ticket, "192.0.2.3");
    tickets.redeem_ticket("thief", &request, SystemTime::now()).await.expect("admitted");
    let kv = cluster.first.node.namespaced_kv("cluster", "tickets").expect("a running node");
    assert_eq!(kv.delete(KeyRange::prefix("/golden/")).await.expect("deleted"), 1);
    for revoked in [&[peer_url("192.0.2.3")][..], &[]] {
        assert_eq!(tickets.revoke_ticket(ticket.id()).await.expect("revoked"), revoked);
    }
    let root = cluster.first.node.root_kv().expect("a running node");
    let ca = ClusterCa::load_ca(root).await.expect("the CA");
    let list = ca.revocation_list().await.expect("the list");
    let revoked = ca.list_issued().await.expect("listed").into_iter().filter(|one| list.is_revoked(one));
    let names: Vec<_> = revoked.map(|one| one.common_name().map(str::to_owned)).collect();
    assert_eq!(names, [Some(thief.id().to_string())], "the node that has joined stays");
    run.stop().await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_revoked_ticket_opens_nothing_and_takes_back_what_it_has_given() {
    let cluster = MemoryCluster::start().await;
    let voter = InProcessVoter::new(&cluster.first.node, "");
    let tickets = cluster.first.node.join_tickets().expect("a running node");
    let (unused, redeemed) = (voter.create_ticket(&uses(1)).await, voter.create_ticket(&uses(3)).await);
    assert_eq!(tickets.revoke_ticket(unused.id()).await.expect("revoked"), []);
    let now = SystemTime::now();
    let refused =
        tickets.redeem_ticket("thief", &NewNode::new().request("thief", &unused, "192.0.2.6"), now).await;
    assert!(matches!(refused, Err(EnrolError::Revoked { .. })), "{refused:?}");
    let (joined, _) = enrolling(&cluster, "192.0.2.2", &redeemed);
    let (run, _) = joined.run_to_running().await;
    let late = NewNode::new().request("late", &redeemed, "192.0.2.3");
    tickets.redeem_ticket("late", &late, now).await.expect("admitted");
    for revoked in [&[peer_url("192.0.2.3")][..], &[]] {
        assert_eq!(tickets.revoke_ticket(redeemed.id()).await.expect("revoked"), revoked);
    }
    let refused = tickets.redeem_ticket("late", &late, now).await;
    assert!(matches!(refused, Err(EnrolError::Revoked { .. })), "{refused:?}");
    assert_eq!(run.list_members().await.len(), 2, "the node that has joined stays");
    let listed = tickets.list_tickets().await.expect("listed");
    let uses: Vec<_> = listed.iter().map(|ticket| (ticket.is_revoked, ticket.redemptions.len())).collect();
    assert!(uses.contains(&(true, 0)) && uses.contains(&(true, 2)), "{listed:?}");
    assert!(!format!("{listed:?}").contains(&format!("{:?}", unused.secret().expose_bytes())));
    run.stop().await;
    cluster.stop().await;
}

#[tokio::test]
async fn the_limits_of_a_ticket_are_named_to_its_holder() {
    let cluster = MemoryCluster::start().await;
    let voter = InProcessVoter::new(&cluster.first.node, "");
    let tickets = cluster.first.node.join_tickets().expect("a running node");
    let mut limits = uses(1);
    limits.address = Some(parse_ip("192.0.2.2"));
    limits.valid_for = Duration::from_secs(60);
    let ticket = voter.create_ticket(&limits).await;
    let (now, request) = (SystemTime::now(), NewNode::new().request("a", &ticket, "192.0.2.3"));
    let refused = tickets.redeem_ticket("a", &request, now).await.expect_err("another address");
    assert!(refused.to_string().contains("is for a node at 192.0.2.2, and this one is at 192.0.2.3"));
    let later = now + Duration::from_secs(61);
    let refused = tickets.redeem_ticket("a", &request, later).await.expect_err("expired");
    assert!(refused.to_string().contains("has expired"), "{refused}");
    // The clock of the voter at which another is created may be wrong by years.
    let years = later + Duration::from_secs(10 * 365 * 24 * 3600);
    tickets.create_ticket(&limits, &[], years).await.expect("created");
    assert_eq!(tickets.list_tickets().await.expect("listed").len(), 2);
    cluster.stop().await;
}

#[tokio::test]
async fn a_node_waits_for_a_voter_that_does_not_answer_and_says_so() {
    let cluster = MemoryCluster::start().await;
    let ticket = InProcessVoter::new(&cluster.first.node, "").create_ticket(&uses(1)).await;
    let (fixture, voter) = enrolling(&cluster, "192.0.2.2", &ticket);
    voter.is_reachable.store(false, Ordering::SeqCst);
    let run = fixture.start();
    wait_condition(
        &run,
        "waits for a voter to redeem its join ticket: the voter at 192.0.2.1:7836 does not admit the node: no answer; \
         check that the voters run, and that this host reaches their API",
    )
    .await;
    assert!(matches!(run.node.current_state(), EnrolmentState::Waiting(WaitCause::Redemption)));
    let refused = run.node.request_bootstrap().expect_err("it has a ticket");
    assert_eq!(refused.to_string(), "waits for a voter to redeem its join ticket");
    run.node.request_restore().expect_err("it has a ticket");
    voter.is_reachable.store(true, Ordering::SeqCst);
    run.wait_finished().await.expect("the node joins");
    run.stop().await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_join_ticket_needs_the_api_and_is_none_of_a_node_that_has_started_to_join() {
    let cluster = MemoryCluster::start().await;
    let ticket = InProcessVoter::new(&cluster.first.node, "").create_ticket(&uses(1)).await;
    let (mut fixture, _) = enrolling(&cluster, "192.0.2.2", &ticket);
    fixture.enroller = None;
    let refused = error_chain(fixture.run_to_failure().await);
    assert!(refused.contains("set api.address, or join by a golden ticket"), "{refused}");
    // By another ticket it has started already.
    fixture.give_ticket(&cluster.issue("192.0.2.2").await);
    interrupt(&fixture).await;
    fixture.give_join_ticket(&ticket);
    let refused = error_chain(fixture.run_to_failure().await);
    assert!(refused.contains(&format!("but {} is another node's", ticket.id())), "{refused}");
    // A mistyped one is an error that names the file, and changes nothing.
    let fixture = cluster.node("192.0.2.3");
    let text = ticket.to_text();
    fixture.ticket_file().write(&text.as_bytes()[..text.len() - 1]).expect("written");
    let refused = error_chain(fixture.run_to_failure().await);
    assert!(refused.contains("enrolment.pb") && refused.contains("mistyped or incomplete"), "{refused}");
    cluster.stop().await;
}

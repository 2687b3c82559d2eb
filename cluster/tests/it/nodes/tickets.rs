//! What a golden ticket holds, and how a cluster makes one.

use nodekeel_cluster::consensus::memory::MemoryNet;
use nodekeel_cluster::consensus::{MembershipError, PEER_PORT, PeerUrl};
use nodekeel_cluster::node::{GoldenTicket, IssueError, TicketError};
use nodekeel_cluster::pki::Authority;
use nodekeel_localstorage::pki::{PrivateKey, Template};
use prost::Message as _;

use super::{parts, ticket};
use crate::machine::{founder, ip};

/// The message of 2020, as another program would write it.
#[derive(Clone, PartialEq, prost::Message)]
struct EnrolmentConfig {
    #[prost(message, optional, tag = "1")]
    golden_ticket: Option<Ticket>,
    #[prost(string, tag = "2")]
    node_id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Ticket {
    #[prost(bytes = "vec", tag = "1")]
    etcd_ca_cert: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    etcd_client_cert: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    etcd_client_key: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    etcd_crl: Vec<u8>,
    #[prost(message, repeated, tag = "5")]
    peers: Vec<EtcdPeer>,
    #[prost(message, optional, tag = "6")]
    this: Option<EtcdPeer>,
    #[prost(string, tag = "7")]
    node_id: String,
    #[prost(bytes = "vec", tag = "8")]
    node_cert: Vec<u8>,
    #[prost(bytes = "vec", tag = "9")]
    node_key: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct EtcdPeer {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    address: String,
}

fn decoded(ticket: &GoldenTicket) -> Ticket {
    let config = EnrolmentConfig::decode(&ticket.to_config()[..]).expect("it is one");
    config.golden_ticket.expect("it has one")
}

fn parsed(ticket: Ticket) -> Result<GoldenTicket, TicketError> {
    let config = EnrolmentConfig { golden_ticket: Some(ticket), node_id: "ignored".into() };
    GoldenTicket::parse(&config.encode_to_vec())
}

#[test]
fn a_ticket_has_the_field_numbers_of_2020() {
    let ours = ticket("192.0.2.7");
    let theirs = decoded(&ours);
    assert_eq!(theirs.node_id, ours.node().as_str());
    assert_eq!(theirs.etcd_ca_cert, ours.member().ca.der());
    assert_eq!(theirs.etcd_client_cert, ours.member().certificate.der());
    assert_eq!(theirs.etcd_client_key, ours.member().key.expose_pkcs8());
    assert_eq!(theirs.etcd_crl, ours.revoked().der());
    assert_eq!(theirs.this.as_ref().map(|this| this.address.as_str()), Some("192.0.2.7"));
    assert_eq!(theirs.peers[0].address, "192.0.2.1:9999");
    let read = parsed(theirs.clone()).expect("it is one");
    assert_eq!((read.digest(), read.node(), read.peers()), (ours.digest(), ours.node(), ours.peers()));
    // In 2020 the name was filled in at will.
    let nameless = parsed(Ticket { node_id: String::new(), ..theirs }).expect("it is one");
    assert_eq!(nameless.node(), ours.node());
}

#[test]
fn what_does_not_hold_together_is_refused_by_name() {
    let (one, other) = (decoded(&ticket("192.0.2.7")), decoded(&ticket("192.0.2.7")));
    let wrong = |change: &dyn Fn(&mut Ticket)| {
        let mut ticket = one.clone();
        change(&mut ticket);
        parsed(ticket).expect_err("it does not hold together")
    };
    let mismatch = |error| matches!(error, TicketError::Mismatch { .. });
    let field = |error| matches!(error, TicketError::Field { .. });
    assert!(mismatch(wrong(&|it| it.etcd_client_key = other.etcd_client_key.clone())));
    assert!(mismatch(wrong(&|it| {
        it.etcd_client_key = other.etcd_client_key.clone();
        it.etcd_client_cert = other.etcd_client_cert.clone();
    })));
    assert!(mismatch(wrong(&|it| it.node_key = other.node_key.clone())));
    assert!(mismatch(wrong(&|it| it.node_cert = other.node_cert.clone())));
    assert!(
        field(wrong(&|it| it.etcd_ca_cert = other.etcd_ca_cert.clone())),
        "the list is not that authority's"
    );
    assert!(field(wrong(&|it| it.etcd_crl.clear())));
    assert!(field(wrong(&|it| it.node_key.clear())));
    assert!(matches!(wrong(&|it| it.this = None), TicketError::Missing(_)));
    assert!(matches!(wrong(&|it| it.node_id = other.node_id.clone()), TicketError::OtherName { .. }));
    assert!(matches!(wrong(&|it| it.this = other.this.clone()), TicketError::OtherName { .. }));
    let host = |address: &str| Some(EtcdPeer { name: one.node_id.clone(), address: address.into() });
    for bad in ["", "a b", "192.0.2.7:0", "192.0.2.7/x"] {
        assert!(matches!(wrong(&|it| it.this = host(bad)), TicketError::Member(_)), "{bad:?}");
    }
}

#[test]
fn any_flipped_byte_is_an_error_or_the_same_node() {
    let ticket = ticket("192.0.2.7");
    let (whole, mut taken) = (ticket.to_config(), 0);
    for at in 0..whole.len() {
        let mut flipped = whole.to_vec();
        flipped[at] ^= [0x01, 0x80, 0xff][at % 3];
        nodekeel_cluster::testing::enrolment_files(&flipped);
        if let Ok(other) = GoldenTicket::parse(&flipped) {
            assert_eq!(other.node(), ticket.node(), "byte {at}");
            taken += 1;
        }
    }
    // Names of peers and the like are covered by no signature.
    assert!(taken < whole.len() / 3, "{taken} of {} flips were taken", whole.len());
}

#[test]
fn no_key_is_printed() {
    let parts = parts("192.0.2.7");
    let secrets = [parts.node_key.expose_pkcs8().to_vec(), parts.member.key.expose_pkcs8().to_vec()];
    let text = format!("{parts:?}");
    let ticket = GoldenTicket::try_new(parts).expect("it holds together");
    let text = format!("{text} {ticket:?} {:?}", ticket.member());
    for secret in secrets {
        let list = format!("{secret:?}");
        let hex: String = secret[16..].iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(!text.contains(list.trim_matches(['[', ']'])) && !text.contains(&hex), "{text}");
    }
}

#[test]
fn a_ticket_is_known_by_who_its_node_is_and_not_by_whom_it_meets() {
    let one = decoded(&ticket("192.0.2.7"));
    let digest = |change: &dyn Fn(&mut Ticket)| {
        let mut ticket = one.clone();
        change(&mut ticket);
        parsed(ticket).expect("it holds together").digest()
    };
    let same = digest(&|_| {});
    assert_eq!(digest(&|it| it.peers.clear()), same);
    assert_eq!(digest(&|it| it.peers[0].address = "192.0.2.2".into()), same);
    assert_ne!(digest(&|it| it.this.as_mut().expect("it is there").address = "192.0.2.8".into()), same);
    assert_ne!(ticket("192.0.2.7").digest(), same);
}

#[test]
fn a_ticket_of_parts_is_checked_as_one_that_is_read() {
    let mut wrong = parts("192.0.2.7");
    wrong.node_key = PrivateKey::generate().expect("a key");
    assert!(matches!(GoldenTicket::try_new(wrong), Err(TicketError::Mismatch { .. })));
    let mut wrong = parts("192.0.2.7");
    wrong.node_key = PrivateKey::generate().expect("a key");
    wrong.node_certificate = Template::default().self_sign(&wrong.node_key).expect("a certificate");
    assert!(matches!(GoldenTicket::try_new(wrong), Err(TicketError::OtherName { .. })));
}

fn url(address: &str) -> PeerUrl {
    PeerUrl::new(ip(address), PEER_PORT)
}

#[tokio::test]
async fn however_often_a_ticket_is_asked_for_there_is_one_node_and_one_learner() {
    let (_bed, life) = founder(&MemoryNet::new()).await;
    let tickets = life.cluster.golden_tickets().expect("they are enabled");
    let members = life.cluster.members().expect("it runs");
    let first = tickets.issue(&url("192.0.2.2")).await.expect("it is made");
    let at_once =
        futures_util::future::join_all((0..8).map(|_| async { tickets.issue(&url("192.0.2.2")).await }));
    for again in at_once.await {
        assert_eq!(again.expect("it is made").to_config(), first.to_config());
    }
    assert_eq!(members.list().await.expect("they are read").len(), 2);
    let error = tickets.issue(&url("192.0.2.3")).await.expect_err("there is a learner");
    assert!(matches!(error, IssueError::Membership(MembershipError::TooManyLearners)), "{error:?}");
    assert_eq!(members.list().await.expect("they are read").len(), 2, "no learner leaks");
    life.end().await;
}

#[tokio::test]
async fn eight_at_once_for_one_place_get_the_same_ticket() {
    let (_bed, life) = founder(&MemoryNet::new()).await;
    let tickets = life.cluster.golden_tickets().expect("they are enabled");
    let place = url("192.0.2.2");
    let all = futures_util::future::join_all((0..8).map(|_| tickets.issue(&place))).await;
    let configs: Vec<_> = all.into_iter().map(|one| one.expect("it is made").to_config()).collect();
    assert!(configs.windows(2).all(|two| two[0] == two[1]), "they are not the same");
    life.end().await;
}

#[tokio::test]
async fn a_withdrawn_ticket_leaves_no_learner_and_no_certificate_and_the_place_is_free_again() {
    let (_bed, life) = founder(&MemoryNet::new()).await;
    let tickets = life.cluster.golden_tickets().expect("they are enabled");
    let members = life.cluster.members().expect("it runs");
    let first = tickets.issue(&url("192.0.2.2")).await.expect("it is made");
    for is_there in [true, false] {
        assert_eq!(tickets.withdraw(&url("192.0.2.2")).await.expect("it is withdrawn"), is_there);
        assert_eq!(members.list().await.expect("they are read").len(), 1);
    }
    let root = life.cluster.root_kv().expect("it runs");
    let revoked = Authority::load(root).await.expect("there is one").revoked().await.expect("it is read");
    assert!(revoked.revokes(&first.member().certificate));
    let second = tickets.issue(&url("192.0.2.2")).await.expect("it is made");
    assert_ne!(first.node(), second.node());
    assert!(!revoked.revokes(&second.member().certificate));
    let member = tickets.withdraw(&url("192.0.2.1")).await.expect_err("there is none for a member");
    assert!(matches!(member, IssueError::Taken { .. }), "{member:?}");
    assert_eq!(members.list().await.expect("they are read").len(), 2);

    // One that was damaged is in the way until it is withdrawn.
    let kept = life.cluster.kv("cluster", "tickets").expect("it runs");
    kept.put(b"/golden/192.0.2.2:7834", b"no ticket").await.expect("it is put");
    assert!(matches!(tickets.issue(&url("192.0.2.2")).await, Err(IssueError::Kept(_))));
    assert!(tickets.withdraw(&url("192.0.2.2")).await.expect("it is withdrawn"));
    let third = tickets.issue(&url("192.0.2.2")).await.expect("it is made");
    assert_ne!(third.node(), second.node());
    life.end().await;
}

#[tokio::test]
async fn there_are_no_tickets_for_members_and_for_names() {
    let (_bed, life) = founder(&MemoryNet::new()).await;
    let tickets = life.cluster.golden_tickets().expect("they are enabled");
    assert!(matches!(tickets.issue(&url("192.0.2.1")).await, Err(IssueError::Taken { .. })));
    let named: PeerUrl = "https://node-1:7834".parse().expect("a URL");
    assert!(matches!(tickets.issue(&named).await, Err(IssueError::NoAddress { .. })));
    life.end().await;
}

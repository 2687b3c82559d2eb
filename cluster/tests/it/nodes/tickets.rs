//! The content of golden tickets, and how a cluster issues them.

use nodekeel_cluster::consensus::PeerUrl;
use nodekeel_cluster::consensus::kv::KeyRange;
use nodekeel_cluster::node::{GoldenTicket, TicketError, TicketIssueError};
use nodekeel_cluster::pki::ClusterCa;
use nodekeel_localstorage::pki::{CertificateTemplate, PrivateKey};
use prost::Message as _;

use super::{test_ticket, ticket_parts};
use crate::enrolment::{MemoryCluster, error_chain, peer_url};

/// The message of 2020, as another program would write it.
#[derive(Clone, PartialEq, prost::Message)]
struct ConfigMessage {
    #[prost(message, optional, tag = "1")]
    golden_ticket: Option<TicketMessage>,
    #[prost(string, tag = "2")]
    node_id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct TicketMessage {
    #[prost(bytes = "vec", tag = "1")]
    etcd_ca_cert: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    etcd_client_cert: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    etcd_client_key: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    etcd_crl: Vec<u8>,
    #[prost(message, repeated, tag = "5")]
    peers: Vec<PeerMessage>,
    #[prost(message, optional, tag = "6")]
    this: Option<PeerMessage>,
    #[prost(string, tag = "7")]
    node_id: String,
    #[prost(bytes = "vec", tag = "8")]
    node_cert: Vec<u8>,
    #[prost(bytes = "vec", tag = "9")]
    node_key: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PeerMessage {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    address: String,
}

fn decode_ticket(ticket: &GoldenTicket) -> TicketMessage {
    let config = ConfigMessage::decode(&ticket.to_config()[..]).expect("a valid message");
    config.golden_ticket.expect("a golden ticket")
}

fn parse_ticket(ticket: TicketMessage) -> Result<GoldenTicket, TicketError> {
    let config = ConfigMessage { golden_ticket: Some(ticket), node_id: "ignored".into() };
    GoldenTicket::from_config(&config.encode_to_vec())
}

#[test]
fn a_ticket_has_the_field_numbers_of_2020() {
    let ours = test_ticket("192.0.2.7");
    let theirs = decode_ticket(&ours);
    assert_eq!(theirs.node_id, ours.node_id().as_str());
    assert_eq!(theirs.etcd_ca_cert, ours.member_credentials().ca.der_bytes());
    assert_eq!(theirs.etcd_client_cert, ours.member_credentials().certificate.der_bytes());
    assert_eq!(theirs.etcd_client_key, ours.member_credentials().key.expose_pkcs8());
    assert_eq!(theirs.etcd_crl, ours.revocation_list().der_bytes());
    assert_eq!(theirs.this.as_ref().map(|this| this.address.as_str()), Some("192.0.2.7"));
    assert_eq!(theirs.peers[0].address, "192.0.2.1:9999");
    let read = parse_ticket(theirs.clone()).expect("a valid message");
    assert_eq!((read.digest(), read.node_id(), read.peers()), (ours.digest(), ours.node_id(), ours.peers()));
    // In 2020 the name was optional.
    let nameless = parse_ticket(TicketMessage { node_id: String::new(), ..theirs }).expect("a valid message");
    assert_eq!(nameless.node_id(), ours.node_id());
}

#[test]
fn an_inconsistent_ticket_is_rejected_with_the_mismatch() {
    let (one, other) = (decode_ticket(&test_ticket("192.0.2.7")), decode_ticket(&test_ticket("192.0.2.7")));
    let wrong = |change: &dyn Fn(&mut TicketMessage)| {
        let mut ticket = one.clone();
        change(&mut ticket);
        parse_ticket(ticket).expect_err("an inconsistent ticket")
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
        "a list of another CA was accepted"
    );
    assert!(field(wrong(&|it| it.etcd_crl.clear())));
    assert!(field(wrong(&|it| it.node_key.clear())));
    assert!(matches!(wrong(&|it| it.this = None), TicketError::MissingField(_)));
    assert!(matches!(wrong(&|it| it.node_id = other.node_id.clone()), TicketError::NodeMismatch { .. }));
    assert!(matches!(wrong(&|it| it.this = other.this.clone()), TicketError::NodeMismatch { .. }));
    let host = |address: &str| Some(PeerMessage { name: one.node_id.clone(), address: address.into() });
    for bad in ["", "a b", "192.0.2.7:0", "192.0.2.7/x"] {
        assert!(matches!(wrong(&|it| it.this = host(bad)), TicketError::MemberName(_)), "{bad:?}");
    }
}

#[test]
fn any_flipped_byte_is_an_error_or_the_same_node() {
    let ticket = test_ticket("192.0.2.7");
    let (whole, mut taken) = (ticket.to_config(), 0);
    for at in 0..whole.len() {
        let mut flipped = whole.to_vec();
        flipped[at] ^= [0x01, 0x80, 0xff][at % 3];
        nodekeel_cluster::testing::fuzz_enrolment_files(&flipped);
        if let Ok(other) = GoldenTicket::from_config(&flipped) {
            assert_eq!(other.node_id(), ticket.node_id(), "byte {at}");
            taken += 1;
        }
    }
    // Names of peers and similar fields are covered by no signature.
    assert!(taken < whole.len() / 3, "{taken} of {} changed tickets were accepted", whole.len());
}

#[test]
fn private_keys_are_never_printed() {
    let parts = ticket_parts("192.0.2.7");
    let secrets =
        [parts.node_key.expose_pkcs8().to_vec(), parts.member_credentials.key.expose_pkcs8().to_vec()];
    let text = format!("{parts:?}");
    let ticket = GoldenTicket::from_parts(parts).expect("a consistent ticket");
    let text = format!("{text} {ticket:?} {:?}", ticket.member_credentials());
    for secret in secrets {
        let list = format!("{secret:?}");
        let hex: String = secret[16..].iter().map(|byte| format!("{byte:02x}")).collect();
        assert!(!text.contains(list.trim_matches(['[', ']'])) && !text.contains(&hex), "{text}");
    }
}

#[test]
fn a_ticket_digest_depends_on_its_node_and_not_on_its_peers() {
    let one = decode_ticket(&test_ticket("192.0.2.7"));
    let digest = |change: &dyn Fn(&mut TicketMessage)| {
        let mut ticket = one.clone();
        change(&mut ticket);
        parse_ticket(ticket).expect("a consistent ticket").digest()
    };
    let same = digest(&|_| {});
    assert_eq!(digest(&|it| it.peers.clear()), same);
    assert_eq!(digest(&|it| it.peers[0].address = "192.0.2.2".into()), same);
    assert_ne!(digest(&|it| it.this.as_mut().expect("it exists").address = "192.0.2.8".into()), same);
    assert_ne!(test_ticket("192.0.2.7").digest(), same);
}

#[test]
fn a_ticket_built_from_parts_is_checked() {
    let mut wrong = ticket_parts("192.0.2.7");
    wrong.node_key = PrivateKey::generate().expect("a key");
    assert!(matches!(GoldenTicket::from_parts(wrong), Err(TicketError::Mismatch { .. })));
    let mut wrong = ticket_parts("192.0.2.7");
    wrong.node_key = PrivateKey::generate().expect("a key");
    wrong.node_certificate =
        CertificateTemplate::default().self_sign(&wrong.node_key).expect("a certificate");
    assert!(matches!(GoldenTicket::from_parts(wrong), Err(TicketError::NodeMismatch { .. })));
}

#[tokio::test]
async fn repeated_ticket_requests_yield_one_node_and_several_tickets_are_redeemed_in_any_order() {
    let cluster = MemoryCluster::start().await;
    let issuer = cluster.issuer();
    let members = cluster.first.node.cluster_members().expect("a running node");
    let url = peer_url("192.0.2.2");
    let at_once = futures_util::future::join_all((0..8).map(|_| issuer.issue_ticket(&url))).await;
    let again = cluster.issue("192.0.2.2").await;
    for ticket in at_once {
        assert_eq!(ticket.expect("created").to_config(), again.to_config());
    }
    // The list changes when its node is there.
    assert_eq!(members.list_members().await.expect("listed").len(), 1);
    let mut runs = Vec::new();
    let hosts = ["192.0.2.2", "192.0.2.3", "192.0.2.4"];
    let mut invited = Vec::new();
    for host in hosts {
        invited.push(cluster.invite(host).await.0);
    }
    for (joined, fixture) in invited.iter().rev().enumerate() {
        runs.push(fixture.run_to_running().await.0);
        assert_eq!(members.list_members().await.expect("listed").len(), joined + 2);
    }
    let root = cluster.first.node.root_kv().expect("a running node");
    let left = root.range(KeyRange::prefix("/etcd-invitations/")).await.expect("read");
    assert_eq!(left.kvs, [], "an invitation is left");
    for run in runs {
        run.stop().await;
    }
    cluster.stop().await;
}

#[tokio::test]
async fn revoking_a_ticket_removes_its_learner_revokes_its_certificate_and_frees_its_url() {
    let cluster = MemoryCluster::start().await;
    let issuer = cluster.issuer();
    let members = cluster.first.node.cluster_members().expect("a running node");
    let first = cluster.issue("192.0.2.2").await;
    for is_there in [true, false] {
        assert_eq!(issuer.revoke_ticket(&peer_url("192.0.2.2")).await.expect("revoked"), is_there);
        assert_eq!(members.list_members().await.expect("listed").len(), 1);
    }
    let root = cluster.first.node.root_kv().expect("a running node");
    let revoked = ClusterCa::load_ca(root).await.expect("a CA").revocation_list().await.expect("read");
    assert!(revoked.is_revoked(&first.member_credentials().certificate));
    let second = cluster.issue("192.0.2.2").await;
    assert_ne!(first.node_id(), second.node_id());
    assert!(!revoked.is_revoked(&second.member_credentials().certificate));
    let member =
        issuer.revoke_ticket(&peer_url("192.0.2.1")).await.expect_err("a ticket of a member was revoked");
    assert!(matches!(member, TicketIssueError::MemberExists { .. }), "{member:?}");
    assert_eq!(members.list_members().await.expect("listed").len(), 1);

    // A damaged ticket blocks its URL until it is revoked.
    let kept = cluster.first.node.namespaced_kv("cluster", "tickets").expect("a running node");
    kept.put(b"/golden/192.0.2.2:7834", b"not a ticket").await.expect("put");
    let damaged = issuer.issue_ticket(&peer_url("192.0.2.2")).await.expect_err("a damaged ticket was issued");
    let text = damaged.to_string();
    assert!(
        text.contains(
            "https://192.0.2.2:7834 is invalid: type `nodectl cluster ticket revoke --address 192.0.2.2"
        ),
        "{text}"
    );
    assert!(issuer.revoke_ticket(&peer_url("192.0.2.2")).await.expect("revoked"));
    let third = cluster.issue("192.0.2.2").await;
    assert_ne!(third.node_id(), second.node_id());
    // Its invitation went with it.
    let late = cluster.node("192.0.2.2");
    late.give_ticket(&second);
    let refused = error_chain(late.run_to_failure().await);
    assert!(refused.contains("no member at https://192.0.2.2:7834"), "{refused}");
    cluster.stop().await;
}

#[tokio::test]
async fn a_certificate_that_cannot_be_revoked_is_an_error_that_says_so() {
    let cluster = MemoryCluster::start().await;
    let issuer = cluster.issuer();
    cluster.issue("192.0.2.2").await;
    let root = cluster.first.node.root_kv().expect("a running node");
    root.put(b"/etcd-ca/crl.der", b"damaged").await.expect("put");
    let error = issuer.revoke_ticket(&peer_url("192.0.2.2")).await.expect_err("the list is damaged");
    assert_eq!(error.to_string(), "can't revoke the member's certificate");
    cluster.stop().await;
}

#[tokio::test]
async fn tickets_for_members_and_for_host_names_are_rejected() {
    let cluster = MemoryCluster::start().await;
    let issuer = cluster.issuer();
    assert!(matches!(
        issuer.issue_ticket(&peer_url("192.0.2.1")).await,
        Err(TicketIssueError::MemberExists { .. })
    ));
    let named: PeerUrl = "https://node-1:7834".parse().expect("a URL");
    assert!(matches!(issuer.issue_ticket(&named).await, Err(TicketIssueError::NoAddress { .. })));
    cluster.stop().await;
}

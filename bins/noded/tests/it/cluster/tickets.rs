//! A node that joins by a golden ticket.

use std::fs;

use anyhow::Context as _;
use nodekeel_cluster::node::GoldenTicket;
use nodekeel_localstorage::pki::RevocationList;
use testbed::ScratchDir;

use super::{MemberFixture, assert_joins, cluster_identity, create_ticket_args};
use crate::harness::wait;

#[test]
#[ignore = "needs etcd"]
fn a_second_node_joins_by_a_golden_ticket() {
    // etcd requires connections of members to come from the address of their certificate: on loopback, this
    // one.
    assert_joins(&MemberFixture::new(), &MemberFixture::new(), "127.0.0.1");
}

#[test]
#[ignore = "needs etcd"]
fn a_revoked_ticket_is_useless_and_its_address_is_free() {
    let bootstrapped = MemberFixture::new().start_new();
    let scratch = ScratchDir::new().unwrap();
    let file = |name| scratch.path().join(name).to_str().unwrap().to_owned();
    let (mistyped, wanted) = (file("mistyped.pb"), file("wanted.pb"));
    let ticket = bootstrapped.ask_json(&create_ticket_args("127.0.0.8", "7001", &mistyped));
    let command = ["cluster", "ticket", "revoke", "--address", "127.0.0.8", "--port", "7001"];
    assert_eq!(bootstrapped.ask_json(&command), serde_json::json!({"url": "https://127.0.0.8:7001"}));
    let members = bootstrapped.ask_json(&["cluster", "members"]);
    assert_eq!(members.as_array().map(Vec::len), Some(1), "{members}");
    let credentials = GoldenTicket::from_config(&fs::read(&mistyped).unwrap()).unwrap().member_credentials();
    let list = bootstrapped.data().join("data/cluster/etcd/peer_crl");
    wait("the revocation of the certificate", || {
        let revoked = RevocationList::from_der(&fs::read(&list)?, &credentials.ca)?;
        revoked.is_revoked(&credentials.certificate).then_some(()).context("not revoked yet")
    });

    bootstrapped.nodectl(&command).assert_fails(1, "no ticket exists for https://127.0.0.8:7001");
    let own = ["cluster", "ticket", "revoke", "--address", "127.0.0.1"];
    bootstrapped.nodectl(&own).assert_fails(1, "a voting member is already at");
    let another = bootstrapped.ask_json(&create_ticket_args("127.0.0.9", "7001", &wanted));
    assert_ne!(another["node"], ticket["node"]);
    bootstrapped.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_ticket_that_comes_after_the_bootstrap_is_ignored_and_joins_once_the_node_is_reset() {
    let (first, second) = (MemberFixture::new(), MemberFixture::new());
    let bootstrapped = first.start_new();
    let early = second.start_new();
    let alone = cluster_identity(&early);
    let (port, state) = (second.peer_port(), early.data().join("esp"));
    let (late, kept) = (state.join("enrolment.pb"), early.scratch.path().join("kept.pb"));
    let ticket = bootstrapped.ask_json(&create_ticket_args("127.0.0.1", &port, late.to_str().unwrap()));

    let early = second.restart(early);
    assert_eq!(cluster_identity(&early), alone);

    // As docs/noded.md, "Reset a node", describes.
    let scratch = early.kill();
    fs::rename(&late, &kept).unwrap();
    fs::remove_dir_all(scratch.path().join("data/data/cluster")).unwrap();
    fs::remove_dir_all(&state).unwrap();
    fs::create_dir(&state).unwrap();
    fs::rename(&kept, &late).unwrap();
    let joined = second.start(scratch);
    assert_eq!(cluster_identity(&joined), (ticket["node"].clone(), cluster_identity(&bootstrapped).1));

    // The ticket by which it has joined may be removed, and anything may be in its place.
    let joined = second.restart(joined);
    assert_eq!(cluster_identity(&joined).0, ticket["node"]);
    fs::remove_file(&late).unwrap();
    fs::create_dir(&late).unwrap();
    let joined = second.restart(joined);
    assert_eq!(cluster_identity(&joined).0, ticket["node"]);
    joined.stop();
    bootstrapped.stop();
}

//! A node that joins by a golden ticket.

use std::fs;

use anyhow::Context as _;
use nodekeel_cluster::node::GoldenTicket;
use nodekeel_localstorage::pki::RevocationList;
use testbed::ScratchDir;

use super::{MemberFixture, assert_joins, cluster_identity, create_ticket_args, kill_node};
use crate::harness::{TEST_TIMEOUT, stderr_and_code};

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
    let bootstrapped = MemberFixture::new().start(ScratchDir::new().unwrap());
    let scratch = ScratchDir::new().unwrap();
    let file = |name| scratch.path().join(name).to_str().unwrap().to_owned();
    let (mistyped, wanted) = (file("mistyped.pb"), file("wanted.pb"));
    let ticket = bootstrapped.ask_json(&create_ticket_args("127.0.0.8", "7001", &mistyped));
    let (stderr, code) =
        stderr_and_code(&bootstrapped.nodectl(&create_ticket_args("127.0.0.9", "7001", &wanted)));
    let expected = "takes one at a time; the learner is at https://127.0.0.8:7001";
    let command = "nodectl cluster ticket revoke --address 127.0.0.8 --port 7001";
    assert!(stderr.contains(expected) && stderr.contains(command) && code == Some(1), "{stderr} {code:?}");

    let command: Vec<_> = command.split(' ').skip(1).collect();
    assert_eq!(bootstrapped.ask_json(&command), serde_json::json!({"url": "https://127.0.0.8:7001"}));
    let members = bootstrapped.ask_json(&["cluster", "members"]);
    assert_eq!(members.as_array().map(Vec::len), Some(1), "{members}");
    let credentials = GoldenTicket::from_config(&fs::read(&mistyped).unwrap()).unwrap().member_credentials();
    let list = bootstrapped.data().join("data/cluster/etcd/peer_crl");
    testbed::wait_until(TEST_TIMEOUT, "the revocation of the certificate", || {
        let revoked = RevocationList::from_der(&fs::read(&list)?, &credentials.ca)?;
        revoked.is_revoked(&credentials.certificate).then_some(()).context("not revoked yet")
    })
    .unwrap();

    let (stderr, code) = stderr_and_code(&bootstrapped.nodectl(&command));
    assert!(stderr.contains("no ticket exists for https://127.0.0.8:7001") && code == Some(1), "{stderr}");
    let own = ["cluster", "ticket", "withdraw", "--address", "127.0.0.1"];
    let (stderr, code) = stderr_and_code(&bootstrapped.nodectl(&own));
    assert!(stderr.contains("a voting member is already at") && code == Some(1), "{stderr}");
    let another = bootstrapped.ask_json(&create_ticket_args("127.0.0.9", "7001", &wanted));
    assert_ne!(another["node"], ticket["node"]);
    bootstrapped.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_ticket_that_comes_after_the_bootstrap_is_ignored_and_joins_once_the_node_is_reset() {
    let (first, second) = (MemberFixture::new(), MemberFixture::new());
    let bootstrapped = first.start(ScratchDir::new().unwrap());
    let early = second.start(ScratchDir::new().unwrap());
    let alone = cluster_identity(&early);
    let (port, state) = (second.ports[1].number().to_string(), early.data().join("esp"));
    let (late, kept) = (state.join("enrolment.pb"), early.scratch.path().join("kept.pb"));
    let ticket = bootstrapped.ask_json(&create_ticket_args("127.0.0.1", &port, late.to_str().unwrap()));

    let early = second.start(kill_node(early));
    assert_eq!(cluster_identity(&early), alone);

    // As docs/noded.md, "Reset a node", describes.
    let scratch = kill_node(early);
    fs::rename(&late, &kept).unwrap();
    fs::remove_dir_all(scratch.path().join("data/data/cluster")).unwrap();
    fs::remove_dir_all(&state).unwrap();
    fs::create_dir(&state).unwrap();
    fs::rename(&kept, &late).unwrap();
    let joined = second.start(scratch);
    assert_eq!(cluster_identity(&joined), (ticket["node"].clone(), cluster_identity(&bootstrapped).1));

    // The ticket by which it has joined may be removed, and anything may be in its place.
    let joined = second.start(kill_node(joined));
    assert_eq!(cluster_identity(&joined).0, ticket["node"]);
    fs::remove_file(&late).unwrap();
    fs::create_dir(&late).unwrap();
    let joined = second.start(kill_node(joined));
    assert_eq!(cluster_identity(&joined).0, ticket["node"]);
    joined.stop();
    bootstrapped.stop();
}

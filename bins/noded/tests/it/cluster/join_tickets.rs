//! Nodes that join by a join ticket.

use std::fs;
use std::time::Instant;

use serde_json::Value;
use testbed::{ReservedPort, ScratchDir, reserve_port};

use super::{MemberFixture, cluster_identity, list_members, wait_failing};
use crate::harness::{NodedProcess, wait};

/// A member with an API for other machines.
pub(super) struct ApiMember {
    pub(super) member: MemberFixture,
    pub(super) port: ReservedPort,
}

impl ApiMember {
    pub(super) fn new() -> Self {
        let port = reserve_port().unwrap();
        let section = format!("[api]\naddress = \"{}\"\n", port.socket_address());
        Self { member: MemberFixture::new().with_sections(&section), port }
    }

    /// A node that has this content in the place of its ticket, and does not join yet.
    pub(super) fn spawn_with(&self, ticket: impl AsRef<[u8]>) -> NodedProcess {
        let scratch = ScratchDir::new().unwrap();
        give_ticket(&scratch, ticket);
        self.member.spawn(scratch)
    }
}

pub(super) fn give_ticket(scratch: &ScratchDir, ticket: impl AsRef<[u8]>) {
    let esp = scratch.path().join("data/esp");
    fs::create_dir_all(&esp).unwrap();
    fs::write(esp.join("enrolment.pb"), ticket).unwrap();
}

/// The first member, once its API is recorded.
pub(super) fn start_first(first: &ApiMember) -> NodedProcess {
    let noded = first.member.start_new();
    noded.wait_ready("root.api.peers");
    noded
}

pub(super) fn create_ticket(noded: &NodedProcess, args: &[&str]) -> Value {
    noded.ask_json(&[&["cluster", "ticket", "create"], args].concat())
}

pub(super) fn text(ticket: &Value) -> &str {
    ticket["ticket"].as_str().unwrap()
}

fn list_tickets(noded: &NodedProcess) -> Vec<Value> {
    noded.ask_json(&["cluster", "ticket", "list"]).as_array().unwrap().clone()
}

fn voters(noded: &NodedProcess) -> usize {
    let members = list_members(noded);
    members.as_array().unwrap().iter().filter(|member| member["learner"] == false).count()
}

#[test]
#[ignore = "needs etcd"]
fn a_second_and_a_third_node_join_by_join_tickets_and_their_keys_are_their_own() {
    let members = [(); 3].map(|()| ApiMember::new());
    let first = start_first(&members[0]);
    // Any number may be unused.
    let printed = first.ask(&["cluster", "ticket", "create"]);
    assert!(printed.starts_with("nk1-") && printed.lines().count() == 1, "{printed}");
    let file = first.scratch.path().join("ticket");
    first.ask(&["cluster", "ticket", "create", "--address", "127.0.0.1", "--file", file.to_str().unwrap()]);
    let tickets = [printed.clone(), fs::read_to_string(&file).unwrap()];
    let joined: Vec<_> =
        members[1..].iter().zip(&tickets).map(|(node, ticket)| node.spawn_with(ticket)).collect();
    joined.iter().for_each(|node| node.wait_ready("root.cluster"));
    wait("three voters", || {
        anyhow::ensure!(voters(&first) == 3, "{}", list_members(&first));
        Ok(())
    });
    let cluster = cluster_identity(&first).1;
    let joined: Vec<_> = joined
        .into_iter()
        .zip(&members[1..])
        .map(|(node, member)| {
            let identity = cluster_identity(&node);
            assert_eq!(identity.1, cluster);
            // It restarts as the same node, also without its ticket.
            fs::remove_file(node.data().join("esp/enrolment.pb")).unwrap();
            let node = member.member.restart(node);
            assert_eq!(cluster_identity(&node), identity);
            node
        })
        .collect();
    let listed = list_tickets(&first);
    assert_eq!(listed.len(), 2, "{listed:?}");
    for ticket in &listed {
        assert_eq!(
            (&ticket["state"], &ticket["used_by"].as_array().unwrap().len()),
            (&"used".into(), &1),
            "{ticket}"
        );
    }
    let table = first.ask(&["cluster", "ticket", "list"]);
    assert!(table.contains("USED") && table.contains("1/1") && !table.contains("nk1-"), "{table}");
    let store = first.ask(&["logs", "--children", "root"]);
    assert!(!store.contains(printed.trim()), "a ticket is in the log");
    let events = first.events();
    let enrolled = |event: &&Value| {
        event["action"].as_str().is_some_and(|text| text.starts_with("enrolment of the node"))
    };
    assert_eq!(events.iter().filter(enrolled).count(), 2, "{events:#?}");
    joined.into_iter().for_each(|node| _ = node.stop());
    first.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_ticket_that_is_revoked_used_or_mistyped_opens_nothing_and_says_so() {
    let members = [(); 3].map(|()| ApiMember::new());
    let first = start_first(&members[0]);
    let stolen = create_ticket(&first, &["--expires", "1h", "--uses", "2"]);
    let id = stolen["id"].as_str().unwrap();
    first.ask(&["cluster", "ticket", "revoke", id]);
    first
        .nodectl(&["cluster", "ticket", "revoke", "0123456789abcdef"])
        .assert_fails(1, "no join ticket has the id");
    first
        .nodectl(&["cluster", "ticket", "create", "--role", "witness"])
        .assert_fails(1, "not supported: use voter or worker");
    let thief = members[1].spawn_with(text(&stolen));
    let failed = |node: &NodedProcess, what: &str| {
        wait_failing(node, what, |_, detail| detail.contains(what));
    };
    failed(&thief, &format!("join ticket {id} was revoked"));
    assert_eq!(voters(&first), 1);
    // An operator replaces it, and the node joins without another command.
    let good = create_ticket(&first, &[]);
    give_ticket(&thief.scratch, text(&good));
    thief.wait_ready("root.cluster");
    // Another machine with the used ticket.
    let late = members[2].spawn_with(text(&good));
    failed(&late, &format!("join ticket {} is used", good["id"].as_str().unwrap()));
    let mut mistyped = text(&good).to_owned();
    let other = if &mistyped[10..11] == "a" { "b" } else { "a" };
    mistyped.replace_range(10..11, other);
    give_ticket(&late.scratch, &mistyped);
    failed(&late, "mistyped or incomplete");
    assert_eq!(voters(&first), 2);
    let denied = first.ask(&["logs", "root.api.strangers"]);
    assert!(denied.contains("Enrol by ed25519:"), "{denied}");
    late.stop();
    thief.stop();
    first.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_node_waits_for_a_voter_of_its_ticket_and_needs_the_api() {
    let members = [(); 2].map(|()| ApiMember::new());
    let first = start_first(&members[0]);
    let ticket = create_ticket(&first, &[]);
    let scratch = first.stop_and_keep();
    let without = MemberFixture::new();
    let node = {
        let scratch = ScratchDir::new().unwrap();
        give_ticket(&scratch, text(&ticket));
        without.spawn(scratch)
    };
    wait_failing(&node, "the API", |_, detail| detail.contains("set api.address"));
    node.stop();
    let node = members[1].spawn_with(text(&ticket));
    wait_failing(&node, "a voter", |status, detail| {
        status["state"] == "Waiting" && detail.contains("waits for a voter to redeem its join ticket")
    });
    let health = node.nodectl(&["health"]);
    assert!(health.stdout.contains("a voter to redeem its join ticket"), "{health:?}");
    node.nodectl(&["cluster", "bootstrap"]).assert_fails(1, "waits for a voter to redeem its join ticket");
    let first = members[0].member.start(scratch);
    node.wait_ready("root.cluster");
    assert_eq!(voters(&first), 2);
    node.stop();
    first.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_copy_of_a_machine_is_refused_by_name_and_joins_with_keys_of_its_own() {
    let members = [(); 3].map(|()| ApiMember::new());
    let first = start_first(&members[0]);
    let ticket = create_ticket(&first, &["--uses", "3"]);
    let kept = first.stop_and_keep();
    let node = members[1].spawn_with(text(&ticket));
    // It has made its keys by now.
    wait_failing(&node, "a voter", |_, detail| detail.contains("does not admit the node"));
    let copied = fs::read(node.data().join("esp/enrolment.pb")).unwrap();
    let first = members[0].member.start(kept);
    node.wait_ready("root.cluster");
    let copy = members[2].spawn_with(copied);
    wait_failing(&copy, "a refusal", |_, detail| detail.contains("is in the cluster already"));
    assert_eq!(list_tickets(&first)[0]["used_by"].as_array().unwrap().len(), 1);
    give_ticket(&copy.scratch, text(&ticket));
    copy.wait_ready("root.cluster");
    assert_eq!(voters(&first), 3);
    copy.stop();
    node.stop();
    first.stop();
}

#[test]
#[ignore = "needs etcd"]
fn eight_machines_enrol_at_once_and_join_one_after_the_other() {
    let members = [(); 9].map(|()| ApiMember::new());
    let first = start_first(&members[0]);
    let ticket = create_ticket(&first, &["--uses", "8"]);
    let began = Instant::now();
    let nodes: Vec<_> = members[1..].iter().map(|member| member.spawn_with(text(&ticket))).collect();
    wait("eight redemptions", || {
        let used = list_tickets(&first)[0]["used_by"].as_array().unwrap().len();
        anyhow::ensure!(used == 8, "{used}");
        Ok(())
    });
    println!("8 machines were admitted in {:.1?}", began.elapsed());
    nodes.iter().for_each(|node| node.wait_ready("root.cluster"));
    println!("8 machines have enrolled and joined in {:.1?}", began.elapsed());
    assert_eq!(list_members(&first).as_array().unwrap().len(), 9);
    nodes.into_iter().for_each(|node| _ = node.stop());
    first.stop();
}

//! Founding, joining, and starting again, as a whole.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_cluster::consensus::memory::MemoryNet;
use nodekeel_cluster::consensus::{PEER_PORT, PeerUrl};
use nodekeel_cluster::machine::{Cluster, Kind, Reason, State, StepError, TicketAccessError, Unavailable};
use nodekeel_cluster::network::StaticNetwork;
use nodekeel_cluster::node::{Enrolment, EnrolmentSource, NodeId};

use tokio::sync::watch;

use super::bed::{Bed, Life, SOON, at, founder, ip, said};

#[tokio::test]
async fn a_machine_without_anything_founds_a_cluster_and_knows_itself_in_it() {
    let net = MemoryNet::new();
    let bed = Bed::on(&net, "192.0.2.1");
    let (life, membership) = bed.runs().await;
    assert_eq!(life.cluster.history(), [Kind::New, Kind::CreatingCluster, Kind::Running]);
    let nodes = life.cluster.nodes().expect("it runs").list().await.expect("they are read");
    let [this] = &nodes[..] else { panic!("one node: {nodes:?}") };
    assert_eq!(this.id, membership.node);
    assert_eq!(this.record.address, Some(ip("192.0.2.1")));
    assert_eq!(
        this.record.roles.consensus_member().map(|name| name.as_str()),
        Some(membership.node.as_str())
    );
    assert_eq!(this.record.roles.kubernetes_worker(), Some(membership.node.as_str()));
    assert!(membership.node.is_of(&this.record.certificate.public()));
    let members = life.cluster.members().expect("it runs").list().await.expect("they are read");
    assert_eq!(members.len(), 1);
    assert_eq!(life.cluster.nodes().expect("it runs").cluster().await.ok(), Some(membership.cluster));
    assert_eq!(net.clusters(), 1);
    life.end().await;
}

#[tokio::test]
async fn a_machine_starts_again_as_the_same_node_in_the_same_cluster_with_its_keys() {
    let net = MemoryNet::new();
    let bed = Bed::on(&net, "192.0.2.1");
    let (life, first) = bed.runs().await;
    life.cluster.kv("mine", "all").expect("it runs").put(b"/kept", b"yes").await.expect("it is put");
    life.end().await;
    for _ in 0..3 {
        let (life, again) = bed.runs().await;
        assert_eq!(again, first);
        assert_eq!(life.cluster.history(), [Kind::New, Kind::Restarting, Kind::Running]);
        let kept = life.cluster.kv("mine", "all").expect("it runs").get(b"/kept").await.expect("it is read");
        assert_eq!(kept.map(|kv| kv.value), Some(b"yes".to_vec()));
        life.end().await;
    }
    assert_eq!(net.clusters(), 1);
}

#[tokio::test]
async fn a_machine_with_a_ticket_joins_and_needs_it_no_more() {
    let net = MemoryNet::new();
    let mut first = Bed::on(&net, "192.0.2.1");
    first.settings.golden_tickets = true;
    let second = Bed::on(&net, "192.0.2.2");
    let (founder, founded) = first.runs().await;
    let url = PeerUrl::new(ip("192.0.2.2"), PEER_PORT);
    let tickets = founder.cluster.golden_tickets().expect("they are enabled");
    let ticket = tickets.issue(&url).await.expect("it is made");
    second.enrolment().enrolment.write(&ticket.to_config()).expect("it is written");

    let (life, joined) = second.runs().await;
    assert_eq!(life.cluster.history(), [Kind::New, Kind::Joining, Kind::Running]);
    assert_eq!((joined.cluster, &joined.node), (founded.cluster, ticket.node()));
    let members = life.cluster.members().expect("it runs").list().await.expect("they are read");
    assert_eq!(members.iter().filter(|member| !member.is_learner).count(), 2, "{members:?}");
    let nodes = life.cluster.nodes().expect("it runs").list().await.expect("they are read");
    let mut ids: Vec<_> = nodes.into_iter().map(|node| node.id).collect();
    ids.sort();
    let mut expected = vec![founded.node.clone(), joined.node.clone()];
    expected.sort();
    assert_eq!(ids, expected);
    let kept = founder.cluster.kv("cluster", "tickets").expect("it runs");
    let all =
        nodekeel_cluster::consensus::kv::Range::new(nodekeel_cluster::consensus::kv::KeyRange::prefix("/"));
    assert_eq!(kept.range(all).await.expect("it is read").kvs, [], "the keys in it are kept nowhere else");
    life.end().await;

    second.enrolment().enrolment.write(b"no ticket at all").expect("it is written");
    let (life, again) = second.runs().await;
    assert_eq!(again, joined, "a node that is in a cluster does not read it");
    life.end().await;
    founder.end().await;
    assert_eq!(net.clusters(), 1);
}

#[tokio::test]
async fn a_machine_that_has_no_file_of_its_own_joins_by_what_qemu_shows() {
    let net = MemoryNet::new();
    let (_first, founder) = founder(&net).await;
    let tickets = founder.cluster.golden_tickets().expect("they are enabled");
    let ticket = tickets.issue(&PeerUrl::new(ip("192.0.2.2"), PEER_PORT)).await.expect("it is made");
    let second = Bed::on(&net, "192.0.2.2");
    let shown = second.disks.path().join("fw_cfg");
    std::fs::write(&shown, &*ticket.to_config()).expect("it is written");
    let mut deps = second.deps();
    let own = EnrolmentSource::Kept(second.enrolment().enrolment.clone());
    deps.enrolment = Enrolment::new([own, EnrolmentSource::Firmware(shown)]);
    let life = Life::of(Cluster::new(deps, second.settings.clone()));
    assert_eq!(&life.finished().await.expect("it is in its cluster").node, ticket.node());
    assert_eq!(life.cluster.history(), [Kind::New, Kind::Joining, Kind::Running]);
    life.end().await;
    founder.end().await;
    assert_eq!(net.clusters(), 1);
}

#[tokio::test]
async fn a_ticket_for_another_address_is_refused_and_nothing_is_begun_with_it() {
    let net = MemoryNet::new();
    let (_first, founder) = founder(&net).await;
    let tickets = founder.cluster.golden_tickets().expect("they are enabled");
    let url = PeerUrl::new(ip("192.0.2.2"), PEER_PORT);
    let ticket = tickets.issue(&url).await.expect("it is made");
    let second = Bed::on(&net, "192.0.2.3");
    second.enrolment().enrolment.write(&ticket.to_config()).expect("it is written");
    let reason = said(second.fails().await);
    assert!(reason.contains("it was made for 192.0.2.2, and this machine is at 192.0.2.3"), "{reason}");
    second.network.set(Some(at("192.0.2.2")));
    let mut deps = second.deps();
    deps.consensus = deps.consensus.at_port(7);
    let life = Life::of(Cluster::new(deps, second.settings.clone()));
    let reason = said(life.finished().await.expect_err("nobody would find it"));
    assert!(reason.contains("for a member at port 7834, and this machine's is at 7"), "{reason}");
    life.end().await;
    let (life, _) = second.runs().await;
    life.end().await;
    founder.end().await;
}

#[tokio::test]
async fn whoever_waits_is_told_early_late_and_afterwards() {
    let bed = Bed::alone();
    bed.network.set(None);
    let life = bed.start();
    let early: Vec<_> = (0..3)
        .map(|_| {
            let cluster = life.cluster.clone();
            tokio::spawn(async move { cluster.wait_finished().await })
        })
        .collect();
    let working = life.cluster.changed_from(Kind::New).await;
    assert_eq!(working.kind(), Kind::CreatingCluster);
    let abandoned = tokio::spawn({
        let cluster = life.cluster.clone();
        async move { cluster.wait_finished().await }
    });
    abandoned.abort();
    bed.network.set(Some(at("192.0.2.1")));
    let membership = life.finished().await.expect("it runs");
    for waiter in early {
        let told = waiter.await.expect("it ends").expect("it runs");
        assert_eq!(told, membership);
    }
    assert_eq!(life.finished().await.ok(), Some(membership));
    life.end().await;
}

#[tokio::test]
async fn whoever_waits_for_a_run_that_is_stopped_is_told_too() {
    let bed = Bed::alone();
    bed.network.set(None);
    let life = bed.start();
    life.cluster.changed_from(Kind::New).await;
    let cluster = life.cluster.clone();
    life.end().await;
    let told = tokio::time::timeout(SOON, cluster.wait_finished()).await.expect("at once");
    assert!(matches!(told, Err(Reason::Stopped { .. })), "{told:?}");
}

#[tokio::test(start_paused = true)]
async fn a_machine_without_an_address_fails_at_its_deadline_and_says_why() {
    let mut bed = Bed::alone();
    bed.network = Arc::new(StaticNetwork::unknown());
    bed.settings.deadline = Duration::from_secs(30);
    let began = tokio::time::Instant::now();
    let life = bed.start();
    let reason = life.cluster.wait_finished().await.expect_err("there is no address");
    assert_eq!(began.elapsed().as_secs(), 30);
    assert_eq!(said(reason), "the time was up during step network: nobody has told the address");
    life.end().await;
    bed.network.set(Some(at("192.0.2.1")));
    let (life, _) = bed.runs().await;
    life.end().await;
}

#[tokio::test]
async fn only_a_node_that_runs_has_a_place_keys_and_members() {
    let bed = Bed::alone();
    bed.network.set(None);
    let life = bed.start();
    let State::CreatingCluster(work) = life.cluster.changed_from(Kind::New).await else {
        panic!("it founds")
    };
    assert!(work.node().is_none());
    let refused = Unavailable::NotRunning { state: Kind::CreatingCluster };
    assert_eq!(life.cluster.node().err(), Some(refused));
    assert_eq!(life.cluster.root_kv().err(), Some(refused));
    assert_eq!(life.cluster.members().err(), Some(refused));
    assert!(life.cluster.kv("a", "b").is_err() && life.cluster.nodes().is_err());
    bed.network.set(Some(at("192.0.2.1")));
    life.finished().await.expect("it runs");
    life.cluster.root_kv().expect("it runs").put(b"/x", b"").await.expect("it is put");
    assert!(life.cluster.kv("no module", "b").is_err());
    assert!(matches!(life.cluster.golden_tickets(), Err(TicketAccessError::Disabled)));
    let cluster = life.cluster.clone();
    life.end().await;
    // It was there, and is no more; nobody waits for a run that has ended.
    assert_eq!(cluster.node().err(), Some(Unavailable::NotRunning { state: Kind::Failed }));
    assert_eq!(cluster.root_kv().err(), Some(Unavailable::NotRunning { state: Kind::Failed }));
    assert!(matches!(cluster.wait_finished().await, Err(Reason::Ended)));
    assert_eq!(cluster.history().last(), Some(&Kind::Failed));
}

#[tokio::test]
async fn a_deadline_may_be_longer_than_any_clock() {
    let mut bed = Bed::alone();
    bed.settings.deadline = std::time::Duration::MAX;
    let (life, _) = bed.runs().await;
    life.end().await;
}

/// Where the node's record has it, and where its member is listed.
async fn places(cluster: &Cluster, node: &NodeId) -> (Option<IpAddr>, Vec<String>) {
    let nodes = cluster.nodes().expect("it runs");
    let there = nodes.load(node).await.expect("it is read").expect("it is there");
    let members = cluster.members().expect("it runs").list().await.expect("they are read");
    (there.record.address, members.into_iter().flat_map(|member| member.peer_urls).collect())
}

fn place(address: &str) -> (Option<IpAddr>, Vec<String>) {
    (Some(ip(address)), vec![PeerUrl::new(ip(address), PEER_PORT).to_string()])
}

#[tokio::test]
async fn a_node_that_gets_another_address_while_it_runs_starts_its_member_there() {
    let bed = Bed::alone();
    let ends = Arc::new(watch::Sender::new(0));
    let seen = Arc::clone(&ends);
    let hook = move |point: &str| {
        if point == "end local" {
            seen.send_modify(|ends| *ends += 1);
        }
    };
    let life = Life::restarted(Cluster::with_points(bed.deps(), bed.settings.clone(), hook));
    let membership = life.finished().await.expect("it runs");
    assert_eq!(places(&life.cluster, &membership.node).await, place("192.0.2.1"));
    // A loss, and the same again, are no reason to stop.
    bed.network.set(None);
    bed.network.set(Some(at("192.0.2.1")));
    bed.network.set(None);
    bed.network.set(Some(at("192.0.2.9")));
    let mut ends = ends.subscribe();
    let second = tokio::time::timeout(SOON, ends.wait_for(|ends| *ends == 2)).await;
    second.expect("soon").expect("it is told");
    assert_eq!(
        life.finished().await.ok().as_ref(),
        Some(&membership),
        "it is the same node in the same cluster"
    );
    assert_eq!(life.cluster.history(), [Kind::New, Kind::Restarting, Kind::Running]);
    assert_eq!(places(&life.cluster, &membership.node).await, place("192.0.2.9"));
    life.end().await;
}

#[tokio::test]
async fn a_node_that_comes_back_at_another_address_is_known_there() {
    let bed = Bed::alone();
    let (life, membership) = bed.runs().await;
    life.end().await;
    bed.network.set(Some(at("192.0.2.10")));
    let (life, again) = bed.runs().await;
    assert_eq!(again, membership);
    assert_eq!(places(&life.cluster, &membership.node).await, place("192.0.2.10"));
    life.end().await;
}

#[tokio::test]
async fn a_run_that_failed_is_followed_by_one_that_goes_on() {
    let bed = Bed::alone();
    bed.enrolment().enrolment.write(b"\xff").expect("it is written");
    let reason = bed.fails().await;
    let Reason::Step { source, .. } = &reason else { panic!("{reason:?}") };
    assert!(matches!(**source, StepError::Enrolment(_)), "{source:?}");
    bed.enrolment().enrolment.remove().expect("it is removed");
    let (life, _) = bed.runs().await;
    life.end().await;
}

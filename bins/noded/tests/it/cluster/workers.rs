//! Workers: nodes of a cluster without a member.

use std::fs;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nodekeel_node::client;
use nodekeel_node::node::NodeHandle;
use nodekeel_node::node_v1::node_client::NodeClient;
use nodekeel_node::node_v1::{ReplaceUnlockKeysRequest, UnlockKeysRequest};
use serde_json::Value;
use testbed::{ReservedPort, ScratchDir, reserve_port};
use tokio::task::block_in_place;
use tonic::Code;

use super::join_tickets::{ApiMember, create_ticket, give_ticket, start_first, text};
use super::{cluster_identity, list_members, wait_failing};
use crate::harness::{NodedProcess, check, wait};
use crate::peers::api_key;

/// The configuration of a worker, which keeps its port across restarts.
struct WorkerFixture {
    config: String,
    port: ReservedPort,
}

impl WorkerFixture {
    fn new() -> Self {
        let port = reserve_port().unwrap();
        let config = format!(
            "services.containerd.enable = false\n[worker]\n[api]\naddress = \"{}\"\ncluster_operators = true\n",
            port.socket_address()
        );
        Self { config, port }
    }

    fn spawn(&self, scratch: ScratchDir) -> NodedProcess {
        let mut noded = NodedProcess::spawn(scratch, &self.config, &[], |_| {});
        noded.wait_for_line("control socket at");
        noded
    }

    fn spawn_with(&self, ticket: &Value) -> NodedProcess {
        let scratch = ScratchDir::new().unwrap();
        give_ticket(&scratch, text(ticket));
        self.spawn(scratch)
    }

    fn start_here(&self, scratch: &ScratchDir) -> NodeHandle {
        NodeHandle::builder("test.toml", &*self.config).data(scratch.path().join("data")).start().unwrap()
    }
}

/// A cluster of one voter, and a worker that has joined it.
struct Joined {
    voter: ApiMember,
    first: NodedProcess,
    fixture: WorkerFixture,
    worker: NodedProcess,
}

fn join_worker() -> Joined {
    let (voter, fixture) = (ApiMember::new(), WorkerFixture::new());
    let first = start_first(&voter);
    let worker = fixture.spawn_with(&worker_ticket(&first, &[]));
    worker.wait_ready("root.api.worker");
    Joined { voter, first, fixture, worker }
}

fn worker_ticket(voter: &NodedProcess, args: &[&str]) -> Value {
    create_ticket(voter, &[&["--role", "worker"], args].concat())
}

/// The names of the operators that a node admits because its cluster does.
fn cluster_operators(noded: &NodedProcess) -> Vec<String> {
    let listed = noded.ask_json(&["operator", "list"]);
    let operators = listed["operators"].as_array().unwrap();
    let of_cluster = operators.iter().filter(|operator| operator["source"] == "cluster");
    of_cluster.map(|operator| operator["name"].as_str().unwrap().to_owned()).collect()
}

fn text_of(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

fn wait_operators(noded: &NodedProcess, names: &[&str]) {
    wait("the operators of the cluster", || {
        let found = cluster_operators(noded);
        anyhow::ensure!(found == names, "{found:?} instead of {names:?}");
        Ok(())
    });
}

#[test]
#[ignore = "needs etcd"]
fn a_worker_serves_what_it_had_without_a_voter_and_says_so_until_one_is_back() {
    let Joined { voter, first, fixture, worker } = join_worker();
    let identity = cluster_identity(&worker);
    assert_eq!(identity.1, cluster_identity(&first).1);
    let members = list_members(&first);
    let listed = members.as_array().unwrap();
    assert_eq!(listed.len(), 2, "{members}");
    let address = fixture.port.socket_address().to_string();
    assert_eq!(
        (&listed[1]["name"], &listed[1]["worker"], &listed[1]["address"]),
        (&identity.0, &true.into(), &Value::from(address.clone()))
    );
    let table = first.ask(&["cluster", "members"]);
    assert!(table.contains("worker") && table.contains(&address), "{table}");
    worker.nodectl(&["cluster", "members"]).assert_fails(1, "this node is a worker");
    let leaves = format!("type `nodectl cluster remove {}` on a voter", text_of(&identity.0));
    worker.nodectl(&["cluster", "leave"]).assert_fails(1, &leaves);
    worker.nodectl(&["cluster", "disarm"]).assert_fails(1, "it has no member and no store on which");
    assert!(!worker.data().join("data/etcd").exists() && !worker.data().join("data/cluster").exists());

    let key = text_of(&worker.ask_json(&["operator", "list"])["node_key"]);
    let add = |key: &str| first.nodectl(&["operator", "add", "alice", "--key", key, "--role", "reader"]);
    add(&key).assert_fails(1, "has this key: an operator needs one of its own");
    add("ed25519:A6EHv_POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg").output();
    wait_operators(&worker, &["alice"]);

    let kept = first.stop_and_keep();
    let cut_off = |worker: &NodedProcess| {
        wait_failing(worker, "the loss of the voter", |status, detail| {
            status["state"] == "Unhealthy"
                && detail.contains("is cut off from its cluster, and serves what it knew since 20")
                && detail.contains(&format!("at {}: ", voter.port.socket_address()))
        })
    };
    let since = |status: &Value| text_of(&status["detail"]).split(": ").next().unwrap().to_owned();
    let before = since(&cut_off(&worker));
    let began = Instant::now();
    let worker = fixture.spawn(worker.kill());
    // Without any voter since its start.
    worker.wait_ready("root.api.worker");
    let status = cut_off(&worker);
    assert_eq!((&status["node"], since(&status)), (&identity.0, before), "after {:.1?}", began.elapsed());
    assert_eq!(cluster_operators(&worker), ["alice"]);
    wait("the warning", || {
        let health = worker.ask(&["health"]);
        anyhow::ensure!(health.contains("is cut off from its cluster"), "{health}");
        Ok(())
    });

    let first = voter.member.start(kept);
    wait("a voter", || {
        let ended = worker.nodectl(&["cluster", "status"]);
        anyhow::ensure!(ended.code == Some(0), "{ended:?}");
        Ok(())
    });
    assert_eq!(cluster_identity(&worker), identity);
    first.ask(&["operator", "remove", "alice"]);
    wait_operators(&worker, &[]);
    worker.stop();
    first.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_worker_that_is_removed_says_so_and_joins_again_by_another_ticket_alone() {
    let voter = ApiMember::new();
    let first = start_first(&voter);
    let fixture = WorkerFixture::new();
    let key = "ed25519:A6EHv_POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg";
    first.ask(&["operator", "add", "alice", "--key", key, "--role", "reader"]);
    let ticket = worker_ticket(&first, &["--uses", "2"]);
    let worker = fixture.spawn_with(&ticket);
    worker.wait_ready("root.api.worker");
    let identity = cluster_identity(&worker);
    wait_operators(&worker, &["alice"]);
    let id = identity.0.as_str().unwrap();
    first.ask(&["cluster", "remove", id]);
    let removed = Instant::now();
    let is_removed = |worker: &NodedProcess| {
        wait_failing(worker, "the removal", |status, detail| {
            status["state"] == "Failed"
                && detail.contains("was removed from its cluster, and waits for another ticket")
        });
        assert_eq!(cluster_operators(worker), [""; 0]);
    };
    is_removed(&worker);
    println!("a worker knew of its removal after {:.1?}", removed.elapsed());
    assert_eq!(list_members(&first).as_array().unwrap().len(), 1);
    let health = worker.nodectl(&["health"]);
    assert!(health.stdout.contains("was removed from its cluster"), "{health:?}");
    // Its ticket has a use left.
    let worker = fixture.spawn(worker.kill());
    is_removed(&worker);
    give_ticket(&worker.scratch, text(&worker_ticket(&first, &[])));
    worker.wait_ready("root.api.worker");
    assert_eq!(cluster_identity(&worker), identity);
    wait_operators(&worker, &["alice"]);
    // Without its ticket, it forgets its cluster.
    let reset = worker.ask(&["reset", "--yes"]);
    assert!(reset.contains("api/membership: the node's place in its cluster"), "{reset}");
    wait_failing(&worker, "the reset", |status, _| status["state"] == "Waiting" && status["node"].is_null());
    assert_eq!(cluster_operators(&worker), [""; 0]);
    worker.stop();
    first.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_worker_becomes_a_voter_once_the_worker_that_it_was_is_removed() {
    let Joined { voter: _voter, first, fixture: _fixture, worker } = join_worker();
    let former = text_of(&cluster_identity(&worker).0);
    let kept = worker.stop_and_keep();
    give_ticket(&kept, text(&create_ticket(&first, &[])));
    let second = ApiMember::new();
    let node = second.member.spawn(kept);
    let refusal = format!("another node of the cluster, {former}, has the key of the API of node ");
    wait_failing(&node, "the refusal", |_, detail| detail.contains(&refusal));
    assert_eq!(list_members(&first).as_array().unwrap().len(), 2);
    first.ask(&["cluster", "remove", &former]);
    node.wait_ready("root.cluster");
    assert_ne!(text_of(&cluster_identity(&node).0), former);
    node.stop();
    first.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_worker_believes_no_voter_that_was_reset_and_joins_its_new_cluster_by_a_reset_alone() {
    let Joined { voter: _voter, first, fixture: _fixture, worker } = join_worker();
    let before = cluster_identity(&worker);
    // The voter keeps the key of its API, and makes another cluster.
    first.ask(&["reset", "--bootstrap", "--yes"]);
    first.wait_ready("root.api.records");
    first.wait_ready("root.api.peers");
    let other = cluster_identity(&first).1;
    assert_ne!(other, before.1);
    let status = wait_failing(&worker, "the loss of its cluster", |_, detail| {
        detail.contains("does not admit this node")
    });
    assert_eq!((&status["state"], &status["node"]), (&"Unhealthy".into(), &before.0), "{status}");
    worker.ask(&["reset", "--yes"]);
    give_ticket(&worker.scratch, text(&worker_ticket(&first, &[])));
    worker.wait_ready("root.api.worker");
    assert_eq!(cluster_identity(&worker), (before.0, other));
    worker.stop();
    first.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_worker_whose_file_is_damaged_says_so_and_joins_again_after_a_reset() {
    let Joined { voter: _voter, first, fixture, worker } = join_worker();
    let identity = cluster_identity(&worker);
    let kept = worker.stop_and_keep();
    fs::write(kept.path().join("data/api/membership"), "{").unwrap();
    let worker = fixture.spawn(kept);
    wait("what is wrong", || {
        let health = worker.nodectl(&["health"]).stdout;
        anyhow::ensure!(health.contains("api/membership is damaged: type `nodectl reset`"), "{health}");
        Ok(())
    });
    worker.ask(&["reset", "--yes"]);
    give_ticket(&worker.scratch, text(&worker_ticket(&first, &[])));
    worker.wait_ready("root.api.worker");
    assert_eq!(cluster_identity(&worker), identity);
    worker.stop();
    first.stop();
}

#[test]
#[ignore = "needs etcd"]
fn a_worker_needs_a_ticket_of_its_role_and_waits_for_a_voter() {
    let voter = ApiMember::new();
    let first = start_first(&voter);
    let of_voter = create_ticket(&first, &[]);
    let worker = WorkerFixture::new().spawn_with(&serde_json::json!({ "ticket": "" }));
    wait_failing(&worker, "the empty file", |_, detail| {
        detail.contains("waits for a ticket; `nodectl cluster ticket create --role worker` on a voter")
    });
    give_ticket(&worker.scratch, text(&of_voter));
    wait_failing(&worker, "the refusal", |status, detail| {
        status["state"] == "Waiting" && detail.contains("is for a voter, and this node is a worker")
    });
    let ticket = worker_ticket(&first, &[]);
    let kept = first.stop_and_keep();
    give_ticket(&worker.scratch, text(&ticket));
    wait_failing(&worker, "a voter", |status, detail| {
        status["state"] == "Waiting" && detail.contains("waits for a voter that redeems its join ticket")
    });
    let first = voter.member.start(kept);
    worker.wait_ready("root.api.worker");
    let tickets = first.ask(&["cluster", "ticket", "list"]);
    assert!(tickets.contains("worker"), "{tickets}");
    worker.stop();
    first.stop();
}

#[test]
#[ignore = "sampled: needs etcd"]
fn a_worker_follows_another_voter_when_its_own_stops_or_freezes() {
    let members = [(); 3].map(|()| ApiMember::new());
    let first = start_first(&members[0]);
    let ticket = create_ticket(&first, &["--uses", "2"]);
    let others = [1, 2].map(|index| members[index].spawn_with(text(&ticket)));
    others.iter().for_each(|node| node.wait_ready("root.api.peers"));
    let worker = WorkerFixture::new().spawn_with(&worker_ticket(&first, &[]));
    worker.wait_ready("root.api.worker");
    let mut voters = [first].into_iter().chain(others).map(Some).collect::<Vec<_>>();
    let followed = || {
        let log = worker.ask(&["logs", "root.api.worker"]);
        let last = log.lines().rev().find(|line| line.contains("follows node") && line.contains(" at "));
        let is_at =
            |member: &ApiMember| last?.ends_with(&member.port.socket_address().to_string()).then_some(());
        members.iter().position(|member| is_at(member).is_some())
    };
    let wait_other = |before: usize| {
        let left = Instant::now();
        let now = wait("another voter", || {
            followed().filter(|now| *now != before).ok_or_else(|| anyhow::anyhow!("none"))
        });
        (now, left.elapsed())
    };
    let before = wait("a voter", || followed().ok_or_else(|| anyhow::anyhow!("none")));
    voters[before].take().unwrap().stop();
    let (second, took) = wait_other(before);
    cluster_identity(&worker);
    println!("a worker followed another voter {took:.1?} after its own had stopped");
    // Its etcd goes on, and the third is no majority alone.
    let frozen = voters[second].take().unwrap();
    frozen.signal(Signal::SIGSTOP);
    let (_, took) = wait_other(second);
    assert!(took < Duration::from_secs(25), "{took:?}");
    println!("a worker followed another voter {took:.1?} after its own was frozen");
    worker.stop();
    frozen.signal(Signal::SIGCONT);
    frozen.stop();
    voters.into_iter().flatten().for_each(|voter| _ = voter.stop());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn the_cluster_keeps_the_keys_of_a_worker_for_it_alone_and_no_more_than_a_few() {
    let voter = ApiMember::new();
    let fixtures = [(); 2].map(|()| WorkerFixture::new());
    let (first, workers) = block_in_place(|| {
        let first = start_first(&voter);
        let ticket = worker_ticket(&first, &["--uses", "2"]);
        let workers = fixtures.each_ref().map(|fixture| fixture.spawn_with(&ticket));
        workers.iter().for_each(|worker| worker.wait_ready("root.api.worker"));
        (first, workers)
    });
    let node_key = api_key(&first.data()).public_key();
    let connect = async |worker: &NodedProcess| {
        let (address, key) = (voter.port.socket_address().to_string(), api_key(&worker.data()));
        client::connect_channel(address, node_key, &key).await.map(NodeClient::new)
    };
    let mut clients = [connect(&workers[0]).await.unwrap(), connect(&workers[1]).await.unwrap()];
    let kept = async |client: &mut NodeClient<_>| {
        let request = UnlockKeysRequest { volume: "volume".into(), of_cluster: true };
        client.unlock_keys(request).await.unwrap().into_inner().keys
    };
    let replace = async |client: &mut NodeClient<_>, read: &[u8], keys: &[u8]| {
        let [read, keys] = [read, keys].map(|keys| keys.iter().map(|key| vec![*key; 32]).collect());
        let request = ReplaceUnlockKeysRequest { volume: "volume".into(), read, keys };
        client.replace_unlock_keys(request).await.map(drop).map_err(|status| status.code())
    };
    assert_eq!(replace(&mut clients[0], &[], &[1]).await, Ok(()));
    assert_eq!(replace(&mut clients[0], &[], &[2]).await, Err(Code::Aborted), "it was read before");
    assert_eq!(replace(&mut clients[0], &[1], &[1, 2]).await, Ok(()));
    assert_eq!(kept(&mut clients[0]).await, [[1; 32], [2; 32]]);
    assert_eq!(replace(&mut clients[0], &[1, 2], &[1, 2, 3, 4, 5]).await, Err(Code::InvalidArgument));
    assert_eq!(kept(&mut clients[1]).await, [[0_u8; 0]; 0]);
    let id = block_in_place(|| cluster_identity(&workers[0]).0);
    block_in_place(|| first.ask(&["cluster", "remove", id.as_str().unwrap()]));
    let removed = Instant::now();
    while connect(&workers[0]).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let took = removed.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert_eq!(kept(&mut clients[1]).await, [[0_u8; 0]; 0]);
    block_in_place(|| {
        workers.into_iter().for_each(|worker| _ = worker.stop());
        first.stop();
    });
}

/// With `NODEKEEL_WORKERS`, so many, in this process.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn workers_enrol_at_once_by_one_ticket_within_a_minute() {
    let count: u16 = std::env::var("NODEKEEL_WORKERS").map_or(10, |count| count.parse().unwrap());
    let voter = ApiMember::new();
    let (first, ticket) = block_in_place(|| {
        let first = start_first(&voter);
        let ticket = worker_ticket(&first, &["--uses", &count.to_string()]);
        (first, ticket)
    });
    let fixtures: Vec<_> = (0..count).map(|_| (WorkerFixture::new(), ScratchDir::new().unwrap())).collect();
    fixtures.iter().for_each(|(_, scratch)| give_ticket(scratch, text(&ticket)));
    let began = Instant::now();
    let workers: Vec<_> = fixtures.iter().map(|(fixture, scratch)| fixture.start_here(scratch)).collect();
    for worker in &workers {
        worker.wait_ready("root.api.worker").await;
    }
    let took = began.elapsed();
    println!("{count} workers have enrolled in {took:.1?}");
    assert!(took < Duration::from_secs(60), "{took:?}");
    let nodes = block_in_place(|| list_members(&first));
    assert_eq!(nodes.as_array().unwrap().len(), usize::from(count) + 1);
    for worker in workers {
        assert!(worker.shutdown().await.stragglers.is_empty());
    }
    block_in_place(|| first.stop());
}

#[test]
fn a_worker_has_an_api_at_an_address_and_neither_a_cluster_nor_an_etcd() {
    let scratch = ScratchDir::new().unwrap();
    let refuses = |config: &str, text: &str| {
        let config = format!("services.containerd.enable = false\n{config}");
        check(scratch.path(), &config, &[]).assert_fails(3, text);
    };
    let fixture = WorkerFixture::new();
    refuses("[worker]\n", "worker: requires [api]");
    refuses(
        "[worker]\n[api]\naddress = \"0.0.0.0:7443\"\n",
        "api.address: must be an address of this machine",
    );
    refuses(
        "[worker]\n[cluster]\naddress = \"127.0.0.1\"\n[api]\naddress = \"127.0.0.1:7443\"\n",
        "worker: conflicts with [cluster]",
    );
    refuses(
        "[worker]\n[services.etcd]\npeer_port = 7001\n[api]\naddress = \"127.0.0.1:7443\"\n",
        "services.etcd: a worker has no etcd",
    );
    let output = check(scratch.path(), &fixture.config, &[]).output();
    assert!(output.contains("and a worker of a cluster") && !output.contains("etcd"), "{output}");
}

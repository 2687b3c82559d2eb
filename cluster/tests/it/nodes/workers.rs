//! Nodes without a member: admitted by a join ticket, and removed with all that the cluster has of them.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nodekeel_cluster::consensus::kv::KeyRange;
use nodekeel_cluster::node::{
    EnrolError, JoinRole, JoinTicket, JoinTicketLimits, NodeApi, NodeId, NodeRemovalError, NodeReplacer,
    SecretBytes, WorkerRequest,
};
use nodekeel_localstorage::pki::{CertificateTemplate, PrivateKey};

use crate::enrolment::{InProcessVoter, MemoryCluster, error_chain};

fn limits(role: JoinRole, uses: u16) -> JoinTicketLimits {
    let mut limits = JoinTicketLimits::default();
    (limits.role, limits.uses) = (role, uses.try_into().expect("more than none"));
    limits
}

fn request(key: &PrivateKey, ticket: &JoinTicket, address: &str) -> WorkerRequest {
    WorkerRequest {
        ticket: ticket.id(),
        secret: ticket.secret().clone(),
        certificate: CertificateTemplate::default().self_sign(key).expect("a certificate"),
        api: NodeApi {
            key: *key.public_key().as_bytes(),
            address: address.parse().expect("an address and a port"),
        },
    }
}

fn new_key() -> PrivateKey {
    PrivateKey::generate().expect("a key")
}

async fn keys_of(cluster: &MemoryCluster, node: &NodeId) -> Vec<String> {
    let root = cluster.first.node.root_kv().expect("a running node");
    let kvs = root.range(KeyRange::all_keys()).await.expect("read").kvs;
    let keys = kvs.into_iter().map(|kv| String::from_utf8_lossy(&kv.key).into_owned());
    keys.filter(|key| key.contains(node.as_str())).collect()
}

#[tokio::test]
async fn a_worker_is_in_the_cluster_once_its_ticket_is_redeemed_and_uses_it_once() {
    let cluster = MemoryCluster::start().await;
    let voter = InProcessVoter::new(&cluster.first.node, "");
    let tickets = cluster.first.node.join_tickets().expect("a running node");
    let ticket = voter.create_ticket(&limits(JoinRole::Worker, 2)).await;
    let (one, now) = (new_key(), SystemTime::now());
    let address = "192.0.2.9:7443";
    let redeem = async |key: &PrivateKey, address: &str, now: SystemTime| {
        tickets.redeem_worker_ticket("ed25519:one", &request(key, &ticket, address), now).await
    };
    let node = redeem(&one, address, now).await.expect("admitted");
    // Also after it has expired: a call that was repeated.
    let later = now + Duration::from_secs(48 * 3600);
    assert_eq!(redeem(&one, address, later).await.expect("admitted"), node);
    let refused = redeem(&one, "192.0.2.10:7443", now).await.expect_err("a copy").to_string();
    assert!(refused.contains(&format!("node {node} is in the cluster at {address}")), "{refused}");
    let listed = tickets.list_tickets().await.expect("listed");
    assert_eq!((listed[0].redemptions.len(), &*listed[0].role), (1, "worker"));
    let used = &listed[0].redemptions[0];
    assert_eq!((&*used.key, &*used.node, &*used.url), ("ed25519:one", node.as_str(), address));
    let known = cluster.first.node.node_store().expect("running").watch_nodes().next_nodes().await;
    let known: Vec<_> = known.expect("read").into_iter().map(|known| (known.id, known.is_worker)).collect();
    assert_eq!(known, [(node.clone(), true)]);

    assert!(matches!(redeem(&new_key(), address, later).await, Err(EnrolError::Expired { .. })));
    redeem(&new_key(), address, now).await.expect("admitted");
    let used = redeem(&new_key(), address, now).await.expect_err("used").to_string();
    assert!(
        used.ends_with("is used: create another: `nodectl cluster ticket create --role worker`"),
        "{used}"
    );
    // A worker stays when its ticket is revoked.
    assert_eq!(tickets.revoke_ticket(ticket.id()).await.expect("revoked"), []);
    assert!(matches!(redeem(&one, address, now).await, Err(EnrolError::Revoked { .. })));
    assert_eq!(keys_of(&cluster, &node).await.len(), 2);
    cluster.stop().await;
}

#[tokio::test]
async fn a_ticket_admits_nodes_of_its_role_alone_and_a_worker_by_its_own_key_alone() {
    let cluster = MemoryCluster::start().await;
    let voter = InProcessVoter::new(&cluster.first.node, "");
    let tickets = cluster.first.node.join_tickets().expect("a running node");
    let now = SystemTime::now();
    let for_voter = voter.create_ticket(&limits(JoinRole::Voter, 1)).await;
    let request_by = |key: &PrivateKey| request(key, &for_voter, "192.0.2.9:7443");
    let refused =
        tickets.redeem_worker_ticket("a", &request_by(&new_key()), now).await.expect_err("a worker");
    assert!(refused.is_refusal());
    let refused = refused.to_string();
    assert!(
        refused.contains("is for a voter, and this node is a worker: create one of its role"),
        "{refused}"
    );

    let for_worker = voter.create_ticket(&limits(JoinRole::Worker, 1)).await;
    let mut joiner = cluster.node("192.0.2.2");
    joiner.settings.bootstrap = false;
    joiner.give_join_ticket(&for_worker);
    joiner.enroller = Some(Arc::new(voter));
    let refused = error_chain(joiner.run_to_failure().await);
    assert!(
        refused.contains("is for a worker, and this node is a voter: create one of its role"),
        "{refused}"
    );

    let mut stolen = request(&new_key(), &for_worker, "192.0.2.9:7443");
    stolen.api.key = *new_key().public_key().as_bytes();
    let unproved = tickets.redeem_worker_ticket("a", &stolen, now).await;
    assert!(matches!(unproved, Err(EnrolError::Request(_))), "{unproved:?}");
    let nowhere = request(&new_key(), &for_worker, "0.0.0.0:7443");
    let nowhere = tickets.redeem_worker_ticket("a", &nowhere, now).await;
    assert!(matches!(nowhere, Err(EnrolError::Request(_))), "{nowhere:?}");
    let listed = tickets.list_tickets().await.expect("listed");
    assert!(listed.iter().all(|ticket| ticket.redemptions.is_empty()), "{listed:?}");
    cluster.stop().await;
}

#[tokio::test]
async fn nothing_is_left_of_a_worker_that_is_removed_and_it_has_no_successor() {
    let cluster = MemoryCluster::start().await;
    let voter = InProcessVoter::new(&cluster.first.node, "");
    let tickets = cluster.first.node.join_tickets().expect("a running node");
    let ticket = voter.create_ticket(&limits(JoinRole::Worker, 3)).await;
    let key = new_key();
    let request = request(&key, &ticket, "192.0.2.9:7443");
    let node = tickets.redeem_worker_ticket("a", &request, SystemTime::now()).await.expect("admitted");
    let nodes = cluster.first.node.node_store().expect("a running node");
    let read = nodes.load_unlock_keys(&node, "volume").await.expect("read");
    nodes.replace_unlock_keys(&read, &[SecretBytes::new(vec![1; 32])]).await.expect("kept");
    assert_eq!(keys_of(&cluster, &node).await.len(), 3);

    let remover = cluster.first.node.node_remover().expect("a running node");
    let replacer = NodeReplacer::new(remover.clone(), cluster.issuer());
    let replaced = replacer.replace_node(&node, None).await;
    assert!(matches!(replaced, Err(NodeRemovalError::Worker { .. })), "{replaced:?}");
    remover.remove_node(&node).await.expect("removed");
    assert_eq!(keys_of(&cluster, &node).await, [""; 0]);
    let again = remover.remove_node(&node).await;
    assert!(matches!(again, Err(NodeRemovalError::Unknown { .. })), "{again:?}");
    // Its ticket has uses left, and lies on its disk.
    let back = tickets.redeem_worker_ticket("a", &request, SystemTime::now()).await.expect_err("removed");
    let removed = format!("node {node} was removed from the cluster after it had joined by join ticket");
    assert!(back.is_refusal() && back.to_string().contains(&removed), "{back}");
    let other = voter.create_ticket(&limits(JoinRole::Worker, 1)).await;
    let request = self::request(&key, &other, "192.0.2.9:7443");
    let again = tickets.redeem_worker_ticket("a", &request, SystemTime::now()).await;
    assert_eq!(again.expect("admitted"), node);
    cluster.stop().await;
}

#[tokio::test]
async fn a_key_is_that_of_one_node_alone() {
    let cluster = MemoryCluster::start().await;
    let voter = InProcessVoter::new(&cluster.first.node, "");
    let tickets = cluster.first.node.join_tickets().expect("a running node");
    let nodes = cluster.first.node.node_store().expect("a running node");
    let this = cluster.first.node.cluster_identity().expect("a running node").node_id;
    let ticket = voter.create_ticket(&limits(JoinRole::Worker, 2)).await;
    let redeem = async |key: &PrivateKey| {
        let request = request(key, &ticket, "192.0.2.9:7443");
        tickets.redeem_worker_ticket("a", &request, SystemTime::now()).await
    };
    let (of_worker, of_voter) = (new_key(), new_key());
    let api = |key: &PrivateKey| NodeApi {
        key: *key.public_key().as_bytes(),
        address: "192.0.2.1:7443".parse().expect("an address and a port"),
    };
    let worker = redeem(&of_worker).await.expect("admitted");
    let refused = nodes.record_api(&this, api(&of_worker)).await.expect_err("that of a worker").to_string();
    assert!(refused.contains(&format!("`nodectl cluster remove {worker}` on a voter")), "{refused}");
    nodes.record_api(&this, api(&of_voter)).await.expect("recorded");
    let refused = redeem(&of_voter).await.expect_err("that of a voter");
    assert!(refused.is_refusal(), "{refused}");
    let refused = error_chain(refused);
    assert!(refused.contains(&format!("`nodectl cluster remove {this}` on a voter")), "{refused}");
    let listed = tickets.list_tickets().await.expect("listed");
    assert_eq!(listed[0].redemptions.len(), 1, "nothing is used");
    cluster.stop().await;
}

//! A cluster that is restored from its snapshot after all of its voters were destroyed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use nodekeel_cluster::backup::stage_snapshot;
use nodekeel_cluster::consensus::kv::KeyRange;
use nodekeel_cluster::consensus::{DEFAULT_PEER_PORT, MemberId};
use nodekeel_cluster::pki::CertificateSpec;
use nodekeel_localstorage::Dir;
use nodekeel_localstorage::pki::Credentials;
use rstest::rstest;
use testbed::PrivateNetwork;

use super::replacement::assert_nodes;
use super::voter::{Voter, get, put, start_all, stop_all};
use crate::enrolment::read_snapshot;
use crate::etcd::EtcdVersion::{self, Debian, Newest};
use crate::etcd::{ask_peer, retried};

type Keys = BTreeMap<String, Vec<u8>>;

/// All keys of the cluster.
async fn all_keys(voter: &Voter) -> Keys {
    let access = voter.access().await;
    let read = retried(async || access.root_kv().range(KeyRange::all_keys()).await).await;
    read.kvs.into_iter().map(|kv| (String::from_utf8_lossy(&kv.key).into_owned(), kv.value)).collect()
}

/// The id of the voter's etcd cluster.
async fn etcd_cluster_id(voter: &Voter) -> u64 {
    let mut client = voter.client().await;
    client.status().await.unwrap().header().unwrap().cluster_id()
}

async fn member_ids(voter: &Voter) -> BTreeSet<MemberId> {
    let access = voter.access().await;
    let members = retried(async || access.cluster_members().list_members().await).await;
    members.into_iter().map(|member| member.id).collect()
}

/// Credentials of this name, issued by the voter's cluster.
async fn issue(voter: &Voter, name: &str) -> Credentials {
    let cluster_ca = retried(async || voter.access().await.load_ca().await).await;
    let spec = CertificateSpec::for_member(name.parse().unwrap(), voter.address().into());
    cluster_ca.issue_credentials(&spec).await.unwrap()
}

/// Waits until the voter's etcd refuses these credentials.
async fn wait_refused(voter: &Voter, with: &Credentials) {
    let at = (voter.address(), DEFAULT_PEER_PORT).into();
    retried(async || match ask_peer(at, &with.ca, Some(with), "/version").await {
        Ok(_) => Err("it answers"),
        Err(_) => Ok(()),
    })
    .await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd, etcdctl, go, ip and root: it makes network namespaces"]
async fn a_destroyed_cluster_is_restored_at_new_addresses_and_its_former_members_are_refused(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let site = Arc::new(PrivateNetwork::new(7).unwrap());
    let voter = |host| Voter::new(&site, host, version);
    let mut lost = [voter(0), voter(1), voter(2)];
    start_all(&mut lost).await;
    for number in 0..50 {
        put(&lost[number % 3], &format!("/data/{number}"), &format!("value {number}")).await;
    }
    let before_id = lost[0].wait_running().await.cluster_id;
    let former = lost[1].wait_running().await.node_id;
    let (etcd_id, ids) = (etcd_cluster_id(&lost[0]).await, member_ids(&lost[0]).await);
    let stolen = [issue(&lost[0], former.as_str()).await, issue(&lost[0], "operator").await];
    // A ticket that is not used yet, too.
    let unused = voter(6);
    unused.give_ticket(&lost[0]).await;
    let keys = all_keys(&lost[1]).await;
    let snapshot = read_snapshot(&lost[1].node()).await;
    put(&lost[0], "/later", "is not in the snapshot").await;
    for voter in &mut lost {
        voter.kill().await;
    }

    let mut first = voter(3);
    let staged = first.path("snapshot");
    stage_snapshot(&Dir::open(first.path("")).unwrap(), Path::new("snapshot"), snapshot).unwrap();
    first.start_with(|settings| settings.snapshot = Some(staged.clone()));
    retried(async || first.node().request_restore()).await;
    let membership = first.wait_running().await;
    assert_eq!(membership.cluster_id, before_id);
    assert_ne!(etcd_cluster_id(&first).await, etcd_id);
    assert!(member_ids(&first).await.is_disjoint(&ids));
    assert!(!staged.exists(), "it has all secrets of the cluster");
    // Only what is of the former nodes is gone or has changed.
    let restored = all_keys(&first).await;
    let differs = keys.iter().filter(|(key, value)| restored.get(*key) != Some(value));
    let differs: Vec<_> = differs.map(|(key, _)| key.as_str()).collect();
    let of_nodes = ["/etcd-ca/", "/etcd-learners/", "cluster:enrolment/nodes/", "cluster:tickets/"];
    let others: Vec<_> =
        differs.iter().filter(|key| !of_nodes.iter().any(|prefix| key.starts_with(prefix))).collect();
    assert!(others.is_empty(), "{others:?}");
    assert_eq!(get(&first, "/data/49").await.as_deref(), Some("value 49"));
    assert_eq!(get(&first, "/later").await, None);
    for credentials in &stolen {
        wait_refused(&first, credentials).await;
    }
    // Of its new CA, members alone are served, from its first start on.
    let member = issue(&first, "member").await;
    let at = (first.address(), DEFAULT_PEER_PORT).into();
    ask_peer(at, &member.ca, Some(&member), "/version").await.expect("a member is served");
    let cluster_ca = first.access().await.load_ca().await.unwrap();
    let client = CertificateSpec::for_client("client".parse().unwrap());
    wait_refused(&first, &cluster_ca.issue_credentials(&client).await.unwrap()).await;

    // The others join by tickets, as in any cluster.
    let mut voters = vec![first];
    for host in [4, 5] {
        let mut joiner = voter(host);
        joiner.give_ticket(&voters[0]).await;
        joiner.start();
        joiner.wait_running().await;
        assert_eq!(get(&joiner, "/data/0").await.as_deref(), Some("value 0"));
        voters.push(joiner);
    }
    assert_nodes(&voters).await;
    // A former member that comes back is alone, and takes no part.
    lost[0].start();
    lost[0].wait_condition("waits for a majority: 1 of 3 members").await;
    put(&voters[2], "/data/0", "written afterwards").await;
    assert_eq!(get(&voters[1], "/data/0").await.as_deref(), Some("written afterwards"));
    assert_nodes(&voters).await;
    // It goes on by itself.
    stop_all(&mut voters).await;
    for voter in &mut voters {
        voter.start();
    }
    assert_eq!(voters[0].wait_running().await.cluster_id, before_id);
    assert_eq!(get(&voters[2], "/data/7").await.as_deref(), Some("value 7"));
    lost[0].stop().await;
    stop_all(&mut voters).await;
}

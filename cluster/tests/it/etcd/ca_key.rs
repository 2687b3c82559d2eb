//! The CA's private key in a real etcd: who reads it, and how that of an earlier release is sealed.

use std::fs;
use std::sync::Arc;

use etcd_client::{GetOptions, WatchOptions};
use nodekeel_cluster::consensus::ClusterAccess;
use nodekeel_cluster::consensus::kv::{KeyRange, Txn, TxnOp};
use nodekeel_cluster::node::{NodeRemovalError, NodeRemover, RemovalStep};
use nodekeel_cluster::pki::{
    CA_CERT_PATH, CA_KEY_PATH, CaError, CertificateSpec, ClusterCa, PendingCa, SEAL_PREFIX, SEALED_KEY_PATH,
    Voter,
};
use nodekeel_localstorage::pki::Credentials;
use nodekeel_localstorage::tree::PkiDir;
use rstest::rstest;
use tokio::time::timeout;

use super::EtcdVersion::{self, Debian, Newest};
use super::cluster::{add_member, three_members};
use super::etcd_fixture::{EtcdFixture, retried};
use super::kills::{kill_after, kill_moments};
use crate::member_run::{HANG, MemberRun};

nodekeel_localstorage::layout! {
    /// Where a member keeps the CA of a new cluster until its etcd runs.
    struct NewCa {
        ca: PkiDir = "new_authority", 0o700;
    }
}

/// Gives a member the CA of the cluster that it will create.
pub(super) fn give_ca(fixture: &EtcdFixture) -> Credentials {
    let ca = PendingCa::generate().unwrap().to_credentials().unwrap();
    let placed: NewCa = fixture.data.etcd.add_layout().unwrap();
    placed.ca.store_credentials(&ca).unwrap();
    ca
}

/// The same, and returns its private key: 32 bytes, the seed.
fn give_ca_of_seed(fixture: &EtcdFixture) -> Vec<u8> {
    // *Source:* RFC 8410, section 7.
    give_ca(fixture).key.expose_pkcs8()[16..48].to_vec()
}

/// The private key as the first release stored it.
fn plain_key(seed: &[u8], ca: &ClusterCa) -> Vec<u8> {
    [seed, ca.ca_certificate().public_key().as_bytes()].concat()
}

fn has(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// The copy of a member's database that a backup has.
async fn snapshot(access: &ClusterAccess) -> Vec<u8> {
    let maintenance = access.store_maintenance().unwrap();
    retried(async || {
        let mut snapshot = maintenance.snapshot().await?;
        let mut file = Vec::new();
        while let Some(piece) = snapshot.next_piece().await? {
            file.extend(piece);
        }
        Ok::<_, nodekeel_cluster::consensus::MembershipError>(file)
    })
    .await
}

/// Everything that can be read from a member: all keys, and all that they were before.
async fn read_all(fixture: &EtcdFixture) -> Vec<Vec<u8>> {
    let mut client = fixture.client().await;
    let present = client.get("", Some(GetOptions::new().with_all_keys())).await.unwrap();
    assert!(present.kvs().iter().any(|kv| kv.key() == CA_CERT_PATH.as_bytes()), "it reads nothing");
    let last = present.header().unwrap().revision();
    let mut read: Vec<_> = present.kvs().iter().map(|kv| kv.value().to_vec()).collect();
    let options = WatchOptions::new().with_all_keys().with_start_revision(1);
    let mut former = client.watch("", Some(options)).await.unwrap();
    let follow = async {
        loop {
            let Some(answer) = former.message().await.unwrap() else { break };
            let mut is_last = false;
            for kv in answer.events().iter().filter_map(|event| event.kv()) {
                read.push(kv.value().to_vec());
                is_last |= kv.mod_revision() >= last;
            }
            if is_last {
                break;
            }
        }
    };
    timeout(HANG, follow).await.expect("the history in time");
    read
}

/// Turns the store into one of the first release: the private key is not sealed, and no voter has published a key.
async fn unseal(access: &ClusterAccess, seed: &[u8]) {
    let ca = access.load_ca().await.unwrap();
    let unseal = Txn::new()
        .then(TxnOp::put(CA_KEY_PATH, plain_key(seed, &ca)))
        .then(TxnOp::Delete(KeyRange::prefix(SEAL_PREFIX)));
    retried(async || access.root_kv().txn(unseal.clone()).await).await;
}

/// Waits until the private key is sealed, and the history erased.
async fn wait_sealed(access: &ClusterAccess) {
    let root = access.root_kv();
    retried(async || {
        let sealed = root.get(SEALED_KEY_PATH.as_bytes()).await.map_err(|error| error.to_string())?;
        let erase = root.range(KeyRange::prefix("/etcd-ca/seal/erase/")).await;
        let erase = erase.map_err(|error| error.to_string())?.kvs;
        if sealed.is_some() && erase.is_empty() { Ok(()) } else { Err(format!("{erase:?}")) }
    })
    .await;
    assert!(root.get(CA_KEY_PATH.as_bytes()).await.unwrap().is_none());
}

/// The voter of a member, as its disk has it.
fn voter(fixture: &EtcdFixture) -> Voter {
    let file = fixture.scratch.path().join("etcd/voter_key");
    Voter::from_file(fixture.name.clone(), &fs::read(file).unwrap()).unwrap()
}

async fn can_sign(access: &ClusterAccess, fixture: &EtcdFixture) -> bool {
    retried(async || ClusterCa::load_sealed(access.root_kv(), &voter(fixture)).await).await.can_sign()
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_ticket_before_and_after_its_use_and_a_snapshot_have_no_private_key_of_the_ca(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    // The name of a node, which can be removed by it.
    let name = format!("nodekeel-{}", "ab".repeat(16));
    let (first, second) = (EtcdFixture::new(version, "one"), EtcdFixture::new(version, &name));
    let seed = give_ca_of_seed(&first);
    let mut node = first.run(first.bootstrap_options());
    let one = node.wait_running().await;
    let start = add_member(&second, &first, &one).await;
    // A thief makes keys of his own.
    let thief = Voter::generate(second.name.clone()).unwrap();
    let assert_safe = async |when: &str| {
        let read = read_all(&first).await;
        assert!(read.len() > 5 && read.iter().all(|value| !has(value, &seed)), "{when}");
        let ca = ClusterCa::load_sealed(one.root_kv(), &thief).await.unwrap();
        assert!(!ca.can_sign(), "{when}");
        assert!(!has(&snapshot(&one).await, &seed), "{when}");
    };
    assert_safe("before its use").await;
    let mut joined = second.run(start.clone());
    let two = joined.wait_running().await;
    assert_safe("after its use").await;
    assert!(can_sign(&one, &first).await && can_sign(&one, &second).await);
    assert!(!has(&snapshot(&two).await, &seed));
    // Both voters sign.
    for access in [&one, &two] {
        let ca = access.load_ca().await.unwrap();
        ca.issue_credentials(&CertificateSpec::for_client("client".parse().unwrap())).await.unwrap();
    }

    // A voter that has lost its key can't revoke a certificate, and so removes nobody.
    let closed = NodeRemover::new(one.clone().with_voter(Some(Arc::new(thief)))).unwrap();
    let refused = closed.run_step(&name.parse().unwrap(), RemovalStep::Member).await.unwrap_err();
    assert!(
        matches!(&refused, NodeRemovalError::Certificates { source: CaError::Sealed, .. }),
        "{refused:?}"
    );
    assert_eq!(one.cluster_members().list_members().await.unwrap().len(), 2);

    // The disk of a removed node opens the private key no more.
    let remover = NodeRemover::new(one.clone()).unwrap();
    retried(async || remover.remove_node(&name.parse().unwrap()).await).await;
    assert!(can_sign(&one, &first).await && !can_sign(&one, &second).await);
    joined.stop().await;

    // The same looks find it where it is not sealed.
    unseal(&one, &seed).await;
    assert!(read_all(&first).await.iter().any(|value| has(value, &seed)));
    node.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn the_private_key_of_an_earlier_release_is_sealed_by_the_last_upgrade_and_leaves_no_trace(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let fixtures = ["one", "two", "three"].map(|name| EtcdFixture::new(version, name));
    let seed = give_ca_of_seed(&fixtures[0]);
    let members = three_members(&fixtures).await;
    unseal(&members[0].1, &seed).await;
    assert!(has(&snapshot(&members[0].1).await, &seed), "the first release has it in its snapshots");
    let mut upgraded: Vec<(MemberRun, ClusterAccess)> = Vec::new();
    for ((run, access), fixture) in members.into_iter().zip(&fixtures) {
        let plain = retried(async || access.root_kv().get(CA_KEY_PATH.as_bytes()).await).await;
        assert!(plain.is_some(), "the other voters still need it");
        // Both releases sign until then.
        assert!(retried(async || access.load_ca().await).await.can_sign());
        run.stop().await;
        let mut run = fixture.run(fixture.restart_options());
        let access = run.wait_running().await;
        upgraded.push((run, access));
    }
    for (_, access) in &upgraded {
        wait_sealed(access).await;
    }
    for ((_, access), fixture) in upgraded.iter().zip(&fixtures) {
        assert!(can_sign(access, fixture).await, "{}", fixture.name);
        assert!(!has(&snapshot(access).await, &seed), "{} has it in its history", fixture.name);
        let ca = retried(async || access.load_ca().await).await;
        let spec = CertificateSpec::for_client(fixture.name.clone());
        retried(async || ca.issue_credentials(&spec).await).await;
    }
    for (run, _) in upgraded {
        run.stop().await;
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs etcd and go"]
async fn a_member_killed_at_any_time_while_it_seals_the_private_key_completes_it(
    #[values(Debian, Newest)] version: EtcdVersion,
) {
    let fixture = EtcdFixture::new(version, "one");
    let seed = give_ca_of_seed(&fixture);
    let mut node = fixture.run(fixture.bootstrap_options());
    node.wait_running().await;
    let (mut sealed_by_then, mut kills) = (0, 0);
    for step in kill_moments(version) {
        node.stop().await;
        node = fixture.run(fixture.restart_options());
        let access = node.wait_running().await;
        wait_sealed(&access).await;
        unseal(&access, &seed).await;
        node.stop().await;
        kill_after(step, &fixture, version, "").await;
        kills += 1;
        node = fixture.run(fixture.restart_options());
        let access = node.wait_running().await;
        let was_sealed = access.root_kv().get(CA_KEY_PATH.as_bytes()).await.unwrap().is_none();
        sealed_by_then += u32::from(was_sealed);
        wait_sealed(&access).await;
        assert!(can_sign(&access, &fixture).await, "killed at {step}");
        assert!(!has(&snapshot(&access).await, &seed), "killed at {step}");
    }
    node.stop().await;
    println!("{version:?}: {kills} kills, {sealed_by_then} of them found sealed by the next start");
}

/// A voter that can't sign says so, and for how long it waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs etcd and go"]
async fn a_joiner_waits_by_name_for_the_private_key_and_goes_on_when_it_is_sealed() {
    let (first, second) = (EtcdFixture::new(Newest, "one"), EtcdFixture::new(Newest, "two"));
    let mut node = first.run(first.bootstrap_options());
    let one = node.wait_running().await;
    let sealed = one.root_kv().get(SEALED_KEY_PATH.as_bytes()).await.unwrap().unwrap().value;
    let start = add_member(&second, &first, &one).await;
    // No voter can open it: sealed to a key that is lost.
    let lost = EtcdFixture::new(Newest, "lost");
    let mut other = lost.run(lost.bootstrap_options());
    let foreign =
        other.wait_running().await.root_kv().get(SEALED_KEY_PATH.as_bytes()).await.unwrap().unwrap();
    other.stop().await;
    one.root_kv().put(SEALED_KEY_PATH.as_bytes(), &foreign.value).await.unwrap();
    let refused = one.load_ca().await.unwrap();
    let spec = CertificateSpec::for_client("client".parse().unwrap());
    let refused = refused.issue_credentials(&spec).await.unwrap_err();
    assert!(refused.to_string().contains("not sealed to this node"), "{refused}");
    let mut joined = second.run(start);
    joined.wait_condition("waits until another voter seals the private key of the CA to it").await;
    one.root_kv().put(SEALED_KEY_PATH.as_bytes(), &sealed).await.unwrap();
    joined.wait_running().await;
    assert!(can_sign(&one, &second).await);
    joined.stop().await;
    node.stop().await;
}

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;

use super::*;
use crate::age::Identity;
use crate::consensus::kv::{KvError, RangeResponse, Revision, TxnResponse, WatchStream};
use crate::consensus::listed_voters::ListedVoters;
use crate::consensus::memory::MemoryKv;
use crate::consensus::{MemberId, MembershipError, SnapshotStream, StoreAlarm};
use crate::pki::{CertificateSpec, PendingCa};

/// Counts how often a database is written anew.
#[derive(Debug, Default)]
struct Databases(AtomicUsize);

#[async_trait]
impl StoreMaintenance for Databases {
    async fn compact(&self) -> Result<(), MembershipError> {
        Ok(())
    }
    async fn defragment(&self) -> Result<(), MembershipError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
    async fn list_alarms(&self) -> Result<Vec<(MemberId, StoreAlarm)>, MembershipError> {
        Err(MembershipError::Stopped)
    }
    async fn disarm(&self, _: MemberId, _: &StoreAlarm) -> Result<(), MembershipError> {
        Err(MembershipError::Stopped)
    }
    async fn snapshot(&self) -> Result<SnapshotStream, MembershipError> {
        Err(MembershipError::Stopped)
    }
}

/// A store whose caller is killed at a call: before or after the call takes effect.
#[derive(Debug)]
struct KilledAt {
    store: Arc<dyn KvStore>,
    calls: AtomicUsize,
    at: usize,
    takes_effect: bool,
}

impl KilledAt {
    fn killed() -> KvError {
        KvError::Stopped
    }
}

#[async_trait]
impl KvStore for KilledAt {
    async fn range(&self, keys: KeyRange) -> Result<RangeResponse, KvError> {
        self.store.range(keys).await
    }
    async fn txn(&self, txn: Txn) -> Result<TxnResponse, KvError> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        if call < self.at {
            return self.store.txn(txn).await;
        }
        if call == self.at && self.takes_effect {
            self.store.txn(txn).await?;
        }
        Err(Self::killed())
    }
    async fn watch(&self, keys: KeyRange, from: Revision) -> Result<WatchStream, KvError> {
        self.store.watch(keys, from).await
    }
}

struct Cluster {
    root: Arc<dyn KvStore>,
    voters: Arc<ListedVoters>,
}

struct Node {
    voter: Arc<Voter>,
    member: Credentials,
}

impl Cluster {
    /// A cluster whose private key is sealed to this voter.
    async fn sealed_to(name: &'static str) -> (Cluster, Node) {
        let voter = Arc::new(Voter::generate(name.parse().unwrap()).unwrap());
        let root: Arc<dyn KvStore> = Arc::new(MemoryKv::new());
        let ca = PendingCa::generate().unwrap().save_sealed(Arc::clone(&root), &voter).await.unwrap();
        let member = ca.issue_credentials(&CertificateSpec::for_client(name.parse().unwrap())).await.unwrap();
        let cluster = Cluster { root, voters: Arc::new(ListedVoters(Mutex::new(vec![name]))) };
        let node = Node { voter, member };
        cluster.sealing(&node).publish_key(&node.member).await.unwrap();
        (cluster, node)
    }

    /// The cluster of the first release.
    async fn golden(voters: Vec<&'static str>) -> Cluster {
        let store = MemoryKv::new();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/golden/keys.tsv");
        for line in std::fs::read_to_string(path).unwrap().lines() {
            let (key, hex) = line.split_once('\t').unwrap();
            let bytes = hex
                .as_bytes()
                .chunks(2)
                .map(|digits| u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap());
            store.put(key.as_bytes(), &bytes.collect::<Vec<_>>()).await.unwrap();
        }
        Cluster { root: Arc::new(store), voters: Arc::new(ListedVoters(Mutex::new(voters))) }
    }

    /// Certifies a member by a CA that can sign.
    async fn certify(&self, name: &str, by: Option<&Node>) -> Node {
        let ca = match by {
            Some(node) => ClusterCa::load_sealed(Arc::clone(&self.root), &node.voter).await.unwrap(),
            None => ClusterCa::load_ca(Arc::clone(&self.root)).await.unwrap(),
        };
        let spec = CertificateSpec::for_member(name.parse().unwrap(), [192, 0, 2, 1].into());
        let member = ca.issue_credentials(&spec).await.unwrap();
        Node { voter: Arc::new(Voter::generate(name.parse().unwrap()).unwrap()), member }
    }

    fn sealing(&self, node: &Node) -> CaSealing {
        self.sealing_over(Arc::clone(&self.root), node)
    }

    fn sealing_over(&self, root: Arc<dyn KvStore>, node: &Node) -> CaSealing {
        CaSealing::new(root, Arc::clone(&self.voters) as _, Arc::clone(&node.voter))
    }

    async fn publish(&self, node: &Node) {
        self.sealing(node).publish_key(&node.member).await.unwrap();
    }

    async fn can_sign(&self, node: &Node) -> bool {
        ClusterCa::load_sealed(Arc::clone(&self.root), &node.voter).await.unwrap().can_sign()
    }

    async fn has(&self, key: &str) -> bool {
        self.root.get(key.as_bytes()).await.unwrap().is_some()
    }

    fn set_voters(&self, names: &[&'static str]) {
        *self.voters.0.lock().unwrap() = names.to_vec();
    }
}

#[tokio::test]
async fn the_private_key_of_the_first_release_is_sealed_once_all_voters_have_published_their_keys() {
    let cluster = Cluster::golden(vec!["one", "two", "three"]).await;
    let before = ClusterCa::load_ca(Arc::clone(&cluster.root)).await.unwrap();
    let mut nodes = Vec::new();
    for name in ["one", "two", "three"] {
        nodes.push(cluster.certify(name, None).await);
    }
    let issued = before.list_issued().await.unwrap();
    for node in &nodes {
        assert!(cluster.has(CA_KEY_PATH).await && !cluster.has(SEALED_KEY_PATH).await);
        assert!(cluster.can_sign(node).await, "a voter of either release signs until then");
        cluster.publish(node).await;
        cluster.sealing(node).seal(None).await.unwrap();
    }
    assert!(!cluster.has(CA_KEY_PATH).await && cluster.has(SEALED_KEY_PATH).await);
    for node in &nodes {
        let ca = ClusterCa::load_sealed(Arc::clone(&cluster.root), &node.voter).await.unwrap();
        assert!(ca.can_sign());
        assert_eq!(ca.list_issued().await.unwrap(), issued);
        assert_eq!(ca.revocation_list().await.unwrap(), before.revocation_list().await.unwrap());
    }
    // Their databases are written anew, one after the other.
    let mut erased = Vec::new();
    for round in 1..=3 {
        for node in &nodes {
            let databases = Databases::default();
            cluster.sealing(node).erase_history(&databases).await.unwrap();
            erased.extend((databases.0.into_inner() > 0).then_some(node.voter.name().as_str()));
        }
        // In the order of their names: each round finds at least the next one.
        assert!(erased.len() >= round);
    }
    assert_eq!(erased, ["one", "three", "two"]);
    // Without a voter's key, it reads and can't sign.
    let reader = ClusterCa::load_ca(Arc::clone(&cluster.root)).await.unwrap();
    assert_eq!(reader.list_issued().await.unwrap(), issued);
    let refused = reader.revoke_name("one").await.unwrap_err();
    assert!(matches!(refused, CaError::Sealed) && refused.to_string().contains("not sealed to this node"));
}

#[tokio::test]
async fn a_joiner_gets_the_private_key_and_a_removed_voter_loses_it() {
    let (cluster, one) = Cluster::sealed_to("one").await;
    let (two, three) = (cluster.certify("two", Some(&one)).await, cluster.certify("three", Some(&one)).await);
    cluster.publish(&two).await;
    cluster.sealing(&one).seal(None).await.unwrap();
    assert!(!cluster.can_sign(&two).await, "it is no voter yet");
    cluster.set_voters(&["one", "two", "three"]);
    cluster.sealing(&two).seal(None).await.unwrap();
    assert!(!cluster.can_sign(&two).await, "only a voter that can open it seals it");
    cluster.sealing(&one).seal(None).await.unwrap();
    assert!(cluster.can_sign(&two).await && !cluster.can_sign(&three).await);
    cluster.publish(&three).await;
    cluster.sealing(&two).seal(None).await.unwrap();
    assert!(cluster.can_sign(&three).await);

    cluster.set_voters(&["one", "three"]);
    cluster.sealing(&three).exclude("two").await.unwrap();
    cluster.sealing(&three).exclude("two").await.unwrap();
    assert!(!cluster.can_sign(&two).await && cluster.can_sign(&one).await && cluster.can_sign(&three).await);
    // It can't come back by itself.
    cluster.publish(&two).await;
    cluster.sealing(&one).seal(None).await.unwrap();
    assert!(!cluster.can_sign(&two).await);
    // A voter that has lost its key publishes another one, to which nobody seals: it is none that may stay alone.
    assert!(cluster.sealing(&three).has_other_opener("three").await.unwrap());
    let again =
        Node { voter: Arc::new(Voter::generate("one".parse().unwrap()).unwrap()), member: one.member };
    cluster.publish(&again).await;
    cluster.sealing(&three).seal(None).await.unwrap();
    assert!(!cluster.can_sign(&again).await);
    assert!(!cluster.sealing(&three).has_other_opener("three").await.unwrap());
    assert!(!cluster.sealing(&again).has_other_opener("one").await.unwrap(), "it can't tell");
    let lost = cluster.sealing(&again).follow_voters(&Databases::default()).await;
    assert!(matches!(lost, Err(CaError::Sealed)), "health names it");
    let one = Node { member: again.member, ..one };
    cluster.publish(&one).await;
    // The last step of a node that leaves: it still has the key, and is no voter.
    cluster.set_voters(&["one"]);
    cluster.sealing(&three).exclude("three").await.unwrap();
    cluster.sealing(&three).exclude("three").await.unwrap();
    assert!(!cluster.can_sign(&three).await && cluster.can_sign(&one).await);
}

#[tokio::test]
async fn the_private_key_is_not_sealed_to_a_key_that_no_voter_has_signed() {
    let (cluster, one) = Cluster::sealed_to("one").await;
    let two = cluster.certify("two", Some(&one)).await;
    cluster.set_voters(&["one", "two"]);
    let thief =
        Node { voter: Arc::new(Voter::generate("two".parse().unwrap()).unwrap()), member: two.member };
    let root = Arc::clone(&cluster.root);
    let put = async |record: &[u8]| root.put(voter_path("two").as_bytes(), record).await.map(drop).unwrap();
    let sealed_to_thief = async || {
        cluster.sealing(&one).seal(None).await.unwrap();
        cluster.can_sign(&thief).await
    };
    // By another member's certificate, by that of another CA, damaged, and of a key that is none.
    put(&thief.voter.sign_record(&one.member).unwrap()).await;
    assert!(!sealed_to_thief().await);
    let (other, foreign) = Cluster::sealed_to("two").await;
    put(&thief.voter.sign_record(&foreign.member).unwrap()).await;
    assert!(!sealed_to_thief().await);
    drop(other);
    let right = thief.voter.sign_record(&thief.member).unwrap();
    for at in 0..right.len() {
        let mut changed = right.clone();
        changed[at] ^= 1;
        put(&changed).await;
        assert!(!sealed_to_thief().await, "{at}");
    }
    // The right one, and then another one of the same voter: as its ticket's reader would make it.
    put(&right).await;
    assert!(sealed_to_thief().await);
    let later = Voter::generate("two".parse().unwrap()).unwrap();
    put(&later.sign_record(&thief.member).unwrap()).await;
    assert!(sealed_to_thief().await);
    let ca = ClusterCa::load_sealed(Arc::clone(&cluster.root), &later).await.unwrap();
    assert!(!ca.can_sign(), "another key took its place");
    // A revoked certificate.
    let three = cluster.certify("three", Some(&one)).await;
    cluster.set_voters(&["one", "two", "three"]);
    cluster.publish(&three).await;
    let ca = ClusterCa::load_sealed(Arc::clone(&cluster.root), &one.voter).await.unwrap();
    ca.revoke_name("three").await.unwrap();
    cluster.sealing(&one).seal(None).await.unwrap();
    assert!(!cluster.can_sign(&three).await);
}

#[tokio::test]
async fn the_recovery_key_opens_the_private_key_until_another_one_is_configured() {
    let (cluster, one) = Cluster::sealed_to("one").await;
    let keys = [0; 2].map(|_| Identity::generate().unwrap());
    let opens = async |key: &Identity| {
        let sealed = cluster.root.get(SEALED_KEY_PATH.as_bytes()).await.unwrap().unwrap();
        key.open(&sealed.value).is_ok_and(|text| text.windows(11).any(|part| part == b"PRIVATE KEY"))
    };
    for (configured, expected) in [
        (None, [false, false]),
        (Some(0), [true, false]),
        (None, [true, false]),
        (Some(1), [false, true]),
        (None, [false, true]),
    ] {
        let recovery = configured.map(|index: usize| keys[index].recipient());
        cluster.sealing(&one).seal(recovery).await.unwrap();
        assert_eq!([opens(&keys[0]).await, opens(&keys[1]).await], expected, "{configured:?}");
    }
    assert!(cluster.can_sign(&one).await);
}

#[tokio::test]
async fn a_voter_killed_at_any_call_leaves_a_private_key_that_opens_and_the_next_run_completes() {
    for takes_effect in [false, true] {
        let mut at = 0;
        loop {
            let cluster = Cluster::golden(vec!["one", "two"]).await;
            let nodes = [cluster.certify("one", None).await, cluster.certify("two", None).await];
            let databases = Databases::default();
            let run = async |root: Arc<dyn KvStore>| {
                for node in &nodes {
                    let sealing = cluster.sealing_over(Arc::clone(&root), node);
                    sealing.publish_key(&node.member).await?;
                    sealing.seal(None).await?;
                }
                for node in &nodes {
                    let sealing = cluster.sealing_over(Arc::clone(&root), node);
                    sealing.erase_history(&databases).await?;
                }
                cluster.set_voters(&["one"]);
                cluster.sealing_over(root, &nodes[0]).exclude("two").await
            };
            let store =
                KilledAt { store: Arc::clone(&cluster.root), calls: AtomicUsize::new(0), at, takes_effect };
            let killed = run(Arc::new(store)).await;
            assert!(cluster.can_sign(&nodes[0]).await, "killed at call {at}");
            if killed.is_err() {
                cluster.set_voters(&["one", "two"]);
                if !cluster.can_sign(&nodes[1]).await {
                    // It was left out, and is so by the next run, too.
                    cluster.set_voters(&["one"]);
                    cluster.sealing(&nodes[0]).exclude("two").await.unwrap();
                } else {
                    run(Arc::clone(&cluster.root)).await.unwrap();
                }
            }
            assert!(cluster.can_sign(&nodes[0]).await && !cluster.can_sign(&nodes[1]).await, "{at}");
            assert!(!cluster.has(CA_KEY_PATH).await && databases.0.load(Ordering::Relaxed) > 0);
            let left = cluster.root.range(KeyRange::prefix(ERASE_PREFIX)).await.unwrap().kvs;
            assert!(left.is_empty(), "killed at call {at}: {left:?}");
            if killed.is_ok() {
                break;
            }
            at += 1;
        }
        assert!(at > 5, "{at} calls");
    }
}

/// The files that the first release that seals the private key has written.
fn golden_seal(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/golden/seal").join(name);
    std::fs::read(path).unwrap()
}

#[tokio::test]
async fn the_sealed_key_the_record_and_the_voters_key_of_the_first_release_that_seals_are_read() {
    let root: Arc<dyn KvStore> = Arc::new(MemoryKv::new());
    for (key, file) in [
        (CA_CERT_PATH, "ca.der"),
        (CRL_PATH, "crl.der"),
        (SEALED_KEY_PATH, "ca-key.age"),
        ("/etcd-ca/seal/voters/one", "voter-one"),
    ] {
        root.put(key.as_bytes(), &golden_seal(file)).await.unwrap();
    }
    let voter = Voter::from_file("one".parse().unwrap(), &golden_seal("voter_key")).unwrap();
    assert_eq!(*voter.to_file(), golden_seal("voter_key"));
    assert!(ClusterCa::load_sealed(Arc::clone(&root), &voter).await.unwrap().can_sign());
    let recovery = Identity::from_file(&golden_seal("recovery_key")).unwrap();
    let sealed = voter.open(&golden_seal("ca-key.age")).unwrap().unwrap();
    assert_eq!(sealed.recipients, voter.with_recovery(Some(recovery.recipient().clone())).alone());
    let values = StoredValues::from_key_values(root.range(KeyRange::all_keys()).await.unwrap().kvs);
    let ca = values.certificate().unwrap();
    let list = values.revocation_list(&ca).unwrap();
    let published = verify_record("one", &golden_seal("voter-one"), &ca, &list);
    assert_eq!(published.unwrap().0, sealed.recipients.voters["one"]);
}

//! The authority, on a store in memory.

mod keep;
mod stored;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use nodekeel_cluster::consensus::MemberName;
use nodekeel_cluster::consensus::kv::{
    KeyRange, KvError, KvStore, Lease, Range, Ranged, Revision, Txn, TxnResult, Watch, WatchFrom,
};
use nodekeel_cluster::consensus::memory::MemoryKv;
use nodekeel_cluster::pki::{Authority, AuthorityError, CERTIFICATES, Leaf, NewAuthority, SubjectNames};
use nodekeel_localstorage::pki::Certificate;

pub(crate) fn name(name: &str) -> MemberName {
    name.parse().unwrap()
}

pub(crate) fn leaf(of: &str) -> Leaf {
    Leaf::member(name(of), [192, 0, 2, 1].into())
}

pub(crate) async fn saved() -> (Arc<dyn KvStore>, Authority) {
    let root: Arc<dyn KvStore> = Arc::new(MemoryKv::new());
    let authority = NewAuthority::generate().unwrap().save(Arc::clone(&root)).await.unwrap();
    (root, authority)
}

#[tokio::test]
async fn an_authority_is_saved_once_with_what_it_issued_before() {
    let root: Arc<dyn KvStore> = Arc::new(MemoryKv::new());
    assert!(matches!(Authority::load(Arc::clone(&root)).await, Err(AuthorityError::Absent)));
    let mut new = NewAuthority::generate().unwrap();
    let first = new.issue(&leaf("first")).unwrap();
    let kept = new.to_credentials().unwrap();
    let saved = new.save(Arc::clone(&root)).await.unwrap();
    assert_eq!(saved.issued().await.unwrap(), std::slice::from_ref(&first.certificate));
    let revision = root.range(Range::new(KeyRange::all())).await.unwrap().revision;
    // Killed before it knew: the next one has it from the disk, and saves it again.
    let mut again = NewAuthority::from_credentials(kept).unwrap();
    again.issued_before(first.certificate.clone()).unwrap();
    again.save(Arc::clone(&root)).await.unwrap();
    assert_eq!(
        root.range(Range::new(KeyRange::all())).await.unwrap().revision,
        revision,
        "nothing has changed"
    );
    let other = NewAuthority::generate().unwrap().save(Arc::clone(&root)).await;
    assert!(matches!(other, Err(AuthorityError::Another)), "{other:?}");
    let loaded = Authority::load(root).await.unwrap();
    assert_eq!(loaded.certificate(), new.certificate());
    assert!(!loaded.revoked().await.unwrap().revokes(&first.certificate));
}

#[tokio::test]
async fn a_certificate_says_who_it_is_of_and_never_expires() {
    let (root, authority) = saved().await;
    let member = authority.issue(&leaf("member")).await.unwrap().certificate;
    let client = authority.issue(&Leaf::client(name("client"))).await.unwrap().certificate;
    let node = authority.issue(&Leaf::node(name("node"), Vec::new())).await.unwrap().certificate;
    for certificate in [&member, &client, &node] {
        assert!(certificate.is_signed_by(authority.certificate()) && !certificate.is_ca());
        let seconds = certificate.not_after().duration_since(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(seconds, Duration::from_secs(253_402_300_799), "9999-12-31T23:59:59Z");
        assert!(
            (12..=16).contains(&certificate.serial().len()) && certificate.serial()[0] < 0x80,
            "127 bits"
        );
    }
    let named = SubjectNames::of(&member);
    assert_eq!((named.common.as_deref(), named.dns), (Some("member"), vec!["member".to_owned()]));
    assert_eq!(named.addresses, ["192.0.2.1".parse::<std::net::IpAddr>().unwrap()]);
    let named = SubjectNames::of(&client);
    assert!(named.dns.is_empty() && named.addresses.is_empty() && named.is_named("client"));
    let recorded = root.range(Range::new(KeyRange::prefix(CERTIFICATES))).await.unwrap().kvs;
    assert_eq!(recorded.len(), 3, "each is recorded before it is given out");
}

#[tokio::test]
async fn a_key_that_stays_where_it_is_can_be_certified() {
    let (_root, authority) = saved().await;
    let key = nodekeel_localstorage::pki::PrivateKey::generate().unwrap();
    let certificate = authority.certify(key.public(), &leaf("member")).await.unwrap();
    assert_eq!(certificate.public(), key.public());
}

#[tokio::test]
async fn all_certificates_of_a_name_are_revoked_and_no_other() {
    let (_root, authority) = saved().await;
    let mut issued: Vec<Certificate> = Vec::new();
    for of in ["gone", "gone", "stays", "gone"] {
        issued.push(authority.issue(&leaf(of)).await.unwrap().certificate);
    }
    let client = authority.issue(&Leaf::client(name("gone"))).await.unwrap().certificate;
    assert_eq!(authority.revoke("gone").await.unwrap().len(), 4);
    let list = authority.revoked().await.unwrap();
    let revoked: Vec<_> =
        issued.iter().chain([&client]).map(|certificate| list.revokes(certificate)).collect();
    assert_eq!(revoked, [true, true, false, true, true]);
    let der = list.der().to_vec();
    assert_eq!(authority.revoke("gone").await.unwrap().len(), 4, "again is as well");
    assert_eq!(authority.revoked().await.unwrap().der(), der, "and changes nothing");
    let unknown = authority.revoke("nobody").await;
    assert!(matches!(unknown, Err(AuthorityError::UnknownName { .. })), "{unknown:?}");
    let later = authority.issue(&leaf("gone")).await.unwrap().certificate;
    assert!(!authority.revoked().await.unwrap().revokes(&later), "who is taken back gets a new one");
}

/// A store whose calls let others go first.
#[derive(Debug)]
struct Polite(Arc<dyn KvStore>);

#[async_trait]
impl KvStore for Polite {
    async fn range(&self, range: Range) -> Result<Ranged, KvError> {
        tokio::task::yield_now().await;
        self.0.range(range).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResult, KvError> {
        tokio::task::yield_now().await;
        self.0.txn(txn).await
    }

    async fn watch(&self, keys: KeyRange, from: WatchFrom) -> Result<Watch, KvError> {
        self.0.watch(keys, from).await
    }

    async fn lease(&self, ttl: Duration) -> Result<Lease, KvError> {
        self.0.lease(ttl).await
    }

    async fn compact(&self, before: Revision) -> Result<(), KvError> {
        self.0.compact(before).await
    }
}

#[tokio::test]
async fn revokers_at_once_lose_no_revocation() {
    let (root, authority) = saved().await;
    let mut issued = Vec::new();
    for number in 0..16 {
        issued.push(authority.issue(&leaf(&format!("node-{number}"))).await.unwrap().certificate);
    }
    let revoke = |number| {
        let root = Arc::clone(&root);
        async move {
            let authority = Authority::load(Arc::new(Polite(root))).await.unwrap();
            authority.revoke(&format!("node-{number}")).await.unwrap();
        }
    };
    join_all((0..16).map(revoke)).await;
    let list = authority.revoked().await.unwrap();
    assert!(issued.iter().all(|certificate| list.revokes(certificate)), "each is on the list");
}

#[tokio::test]
async fn no_key_is_printed() {
    let (root, authority) = saved().await;
    let new = NewAuthority::generate().unwrap();
    let raw = root.get(b"/etcd-ca/ca-key.der").await.unwrap().unwrap();
    let digits: String = raw.value[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let list = format!("{:?}", &raw.value[..4]);
    for text in [format!("{authority:?}"), format!("{new:?}"), format!("{raw:?}"), format!("{root:?}")] {
        assert!(!text.contains(&digits) && !text.contains(list.trim_end_matches(']')), "{text}");
    }
    assert!(format!("{raw:?}").contains("64 bytes"));
}

//! The list of revoked certificates on the disk.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_cluster::consensus::kv::{KeyRange, KvStore, Range};
use nodekeel_cluster::pki::{REVOKED, keep_revoked};
use nodekeel_localstorage::mem::MemPlacement;
use nodekeel_localstorage::pki::{Certificate, RevocationList};
use nodekeel_localstorage::tree::{Data, Site};
use nodekeel_supervisor::testing::Recorder;
use nodekeel_supervisor::{Context, Failure, State, Supervisor};

use super::{leaf, saved};

fn files() -> Data {
    Site::new(Arc::new(MemPlacement::new()), "/data").place().unwrap()
}

fn keep(root: &Arc<dyn KvStore>, ca: &Certificate, files: &Data) -> (Supervisor, Recorder) {
    let recorder = Recorder::default();
    let (root, ca, files) = (Arc::clone(root), ca.clone(), files.etcd.clone());
    let supervisor = Supervisor::builder().hook(recorder.clone()).start(move |ctx: Context| {
        let (root, ca, files) = (Arc::clone(&root), ca.clone(), files.clone());
        async move {
            ctx.run("crl", move |ctx| keep_revoked(ctx, Arc::clone(&root), ca.clone(), files.clone()))?;
            ctx.ready()?;
            Err::<(), Failure>(ctx.cancelled().await.into())
        }
    });
    (supervisor, recorder)
}

/// Waits until the list on the disk is so.
async fn until(files: &Data, ca: &Certificate, is: impl Fn(&RevocationList) -> bool) {
    let changed = async {
        while !files.etcd.load_revoked(ca).unwrap().is_some_and(|list| is(&list)) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), changed).await.expect("it comes to the disk in time");
}

#[tokio::test]
async fn a_revocation_comes_to_the_disk_also_after_a_compaction() {
    let (root, authority) = saved().await;
    let ca = authority.certificate().clone();
    let files = files();
    let (supervisor, recorder) = keep(&root, &ca, &files);
    recorder.until("root.crl", State::Ready).await;
    assert_eq!(files.etcd.load_revoked(&ca).unwrap().unwrap(), authority.revoked().await.unwrap());
    for name in ["first", "second"] {
        let certificate = authority.issue(&leaf(name)).await.unwrap().certificate;
        authority.revoke(name).await.unwrap();
        let newest = root.range(Range::new(KeyRange::all())).await.unwrap().revision;
        root.put(b"/other", b"").await.unwrap();
        root.compact(newest.next()).await.unwrap();
        until(&files, &ca, |list| list.revokes(&certificate)).await;
    }
    assert!(supervisor.shutdown().await.stragglers.is_empty(), "it ends when it is told to");
}

#[tokio::test(start_paused = true)]
async fn what_is_not_this_authoritys_list_never_comes_to_the_disk() {
    let (root, authority) = saved().await;
    let (_, other) = saved().await;
    let ca = authority.certificate().clone();
    let files = files();
    let (supervisor, recorder) = keep(&root, &ca, &files);
    recorder.until("root.crl", State::Ready).await;
    let right = authority.revoked().await.unwrap();
    root.put(REVOKED.as_bytes(), other.revoked().await.unwrap().der()).await.unwrap();
    recorder.until("root.crl", State::Dead).await;
    assert_eq!(files.etcd.load_revoked(&ca).unwrap().unwrap(), right);
    root.delete(KeyRange::key(REVOKED)).await.unwrap();
    recorder.until("root.crl", State::Dead).await;
    assert_eq!(files.etcd.load_revoked(&ca).unwrap().unwrap(), right);
    root.put(REVOKED.as_bytes(), right.der()).await.unwrap();
    recorder.until("root.crl", State::Ready).await;
    assert!(supervisor.shutdown().await.stragglers.is_empty());
}

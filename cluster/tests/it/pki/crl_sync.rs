//! The list of revoked certificates on the disk.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_cluster::consensus::kv::{KeyRange, KvStore};
use nodekeel_cluster::pki::{CRL_PATH, sync_revocation_list};
use nodekeel_localstorage::mem::MemFileStore;
use nodekeel_localstorage::pki::{Certificate, RevocationList};
use nodekeel_localstorage::tree::{EtcdDir, LayoutTarget};
use nodekeel_supervisor::testing::EventRecorder;
use nodekeel_supervisor::{Context, Failure, RunnableState, Supervisor};

use super::{member_spec, saved_ca};

fn place_files() -> EtcdDir {
    LayoutTarget::new(Arc::new(MemFileStore::new()), "/data").create_layout().unwrap()
}

fn run_sync(root: &Arc<dyn KvStore>, ca: &Certificate, files: &EtcdDir) -> (Supervisor, EventRecorder) {
    let recorder = EventRecorder::default();
    let (root, ca, files) = (Arc::clone(root), ca.clone(), files.clone());
    let supervisor = Supervisor::builder().event_hook(recorder.clone()).start(move |ctx: Context| {
        let (root, ca, files) = (Arc::clone(&root), ca.clone(), files.clone());
        async move {
            ctx.run_child("crl", move |ctx| {
                sync_revocation_list(ctx, Arc::clone(&root), ca.clone(), files.clone())
            })?;
            ctx.signal_ready()?;
            Err::<(), Failure>(ctx.canceled().await.into())
        }
    });
    (supervisor, recorder)
}

/// Waits until the list on the disk fulfils the condition.
async fn wait_list(files: &EtcdDir, ca: &Certificate, is: impl Fn(&RevocationList) -> bool) {
    let changed = async {
        while !files.load_revocation_list(ca).unwrap().is_some_and(|list| is(&list)) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), changed).await.expect("the list reaches the disk in time");
}

#[tokio::test]
async fn a_revocation_reaches_the_disk_even_after_a_compaction() {
    let (root, cluster_ca) = saved_ca().await;
    let ca = cluster_ca.ca_certificate().clone();
    let files = place_files();
    let (supervisor, recorder) = run_sync(&root, &ca, &files);
    recorder.wait_for_state("root.crl", RunnableState::Ready).await;
    assert_eq!(
        files.load_revocation_list(&ca).unwrap().unwrap(),
        cluster_ca.revocation_list().await.unwrap()
    );
    for name in ["first", "second"] {
        let certificate = cluster_ca.issue_credentials(&member_spec(name)).await.unwrap().certificate;
        cluster_ca.revoke_name(name).await.unwrap();
        // More changes than a store in memory keeps for its watches.
        for _ in 0..1001 {
            root.put(b"/other", b"").await.unwrap();
        }
        wait_list(&files, &ca, |list| list.is_revoked(&certificate)).await;
    }
    assert!(supervisor.shutdown().await.stragglers.is_empty(), "the sync does not stop");
}

#[tokio::test(start_paused = true)]
async fn a_list_of_another_ca_is_never_written_to_the_disk() {
    let (root, cluster_ca) = saved_ca().await;
    let (_, other) = saved_ca().await;
    let ca = cluster_ca.ca_certificate().clone();
    let files = place_files();
    let (supervisor, recorder) = run_sync(&root, &ca, &files);
    recorder.wait_for_state("root.crl", RunnableState::Ready).await;
    let right = cluster_ca.revocation_list().await.unwrap();
    root.put(CRL_PATH.as_bytes(), other.revocation_list().await.unwrap().der_bytes()).await.unwrap();
    recorder.wait_for_state("root.crl", RunnableState::Dead).await;
    assert_eq!(files.load_revocation_list(&ca).unwrap().unwrap(), right);
    root.delete(KeyRange::single_key(CRL_PATH)).await.unwrap();
    recorder.wait_for_state("root.crl", RunnableState::Dead).await;
    assert_eq!(files.load_revocation_list(&ca).unwrap().unwrap(), right);
    root.put(CRL_PATH.as_bytes(), right.der_bytes()).await.unwrap();
    recorder.wait_for_state("root.crl", RunnableState::Ready).await;
    assert!(supervisor.shutdown().await.stragglers.is_empty());
}

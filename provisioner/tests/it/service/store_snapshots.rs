//! The identity of a store on a node that has only snapshots.

use std::fs;

use nodekeel_provisioner::testing::objects::sample_snapshot_content;
use nodekeel_provisioner::testing::{FakeApi, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{RunError, StoreRejection};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::dir_node::DirNode;
use super::harness::{ApiFixture as _, test_api, wait_bound};
use crate::fixture::snapshot_id;

/// An API server with a snapshot of a volume that was deleted since.
fn api_with_snapshot() -> FakeApi {
    let api = test_api();
    let status = json!({ "readyToUse": true, "snapshotHandle": snapshot_id(1).as_str() });
    let content: Value = json!(sample_snapshot_content(1, json!({ "status": status })));
    api.create_object(ObjectKind::SnapshotContent, content);
    api
}

#[tokio::test(start_paused = true)]
async fn a_directory_without_the_snapshots_of_the_node_gets_no_identity() {
    let api = api_with_snapshot();
    let below = tempfile::tempdir().expect("the directory below the mount point");
    api.create_claim(2, json!({}));
    let error = DirNode::start(&api, below.path()).wait_failed().await;
    let RunError::StoreRejected(StoreRejection::WithoutSnapshots { snapshot, count }) = error else {
        panic!("{error:?}")
    };
    assert_eq!((snapshot, count), (snapshot_id(1), 1));
    assert_eq!(fs::read_dir(below.path()).expect("a directory").count(), 0, "nothing is left there");
    assert!(api.list_objects(ObjectKind::Volume).is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_directory_with_a_snapshot_of_the_node_gets_an_identity_again() {
    let api = api_with_snapshot();
    let base = tempfile::tempdir().expect("a directory");
    fs::create_dir_all(base.path().join("snapshots").join(snapshot_id(1).as_str())).expect("a snapshot");
    let node = DirNode::start(&api, base.path());
    api.create_claim(2, json!({}));
    wait_bound(&api, "claim-2").await;
    node.stop().await;
}

#[tokio::test(start_paused = true)]
async fn no_identity_is_created_before_the_api_server_has_listed_the_snapshots() {
    for (status, is_answer) in [(500, false), (403, true), (404, true)] {
        let api = test_api();
        let base = tempfile::tempdir().expect("a directory");
        // The watch of the snapshots lists them, too.
        for _ in 0..2 {
            api.fail_next(RequestVerb::List, ObjectKind::SnapshotContent, RequestFault::Status(status));
        }
        let started = Instant::now();
        let node = DirNode::start(&api, base.path());
        api.create_claim(2, json!({}));
        wait_bound(&api, "claim-2").await;
        // Without an answer, it is asked again after a delay.
        assert_eq!(started.elapsed().is_zero(), is_answer, "HTTP status {status}: {:?}", started.elapsed());
        node.stop().await;
    }
}

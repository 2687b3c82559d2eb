//! Block and strict volumes, from the claim to the deletion.

use nodekeel_fsquota::{Bytes, QuotaLimits};
use nodekeel_provisioner::testing::objects::{NODE, sample_class, sample_snapshot_content, sample_uid};
use nodekeel_provisioner::testing::{FakeApi, ObjectKind};
use nodekeel_provisioner::{ImageFormat, VolumeKind, VolumeStore as _};
use serde_json::{Value, json};

use super::harness::{
    ApiFixture as _, TestNode, advance_time, id, phase, test_api, wait_bound, wait_for_event,
    wait_no_volumes, wait_until,
};

/// A claim for a block volume.
fn block() -> Value {
    json!({ "spec": { "volumeMode": "Block" } })
}

/// A claim of the class of strict volumes.
fn strict() -> Value {
    json!({ "spec": { "storageClassName": "strict" } })
}

/// The same claim as a copy of a source.
fn copy_of(mut claim: Value, source: &Value) -> Value {
    claim["spec"]["dataSource"] = source.clone();
    claim
}

fn clone_of(name: &str) -> Value {
    json!({ "kind": "PersistentVolumeClaim", "name": name })
}

fn strict_api() -> FakeApi {
    let api = test_api();
    let strict = json!({ "metadata": { "name": "strict" }, "parameters": { "strict": "true" } });
    api.create_object(ObjectKind::Class, sample_class(strict));
    api
}

fn volume(api: &FakeApi, number: u32) -> Value {
    api.get_object(ObjectKind::Volume, id(number).as_str()).expect("a volume")["spec"].clone()
}

#[tokio::test(start_paused = true)]
async fn a_claim_gets_the_kind_of_volume_that_it_asks_for_and_it_is_deleted_like_any_other() {
    let api = strict_api();
    let node = TestNode::start(&api, NODE).await;
    for (number, claim) in [(1, block()), (2, strict())] {
        api.create_claim(number, claim);
        wait_bound(&api, &format!("claim-{number}")).await;
    }
    let (first, second) = (volume(&api, 1), volume(&api, 2));
    assert_eq!((&first["volumeMode"], &first["csi"]["fsType"]), (&json!("Block"), &Value::Null));
    assert_eq!(first["csi"]["volumeAttributes"]["kind"], "block");
    assert_eq!((&second["volumeMode"], &second["csi"]["fsType"]), (&json!("Filesystem"), &json!("ext4")));
    assert_eq!(second["csi"]["volumeAttributes"]["kind"], "ext4");
    for (number, format) in [(1, ImageFormat::Block), (2, ImageFormat::Ext4)] {
        assert_eq!(node.store.volume_kind(&id(number)), Some(VolumeKind::Image(format)));
        let limits = QuotaLimits { bytes: Some(Bytes(50 << 20)), inodes: None };
        assert_eq!(node.store.usage(&id(number)).await.expect("usage").limits, limits);
        api.delete_claim(number);
    }
    wait_no_volumes(&api).await;
    assert_eq!(node.store.list().await.expect("a list"), []);
}

#[tokio::test(start_paused = true)]
async fn a_volume_is_cloned_into_its_kind_and_refused_by_name_elsewhere() {
    let api = strict_api();
    let node = TestNode::start(&api, NODE).await;
    let sources = [(1, json!({})), (2, block()), (3, strict())];
    for (number, claim) in sources.clone() {
        api.create_claim(number, claim);
        wait_bound(&api, &format!("claim-{number}")).await;
    }
    let mut number = 10;
    for (from, _) in &sources {
        for (to, claim) in &sources {
            let copy = copy_of(claim.clone(), &clone_of(&format!("claim-{from}")));
            let name = format!("claim-{number}");
            api.create_claim(number, copy);
            if from == to {
                wait_bound(&api, &name).await;
                assert_eq!(node.store.volume_kind(&id(number)), node.store.volume_kind(&id(*from)));
            } else {
                wait_for_event(&api, &name, "ProvisioningFailed").await;
                let note = api.event_notes(&name)[0].clone();
                assert!(note.contains("volumeMode") || note.contains("kind of data source"), "{note}");
                advance_time(600).await;
                assert_eq!(phase(&api, ObjectKind::Claim, &name), "Pending");
                assert_eq!(node.store.create_count(&id(number)), 0, "nothing was created");
            }
            number += 1;
        }
    }
}

/// The objects of a snapshot say whether it is one of a block volume, and no more.
#[tokio::test(start_paused = true)]
async fn a_snapshot_of_a_strict_volume_is_not_restored_to_a_directory() {
    let api = strict_api();
    let node = TestNode::start(&api, NODE).await;
    api.create_claim(1, strict());
    wait_bound(&api, "claim-1").await;
    let content_name = format!("snapcontent-{}", sample_uid(1));
    api.create_object(
        ObjectKind::Snapshot,
        json!({
            "metadata": { "namespace": "default", "name": "snapshot-1", "uid": sample_uid(1) },
            "status": { "boundVolumeSnapshotContentName": content_name },
        }),
    );
    api.create_object(ObjectKind::SnapshotContent, sample_snapshot_content(1, json!({})));
    let is_ready = |api: &FakeApi| {
        let content = api.get_object(ObjectKind::SnapshotContent, &content_name).unwrap_or_default();
        content["status"]["readyToUse"] == true
    };
    wait_until(&api, is_ready).await;
    let source =
        json!({ "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "snapshot-1" });
    api.create_claim(2, copy_of(json!({ "spec": {} }), &source));
    wait_for_event(&api, "claim-2", "ProvisioningFailed").await;
    let note = api.event_notes("claim-2")[0].clone();
    assert!(note.contains("snapshot-1 is ext4, and that of the claim's volume directory"), "{note}");
    assert_eq!(node.store.create_count(&id(2)), 0);
    api.create_claim(3, copy_of(strict(), &source));
    wait_bound(&api, "claim-3").await;
    assert_eq!(node.store.volume_kind(&id(3)), Some(VolumeKind::Image(ImageFormat::Ext4)));
}

/// A claim deleted between the volume and its PersistentVolume leaves an image, which is never empty.
#[tokio::test(start_paused = true)]
async fn a_strict_volume_that_was_never_published_is_swept() {
    let api = strict_api();
    let store = nodekeel_provisioner::testing::MemStore::default();
    store.create_image(&id(1), ImageFormat::Ext4, Bytes(8 << 20)).await.expect("create");
    let node = TestNode::start_with_store(&api, &store).await;
    for _ in 0..600 {
        if store.volume_kind(&id(1)).is_none() {
            break;
        }
        advance_time(1).await;
    }
    assert_eq!(node.store.remove_count(&id(1)), 1);
}

//! Expansions: which steps lead from a request to the size that all agree on.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::jiff::Timestamp;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use serde_json::{Value, json};

use crate::identity::{SELECTED_NODE, STORAGE_PROVISIONER};
use crate::resize::bound_claim::{bound_volume, volume_capacity};
use crate::resize::claim_status;
use crate::resize::claim_status::{INFEASIBLE, resize_failed, resize_finished, resize_started};
use crate::resize::reconcile::may_resize;
use crate::resize::resize_test::{MIB, ResizeWorld, bound_claim, merged};
use crate::testing::objects::{NODE, sample_class, sample_identity, sample_volume};

#[test]
fn a_larger_request_is_marked_enforced_recorded_and_then_reported() {
    let mut world = ResizeWorld::new();
    assert!(!world.expand_step(), "nothing to do");
    world.set_request("16Mi");
    assert!(world.expand_step());
    let status = world.status();
    assert_eq!(claim_status::resize_state(&status), Some("ControllerResizeInProgress"));
    assert_eq!(claim_status::allocated_size(&status), Some(Bytes(16 * MIB)));
    assert_eq!(status.conditions.expect("conditions")[0].type_, "Resizing");
    assert!(world.expand_step());
    let limits = QuotaLimits { bytes: Some(Bytes(16 * MIB)), inodes: Some(Inodes(8192)) };
    assert_eq!((world.usage.limits, volume_capacity(&world.volume)), (limits, Bytes(8 * MIB)));
    assert!(world.expand_step());
    assert_eq!((volume_capacity(&world.volume), world.capacity()), (Bytes(16 * MIB), 8 * MIB));
    assert!(world.expand_step() && !world.expand_step());
    world.assert_expanded(16 * MIB);
}

#[test]
fn an_infeasible_request_says_so_once_and_can_be_lowered() {
    let mut world = ResizeWorld::new();
    world.room = 64 * MIB;
    world.set_request("100Ti");
    world.settle();
    let status = world.status();
    assert_eq!(claim_status::resize_state(&status), Some("ControllerResizeInfeasible"));
    let conditions = status.conditions.clone().expect("conditions");
    assert_eq!((conditions.len(), conditions[0].type_.as_str()), (1, "ControllerResizeError"));
    assert_eq!(conditions[0].message.as_deref(), Some("full"));
    assert_eq!(resize_failed(&status, "full", INFEASIBLE, Timestamp::now()), None, "the status says so");
    world.settle();
    assert_eq!(world.status(), status);
    assert_eq!(world.usage.limits.bytes, Some(Bytes(8 * MIB)));
    world.set_request("16Mi");
    world.settle();
    world.assert_expanded(16 * MIB);
}

#[test]
fn a_request_that_no_volume_can_have_is_infeasible() {
    let mut world = ResizeWorld::new();
    world.set_request("9E");
    world.room = 64 * MIB;
    world.settle();
    assert_eq!(claim_status::resize_state(&world.status()), Some("ControllerResizeInfeasible"));
    world.set_request("8Ei");
    world.settle();
    assert_eq!(claim_status::resize_state(&world.status()), Some("ControllerResizeInfeasible"));
    assert_eq!(world.usage.limits.bytes, Some(Bytes(8 * MIB)));
}

#[test]
fn a_limit_that_was_raised_further_is_lowered_unless_data_need_it() {
    for (used, left) in [(2, 12), (12, 12), (14, 16)] {
        let mut world = ResizeWorld::new();
        world.set_request("16Mi");
        assert!(world.expand_step() && world.expand_step());
        world.usage.usage.bytes = Bytes(used * MIB);
        world.set_request("12Mi");
        world.settle();
        world.assert_expanded(left * MIB);
    }
    let mut world = ResizeWorld::new();
    world.set_request("16Mi");
    assert!((0..3).all(|_| world.expand_step()));
    world.set_request("12Mi");
    world.settle();
    world.assert_expanded(16 * MIB);
}

#[test]
fn a_strict_volume_grows_without_an_inode_limit_and_never_shrinks() {
    let mut world = ResizeWorld::strict();
    world.set_request("16Mi");
    world.settle();
    world.assert_expanded(16 * MIB);
    // The size of its file was raised for a request that is lowered.
    for (steps, request, left) in [(1, "24Mi", 20), (2, "24Mi", 24), (3, "24Mi", 24), (4, "24Mi", 24)] {
        let mut world = ResizeWorld::strict();
        world.set_request(request);
        assert!((0..steps).all(|_| world.expand_step()), "{steps}");
        if steps < 4 {
            world.set_request("20Mi");
        }
        world.settle();
        world.assert_expanded(left * MIB);
    }
}

#[test]
fn the_rounding_of_a_file_system_is_not_another_limit() {
    let mut world = ResizeWorld::new();
    world.set_request("8389000");
    assert!(world.expand_step() && world.expand_step());
    world.usage.limits.bytes = Some(Bytes(8392704));
    world.usage.usage.bytes = Bytes(8392704);
    assert!(world.expand_step() && world.expand_step() && !world.expand_step());
    assert_eq!(world.capacity(), 8_389_000);
}

#[test]
fn the_inode_limit_grows_with_the_volume_unless_a_class_sets_it() {
    let expand = |mut world: ResizeWorld| {
        world.set_request("16Mi");
        world.settle();
        world.usage.limits.inodes.map(|inodes| inodes.0)
    };
    assert_eq!(expand(ResizeWorld::new()), Some(8192));
    let fixed = sample_class(json!({ "parameters": { "inodes": "4096" } }));
    assert_eq!(expand(ResizeWorld { class: fixed, ..ResizeWorld::new() }), Some(4096));
    let broken = sample_class(json!({ "parameters": { "inodes": "x" } }));
    assert_eq!(expand(ResizeWorld { class: broken, ..ResizeWorld::new() }), Some(4096));
    let mut modified = ResizeWorld::new();
    modified.set_attributes(json!("few"));
    modified.settle();
    assert_eq!(expand(modified), Some(100));
}

#[test]
fn only_a_claim_and_a_volume_that_name_each_other_are_bound() {
    let identity = sample_identity(NODE);
    let volume = |patch: Value| sample_volume(1, patch);
    let is_bound = |claim: &PersistentVolumeClaim, volume: &PersistentVolume| {
        bound_volume(&identity, claim, volume).is_some()
    };
    let claim = bound_claim(json!({}));
    assert!(is_bound(&claim, &volume(json!({}))));
    for patch in [
        json!({ "metadata": { "name": "other" } }),
        json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } }),
        json!({ "spec": { "claimRef": { "uid": "another" } } }),
        json!({ "spec": { "claimRef": null } }),
        json!({ "spec": { "csi": { "driver": "other.example" } } }),
        json!({ "spec": { "csi": { "volumeHandle": "another" } } }),
        json!({ "spec": { "nodeAffinity": null } }),
    ] {
        assert!(!is_bound(&claim, &volume(patch.clone())), "{patch}");
    }
    for patch in [
        json!({ "spec": { "volumeName": "other" } }),
        json!({ "status": { "phase": "Lost" } }),
        json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } }),
    ] {
        assert!(!is_bound(&bound_claim(patch.clone()), &volume(json!({}))), "{patch}");
    }
}

#[test]
fn a_node_looks_only_at_claims_that_are_resized_and_may_be_its_own() {
    let identity = sample_identity(NODE);
    let larger = json!({ "spec": { "resources": { "requests": { "storage": "9Mi" } } } });
    let with = |patch: Value| {
        let claim = merged(&bound_claim(larger.clone()), patch);
        may_resize(&identity, &claim)
    };
    let annotated = |key: &str, value: Value| json!({ "metadata": { "annotations": { key: value } } });
    assert!(!may_resize(&identity, &bound_claim(json!({}))), "it has its size");
    assert!(with(json!({})) && with(json!({ "metadata": { "annotations": null } })));
    assert!(with(annotated(SELECTED_NODE, json!("node-b"))), "its volume may be here all the same");
    assert!(!with(annotated(STORAGE_PROVISIONER, json!("other.example"))));
    assert!(!with(json!({ "spec": { "volumeName": "disk-7" } })));
    assert!(!with(json!({ "status": { "phase": "Pending" } })));
    assert!(!with(json!({ "status": { "capacity": null } })));
    assert!(!with(json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } })));
    let class = json!({ "spec": { "volumeAttributesClassName": "few" } });
    assert!(may_resize(&identity, &bound_claim(class.clone())));
    let has_class = json!({ "status": { "currentVolumeAttributesClassName": "few" } });
    assert!(!may_resize(&identity, &merged(&bound_claim(class), has_class)));
}

#[test]
fn conditions_of_others_stay_and_keep_their_times() {
    let old = json!({ "status": { "conditions": [
        { "type": "Foreign", "status": "True", "message": "stays" },
        { "type": "Resizing", "status": "True", "lastTransitionTime": "2001-01-01T00:00:00Z" },
    ] } });
    let status = bound_claim(old).status.expect("a status");
    let patch = resize_started(&status, Bytes(1), Timestamp::now());
    assert_eq!(patch["conditions"][0]["type"], "Foreign");
    assert_eq!(patch["conditions"][1]["lastTransitionTime"], "2001-01-01T00:00:00Z");
    let patch = resize_finished(&status, Bytes(1), Timestamp::now());
    assert_eq!(patch["conditions"].as_array().map(Vec::len), Some(1));
}

//! Modifications: which steps lead to the limit of a VolumeAttributesClass.

use nodekeel_fsquota::{Bytes, Inodes};
use serde_json::{Value, json};

use crate::resize::claim_status;
use crate::resize::modification::needs_modification;
use crate::resize::resize_test::{MIB, ResizeWorld};

#[test]
fn a_claim_gets_its_attributes_class_and_another_one() {
    let mut world = ResizeWorld::new();
    for (name, inodes) in [("many", 1_000_000), ("few", 100)] {
        world.set_attributes(json!(name));
        assert!(world.modify_step());
        let status = world.status();
        assert_eq!(claim_status::modify_state(&status), Some(("InProgress", Some(name))));
        assert_eq!(status.conditions.expect("conditions")[0].type_, "ModifyingVolume");
        world.settle();
        assert_eq!(world.usage.limits.inodes, Some(Inodes(inodes)));
        assert_eq!(world.usage.limits.bytes, Some(Bytes(8 * MIB)));
        let status = world.status();
        assert_eq!(status.current_volume_attributes_class_name.as_deref(), Some(name));
        assert_eq!((status.modify_volume_status, status.conditions), (None, None));
        let spec = world.volume.spec.clone().expect("a spec");
        assert_eq!(spec.volume_attributes_class_name.as_deref(), Some(name));
    }
}

#[test]
fn a_class_that_does_not_apply_changes_nothing_and_another_can_be_named() {
    for (name, state, reason) in [
        ("missing", "Pending", "does not exist"),
        ("foreign", "Infeasible", "for the driver \"other.example\""),
        ("broken", "Infeasible", "iops"),
        ("empty", "Infeasible", "inodes"),
        ("secret", "Infeasible", "csi.storage.k8s.io/x"),
        ("few", "Infeasible", "allows 100 inodes, and the volume has more"),
    ] {
        let mut world = ResizeWorld::new();
        world.usage.usage.inodes = Inodes(101);
        world.set_attributes(json!(name));
        world.settle();
        let status = world.status();
        assert_eq!(claim_status::modify_state(&status), Some((state, Some(name))));
        let message = status.conditions.clone().expect("conditions")[0].message.clone().expect("a reason");
        assert!(message.contains(reason), "{message}");
        assert_eq!(world.usage.limits.inodes, Some(Inodes(4096)), "{name}");
        // A reason with another number would be another change of the status, and so another attempt.
        world.usage.usage.inodes = Inodes(102);
        world.settle();
        assert_eq!(world.status(), status, "{name}");
        world.set_attributes(json!("many"));
        world.settle();
        assert_eq!(world.usage.limits.inodes, Some(Inodes(1_000_000)), "{name}");
        assert!(!needs_modification(&world.claim), "{name}");
    }
}

#[test]
fn a_strict_volume_gets_no_class_and_the_claim_can_withdraw_it() {
    let mut world = ResizeWorld::strict();
    let limits = world.usage.limits;
    world.set_attributes(json!("many"));
    world.settle();
    let status = world.status();
    assert_eq!(claim_status::modify_state(&status), Some(("Infeasible", Some("many"))));
    let message = status.conditions.expect("conditions")[0].message.clone().expect("a reason");
    assert!(message.contains("a block or strict volume has none: name no class"), "{message}");
    world.set_attributes(Value::Null);
    world.settle();
    assert!(!needs_modification(&world.claim));
    assert_eq!(world.usage.limits, limits);
}

#[test]
fn a_first_class_can_be_withdrawn_until_the_volume_has_it() {
    for steps in 0..5 {
        let mut world = ResizeWorld::new();
        world.set_attributes(json!("few"));
        for _ in 0..steps {
            world.modify_step();
        }
        let has_class = steps >= 3;
        // The API server does not let it be removed once the status has it.
        if steps < 4 {
            world.set_attributes(Value::Null);
        }
        world.settle();
        assert_eq!(world.usage.limits.inodes, Some(Inodes(if has_class { 100 } else { 4096 })), "{steps}");
        let status = world.status();
        assert_eq!(status.current_volume_attributes_class_name.is_some(), has_class, "{steps}");
        assert!(!needs_modification(&world.claim), "{steps}");
    }
}

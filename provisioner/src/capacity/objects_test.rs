//! The CSIStorageCapacity objects of a node.

use std::collections::BTreeMap;

use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use nodekeel_fsquota::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::capacity::objects::{CapacityAction, plan_capacities, wanted_capacities};
use crate::node::NodeFacts;
use crate::testing::objects::{sample_class, sample_identity, sample_node};

const UID: &str = "00000000-0000-4000-8000-000000000001";

fn class(name: &str, patch: Value) -> StorageClass {
    let mut class = sample_class(patch);
    class.metadata.name = Some(name.to_owned());
    class
}

fn wanted(classes: &[StorageClass], available: u64) -> Vec<CSIStorageCapacity> {
    wanted_capacities(&sample_identity("node-a"), &node(), classes, Bytes(available), &BTreeMap::new())
}

fn node() -> NodeFacts {
    let labels = json!({ "topology.kubernetes.io/zone": "east" });
    NodeFacts::of(&sample_node("node-a", json!({ "metadata": { "uid": UID, "labels": labels } })))
}

/// Applies actions as the API server does.
fn apply(found: &mut Vec<CSIStorageCapacity>, actions: Vec<CapacityAction>) {
    for action in actions {
        let name = action.object_name().to_owned();
        let is_meant = |object: &CSIStorageCapacity| object.metadata.name.as_deref() == Some(&name);
        match action {
            CapacityAction::Create(object) => {
                assert!(!found.iter().any(is_meant), "created twice");
                found.push(*object);
            }
            CapacityAction::Update { wanted, .. } => {
                let object = found.iter_mut().find(|object| is_meant(object)).expect("it exists");
                object.metadata.labels.clone_from(&wanted.metadata.labels);
                object.metadata.owner_references.clone_from(&wanted.metadata.owner_references);
                object.capacity.clone_from(&wanted.capacity);
                object.maximum_volume_size.clone_from(&wanted.maximum_volume_size);
            }
            CapacityAction::Delete(_) => found.retain(|object| !is_meant(object)),
        }
    }
}

#[test]
fn each_class_that_waits_for_a_consumer_and_may_use_the_node_has_an_object() {
    let only_on = |key: &str, value: &str| json!({ "allowedTopologies": [{ "matchLabelExpressions": [{ "key": key, "values": [value] }] }] });
    let zone = "topology.kubernetes.io/zone";
    let classes = [
        class("local", json!({})),
        class("immediate", json!({ "volumeBindingMode": "Immediate" })),
        class("foreign", json!({ "provisioner": "foreign.example" })),
        class("elsewhere", only_on("topology.volumes.nodekeel.example/node", "node-b")),
        class("west", only_on(zone, "west")),
    ];
    assert_eq!(wanted(&[class("east", only_on(zone, "east"))], 3 << 30).len(), 1);
    let objects = wanted(&classes, 3 << 30);
    let object = serde_json::to_value(&objects).expect("JSON");
    let [object] = object.as_array().expect("a list").as_slice() else { panic!("{object}") };
    assert_eq!(object["storageClassName"], "local");
    assert_eq!((&object["capacity"], &object["maximumVolumeSize"]), (&json!("3Gi"), &json!("3Gi")));
    let topology = json!({ "matchLabels": { "topology.volumes.nodekeel.example/node": "node-a" } });
    assert_eq!(object["nodeTopology"], topology);
    let labels = json!({
        "csi.storage.k8s.io/drivername": "volumes.nodekeel.example",
        "csi.storage.k8s.io/managed-by": "node-a",
    });
    assert_eq!(object["metadata"]["labels"], labels);
    let owner = json!([{ "apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": UID }]);
    assert_eq!(object["metadata"]["ownerReferences"], owner);
    assert_eq!(
        object["metadata"]["name"], "csisc-fb30a4bb277a9160c16785447e84d062",
        "the same in each release"
    );
}

#[test]
fn equal_amounts_in_another_form_are_not_written_again() {
    let wanted = wanted(&[class("local", json!({}))], 2_000_000_000);
    let mut found = wanted.clone();
    found[0].capacity = Some(Quantity("2G".to_owned()));
    assert_eq!(plan_capacities(&wanted, &found), []);
}

proptest! {
    /// Whatever objects are there, one or two plans make them as wanted, and a third has nothing to do.
    #[test]
    fn plans_converge(
        available in 0..u64::MAX,
        wanted_classes in proptest::collection::btree_set(0..6_u8, 0..6),
        found_classes in proptest::collection::btree_map(0..6_u8, 0..6_u8, 0..6),
    ) {
        let named = |number: &u8| class(&format!("class-{number}"), json!({}));
        let wanted = wanted(&wanted_classes.iter().map(named).collect::<Vec<_>>(), available);
        let mut found = Vec::new();
        for (number, damage) in &found_classes {
            let [mut object] = wanted_capacities(&sample_identity("node-a"), &node(), &[named(number)], Bytes(7), &BTreeMap::new())
                .try_into().expect("one");
            match damage {
                0 => object.node_topology = None,
                1 => object.capacity = None,
                2 => object.metadata.labels = None,
                3 => object.metadata.owner_references = None,
                4 => object.storage_class_name = "another".to_owned(),
                _ => {}
            }
            found.push(object);
        }
        for _ in 0..2 {
            let actions = plan_capacities(&wanted, &found);
            apply(&mut found, actions);
        }
        prop_assert_eq!(plan_capacities(&wanted, &found), []);
        let sorted = |objects: &[CSIStorageCapacity]| {
            let mut names: Vec<_> = objects.iter().map(|object| object.metadata.name.clone()).collect();
            names.sort();
            names
        };
        prop_assert_eq!(sorted(&wanted), sorted(&found));
    }
}

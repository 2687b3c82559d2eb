//! Plans the CSIStorageCapacity objects of a node, by which the scheduler knows its free capacity.

use std::collections::BTreeMap;

use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use nodekeel_fsquota::Bytes;

use crate::claim::size::strict_format;
use crate::identity::ProvisionerIdentity;
use crate::image::ImageFormat;
use crate::node::NodeFacts;
use crate::objects::{allows_node, waits_for_consumer};
use crate::quantity::{MAX_AMOUNT, format_quantity, parse_quantity};
use crate::scope::is_class_of_store;

/// Names the driver of a CSIStorageCapacity. *Source:* Kubernetes, external-provisioner, "Storage capacity".
pub(crate) const DRIVER_LABEL: &str = "csi.storage.k8s.io/drivername";

/// Names the creator of a CSIStorageCapacity: of this driver, the node. *Source:* as [`DRIVER_LABEL`].
pub(crate) const MANAGER_LABEL: &str = "csi.storage.k8s.io/managed-by";

/// A change that brings the objects of this node closer to what they should be.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum CapacityAction {
    /// Create an object that is missing.
    Create(Box<CSIStorageCapacity>),
    /// Set the capacity and the owner of exactly this version of an object.
    Update { found: ObjectMeta, wanted: Box<CSIStorageCapacity> },
    /// Delete exactly this version of an object: its class is gone, or what can't be changed is wrong.
    Delete(ObjectMeta),
}

impl CapacityAction {
    pub(crate) fn object_name(&self) -> &str {
        let meta = match self {
            Self::Create(wanted) => &wanted.metadata,
            Self::Update { found, .. } | Self::Delete(found) => found,
        };
        meta.name.as_deref().unwrap_or_default()
    }

    pub(crate) fn is_deletion(&self) -> bool {
        matches!(self, Self::Delete(_))
    }
}

/// The labels of this node's objects.
pub(crate) fn capacity_labels(identity: &ProvisionerIdentity) -> BTreeMap<String, String> {
    let label = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    BTreeMap::from([
        label(DRIVER_LABEL, identity.driver.as_str()),
        label(MANAGER_LABEL, identity.node.as_str()),
    ])
}

/// The objects that this node should have for a store: one for each of its classes whose volumes the scheduler places, and
/// may place here. They belong to the Node, and are deleted with it. A class of strict volumes that can't be created
/// (`missing`) has no capacity.
pub(crate) fn wanted_capacities<'a>(
    identity: &ProvisionerIdentity,
    node: &NodeFacts,
    classes: impl IntoIterator<Item = &'a StorageClass>,
    available: Bytes,
    missing: &BTreeMap<ImageFormat, String>,
) -> Vec<CSIStorageCapacity> {
    let is_served = |class: &&StorageClass| {
        class.provisioner == identity.driver.as_str()
            && is_class_of_store(identity, class)
            && waits_for_consumer(class)
            && allows_node(identity, Some(&node.labels), class)
    };
    let wanted = |class: &StorageClass| {
        let is_missing = strict_format(class).is_some_and(|format| missing.contains_key(&format));
        let available = if is_missing { Bytes(0) } else { available };
        Some(wanted_capacity(identity, &node.uid, class.metadata.name.as_deref()?, available))
    };
    classes.into_iter().filter(is_served).filter_map(wanted).collect()
}

fn wanted_capacity(
    identity: &ProvisionerIdentity,
    node_uid: &str,
    class: &str,
    available: Bytes,
) -> CSIStorageCapacity {
    // The API server would truncate much larger amounts.
    let size = format_quantity(available.0.min(MAX_AMOUNT));
    let topology = BTreeMap::from([(identity.driver.topology_key(), identity.node.to_string())]);
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: identity.node.to_string(),
        uid: node_uid.to_owned(),
        ..OwnerReference::default()
    };
    CSIStorageCapacity {
        metadata: ObjectMeta {
            name: Some(capacity_name(identity, class)),
            labels: Some(capacity_labels(identity)),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        storage_class_name: class.to_owned(),
        node_topology: Some(LabelSelector { match_labels: Some(topology), match_expressions: None }),
        capacity: Some(size.clone()),
        // A volume can have all that is available.
        maximum_volume_size: Some(size),
    }
}

/// The name of the object of a class: the same at each start, so that none is created twice. A class's name
/// may be as long as the object's, so it is hashed.
fn capacity_name(identity: &ProvisionerIdentity, class: &str) -> String {
    // FNV-1a of 128 bits. *Source:* Fowler, Noll, Vo: its offset basis and prime.
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    // No name contains a slash.
    let text = format!("{}/{}/{class}", identity.driver, identity.node);
    let hash = text.bytes().fold(OFFSET, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME));
    format!("csisc-{hash:032x}")
}

/// Plans the changes from the objects that exist to those that should. Nothing to do if they are equal.
pub(crate) fn plan_capacities(
    wanted: &[CSIStorageCapacity],
    found: &[CSIStorageCapacity],
) -> Vec<CapacityAction> {
    let name = |object: &CSIStorageCapacity| object.metadata.name.clone();
    let mut actions = Vec::new();
    for object in found {
        match wanted.iter().find(|wanted| name(wanted) == name(object)) {
            // The next pass creates the object anew: these fields are immutable.
            Some(wanted) if !has_same_place(wanted, object) => {
                actions.push(CapacityAction::Delete(object.metadata.clone()));
            }
            Some(wanted) if !has_same_content(wanted, object) => actions.push(CapacityAction::Update {
                found: object.metadata.clone(),
                wanted: Box::new(wanted.clone()),
            }),
            Some(_) => {}
            None => actions.push(CapacityAction::Delete(object.metadata.clone())),
        }
    }
    let missing = wanted.iter().filter(|wanted| found.iter().all(|object| name(object) != name(wanted)));
    actions.extend(missing.map(|wanted| CapacityAction::Create(Box::new(wanted.clone()))));
    actions
}

/// Compares the fields that can't be changed.
fn has_same_place(wanted: &CSIStorageCapacity, found: &CSIStorageCapacity) -> bool {
    wanted.storage_class_name == found.storage_class_name && wanted.node_topology == found.node_topology
}

/// Compares the fields that can be changed. The API server writes quantities in its own form.
fn has_same_content(wanted: &CSIStorageCapacity, found: &CSIStorageCapacity) -> bool {
    let amount = |size: &Option<Quantity>| size.as_ref().and_then(|size| parse_quantity(&size.0).ok());
    let meta = (&wanted.metadata, &found.metadata);
    let labels = meta.0.labels.iter().flatten();
    labels.into_iter().all(|(key, value)| meta.1.labels.as_ref().and_then(|all| all.get(key)) == Some(value))
        && meta.0.owner_references == meta.1.owner_references
        && amount(&wanted.capacity) == amount(&found.capacity)
        && amount(&wanted.maximum_volume_size) == amount(&found.maximum_volume_size)
}

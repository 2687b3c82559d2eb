//! Builds the PersistentVolume of a volume.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PersistentVolume,
    PersistentVolumeSpec, VolumeNodeAffinity,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::claim::spec::{ReclaimPolicy, VolumeSpec};
use crate::identity::{PROVISIONED_BY, ProvisionerIdentity};
use crate::image::ImageFormat;
use crate::name::{DriverName, StoreName};
use crate::objects::{KIND_ATTRIBUTE, STORE_ATTRIBUTE, STORE_NAME_ATTRIBUTE};
use crate::quantity;
use crate::store_id::StoreId;

/// Builds the PersistentVolume to create for a volume in this store; `None` is a store without identities.
///
/// The object is complete: its reference to the claim has the UID, so binding adds nothing, and it has the finalizer
/// from the start. A retained volume has no finalizer, because its object may be deleted while its data stay.
pub fn build_persistent_volume(
    identity: &ProvisionerIdentity,
    store: Option<&StoreId>,
    volume: &VolumeSpec,
) -> PersistentVolume {
    PersistentVolume {
        metadata: ObjectMeta {
            name: Some(volume.id.to_string()),
            annotations: Some(BTreeMap::from([(PROVISIONED_BY.to_owned(), identity.driver.to_string())])),
            finalizers: identity
                .finalizer
                .clone()
                .filter(|_| volume.reclaim_policy == ReclaimPolicy::Delete)
                .map(|ours| vec![ours]),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeSpec {
            access_modes: Some(volume.access_modes.clone()),
            capacity: Some(BTreeMap::from([(
                "storage".to_owned(),
                quantity::format_quantity(volume.capacity.0),
            )])),
            claim_ref: Some(volume.claim_ref.clone()),
            csi: Some(CSIPersistentVolumeSource {
                driver: identity.driver.to_string(),
                fs_type: volume.kind.image_format().and_then(ImageFormat::fs_type).map(str::to_owned),
                volume_attributes: Some(volume_attributes(identity, store, volume))
                    .filter(|all| !all.is_empty()),
                volume_handle: volume.id.to_string(),
                ..CSIPersistentVolumeSource::default()
            }),
            mount_options: Some(volume.mount_options.clone()).filter(|options| !options.is_empty()),
            node_affinity: Some(affinity_to(&identity.driver, identity.node.as_str())),
            persistent_volume_reclaim_policy: Some(volume.reclaim_policy.as_str().to_owned()),
            storage_class_name: Some(volume.storage_class.clone()),
            volume_attributes_class_name: volume.attributes_class.clone(),
            volume_mode: Some(volume.kind.volume_mode().to_owned()),
            ..PersistentVolumeSpec::default()
        }),
        status: None,
    }
}

/// The attributes that the node plugin gets when it mounts the volume: its store, and its kind unless it is a directory.
fn volume_attributes(
    identity: &ProvisionerIdentity,
    store: Option<&StoreId>,
    volume: &VolumeSpec,
) -> BTreeMap<String, String> {
    let attributes = [
        (STORE_ATTRIBUTE, store.map(StoreId::to_string)),
        (STORE_NAME_ATTRIBUTE, identity.store.as_ref().map(StoreName::to_string)),
        (KIND_ATTRIBUTE, volume.kind.image_format().map(|kind| kind.to_string())),
    ];
    attributes.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// Affinity to this node alone.
pub(crate) fn affinity_to(driver: &DriverName, node: &str) -> VolumeNodeAffinity {
    let expression = NodeSelectorRequirement {
        key: driver.topology_key(),
        operator: "In".to_owned(),
        values: Some(vec![node.to_owned()]),
    };
    let term = NodeSelectorTerm { match_expressions: Some(vec![expression]), match_fields: None };
    VolumeNodeAffinity { required: Some(NodeSelector { node_selector_terms: vec![term] }) }
}

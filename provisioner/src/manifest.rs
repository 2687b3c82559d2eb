//! The PersistentVolume of a volume.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PersistentVolume,
    PersistentVolumeSpec, VolumeNodeAffinity,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::plan::{HOSTNAME, Identity, PROVISIONED_BY, Reclaim, VolumeSpec};
use crate::quantity;

/// The PersistentVolume to post for a volume.
///
/// It is complete: its reference to the claim has the UID, so nothing has to be added when it is bound, and the finalizer
/// is on it from the start. A volume that is kept has no finalizer, because its object may go while its data stay.
pub fn manifest(me: &Identity, volume: &VolumeSpec) -> PersistentVolume {
    PersistentVolume {
        metadata: ObjectMeta {
            name: Some(volume.id.to_string()),
            annotations: Some(BTreeMap::from([(PROVISIONED_BY.to_owned(), me.driver.to_string())])),
            finalizers: me
                .finalizer
                .clone()
                .filter(|_| volume.reclaim == Reclaim::Delete)
                .map(|ours| vec![ours]),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeSpec {
            access_modes: Some(volume.access_modes.clone()),
            capacity: Some(BTreeMap::from([("storage".to_owned(), quantity::print(volume.capacity.0))])),
            claim_ref: Some(volume.claim.clone()),
            csi: Some(CSIPersistentVolumeSource {
                driver: me.driver.to_string(),
                volume_handle: volume.id.to_string(),
                ..CSIPersistentVolumeSource::default()
            }),
            mount_options: Some(volume.mount_options.clone()).filter(|options| !options.is_empty()),
            node_affinity: Some(bound_to(me)),
            persistent_volume_reclaim_policy: Some(volume.reclaim.as_str().to_owned()),
            storage_class_name: Some(volume.class.clone()),
            volume_mode: Some("Filesystem".to_owned()),
            ..PersistentVolumeSpec::default()
        }),
        status: None,
    }
}

/// Where the volume is: on this node and no other.
fn bound_to(me: &Identity) -> VolumeNodeAffinity {
    let expression = NodeSelectorRequirement {
        key: HOSTNAME.to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![me.node.to_string()]),
    };
    let term = NodeSelectorTerm { match_expressions: Some(vec![expression]), match_fields: None };
    VolumeNodeAffinity { required: Some(NodeSelector { node_selector_terms: vec![term] }) }
}

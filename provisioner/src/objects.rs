//! The fields of claims, classes and PersistentVolumes, as this driver reads them.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, NodeSelectorRequirement, NodeSelectorTerm, ObjectReference, PersistentVolume,
    PersistentVolumeClaim, TopologySelectorTerm,
};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Resource;

use crate::DriverName;
use crate::id::VolumeId;
use crate::identity::{HOSTNAME, ProvisionerIdentity};
use crate::image::{InvalidKind, VolumeKind};
use crate::name::StoreName;
use crate::store_id::StoreId;

/// The annotation that named a claim's class before the field existed; it overrides the field, as in
/// Kubernetes.
const BETA_STORAGE_CLASS: &str = "volume.beta.kubernetes.io/storage-class";

/// The volume attribute with the id of the store that the volume was created in.
pub const STORE_ATTRIBUTE: &str = "store";

/// The volume attribute with the name of the store that the volume was created in, one of several on its node; a volume of
/// the one without a name has none.
pub const STORE_NAME_ATTRIBUTE: &str = "storeName";

/// The volume attribute with the kind of a block or strict volume; others have none.
pub const KIND_ATTRIBUTE: &str = "kind";

/// The name of a claim's class; `None` for the empty name, which asks for a pre-provisioned volume.
pub(crate) fn class_name(claim: &PersistentVolumeClaim) -> Option<&str> {
    let field = claim.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
    nonempty_annotation(claim, BETA_STORAGE_CLASS).or(field).filter(|name| !name.is_empty())
}

/// An annotation's value; `None` if it is empty, which is how some tools remove one.
pub(crate) fn nonempty_annotation<'a>(claim: &'a PersistentVolumeClaim, key: &str) -> Option<&'a str> {
    let value = claim.metadata.annotations.as_ref().and_then(|annotations| annotations.get(key));
    value.map(String::as_str).filter(|value| !value.is_empty())
}

pub(crate) fn waits_for_consumer(class: &StorageClass) -> bool {
    class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer")
}

/// Returns whether the class allows volumes on this node, by the labels of the Node, as the scheduler decides. `None`: they
/// are not known.
pub(crate) fn allows_node(
    identity: &ProvisionerIdentity,
    labels: Option<&BTreeMap<String, String>>,
    class: &StorageClass,
) -> bool {
    meets_topologies(class, |key, values| {
        let found = labels.and_then(|labels| labels.get(key)).map(String::as_str);
        // The kubelet sets these two to the node's name, unless its hostname is another.
        let name = is_name_label(&identity.driver, key).then_some(identity.node.as_str());
        found.or(name).is_some_and(|value| values.iter().any(|allowed| allowed == value))
    })
}

/// Returns whether the class may allow volumes on a node of which only the name is known.
pub(crate) fn may_allow_node(driver: &DriverName, node: &str, class: &StorageClass) -> bool {
    meets_topologies(class, |key, values| {
        !is_name_label(driver, key) || values.iter().any(|allowed| allowed == node)
    })
}

fn is_name_label(driver: &DriverName, key: &str) -> bool {
    key == HOSTNAME || key == driver.topology_key()
}

fn meets_topologies(class: &StorageClass, is_met: impl Fn(&str, &[String]) -> bool) -> bool {
    let meets_term = |term: &TopologySelectorTerm| {
        let mut expressions = term.match_label_expressions.iter().flatten();
        expressions.all(|label| is_met(&label.key, &label.values))
    };
    // The terms are alternatives, while all expressions of a term must match. No terms allow every node.
    class.allowed_topologies.as_ref().is_none_or(|terms| terms.is_empty() || terms.iter().any(meets_term))
}

/// The name of the PersistentVolume that a claim is bound to.
pub(crate) fn bound_volume_name(claim: &PersistentVolumeClaim) -> Option<&str> {
    let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref());
    let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
    // The controller writes the volume's name before the phase. Until both are there, the claim is still being bound.
    name.filter(|name| !name.is_empty() && phase == Some("Bound"))
}

/// Returns whether a claim is bound to another volume, so that it does not need this one.
pub(crate) fn is_bound_elsewhere(claim: &PersistentVolumeClaim, id: &VolumeId) -> bool {
    let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    !volume.is_empty() && volume != id.as_str()
}

pub(crate) fn is_of_driver(identity: &ProvisionerIdentity, volume: &PersistentVolume) -> bool {
    let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
    csi.is_some_and(|csi| csi.driver == identity.driver.as_str())
}

/// Returns whether a PersistentVolume is of this driver and of this node alone, by its affinity.
pub(crate) fn is_on_node(identity: &ProvisionerIdentity, volume: &PersistentVolume) -> bool {
    let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
    let required = affinity.and_then(|affinity| affinity.required.as_ref());
    let terms = required.map(|required| required.node_selector_terms.as_slice()).unwrap_or_default();
    is_of_driver(identity, volume)
        && !terms.is_empty()
        && terms.iter().all(|term| selects_only_node(identity, term))
}

/// Returns whether a PersistentVolume is of this driver, node and store, by what it names: the disk may be another one.
pub(crate) fn is_in_store(identity: &ProvisionerIdentity, volume: &PersistentVolume) -> bool {
    is_on_node(identity, volume) && store_name(volume) == identity.store.as_ref().map(StoreName::as_str)
}

/// The name of the store of a PersistentVolume, unchecked; `None` is the one without a name.
pub(crate) fn store_name(volume: &PersistentVolume) -> Option<&str> {
    let csi = volume.spec.as_ref()?.csi.as_ref()?;
    Some(csi.volume_attributes.as_ref()?.get(STORE_NAME_ATTRIBUTE)?.as_str()).filter(|name| !name.is_empty())
}

/// The name and the id of the store that a PersistentVolume names: `None` is the store without a name, and a volume of a release
/// without identities.
pub fn store_of_volume(volume: &PersistentVolume) -> (Option<StoreName>, Option<StoreId>) {
    (store_name(volume).and_then(|name| StoreName::try_new(name).ok()), named_store(volume))
}

/// The id of a PersistentVolume of this driver, node and store, by its name.
pub(crate) fn volume_in_store(identity: &ProvisionerIdentity, volume: &PersistentVolume) -> Option<VolumeId> {
    let name = volume.metadata.name.as_deref().filter(|_| is_in_store(identity, volume));
    name?.parse().ok()
}

/// Returns whether a term selects this node only. A term that selects several is not ours: each of them would claim
/// the volume.
fn selects_only_node(identity: &ProvisionerIdentity, term: &NodeSelectorTerm) -> bool {
    let is_node = |expression: &NodeSelectorRequirement| {
        let values = expression.values.as_deref().unwrap_or_default();
        expression.operator == "In" && identity.is_label_of_node(&expression.key, values)
    };
    // All expressions of a term must match, so one that names this node alone is enough.
    term.match_expressions.iter().flatten().any(is_node)
}

pub(crate) fn has_finalizer(identity: &ProvisionerIdentity, volume: &PersistentVolume) -> bool {
    let mut finalizers = volume.metadata.finalizers.iter().flatten();
    identity.finalizer.as_ref().is_some_and(|ours| finalizers.any(|finalizer| finalizer == ours))
}

/// The node in the affinity of a PersistentVolume of this driver.
pub fn node_of_volume(volume: &PersistentVolume) -> Option<&str> {
    let required = volume.spec.as_ref()?.node_affinity.as_ref()?.required.as_ref()?;
    let mut expressions =
        required.node_selector_terms.iter().flat_map(|term| term.match_expressions.iter().flatten());
    expressions.next()?.values.as_ref()?.first().map(String::as_str)
}

/// Returns whether the disk of a volume was declared lost for good. The annotation must name the store that the
/// volume names: the loss of another disk does not concern it.
pub(crate) fn is_marked_lost(identity: &ProvisionerIdentity, volume: &PersistentVolume) -> bool {
    let annotations = volume.metadata.annotations.as_ref();
    let marked = annotations.and_then(|all| all.get(&identity.driver.lost_annotation()));
    marked.is_some_and(|marked| named_store(volume).is_some_and(|named| named.as_str() == marked))
}

/// The store that a PersistentVolume names; `None` for one of a release without identities.
pub(crate) fn named_store(volume: &PersistentVolume) -> Option<StoreId> {
    let csi = volume.spec.as_ref()?.csi.as_ref()?;
    csi.volume_attributes.as_ref()?.get(STORE_ATTRIBUTE)?.parse().ok()
}

/// The kind of volume that a PersistentVolume names.
pub(crate) fn named_kind(volume: &PersistentVolume) -> Result<VolumeKind, InvalidKind> {
    let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
    csi.map_or(Ok(VolumeKind::Directory), attributed_kind)
}

/// The kind of volume that the source of a PersistentVolume names.
pub(crate) fn attributed_kind(csi: &CSIPersistentVolumeSource) -> Result<VolumeKind, InvalidKind> {
    let word = csi.volume_attributes.as_ref().and_then(|attributes| attributes.get(KIND_ATTRIBUTE));
    VolumeKind::from_attribute(word.map(String::as_str))
}

/// Returns whether a claim asks for the data of a snapshot or of another claim.
pub(crate) fn has_data_source(claim: &PersistentVolumeClaim) -> bool {
    claim.spec.as_ref().is_some_and(|spec| spec.data_source.is_some() || spec.data_source_ref.is_some())
}

/// A complete reference to an object, for events and for the claim of a PersistentVolume: the PersistentVolume controller
/// adds nothing to it when it binds the volume.
pub(crate) fn object_reference<K: Resource<DynamicType = ()>>(object: &K) -> ObjectReference {
    ObjectReference { resource_version: object.meta().resource_version.clone(), ..object.object_ref(&()) }
}

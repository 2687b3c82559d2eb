//! Decides whether a directory can become the volume of a claim.

use k8s_openapi::api::core::v1::PersistentVolume;

use crate::claim::decide::ObservedClaim;
use crate::claim::size::store_of_class;
use crate::claim::spec::{ClaimRejection, ReclaimPolicy, VolumeSpec, build_spec};
use crate::id::VolumeId;
use crate::identity::{ProvisionerIdentity, SELECTED_NODE};
use crate::image::VolumeKind;
use crate::name::StoreName;
use crate::objects::{class_name, has_data_source, is_in_store, nonempty_annotation, waits_for_consumer};

/// The action for a claim that a directory is imported for.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum ImportAction {
    /// Create this volume from the directory, and its PersistentVolume.
    Import(Box<VolumeSpec>),
    /// Nothing: the claim has its volume on this node.
    Done(VolumeId),
}

/// The reason why no directory can become the volume of a claim. The message names the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImportRejection {
    /// The claim is not valid for a volume of this driver.
    #[error(transparent)]
    Claim(ClaimRejection),
    /// The claim is being deleted.
    #[error("the claim is being deleted: create it again")]
    Deleting,
    /// The class is one of another driver.
    #[error("storage class {class:?} is of driver {driver}: create the claim with a class of this driver")]
    OtherDriver {
        /// The class.
        class: String,
        /// The driver.
        driver: String,
    },
    /// The class names another store of the node.
    #[error(
        "storage class {class:?} has its volumes in {}", 
        store.as_ref().map_or("the store without a name: import without --store".to_owned(), |store| format!("store {store}: import with `--store {store}`"))
    )]
    OtherStore {
        /// The class.
        class: String,
        /// The store; `None` is the one without a name.
        store: Option<StoreName>,
    },
    /// Nodes provision claims of this class at once.
    #[error("storage class {class:?} binds claims at once: use one with WaitForFirstConsumer")]
    BindsImmediately {
        /// The class.
        class: String,
    },
    /// A pod uses the claim, and was scheduled to another node.
    #[error(
        "node {node} is selected for the claim: delete its pod and the claim, and create the claim again"
    )]
    OtherNode {
        /// The selected node.
        node: String,
    },
    /// The claim has another volume.
    #[error("the claim already has volume {volume:?}: create another claim")]
    HasVolume {
        /// The PersistentVolume.
        volume: String,
    },
}

/// Decides whether a directory can become the volume of this claim. The volume is retained when its claim is
/// deleted, for any class: its data are not the provisioner's. `source` is the directory's path.
///
/// # Errors
/// [`ImportRejection`]: a retry helps only once the claim, or its class, has changed.
pub fn plan_import(
    identity: &ProvisionerIdentity,
    observed: ObservedClaim<'_>,
    source: &str,
) -> Result<ImportAction, ImportRejection> {
    let claim = observed.claim;
    let name = class_name(claim).map(str::to_owned).ok_or(ImportRejection::Claim(ClaimRejection::NoClass))?;
    let Some(class) = observed.class else {
        return Err(ImportRejection::Claim(ClaimRejection::UnknownClass { class: name }));
    };
    if class.provisioner != identity.driver.as_str() {
        return Err(ImportRejection::OtherDriver { class: name, driver: class.provisioner.clone() });
    }
    let mut spec = build_spec(claim, class).map_err(ImportRejection::Claim)?;
    let store = store_of_class(class).unwrap_or_default();
    if store != identity.store {
        return Err(ImportRejection::OtherStore { class: name, store });
    }
    spec.reclaim_policy = ReclaimPolicy::Retain;
    if has_data_source(claim) {
        return Err(ImportRejection::Claim(ClaimRejection::Unsupported {
            field: "spec.dataSource",
            value: String::new(),
            hint: ": the directory is the source of the data",
        }));
    }
    if spec.kind != VolumeKind::Directory {
        return Err(ImportRejection::Claim(ClaimRejection::Unsupported {
            field: "the kind of the claim's volume",
            value: spec.kind.to_string(),
            hint: ": a directory is imported as one; use volumeMode Filesystem, and a class without strict",
        }));
    }
    if let Some(class) = spec.attributes_class.take() {
        return Err(ImportRejection::Claim(ClaimRejection::Unsupported {
            field: "spec.volumeAttributesClassName",
            value: class,
            hint: ": name it once the claim is bound",
        }));
    }
    let bound = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    if !bound.is_empty() && bound != spec.id.as_str() {
        return Err(ImportRejection::HasVolume { volume: bound.to_owned() });
    }
    // Before the checks of the claim's state: a finished import stays finished when the claim is deleted.
    match observed.volume {
        Some(volume) if was_imported(identity, volume, source) => return Ok(ImportAction::Done(spec.id)),
        None if bound.is_empty() => {}
        _ => return Err(ImportRejection::HasVolume { volume: spec.id.to_string() }),
    }
    if claim.metadata.deletion_timestamp.is_some() {
        return Err(ImportRejection::Deleting);
    }
    match nonempty_annotation(claim, SELECTED_NODE) {
        Some(node) if node != identity.node.as_str() => {
            Err(ImportRejection::OtherNode { node: node.to_owned() })
        }
        // A node could select itself for such a claim and create an empty volume first.
        None if !waits_for_consumer(class) => Err(ImportRejection::BindsImmediately { class: name }),
        _ => Ok(ImportAction::Import(Box::new(spec))),
    }
}

/// Returns whether a PersistentVolume on this node is the one of an import of this directory.
fn was_imported(identity: &ProvisionerIdentity, volume: &PersistentVolume, source: &str) -> bool {
    let annotations = volume.metadata.annotations.iter().flatten();
    let is_here = is_in_store(identity, volume);
    let key = identity.driver.import_annotation();
    is_here && annotations.into_iter().any(|(name, value)| *name == key && value == source)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::objects::{
        NODE, sample_claim, sample_class, sample_identity, sample_uid, sample_volume,
    };

    const SOURCE: &str = "/srv/data";

    fn plan(claim: Value, class: Value) -> Result<ImportAction, ImportRejection> {
        let (claim, class) = (sample_claim(1, claim), sample_class(class));
        let observed = ObservedClaim { claim: &claim, class: Some(&class), volume: None, node_labels: None };
        plan_import(&sample_identity(NODE), observed, SOURCE)
    }

    fn unselected(node: Value) -> Value {
        json!({ "metadata": { "annotations": {
            "volume.kubernetes.io/storage-provisioner": null, "volume.kubernetes.io/selected-node": node,
        } } })
    }

    #[test]
    fn a_claim_that_waits_for_a_pod_gets_a_retained_volume() {
        for selected in [Value::Null, NODE.into()] {
            let Ok(ImportAction::Import(spec)) = plan(unselected(selected), json!({})) else {
                panic!("not imported")
            };
            assert_eq!(spec.id.claim_uid(), sample_uid(1));
            assert_eq!(spec.reclaim_policy, ReclaimPolicy::Retain, "the class says Delete");
        }
    }

    #[test]
    fn a_claim_whose_volume_belongs_elsewhere_is_rejected() {
        let claim = |patch| plan(patch, json!({})).expect_err("rejected");
        let other = claim(unselected("node-b".into()));
        assert_eq!(other, ImportRejection::OtherNode { node: "node-b".into() });
        let bound = claim(json!({ "spec": { "volumeName": "other" } }));
        assert_eq!(bound, ImportRejection::HasVolume { volume: "other".into() });
        let deleting = claim(json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } }));
        assert_eq!(deleting, ImportRejection::Deleting);
        let sourced =
            claim(json!({ "spec": { "dataSource": { "kind": "PersistentVolumeClaim", "name": "a" } } }));
        assert!(matches!(sourced, ImportRejection::Claim(ClaimRejection::Unsupported { .. })), "{sourced}");
        let class = |patch| plan(unselected(Value::Null), patch).expect_err("rejected");
        let foreign = class(json!({ "provisioner": "other.example" }));
        assert!(matches!(foreign, ImportRejection::OtherDriver { .. }), "{foreign}");
        let immediate = class(json!({ "volumeBindingMode": "Immediate" }));
        assert!(matches!(immediate, ImportRejection::BindsImmediately { .. }), "{immediate}");
    }

    #[test]
    fn an_import_is_done_only_where_the_volume_names_the_directory() {
        let (claim, class) = (sample_claim(1, json!({})), sample_class(json!({})));
        let plan = |node: &str, from: Value| {
            let key = sample_identity(NODE).driver.import_annotation();
            let volume = sample_volume(1, json!({ "metadata": { "annotations": { key: from } } }));
            let observed = ObservedClaim {
                claim: &claim,
                class: Some(&class),
                volume: Some(&volume),
                node_labels: None,
            };
            plan_import(&sample_identity(node), observed, SOURCE)
        };
        let id = VolumeId::from_uid(&sample_uid(1)).expect("a UUID");
        assert_eq!(plan(NODE, SOURCE.into()), Ok(ImportAction::Done(id)));
        for other in [plan("node-b", SOURCE.into()), plan(NODE, "/srv".into()), plan(NODE, Value::Null)] {
            assert!(matches!(
                other,
                Err(ImportRejection::HasVolume { .. } | ImportRejection::OtherNode { .. })
            ));
        }
    }

    #[test]
    fn a_directory_does_not_become_a_block_or_strict_volume() {
        let block = plan(json!({ "spec": { "volumeMode": "Block" } }), json!({})).expect_err("rejected");
        assert!(block.to_string().contains("kind of the claim's volume \"block\""), "{block}");
        let strict = plan(json!({}), json!({ "parameters": { "strict": "true" } })).expect_err("rejected");
        assert!(strict.to_string().contains("\"ext4\""), "{strict}");
    }

    #[test]
    fn a_claim_that_lost_its_volume_is_rejected() {
        let lost = json!({ "spec": { "volumeName": format!("pvc-{}", sample_uid(1)) } });
        assert!(matches!(plan(lost, json!({})), Err(ImportRejection::HasVolume { .. })));
    }
}

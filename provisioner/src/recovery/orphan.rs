//! Plans the adoption or the removal of a volume without a PersistentVolume.

use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use nodekeel_fsquota::Bytes;

use crate::claim::decide::claim_ignore_reason;
use crate::claim::manifest::build_persistent_volume;
use crate::claim::spec::{ReclaimPolicy, VolumeSpec};
use crate::id::VolumeId;
use crate::identity::ProvisionerIdentity;
use crate::image::VolumeKind;
use crate::objects::{class_name, is_in_store, is_on_node, node_of_volume, object_reference, store_name};
use crate::store::VolumeUsage;
use crate::store_id::StoreId;

/// Namespace in the reference of a PersistentVolume to a claim that does not exist any more.
const REMOVED_CLAIM_NAMESPACE: &str = "default";

/// A volume in a store that has no PersistentVolume.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "complete by nature: what a PersistentVolume needs")]
pub struct OrphanVolume {
    /// The store.
    pub store: StoreId,
    /// The volume's id.
    pub id: VolumeId,
    /// A directory, a block volume or a strict one.
    pub kind: VolumeKind,
    /// The limits and its usage.
    pub usage: VolumeUsage,
}

/// The reason why a volume in a store has no PersistentVolume on its node.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum OrphanState {
    /// Has one: it is not an orphan.
    Owned,
    /// Is being provisioned: it is not an orphan.
    Provisioning,
    /// A PersistentVolume of its name is on another node.
    OnOtherNode {
        /// The node.
        node: String,
    },
    /// A PersistentVolume of its name is in another store of the node.
    InOtherStore {
        /// The store's name, unchecked; `None` is the one without a name.
        store: Option<String>,
    },
    /// The claim that it was created for exists, and has lost it.
    Claimed {
        /// The claim.
        claim: Box<ObjectReference>,
        /// The claim's class.
        class: String,
        /// The claim's access modes.
        access_modes: Vec<String>,
    },
    /// The claim that it was created for does not exist any more.
    Unclaimed,
}

/// Decides why a volume has no PersistentVolume. `object` is the PersistentVolume with its name, `claim` the claim with its
/// UID.
pub fn plan_orphan(
    identity: &ProvisionerIdentity,
    object: Option<&PersistentVolume>,
    claim: Option<&PersistentVolumeClaim>,
) -> OrphanState {
    if let Some(object) = object {
        let node = node_of_volume(object).unwrap_or("unknown").to_owned();
        return if is_in_store(identity, object) {
            OrphanState::Owned
        } else if is_on_node(identity, object) {
            OrphanState::InOtherStore { store: store_name(object).map(str::to_owned) }
        } else {
            OrphanState::OnOtherNode { node }
        };
    }
    match claim {
        None => OrphanState::Unclaimed,
        // The provisioner of this node acts on the claim, and may be about to create the object.
        Some(claim) if claim_ignore_reason(identity, claim).is_none() => OrphanState::Provisioning,
        Some(claim) => OrphanState::Claimed {
            claim: Box::new(object_reference(claim)),
            class: class_name(claim).unwrap_or_default().to_owned(),
            access_modes: claim.spec.as_ref().and_then(|spec| spec.access_modes.clone()).unwrap_or_default(),
        },
    }
}

/// The PersistentVolume that makes an orphan a volume again. It is retained: its data were kept when it had none.
///
/// If the claim exists that the volume was created for, the object is bound to it. Otherwise it is available to
/// claims of this class.
/// `None`: it is not an orphan, or its name is taken.
pub(crate) fn adopted_volume(
    identity: &ProvisionerIdentity,
    orphan: &OrphanVolume,
    state: &OrphanState,
    class: Option<&str>,
) -> Option<PersistentVolume> {
    let (claim_ref, claim_class, access_modes) = match state {
        OrphanState::Claimed { claim, class, access_modes } => {
            (Some((**claim).clone()), class.as_str(), access_modes.clone())
        }
        OrphanState::Unclaimed => (None, "", vec!["ReadWriteOnce".to_owned()]),
        _ => return None,
    };
    let mut spec = orphan_spec(orphan, class.unwrap_or(claim_class), ReclaimPolicy::Retain);
    spec.access_modes = access_modes;
    let mut volume = build_persistent_volume(identity, Some(&orphan.store), &spec);
    // A reference to a claim that does not exist would make Kubernetes release the volume instead of offering it.
    volume.spec.get_or_insert_default().claim_ref = claim_ref;
    Some(volume)
}

/// The PersistentVolume with which the provisioner removes an orphan: it is released, since its claim does not exist, and
/// deleted like any other, with all checks. `None`: it is not an orphan, or a claim may need it.
pub(crate) fn removed_volume(
    identity: &ProvisionerIdentity,
    orphan: &OrphanVolume,
    state: &OrphanState,
) -> Option<PersistentVolume> {
    let spec = orphan_spec(orphan, "", ReclaimPolicy::Delete);
    (*state == OrphanState::Unclaimed).then(|| build_persistent_volume(identity, Some(&orphan.store), &spec))
}

/// Returns whether a PersistentVolume is the one with which the provisioner removes an orphan.
pub(crate) fn is_removal(id: &VolumeId, volume: &PersistentVolume) -> bool {
    let spec = volume.spec.as_ref();
    let claim = spec.and_then(|spec| spec.claim_ref.as_ref());
    // No claim has the name of a volume and the UID that the volume was created for.
    let is_placeholder = claim.is_some_and(|claim| {
        claim.name.as_deref() == Some(id.as_str()) && claim.uid.as_deref() == Some(id.claim_uid())
    });
    let policy = spec.and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    is_placeholder && policy == Some("Delete")
}

fn orphan_spec(orphan: &OrphanVolume, class: &str, reclaim_policy: ReclaimPolicy) -> VolumeSpec {
    let (id, VolumeUsage { limits, usage }) = (&orphan.id, orphan.usage);
    VolumeSpec {
        id: id.clone(),
        // A volume without a limit promises its present size; the API requires one.
        capacity: limits.bytes.unwrap_or(usage.bytes).max(Bytes(1)),
        kind: orphan.kind,
        limits,
        source: None,
        claim_ref: ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("PersistentVolumeClaim".to_owned()),
            namespace: Some(REMOVED_CLAIM_NAMESPACE.to_owned()),
            name: Some(id.to_string()),
            uid: Some(id.claim_uid().to_owned()),
            ..ObjectReference::default()
        },
        access_modes: vec!["ReadWriteOnce".to_owned()],
        storage_class: class.to_owned(),
        mount_options: Vec::new(),
        reclaim_policy,
        attributes_class: None,
    }
}

#[cfg(test)]
mod tests {
    use nodekeel_fsquota::{Inodes, QuotaLimits, QuotaUsage};
    use serde_json::json;

    use super::*;
    use crate::deletion::decide::{VolumeAction, VolumeIgnoreReason, plan_volume};
    use crate::identity::FINALIZER;
    use crate::objects::named_kind;
    use crate::testing::objects::{NODE, sample_claim, sample_identity, sample_uid, sample_volume};

    const USAGE: VolumeUsage = VolumeUsage {
        limits: QuotaLimits { bytes: Some(Bytes(8 << 20)), inodes: Some(Inodes(1024)) },
        usage: QuotaUsage { bytes: Bytes(4096), inodes: Inodes(2) },
    };

    fn orphan(kind: VolumeKind) -> OrphanVolume {
        OrphanVolume { store: sample_uid(7).parse().expect("a UUID"), id: id(), kind, usage: USAGE }
    }

    fn id() -> VolumeId {
        VolumeId::from_uid(&sample_uid(1)).expect("a UUID")
    }

    fn lost_claim() -> PersistentVolumeClaim {
        let spec = json!({ "volumeName": id().as_str() });
        sample_claim(1, json!({ "spec": spec, "status": { "phase": "Lost" } }))
    }

    #[test]
    fn a_volume_is_an_orphan_unless_it_is_owned_or_being_provisioned() {
        let identity = sample_identity(NODE);
        let plan = |object: Option<&PersistentVolume>, claim: Option<&PersistentVolumeClaim>| {
            plan_orphan(&identity, object, claim)
        };
        let (here, pending) = (sample_volume(1, json!({})), sample_claim(1, json!({})));
        assert_eq!(plan(Some(&here), None), OrphanState::Owned);
        assert_eq!(plan(None, Some(&pending)), OrphanState::Provisioning);
        assert_eq!(plan(None, None), OrphanState::Unclaimed);
        assert!(matches!(plan(None, Some(&lost_claim())), OrphanState::Claimed { .. }));
        let other = sample_identity("node-b");
        let found = plan_orphan(&other, Some(&here), None);
        assert_eq!(found, OrphanState::OnOtherNode { node: NODE.to_owned() });
        let fast = identity.with_store(Some("fast".parse().expect("a name")));
        let attributes = json!({ "spec": { "csi": { "volumeAttributes": { "storeName": "fast" } } } });
        let in_fast = sample_volume(1, attributes);
        for (identity, object, store) in [(&identity, &in_fast, Some("fast")), (&fast, &here, None)] {
            let found = plan_orphan(identity, Some(object), None);
            assert_eq!(found, OrphanState::InOtherStore { store: store.map(str::to_owned) });
        }
        assert_eq!(plan_orphan(&fast, Some(&in_fast), None), OrphanState::Owned);
    }

    #[test]
    fn an_adopted_volume_is_retained_and_bound_to_the_claim_that_lost_it() {
        let identity = sample_identity(NODE);
        let adopt = |claim: Option<&PersistentVolumeClaim>, class| {
            let state = plan_orphan(&identity, None, claim);
            adopted_volume(&identity, &orphan(VolumeKind::Directory), &state, class)
        };
        let bound = adopt(Some(&lost_claim()), None).expect("an orphan");
        let spec = bound.spec.as_ref().expect("a spec");
        assert_eq!(spec.claim_ref.as_ref().and_then(|claim| claim.name.as_deref()), Some("claim-1"));
        assert_eq!(spec.persistent_volume_reclaim_policy.as_deref(), Some("Retain"));
        assert_eq!(spec.storage_class_name.as_deref(), Some("local"));
        assert_eq!(spec.capacity.as_ref().map(|all| all["storage"].0.as_str()), Some("8Mi"));
        assert_eq!(plan_volume(&identity, &bound), VolumeAction::Ignore(VolumeIgnoreReason::Retained));
        let free = adopt(None, Some("fast")).expect("an orphan");
        let spec = free.spec.as_ref().expect("a spec");
        assert_eq!((&spec.claim_ref, spec.storage_class_name.as_deref()), (&None, Some("fast")));
        assert_eq!(adopt(Some(&sample_claim(1, json!({}))), None), None, "it is being provisioned");
    }

    #[test]
    fn an_adopted_image_keeps_its_kind() {
        let identity = sample_identity(NODE);
        for kind in VolumeKind::ALL {
            let volume = adopted_volume(&identity, &orphan(kind), &OrphanState::Unclaimed, None);
            let volume = volume.expect("an orphan");
            assert_eq!(named_kind(&volume), Ok(kind));
            let mode = volume.spec.and_then(|spec| spec.volume_mode);
            assert_eq!(mode.as_deref(), Some(kind.volume_mode()), "{kind}");
        }
    }

    #[test]
    fn a_removed_volume_is_deleted_by_the_provisioner_once_it_is_released() {
        let identity = sample_identity(NODE);
        let remove = |claim: Option<&PersistentVolumeClaim>| {
            let state = plan_orphan(&identity, None, claim);
            removed_volume(&identity, &orphan(VolumeKind::Directory), &state)
        };
        let mut volume = remove(None).expect("an orphan");
        assert!(volume.metadata.finalizers.iter().flatten().any(|it| it == FINALIZER));
        volume.status.get_or_insert_default().phase = Some("Released".to_owned());
        assert_eq!(plan_volume(&identity, &volume), VolumeAction::Delete(id()));
        assert_eq!(remove(Some(&lost_claim())), None, "a claim may need it");
    }
}

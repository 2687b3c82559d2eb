//! The condition of each volume: why no pod can use it.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::PersistentVolume;

use crate::id::VolumeId;
use crate::plan::{
    ProvisionerIdentity, VolumeAction, VolumeIgnoreReason, is_marked_lost, named_store, ownership_mismatch,
    plan_volume,
};
use crate::store_id::StoreIdentity;
use crate::store_status::{StoreFault, StoreStatus};

/// Why no pod can use a volume. Two are the same if their causes are: the text may vary.
#[derive(Debug, Clone)]
pub(crate) struct VolumeCondition {
    cause: ConditionCause,
    /// What to tell the user.
    pub(crate) text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConditionCause {
    Store(StoreFault),
    Missing,
    InOtherStore,
    DeclaredLost,
}

impl PartialEq for VolumeCondition {
    fn eq(&self, other: &Self) -> bool {
        self.cause == other.cause
    }
}

/// The conditions of those volumes of this node that no pod can use, by PersistentVolume. `missing` are those that the
/// served store does not have. `None`: it is not known yet.
pub(crate) fn plan_conditions<'a>(
    identity: &ProvisionerIdentity,
    (status, missing): (&StoreStatus, &BTreeSet<VolumeId>),
    objects: impl IntoIterator<Item = &'a PersistentVolume>,
) -> Option<BTreeMap<VolumeId, VolumeCondition>> {
    let ours = objects.into_iter().filter_map(|object| Some((volume_on_node(identity, object)?, object)));
    match status {
        StoreStatus::Unknown => None,
        StoreStatus::Unserved { fault, why } => {
            let condition = VolumeCondition { cause: ConditionCause::Store(*fault), text: why.clone() };
            Some(ours.map(|(id, _)| (id, condition.clone())).collect())
        }
        StoreStatus::Served(store) => {
            let missing = ours.filter(|(id, _)| missing.contains(id));
            Some(missing.map(|(id, object)| (id, missing_condition(identity, store, object))).collect())
        }
    }
}

/// The volume that a PersistentVolume of this node needs; `None` for those of other nodes and drivers, and one that is to
/// be deleted.
pub fn required_volume(identity: &ProvisionerIdentity, object: &PersistentVolume) -> Option<VolumeId> {
    let is_required = matches!(
        plan_volume(identity, object),
        VolumeAction::AddFinalizer
            | VolumeAction::Ignore(VolumeIgnoreReason::InUse | VolumeIgnoreReason::Retained)
    );
    is_required.then(|| volume_on_node(identity, object)).flatten()
}

/// Why a volume is missing in the served store.
fn missing_condition(
    identity: &ProvisionerIdentity,
    store: &StoreIdentity,
    object: &PersistentVolume,
) -> VolumeCondition {
    let named = named_store(object);
    let (cause, text) = match (&named, store.id()) {
        _ if is_marked_lost(identity, object) => {
            let text =
                "the disk of the volume was declared lost for good, and its data with it: delete its claim";
            (ConditionCause::DeclaredLost, text.to_owned())
        }
        (Some(named), Some(store)) if named != store => {
            let text = format!(
                "the volume is in store {named}, and the directory of its node is store {store}: mount its disk; if it is \
                 lost for good, run `provisionerd store replace --lost {named}` on the node"
            );
            (ConditionCause::InOtherStore, text)
        }
        _ => {
            let text = "the directory of the volume is missing in the store of its node: restore it from a backup; if it \
                        is lost, delete the claim and the PersistentVolume";
            (ConditionCause::Missing, text.to_owned())
        }
    };
    VolumeCondition { cause, text }
}

/// The id of a PersistentVolume of this node, by its name.
fn volume_on_node(identity: &ProvisionerIdentity, object: &PersistentVolume) -> Option<VolumeId> {
    object.spec.as_ref().filter(|spec| ownership_mismatch(identity, spec).is_none())?;
    object.metadata.name.as_deref()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::plan::STORE_ATTRIBUTE;
    use crate::testing::objects::{NODE, sample_identity, sample_uid, sample_volume};

    fn id(number: u32) -> VolumeId {
        VolumeId::from_uid(&sample_uid(number)).expect("a UUID")
    }

    fn served() -> StoreStatus {
        StoreStatus::Served(StoreIdentity::Present(sample_uid(1).parse().expect("a UUID")))
    }

    fn volume(number: u32, store: u32, lost: Option<u32>) -> PersistentVolume {
        let annotation = sample_identity(NODE).driver.lost_annotation();
        let mut patch =
            json!({ "spec": { "csi": { "volumeAttributes": { STORE_ATTRIBUTE: sample_uid(store) } } } });
        if let Some(lost) = lost {
            patch["metadata"] = json!({ "annotations": { annotation: sample_uid(lost) } });
        }
        sample_volume(number, patch)
    }

    fn plan(
        status: &StoreStatus,
        missing: &[u32],
        objects: &[PersistentVolume],
    ) -> Option<Vec<(VolumeId, String)>> {
        let missing = missing.iter().map(|number| id(*number)).collect();
        let planned = plan_conditions(&sample_identity(NODE), (status, &missing), objects)?;
        Some(planned.into_iter().map(|(id, condition)| (id, condition.text)).collect())
    }

    #[test]
    fn each_volume_of_the_node_is_abnormal_while_its_store_is_not_served_and_no_other() {
        let elsewhere = sample_volume(3, json!({ "spec": { "csi": { "driver": "other.example" } } }));
        let objects = [volume(1, 1, None), volume(2, 2, None), elsewhere];
        let unserved = StoreStatus::Unserved { fault: StoreFault::Absent, why: "no disk".to_owned() };
        let both = vec![(id(1), "no disk".to_owned()), (id(2), "no disk".to_owned())];
        assert_eq!(plan(&unserved, &[], &objects), Some(both));
        assert_eq!(plan(&served(), &[], &objects), Some(Vec::new()));
        assert_eq!(plan(&StoreStatus::Unknown, &[1], &objects), None, "what was reported stays");
    }

    #[test]
    fn a_volume_missing_in_a_served_store_says_where_it_is_and_what_to_do() {
        let objects = [volume(1, 1, None), volume(2, 2, None), volume(3, 2, Some(2)), volume(4, 1, None)];
        let found = plan(&served(), &[1, 2, 3, 9], &objects).expect("known");
        let texts: Vec<&str> = found.iter().map(|(_, text)| text.as_str()).collect();
        assert_eq!(texts.len(), 3, "{texts:?}");
        for (text, part) in
            texts.iter().zip(["restore it from a backup", "store replace --lost", "delete its claim"])
        {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_condition_is_reported_again_only_when_its_cause_changes() {
        let condition = |fault, text: &str| VolumeCondition {
            cause: ConditionCause::Store(fault),
            text: text.to_owned(),
        };
        assert_eq!(condition(StoreFault::Absent, "unmounted"), condition(StoreFault::Absent, "empty"));
        assert_ne!(condition(StoreFault::Absent, "empty"), condition(StoreFault::Replaced, "empty"));
    }
}

//! The condition of each volume: why no pod can use it.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::PersistentVolume;

use crate::deletion::decide::{VolumeAction, VolumeIgnoreReason, plan_volume};
use crate::id::VolumeId;
use crate::identity::ProvisionerIdentity;
use crate::loss::status::{StoreFault, StoreStatus};
use crate::objects::{is_marked_lost, named_store, volume_in_store};
use crate::scope::StoreScope;
use crate::store_id::StoreIdentity;

/// The reason why no pod can use a volume. Two are the same if their causes are: the text may vary.
#[derive(Debug, Clone)]
pub(crate) struct VolumeCondition {
    cause: ConditionCause,
    /// The text for the user.
    pub(crate) text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConditionCause {
    Store(StoreFault),
    Missing,
    InOtherStore,
    DeclaredLost,
    /// The node does not have the store that it names.
    UnknownStore,
    /// Its limits are not those of its PersistentVolume, and can't be set.
    Limits,
    /// A former process has reported it, and why is not known.
    FormerRun,
}

/// The report about a volume whose condition has changed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ConditionChange {
    /// No pod can use it.
    Abnormal {
        /// The reason.
        condition: VolumeCondition,
        /// True if its PersistentVolume has the mark of a volume that was reported as abnormal.
        is_marked: bool,
    },
    /// Pods can use it again.
    Normal,
}

impl PartialEq for VolumeCondition {
    fn eq(&self, other: &Self) -> bool {
        self.cause == other.cause
    }
}

/// The conditions of those volumes of this node that no pod can use, by PersistentVolume. `missing` are those that the
/// served store does not have, and `unlimited` those whose limits are wrong, with the reason. `None`: it is not known yet.
pub(crate) fn plan_conditions(
    scope: &StoreScope,
    status: &StoreStatus,
    missing: &BTreeSet<VolumeId>,
    unlimited: &BTreeMap<VolumeId, String>,
    objects: impl IntoIterator<Item: Borrow<PersistentVolume>>,
) -> Option<BTreeMap<VolumeId, VolumeCondition>> {
    let identity = &scope.identity;
    let condition = |id: &VolumeId, object: &PersistentVolume| match status {
        StoreStatus::Unknown => None,
        StoreStatus::Unserved { fault, why } => {
            Some(VolumeCondition { cause: ConditionCause::Store(*fault), text: why.clone() })
        }
        StoreStatus::Served(store) if missing.contains(id) => {
            Some(missing_condition(identity, store, object))
        }
        StoreStatus::Served(_) => {
            let text = unlimited.get(id)?.clone();
            Some(VolumeCondition { cause: ConditionCause::Limits, text })
        }
    };
    let of_object = |object: &PersistentVolume| {
        if let Some((id, name)) = scope.volume_of_unknown_store(object) {
            return Some((id, unknown_store_condition(name)));
        }
        let id = volume_in_store(identity, object)?;
        let condition = condition(&id, object)?;
        Some((id, condition))
    };
    let is_known = *status != StoreStatus::Unknown;
    is_known.then(|| objects.into_iter().filter_map(|object| of_object(object.borrow())).collect())
}

/// The volumes of this node that are marked: they were reported as abnormal, and not as normal since.
pub(crate) fn reported_conditions(
    scope: &StoreScope,
    objects: impl IntoIterator<Item: Borrow<PersistentVolume>>,
) -> BTreeMap<VolumeId, VolumeCondition> {
    let identity = &scope.identity;
    let annotation = identity.driver.condition_annotation();
    let id = |object: &PersistentVolume| {
        volume_in_store(identity, object).or_else(|| Some(scope.volume_of_unknown_store(object)?.0))
    };
    let is_marked = |object: &PersistentVolume| {
        object.metadata.annotations.as_ref().is_some_and(|all| all.contains_key(&annotation))
    };
    let marked = objects.into_iter().filter(|object| is_marked(object.borrow()));
    let reported = VolumeCondition { cause: ConditionCause::FormerRun, text: String::new() };
    marked.filter_map(|object| Some((id(object.borrow())?, reported.clone()))).collect()
}

/// The changes from the reported conditions to the wanted ones. A volume in neither has none.
pub(crate) fn plan_condition_changes(
    reported: &BTreeMap<VolumeId, VolumeCondition>,
    wanted: &BTreeMap<VolumeId, VolumeCondition>,
) -> BTreeMap<VolumeId, ConditionChange> {
    // Conditions are equal by their cause: another text of the same cause is not reported again.
    let abnormal = wanted.iter().filter(|(id, condition)| reported.get(id) != Some(condition));
    let abnormal = abnormal.map(|(id, condition)| {
        let is_marked = reported.contains_key(id);
        (id.clone(), ConditionChange::Abnormal { condition: condition.clone(), is_marked })
    });
    let normal = reported.keys().filter(|id| !wanted.contains_key(id));
    abnormal.chain(normal.map(|id| (id.clone(), ConditionChange::Normal))).collect()
}

/// The volume that a PersistentVolume of this node needs; `None` for those of other nodes and drivers, and one that is to
/// be deleted.
pub fn required_volume(identity: &ProvisionerIdentity, object: &PersistentVolume) -> Option<VolumeId> {
    // A volume that is to be deleted may be missing: it is removed before its object.
    let is_required = matches!(
        plan_volume(identity, object),
        VolumeAction::AddFinalizer
            | VolumeAction::Ignore(VolumeIgnoreReason::InUse | VolumeIgnoreReason::Retained)
    );
    is_required.then(|| volume_in_store(identity, object)).flatten()
}

/// The condition of a volume in a store that the node does not have.
fn unknown_store_condition(name: &str) -> VolumeCondition {
    let text = format!(
        "the volume is in store {name:?} of its node (volumeAttributes.storeName), which the node does not have: add it to \
         the stores in the configuration of the node; nothing was deleted"
    );
    VolumeCondition { cause: ConditionCause::UnknownStore, text }
}

/// The condition of a volume that is missing in the served store.
fn missing_condition(
    identity: &ProvisionerIdentity,
    store: &StoreIdentity,
    object: &PersistentVolume,
) -> VolumeCondition {
    let named = named_store(object);
    let (cause, text) = match (&named, store.id()) {
        // The mark comes first: a lost volume names another store, too.
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::objects::STORE_ATTRIBUTE;
    use crate::testing::objects::{NODE, sample_identity, sample_uid, sample_volume};

    fn id(number: u32) -> VolumeId {
        VolumeId::from_uid(&sample_uid(number)).expect("a UUID")
    }

    fn scope(identity: &ProvisionerIdentity) -> StoreScope {
        StoreScope { identity: identity.clone(), names: Default::default() }
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
        let planned =
            plan_conditions(&scope(&sample_identity(NODE)), status, &missing, &BTreeMap::new(), objects)?;
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
    fn a_volume_whose_limits_are_wrong_is_abnormal_unless_it_is_missing() {
        let objects = [volume(1, 1, None), volume(2, 1, None), volume(3, 1, None)];
        let unlimited = BTreeMap::from([(id(1), "no limit".to_owned()), (id(2), "no limit".to_owned())]);
        let missing = BTreeSet::from([id(1)]);
        let found =
            plan_conditions(&scope(&sample_identity(NODE)), &served(), &missing, &unlimited, &objects);
        let found = found.expect("known");
        let texts: Vec<_> = found.into_iter().map(|(id, condition)| (id, condition.text)).collect();
        assert_eq!((texts.len(), &texts[1]), (2, &(id(2), "no limit".to_owned())));
        assert!(texts[0].1.contains("missing"), "{texts:?}");
    }

    #[test]
    fn a_volume_of_a_store_that_the_node_does_not_have_is_abnormal_whatever_the_others_are() {
        let attributes = json!({ STORE_ATTRIBUTE: sample_uid(1), "storeName": "fast" });
        let fast = sample_volume(2, json!({ "spec": { "csi": { "volumeAttributes": attributes } } }));
        let unserved = StoreStatus::Unserved { fault: StoreFault::Absent, why: "no disk".to_owned() };
        for status in [served(), unserved] {
            let found = plan(&status, &[2], std::slice::from_ref(&fast)).expect("known");
            assert!(matches!(&found[..], [(_, text)] if text.contains("in store \"fast\"")), "{found:?}");
        }
    }

    /// Volumes of store 1, some of which were reported as abnormal.
    fn marked_volumes(marked: &[u32], others: impl Iterator<Item = u32>) -> Vec<PersistentVolume> {
        let mark = json!({ sample_identity(NODE).driver.condition_annotation(): "abnormal" });
        let others = others.map(|number| volume(number, 1, None));
        let marked = marked
            .iter()
            .map(|number| sample_volume(*number, json!({ "metadata": { "annotations": mark } })));
        marked.chain(others).collect()
    }

    /// The changes of a process that has just started.
    fn first_changes(
        identity: &ProvisionerIdentity,
        status: &StoreStatus,
        missing: &[u32],
        objects: &[PersistentVolume],
    ) -> BTreeMap<VolumeId, ConditionChange> {
        let missing = missing.iter().map(|number| id(*number)).collect();
        let wanted =
            plan_conditions(&scope(identity), status, &missing, &BTreeMap::new(), objects).expect("known");
        plan_condition_changes(&reported_conditions(&scope(identity), objects), &wanted)
    }

    #[test]
    fn a_new_process_reports_as_normal_exactly_the_volumes_that_were_reported_as_abnormal() {
        let (identity, objects) = (sample_identity(NODE), marked_volumes(&[2, 5], 10..1010));
        let normal = |number| (id(number), ConditionChange::Normal);
        let changes = first_changes(&identity, &served(), &[], &objects);
        assert_eq!(changes, BTreeMap::from([normal(2), normal(5)]));
        let changes = first_changes(&identity, &served(), &[5], &objects);
        assert_eq!(changes.get(&id(2)), Some(&ConditionChange::Normal));
        let missing = changes.get(&id(5));
        assert!(matches!(missing, Some(ConditionChange::Abnormal { is_marked: true, .. })), "{missing:?}");
        assert_eq!(changes.len(), 2);
        let other_node = sample_identity("node-z");
        assert_eq!(first_changes(&other_node, &served(), &[5], &objects), BTreeMap::new());
    }

    #[test]
    fn a_lost_store_marks_what_is_not_marked_and_is_reported_once() {
        let (identity, objects) = (sample_identity(NODE), marked_volumes(&[1], 2..4));
        let lost = StoreStatus::Unserved { fault: StoreFault::Absent, why: "unmounted".to_owned() };
        let changes = first_changes(&identity, &lost, &[], &objects);
        let marked = |number| match changes.get(&id(number)) {
            Some(ConditionChange::Abnormal { is_marked, condition }) if condition.text == "unmounted" => {
                *is_marked
            }
            other => panic!("{other:?}"),
        };
        assert_eq!([1, 2, 3].map(marked), [true, false, false]);
        let wanted = plan_conditions(&scope(&identity), &lost, &BTreeSet::new(), &BTreeMap::new(), &objects)
            .expect("known");
        assert_eq!(plan_condition_changes(&wanted, &wanted), BTreeMap::new());
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

//! Decides the next step of a move, from its record and the PersistentVolume.

use k8s_openapi::api::core::v1::{PersistentVolume, Pod};
use nodekeel_fsquota::Bytes;
use serde::{Deserialize, Serialize};

use crate::claim::manifest::affinity_to;
use crate::id::VolumeId;
use crate::identity::FINALIZER;
use crate::image::VolumeKind;
use crate::name::DriverName;
use crate::objects::{STORE_ATTRIBUTE, named_kind, node_of_volume};
use crate::resize::bound_claim::volume_capacity;

/// Kubernetes keeps a PersistentVolume with it until that is not bound any more.
const PV_PROTECTION: &str = "kubernetes.io/pv-protection";

/// The version of the records.
pub(super) const RECORD_FORMAT: u32 = 1;

/// What a move has done and is to do: the content of its ConfigMap.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct MoveRecord {
    /// [`RECORD_FORMAT`].
    pub(super) format: u32,
    pub(super) namespace: String,
    pub(super) claim: String,
    pub(super) claim_uid: String,
    /// The node that has the volume.
    pub(super) source: String,
    /// The node that gets it.
    pub(super) target: String,
    /// The PersistentVolume as it was, recorded before anything is changed.
    pub(super) volume: Option<PersistentVolume>,
    /// The volume stays where it was.
    pub(super) is_cancelled: bool,
}

impl MoveRecord {
    /// Reads a record of this release.
    pub(crate) fn parse(text: &str) -> Result<Self, serde_json::Error> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        // First, since a newer record may have fields that are unknown here.
        let Version { format } = serde_json::from_str(text)?;
        if format != RECORD_FORMAT {
            let other = format!("its format is {format}, and this release knows {RECORD_FORMAT}");
            return Err(serde::de::Error::custom(other));
        }
        serde_json::from_str(text)
    }
}

/// The next step of a move.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum MoveAction {
    /// Record the PersistentVolume.
    RecordVolume(Box<PersistentVolume>),
    /// Remove the record: nothing was changed.
    Abandon(Option<MoveRejection>),
    /// Retain the data of the PersistentVolume, and annotate it with the move.
    Freeze,
    /// Delete the PersistentVolume: no pod can be scheduled to its node, or mount it, any more.
    Delete,
    /// Remove the finalizers that keep the deleted PersistentVolume.
    RemoveFinalizers,
    /// Copy the data of this PersistentVolume, and at once create the one that [`new_volume`] makes of it.
    Copy(Box<PersistentVolume>),
    /// Create the PersistentVolume where it was.
    Create(Box<PersistentVolume>),
    /// The PersistentVolume is on this node: remove the other copy, and then the record.
    Settle { node: String },
}

/// The reason why a volume is not moved. The message names the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MoveRejection {
    /// The claim has no volume.
    #[error("the claim is not bound: wait until it is, or delete it")]
    NotBound,
    /// The claim is being deleted, or has been.
    #[error("the claim is being deleted, or does not exist any more")]
    ClaimDeleted,
    /// The volume is another driver's, or was not created by the driver.
    #[error("PersistentVolume {name} is not a volume that driver {driver} has created")]
    OtherDriver {
        /// The PersistentVolume.
        name: String,
        /// The driver.
        driver: DriverName,
    },
    /// Block and strict volumes are not moved.
    #[error(
        "a {kind} volume can't be moved: only directories can; copy its data into a new claim with a pod"
    )]
    Image {
        /// The kind.
        kind: String,
    },
    /// The PersistentVolume is being deleted.
    #[error("PersistentVolume {name} is being deleted")]
    Deleting {
        /// The PersistentVolume.
        name: String,
    },
    /// A pod may use the volume.
    #[error(
        "pod {pod} uses the claim on node {node}: delete it, or scale its owner to 0, and repeat the command"
    )]
    InUse {
        /// The pod.
        pod: String,
        /// Its node.
        node: String,
    },
    /// The claim is being moved to another node.
    #[error("the claim is being moved to node {target}: name that node, or cancel the move with --cancel")]
    OtherTarget {
        /// The node.
        target: String,
    },
    /// The move was cancelled, and is not settled.
    #[error("the move was cancelled: repeat it with --cancel, which completes that")]
    Cancelled,
    /// There is no move to cancel.
    #[error("the claim is not being moved")]
    NoMove,
    /// Another claim of the volume was being moved.
    #[error(
        "ConfigMap move-{id} records a move of its volume for another claim: complete or cancel that one"
    )]
    OtherClaim {
        /// The volume.
        id: VolumeId,
    },
    /// Another call has ended the move of this one, or has moved the volume before it.
    #[error(
        "another call has cancelled or completed a move of the claim: repeat the command, if it is still to be moved"
    )]
    Ended,
    /// The PersistentVolume promises nothing that could be promised on the other node.
    #[error("the capacity of PersistentVolume {name} can't be read: correct it by `kubectl edit pv {name}`")]
    NoCapacity {
        /// The PersistentVolume.
        name: String,
    },
    /// Another program keeps the deleted PersistentVolume.
    #[error("finalizer {finalizer} keeps PersistentVolume {name}: wait for its owner, or remove it")]
    Finalizer {
        /// The PersistentVolume.
        name: String,
        /// The finalizer.
        finalizer: String,
    },
    /// The PersistentVolume is neither the one that the move has found nor the one that it has created.
    #[error(
        "another program has created PersistentVolume {name} during the move: set its reclaim policy to Retain, delete \
         it, and repeat the command"
    )]
    OtherVolume {
        /// The PersistentVolume.
        name: String,
    },
}

/// Decides the next step. `uid` is that of the record, `found` the PersistentVolume of the recorded name.
pub(super) fn plan_move(
    driver: &DriverName,
    record: &MoveRecord,
    uid: &str,
    found: Option<&PersistentVolume>,
) -> Result<MoveAction, MoveRejection> {
    let Some(recorded) = &record.volume else {
        if record.is_cancelled {
            return Ok(MoveAction::Abandon(None));
        }
        let Some(found) = found else { return Ok(MoveAction::Abandon(Some(MoveRejection::NotBound))) };
        return Ok(match check_volume(driver, found) {
            Ok((_, node)) if node == record.source => MoveAction::RecordVolume(Box::new(found.clone())),
            Ok(_) => MoveAction::Abandon(Some(MoveRejection::Ended)),
            Err(rejection) => MoveAction::Abandon(Some(rejection)),
        });
    };
    let Some(found) = found else {
        return Ok(match record.is_cancelled {
            true => MoveAction::Create(Box::new(new_volume(driver, recorded, uid, None))),
            false => MoveAction::Copy(Box::new(recorded.clone())),
        });
    };
    let name = || found.metadata.name.clone().unwrap_or_default();
    let annotations = found.metadata.annotations.as_ref();
    let is_ours = annotations.and_then(|all| all.get(&driver.move_annotation())).is_some_and(|of| of == uid);
    if found.metadata.uid != recorded.metadata.uid {
        // Created by this move: the name is free only once, so this is where the data are used.
        return match node_of_volume(found) {
            Some(node) if is_ours => Ok(MoveAction::Settle { node: node.to_owned() }),
            _ => Err(MoveRejection::OtherVolume { name: name() }),
        };
    }
    let policy = found.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    let (is_frozen, is_deleting) =
        (is_ours && policy == Some("Retain"), found.metadata.deletion_timestamp.is_some());
    match (is_frozen, is_deleting) {
        // An expansion may have ended since it was recorded, say; only what is recorded is created again.
        (true, _) if !is_same(driver, recorded, &unfrozen(recorded, found)) => {
            Ok(MoveAction::RecordVolume(Box::new(unfrozen(recorded, found))))
        }
        (true, false) => Ok(MoveAction::Delete),
        (true, true) => match other_finalizer(found) {
            Some(finalizer) => Err(MoveRejection::Finalizer { name: name(), finalizer }),
            None => Ok(MoveAction::RemoveFinalizers),
        },
        // Its data may be being removed: only a bound one is frozen, and this one was not changed.
        (false, _) if !is_bound(found) => Ok(MoveAction::Abandon(Some(MoveRejection::ClaimDeleted))),
        // What is created later is as recorded: its policy or its size may have been changed since.
        (false, _) if found.metadata.resource_version != recorded.metadata.resource_version => {
            Ok(MoveAction::RecordVolume(Box::new(found.clone())))
        }
        (false, _) => Ok(MoveAction::Freeze),
    }
}

/// Checks that a PersistentVolume can be moved, and returns its id and node.
pub(super) fn check_volume<'a>(
    driver: &DriverName,
    volume: &'a PersistentVolume,
) -> Result<(VolumeId, &'a str), MoveRejection> {
    let name = volume.metadata.name.clone().unwrap_or_default();
    let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
    let handle = csi.filter(|csi| csi.driver == driver.as_str()).map(|csi| csi.volume_handle.as_str());
    let id = handle.filter(|handle| **handle == name).and_then(|handle| handle.parse().ok());
    let Some((id, node)) = id.zip(node_of_volume(volume)) else {
        return Err(MoveRejection::OtherDriver { name, driver: driver.clone() });
    };
    if volume.metadata.deletion_timestamp.is_some() {
        return Err(MoveRejection::Deleting { name });
    }
    if !is_bound(volume) {
        return Err(MoveRejection::NotBound);
    }
    if volume_capacity(volume) == Bytes(0) {
        return Err(MoveRejection::NoCapacity { name });
    }
    match named_kind(volume) {
        Ok(VolumeKind::Directory) => Ok((id, node)),
        Ok(kind) => Err(MoveRejection::Image { kind: kind.to_string() }),
        Err(error) => Err(MoveRejection::Image { kind: error.to_string() }),
    }
}

/// Finds a pod that may have the claim's volume mounted, or will mount it: one that has a node. A pod without one waits for
/// the volume, wherever it is.
pub(super) fn find_user(pods: &[Pod], claim: &str) -> Option<MoveRejection> {
    pods.iter().find_map(|pod| {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let spec = pod.spec.as_ref()?;
        let node = spec.node_name.as_deref().filter(|node| !node.is_empty())?;
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let uses = spec.volumes.iter().flatten().any(|volume| match &volume.persistent_volume_claim {
            Some(source) => source.claim_name == claim,
            None => volume.ephemeral.is_some() && format!("{name}-{}", volume.name) == claim,
        });
        let rejection = || MoveRejection::InUse { pod: name.to_owned(), node: node.to_owned() };
        (uses && !matches!(phase, Some("Succeeded" | "Failed"))).then(rejection)
    })
}

fn is_bound(volume: &PersistentVolume) -> bool {
    volume.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound")
}

fn other_finalizer(volume: &PersistentVolume) -> Option<String> {
    let mut all = volume.metadata.finalizers.iter().flatten();
    all.find(|finalizer| ![PV_PROTECTION, FINALIZER].contains(&finalizer.as_str())).cloned()
}

/// A PersistentVolume that was frozen, with its policy of before.
fn unfrozen(recorded: &PersistentVolume, found: &PersistentVolume) -> PersistentVolume {
    let mut volume = found.clone();
    let policy = recorded.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.clone());
    volume.spec.get_or_insert_default().persistent_volume_reclaim_policy = policy;
    volume
}

/// Returns whether the same is created of both. Finalizers do not count: others remove them while an object is being deleted.
fn is_same(driver: &DriverName, a: &PersistentVolume, b: &PersistentVolume) -> bool {
    let [a, b] = [a, b].map(|volume| {
        let mut volume = new_volume(driver, volume, "", None);
        volume.metadata.finalizers = None;
        volume
    });
    a == b
}

/// The PersistentVolume as it was, on another node and in its store or where it was, to be created.
pub(super) fn new_volume(
    driver: &DriverName,
    recorded: &PersistentVolume,
    uid: &str,
    target: Option<(&str, &str)>,
) -> PersistentVolume {
    let mut volume = PersistentVolume { status: None, ..recorded.clone() };
    let old = std::mem::take(&mut volume.metadata);
    let metadata = &mut volume.metadata;
    (metadata.name, metadata.labels, metadata.annotations) = (old.name, old.labels, old.annotations);
    metadata.annotations.get_or_insert_default().insert(driver.move_annotation(), uid.to_owned());
    let ours = |finalizer: &String| finalizer == FINALIZER;
    metadata.finalizers = old.finalizers.map(|all| all.into_iter().filter(ours).collect());
    let Some((node, store)) = target else { return volume };
    let spec = volume.spec.get_or_insert_default();
    if let Some(csi) = &mut spec.csi {
        csi.volume_attributes.get_or_insert_default().insert(STORE_ATTRIBUTE.to_owned(), store.to_owned());
    }
    spec.node_affinity = Some(affinity_to(driver, node));
    volume
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::objects::{NODE, merge_patch, patched, sample_identity, sample_volume};

    const MOVE: &str = "move-uid";

    fn driver() -> DriverName {
        sample_identity(NODE).driver
    }

    fn record(volume: Option<PersistentVolume>) -> MoveRecord {
        MoveRecord {
            namespace: "default".into(),
            claim: "claim-1".into(),
            claim_uid: "1".into(),
            format: RECORD_FORMAT,
            source: NODE.into(),
            target: "node-b".into(),
            volume,
            is_cancelled: false,
        }
    }

    fn bound(patch: serde_json::Value) -> PersistentVolume {
        let plain = json!({ "status": { "phase": "Bound" }, "metadata": { "uid": "first" } });
        patched(&sample_volume(1, plain), patch)
    }

    fn frozen(patch: serde_json::Value) -> PersistentVolume {
        let plain = json!({
            "metadata": { "annotations": { driver().move_annotation(): MOVE } },
            "spec": { "persistentVolumeReclaimPolicy": "Retain" },
        });
        patched(&bound(plain), patch)
    }

    fn plan(record: &MoveRecord, found: Option<&PersistentVolume>) -> Result<MoveAction, MoveRejection> {
        plan_move(&driver(), record, MOVE, found)
    }

    #[test]
    fn a_move_goes_step_by_step_and_a_cancelled_one_back() {
        let recorded = record(Some(bound(json!({}))));
        let deleting = json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } });
        let records = |volume: PersistentVolume| Ok(MoveAction::RecordVolume(Box::new(volume)));
        assert_eq!(plan(&record(None), Some(&bound(json!({})))), records(bound(json!({}))));
        let elsewhere = MoveRecord { source: "node-c".into(), ..record(None) };
        let ended = MoveAction::Abandon(Some(MoveRejection::Ended));
        assert_eq!(plan(&elsewhere, Some(&bound(json!({})))), Ok(ended), "another move was faster");
        for is_cancelled in [false, true] {
            let recorded = MoveRecord { is_cancelled, ..recorded.clone() };
            assert_eq!(plan(&recorded, Some(&bound(json!({})))), Ok(MoveAction::Freeze));
            let changed = bound(json!({ "metadata": { "resourceVersion": "later" } }));
            assert_eq!(plan(&recorded, Some(&changed)), records(changed.clone()));
            assert_eq!(plan(&recorded, Some(&frozen(json!({})))), Ok(MoveAction::Delete));
            // It was expanded since, and is to be created with that and with its policy.
            for frozen in [frozen(json!({})), frozen(deleting.clone())] {
                let larger = patched(&frozen, json!({ "spec": { "capacity": { "storage": "80Mi" } } }));
                let Ok(MoveAction::RecordVolume(volume)) = plan(&recorded, Some(&larger)) else {
                    panic!("it is recorded")
                };
                let spec = volume.spec.as_ref().expect("a spec");
                assert_eq!(spec.persistent_volume_reclaim_policy.as_deref(), Some("Delete"));
                let again = MoveRecord { volume: Some(*volume.clone()), ..recorded.clone() };
                assert!(!matches!(plan(&again, Some(&larger)), Ok(MoveAction::RecordVolume(_))));
            }
            assert_eq!(plan(&recorded, Some(&frozen(deleting.clone()))), Ok(MoveAction::RemoveFinalizers));
            // Wherever it was created, it is used there.
            let created = frozen(json!({ "metadata": { "uid": "second" } }));
            let settle = MoveAction::Settle { node: NODE.to_owned() };
            assert_eq!(plan(&recorded, Some(&created)), Ok(settle));
        }
        let Ok(MoveAction::Copy(volume)) = plan(&recorded, None) else { panic!("it is copied") };
        let created = new_volume(&driver(), &volume, MOVE, Some(("node-b", "store-b")));
        assert_eq!(node_of_volume(&created), Some("node-b"));
        let value = serde_json::to_value(&created).expect("JSON");
        assert_eq!(value["spec"]["csi"]["volumeAttributes"]["store"], "store-b");
        let old = serde_json::to_value(bound(json!({}))).expect("JSON");
        for same in ["claimRef", "persistentVolumeReclaimPolicy", "capacity", "accessModes"] {
            assert_eq!(value["spec"][same], old["spec"][same], "{same}");
        }
        assert!(value["metadata"].get("uid").is_none() && value.get("status").is_none(), "{value}");
        let cancelled = MoveRecord { is_cancelled: true, ..recorded };
        let Ok(MoveAction::Create(created)) = plan(&cancelled, None) else { panic!("it is created") };
        assert_eq!(node_of_volume(&created), Some(NODE));
        assert_eq!(
            plan(&MoveRecord { is_cancelled: true, ..record(None) }, None),
            Ok(MoveAction::Abandon(None))
        );
    }

    #[test]
    fn what_is_not_of_the_move_is_left_alone() {
        let recorded = record(Some(bound(json!({}))));
        let rejected = |volume: PersistentVolume| plan(&recorded, Some(&volume)).expect_err("rejected");
        let foreign = rejected(bound(json!({ "metadata": { "uid": "third" } })));
        assert!(matches!(foreign, MoveRejection::OtherVolume { .. }), "{foreign}");
        let released = bound(json!({ "status": { "phase": "Released" } }));
        let abandoned = MoveAction::Abandon(Some(MoveRejection::ClaimDeleted));
        assert_eq!(plan(&recorded, Some(&released)), Ok(abandoned));
        let kept = frozen(
            json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["x/y"] } }),
        );
        assert!(matches!(rejected(kept), MoveRejection::Finalizer { .. }));
        // Retained no more: it is frozen again before it is deleted.
        let changed = frozen(json!({ "spec": { "persistentVolumeReclaimPolicy": "Delete" } }));
        assert_eq!(plan(&recorded, Some(&changed)), Ok(MoveAction::Freeze));
        let unsuitable = plan(&record(None), None);
        assert_eq!(unsuitable, Ok(MoveAction::Abandon(Some(MoveRejection::NotBound))));
        let block = bound(json!({ "spec": { "csi": { "volumeAttributes": { "kind": "block" } } } }));
        let rejection = check_volume(&driver(), &block).expect_err("a device");
        assert!(rejection.to_string().starts_with("a block volume can't be moved"), "{rejection}");
    }

    #[test]
    fn a_record_is_read_as_it_was_written_and_one_of_another_release_is_named() {
        let golden = include_str!("../../testdata/golden/move.json");
        let recorded = MoveRecord::parse(golden).expect("a record");
        assert_eq!(recorded, MoveRecord { is_cancelled: true, ..record(Some(bound(json!({})))) });
        let written = serde_json::to_string(&recorded).expect("JSON");
        assert_eq!(MoveRecord::parse(&written).expect("a record"), recorded);
        let newer = MoveRecord::parse(r#"{ "format": 2, "more": true }"#).expect_err("of a newer release");
        assert!(newer.to_string().contains("its format is 2"), "{newer}");
        for bad in ["", "{}", "{\"format\":1}"] {
            MoveRecord::parse(bad).expect_err("no record");
        }
    }

    #[test]
    fn a_pod_uses_the_claim_once_it_has_a_node_and_until_it_has_ended() {
        let find = |patch: serde_json::Value| {
            let mut pod = json!({
                "metadata": { "name": "p" },
                "spec": { "nodeName": "a", "containers": [], "volumes": [
                    { "name": "data", "persistentVolumeClaim": { "claimName": "c" } },
                    { "name": "own", "ephemeral": {} },
                ] },
            });
            merge_patch(&mut pod, patch);
            let pods = [serde_json::from_value(pod).expect("a pod")];
            (
                find_user(&pods, "c").is_some(),
                find_user(&pods, "p-own").is_some(),
                find_user(&pods, "d").is_some(),
            )
        };
        assert_eq!(find(json!({})), (true, true, false));
        assert_eq!(find(json!({ "spec": { "nodeName": null } })), (false, false, false));
        assert_eq!(find(json!({ "status": { "phase": "Succeeded" } })), (false, false, false));
    }
}

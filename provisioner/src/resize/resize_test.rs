//! Expansions and modifications step by step, in any order of edits, kills, other writers and free room.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimStatus};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};
use k8s_openapi::jiff::Timestamp;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits, QuotaUsage};
use proptest::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::quantity::{format_quantity, parse_quantity};
use crate::resize::bound_claim::{BoundClaim, volume_capacity};
use crate::resize::claim_status;
use crate::resize::claim_status::{
    INFEASIBLE, ModifyState, modify_finished, modify_marked, resize_failed, resize_finished, resize_started,
};
use crate::resize::expansion::{ExpansionAction, needs_expansion, plan_expansion};
use crate::resize::modification::{
    ModificationAction, needs_modification, plan_modification, rejected_state,
};
use crate::store::VolumeUsage;
use crate::testing::objects::{
    DRIVER, NODE, merge_patch, sample_claim, sample_class, sample_identity, sample_uid, sample_volume,
};

/// Bytes of a MiB.
pub(crate) const MIB: u64 = 1 << 20;

/// What the API server and the store have, and what is free on the node.
pub(crate) struct ResizeWorld {
    pub(crate) claim: PersistentVolumeClaim,
    pub(crate) volume: PersistentVolume,
    pub(crate) class: StorageClass,
    pub(crate) usage: VolumeUsage,
    /// The largest byte limit that fits.
    pub(crate) room: u64,
}

pub(crate) fn merged<T: DeserializeOwned + serde::Serialize>(object: &T, patch: Value) -> T {
    let mut value = serde_json::to_value(object).expect("an object");
    merge_patch(&mut value, patch);
    serde_json::from_value(value).expect("an object of its kind")
}

/// A bound claim of 8 MiB with its volume.
pub(crate) fn bound_claim(patch: Value) -> PersistentVolumeClaim {
    let bound = json!({
        "spec": {
            "volumeName": format!("pvc-{}", sample_uid(1)),
            "resources": { "requests": { "storage": "8Mi" } },
        },
        "status": { "phase": "Bound", "capacity": { "storage": "8Mi" } },
    });
    merged(&sample_claim(1, bound), patch)
}

fn attributes_class(name: &str) -> Option<VolumeAttributesClass> {
    let class = |parameters: Value, driver: &str| {
        let object = json!({ "metadata": { "name": name }, "driverName": driver, "parameters": parameters });
        serde_json::from_value(object).expect("a class")
    };
    match name {
        "few" => Some(class(json!({ "inodes": "100" }), DRIVER)),
        "many" => Some(class(json!({ "inodes": "1M" }), DRIVER)),
        "foreign" => Some(class(json!({ "inodes": "1M" }), "other.example")),
        "broken" => Some(class(json!({ "iops": "5" }), DRIVER)),
        "secret" => Some(class(json!({ "inodes": "1M", "csi.storage.k8s.io/x": "y" }), DRIVER)),
        "empty" => Some(class(json!({}), DRIVER)),
        _ => None,
    }
}

impl ResizeWorld {
    pub(crate) fn new() -> Self {
        let limits = QuotaLimits { bytes: Some(Bytes(8 * MIB)), inodes: Some(Inodes(4096)) };
        Self {
            claim: bound_claim(json!({})),
            volume: sample_volume(
                1,
                json!({ "spec": { "capacity": { "storage": "8Mi" } }, "status": { "phase": "Bound" } }),
            ),
            class: sample_class(json!({})),
            usage: VolumeUsage { limits, usage: QuotaUsage { bytes: Bytes(0), inodes: Inodes(1) } },
            room: u64::MAX,
        }
    }

    /// The volume of the claim is a strict one.
    pub(crate) fn strict() -> Self {
        let mut world = Self::new();
        let csi = json!({ "volumeAttributes": { "kind": "ext4" } });
        world.volume = merged(&world.volume, json!({ "spec": { "csi": csi } }));
        world.class = sample_class(json!({ "parameters": { "strict": "true" } }));
        world.usage.limits.inodes = None;
        world
    }

    pub(crate) fn status(&self) -> PersistentVolumeClaimStatus {
        self.claim.status.clone().expect("a status")
    }

    fn patch_status(&mut self, patch: Value) {
        self.claim = merged(&self.claim, json!({ "status": patch }));
    }

    pub(crate) fn capacity(&self) -> u64 {
        parse_quantity(&self.status().capacity.expect("a capacity")["storage"].0).expect("bytes")
    }

    fn request(&self) -> Result<u64, crate::quantity::QuantityError> {
        let resources = self.claim.spec.clone().and_then(|spec| spec.resources).expect("resources");
        parse_quantity(&resources.requests.expect("requests")["storage"].0)
    }

    pub(crate) fn set_request(&mut self, size: &str) {
        let requests = json!({ "spec": { "resources": { "requests": { "storage": size } } } });
        self.claim = merged(&self.claim, requests);
    }

    pub(crate) fn set_attributes(&mut self, name: Value) {
        self.claim = merged(&self.claim, json!({ "spec": { "volumeAttributesClassName": name } }));
    }

    fn set_limits(&mut self, limits: QuotaLimits) {
        let promised = volume_capacity(&self.volume).0.max(self.capacity());
        let bytes = limits.bytes.expect("a limit").0;
        assert!(bytes >= promised, "a limit of {bytes} is less than {promised}, which is promised");
        assert!(limits.bytes >= Some(self.usage.usage.bytes), "data are above the limit");
        match self.usage.limits {
            QuotaLimits { inodes: Some(_), .. } => {
                assert!(limits.inodes >= Some(self.usage.usage.inodes), "files are above the limit");
            }
            image => {
                assert_eq!(limits.inodes, None, "an image has no inode limit");
                assert!(limits.bytes >= image.bytes, "an image never shrinks");
            }
        }
        self.usage.limits = limits;
    }

    fn observed<'a>(&'a self, attributes: Option<&'a VolumeAttributesClass>) -> BoundClaim<'a> {
        let (claim, volume, class) = (&self.claim, &self.volume, Some(&self.class));
        BoundClaim { claim, volume, class, attributes, usage: self.usage }
    }

    /// Does the next step of an expansion. `false`: it has ended, or can't go on.
    pub(crate) fn expand_step(&mut self) -> bool {
        let (status, now) = (self.status(), Timestamp::UNIX_EPOCH);
        match plan_expansion(&self.observed(None)) {
            ExpansionAction::Ignore => return false,
            ExpansionAction::MarkInProgress(size) => self.patch_status(resize_started(&status, size, now)),
            ExpansionAction::SetLimits(limits) if limits.bytes.is_some_and(|bytes| bytes.0 > self.room) => {
                if let Some(patch) = resize_failed(&status, "full", INFEASIBLE, now) {
                    self.patch_status(patch);
                }
                return false;
            }
            ExpansionAction::SetLimits(limits) => self.set_limits(limits),
            ExpansionAction::SetCapacity(size) => {
                let capacity = json!({ "spec": { "capacity": { "storage": format_quantity(size.0) } } });
                self.volume = merged(&self.volume, capacity);
            }
            ExpansionAction::Finish(size) => {
                assert!(size.0 >= self.capacity(), "the capacity in the status is never lowered");
                self.patch_status(resize_finished(&status, size, now));
            }
            ExpansionAction::Reject(_) => {
                if let Some(patch) = resize_failed(&status, "invalid", INFEASIBLE, now) {
                    self.patch_status(patch);
                }
                return false;
            }
        }
        true
    }

    /// Does the next step of a modification. `false`: it has ended, or can't go on.
    pub(crate) fn modify_step(&mut self) -> bool {
        let (status, now) = (self.status(), Timestamp::UNIX_EPOCH);
        let attributes = self.observed(None).wanted_attributes().and_then(attributes_class);
        match plan_modification(&sample_identity(NODE), &self.observed(attributes.as_ref())) {
            ModificationAction::Ignore => return false,
            ModificationAction::MarkInProgress(name) => {
                let patch = modify_marked(&status, ModifyState::InProgress, &name, "", now);
                self.patch_status(patch.expect("not marked yet"));
            }
            ModificationAction::SetLimits(limits) => self.set_limits(limits),
            ModificationAction::SetClass(name) => {
                self.volume = merged(&self.volume, json!({ "spec": { "volumeAttributesClassName": name } }));
            }
            ModificationAction::Finish(name) => {
                self.patch_status(modify_finished(&status, name.as_deref(), now));
            }
            ModificationAction::Reject(rejection) => {
                let (state, class) = (rejected_state(&rejection), rejection.class());
                if let Some(patch) = modify_marked(&status, state, class, &rejection.to_string(), now) {
                    self.patch_status(patch);
                }
                return false;
            }
        }
        true
    }

    pub(crate) fn settle(&mut self) {
        for step in [Self::expand_step, Self::modify_step] {
            assert!((0..20).any(|_| !step(self)), "it ends");
        }
    }

    /// Asserts that all four agree on a size, and that nothing is in progress.
    pub(crate) fn assert_expanded(&self, size: u64) {
        assert_eq!((self.capacity(), volume_capacity(&self.volume)), (size, Bytes(size)));
        assert_eq!(self.usage.limits.bytes, Some(Bytes(size)));
        let status = self.status();
        assert!(claim_status::resize_state(&status).is_none(), "{status:?}");
        assert!(!claim_status::has_resize_condition(&status), "{status:?}");
        assert!(!needs_expansion(&self.claim));
    }
}

/// What happens to a claim.
#[derive(Debug, Clone)]
enum ResizeOp {
    /// The user requests this many MiB; the API server rejects less than the status has.
    Request(u64),
    /// The user names this class, or none.
    Attributes(Option<&'static str>),
    /// The provisioner takes so many steps, and is killed.
    Steps(usize),
    /// A pod writes up to this many MiB and files.
    Write(u64, u64),
    /// This many MiB fit.
    Room(u64),
    /// Another client removes what is in progress from the status, or adds a foreign state.
    Forget(bool),
}

fn op_strategy() -> impl Strategy<Value = ResizeOp> {
    let class = prop::sample::select(vec![
        None,
        Some("few"),
        Some("many"),
        Some("missing"),
        Some("foreign"),
        Some("broken"),
    ]);
    prop_oneof![
        4 => (1_u64..200).prop_map(ResizeOp::Request),
        2 => class.prop_map(ResizeOp::Attributes),
        6 => (0_usize..6).prop_map(ResizeOp::Steps),
        2 => (0_u64..200, 1_u64..300).prop_map(|(bytes, files)| ResizeOp::Write(bytes, files)),
        2 => (8_u64..200).prop_map(ResizeOp::Room),
        1 => any::<bool>().prop_map(ResizeOp::Forget),
    ]
}

impl ResizeWorld {
    fn apply_op(&mut self, op: ResizeOp) {
        match op {
            ResizeOp::Request(mib) => {
                let is_lower = self.request().is_ok_and(|request| mib * MIB < request);
                if !is_lower || mib * MIB > self.capacity() {
                    self.set_request(&format!("{mib}Mi"));
                }
            }
            ResizeOp::Attributes(name) => {
                if name.is_some() || self.status().current_volume_attributes_class_name.is_none() {
                    self.set_attributes(json!(name));
                }
            }
            ResizeOp::Steps(count) => {
                for _ in 0..count {
                    let _ = self.expand_step() || self.modify_step();
                }
            }
            ResizeOp::Write(mib, files) => {
                let limits = self.usage.limits;
                let bytes = Bytes(mib * MIB).min(limits.bytes.expect("a limit"));
                self.usage.usage.bytes = self.usage.usage.bytes.max(bytes);
                // Files in a strict volume are not those of its directory.
                let files = limits.inodes.map_or(Inodes(0), |limit| limit.min(Inodes(files)));
                self.usage.usage.inodes = self.usage.usage.inodes.max(files);
            }
            ResizeOp::Room(mib) => self.room = mib * MIB,
            ResizeOp::Forget(true) => self.patch_status(json!({
                "allocatedResources": null,
                "allocatedResourceStatuses": null,
                "modifyVolumeStatus": null,
                "conditions": null,
            })),
            ResizeOp::Forget(false) => {
                self.patch_status(json!({ "allocatedResourceStatuses": { "storage": "NodeResizePending" } }));
            }
        }
    }
}

proptest! {
    #[test]
    fn any_sequence_ends_with_the_requested_size_or_says_why_not(
        ops in prop::collection::vec(op_strategy(), 0..40), is_strict: bool,
    ) {
        let mut world = if is_strict { ResizeWorld::strict() } else { ResizeWorld::new() };
        ops.into_iter().for_each(|op| world.apply_op(op));
        world.settle();
        let (request, status) = (world.request().expect("a size"), world.status());
        if needs_expansion(&world.claim) {
            prop_assert_eq!(claim_status::resize_state(&status), Some("ControllerResizeInfeasible"));
            prop_assert!(claim_status::has_resize_condition(&status));
            prop_assert!(request > world.room || world.usage.limits.bytes > Some(Bytes(world.room)));
        } else {
            prop_assert!(world.capacity() >= request);
        }
        if needs_modification(&world.claim) {
            let state = claim_status::modify_state(&status).map(|(state, _)| state);
            prop_assert!(matches!(state, Some("Pending" | "Infeasible")), "{status:?}");
            prop_assert!(claim_status::has_modify_condition(&status));
        }
        world.room = u64::MAX;
        world.settle();
        prop_assert!(!needs_expansion(&world.claim));
        let size = world.capacity();
        prop_assert!(size >= request);
        world.assert_expanded(size);
    }
}

//! The life of a claim in each scenario.

use std::fs;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{DeleteParams, Patch, PatchParams};
use nodekeel_provisioner::{DriverName, FINALIZER, SELECTED_NODE};
use serde_json::{Value, json};

use super::ClaimScenario;
use super::leak_counts::LeakCounts;
use super::matrix::IMMEDIATE_CLASS;
use super::run::{CrashRun, MAX_BYTES};
use crate::cluster::{DRIVER, claims_api, create_object, volumes_api, wait_object};

impl CrashRun {
    /// Creates a claim, uses its volume and deletes both.
    pub(super) async fn run_scenario(&mut self, scenario: ClaimScenario) -> LeakCounts {
        let claim = self.create_claim(scenario).await;
        let volume = format!("pvc-{}", claim.metadata.uid.as_deref().expect("a UID"));
        let doubles = match scenario {
            ClaimScenario::TooLarge => self.wait_rejected().await,
            _ => self.use_volume(scenario, &volume).await,
        };
        let (claims, volumes) = (claims_api(&self.client), volumes_api(&self.client));
        let last = match scenario {
            ClaimScenario::Rebound => self.rebind_volume(&volume).await,
            _ => self.name.clone(),
        };
        claims.delete(&last, &DeleteParams::default()).await.expect("the claim is deleted");
        self.wait_through_kill(wait_object(&volumes, &volume, |volume| volume.is_none())).await;
        if self.kills == 0 {
            self.wait_for_kill().await;
        }
        self.terminate().await;
        self.count_leftovers(doubles).await
    }

    async fn create_claim(&self, scenario: ClaimScenario) -> PersistentVolumeClaim {
        let annotations = match scenario {
            ClaimScenario::Immediate => json!({}),
            _ => json!({ SELECTED_NODE: self.program.node }),
        };
        let claim = json!({
            "metadata": { "name": self.name, "annotations": annotations },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": if scenario == ClaimScenario::TooLarge { "1Gi" } else { "1Mi" } } },
                "storageClassName": if scenario == ClaimScenario::Immediate { IMMEDIATE_CLASS } else { "nodekeel" },
            },
        });
        create_object(&claims_api(&self.client), claim).await
    }

    /// Waits until the node of the claim is deselected.
    async fn wait_rejected(&mut self) -> usize {
        let is_free = |claim: Option<&PersistentVolumeClaim>| {
            let annotations = claim.and_then(|claim| claim.metadata.annotations.as_ref());
            annotations.is_none_or(|all| !all.contains_key(SELECTED_NODE))
        };
        let (claims, name) = (claims_api(&self.client), self.name.clone());
        self.wait_through_kill(wait_object(&claims, &name, is_free)).await;
        self.program.list_names("volumes").len()
    }

    /// Waits until the claim is bound, uses its volume, and returns the number of surplus volumes.
    async fn use_volume(&mut self, scenario: ClaimScenario, volume: &str) -> usize {
        let (claims, volumes, name) =
            (claims_api(&self.client), volumes_api(&self.client), self.name.clone());
        self.wait_through_kill(wait_object(&claims, &name, is_bound)).await;
        let file = self.program.base.path().join("volumes").join(volume).join("file");
        fs::write(&file, "data").expect("the volume is writable");
        if scenario == ClaimScenario::FinalizerRemoved {
            let strip = Patch::Merge(json!({ "metadata": { "finalizers": [] } }));
            volumes.patch(volume, &PatchParams::default(), &strip).await.expect("a patch");
            let is_protected = |volume: Option<&PersistentVolume>| {
                volume.is_some_and(|volume| {
                    volume.metadata.finalizers.iter().flatten().any(|it| it == FINALIZER)
                })
            };
            self.wait_through_kill(wait_object(&volumes, volume, is_protected)).await;
        }
        if scenario == ClaimScenario::Expanded {
            self.expand_volume(volume).await;
        }
        assert_eq!(fs::read_to_string(&file).expect("the file exists"), "data");
        let count = self.count_volumes().await;
        count.max(self.program.list_names("volumes").len()) - 1
    }

    /// Requests more than possible, and then less.
    async fn expand_volume(&mut self, volume: &str) {
        let (claims, name) = (claims_api(&self.client), self.name.clone());
        let request = async |size: &str| {
            let patch = json!({ "spec": { "resources": { "requests": { "storage": size } } } });
            claims.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await.expect("a patch");
        };
        request("1Gi").await;
        let is_infeasible = |claim: Option<&PersistentVolumeClaim>| {
            let status = claim.and_then(|claim| claim.status.as_ref());
            let states = status.and_then(|status| status.allocated_resource_statuses.as_ref());
            states.is_some_and(|states| states["storage"] == "ControllerResizeInfeasible")
        };
        self.wait_through_kill(wait_object(&claims, &name, is_infeasible)).await;
        request(MAX_BYTES).await;
        let is_expanded = |claim: Option<&PersistentVolumeClaim>| {
            let status = claim.and_then(|claim| claim.status.as_ref());
            status.is_some_and(|status| {
                status.capacity.as_ref().is_some_and(|capacity| capacity["storage"].0 == "2Mi")
                    && status.allocated_resource_statuses.is_none()
                    && status.conditions.is_none()
            })
        };
        self.wait_through_kill(wait_object(&claims, &name, is_expanded)).await;
        let volume = volumes_api(&self.client).get(volume).await.expect("the volume");
        let capacity = volume.spec.and_then(|spec| spec.capacity).expect("a capacity");
        assert_eq!(capacity["storage"].0, "2Mi");
        let limits: Vec<_> = self.program.project_names();
        assert_eq!(limits.len(), 1, "one volume has limits");
        let limits = fs::read_to_string(self.program.quota_dir.path().join(&limits[0])).expect("the limits");
        assert_eq!(limits, format!("{MAX_BYTES} 1024"));
    }

    /// Retains the volume for a second claim, which is returned, and has it deleted with that.
    async fn rebind_volume(&mut self, volume: &str) -> String {
        let (claims, volumes) = (claims_api(&self.client), volumes_api(&self.client));
        let patch = async |patch: Value| {
            volumes.patch(volume, &PatchParams::default(), &Patch::Merge(patch)).await.expect("a patch");
        };
        patch(json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } })).await;
        claims.delete(&self.name, &DeleteParams::default()).await.expect("the claim is deleted");
        let is_released = |volume: Option<&PersistentVolume>| {
            volume.and_then(|volume| volume.status.as_ref()?.phase.as_deref()) == Some("Released")
        };
        wait_object(&volumes, volume, is_released).await;
        patch(json!({ "spec": { "claimRef": null } })).await;
        let second = format!("{}-second", self.name);
        let claim = json!({
            "metadata": { "name": second },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": "1Mi" } },
                "storageClassName": "nodekeel",
                "volumeName": volume,
            },
        });
        let claim = create_object(&claims, claim).await;
        let annotation = DriverName::try_new(DRIVER).expect("a driver name").claim_annotation();
        let is_recorded = |volume: Option<&PersistentVolume>| {
            let annotations = volume.and_then(|volume| volume.metadata.annotations.as_ref());
            annotations.and_then(|all| all.get(&annotation)) == claim.metadata.uid.as_ref()
        };
        self.wait_through_kill(wait_object(&volumes, volume, is_recorded)).await;
        patch(json!({ "spec": { "persistentVolumeReclaimPolicy": "Delete" } })).await;
        second
    }
}

pub(super) fn is_bound(claim: Option<&PersistentVolumeClaim>) -> bool {
    claim.and_then(|claim| claim.status.as_ref()?.phase.as_deref()) == Some("Bound")
}

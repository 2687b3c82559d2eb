//! The life of a claim in each scenario.

use std::fs;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use nodekeel_provisioner::{DriverName, FINALIZER, SELECTED_NODE};
use serde_json::{Value, json};

use super::ClaimScenario;
use super::matrix::IMMEDIATE_CLASS;
use super::run::{CrashRun, LeakCounts, MAX_BYTES};
use crate::client_cluster::{
    DRIVER, annotation, claim_manifest, claims_api, create_claim, delete_claim, has_capacity, patch_claim,
    patch_volume, volume_name, volumes_api, wait_bound, wait_object, wait_phase, wait_volume_gone,
};

impl CrashRun {
    /// Creates a claim, uses its volume and deletes both.
    pub(super) async fn run_scenario(&mut self, scenario: ClaimScenario) -> LeakCounts {
        let client = self.client.clone();
        let size = if scenario == ClaimScenario::TooLarge { "1Gi" } else { "1Mi" };
        let mut patch = json!({ "spec": { "resources": { "requests": { "storage": size } } } });
        if scenario == ClaimScenario::Immediate {
            patch["metadata"] = json!({ "annotations": null });
            patch["spec"]["storageClassName"] = IMMEDIATE_CLASS.into();
        }
        let claim = self.create_claim(&self.name, patch).await;
        let volume = volume_name(&claim);
        let doubles = match scenario {
            ClaimScenario::TooLarge => self.wait_rejected().await,
            _ => self.use_volume(scenario, &volume).await,
        };
        let last = match scenario {
            ClaimScenario::Rebound => self.rebind_volume(&volume).await,
            _ => self.name.clone(),
        };
        delete_claim(&client, &last).await;
        self.wait_through_kill(wait_volume_gone(&client, &volume)).await;
        self.wait_for_kill().await;
        self.end(doubles).await
    }

    /// Waits until the node of the claim is deselected.
    async fn wait_rejected(&mut self) -> usize {
        let client = self.client.clone();
        let is_free = |claim: Option<&PersistentVolumeClaim>| annotation(claim, SELECTED_NODE).is_none();
        let (claims, name) = (claims_api(&client), self.name.clone());
        self.wait_through_kill(wait_object(&claims, &name, is_free)).await;
        self.program.list_names("volumes").len()
    }

    /// Waits until the claim is bound, uses its volume, and returns the number of surplus volumes.
    async fn use_volume(&mut self, scenario: ClaimScenario, volume: &str) -> usize {
        let client = self.client.clone();
        let (volumes, name) = (volumes_api(&client), self.name.clone());
        self.wait_through_kill(wait_bound(&client, &name)).await;
        let file = self.program.file_of(volume);
        fs::write(&file, "data").expect("the volume is writable");
        if scenario == ClaimScenario::FinalizerRemoved {
            patch_volume(&client, volume, json!({ "metadata": { "finalizers": [] } })).await;
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
        let client = self.client.clone();
        let (claims, name) = (claims_api(&client), self.name.clone());
        let request = async |size: &str| {
            let patch = json!({ "spec": { "resources": { "requests": { "storage": size } } } });
            patch_claim(&client, &name, patch).await;
        };
        request("1Gi").await;
        let is_infeasible = |claim: Option<&PersistentVolumeClaim>| {
            let status = claim.and_then(|claim| claim.status.as_ref());
            let states = status.and_then(|status| status.allocated_resource_statuses.as_ref());
            states.is_some_and(|states| states["storage"] == "ControllerResizeInfeasible")
        };
        self.wait_through_kill(wait_object(&claims, &name, is_infeasible)).await;
        request(MAX_BYTES).await;
        let is_expanded = |claim: Option<&_>| has_capacity(claim, "2Mi");
        self.wait_through_kill(wait_object(&claims, &name, is_expanded)).await;
        let volume = volumes_api(&client).get(volume).await.expect("the volume");
        let capacity = volume.spec.and_then(|spec| spec.capacity).expect("a capacity");
        assert_eq!(capacity["storage"].0, "2Mi");
        let limits: Vec<_> = self.program.project_names();
        assert_eq!(limits.len(), 1, "one volume has limits");
        let limits = fs::read_to_string(self.program.quota_dir.path().join(&limits[0])).expect("the limits");
        assert_eq!(limits, format!("{MAX_BYTES} 1024"));
    }

    /// Retains the volume for a second claim, which is returned, and has it deleted with that.
    async fn rebind_volume(&mut self, volume: &str) -> String {
        let client = self.client.clone();
        let volumes = volumes_api(&client);
        let patch = async |patch: Value| patch_volume(&client, volume, patch).await;
        patch(json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } })).await;
        delete_claim(&client, &self.name).await;
        wait_phase(&client, volume, "Released").await;
        patch(json!({ "spec": { "claimRef": null } })).await;
        let second = format!("{}-second", self.name);
        let bound = json!({ "spec": { "volumeName": volume } });
        let claim = create_claim(&client, claim_manifest(&second, None, bound)).await;
        let mark = DriverName::try_new(DRIVER).expect("a driver name").claim_annotation();
        let is_recorded =
            |volume: Option<&PersistentVolume>| annotation(volume, &mark) == claim.metadata.uid.as_deref();
        self.wait_through_kill(wait_object(&volumes, volume, is_recorded)).await;
        patch(json!({ "spec": { "persistentVolumeReclaimPolicy": "Delete" } })).await;
        second
    }
}

//! Claims and PersistentVolumes that others have written into.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::DeleteParams;
use nodekeel_provisioner::{DriverName, SELECTED_NODE};
use serde_json::{Value, json};

use super::ClaimScenario;
use super::clones::clone_of;
use super::run::{CrashRun, LeakCounts};
use crate::client_cluster::{
    DRIVER, annotation, claim_manifest, claims_api, create_claim, create_object, delete_claim, patch_volume,
    volume_name, volumes_api, wait_bound, wait_object, wait_volume_gone,
};

impl CrashRun {
    /// Creates a clone of a claim whose volume is on another node: its provisioner is not running.
    pub(super) async fn hand_over_clone(mut self) -> LeakCounts {
        let client = self.client.clone();
        let (claims, volumes) = (claims_api(&client), volumes_api(&client));
        let [source, elsewhere] = ["source", "elsewhere"].map(|what| format!("{}-{what}", self.name));
        create_object(&volumes, foreign_volume(&source, &elsewhere)).await;
        let bound = json!({ "spec": { "volumeName": source } });
        create_claim(&client, claim_manifest(&source, None, bound)).await;
        self.wait_through_kill(wait_bound(&client, &source)).await;

        let name = self.name.clone();
        let from = clone_of(&source);
        self.create_claim(&name, from).await;
        let is_handed_over =
            |claim: Option<&PersistentVolumeClaim>| annotation(claim, SELECTED_NODE) == Some(&elsewhere);
        self.wait_through_kill(wait_object(&claims, &name, is_handed_over)).await;
        self.wait_for_kill().await;
        for claim in [&name, &source] {
            delete_claim(&client, claim).await;
        }
        volumes.delete(&source, &DeleteParams::default()).await.expect("the volume is deleted");
        wait_volume_gone(&client, &source).await;
        self.end(0).await
    }

    /// Marks a volume that is there as one whose disk was declared lost, or that was reported as abnormal.
    pub(super) async fn mark_volume(mut self, scenario: ClaimScenario, moment: &str) -> LeakCounts {
        let client = self.client.clone();
        let volumes = volumes_api(&client);
        let claim = self.create_claim(&self.name, json!({})).await;
        let volume = volume_name(&claim);
        wait_bound(&client, &self.name).await;
        self.terminate().await;
        let driver = DriverName::try_new(DRIVER).expect("a driver name");
        let mark = match scenario {
            ClaimScenario::DeclaredLost => driver.lost_annotation(),
            _ => driver.condition_annotation(),
        };
        let store = std::fs::read_to_string(self.program.base.path().join("store-id")).expect("an identity");
        let marked = json!({ "metadata": { "annotations": { &mark: store.trim() } } });
        patch_volume(&client, &volume, marked).await;

        self.restart(moment);
        let is_taken_back =
            |volume: Option<&PersistentVolume>| volume.is_some() && annotation(volume, &mark).is_none();
        self.wait_through_kill(wait_object(&volumes, &volume, is_taken_back)).await;
        self.wait_for_kill().await;
        delete_claim(&client, &self.name).await;
        wait_volume_gone(&client, &volume).await;
        self.end(0).await
    }
}

/// A volume of this driver on another node, for the claim of its name.
fn foreign_volume(name: &str, node: &str) -> Value {
    let topology = DriverName::try_new(DRIVER).expect("a driver name").topology_key();
    let is_there = json!({ "key": topology, "operator": "In", "values": [node] });
    json!({
        "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": { "storage": "1Mi" },
            "claimRef": { "namespace": "default", "name": name },
            "csi": { "driver": DRIVER, "volumeHandle": name },
            "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [is_there] }] } },
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "nodekeel",
        },
    })
}

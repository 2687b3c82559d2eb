//! Claims and PersistentVolumes that others have written into.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{DeleteParams, Patch, PatchParams};
use nodekeel_provisioner::{DriverName, SELECTED_NODE};
use serde_json::{Value, json};

use super::ClaimScenario;
use super::leak_counts::LeakCounts;
use super::run::CrashRun;
use super::scenarios::is_bound;
use crate::cluster::{DRIVER, claims_api, create_object, volumes_api, wait_object};

impl CrashRun {
    /// Creates a clone of a claim whose volume is on another node: its provisioner is not running.
    pub(super) async fn hand_over_clone(mut self) -> LeakCounts {
        let (claims, volumes) = (claims_api(&self.client), volumes_api(&self.client));
        let [source, elsewhere] = ["source", "elsewhere"].map(|what| format!("{}-{what}", self.name));
        create_object(&volumes, foreign_volume(&source, &elsewhere)).await;
        create_object(&claims, claim_of(&source)).await;
        self.wait_through_kill(wait_object(&claims, &source, is_bound)).await;

        let name = self.name.clone();
        let from = json!({ "kind": "PersistentVolumeClaim", "name": source });
        self.create_node_claim(&name, from).await;
        let is_handed_over = |claim: Option<&PersistentVolumeClaim>| {
            let annotations = claim.and_then(|claim| claim.metadata.annotations.as_ref());
            annotations.and_then(|all| all.get(SELECTED_NODE)) == Some(&elsewhere)
        };
        self.wait_through_kill(wait_object(&claims, &name, is_handed_over)).await;
        if self.kills == 0 {
            self.wait_for_kill().await;
        }
        for claim in [&name, &source] {
            claims.delete(claim, &DeleteParams::default()).await.expect("the claim is deleted");
        }
        volumes.delete(&source, &DeleteParams::default()).await.expect("the volume is deleted");
        wait_object(&volumes, &source, |volume| volume.is_none()).await;
        self.terminate().await;
        self.count_leftovers(0).await
    }

    /// Marks a volume that is there as one whose disk was declared lost, or that was reported as abnormal.
    pub(super) async fn mark_volume(mut self, scenario: ClaimScenario, moment: &str) -> LeakCounts {
        let (claims, volumes) = (claims_api(&self.client), volumes_api(&self.client));
        let claim = self.create_node_claim(&self.name, Value::Null).await;
        let volume = format!("pvc-{}", claim.metadata.uid.as_deref().expect("a UID"));
        wait_object(&claims, &self.name, is_bound).await;
        self.terminate().await;
        let driver = DriverName::try_new(DRIVER).expect("a driver name");
        let annotation = match scenario {
            ClaimScenario::DeclaredLost => driver.lost_annotation(),
            _ => driver.condition_annotation(),
        };
        let store = std::fs::read_to_string(self.program.base.path().join("store-id")).expect("an identity");
        let mark = json!({ "metadata": { "annotations": { &annotation: store.trim() } } });
        volumes.patch(&volume, &PatchParams::default(), &Patch::Merge(mark)).await.expect("a patch");

        self.restart(moment);
        let is_taken_back = |volume: Option<&PersistentVolume>| {
            let annotations = volume.and_then(|volume| volume.metadata.annotations.as_ref());
            annotations.is_some_and(|all| !all.contains_key(&annotation))
        };
        self.wait_through_kill(wait_object(&volumes, &volume, is_taken_back)).await;
        if self.kills == 0 {
            self.wait_for_kill().await;
        }
        claims.delete(&self.name, &DeleteParams::default()).await.expect("the claim is deleted");
        wait_object(&volumes, &volume, |volume| volume.is_none()).await;
        self.terminate().await;
        self.count_leftovers(0).await
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

/// A claim for the volume of its name.
fn claim_of(volume: &str) -> Value {
    json!({
        "metadata": { "name": volume },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "1Mi" } },
            "storageClassName": "nodekeel",
            "volumeName": volume,
        },
    })
}

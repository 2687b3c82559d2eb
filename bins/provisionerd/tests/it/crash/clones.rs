//! A claim that is a clone of another one.

use std::fs;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::DeleteParams;
use nodekeel_provisioner::SELECTED_NODE;
use serde_json::{Value, json};

use super::ClaimScenario;
use super::leak_counts::LeakCounts;
use super::run::CrashRun;
use super::scenarios::is_bound;
use crate::cluster::{claims_api, create_object, volumes_api, wait_object};

impl CrashRun {
    /// Creates a claim with data while provisionerd is not killed, and then a clone of it.
    pub(super) async fn clone_claim(mut self, scenario: ClaimScenario, moment: &str) -> LeakCounts {
        let (claims, volumes) = (claims_api(&self.client), volumes_api(&self.client));
        let source = format!("{}-source", self.name);
        let of_source = volume_name(&self.create_node_claim(&source, Value::Null).await);
        wait_object(&claims, &source, is_bound).await;
        fs::write(self.file_of(&of_source), "data").expect("the volume is writable");
        self.terminate().await;

        self.restart(moment);
        let from = json!({ "kind": "PersistentVolumeClaim", "name": source });
        let clone = self.create_node_claim(&self.name, from).await;
        let of_clone = volume_name(&clone);
        if scenario == ClaimScenario::Cloned {
            self.wait_through_kill(wait_object(&claims, &self.name.clone(), is_bound)).await;
            let copied = fs::read_to_string(self.file_of(&of_clone)).expect("the copy has its file");
            assert_eq!(copied, "data", "{}", self.name);
            // Only then, a mark of the copy is removed.
            if self.kills == 0 {
                self.wait_for_kill().await;
            }
        } else {
            self.wait_killed().await;
        }
        let doubles = self.count_volumes().await.max(1) - 1;
        claims.delete(&self.name, &DeleteParams::default()).await.expect("the clone is deleted");
        if scenario == ClaimScenario::CloneAbandoned {
            wait_object(&claims, &self.name, |claim| claim.is_none()).await;
            self.restart("");
        }
        // Whether there is a PersistentVolume of the copy or not.
        let removed = of_clone.clone();
        self.wait_missing("volumes", move |name| name == removed).await;
        wait_object(&volumes, &of_clone, |volume| volume.is_none()).await;
        assert_eq!(fs::read_to_string(self.file_of(&of_source)).expect("the source"), "data");
        claims.delete(&source, &DeleteParams::default()).await.expect("the source is deleted");
        wait_object(&volumes, &of_source, |volume| volume.is_none()).await;
        self.terminate().await;
        self.count_leftovers(doubles).await
    }

    /// A claim for the node of this run; a copy of a source, if that is not null.
    pub(super) async fn create_node_claim(&self, name: &str, source: Value) -> PersistentVolumeClaim {
        let claim = json!({
            "metadata": { "name": name, "annotations": { SELECTED_NODE: self.program.node } },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": "1Mi" } },
                "storageClassName": "nodekeel",
                "dataSource": source,
            },
        });
        create_object(&claims_api(&self.client), claim).await
    }

    pub(super) fn file_of(&self, volume: &str) -> std::path::PathBuf {
        self.program.base.path().join("volumes").join(volume).join("file")
    }
}

fn volume_name(claim: &PersistentVolumeClaim) -> String {
    format!("pvc-{}", claim.metadata.uid.as_deref().expect("a UID"))
}

//! A claim that is a clone of another one.

use std::fs;

use serde_json::{Value, json};

use super::ClaimScenario;
use super::run::{CrashRun, LeakCounts};
use crate::client_cluster::{
    claims_api, delete_claim, volume_name, wait_bound, wait_object, wait_volume_gone,
};

impl CrashRun {
    /// Creates a claim with data while provisionerd is not killed, and then a clone of it.
    pub(super) async fn clone_claim(mut self, scenario: ClaimScenario, moment: &str) -> LeakCounts {
        let client = self.client.clone();
        let claims = claims_api(&client);
        let source = format!("{}-source", self.name);
        let of_source = volume_name(&self.create_claim(&source, json!({})).await);
        wait_bound(&client, &source).await;
        fs::write(self.program.file_of(&of_source), "data").expect("the volume is writable");
        self.terminate().await;

        self.restart(moment);
        let of_clone = volume_name(&self.create_claim(&self.name, clone_of(&source)).await);
        if scenario == ClaimScenario::Cloned {
            self.wait_through_kill(wait_bound(&client, &self.name.clone())).await;
            let copied = fs::read_to_string(self.program.file_of(&of_clone)).expect("the copy has its file");
            assert_eq!(copied, "data", "{}", self.name);
            // Only then, a mark of the copy is removed.
            self.wait_for_kill().await;
        } else {
            self.wait_killed().await;
        }
        let doubles = self.count_volumes().await.max(1) - 1;
        delete_claim(&client, &self.name).await;
        if scenario == ClaimScenario::CloneAbandoned {
            wait_object(&claims, &self.name, |claim| claim.is_none()).await;
            self.restart("");
        }
        // With or without a PersistentVolume of the copy.
        let removed = of_clone.clone();
        self.wait_missing("volumes", move |name| name == removed).await;
        wait_volume_gone(&client, &of_clone).await;
        assert_eq!(fs::read_to_string(self.program.file_of(&of_source)).expect("the source"), "data");
        delete_claim(&client, &source).await;
        wait_volume_gone(&client, &of_source).await;
        self.end(doubles).await
    }
}

/// The patch of a claim that is a clone of another one.
pub(super) fn clone_of(source: &str) -> Value {
    json!({ "spec": { "dataSource": { "kind": "PersistentVolumeClaim", "name": source } } })
}

//! A snapshot of a claim's volume. The test does what the snapshot-controller does.

use std::fs;

use kube::Api;
use kube::api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams};
use nodekeel_provisioner::{BEING_DELETED, CONTENT_FINALIZER, MANAGED_BY_LABEL, VolumeSnapshotContent};
use serde_json::{Value, json};

use super::run::{CrashRun, LeakCounts};
use crate::client_cluster::{
    DRIVER, create_object, delete_claim, volume_name, wait_bound, wait_object, wait_volume_gone,
};

impl CrashRun {
    /// Takes a snapshot of a volume with data, and deletes it.
    pub(super) async fn take_snapshot(mut self, moment: &str) -> LeakCounts {
        let client = self.client.clone();
        let claim = self.create_claim(&self.name, json!({})).await;
        let volume = volume_name(&claim);
        let uid = claim.metadata.uid.expect("a UID");
        wait_bound(&client, &self.name).await;
        fs::write(self.program.file_of(&volume), "data").expect("the volume is writable");
        self.terminate().await;

        self.restart(moment);
        let kind = ApiResource::erase::<VolumeSnapshotContent>(&());
        let objects: Api<DynamicObject> = Api::all_with(client.clone(), &kind);
        create_object(&objects, self.content_manifest(&volume, &uid)).await;
        let (contents, name) = (Api::<VolumeSnapshotContent>::all(client.clone()), self.name.clone());
        let is_ready = |content: Option<&VolumeSnapshotContent>| {
            content.is_some_and(|content| content.is_ready() && content.snapshot_handle().is_some())
        };
        self.wait_through_kill(wait_object(&contents, &name, is_ready)).await;
        let file = self.program.base.path().join("snapshots").join(format!("snap-{uid}")).join("file");
        assert_eq!(fs::read_to_string(file).expect("the snapshot has its file"), "data", "{name}");

        let deleted = Patch::Merge(json!({ "metadata": { "annotations": { BEING_DELETED: "yes" } } }));
        objects.patch(&name, &PatchParams::default(), &deleted).await.expect("a patch");
        objects.delete(&name, &DeleteParams::default()).await.expect("the content is deleted");
        self.wait_through_kill(wait_object(&contents, &name, |content| content.is_none())).await;
        self.wait_for_kill().await;
        delete_claim(&client, &name).await;
        wait_volume_gone(&client, &volume).await;
        self.end(0).await
    }

    /// A VolumeSnapshotContent with the names of its claim, as its VolumeSnapshot had them.
    fn content_manifest(&self, volume: &str, uid: &str) -> Value {
        json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
            "metadata": {
                "name": self.name,
                "labels": { MANAGED_BY_LABEL: self.program.node },
                "finalizers": [CONTENT_FINALIZER],
            },
            "spec": {
                "deletionPolicy": "Delete",
                "driver": DRIVER,
                "source": { "volumeHandle": volume },
                "volumeSnapshotRef": { "name": self.name, "namespace": "default", "uid": uid },
            },
        })
    }
}

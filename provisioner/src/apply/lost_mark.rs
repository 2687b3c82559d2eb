//! Takes back that the disk of a volume was declared lost.

use k8s_openapi::api::core::v1::PersistentVolume;
use kube::api::Patch;
use serde_json::json;

use crate::apply::{ActionApplier, ApplyError};
use crate::step::VolumeStep;

impl ActionApplier {
    /// Removes the mark from exactly this version of a PersistentVolume, whose volume is in the served store.
    pub(crate) async fn remove_lost_mark(&self, volume: &PersistentVolume) -> Result<(), ApplyError> {
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        tracing::warn!(pv = name, "the disk of the volume was declared lost, but is here: taking that back");
        let metadata = json!({
            "uid": volume.metadata.uid,
            "resourceVersion": volume.metadata.resource_version,
            "annotations": { self.identity.driver.lost_annotation(): null },
        });
        // It may be deleted meanwhile.
        self.patch_volume(
            (VolumeStep::MarkLost, &[404]),
            name,
            &Patch::Merge(json!({ "metadata": metadata })),
        )
        .await
    }
}

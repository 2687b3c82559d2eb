//! Marks the volumes whose last event says that no pod can use them.

use k8s_openapi::api::core::v1::PersistentVolume;
use kube::api::Patch;
use serde_json::json;

use crate::apply::{ActionApplier, ApplyError};
use crate::step::VolumeStep;

/// The value of the annotation: what matters is that there is one.
const ABNORMAL: &str = "abnormal";

impl ActionApplier {
    /// Annotates a PersistentVolume that is about to be reported as abnormal, or removes the annotation.
    ///
    /// The mark is not in the store, which may be what is lost, nor read from the events themselves: to list them, each
    /// node's token would need to read those of the whole cluster, and they are gone after an hour. A node may patch its
    /// PersistentVolumes anyway, and has them in its cache.
    pub(crate) async fn mark_condition(
        &self,
        volume: &PersistentVolume,
        is_abnormal: bool,
    ) -> Result<(), ApplyError> {
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        // Only this node writes the annotation, so any version of the object will do.
        let metadata = json!({
            "uid": volume.metadata.uid,
            "annotations": { self.identity.driver.condition_annotation(): is_abnormal.then_some(ABNORMAL) },
        });
        // It may be deleted meanwhile.
        self.patch_volume(
            (VolumeStep::MarkCondition, &[404]),
            name,
            &Patch::Merge(json!({ "metadata": metadata })),
        )
        .await
    }
}

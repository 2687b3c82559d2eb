//! A bound claim as the API server and the store have it now, and patches of exactly that version.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttributesClass};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::api::timeout::with_timeout;
use crate::apply::{ActionApplier, ApiCall, ApplyError, none_if_not_found, status_code};
use crate::claim::decide::claim_reference;
use crate::id::VolumeId;
use crate::resize::expansion::{BoundClaim, bound_volume, bound_volume_name};
use crate::step::VolumeStep;
use crate::store::VolumeUsage;

/// A claim and the volume that it is bound to.
pub(crate) struct LiveClaim {
    pub(crate) claim: PersistentVolumeClaim,
    pub(crate) volume: PersistentVolume,
    pub(crate) id: VolumeId,
    pub(crate) usage: VolumeUsage,
}

impl LiveClaim {
    pub(crate) fn observed<'a>(
        &'a self,
        class: Option<&'a StorageClass>,
        attributes: Option<&'a VolumeAttributesClass>,
    ) -> BoundClaim<'a> {
        BoundClaim { claim: &self.claim, volume: &self.volume, class, attributes, usage: self.usage }
    }

    /// The storage class of the volume, for metrics.
    pub(crate) fn class_label(&self) -> &str {
        self.volume.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref()).unwrap_or_default()
    }
}

impl ActionApplier {
    /// Reads a claim, its volume and the usage; `None` if they are no longer bound to each other on this node.
    pub(crate) async fn read_bound_claim(
        &self,
        seen: &PersistentVolumeClaim,
    ) -> Result<Option<LiveClaim>, ApplyError> {
        let Some(claim) = self.read_claim(&claim_reference(seen)).await? else { return Ok(None) };
        let Some(name) = bound_volume_name(&claim) else { return Ok(None) };
        let Some(volume) = self.read_volume(name).await? else { return Ok(None) };
        let Some(id) = bound_volume(&self.identity, &claim, &volume) else { return Ok(None) };
        let usage = self.store.usage(&id).await.map_err(ApplyError::Store)?;
        Ok(Some(LiveClaim { claim, volume, id, usage }))
    }

    pub(crate) async fn read_attributes_class(
        &self,
        name: &str,
    ) -> Result<Option<VolumeAttributesClass>, ApplyError> {
        // A server without this kind has none, and no claim that names one.
        let classes: Api<VolumeAttributesClass> = Api::all(self.client.0.clone());
        none_if_not_found(with_timeout(classes.get(name)).await)
            .map_err(ApiCall::ReadAttributesClass.wrap_error())
    }

    /// Patches the status of exactly this version of the claim. `false`: it has changed or is deleted, which
    /// the watch reports.
    pub(crate) async fn patch_claim_status(
        &self,
        step: VolumeStep,
        live: &mut LiveClaim,
        status: Value,
    ) -> Result<bool, ApplyError> {
        let meta = &live.claim.metadata;
        let patch = Patch::Merge(json!({
            "metadata": { "uid": meta.uid, "resourceVersion": meta.resource_version },
            "status": status,
        }));
        let (api, name) = (self.claims_api(meta.namespace.as_deref()), meta.name.clone().unwrap_or_default());
        let params = PatchParams::default();
        let patching = with_timeout(api.patch_status(&name, &params, &patch));
        match current_version(self.steps.run_async(step, patching).await) {
            Ok(Some(claim)) => live.claim = claim,
            Ok(None) => return Ok(false),
            Err(error) => return Err(ApiCall::PatchClaimStatus.wrap_error()(error)),
        }
        Ok(true)
    }

    /// Patches the specification of exactly this version of the volume. `false`: as
    /// [`patch_claim_status`](Self::patch_claim_status).
    pub(crate) async fn patch_volume_spec(
        &self,
        live: &mut LiveClaim,
        spec: Value,
    ) -> Result<bool, ApplyError> {
        let meta = &live.volume.metadata;
        let patch = Patch::Merge(json!({
            "metadata": { "uid": meta.uid, "resourceVersion": meta.resource_version },
            "spec": spec,
        }));
        let (api, params) = (self.volumes_api(), PatchParams::default());
        let patching = with_timeout(api.patch(live.id.as_str(), &params, &patch));
        match current_version(self.steps.run_async(VolumeStep::UpdateVolume, patching).await) {
            Ok(Some(volume)) => live.volume = volume,
            Ok(None) => return Ok(false),
            Err(error) => return Err(ApiCall::PatchVolume.wrap_error()(error)),
        }
        Ok(true)
    }
}

/// The patched object; `None` if it was no longer the version to patch.
fn current_version<K>(patched: Result<K, kube::Error>) -> Result<Option<K>, kube::Error> {
    match patched {
        Ok(object) => Ok(Some(object)),
        Err(error) if matches!(status_code(&error), Some(404 | 409)) => Ok(None),
        Err(error) => Err(error),
    }
}

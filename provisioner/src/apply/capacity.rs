//! Writes the CSIStorageCapacity objects of this node.

use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use serde_json::json;

use crate::api::timeout::with_timeout;
use crate::apply::{ActionApplier, ApiCall, ApplyError, none_if_not_found, status_code};
use crate::capacity::objects::CapacityAction;
use crate::step::VolumeStep;

impl ActionApplier {
    /// The objects in the namespace of the credentials: for a pod, its own.
    pub(crate) fn capacities_api(&self) -> Api<CSIStorageCapacity> {
        Api::default_namespaced(self.client.0.clone())
    }

    /// Applies an action to exactly the version that it was planned for. Returns the object as it is then, also if
    /// another one has changed it meanwhile: then the action must be planned again.
    pub(crate) async fn apply_capacity(
        &self,
        action: &CapacityAction,
    ) -> Result<Option<CSIStorageCapacity>, ApplyError> {
        match action {
            CapacityAction::Create(wanted) => self.create_capacity(wanted).await,
            CapacityAction::Update { found, wanted } => self.update_capacity(found, wanted).await,
            CapacityAction::Delete(found) => self.delete_capacity(found).await,
        }
    }

    async fn create_capacity(
        &self,
        wanted: &CSIStorageCapacity,
    ) -> Result<Option<CSIStorageCapacity>, ApplyError> {
        let (api, params) = (self.capacities_api(), PostParams::default());
        let create = with_timeout(api.create(&params, wanted));
        match self.steps.run_async(VolumeStep::PublishCapacity, create).await {
            Ok(created) => Ok(Some(created)),
            // The answer to an earlier call was lost, or the watch has not reported the object yet.
            Err(error) if status_code(&error) == Some(409) => self.read_capacity(&wanted.metadata).await,
            Err(error) => Err(ApiCall::CreateCapacity.wrap_error()(error)),
        }
    }

    async fn update_capacity(
        &self,
        found: &ObjectMeta,
        wanted: &CSIStorageCapacity,
    ) -> Result<Option<CSIStorageCapacity>, ApplyError> {
        let patch = Patch::Merge(json!({
            "metadata": {
                "uid": found.uid,
                "resourceVersion": found.resource_version,
                "labels": wanted.metadata.labels,
                "ownerReferences": wanted.metadata.owner_references,
            },
            "capacity": wanted.capacity,
            "maximumVolumeSize": wanted.maximum_volume_size,
        }));
        let (api, params) = (self.capacities_api(), PatchParams::default());
        let name = found.name.as_deref().unwrap_or_default();
        let update = with_timeout(api.patch(name, &params, &patch));
        match self.steps.run_async(VolumeStep::PublishCapacity, update).await {
            Ok(updated) => Ok(Some(updated)),
            Err(error) if matches!(status_code(&error), Some(404 | 409)) => self.read_capacity(found).await,
            Err(error) => Err(ApiCall::PatchCapacity.wrap_error()(error)),
        }
    }

    async fn delete_capacity(&self, found: &ObjectMeta) -> Result<Option<CSIStorageCapacity>, ApplyError> {
        let preconditions =
            Some(Preconditions { uid: found.uid.clone(), resource_version: found.resource_version.clone() });
        let params = DeleteParams { preconditions, ..DeleteParams::default() };
        let (api, name) = (self.capacities_api(), found.name.as_deref().unwrap_or_default());
        let delete = with_timeout(api.delete(name, &params));
        match self.steps.run_async(VolumeStep::RemoveCapacity, delete).await {
            Ok(_) => Ok(None),
            Err(error) if matches!(status_code(&error), Some(404 | 409)) => self.read_capacity(found).await,
            Err(error) => Err(ApiCall::DeleteCapacity.wrap_error()(error)),
        }
    }

    async fn read_capacity(&self, meta: &ObjectMeta) -> Result<Option<CSIStorageCapacity>, ApplyError> {
        let name = meta.name.as_deref().unwrap_or_default();
        let found = with_timeout(self.capacities_api().get(name)).await;
        none_if_not_found(found).map_err(ApiCall::ReadCapacity.wrap_error())
    }
}

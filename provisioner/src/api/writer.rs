//! Reads objects, and writes each as a step, on exactly the version that was decided on.

use std::fmt;
use std::ops::ControlFlow;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::api::call::{ApiCall, ApiError, none_if_not_found, status_code};
use crate::api::timeout::with_timeout;
use crate::identity::ProvisionerIdentity;
use crate::name::StoreName;
use crate::step::{StepRunner, VolumeStep};

const PAGE_SIZE: u32 = 500;

/// A client with a `Debug` implementation that prints only its type.
#[derive(Clone)]
pub(crate) struct ClientHandle(pub(crate) Client);

impl fmt::Debug for ClientHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

/// Reads and writes the objects of a driver and node. Every write is a step, and every call has a deadline.
#[derive(Debug, Clone)]
pub(crate) struct ApiWriter {
    /// The driver and node whose objects are written.
    pub(crate) identity: ProvisionerIdentity,
    client: ClientHandle,
    steps: StepRunner,
}

/// The result of a patch of exactly one version of an object.
#[derive(Debug)]
pub(crate) enum Patched<K> {
    /// The object as it is now.
    Done(Box<K>),
    /// Is another version: the watch reports it.
    Changed,
    /// Does not exist any more.
    Gone,
}

/// The part of an object that a patch changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ObjectPart {
    Main,
    Status,
}

impl ApiWriter {
    pub(crate) fn new(identity: ProvisionerIdentity, client: Client, steps: StepRunner) -> Self {
        Self { identity, client: ClientHandle(client), steps }
    }

    /// The same for another store of the node.
    pub(crate) fn of_store(&self, store: Option<StoreName>) -> Self {
        Self { identity: self.identity.with_store(store), ..self.clone() }
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client.0
    }

    /// The objects of a kind, of all namespaces.
    pub(crate) fn all<K: Resource<DynamicType = ()>>(&self) -> Api<K> {
        Api::all(self.client.0.clone())
    }

    /// The objects of a kind in a namespace.
    pub(crate) fn namespaced<K>(&self, namespace: Option<&str>) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.0.clone(), namespace.unwrap_or_default())
    }

    /// Reads an object; `None` if it does not exist.
    pub(crate) async fn read<K>(&self, call: ApiCall, api: &Api<K>, name: &str) -> Result<Option<K>, ApiError>
    where
        K: Clone + DeserializeOwned + fmt::Debug,
    {
        none_if_not_found(with_timeout(api.get(name)).await).map_err(|error| call.wrap_error(error))
    }

    /// Reads a claim; `None` if it is deleted, or another claim has its name.
    pub(crate) async fn read_claim(
        &self,
        seen: &ObjectReference,
    ) -> Result<Option<PersistentVolumeClaim>, ApiError> {
        let (api, name) = (self.namespaced(seen.namespace.as_deref()), seen.name.as_deref());
        let claim: Option<PersistentVolumeClaim> =
            self.read(ApiCall::ReadClaim, &api, name.unwrap_or_default()).await?;
        Ok(claim.filter(|claim| claim.metadata.uid == seen.uid))
    }

    pub(crate) async fn read_volume(&self, name: &str) -> Result<Option<PersistentVolume>, ApiError> {
        self.read(ApiCall::ReadVolume, &self.all(), name).await
    }

    /// Visits all objects of a kind in the cluster, page by page, until `visit` breaks.
    pub(crate) async fn for_each<K>(
        &self,
        call: ApiCall,
        mut visit: impl FnMut(K) -> ControlFlow<()> + Send,
    ) -> Result<(), ApiError>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + fmt::Debug,
    {
        let api: Api<K> = self.all();
        let mut params = ListParams::default().limit(PAGE_SIZE);
        loop {
            // The list may be of the whole cluster: only one page of it is in memory.
            let page = with_timeout(api.list(&params)).await.map_err(|error| call.wrap_error(error))?;
            if page.items.into_iter().try_for_each(&mut visit).is_break() {
                return Ok(());
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(()),
            }
        }
    }

    /// Performs a write as a step, with a deadline.
    pub(crate) async fn write<T>(
        &self,
        step: VolumeStep,
        call: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, kube::Error> {
        self.steps.run_async(step, with_timeout(call)).await
    }

    /// Merges fields into exactly this version of an object.
    ///
    /// A patch, not an update: an update would drop the fields that this client does not know.
    pub(crate) async fn patch_version<K>(
        &self,
        step: VolumeStep,
        call: ApiCall,
        api: &Api<K>,
        object: &K,
        part: ObjectPart,
        mut patch: Value,
    ) -> Result<Patched<K>, ApiError>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + fmt::Debug,
    {
        let meta = object.meta();
        patch["metadata"]["uid"] = json!(meta.uid);
        patch["metadata"]["resourceVersion"] = json!(meta.resource_version);
        let (name, params) = (meta.name.as_deref().unwrap_or_default(), PatchParams::default());
        let patch = Patch::Merge(patch);
        let patched = match part {
            ObjectPart::Main => self.write(step, api.patch(name, &params, &patch)).await,
            ObjectPart::Status => self.write(step, api.patch_status(name, &params, &patch)).await,
        };
        match patched {
            Ok(object) => Ok(Patched::Done(Box::new(object))),
            Err(error) => match status_code(&error) {
                Some(404) => Ok(Patched::Gone),
                // Another client was faster: the caller decides again on the version that the watch reports.
                Some(409) => Ok(Patched::Changed),
                _ => Err(call.wrap_error(error)),
            },
        }
    }

    /// Merges fields into exactly this version of a PersistentVolume. If it has changed or is deleted, the watch reports it.
    pub(crate) async fn patch_volume_version(
        &self,
        step: VolumeStep,
        volume: &PersistentVolume,
        patch: Value,
    ) -> Result<Patched<PersistentVolume>, ApiError> {
        self.patch_version(step, ApiCall::PatchVolume, &self.all(), volume, ObjectPart::Main, patch).await
    }

    /// Patches any version of a PersistentVolume, unless the patch names one. Succeeds if the object was deleted.
    pub(crate) async fn patch_volume(
        &self,
        step: VolumeStep,
        volume: &PersistentVolume,
        patch: &Patch<Value>,
    ) -> Result<(), ApiError> {
        let (api, params) = (self.all::<PersistentVolume>(), PatchParams::default());
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        match self.write(step, api.patch(name, &params, patch)).await {
            Err(error) if status_code(&error) != Some(404) => Err(ApiCall::PatchVolume.wrap_error(error)),
            _ => Ok(()),
        }
    }
}

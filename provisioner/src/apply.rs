//! What was decided, done: each effect can be interrupted anywhere and made again.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::chain::chain;
use crate::event::{Reason, Recorder};
use crate::guard::{GuardError, Reservation, VolumeGuard};
use crate::id::VolumeId;
use crate::in_time::in_time;
use crate::locks::Locks;
use crate::manifest::manifest;
use crate::meter::Meter;
use crate::plan::{
    ClaimAction, ClaimRefusal, Identity, SELECTED_NODE, SeenClaim, VolumeAction, VolumeSpec, has_finalizer,
    not_here, plan_claim, plan_volume, reference,
};
use crate::step::{Step, Steps};
use crate::store::{StoreError, VolumeStore};

mod sweep;

pub(crate) use sweep::{Owner, Swept};

/// Why something could not be done now.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ApplyError {
    /// The store failed.
    #[error(transparent)]
    Store(StoreError),
    /// The API server failed, or refused.
    #[error("{call}{}", hint(source))]
    Api {
        /// What was asked of it.
        call: Call,
        /// What it said.
        #[source]
        source: kube::Error,
    },
    /// The volume's claim exists, whatever the volume's phase says.
    #[error("claim {claim} still exists; nothing was deleted")]
    ClaimLives {
        /// Its name.
        claim: String,
    },
    /// The volume is in use on this node, or it could not be told.
    #[error(transparent)]
    Guard(GuardError),
    /// Something panicked. It is a defect; what it was about is tried again.
    #[error("a defect: {text}")]
    Panicked {
        /// What it said.
        text: String,
    },
}

/// What was asked of the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    ReadClaim,
    ListClaims,
    ReadVolume,
    CreateVolume,
    DeleteVolume,
    PatchVolume,
    PatchClaim,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ReadClaim => "read the claim",
            Self::ListClaims => "list the claims",
            Self::ReadVolume => "read the PersistentVolume",
            Self::CreateVolume => "create the PersistentVolume",
            Self::DeleteVolume => "delete the PersistentVolume",
            Self::PatchVolume => "change the PersistentVolume's finalizers",
            Self::PatchClaim => "change the claim's selected node",
        })
    }
}

impl Call {
    fn failed(self) -> impl FnOnce(kube::Error) -> ApplyError {
        move |source| ApplyError::Api { call: self, source }
    }
}

/// What to do about an error of the API server, where that is clear.
pub(crate) fn hint(error: &kube::Error) -> &'static str {
    match code(error) {
        Some(401) => " (not authenticated: check the credentials)",
        Some(403) => " (forbidden: grant this service account what deploy/ lists for it)",
        None => " (is the API server reachable?)",
        Some(_) => "",
    }
}

/// The HTTP status, where the API server has answered.
pub(crate) fn code(error: &kube::Error) -> Option<u16> {
    match error {
        kube::Error::Api(status) => Some(status.code),
        _ => None,
    }
}

/// None, where the API server says that it isn't there.
fn found<T>(result: Result<T, kube::Error>) -> Result<Option<T>, kube::Error> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if code(&error) == Some(404) => Ok(None),
        Err(error) => Err(error),
    }
}

/// How it ended, where nothing failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Applied {
    /// As it should be.
    Done,
    /// There is no room for the volume, and another node may be selected.
    GivenUp,
    /// It turned out, on a closer look, that it must not be done.
    Refused(ClaimRefusal),
}

/// What became of a PersistentVolume that was to be made.
enum Made {
    /// It was made.
    Now,
    /// It was there already.
    Before,
    /// Another node has made it: the claim was selected for that one meanwhile.
    Elsewhere,
    /// Its name is taken.
    Taken,
}

/// Does what was decided.
#[derive(Debug)]
pub(crate) struct Applier {
    pub(crate) me: Identity,
    pub(crate) client: ClientDebug,
    pub(crate) store: Arc<dyn VolumeStore>,
    pub(crate) guard: Option<Arc<dyn VolumeGuard>>,
    pub(crate) meter: Arc<dyn Meter>,
    pub(crate) recorder: Recorder,
    pub(crate) steps: Steps,
    pub(crate) locks: Locks,
}

/// A client, which prints nothing of itself.
#[derive(Clone)]
pub(crate) struct ClientDebug(pub(crate) Client);

impl fmt::Debug for ClientDebug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

impl Applier {
    fn claims(&self, namespace: Option<&str>) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.0.clone(), namespace.unwrap_or_default())
    }

    fn volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.client.0.clone())
    }

    /// Makes the volume of a claim and its PersistentVolume; gives the claim up, if asked to, where there is no room.
    pub(crate) async fn provision(
        &self,
        seen: &VolumeSpec,
        class: &StorageClass,
        give_up: bool,
    ) -> Result<Applied, ApplyError> {
        let _lock = self.locks.lock(&seen.id).await;
        let started = Instant::now();
        // What was seen may be old: the claim may have had its volume, and lost it, since.
        let Some(claim) = self.live_claim(&seen.claim).await? else { return Ok(Applied::Done) };
        let live = SeenClaim { claim: &claim, class: Some(class), volume: None };
        let spec = match plan_claim(&self.me, live) {
            ClaimAction::Provision(spec) => spec,
            ClaimAction::Refuse(refusal) => return Ok(Applied::Refused(refusal)),
            _ => return Ok(Applied::Done),
        };
        let made = self.make(&spec).await;
        // What was there already was counted and told before; if a crash came between, the claim is bound all the same.
        if !matches!(made, Ok(Made::Before | Made::Elsewhere)) {
            self.meter.provisioned(&spec.class, started.elapsed(), matches!(made, Ok(Made::Now)));
        }
        match made {
            Ok(Made::Now) => {
                let note = format!("Successfully provisioned volume {}", spec.id);
                self.recorder.tell(&spec.claim, Reason::ProvisioningSucceeded, &note).await;
                Ok(Applied::Done)
            }
            Ok(Made::Before) => Ok(Applied::Done),
            Ok(Made::Elsewhere) => self.remove_unused(&spec.id).await.map(|_| Applied::Done),
            Ok(Made::Taken) => Ok(Applied::Refused(ClaimRefusal::Taken { id: spec.id.clone() })),
            Err(ApplyError::Store(error)) if error.is_exhausted() && give_up => {
                self.recorder.tell(&spec.claim, Reason::ProvisioningFailed, &chain(&error)).await;
                self.give_up_node(&claim).await?;
                Ok(Applied::GivenUp)
            }
            Err(error) => Err(error),
        }
    }

    async fn make(&self, spec: &VolumeSpec) -> Result<Made, ApplyError> {
        self.store.create(&spec.id, spec.limits).await.map_err(ApplyError::Store)?;
        let volume = manifest(&self.me, spec);
        let (api, params) = (self.volumes(), PostParams::default());
        match self.steps.wait(Step::PostVolume, in_time(api.create(&params, &volume))).await {
            Ok(_) => Ok(Made::Now),
            // An answer that was lost, or somebody else's object.
            Err(error) if code(&error) == Some(409) => match self.live_volume(spec.id.as_str()).await? {
                Some(volume) if !is_of(&volume, spec) => Ok(Made::Taken),
                Some(volume) if is_here(&self.me, &volume) => Ok(Made::Before),
                Some(_) => Ok(Made::Elsewhere),
                None => Err(Call::CreateVolume.failed()(error)),
            },
            Err(error) => Err(Call::CreateVolume.failed()(error)),
        }
    }

    /// The claim as it is now; none if it is gone, or another one has its name.
    async fn live_claim(&self, seen: &ObjectReference) -> Result<Option<PersistentVolumeClaim>, ApplyError> {
        let name = seen.name.as_deref().unwrap_or_default();
        let claim = in_time(self.claims(seen.namespace.as_deref()).get(name)).await;
        let claim = found(claim).map_err(Call::ReadClaim.failed())?;
        Ok(claim.filter(|claim| claim.metadata.uid == seen.uid))
    }

    async fn live_volume(&self, name: &str) -> Result<Option<PersistentVolume>, ApplyError> {
        found(in_time(self.volumes().get(name)).await).map_err(Call::ReadVolume.failed())
    }

    /// Writes this node into a claim without one. Whoever is first wins; the others hear of it.
    pub(crate) async fn take_node(&self, claim: &PersistentVolumeClaim) -> Result<(), ApplyError> {
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        tracing::info!(claim = name, "taking a claim that waits for no consumer");
        self.select(Step::TakeNode, claim, json!(self.me.node.as_str())).await
    }

    /// Takes this node out of a claim, so that another one is selected.
    async fn give_up_node(&self, claim: &PersistentVolumeClaim) -> Result<(), ApplyError> {
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        tracing::info!(
            claim = name,
            "no room for its volume: giving up the claim, so that another node is selected"
        );
        self.select(Step::GiveUpNode, claim, Value::Null).await
    }

    /// Changes the selected node of exactly this version of a claim.
    ///
    /// A patch, not an update: an update would drop the fields that this client doesn't know.
    async fn select(&self, step: Step, claim: &PersistentVolumeClaim, node: Value) -> Result<(), ApplyError> {
        let meta = &claim.metadata;
        let patch = Patch::Merge(json!({ "metadata": {
            "uid": meta.uid,
            "resourceVersion": meta.resource_version,
            "annotations": { SELECTED_NODE: node },
        } }));
        let api = self.claims(meta.namespace.as_deref());
        let (name, params) = (meta.name.as_deref().unwrap_or_default(), PatchParams::default());
        match self.steps.wait(step, in_time(api.patch(name, &params, &patch))).await {
            Ok(_) => Ok(()),
            // Another version, or none: the watch tells.
            Err(error) if matches!(code(&error), Some(404 | 409)) => Ok(()),
            Err(error) => Err(Call::PatchClaim.failed()(error)),
        }
    }

    /// Destroys a volume and its PersistentVolume. Whether a claim of its UID was heard of, and not of that one's end, tells
    /// whether to look for it also where the PersistentVolume doesn't say that it is.
    pub(crate) async fn delete(
        &self,
        seen: &PersistentVolume,
        id: &VolumeId,
        is_heard_of: bool,
    ) -> Result<(), ApplyError> {
        let _lock = self.locks.lock(id).await;
        let started = Instant::now();
        let Some(live) = self.live_volume(id.as_str()).await? else { return Ok(()) };
        // What was seen may be old: it may be in use again, or another object of the same name.
        let is_same = live.metadata.uid == seen.metadata.uid;
        if !is_same || plan_volume(&self.me, &live) != VolumeAction::Delete(id.clone()) {
            return Ok(());
        }
        let spec = live.spec.clone().unwrap_or_default();
        let claim = match self.live_claim(&spec.claim_ref.unwrap_or_default()).await? {
            None if is_heard_of => self.claim_of(id).await?,
            claim => claim,
        };
        if let Some(claim) = claim.filter(|claim| !is_bound_elsewhere(claim, id)) {
            return Err(ApplyError::ClaimLives { claim: claim.metadata.name.unwrap_or_default() });
        }
        let _reserved = self.reserve(id).await?;
        tracing::info!(pv = %id, handle = %id, claim_uid = id.claim_uid(), "deleting volume");
        let deleted = self.destroy(&live, id).await;
        let class = spec.storage_class_name.unwrap_or_default();
        self.meter.deleted(&class, started.elapsed(), deleted.is_ok());
        deleted
    }

    /// Makes sure that nobody on this node uses a volume, from now on.
    async fn reserve(&self, id: &VolumeId) -> Result<Option<Reservation>, ApplyError> {
        let Some(guard) = self.guard.clone() else { return Ok(None) };
        let owned = id.clone();
        let reserved = tokio::task::spawn_blocking(move || guard.reserve(&owned)).await;
        let stopped = |error| Err(GuardError::Look { id: id.clone(), source: Box::new(error) });
        reserved.unwrap_or_else(stopped).map(Some).map_err(ApplyError::Guard)
    }

    async fn destroy(&self, live: &PersistentVolume, id: &VolumeId) -> Result<(), ApplyError> {
        self.store.remove(id).await.map_err(ApplyError::Store)?;
        if live.metadata.deletion_timestamp.is_some() {
            return self.unprotect(live).await;
        }
        let uid = live.metadata.uid.clone();
        let preconditions = Some(Preconditions { uid, resource_version: None });
        let params = DeleteParams { preconditions, ..DeleteParams::default() };
        let (api, name) = (self.volumes(), id.as_str());
        let deleted = self.steps.wait(Step::DeleteVolume, in_time(api.delete(name, &params))).await;
        match found(deleted).map_err(Call::DeleteVolume.failed())? {
            // It stays until its finalizers are off.
            Some(answer) => match answer.left() {
                Some(going) => self.unprotect(&going).await,
                None => Ok(()),
            },
            None => Ok(()),
        }
    }

    /// Takes our finalizer off.
    pub(crate) async fn unprotect(&self, volume: &PersistentVolume) -> Result<(), ApplyError> {
        if !has_finalizer(&self.me, volume) {
            return Ok(());
        }
        let finalizers = volume.metadata.finalizers.iter().flatten();
        let others = finalizers.filter(|finalizer| Some(*finalizer) != self.me.finalizer.as_ref());
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        tracing::info!(pv = name, "letting go of the PersistentVolume");
        self.set_finalizers(Step::Unprotect, volume, others.cloned().collect()).await
    }

    /// Puts our finalizer on.
    pub(crate) async fn protect(&self, volume: &PersistentVolume) -> Result<(), ApplyError> {
        let finalizers = volume.metadata.finalizers.iter().flatten().chain(&self.me.finalizer);
        self.set_finalizers(Step::Protect, volume, finalizers.cloned().collect()).await
    }

    /// Changes the finalizers of exactly this version of a volume.
    async fn set_finalizers(
        &self,
        step: Step,
        volume: &PersistentVolume,
        finalizers: Vec<String>,
    ) -> Result<(), ApplyError> {
        let meta = &volume.metadata;
        let patch = Patch::Merge(json!({ "metadata": {
            "uid": meta.uid,
            "resourceVersion": meta.resource_version,
            "finalizers": finalizers,
        } }));
        let (api, name) = (self.volumes(), meta.name.as_deref().unwrap_or_default());
        let patched = self.steps.wait(step, in_time(api.patch(name, &PatchParams::default(), &patch))).await;
        match patched {
            // Another version, or none: the watch tells.
            Err(error) if !matches!(code(&error), Some(404 | 409)) => Err(Call::PatchVolume.failed()(error)),
            _ => Ok(()),
        }
    }
}

/// Whether a PersistentVolume is the one that would have been made.
fn is_of(volume: &PersistentVolume, spec: &VolumeSpec) -> bool {
    let found = volume.spec.as_ref();
    let claim = found.and_then(|found| found.claim_ref.as_ref()).and_then(|claim| claim.uid.as_deref());
    let handle = found.and_then(|found| found.csi.as_ref()).map(|csi| csi.volume_handle.as_str());
    claim == Some(spec.id.claim_uid()) && handle == Some(spec.id.as_str())
}

/// Whether a PersistentVolume is of this driver and this node.
fn is_here(me: &Identity, volume: &PersistentVolume) -> bool {
    volume.spec.as_ref().is_some_and(|spec| not_here(me, spec).is_none())
}

/// Whether a claim has another volume, for good, so that nobody waits for the one that was made for it.
fn is_bound_elsewhere(claim: &PersistentVolumeClaim, id: &VolumeId) -> bool {
    let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    !volume.is_empty() && volume != id.as_str()
}

/// A claim as an event is about it.
pub(crate) fn about_claim(claim: &PersistentVolumeClaim) -> ObjectReference {
    reference(claim)
}

/// A volume as an event is about it.
pub(crate) fn about_volume(volume: &PersistentVolume) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("PersistentVolume".to_owned()),
        name: volume.metadata.name.clone(),
        uid: volume.metadata.uid.clone(),
        resource_version: volume.metadata.resource_version.clone(),
        ..ObjectReference::default()
    }
}

//! Applies planned actions: each effect can be interrupted at any point and repeated.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::{Node, ObjectReference, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client};
use nodekeel_fsquota::Bytes;
use serde_json::{Value, json};

use crate::api::event::{EventReason, EventRecorder};
use crate::api::timeout::with_timeout;
use crate::claim::decide::{ClaimAction, ObservedClaim, plan_claim};
use crate::claim::manifest::build_persistent_volume;
use crate::deletion::decide::{VolumeAction, has_finalizer, ownership_mismatch, plan_volume};
use crate::deletion::guard::{GuardError, VolumeGuard, VolumeReservation};
use crate::error_chain::format_chain;
use crate::id::VolumeId;
use crate::image::VolumeKind;
use crate::loss::store::{is_marked_lost, named_store};
use crate::metrics::VolumeMetrics;
use crate::node::taint_against_volumes;
use crate::plan::{ClaimRejection, ProvisionerIdentity, SELECTED_NODE, VolumeSpec};
use crate::resize::modification::AttributesRejection;
use crate::snapshot::{SnapshotId, SnapshotStore, SnapshotStoreError};
use crate::step::{StepRunner, VolumeStep};
use crate::store::{VolumeStore, VolumeStoreError};
use crate::store_id::StoreId;
use crate::volume_locks::VolumeLocks;

pub(crate) mod bound_claim;
pub(crate) mod capacity;
pub(crate) mod condition_mark;
pub(crate) mod data_source;
pub(crate) mod expansion;
pub(crate) mod foreign_store;
pub(crate) mod lost_mark;
pub(crate) mod modification;
pub(crate) mod snapshot;
pub(crate) mod sweep;

use self::data_source::VolumeContent;
pub(crate) use snapshot::content_reference;
pub(crate) use sweep::{ClaimState, SweepOutcome};

/// Why an action could not be applied now.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ApplyError {
    /// The store failed.
    #[error(transparent)]
    Store(VolumeStoreError),
    /// The store of snapshots failed.
    #[error(transparent)]
    Snapshot(SnapshotStoreError),
    /// The data source of a claim does not exist yet, or is not ready.
    #[error("can't copy the claim's data source: {reason}")]
    SourceNotReady {
        /// What is missing.
        reason: String,
    },
    /// The API server failed, or rejected the call.
    #[error("can't {call}{}", error_hint(source))]
    Api {
        /// The failed call.
        call: ApiCall,
        /// The cause.
        #[source]
        source: kube::Error,
    },
    /// The volume's claim exists, whatever the volume's phase says.
    #[error(
        "PersistentVolumeClaim {claim} still exists, so its volume was not deleted: delete the claim first"
    )]
    ClaimExists {
        /// The claim's name.
        claim: String,
    },
    /// The volume is neither in this store, nor was it: a missing directory does not prove its removal.
    #[error(
        "volume {id} is in the directory with store-id {named}, not in this one: mount its disk; nothing was \
         deleted"
    )]
    OtherStore {
        /// The volume.
        id: VolumeId,
        /// The store that its PersistentVolume names.
        named: StoreId,
    },
    /// The snapshot was ready, and is not in this store: that does not prove its removal.
    #[error(
        "can't delete snapshot {id}: it was ready, and is not in the directory of this node: mount its disk; if that is lost \
         for good, remove the finalizers of the VolumeSnapshotContent"
    )]
    SnapshotMissing {
        /// The snapshot.
        id: SnapshotId,
    },
    /// The volume is in use on this node, or checking it failed.
    #[error(transparent)]
    Guard(GuardError),
    /// The claim requests a size that no volume can have.
    #[error(transparent)]
    Rejected(ClaimRejection),
    /// The API server accepted a patch and dropped a field of it, so that no further step would be the last.
    #[error(
        "the API server dropped a field of a patch that resizes volume {id}: use Kubernetes 1.33 or newer, with the \
         feature gates RecoverVolumeExpansionFailure and, if claims name classes, VolumeAttributesClass"
    )]
    FieldDropped {
        /// The volume.
        id: VolumeId,
    },
    /// The claim's VolumeAttributesClass does not apply to the volume now.
    #[error(transparent)]
    Attributes(AttributesRejection),
    /// A panic, which is a bug in this crate or a dependency. The object is retried.
    #[error("internal error (panic): {text}")]
    Panicked {
        /// The panic message.
        text: String,
    },
}

/// A call of the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ApiCall {
    ReadClaim,
    ListClaims,
    ListVolumes,
    ReadVolume,
    CreateVolume,
    DeleteVolume,
    PatchVolume,
    PatchClaim,
    PatchClaimStatus,
    ReadAttributesClass,
    ReadNode,
    ReadCapacity,
    CreateCapacity,
    PatchCapacity,
    DeleteCapacity,
    ReadSnapshot,
    ReadSnapshotContent,
    ListSnapshotContents,
    PatchSnapshotContent,
}

impl fmt::Display for ApiCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ReadSnapshot => "read the VolumeSnapshot",
            Self::ReadSnapshotContent => "read the VolumeSnapshotContent",
            Self::ListSnapshotContents => "list the VolumeSnapshotContents of this node",
            Self::PatchSnapshotContent => "patch the VolumeSnapshotContent",
            Self::ReadClaim => "read the claim",
            Self::ListClaims => "list the claims",
            Self::ListVolumes => "list the PersistentVolumes",
            Self::ReadVolume => "read the PersistentVolume",
            Self::CreateVolume => "create the PersistentVolume",
            Self::DeleteVolume => "delete the PersistentVolume",
            Self::PatchVolume => "patch the PersistentVolume",
            Self::PatchClaim => "patch the claim's selected node",
            Self::PatchClaimStatus => "patch the claim's status",
            Self::ReadAttributesClass => "read the VolumeAttributesClass",
            Self::ReadNode => "read this node",
            Self::ReadCapacity => "read a CSIStorageCapacity of this node",
            Self::CreateCapacity => "create a CSIStorageCapacity of this node",
            Self::PatchCapacity => "patch a CSIStorageCapacity of this node",
            Self::DeleteCapacity => "delete a CSIStorageCapacity of this node",
        })
    }
}

impl ApiCall {
    /// The name in metrics.
    pub(crate) fn metric_label(self) -> &'static str {
        match self {
            Self::ReadSnapshot => "get_volumesnapshot",
            Self::ReadSnapshotContent => "get_volumesnapshotcontent",
            Self::ListSnapshotContents => "list_volumesnapshotcontents",
            Self::PatchSnapshotContent => "patch_volumesnapshotcontent",
            Self::ReadClaim => "get_persistentvolumeclaim",
            Self::ListClaims => "list_persistentvolumeclaims",
            Self::ListVolumes => "list_persistentvolumes",
            Self::ReadVolume => "get_persistentvolume",
            Self::CreateVolume => "create_persistentvolume",
            Self::DeleteVolume => "delete_persistentvolume",
            Self::PatchVolume => "patch_persistentvolume",
            Self::PatchClaim => "patch_persistentvolumeclaim",
            Self::PatchClaimStatus => "patch_persistentvolumeclaim_status",
            Self::ReadAttributesClass => "get_volumeattributesclass",
            Self::ReadNode => "get_node",
            Self::ReadCapacity => "get_csistoragecapacity",
            Self::CreateCapacity => "create_csistoragecapacity",
            Self::PatchCapacity => "patch_csistoragecapacity",
            Self::DeleteCapacity => "delete_csistoragecapacity",
        }
    }

    pub(crate) fn wrap_error(self) -> impl FnOnce(kube::Error) -> ApplyError {
        move |source| ApplyError::Api { call: self, source }
    }
}

/// What to do about an error of the API server, if that is clear.
pub(crate) fn error_hint(error: &kube::Error) -> &'static str {
    match status_code(error) {
        Some(401) => " (not authenticated: check the credentials)",
        Some(403) => " (forbidden: grant this service account the rules of deploy/rbac.yaml)",
        None => " (is the API server reachable?)",
        Some(_) => "",
    }
}

/// The HTTP status, if the API server answered.
pub(crate) fn status_code(error: &kube::Error) -> Option<u16> {
    match error {
        kube::Error::Api(status) => Some(status.code),
        _ => None,
    }
}

/// Turns "not found" into `None`.
pub(crate) fn none_if_not_found<T>(result: Result<T, kube::Error>) -> Result<Option<T>, kube::Error> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if status_code(&error) == Some(404) => Ok(None),
        Err(error) => Err(error),
    }
}

/// How an action ended without an error.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ApplyOutcome {
    /// Successfully.
    Done,
    /// A volume of this size does not fit on the node. Once the scheduler knows, it may select another one for this
    /// version of the claim.
    Exhausted { claim: Box<PersistentVolumeClaim>, size: Bytes },
    /// The data source of the claim is on another node, which was selected for it.
    HandedOver,
    /// The live object must be rejected, unlike the cached one.
    Rejected(ClaimRejection),
}

/// The result of creating a PersistentVolume.
pub(crate) enum CreateOutcome {
    /// It was created.
    Created,
    /// It already existed.
    AlreadyExists,
    /// Another node created it: the claim was rescheduled to that node meanwhile.
    OnOtherNode,
    /// A PersistentVolume of another claim has its name.
    NameConflict,
}

/// Applies planned actions.
#[derive(Debug)]
pub(crate) struct ActionApplier {
    pub(crate) identity: ProvisionerIdentity,
    pub(crate) client: ClientHandle,
    pub(crate) store: Arc<dyn VolumeStore>,
    pub(crate) snapshots: Option<Arc<dyn SnapshotStore>>,
    pub(crate) guard: Option<Arc<dyn VolumeGuard>>,
    pub(crate) metrics: Arc<dyn VolumeMetrics>,
    pub(crate) recorder: EventRecorder,
    pub(crate) steps: StepRunner,
    pub(crate) locks: VolumeLocks,
}

/// A client with a `Debug` implementation that prints only its type.
#[derive(Clone)]
pub(crate) struct ClientHandle(pub(crate) Client);

impl fmt::Debug for ClientHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}

impl ActionApplier {
    pub(crate) fn claims_api(&self, namespace: Option<&str>) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.0.clone(), namespace.unwrap_or_default())
    }

    pub(crate) fn volumes_api(&self) -> Api<PersistentVolume> {
        Api::all(self.client.0.clone())
    }

    /// Creates a claim's volume and its PersistentVolume. If `may_reschedule` and the node has no free space for it,
    /// that is not an error: another node may be selected.
    pub(crate) async fn provision_claim(
        &self,
        seen: &VolumeSpec,
        (class, store): (&StorageClass, Option<&StoreId>),
        may_reschedule: bool,
    ) -> Result<ApplyOutcome, ApplyError> {
        let _lock = self.locks.lock(&seen.id).await;
        let started = Instant::now();
        // The cached claim may be stale: it may have been bound to its volume, and have lost it, since.
        let Some(claim) = self.read_claim(&seen.claim_ref).await? else { return Ok(ApplyOutcome::Done) };
        let live = ObservedClaim { claim: &claim, class: Some(class), volume: None };
        let spec = match plan_claim(&self.identity, live) {
            ClaimAction::Provision(spec) => spec,
            ClaimAction::Reject(rejection) => return Ok(ApplyOutcome::Rejected(rejection)),
            _ => return Ok(ApplyOutcome::Done),
        };
        let spec = self.apply_attributes_class(*spec).await?;
        let content = match self.find_content(&claim, &spec).await? {
            VolumeContent::Unavailable(outcome) => return Ok(outcome),
            content => content,
        };
        // No other node has the data.
        let may_reschedule = may_reschedule && spec.source.is_none();
        match self.create_volume(store, &spec, &content).await {
            Ok(CreateOutcome::Created) => {
                self.metrics.record_provision(&spec.storage_class, started.elapsed(), true);
                let (namespace, name) = (&spec.claim_ref.namespace, &spec.claim_ref.name);
                tracing::info!(
                    pv = %spec.id,
                    namespace = namespace.as_deref(),
                    claim = name.as_deref(),
                    bytes = spec.capacity.0,
                    "provisioned volume"
                );
                let note = format!("Successfully provisioned volume {}", spec.id);
                self.recorder.record_event(&spec.claim_ref, EventReason::ProvisioningSucceeded, &note).await;
                Ok(ApplyOutcome::Done)
            }
            // It was recorded and reported before, unless a crash came between; the claim is bound either way.
            Ok(CreateOutcome::AlreadyExists) => Ok(ApplyOutcome::Done),
            Ok(CreateOutcome::OnOtherNode) => {
                self.remove_if_empty(&spec.id).await.map(|_| ApplyOutcome::Done)
            }
            Ok(CreateOutcome::NameConflict) => {
                Ok(ApplyOutcome::Rejected(ClaimRejection::NameConflict { id: spec.id.clone() }))
            }
            Err(ApplyError::Store(error)) if error.is_exhausted() && may_reschedule => {
                self.recorder
                    .record_event(&spec.claim_ref, EventReason::ProvisioningFailed, &format_chain(&error))
                    .await;
                Ok(ApplyOutcome::Exhausted { claim: Box::new(claim), size: spec.capacity })
            }
            Err(error) => Err(error),
        }
    }

    pub(crate) async fn create_volume(
        &self,
        store: Option<&StoreId>,
        spec: &VolumeSpec,
        content: &VolumeContent<'_>,
    ) -> Result<CreateOutcome, ApplyError> {
        match (content, spec.kind) {
            (VolumeContent::Copy(snapshots, from), VolumeKind::Directory) => {
                snapshots.create_volume_from(&spec.id, from, spec.limits).await
            }
            (VolumeContent::Copy(snapshots, from), VolumeKind::Image(format)) => {
                snapshots.create_image_from(&spec.id, from, format, spec.capacity).await
            }
            (_, VolumeKind::Directory) => self.store.create(&spec.id, spec.limits).await,
            (_, VolumeKind::Image(format)) => self.store.create_image(&spec.id, format, spec.capacity).await,
        }
        .map_err(ApplyError::Store)?;
        let volume = build_persistent_volume(&self.identity, store, spec);
        let (api, params) = (self.volumes_api(), PostParams::default());
        match self
            .steps
            .run_async(VolumeStep::CreatePersistentVolume, with_timeout(api.create(&params, &volume)))
            .await
        {
            Ok(_) => Ok(CreateOutcome::Created),
            // The answer to an earlier call was lost, or the object belongs to another component.
            Err(error) if status_code(&error) == Some(409) => match self.read_volume(spec.id.as_str()).await?
            {
                Some(volume) if !matches_spec(&volume, spec) => Ok(CreateOutcome::NameConflict),
                Some(volume) if is_on_node(&self.identity, &volume) => Ok(CreateOutcome::AlreadyExists),
                Some(_) => Ok(CreateOutcome::OnOtherNode),
                None => Err(ApiCall::CreateVolume.wrap_error()(error)),
            },
            Err(error) => Err(ApiCall::CreateVolume.wrap_error()(error)),
        }
    }

    /// Reads the claim; `None` if it is deleted, or another claim has its name.
    pub(crate) async fn read_claim(
        &self,
        seen: &ObjectReference,
    ) -> Result<Option<PersistentVolumeClaim>, ApplyError> {
        let name = seen.name.as_deref().unwrap_or_default();
        let claim = with_timeout(self.claims_api(seen.namespace.as_deref()).get(name)).await;
        let claim = none_if_not_found(claim).map_err(ApiCall::ReadClaim.wrap_error())?;
        Ok(claim.filter(|claim| claim.metadata.uid == seen.uid))
    }

    pub(crate) async fn read_volume(&self, name: &str) -> Result<Option<PersistentVolume>, ApplyError> {
        none_if_not_found(with_timeout(self.volumes_api().get(name)).await)
            .map_err(ApiCall::ReadVolume.wrap_error())
    }

    /// Writes this node into a claim without a selected node. The first node wins; the watch notifies the
    /// others. `false`: no pod could use the volume on this node now, so that it is left to others.
    pub(crate) async fn select_node(&self, claim: &PersistentVolumeClaim) -> Result<bool, ApplyError> {
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let nodes: Api<Node> = Api::all(self.client.0.clone());
        let node = with_timeout(nodes.get(self.identity.node.as_str())).await;
        let node = none_if_not_found(node).map_err(ApiCall::ReadNode.wrap_error())?;
        if let Some(taint) = node.as_ref().map_or(Some("not registered"), taint_against_volumes) {
            tracing::info!(claim = name, taint, "leaving a claim with immediate binding to other nodes");
            return Ok(false);
        }
        tracing::info!(claim = name, "selecting this node for a claim with immediate binding");
        let node = json!(self.identity.node.as_str());
        self.patch_selected_node(VolumeStep::SelectNode, claim, node).await.map(|()| true)
    }

    /// Removes this node from a claim, so that the scheduler selects another.
    pub(crate) async fn deselect_node(&self, claim: &PersistentVolumeClaim) -> Result<(), ApplyError> {
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        tracing::info!(
            claim = name,
            "no free space for the claim's volume: deselecting this node, so that another is selected"
        );
        self.patch_selected_node(VolumeStep::DeselectNode, claim, Value::Null).await
    }

    /// Patches the selected node of exactly this version of a claim.
    ///
    /// A patch, not an update: an update would drop the fields that this client does not know.
    pub(crate) async fn patch_selected_node(
        &self,
        step: VolumeStep,
        claim: &PersistentVolumeClaim,
        node: Value,
    ) -> Result<(), ApplyError> {
        let meta = &claim.metadata;
        let patch = Patch::Merge(json!({ "metadata": {
            "uid": meta.uid,
            "resourceVersion": meta.resource_version,
            "annotations": { SELECTED_NODE: node },
        } }));
        let api = self.claims_api(meta.namespace.as_deref());
        let (name, params) = (meta.name.as_deref().unwrap_or_default(), PatchParams::default());
        match self.steps.run_async(step, with_timeout(api.patch(name, &params, &patch))).await {
            Ok(_) => Ok(()),
            // The object has changed or is deleted: the watch reports it.
            Err(error) if matches!(status_code(&error), Some(404 | 409)) => Ok(()),
            Err(error) => Err(ApiCall::PatchClaim.wrap_error()(error)),
        }
    }

    /// Deletes a volume and its PersistentVolume. `is_claim_cached`: the cache has a live claim with the
    /// volume's UID, so the claim is searched by UID if the PersistentVolume's claim reference does not lead
    /// to it.
    pub(crate) async fn delete_volume(
        &self,
        seen: &PersistentVolume,
        (id, store): (&VolumeId, Option<&StoreId>),
        is_claim_cached: bool,
    ) -> Result<(), ApplyError> {
        let _lock = self.locks.lock(id).await;
        let started = Instant::now();
        let deleted = self.delete_locked_volume(seen, (id, store), is_claim_cached).await;
        let class = seen.spec.as_ref().and_then(|spec| spec.storage_class_name.as_deref());
        // A volume that is gone, or no longer to be deleted, counts neither as a success nor as a failure.
        if !matches!(deleted, Ok(false)) {
            self.metrics.record_delete(class.unwrap_or_default(), started.elapsed(), deleted.is_ok());
        }
        deleted.map(drop)
    }

    /// Returns whether this call has deleted the volume.
    pub(crate) async fn delete_locked_volume(
        &self,
        seen: &PersistentVolume,
        (id, store): (&VolumeId, Option<&StoreId>),
        is_claim_cached: bool,
    ) -> Result<bool, ApplyError> {
        let Some(live) = self.read_volume(id.as_str()).await? else { return Ok(false) };
        // The cached volume may be stale: it may be in use again, or be another object of the same name.
        let is_same = live.metadata.uid == seen.metadata.uid;
        if !is_same || plan_volume(&self.identity, &live) != VolumeAction::Delete(id.clone()) {
            return Ok(false);
        }
        let spec = live.spec.clone().unwrap_or_default();
        let claim = match self.read_claim(&spec.claim_ref.unwrap_or_default()).await? {
            None if is_claim_cached => self.find_claim(id).await?,
            claim => claim,
        };
        if let Some(claim) = claim.filter(|claim| !is_bound_elsewhere(claim, id)) {
            return Err(ApplyError::ClaimExists { claim: claim.metadata.name.unwrap_or_default() });
        }
        if let Some(named) = named_store(&live).filter(|named| store.is_some_and(|store| store != named))
            && !is_marked_lost(&self.identity, &live)
            && !self.volume_exists(id).await
        {
            return Err(ApplyError::OtherStore { id: id.clone(), named });
        }
        let _reservation = self.reserve_volume(id).await?;
        tracing::info!(pv = %id, handle = %id, claim_uid = id.claim_uid(), "deleting volume");
        self.remove_volume(&live, id).await.map(|()| true)
    }

    /// Ensures that a volume is not in use on this node, and is not used from now on.
    pub(crate) async fn reserve_volume(
        &self,
        id: &VolumeId,
    ) -> Result<Option<VolumeReservation>, ApplyError> {
        let Some(guard) = self.guard.clone() else { return Ok(None) };
        let owned = id.clone();
        let reserved = tokio::task::spawn_blocking(move || guard.reserve(&owned)).await;
        let stopped = |error| Err(GuardError::Inspect { id: id.clone(), source: Box::new(error) });
        reserved.unwrap_or_else(stopped).map(Some).map_err(ApplyError::Guard)
    }

    pub(crate) async fn remove_volume(
        &self,
        live: &PersistentVolume,
        id: &VolumeId,
    ) -> Result<(), ApplyError> {
        self.store.remove(id).await.map_err(ApplyError::Store)?;
        if live.metadata.deletion_timestamp.is_some() {
            return self.remove_finalizer(live).await;
        }
        let uid = live.metadata.uid.clone();
        let preconditions = Some(Preconditions { uid, resource_version: None });
        let params = DeleteParams { preconditions, ..DeleteParams::default() };
        let (api, name) = (self.volumes_api(), id.as_str());
        let deleted = self
            .steps
            .run_async(VolumeStep::DeletePersistentVolume, with_timeout(api.delete(name, &params)))
            .await;
        match none_if_not_found(deleted).map_err(ApiCall::DeleteVolume.wrap_error())? {
            // It stays until its finalizers are removed.
            Some(answer) => match answer.left() {
                Some(going) => self.remove_finalizer(&going).await,
                None => Ok(()),
            },
            None => Ok(()),
        }
    }

    /// Removes our finalizer, whatever the volume's version is: the volume controllers remove theirs at the
    /// same time.
    pub(crate) async fn remove_finalizer(&self, volume: &PersistentVolume) -> Result<(), ApplyError> {
        if !has_finalizer(&self.identity, volume) {
            return Ok(());
        }
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        tracing::info!(pv = name, "removing the finalizer of the PersistentVolume");
        let patch = Patch::Strategic(json!({ "metadata": {
            "uid": volume.metadata.uid,
            "$deleteFromPrimitiveList/finalizers": self.identity.finalizer.as_slice(),
        } }));
        // A conflict is not tolerated: the volume would be deleted a second time, and counted twice.
        self.patch_volume((VolumeStep::RemoveFinalizer, &[404]), name, &patch).await
    }

    /// Adds our finalizer to exactly this version of a volume.
    pub(crate) async fn add_finalizer(&self, volume: &PersistentVolume) -> Result<(), ApplyError> {
        let finalizers: Vec<_> =
            volume.metadata.finalizers.iter().flatten().chain(&self.identity.finalizer).collect();
        self.patch_version(VolumeStep::AddFinalizer, volume, json!({ "finalizers": finalizers })).await
    }

    /// Records the claim that exactly this version of a volume is bound to.
    pub(crate) async fn record_claim(&self, volume: &PersistentVolume, uid: &str) -> Result<(), ApplyError> {
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        tracing::info!(pv = name, claim_uid = uid, "recording that the volume is bound to another claim");
        let annotations = json!({ "annotations": { self.identity.driver.claim_annotation(): uid } });
        self.patch_version(VolumeStep::RecordClaim, volume, annotations).await
    }

    /// Patches the metadata of exactly this version of a volume.
    pub(crate) async fn patch_version(
        &self,
        step: VolumeStep,
        volume: &PersistentVolume,
        mut metadata: Value,
    ) -> Result<(), ApplyError> {
        metadata["uid"] = json!(volume.metadata.uid);
        metadata["resourceVersion"] = json!(volume.metadata.resource_version);
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        // The object has changed or is deleted: the watch reports it.
        self.patch_volume((step, &[404, 409]), name, &Patch::Merge(json!({ "metadata": metadata }))).await
    }

    pub(crate) async fn patch_volume(
        &self,
        (step, tolerated): (VolumeStep, &[u16]),
        name: &str,
        patch: &Patch<Value>,
    ) -> Result<(), ApplyError> {
        let (api, params) = (self.volumes_api(), PatchParams::default());
        match self.steps.run_async(step, with_timeout(api.patch(name, &params, patch))).await {
            Err(error) if !status_code(&error).is_some_and(|code| tolerated.contains(&code)) => {
                Err(ApiCall::PatchVolume.wrap_error()(error))
            }
            _ => Ok(()),
        }
    }
}

/// Whether a PersistentVolume is the one that this spec describes.
fn matches_spec(volume: &PersistentVolume, spec: &VolumeSpec) -> bool {
    let found = volume.spec.as_ref();
    let claim = found.and_then(|found| found.claim_ref.as_ref()).and_then(|claim| claim.uid.as_deref());
    let handle = found.and_then(|found| found.csi.as_ref()).map(|csi| csi.volume_handle.as_str());
    claim == Some(spec.id.claim_uid()) && handle == Some(spec.id.as_str())
}

/// Whether a PersistentVolume is of this driver and this node.
fn is_on_node(identity: &ProvisionerIdentity, volume: &PersistentVolume) -> bool {
    volume.spec.as_ref().is_some_and(|spec| ownership_mismatch(identity, spec).is_none())
}

/// Whether a claim is bound to another volume, so that it does not need this one.
pub(crate) fn is_bound_elsewhere(claim: &PersistentVolumeClaim, id: &VolumeId) -> bool {
    let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    !volume.is_empty() && volume != id.as_str()
}

/// A reference to a volume for events.
pub(crate) fn volume_reference(volume: &PersistentVolume) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("PersistentVolume".to_owned()),
        name: volume.metadata.name.clone(),
        uid: volume.metadata.uid.clone(),
        resource_version: volume.metadata.resource_version.clone(),
        ..ObjectReference::default()
    }
}

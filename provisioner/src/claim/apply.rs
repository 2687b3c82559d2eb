//! Creates the volume of a claim and its PersistentVolume: each step can be interrupted and repeated.

use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::PostParams;
use nodekeel_fsquota::Bytes;
use serde_json::{Value, json};

use crate::api::call::{ApiCall, status_code};
use crate::api::event::{EventReason, EventRecorder};
use crate::api::writer::{ApiWriter, ObjectPart};
use crate::claim::attributes::apply_attributes;
use crate::claim::decide::{ClaimAction, ObservedClaim, plan_claim};
use crate::claim::manifest::build_persistent_volume;
use crate::claim::source::{DataSource, SourceAction, check_source_kind, plan_clone, plan_restore};
use crate::claim::spec::{ClaimRejection, VolumeSpec};
use crate::deletion::apply::VolumeRemover;
use crate::error_chain::format_chain;
use crate::failure::ReconcileError;
use crate::identity::SELECTED_NODE;
use crate::image::VolumeKind;
use crate::metrics::VolumeMetrics;
use crate::node::{NodeObserver, taint_against_volumes};
use crate::objects::{bound_volume_name, is_in_store};
use crate::snapshot::{SnapshotStore, StoredId, VolumeSnapshot, VolumeSnapshotContent};
use crate::step::VolumeStep;
use crate::store::VolumeStore;
use crate::store_id::StoreId;
use crate::volume_locks::VolumeLocks;

/// The end of an attempt to provision a claim, without an error.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ProvisionOutcome {
    /// The claim has its volume, or needs none.
    Done,
    /// A volume of this size does not fit on the node. Another one may be selected, but only for this version of
    /// the claim, and after the scheduler knows.
    Exhausted { claim: Box<PersistentVolumeClaim>, size: Bytes },
    /// The data source of the claim is on another node, which was selected for it.
    HandedOver,
    /// The live object must be rejected, unlike the cached one.
    Rejected(ClaimRejection),
}

/// The result of creating a PersistentVolume.
enum CreateOutcome {
    Created,
    AlreadyExists,
    /// Another node has created it: the claim was rescheduled to that node.
    OnOtherNode,
    /// A PersistentVolume of another claim has its name.
    NameConflict,
}

/// The origin of a new volume's data.
enum VolumeContent<'a> {
    Empty,
    /// A snapshot or a volume of this node.
    Copy(&'a dyn SnapshotStore, StoredId),
    /// The volume is not created now.
    Unavailable(ProvisionOutcome),
}

/// Provisions claims.
#[derive(Debug)]
pub(crate) struct ClaimProvisioner {
    pub(crate) api: ApiWriter,
    pub(crate) store: Arc<dyn VolumeStore>,
    pub(crate) snapshots: Option<Arc<dyn SnapshotStore>>,
    pub(crate) remover: Arc<VolumeRemover>,
    pub(crate) locks: Arc<VolumeLocks>,
    pub(crate) metrics: Arc<dyn VolumeMetrics>,
    pub(crate) recorder: Arc<EventRecorder>,
    pub(crate) node: NodeObserver,
}

impl ClaimProvisioner {
    /// Creates a claim's volume and its PersistentVolume. If `may_reschedule` and the node has no free space for it,
    /// that is not an error: another node may be selected.
    pub(crate) async fn provision_claim(
        &self,
        seen: &VolumeSpec,
        class: &StorageClass,
        store: Option<&StoreId>,
        may_reschedule: bool,
    ) -> Result<ProvisionOutcome, ReconcileError> {
        // Locked until the PersistentVolume exists: until then, the new directory looks like an orphan to the sweeper.
        let _lock = self.locks.lock(&seen.id).await;
        let started = Instant::now();

        // Decide again on the live claim. The cached one may be stale: the claim may have been bound to its volume, and
        // have lost it, since.
        let Some(claim) = self.api.read_claim(&seen.claim_ref).await? else {
            return Ok(ProvisionOutcome::Done);
        };
        // The PersistentVolume is not read: if there is one, its creation fails, and `create_volume` compares the two.
        let labels = self.node.facts().map(|node| node.labels);
        let live =
            ObservedClaim { claim: &claim, class: Some(class), volume: None, node_labels: labels.as_deref() };
        let mut spec = match plan_claim(&self.api.identity, live) {
            ClaimAction::Provision(spec) => spec,
            ClaimAction::Reject(rejection) => return Ok(ProvisionOutcome::Rejected(rejection)),
            _ => return Ok(ProvisionOutcome::Done),
        };
        if let Some(name) = &spec.attributes_class {
            // No cache has these classes.
            let class = self.api.read(ApiCall::ReadAttributesClass, &self.api.all(), name).await?;
            apply_attributes(&self.api.identity, class.as_ref(), &mut spec)
                .map_err(ReconcileError::Attributes)?;
        }
        let content = match self.find_content(&claim, &spec).await? {
            VolumeContent::Unavailable(outcome) => return Ok(outcome),
            content => content,
        };

        // Only now is anything changed. The directory comes first: a PersistentVolume promises that there is one.
        let created = match self.create_directory(&spec, &content).await {
            Ok(()) => self.create_volume(store, &spec).await?,
            // A volume with a data source stays: no other node has the data.
            Err(ReconcileError::Store(error))
                if error.is_exhausted() && may_reschedule && spec.source.is_none() =>
            {
                let note = format_chain(&error);
                self.recorder.record_event(&spec.claim_ref, EventReason::ProvisioningFailed, &note).await;
                return Ok(ProvisionOutcome::Exhausted { claim: Box::new(claim), size: spec.capacity });
            }
            Err(error) => return Err(error),
        };
        match created {
            CreateOutcome::Created => {
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
                Ok(ProvisionOutcome::Done)
            }
            // An earlier call has recorded and reported it, unless a crash came between. The claim is bound either way.
            CreateOutcome::AlreadyExists => Ok(ProvisionOutcome::Done),
            CreateOutcome::OnOtherNode => {
                // The other node serves the claim, so no object will ever name the directory that was created here.
                self.remover.remove_if_empty(&spec.id).await.map(|_| ProvisionOutcome::Done)
            }
            CreateOutcome::NameConflict => {
                Ok(ProvisionOutcome::Rejected(ClaimRejection::NameConflict { id: spec.id.clone() }))
            }
        }
    }

    async fn create_directory(
        &self,
        spec: &VolumeSpec,
        content: &VolumeContent<'_>,
    ) -> Result<(), ReconcileError> {
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
        .map_err(ReconcileError::Store)
    }

    async fn create_volume(
        &self,
        store: Option<&StoreId>,
        spec: &VolumeSpec,
    ) -> Result<CreateOutcome, ReconcileError> {
        let volume = build_persistent_volume(&self.api.identity, store, spec);
        let (api, params) = (self.api.all::<PersistentVolume>(), PostParams::default());
        let create = api.create(&params, &volume);
        let error = match self.api.write(VolumeStep::CreatePersistentVolume, create).await {
            Ok(_) => return Ok(CreateOutcome::Created),
            Err(error) => error,
        };
        // "Already exists": the answer to an earlier call was lost, or the object belongs to another component.
        let found = match status_code(&error) {
            Some(409) => self.api.read_volume(spec.id.as_str()).await?,
            _ => None,
        };
        match found {
            Some(volume) if !matches_spec(&volume, spec) => Ok(CreateOutcome::NameConflict),
            Some(volume) if is_in_store(&self.api.identity, &volume) => Ok(CreateOutcome::AlreadyExists),
            Some(_) => Ok(CreateOutcome::OnOtherNode),
            // The existing object was deleted between the two calls. The retry creates it.
            None => Err(ApiCall::CreateVolume.wrap_error(error).into()),
        }
    }

    /// Finds the source of a claim's volume. A claim whose source is on another node is handed over to that node.
    async fn find_content(
        &self,
        claim: &PersistentVolumeClaim,
        spec: &VolumeSpec,
    ) -> Result<VolumeContent<'_>, ReconcileError> {
        let unavailable = |rejection| Ok(VolumeContent::Unavailable(ProvisionOutcome::Rejected(rejection)));
        let Some(source) = &spec.source else { return Ok(VolumeContent::Empty) };
        let Some(store) = self.snapshots.as_deref() else {
            return unavailable(ClaimRejection::SourcesUnsupported);
        };
        match self.plan_source(spec, source).await? {
            SourceAction::Copy(id) => {
                // The object of a snapshot shows only whether it is one of a block volume: the store knows its kind.
                if let (StoredId::Snapshot(id), DataSource::Snapshot(name)) = (&id, source) {
                    let found = store.find_snapshot(id).await.map_err(ReconcileError::Snapshot)?;
                    if let Some(other) = found.and_then(|info| check_source_kind(spec, name, info.kind)) {
                        return unavailable(other);
                    }
                }
                Ok(VolumeContent::Copy(store, id))
            }
            SourceAction::Wait(reason) => Err(ReconcileError::SourceNotReady { reason }),
            SourceAction::Reject(rejection) => unavailable(rejection),
            SourceAction::HandOver(node) => {
                self.hand_over(claim, spec, &node).await?;
                Ok(VolumeContent::Unavailable(ProvisionOutcome::HandedOver))
            }
        }
    }

    /// Reads the objects of a data source, and plans.
    async fn plan_source(
        &self,
        spec: &VolumeSpec,
        source: &DataSource,
    ) -> Result<SourceAction, ReconcileError> {
        let namespace = spec.claim_ref.namespace.as_deref();
        match source {
            DataSource::Snapshot(name) => {
                let snapshots = self.api.namespaced::<VolumeSnapshot>(namespace);
                let snapshot = self.api.read(ApiCall::ReadSnapshot, &snapshots, name).await?;
                let status = snapshot.as_ref().and_then(|snapshot| snapshot.status.as_ref());
                let content = match status.and_then(|it| it.bound_volume_snapshot_content_name.as_deref()) {
                    Some(name) => {
                        let contents = self.api.all::<VolumeSnapshotContent>();
                        self.api.read(ApiCall::ReadSnapshotContent, &contents, name).await?
                    }
                    None => None,
                };
                Ok(plan_restore(&self.api.identity, spec, name, snapshot.as_ref(), content.as_ref()))
            }
            DataSource::Claim(name) => {
                let claims = self.api.namespaced::<PersistentVolumeClaim>(namespace);
                let claim = self.api.read(ApiCall::ReadClaim, &claims, name).await?;
                let volume = match claim.as_ref().and_then(bound_volume_name) {
                    Some(name) => self.api.read_volume(name).await?,
                    None => None,
                };
                Ok(plan_clone(&self.api.identity, spec, name, claim.as_ref(), volume.as_ref()))
            }
        }
    }

    /// Writes this node into a claim without a selected node. The first node wins; the watch notifies the
    /// others. If no pod could use the volume on this node now, the claim is left to others.
    pub(crate) async fn select_node(&self, claim: &PersistentVolumeClaim) -> Result<(), ReconcileError> {
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let nodes = self.api.all::<Node>();
        let node = self.api.read(ApiCall::ReadNode, &nodes, self.api.identity.node.as_str()).await?;
        if let Some(taint) = node.as_ref().map_or(Some("not registered"), taint_against_volumes) {
            tracing::info!(claim = name, taint, "leaving a claim with immediate binding to other nodes");
            return Ok(());
        }
        tracing::info!(claim = name, "selecting this node for a claim with immediate binding");
        let node = json!(self.api.identity.node.as_str());
        self.patch_selected_node(VolumeStep::SelectNode, claim, node).await
    }

    /// Removes this node from a claim, for this reason, so that the scheduler selects another.
    pub(crate) async fn deselect_node(
        &self,
        claim: &PersistentVolumeClaim,
        why: &str,
    ) -> Result<(), ReconcileError> {
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        tracing::info!(claim = name, "{why}: deselecting this node, so that another is selected");
        // In a merge patch (RFC 7386), null removes the annotation.
        self.patch_selected_node(VolumeStep::DeselectNode, claim, Value::Null).await
    }

    /// Writes the node of a claim's data source into the claim, in place of this one. The scheduler does not know
    /// where the source is, and would select any node again and again.
    async fn hand_over(
        &self,
        claim: &PersistentVolumeClaim,
        spec: &VolumeSpec,
        node: &str,
    ) -> Result<(), ReconcileError> {
        let name = spec.claim_ref.name.as_deref().unwrap_or_default();
        tracing::info!(claim = name, node, "handing a claim over to the node of its data source");
        let note = format!("the claim's data source is on node {node}, so that node provisions its volume");
        // First the event: after the patch, the claim belongs to the other node.
        self.recorder.record_event(&spec.claim_ref, EventReason::Provisioning, &note).await;
        self.patch_selected_node(VolumeStep::HandOverClaim, claim, json!(node)).await
    }

    /// Patches the selected node of exactly this version of a claim. If it has changed or is deleted, the watch reports it.
    async fn patch_selected_node(
        &self,
        step: VolumeStep,
        claim: &PersistentVolumeClaim,
        node: Value,
    ) -> Result<(), ReconcileError> {
        let patch = json!({ "metadata": { "annotations": { SELECTED_NODE: node } } });
        let claims = self.api.namespaced(claim.metadata.namespace.as_deref());
        let call = ApiCall::PatchClaim;
        self.api.patch_version(step, call, &claims, claim, ObjectPart::Main, patch).await?;
        Ok(())
    }
}

fn matches_spec(volume: &PersistentVolume, spec: &VolumeSpec) -> bool {
    let found = volume.spec.as_ref();
    let claim = found.and_then(|found| found.claim_ref.as_ref()).and_then(|claim| claim.uid.as_deref());
    let handle = found.and_then(|found| found.csi.as_ref()).map(|csi| csi.volume_handle.as_str());
    claim == Some(spec.id.claim_uid()) && handle == Some(spec.id.as_str())
}

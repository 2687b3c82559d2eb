//! Moves the volume of a claim to another node, while no pod uses it.
//!
//! The claim is not touched but for its selected node. The PersistentVolume is deleted with its data retained; without it,
//! no pod is scheduled to the volume, and no kubelet mounts it. Then the data are copied, and a PersistentVolume of the same
//! name, for the same claim, is created on the other node: the volume controller binds the claim to it again, though it is
//! Lost in between. A name exists once, so the data are used in one place, however many moves and cancellations run. What is
//! left of the other copy is removed last.
//!
//! A ConfigMap records the move: the PersistentVolume as it was, and whether the move was cancelled. Each step is decided from
//! that and from the PersistentVolume, so each can be killed and repeated. Whether the copy is complete is asked of its node
//! at once before the PersistentVolume is created there. A move that has ended is over, for each call that has worked on it.
//!
//! *Source:* `pv_controller.go`, `syncBoundClaim`: a claim whose volume exists and names its UID is bound.

pub(crate) mod decide;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{ConfigMap, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::VolumeAttributesClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client};
use nodekeel_fsquota::QuotaLimits;
use serde_json::json;

use crate::api::call::{none_if_not_found, status_code};
use crate::api::timeout::with_timeout;
use crate::claim::size::inodes_parameter;
use crate::error_chain::format_chain;
use crate::id::VolumeId;
use crate::identity::SELECTED_NODE;
use crate::name::DriverName;
use crate::objects::{node_of_volume, store_name};
use crate::resize::bound_claim::volume_capacity;
use crate::step::{StepHook, StepRunner, VolumeStep};
use crate::store::ErrorSource;
use crate::store_id::StoreId;
use decide::{
    MoveAction, MoveRecord, MoveRejection, RECORD_FORMAT, check_volume, find_user, new_volume, plan_move,
};

/// The prefix of the names of records, before the id of the volume.
const RECORD_PREFIX: &str = "move-";

/// The key of a record's content in its ConfigMap.
const RECORD_KEY: &str = "move.json";

/// A claim, and the node that its volume moves to.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "complete by nature")]
pub struct MoveRequest {
    /// The claim's namespace.
    pub namespace: String,
    /// The claim's name.
    pub claim: String,
    /// The node; `None` cancels the move that is in progress.
    pub target: Option<String>,
}

/// The dependencies of a move.
#[derive(Clone)]
#[allow(clippy::exhaustive_structs, reason = "complete by nature")]
pub struct MoveDeps {
    /// The API server, as an operator.
    pub client: Client,
    /// The driver of the volumes.
    pub driver: DriverName,
    /// The namespace of the records, which only operators may write.
    pub namespace: String,
    /// Acts on the nodes.
    pub carrier: Arc<dyn VolumeCarrier>,
    /// Is called at each step; for tests.
    pub hook: Option<Arc<dyn StepHook>>,
}

/// A volume, and the nodes between which it is copied.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "complete by nature")]
pub struct VolumeCopy {
    /// The volume.
    pub id: VolumeId,
    /// The UID of the move's record.
    pub owner: String,
    /// The node that has it.
    pub source: String,
    /// The node that gets it.
    pub target: String,
    /// The name of its store, on both nodes; `None` is the one without a name.
    pub store: Option<String>,
    /// The limits that the PersistentVolume promises. Without one of inodes, the copy has that of the volume.
    pub limits: QuotaLimits,
}

/// Acts on nodes.
///
/// # Contract
/// Each method can be called again after an error or a kill, and also while a call that was given up still runs.
#[async_trait]
pub trait VolumeCarrier: Send + Sync + fmt::Debug {
    /// Checks that a volume can be copied: it exists in that store alone, is not mounted, and fits into its limits, and the
    /// other node serves a store of that name, which has room, and no volume of this name. Changes nothing.
    async fn check(&self, copy: &VolumeCopy) -> Result<(), ErrorSource>;

    /// Copies a volume that is not mounted and has no PersistentVolume, and verifies the copy. Returns its store once it is
    /// complete and durable, at once if an earlier call for this owner has made it and it is still there. Fails, and leaves
    /// nothing, if the volume has a PersistentVolume by then.
    async fn copy(&self, copy: &VolumeCopy) -> Result<StoreId, ErrorSource>;

    /// Ends a move on a node by what the volume's PersistentVolume says: on this node, the volume must exist, and stays; on
    /// another one, its data on this node are removed.
    async fn settle(&self, node: &str, id: &VolumeId) -> Result<(), ErrorSource>;
}

/// The result of a move.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum MoveOutcome {
    /// The volume is on the target now.
    Moved {
        /// The node that it was on.
        source: String,
    },
    /// The volume is on the target, and no move is in progress.
    AlreadyThere,
    /// The volume is where it was: the move was cancelled, for this reason if the call has found one.
    Stayed(Option<MoveRejection>),
    /// The claim was deleted during the move, so that its PersistentVolume is deleted or retained by its policy.
    ClaimDeleted {
        /// The volume.
        id: VolumeId,
        /// The node that may have a copy, which no PersistentVolume names.
        copy: Option<String>,
    },
}

/// A move failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MoveError {
    /// The claim can't be moved now, or the move can't go on.
    #[error("can't move claim {namespace}/{claim}")]
    Rejected {
        /// The claim's namespace.
        namespace: String,
        /// The claim's name.
        claim: String,
        /// The cause.
        #[source]
        source: MoveRejection,
    },
    /// The nodes rejected the move; nothing was changed.
    #[error("can't move volume {id} to node {target}; nothing was changed")]
    Check {
        /// The volume.
        id: VolumeId,
        /// The node.
        target: String,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// A node failed. No pod can use the claim until the move is complete, or cancelled.
    #[error(
        "can't {action} volume {id}: repeat the command to resume, or cancel the move with --cancel; if a node is gone for good, \
         delete its Node first"
    )]
    Node {
        /// The action.
        action: &'static str,
        /// The volume.
        id: VolumeId,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// The API server failed, or rejected the call. Repeat the move to resume.
    #[error("can't {call}: repeat the command to resume")]
    Api {
        /// The failed call.
        call: &'static str,
        /// The cause.
        #[source]
        source: kube::Error,
    },
    /// The record of a move can't be read.
    #[error(
        "can't read ConfigMap {namespace}/{name}, the record of a move of volume {id}: use the release that has written it, \
         or correct it"
    )]
    InvalidRecord {
        /// The namespace.
        namespace: String,
        /// The name.
        name: String,
        /// The volume.
        id: VolumeId,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
}

/// Moves the volume of a claim, resumes a move that was interrupted, or cancels it.
///
/// # Errors
/// [`MoveError`]: the message names the remedy. Each call can be repeated, also after a kill.
///
/// # Cancel safety
/// A dropped future leaves the record; the next call resumes.
pub async fn move_volume(deps: &MoveDeps, request: &MoveRequest) -> Result<MoveOutcome, MoveError> {
    VolumeMove { deps, request, steps: StepRunner::new(deps.hook.clone()) }.run().await
}

/// Lists the moves in progress of volumes that were on this node, and may have no PersistentVolume now; and the records that
/// can't be read, of moves from any node.
///
/// # Errors
/// [`MoveError::Api`]; of a record, [`MoveError::InvalidRecord`].
pub async fn list_moves(
    deps: &MoveDeps,
    source: &str,
) -> Result<Vec<Result<MoveRequest, MoveError>>, MoveError> {
    let mut records = read_records(deps).await?;
    records.retain(|stored| stored.as_ref().map_or(true, |stored| stored.record.source == source));
    let request = |StoredRecord { record, .. }| MoveRequest {
        namespace: record.namespace,
        claim: record.claim,
        target: (!record.is_cancelled).then_some(record.target),
    };
    Ok(records.into_iter().map(|stored| stored.map(request)).collect())
}

struct VolumeMove<'a> {
    deps: &'a MoveDeps,
    request: &'a MoveRequest,
    steps: StepRunner,
}

/// A record, and the ConfigMap that has it.
struct StoredRecord {
    object: ConfigMap,
    record: MoveRecord,
    id: VolumeId,
}

/// The beginning of a move.
enum Start {
    Created(Box<StoredRecord>),
    /// Another call has created the record of this volume.
    Exists(VolumeId),
    /// The volume is on the target.
    AlreadyThere,
}

impl StoredRecord {
    fn uid(&self) -> &str {
        self.object.metadata.uid.as_deref().unwrap_or_default()
    }
}

impl VolumeMove<'_> {
    async fn run(&self) -> Result<MoveOutcome, MoveError> {
        let (mut last, mut reason, mut copied) = (None::<StoredRecord>, None, None);
        let mut has_other = false;
        loop {
            let found = self.read_record().await?;
            if let Some(last) = &last
                && found.as_ref().is_none_or(|found| found.uid() != last.uid())
            {
                return self.find_end(last).await;
            }
            let Some(found) = found else {
                match self.start().await? {
                    Start::Created(stored) => last = Some(*stored),
                    Start::Exists(id) if has_other => {
                        return Err(self.rejected(MoveRejection::OtherClaim { id }));
                    }
                    Start::Exists(_) => has_other = true,
                    Start::AlreadyThere => return Ok(MoveOutcome::AlreadyThere),
                }
                continue;
            };
            let stored = &*last.insert(found);
            let record = &stored.record;
            match &self.request.target {
                None if !record.is_cancelled => {
                    self.cancel(stored).await?;
                    continue;
                }
                Some(target) if *target != record.target => {
                    return Err(self.rejected(MoveRejection::OtherTarget { target: record.target.clone() }));
                }
                // Not by itself: the caller wants the volume there.
                Some(_) if record.is_cancelled && reason.is_none() => {
                    return Err(self.rejected(MoveRejection::Cancelled));
                }
                _ => {}
            }
            let found = self.read_volume(stored.id.as_str()).await?;
            let action = plan_move(&self.deps.driver, record, stored.uid(), found.as_ref());
            let action = action.map_err(|rejection| self.rejected(rejection))?;
            // A record and a PersistentVolume without a name or a version are none of an API server.
            let found = found.unwrap_or_default();
            match action {
                MoveAction::RecordVolume(volume) => {
                    self.update(stored, MoveRecord { volume: Some(*volume), ..record.clone() }).await?;
                }
                MoveAction::Abandon(rejection) => {
                    self.remove_record(stored).await?;
                    return match rejection {
                        Some(rejection) => Err(self.rejected(rejection)),
                        None => Ok(MoveOutcome::Stayed(reason)),
                    };
                }
                MoveAction::Freeze => self.freeze(&found, stored.uid()).await?,
                MoveAction::Delete => self.delete(&found).await?,
                MoveAction::RemoveFinalizers => self.remove_finalizers(&found).await?,
                MoveAction::Copy(volume) => match (self.find_obstacle(record).await?, copied.take()) {
                    // The volume goes back: its pod, or its deletion, needs it there.
                    (Some(found), _) => {
                        reason = Some(found);
                        self.cancel(stored).await?;
                    }
                    // The record and the claim are read again first: a copy takes long.
                    (None, None) => copied = self.copy(stored, &volume).await?,
                    (None, Some(store)) => {
                        let target = Some((record.target.as_str(), store.as_str()));
                        let volume = new_volume(&self.deps.driver, &volume, stored.uid(), target);
                        self.create(&volume).await?;
                        if !self.has_claim(record).await? {
                            return self.end_without_claim(stored, &record.target).await;
                        }
                    }
                },
                MoveAction::Create(volume) => {
                    self.create(&volume).await?;
                    if !self.has_claim(record).await? {
                        return self.end_without_claim(stored, &record.source).await;
                    }
                }
                MoveAction::Settle { node } if !self.has_claim(record).await? => {
                    return self.end_without_claim(stored, &node).await;
                }
                MoveAction::Settle { node } => {
                    self.settle(stored, &node).await?;
                    return Ok(if node == record.source {
                        MoveOutcome::Stayed(reason)
                    } else {
                        MoveOutcome::Moved { source: record.source.clone() }
                    });
                }
            }
        }
    }

    /// Checks the claim and both nodes, and creates the record.
    async fn start(&self) -> Result<Start, MoveError> {
        let MoveRequest { namespace, claim: name, target } = self.request;
        let Some(target) = target else { return Err(self.rejected(MoveRejection::NoMove)) };
        let claim = self.read_claim().await?.filter(|claim| claim.metadata.deletion_timestamp.is_none());
        let claim = claim.ok_or_else(|| self.rejected(MoveRejection::ClaimDeleted))?;
        let bound = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
        let volume = match bound {
            "" => None,
            bound => self.read_volume(bound).await?,
        };
        let volume = volume.ok_or_else(|| self.rejected(MoveRejection::NotBound))?;
        let (id, source) = check_volume(&self.deps.driver, &volume).map_err(|it| self.rejected(it))?;
        if source == target {
            return Ok(Start::AlreadyThere);
        }
        if let Some(user) = self.find_pod().await? {
            return Err(self.rejected(user));
        }
        let record = MoveRecord {
            format: RECORD_FORMAT,
            namespace: namespace.clone(),
            claim: name.clone(),
            claim_uid: claim.metadata.uid.unwrap_or_default(),
            source: source.to_owned(),
            target: target.clone(),
            volume: None,
            is_cancelled: false,
        };
        let checked = self.deps.carrier.check(&self.volume_copy(&id, "", &record, &volume).await?).await;
        checked.map_err(|source| MoveError::Check { id: id.clone(), target: target.clone(), source })?;
        let object = ConfigMap {
            metadata: ObjectMeta { name: Some(format!("{RECORD_PREFIX}{id}")), ..ObjectMeta::default() },
            data: Some(record_data(&record)),
            ..ConfigMap::default()
        };
        let (records, params) = (self.records(), PostParams::default());
        let create = with_timeout(records.create(&params, &object));
        match self.steps.run_async(VolumeStep::RecordMove, create).await {
            Ok(object) => Ok(Start::Created(Box::new(StoredRecord { object, record, id }))),
            // Another call has just begun.
            Err(error) if status_code(&error) == Some(409) => Ok(Start::Exists(id)),
            Err(error) => Err(api_error("create the record of the move")(error)),
        }
    }

    /// The end of a move that another call has ended since its record was read here: it is not begun again.
    async fn find_end(&self, last: &StoredRecord) -> Result<MoveOutcome, MoveError> {
        let MoveRecord { source, target, .. } = &last.record;
        let volume = self.read_volume(last.id.as_str()).await?;
        Ok(if volume.as_ref().and_then(node_of_volume) == Some(target) {
            MoveOutcome::Moved { source: source.clone() }
        } else {
            MoveOutcome::Stayed(Some(MoveRejection::Ended))
        })
    }

    /// Ends a move whose claim was deleted: the PersistentVolume is on this node, which deletes or keeps it by its policy, and
    /// perhaps has done so. Then nothing tells the other node that its copy is one.
    async fn end_without_claim(&self, stored: &StoredRecord, node: &str) -> Result<MoveOutcome, MoveError> {
        let MoveRecord { source, target, .. } = &stored.record;
        let settled = self.settle_nodes(stored, node).await;
        self.remove_record(stored).await?;
        let other = if node == source { target } else { source };
        Ok(MoveOutcome::ClaimDeleted { id: stored.id.clone(), copy: settled.err().map(|_| other.clone()) })
    }

    /// A reason why the volume is needed where it was. Without its PersistentVolume, no pod gets a node any more.
    async fn find_obstacle(&self, record: &MoveRecord) -> Result<Option<MoveRejection>, MoveError> {
        if self.has_claim(record).await? {
            self.find_pod().await
        } else {
            Ok(Some(MoveRejection::ClaimDeleted))
        }
    }

    /// Returns whether the claim of the move still exists.
    async fn has_claim(&self, record: &MoveRecord) -> Result<bool, MoveError> {
        let claim = self.read_claim().await?.map(|claim| claim.metadata);
        Ok(claim.is_some_and(|claim| {
            claim.uid.as_ref() == Some(&record.claim_uid) && claim.deletion_timestamp.is_none()
        }))
    }

    async fn find_pod(&self) -> Result<Option<MoveRejection>, MoveError> {
        let pods: Api<Pod> = Api::namespaced(self.deps.client.clone(), &self.request.namespace);
        let params = ListParams::default();
        let pods = with_timeout(pods.list(&params)).await.map_err(api_error("list the pods"))?;
        Ok(find_user(&pods.items, &self.request.claim))
    }

    /// Copies the volume; `None` if it has a PersistentVolume by now, since another call was faster.
    async fn copy(
        &self,
        stored: &StoredRecord,
        volume: &PersistentVolume,
    ) -> Result<Option<StoreId>, MoveError> {
        let copy = self.volume_copy(&stored.id, stored.uid(), &stored.record, volume).await?;
        match self.deps.carrier.copy(&copy).await {
            Ok(store) => Ok(Some(store)),
            Err(error) if self.read_volume(copy.id.as_str()).await?.is_some() => {
                tracing::info!(handle = %copy.id, "another call has ended the copy: {}", format_chain(&*error));
                Ok(None)
            }
            Err(source) => Err(MoveError::Node { action: "copy", id: copy.id, source }),
        }
    }

    async fn volume_copy(
        &self,
        id: &VolumeId,
        owner: &str,
        record: &MoveRecord,
        volume: &PersistentVolume,
    ) -> Result<VolumeCopy, MoveError> {
        let spec = volume.spec.as_ref();
        let class = spec.and_then(|spec| spec.volume_attributes_class_name.as_deref());
        let inodes = match class.filter(|name| !name.is_empty()) {
            Some(name) => {
                let classes: Api<VolumeAttributesClass> = Api::all(self.deps.client.clone());
                let class = none_if_not_found(with_timeout(classes.get(name)).await);
                let class = class.map_err(api_error("read the VolumeAttributesClass"))?;
                class.and_then(|class| inodes_parameter(class.parameters.as_ref()).ok().flatten())
            }
            None => None,
        };
        Ok(VolumeCopy {
            id: id.clone(),
            owner: owner.to_owned(),
            source: record.source.clone(),
            target: record.target.clone(),
            store: store_name(volume).map(str::to_owned),
            limits: QuotaLimits { bytes: Some(volume_capacity(volume)), inodes },
        })
    }

    /// Ends the move on the nodes, first on the one that has the PersistentVolume: nothing is removed elsewhere unless the
    /// volume exists there.
    async fn settle_nodes(&self, stored: &StoredRecord, node: &str) -> Result<(), MoveError> {
        let MoveRecord { source, target, .. } = &stored.record;
        let others = [source.as_str(), target].into_iter().filter(|other| *other != node);
        for settled in std::iter::once(node).chain(others) {
            match self.deps.carrier.settle(settled, &stored.id).await {
                Ok(()) => {}
                // A node that is gone for good never answers. If it comes back, what it has is listed there as another node's.
                Err(error) if settled != node && self.is_given_up(settled).await? => {
                    let error = format_chain(&*error);
                    tracing::warn!(node = settled, handle = %stored.id, "the node does not exist: {error}");
                }
                Err(source) => {
                    return Err(MoveError::Node { action: "settle", id: stored.id.clone(), source });
                }
            }
        }
        Ok(())
    }

    /// Returns whether a move ends without a node that does not answer: the operator cancels it, and the Node is deleted.
    async fn is_given_up(&self, node: &str) -> Result<bool, MoveError> {
        if self.request.target.is_some() {
            return Ok(false);
        }
        let nodes: Api<Node> = Api::all(self.deps.client.clone());
        let found = none_if_not_found(with_timeout(nodes.get(node)).await);
        Ok(found.map_err(api_error("read the Node"))?.is_none())
    }

    /// Ends the move on the nodes, and on the claim.
    async fn settle(&self, stored: &StoredRecord, node: &str) -> Result<(), MoveError> {
        let record = &stored.record;
        self.settle_nodes(stored, node).await?;
        // The scheduler and other programs read it, so it must not name the former node.
        let patch = Patch::Merge(json!({ "metadata": {
            "uid": record.claim_uid, "annotations": { SELECTED_NODE: node },
        } }));
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.deps.client.clone(), &record.namespace);
        let params = PatchParams::default();
        let select = with_timeout(claims.patch(&record.claim, &params, &patch));
        // The claim may be gone, or be another one.
        self.step(VolumeStep::SelectNode, "write the node into the claim", select).await?;
        self.remove_record(stored).await
    }

    async fn cancel(&self, stored: &StoredRecord) -> Result<(), MoveError> {
        self.update(stored, MoveRecord { is_cancelled: true, ..stored.record.clone() }).await
    }

    /// Changes exactly this version of the record.
    async fn update(&self, stored: &StoredRecord, record: MoveRecord) -> Result<(), MoveError> {
        let ObjectMeta { name, uid, resource_version, .. } = &stored.object.metadata;
        let patch = Patch::Merge(json!({
            "metadata": { "uid": uid, "resourceVersion": resource_version }, "data": record_data(&record),
        }));
        let (records, params) = (self.records(), PatchParams::default());
        let change = with_timeout(records.patch(name.as_deref().unwrap_or_default(), &params, &patch));
        self.step(VolumeStep::RecordMove, "change the record of the move", change).await
    }

    async fn remove_record(&self, stored: &StoredRecord) -> Result<(), MoveError> {
        let ObjectMeta { name, uid, resource_version, .. } = &stored.object.metadata;
        let params = DeleteParams::default()
            .preconditions(Preconditions { uid: uid.clone(), resource_version: resource_version.clone() });
        let records = self.records();
        let delete = with_timeout(records.delete(name.as_deref().unwrap_or_default(), &params));
        self.step(VolumeStep::RecordMove, "remove the record of the move", delete).await
    }

    async fn freeze(&self, volume: &PersistentVolume, uid: &str) -> Result<(), MoveError> {
        let patch = json!({
            "metadata": { "annotations": { self.deps.driver.move_annotation(): uid } },
            "spec": { "persistentVolumeReclaimPolicy": "Retain" },
        });
        self.patch_volume(VolumeStep::UpdateVolume, "retain the PersistentVolume", volume, patch).await
    }

    async fn remove_finalizers(&self, volume: &PersistentVolume) -> Result<(), MoveError> {
        let patch = json!({ "metadata": { "finalizers": null } });
        self.patch_volume(VolumeStep::RemoveFinalizer, "release the PersistentVolume", volume, patch).await
    }

    /// Patches exactly this version.
    async fn patch_volume(
        &self,
        step: VolumeStep,
        call: &'static str,
        volume: &PersistentVolume,
        mut patch: serde_json::Value,
    ) -> Result<(), MoveError> {
        patch["metadata"]["resourceVersion"] = json!(volume.metadata.resource_version);
        let (volumes, params, patch) = (self.volumes(), PatchParams::default(), Patch::Merge(patch));
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        self.step(step, call, with_timeout(volumes.patch(name, &params, &patch))).await
    }

    async fn delete(&self, volume: &PersistentVolume) -> Result<(), MoveError> {
        let ObjectMeta { name, uid, resource_version, .. } = &volume.metadata;
        let params = DeleteParams::default()
            .preconditions(Preconditions { uid: uid.clone(), resource_version: resource_version.clone() });
        let volumes = self.volumes();
        let delete = with_timeout(volumes.delete(name.as_deref().unwrap_or_default(), &params));
        self.step(VolumeStep::DeletePersistentVolume, "delete the PersistentVolume", delete).await
    }

    async fn create(&self, volume: &PersistentVolume) -> Result<(), MoveError> {
        let (volumes, params) = (self.volumes(), PostParams::default());
        let create = with_timeout(volumes.create(&params, volume));
        self.step(VolumeStep::CreatePersistentVolume, "create the PersistentVolume", create).await
    }

    /// Performs a step. An object that another call has changed, created or removed is read again.
    async fn step<T>(
        &self,
        step: VolumeStep,
        call: &'static str,
        act: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<(), MoveError> {
        match self.steps.run_async(step, act).await {
            Err(error) if !matches!(status_code(&error), Some(404 | 409)) => Err(api_error(call)(error)),
            _ => Ok(()),
        }
    }

    /// Reads the record of the claim. By the claim's name, since the claim may have been deleted.
    async fn read_record(&self) -> Result<Option<StoredRecord>, MoveError> {
        let (mut ours, mut invalid) = (None, Vec::new());
        for stored in read_records(self.deps).await? {
            match stored {
                Ok(stored)
                    if (&stored.record.namespace, &stored.record.claim)
                        == (&self.request.namespace, &self.request.claim) =>
                {
                    ours = Some(stored);
                }
                Ok(_) => {}
                Err(error) => invalid.push(error),
            }
        }
        if ours.is_none() && !invalid.is_empty() {
            // It may be that of this claim, whose volume it names. Those of other volumes do not concern this move.
            let claim = self.read_claim().await?;
            let is_bound_to = |id: &VolumeId| {
                let volume = |claim: &PersistentVolumeClaim| claim.spec.as_ref()?.volume_name.clone();
                claim.as_ref().is_none_or(|claim| volume(claim).as_deref() == Some(id.as_str()))
            };
            let is_ours =
                |error: &MoveError| matches!(error, MoveError::InvalidRecord { id, .. } if is_bound_to(id));
            if let Some(at) = invalid.iter().position(is_ours) {
                return Err(invalid.swap_remove(at));
            }
        }
        Ok(ours)
    }

    async fn read_claim(&self) -> Result<Option<PersistentVolumeClaim>, MoveError> {
        let claims = Api::namespaced(self.deps.client.clone(), &self.request.namespace);
        let claim = with_timeout(claims.get(&self.request.claim)).await;
        none_if_not_found(claim).map_err(api_error("read the claim"))
    }

    async fn read_volume(&self, name: &str) -> Result<Option<PersistentVolume>, MoveError> {
        let found = with_timeout(self.volumes().get(name)).await;
        none_if_not_found(found).map_err(api_error("read the PersistentVolume"))
    }

    fn volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.deps.client.clone())
    }

    fn records(&self) -> Api<ConfigMap> {
        records(self.deps)
    }

    fn rejected(&self, source: MoveRejection) -> MoveError {
        let MoveRequest { namespace, claim, .. } = self.request.clone();
        MoveError::Rejected { namespace, claim, source }
    }
}

fn records(deps: &MoveDeps) -> Api<ConfigMap> {
    Api::namespaced(deps.client.clone(), &deps.namespace)
}

/// Reads all records. One that can't be read is an error of its own.
async fn read_records(deps: &MoveDeps) -> Result<Vec<Result<StoredRecord, MoveError>>, MoveError> {
    let (records, params) = (records(deps), ListParams::default());
    let listed = with_timeout(records.list(&params)).await.map_err(api_error("list the records of moves"))?;
    let stored = |object: ConfigMap| {
        let name = object.metadata.name.clone().unwrap_or_default();
        let id: VolumeId = name.strip_prefix(RECORD_PREFIX)?.parse().ok()?;
        let text = object.data.as_ref().and_then(|data| data.get(RECORD_KEY)).map(String::as_str);
        Some(match MoveRecord::parse(text.unwrap_or_default()) {
            Ok(record) => Ok(StoredRecord { object, record, id }),
            Err(source) => {
                Err(MoveError::InvalidRecord { namespace: deps.namespace.clone(), name, id, source })
            }
        })
    };
    Ok(listed.items.into_iter().filter_map(stored).collect())
}

fn record_data(record: &MoveRecord) -> BTreeMap<String, String> {
    let text = serde_json::to_string(record).expect("a record is JSON");
    BTreeMap::from([(RECORD_KEY.to_owned(), text)])
}

fn api_error(call: &'static str) -> impl FnOnce(kube::Error) -> MoveError {
    move |source| MoveError::Api { call, source }
}

impl fmt::Debug for MoveDeps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MoveDeps").field("driver", &self.driver).finish_non_exhaustive()
    }
}

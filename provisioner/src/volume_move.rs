//! Moves the volume of a claim to another node, while no pod uses it.
//!
//! The claim is not touched but for its selected node. The PersistentVolume is deleted with its data retained; without it,
//! no pod is scheduled to the volume, and no kubelet mounts it. Then the data are copied, and a PersistentVolume of the same
//! name, for the same claim, is created on the other node: the volume controller binds the claim to it again, though it is
//! Lost in between. A name exists once, so the data are used in one place, however many moves and cancellations run. What is
//! left of the other copy is removed last.
//!
//! A ConfigMap records the move: the PersistentVolume as it was, and whether the copy is complete. Each step is decided from
//! that and from the PersistentVolume, so each can be killed and repeated.
//!
//! *Source:* `pv_controller.go`, `syncBoundClaim`: a claim whose volume exists and names its UID is bound.

pub(crate) mod decide;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client};
use serde_json::json;

use crate::api::call::{none_if_not_found, status_code};
use crate::api::timeout::with_timeout;
use crate::id::VolumeId;
use crate::identity::SELECTED_NODE;
use crate::name::DriverName;
use crate::objects::store_name;
use crate::step::{StepHook, StepRunner, VolumeStep};
use crate::store::ErrorSource;
use crate::store_id::StoreId;
use decide::{MoveAction, MoveRecord, MoveRejection, check_volume, find_user, plan_move};

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
}

/// Acts on nodes.
///
/// # Contract
/// Each method can be called again after an error or a kill, and also while a call that was given up still runs.
#[async_trait]
pub trait VolumeCarrier: Send + Sync + fmt::Debug {
    /// Checks that a volume can be copied: it exists and is not mounted, and the other node has room in that store and
    /// no volume of this name. Changes nothing.
    async fn check(&self, copy: &VolumeCopy) -> Result<(), ErrorSource>;

    /// Copies a volume that is not mounted, and verifies the copy. Returns its store once it is complete and durable, at
    /// once if an earlier call for this owner has made it.
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
    #[error("can't {action} volume {id}: repeat the command to resume, or cancel the move with --cancel")]
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
    #[error("can't read ConfigMap {namespace}/{name}: it is not the record of a move; correct or delete it")]
    InvalidRecord {
        /// The namespace.
        namespace: String,
        /// The name.
        name: String,
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

/// Lists the moves in progress of volumes that were on this node, and may have no PersistentVolume now.
///
/// # Errors
/// [`MoveError::Api`], [`MoveError::InvalidRecord`].
pub async fn list_moves(deps: &MoveDeps, source: &str) -> Result<Vec<MoveRequest>, MoveError> {
    let records = read_records(deps).await?.into_iter().map(|stored| stored.record);
    let of_node = records.filter(|record| record.source() == Some(source));
    let request = |record: MoveRecord| MoveRequest {
        namespace: record.namespace,
        claim: record.claim,
        target: (!record.is_cancelled).then_some(record.target),
    };
    Ok(of_node.map(request).collect())
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

impl StoredRecord {
    fn uid(&self) -> &str {
        self.object.metadata.uid.as_deref().unwrap_or_default()
    }
}

impl VolumeMove<'_> {
    async fn run(&self) -> Result<MoveOutcome, MoveError> {
        let mut reason = None;
        loop {
            let Some(stored) = self.read_record().await? else {
                match self.start().await? {
                    Some(outcome) => return Ok(outcome),
                    None => continue,
                }
            };
            let record = &stored.record;
            match &self.request.target {
                None if !record.is_cancelled => {
                    self.cancel(&stored).await?;
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
                MoveAction::RecordVolume => {
                    self.update(&stored, MoveRecord { volume: Some(found), ..record.clone() }).await?;
                }
                MoveAction::Abandon(rejection) => {
                    self.remove_record(&stored).await?;
                    return match rejection {
                        Some(rejection) => Err(self.rejected(rejection)),
                        None => Ok(MoveOutcome::Stayed(reason)),
                    };
                }
                MoveAction::Freeze => self.freeze(&found, stored.uid()).await?,
                MoveAction::Delete => self.delete(&found).await?,
                MoveAction::RemoveFinalizers => self.remove_finalizers(&found).await?,
                MoveAction::Copy => match self.find_obstacle(record).await? {
                    // The volume goes back: its pod, or its deletion, needs it there.
                    Some(found) => {
                        reason = Some(found);
                        self.cancel(&stored).await?;
                    }
                    None => self.copy(&stored).await?,
                },
                MoveAction::Create(volume) => {
                    self.create(&volume).await?;
                    if !self.has_claim(record).await? {
                        return self.end_without_claim(&stored).await;
                    }
                }
                MoveAction::Settle { .. } if !self.has_claim(record).await? => {
                    return self.end_without_claim(&stored).await;
                }
                MoveAction::Settle { node } => {
                    self.settle(&stored, &node).await?;
                    let source = record.source().unwrap_or_default();
                    return Ok(if node == source {
                        MoveOutcome::Stayed(reason)
                    } else {
                        MoveOutcome::Moved { source: source.to_owned() }
                    });
                }
            }
        }
    }

    /// Checks the claim and both nodes, and creates the record. `None`: it exists now.
    async fn start(&self) -> Result<Option<MoveOutcome>, MoveError> {
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
            return Ok(Some(MoveOutcome::AlreadyThere));
        }
        if let Some(user) = self.find_pod().await? {
            return Err(self.rejected(user));
        }
        let copy = VolumeCopy {
            id: id.clone(),
            owner: String::new(),
            source: source.to_owned(),
            target: target.clone(),
            store: store_name(&volume).map(str::to_owned),
        };
        let checked = self.deps.carrier.check(&copy).await;
        checked.map_err(|source| MoveError::Check { id: id.clone(), target: target.clone(), source })?;
        let record = MoveRecord {
            namespace: namespace.clone(),
            claim: name.clone(),
            claim_uid: claim.metadata.uid.unwrap_or_default(),
            target: target.clone(),
            volume: None,
            copy: None,
            is_cancelled: false,
        };
        let object = ConfigMap {
            metadata: ObjectMeta { name: Some(format!("{RECORD_PREFIX}{id}")), ..ObjectMeta::default() },
            data: Some(record_data(&record)),
            ..ConfigMap::default()
        };
        let (records, params) = (self.records(), PostParams::default());
        let create = with_timeout(records.create(&params, &object));
        // Also if it exists by now: another call has just begun.
        let created = self.steps.run_async(VolumeStep::RecordMove, create).await;
        created.map(|_| None).map_err(api_error("create the record of the move"))
    }

    /// Ends a move whose claim was deleted: the PersistentVolume is there, so its node deletes or keeps it by its policy, and
    /// perhaps has done so. A copy on the other node is an orphan.
    async fn end_without_claim(&self, stored: &StoredRecord) -> Result<MoveOutcome, MoveError> {
        self.remove_record(stored).await?;
        Ok(MoveOutcome::Stayed(Some(MoveRejection::ClaimDeleted)))
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

    async fn copy(&self, stored: &StoredRecord) -> Result<(), MoveError> {
        let record = &stored.record;
        let copy = VolumeCopy {
            id: stored.id.clone(),
            owner: stored.uid().to_owned(),
            source: record.source().unwrap_or_default().to_owned(),
            target: record.target.clone(),
            store: record.volume.as_ref().and_then(store_name).map(str::to_owned),
        };
        let copied = self.deps.carrier.copy(&copy).await;
        let store = copied.map_err(|source| MoveError::Node { action: "copy", id: copy.id, source })?;
        self.update(stored, MoveRecord { copy: Some(store.to_string()), ..record.clone() }).await
    }

    /// Ends the move on the nodes, first on the one that has the PersistentVolume: nothing is removed elsewhere unless the
    /// volume exists there.
    async fn settle(&self, stored: &StoredRecord, node: &str) -> Result<(), MoveError> {
        let record = &stored.record;
        let others = [record.source(), Some(record.target.as_str())].into_iter().flatten();
        for node in std::iter::once(node).chain(others.filter(|other| *other != node)) {
            let settled = self.deps.carrier.settle(node, &stored.id).await;
            settled.map_err(|source| MoveError::Node { action: "settle", id: stored.id.clone(), source })?;
        }
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

    /// Replaces exactly this version of the record.
    async fn update(&self, stored: &StoredRecord, record: MoveRecord) -> Result<(), MoveError> {
        let object = ConfigMap { data: Some(record_data(&record)), ..stored.object.clone() };
        let name = object.metadata.name.as_deref().unwrap_or_default();
        let (records, params) = (self.records(), PostParams::default());
        let replace = with_timeout(records.replace(name, &params, &object));
        self.step(VolumeStep::RecordMove, "change the record of the move", replace).await
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
        let is_ours = |stored: &StoredRecord| {
            let record = &stored.record;
            (&record.namespace, &record.claim) == (&self.request.namespace, &self.request.claim)
        };
        Ok(read_records(self.deps).await?.into_iter().find(is_ours))
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

async fn read_records(deps: &MoveDeps) -> Result<Vec<StoredRecord>, MoveError> {
    let (records, params) = (records(deps), ListParams::default());
    let listed = with_timeout(records.list(&params)).await.map_err(api_error("list the records of moves"))?;
    let mut found = Vec::new();
    for object in listed.items {
        let name = object.metadata.name.clone().unwrap_or_default();
        let Some(id) = name.strip_prefix(RECORD_PREFIX).and_then(|id| id.parse().ok()) else { continue };
        let text = object.data.as_ref().and_then(|data| data.get(RECORD_KEY)).map(String::as_str);
        let record = serde_json::from_str(text.unwrap_or_default())
            .map_err(|source| MoveError::InvalidRecord { namespace: deps.namespace.clone(), name, source })?;
        found.push(StoredRecord { object, record, id });
    }
    Ok(found)
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
